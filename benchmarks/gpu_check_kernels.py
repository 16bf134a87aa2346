"""Checks of gpu_check.py that time kernels at real models' shapes, beside their peers."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gpu_check_bench import BF16, DECODES, FP8, ROWS, TOY, Bench, Row, config_of, judged, torch_time
from gpu_check_calls import (
  attention_inputs,
  bf16_expert_inputs,
  compaction_inputs,
  expert_inputs,
  linear_inputs,
  packed_inputs,
  row_attention,
  triton_candidate,
  with_gradients,
)
from kernel_resources import EXPERTS, MODELS

from sprl.cache.compaction import compress
from sprl.cache.layer import LayerCache
from sprl.cache.layout import cache_layout
from sprl.config import UNQUANTISED, Cache
from sprl.kernels import block_matmul, decode_attention, eviction, grouped_matmul, packed_attention
from sprl.kernels.cost import Cost
from sprl.quant.block import quantise_groups


def check_attention(bench: Bench) -> Iterator[Row]:
  """Time decode attention beside XLA and cuDNN, which do not support FP8."""

  def library(implementation):
    def attend(q, k, v, length, scales):  # k, v: [B, S, K, D]
      return jax.nn.dot_product_attention(
        q[:, None], k, v, query_seq_lengths=jnp.ones_like(length), key_value_seq_lengths=length, implementation=implementation
      )

    return attend

  def transposed(q, k, v, length, scales):  # the library's layout; XLA reads the transposed cache in place, cuDNN needs a copy
    return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), length, scales

  peers = {'xla': lambda *inputs: library('xla')(*transposed(*inputs)), 'cudnn': library('cudnn')}
  for name, B, S in bench.sizes(DECODES, [('toy', 2, 64)]):
    model = MODELS.get(name, TOY)
    H, K, D, _, _ = model
    bf16 = None
    for dtype, share in ((BF16, False), (FP8, False), (BF16, True)):
      make = partial(attention_inputs, model, B, S, dtype)
      row = bench.timed(
        'decode_attention',
        f'{name} B {B} S {S} {dtype}{" share" * share}',
        partial(decode_attention.decode_attention, share=share, kernels='mosaic_gpu'),
        make,
        decode_attention.cost(B, H, K, S, D, dtype, share),
        peers if dtype == BF16 and not share else None,
        {'cudnn': lambda key, make=make: transposed(*make(key))},
      )
      if dtype == BF16 and not share:
        bf16 = row['us']
        yield judged(torch_time(bench, row, 'decode', B, H, K, S, D), {'share of ceiling': 0.8, 'times best peer': 1.0})
      elif dtype == FP8:
        yield judged(row | {'times bf16': bf16 / row['us']}, {'times bf16': 1.7})
      else:
        yield row


def check_rows(bench: Bench) -> Iterator[Row]:
  """Time the learner's attention with gradients, beside peers that take a mask of packed rows and two that do not."""

  def library(implementation):
    return lambda q, k, v, visible: jax.nn.dot_product_attention(
      q, k, v, mask=visible.mask(k.shape[1]), is_causal=True, implementation=implementation
    )

  def unmasked(q, k, v, visible):  # the time of the library for a row of one segment
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')

  peers: dict[str, Callable] = {'reference': packed_attention.reference, 'xla': library('xla')}
  peers |= {} if bench.rehearse else {'cudnn': library('cudnn')}
  with contextlib.suppress(ImportError):
    import tokamax  # pyright: ignore[reportMissingImports]

    peers['tokamax'] = lambda q, k, v, visible: tokamax.dot_product_attention(
      q, k, v, mask=visible.mask(k.shape[1]), is_causal=True
    )
  for name, R, T in bench.sizes(ROWS, [('toy', 1, 64)]):
    model = MODELS.get(name, TOY)
    H, K, D, _, _ = model
    least, case, make = (
      packed_attention.cost(R, T, H, K, D, backward=True),
      f'{name} {R} x {T}',
      partial(packed_inputs, model, R, T),
    )
    calls = {peer: with_gradients(call) for peer, call in peers.items()}
    row = bench.timed('rows', case, with_gradients(row_attention(bench)), make, least, calls)
    row |= {} if 'tokamax' in peers else {'note': f'{row.get("note", "")} tokamax: not installed'.strip()}
    yield judged(row, {'times best peer': 1.0})
    bounds = {'cudnn, causal': (unmasked, make), 'pallas, all pairs, float16': (pallas_rows, partial(in_float16, make))}
    for bound, (call, make_inputs) in bounds.items():
      try:
        yield bench.timed(f'rows by {bound}', case, with_gradients(call), make_inputs, least)
      except Exception as error:
        yield {'check': f'rows by {bound}', 'case': case, 'note': f'{type(error).__name__}: {error}'[:80]}
    torch = bench.torch.get('rows', {}).get(json.dumps((R, T, H, K, D)))
    if torch is not None:
      yield {'check': 'rows by torch, causal', 'case': case, 'us': torch, 'TFLOP/s': least.flops / torch / 1e6}


def in_float16(make: Callable, key: jax.Array) -> tuple[Any, ...]:
  """Return the arrays of `make` in float16, the only type for which the backward pass of Pallas's attention compiles."""
  return tuple(x.astype(jnp.float16) if x.dtype == BF16 else x for x in make(key))


def pallas_rows(q, k, v, visible):
  """Return Pallas's own attention for Hopper GPUs. Its backward pass supports no mask."""
  from jax.experimental.pallas.ops.gpu import attention_mgpu

  config = attention_mgpu.TuningConfig(
    block_q=64, block_kv=128, max_concurrent_steps=2, compute_wgs_bwd=2,
    block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64,
  )  # fmt: skip
  return attention_mgpu.attention(q * q.shape[-1] ** -0.5, k, v, config)


def check_matmul(bench: Bench) -> Iterator[Row]:
  """Time block-scaled products of given codes beside Triton and bfloat16 cuBLAS, and the quantisation of tokens."""

  def bf16(x, x_scale, w, w_scale):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))

  candidate = triton_candidate(bench)
  cases = [('Qwen2.5-7B', name, M) for M in (16, 64, 256, 1024, 8192) for name in ('gate', 'down')]
  cases += [('Qwen2.5-7B', 'q', 64), ('Qwen2.5-1.5B', 'gate', 64), ('Qwen2.5-1.5B', 'down', 64)]
  for name, linear, M in bench.sizes(cases, [('toy', 'q', 5)]):
    N, K = MODELS.get(name, TOY).linears[linear]
    make = partial(linear_inputs, M, N, K)

    def unscaled(key, M=M, N=N, K=K):
      x, w = jax.random.split(key)
      return jax.random.normal(x, (M, K), BF16), None, jax.random.normal(w, (N, K), BF16), None

    multiply = partial(block_matmul.block_matmul, rows=128, group=128, dtype=BF16, kernels='mosaic_gpu')
    case, least = f'{name} {linear} M {M}', block_matmul.cost(M, N, K)
    row = bench.timed('block_matmul', case, multiply, make, least, {'bf16': bf16, **candidate}, {'bf16': unscaled}, fp8=True)
    row |= {'times bf16': row['bf16 us'] / row['us']} if 'bf16 us' in row else {}
    yield judged(row, {'times bf16': 1.6 if M <= 64 else 1.3}) if M <= 64 or M >= 1024 else row
  name = 'Qwen3-30B-A3B'
  for linear, tokens in bench.sizes([(linear, M) for M in (64, 256, 4096) for linear in ('gate', 'down')], [('gate', 5)]):
    (N, K), (X, chosen) = bench.sizes((MODELS[name].linears[linear], EXPERTS[name]), ((64, 256), (4, 2)))
    least = block_matmul.grouped_cost(tokens * chosen, min(X, tokens * chosen), N, K)
    multiply = partial(block_matmul.grouped_matmul, rows=128, group=128, dtype=BF16, kernels='mosaic_gpu')
    case, make = f'{name} {linear} M {tokens}x{chosen} of {X}', partial(expert_inputs, X, chosen, tokens, N, K)
    yield bench.timed('grouped_matmul', case, multiply, make, least, fp8=True)
  yield from bf16_experts(bench)
  for M, K in bench.sizes([(64, 3584), (8192, 3584)], [(4, 256)]):
    yield bench.timed(
      'quantise tokens',
      f'{M}x{K}',
      partial(quantise_groups, format='float32'),
      lambda key, M=M, K=K: (jax.random.normal(key, (M, K), BF16),),
      Cost(M * K * 3 + M * K // 32, 0),
    )


def bf16_experts(bench: Bench) -> Iterator[Row]:
  """Time bfloat16 products of experts and their gradients, beside the loop over blocks."""
  name, loop = 'Qwen3-30B-A3B', (grouped_matmul.grouped_reference, grouped_matmul.outer_reference)
  kernels = [partial(each, kernels='mosaic_gpu') for each in (grouped_matmul.grouped_matmul, grouped_matmul.grouped_outer)]
  for linear, tokens in bench.sizes([('gate', 64), ('gate', 4096), ('down', 4096)], [('gate', 65)]):
    (N, K), (X, chosen) = bench.sizes((MODELS[name].linears[linear], EXPERTS[name]), ((64, 192), (4, 2)))
    rows, met = tokens * chosen, min(X, tokens * chosen)
    once, outer = grouped_matmul.cost(rows, met, N, K), grouped_matmul.outer_cost(rows, X, N, K)
    calls = {
      'y': (lambda matmul, outer, x, dy, w, *owners: matmul(x, w, *owners), once),
      'dx': (lambda matmul, outer, x, dy, w, *owners: matmul(dy, w, *owners, back=True), once),
      'dw': (lambda matmul, outer, x, dy, w, *owners: outer(dy, x, *owners, experts=len(w)), outer),
    }
    for output in ('y', 'dx', 'dw') if tokens > 64 else ('y',):  # few tokens: a decode step, without gradients
      call, least = calls[output]
      case, make = f'{name} {linear} M {tokens}x{chosen} of {X} {output}', partial(bf16_expert_inputs, X, chosen, tokens, N, K)
      yield bench.timed('grouped_matmul bf16', case, partial(call, *kernels), make, least, {'loop': partial(call, *loop)})


def check_eviction(bench: Bench) -> Iterator[Row]:
  """Time compaction and the comparison of keys beside their references."""
  names, B, S, N = bench.sizes((('Qwen2.5-0.5B', 'Qwen2.5-7B'), 256, 640, 512), (('toy',), 2, 40, 24))

  def moved(call):  # the outputs are the donated inputs of the next call
    return lambda k, v, rows, keep: tuple(call(k, v, rows, keep))

  for name, dtype in itertools.product(names, (BF16, FP8)):
    model = MODELS.get(name, TOY)
    row = bench.timed(
      'compact',
      f'{name} B {B} S {S} N {N} {dtype}',
      moved(partial(eviction.compact, ordered=True, kernels='mosaic_gpu')),
      partial(compaction_inputs, model, B, S, N, dtype),
      eviction.compact_cost(B, model.kv, N, model.width, dtype),
      {'reference': moved(eviction.compact_reference)},
      moving=2,
    )
    yield judged(row, {'share of ceiling': 0.7})
  name, B = names[-1], bench.sizes(32, 2)
  _, K, D, _, _ = MODELS.get(name, TOY)
  compare = partial(eviction.similarity, threshold=0.5, nearest_of_none=0)
  yield bench.timed(
    'similarity',
    f'{name} B {B} S {S}',
    jax.vmap(partial(compare, kernels='mosaic_gpu')),
    lambda key: (jax.random.normal(key, (B, K, S, D), BF16) + 1, jnp.full(B, S)),
    eviction.similarity_cost(B, K, S, D),
    {'reference': jax.vmap(partial(compare, kernels='reference'))},
  )
  yield from whole_evictions(bench)


def whole_evictions(bench: Bench) -> Iterator[Row]:
  """Time the compression of a layer in all rows: scores and top-k by XLA, the rest by kernels.

  The lower bound reads all keys and moves the kept ones.
  """
  name, B, prompt, budget, interval, window = bench.sizes(('Qwen2.5-7B', 256, 512, 512, 128, 16), ('toy', 2, 24, 24, 8, 4))
  for method in ('snapkv', 'rkv'):
    cache = Cache(budget=budget, interval=interval, window=window, method=method)
    layout = cache_layout(config_of(name), cache, UNQUANTISED, prompt, 4 * prompt, BF16, kernels='mosaic_gpu')
    S, K, D = layout.slots, layout.kv_heads, layout.head_dim

    def make(key, layout=layout, S=S, K=K, D=D):
      k, v, q = jax.random.split(key, 3)
      empty = LayerCache.empty(layout, B, S)
      assert empty.queries is not None  # both methods use the newest queries
      layer = dataclasses.replace(
        empty,
        k=jax.random.normal(k, (B, K, S, D), BF16),
        v=jax.random.normal(v, (B, K, S, D), BF16),
        queries=jax.random.normal(q, empty.queries.shape, empty.queries.dtype),
        position=jnp.broadcast_to(jnp.arange(S), (B, K, S)),
      )
      return layer, jnp.ones(B, bool), jnp.full(B, S), jnp.full(B, S - 1)

    def call(layer, due, occupied, now, layout=layout):
      return compress(layout, layer, due, occupied=occupied, newest=now, gone=now)[:1]

    least = Cost(2 * B * K * S * D + eviction.compact_cost(B, K, budget, D, BF16).bytes, 0)
    yield bench.timed(f'eviction {method}', f'{name} B {B} S {S}', call, make, least, moving=1)


def check_append(bench: Bench) -> Iterator[Row]:
  """Time writing the keys of a token in place, which XLA does in one program."""
  name, B, S = bench.sizes(('Qwen2.5-7B', 256, 4096), ('toy', 2, 40))
  _, K, D, _, _ = MODELS.get(name, TOY)

  def append(k, new, slot):
    return (k.at[jnp.arange(B)[:, None], :, slot[:, None]].set(new[:, None], mode='drop'),)

  def make(key):
    return jnp.zeros((B, K, S, D), BF16), jax.random.normal(key, (B, K, D), BF16), jax.random.randint(key, (B,), 0, S)

  yield bench.timed('append (XLA)', f'{name} B {B}', append, make, Cost(4 * B * K * D, 0), moving=1)
