"""Checks of gpu_check.py that time kernels at real models' shapes, beside their peers."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from gpu_check_bench import BF16, DECODES, FP8, ROWS, TOY, Bench, Case, Row, Rows, config_of, judged, torch_time
from gpu_check_calls import (
  append_inputs,
  append_reference,
  attention_inputs,
  bf16_expert_inputs,
  compaction_inputs,
  expert_inputs,
  linear_inputs,
  norm_inputs,
  norm_kernel,
  norm_reference,
  packed_inputs,
  quantisations,
  transposed_inputs,
  triton_candidate,
  with_gradients,
)
from kernel_resources import EXPERTS, MODELS

from sprl.cache.compaction import compress
from sprl.cache.layer import LayerCache
from sprl.cache.layout import cache_layout
from sprl.config import UNQUANTISED, Cache
from sprl.kernels import block_matmul, decode_attention, eviction, grouped_matmul, hopper_append, packed_attention, quantise
from sprl.kernels.cost import Cost


def check_attention(bench: Bench) -> Iterator[Case]:
  """Time decode attention beside XLA and cuDNN, which do not support FP8."""
  for name, B, S in bench.sizes(DECODES, [('toy', 2, 64)]):
    for dtype, share in ((BF16, False), (FP8, False), (BF16, True)):
      yield Case('decode_attention', attention_case(name, B, S, dtype, share), partial(attend, bench, name, B, S, dtype, share))


def attention_case(name: str, B: int, S: int, dtype: Any, share: bool = False) -> str:
  """Return the name of a case of decode attention."""
  return f'{name} B {B} S {S} {dtype}{" share" * share}'


def attend(bench: Bench, name: str, B: int, S: int, dtype: Any, share: bool, before: Rows) -> Row:
  """Time decode attention on full rows of S slots."""

  def library(implementation):
    def call(q, k, v, length, scales):  # k, v: [B, S, K, D]
      return jax.nn.dot_product_attention(
        q[:, None], k, v, query_seq_lengths=jnp.ones_like(length), key_value_seq_lengths=length, implementation=implementation
      )

    return call

  def transposed(q, k, v, length, scales):  # the library's layout; XLA reads the transposed cache in place, cuDNN needs a copy
    return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), length, scales

  peers = {'xla': lambda *inputs: library('xla')(*transposed(*inputs)), 'cudnn': library('cudnn')}
  model = MODELS.get(name, TOY)
  H, K, D, _, _ = model
  make = partial(attention_inputs, model, B, S, dtype)
  plain = dtype == BF16 and not share
  row = bench.timed(
    'decode_attention',
    attention_case(name, B, S, dtype, share),
    partial(decode_attention.decode_attention, share=share, kernels='mosaic_gpu'),
    make,
    decode_attention.cost(B, H, K, S, D, dtype, share),
    peers if plain else None,
    {'cudnn': lambda key: transposed(*make(key))},
  )
  if plain:
    return judged(torch_time(bench, row, 'decode', B, H, K, S, D), {'share of ceiling': 0.8, 'times best peer': 1.0})
  if dtype != FP8:
    return row
  bf16 = before.get(('decode_attention', attention_case(name, B, S, BF16)), {}).get('us')
  return judged(row | ({'times bf16': bf16 / row['us']} if bf16 else {}), {'times bf16': 1.7})


def check_rows(bench: Bench) -> Iterator[Case]:
  """Time the learner's attention with gradients, beside peers that accept the mask of packed rows and others that do not."""
  for name, R, T in bench.sizes(ROWS, [('toy', 1, 64)]):
    case = f'{name} {R} x {T}'
    yield Case('rows', case, partial(packed_rows, bench, case, name, R, T))
    for bound in ('cudnn, causal', 'pallas, all pairs, float16'):
      yield Case(f'rows by {bound}', case, partial(unmasked_rows, bench, bound, case, name, R, T))
    H, K, D, _, _ = MODELS.get(name, TOY)
    if (torch := bench.torch.get('rows', {}).get(json.dumps((R, T, H, K, D)))) is not None:
      flops = packed_attention.cost(R, T, H, K, D, backward=True).flops
      row = {'us': torch, 'TFLOP/s': flops / torch / 1e6}
      yield Case('rows by torch, causal', case, lambda before, row=row: row)


def packed_rows(bench: Bench, case: str, name: str, R: int, T: int, before: Rows) -> Row:
  """Time attention of packed rows and its gradients."""

  def library(implementation):
    return lambda q, k, v, visible: jax.nn.dot_product_attention(
      q, k, v, mask=visible.mask(k.shape[1]), is_causal=True, implementation=implementation
    )

  peers: dict[str, Callable] = {'reference': packed_attention.reference, 'xla': library('xla')}
  peers |= {} if bench.rehearse else {'cudnn': library('cudnn')}
  with contextlib.suppress(ImportError):
    import tokamax  # pyright: ignore[reportMissingImports]

    peers['tokamax'] = lambda q, k, v, visible: tokamax.dot_product_attention(
      q, k, v, mask=visible.mask(k.shape[1]), is_causal=True
    )
  model = MODELS.get(name, TOY)
  H, K, D, _, _ = model
  calls = {peer: with_gradients(call) for peer, call in peers.items()}
  least, make = packed_attention.cost(R, T, H, K, D, backward=True), partial(packed_inputs, model, R, T)
  attend = partial(packed_attention.packed_attention, kernels='mosaic_gpu')
  row = bench.timed('rows', case, with_gradients(attend), make, least, calls)
  row |= {} if 'tokamax' in peers else {'note': f'{row.get("note", "")} tokamax: not installed'.strip()}
  return judged(row, {'times best peer': 1.0})


def unmasked_rows(bench: Bench, bound: str, case: str, name: str, R: int, T: int, before: Rows) -> Row:
  """Time a library's attention of rows with one segment. One that does not run is a note, not a failure."""

  def cudnn(q, k, v, visible):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')

  model = MODELS.get(name, TOY)
  H, K, D, _, _ = model
  make = partial(packed_inputs, model, R, T)
  call, inputs = (cudnn, make) if bound.startswith('cudnn') else (pallas_rows, partial(in_float16, make))
  try:
    least = packed_attention.cost(R, T, H, K, D, backward=True)
    return bench.timed(f'rows by {bound}', case, with_gradients(call), inputs, least)
  except Exception as error:
    return {'note': f'{type(error).__name__}: {error}'[:80]}


def in_float16(make: Callable, key: jax.Array) -> tuple[Any, ...]:
  """Return the arrays of `make` in float16, the only type for which the backward pass of Pallas's attention compiles."""
  return jax.tree.map(lambda x: x.astype(jnp.float16) if x.dtype == BF16 else x, make(key))


def pallas_rows(q, k, v, visible):
  """Return Pallas's own attention for Hopper GPUs. Its backward pass supports no mask."""
  from jax.experimental.pallas.ops.gpu import attention_mgpu

  config = attention_mgpu.TuningConfig(
    block_q=64, block_kv=128, max_concurrent_steps=2, compute_wgs_bwd=2,
    block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64,
  )  # fmt: skip
  return attention_mgpu.attention(q * q.shape[-1] ** -0.5, k, v, config)


def check_matmul(bench: Bench) -> Iterator[Case]:
  """Time block-scaled products of given codes beside Triton and bfloat16 cuBLAS, and products of experts."""
  cases = [('Qwen2.5-7B', name, M) for M in (256, 64, 16, 8192, 1024) for name in ('gate', 'down')]
  cases += [('Qwen2.5-7B', 'q', 256), ('Qwen2.5-1.5B', 'gate', 256), ('Qwen2.5-1.5B', 'down', 256), ('Qwen2.5-1.5B', 'k', 256)]
  for name, linear, M in bench.sizes(cases, [('toy', 'q', 5)]):
    yield Case('block_matmul', f'{name} {linear} M {M}', partial(multiply, bench, name, linear, M))
  name = 'Qwen3-30B-A3B'
  for linear, tokens in bench.sizes([(linear, M) for M in (64, 256, 4096) for linear in ('gate', 'down')], [('gate', 5)]):
    (N, K), (X, chosen) = bench.sizes((MODELS[name].linears[linear], EXPERTS[name]), ((64, 256), (4, 2)))
    case = f'{name} {linear} M {tokens}x{chosen} of {X}'
    yield Case('grouped_matmul', case, partial(multiply_experts, bench, case, X, chosen, tokens, N, K))
  yield from bf16_experts(bench)


def multiply(bench: Bench, name: str, linear: str, M: int, before: Rows) -> Row:
  """Time a block-scaled product of M tokens beside Triton's and the product in bfloat16."""
  N, K = MODELS.get(name, TOY).linears[linear]

  def bf16(x, x_scale, w, w_scale):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))

  def unscaled(key):
    x, w = jax.random.split(key)
    return jax.random.normal(x, (M, K), BF16), None, jax.random.normal(w, (N, K), BF16), None

  def call(x, x_scale, w, w_scale):
    return block_matmul.block_matmul(x, x_scale.T, w, w_scale, rows=128, group=128, dtype=BF16, kernels='mosaic_gpu')

  row = bench.timed(
    'block_matmul', f'{name} {linear} M {M}', call, partial(transposed_inputs, M, N, K), block_matmul.cost(M, N, K),
    {'bf16': bf16, **triton_candidate(bench)}, {'bf16': unscaled, 'triton': partial(linear_inputs, M, N, K)}, fp8=True,
  )  # fmt: skip
  row |= {'times bf16': row['bf16 us'] / row['us']} if 'bf16 us' in row else {}
  return judged(row, {'times bf16': 1.6 if M <= 64 else 1.0 if M < 1024 else 1.3})


def multiply_experts(bench: Bench, case: str, X: int, chosen: int, tokens: int, N: int, K: int, before: Rows) -> Row:
  """Time the block-scaled product of experts."""

  def call(x, x_scale, *weights):
    scales = x_scale.T.reshape(*x.shape[:2], -1)
    return block_matmul.grouped_matmul(x, scales, *weights, rows=128, group=128, dtype=BF16, kernels='mosaic_gpu')

  def make(key):  # with transposed scales, as `transposed_inputs`
    x, x_scale, *weights = expert_inputs(X, chosen, tokens, N, K, key)
    return x, x_scale.reshape(-1, x_scale.shape[-1]).T, *weights

  least = block_matmul.grouped_cost(tokens * chosen, min(X, tokens * chosen), N, K)
  return bench.timed('grouped_matmul', case, call, make, least, fp8=True)


def bf16_experts(bench: Bench) -> Iterator[Case]:
  """Time bfloat16 products of experts and their gradients, beside the loop over blocks."""
  name = 'Qwen3-30B-A3B'
  for linear, tokens in bench.sizes([('gate', 64), ('gate', 4096), ('down', 4096)], [('gate', 65)]):
    (N, K), (X, chosen) = bench.sizes((MODELS[name].linears[linear], EXPERTS[name]), ((64, 192), (4, 2)))
    for output in ('y', 'dx', 'dw') if tokens > 64 else ('y',):  # few tokens: a decode step, without gradients
      case = f'{name} {linear} M {tokens}x{chosen} of {X} {output}'
      yield Case('grouped_matmul bf16', case, partial(bf16_expert_product, bench, case, output, X, chosen, tokens, N, K))


def bf16_expert_product(
  bench: Bench, case: str, output: str, X: int, chosen: int, tokens: int, N: int, K: int, before: Rows
) -> Row:
  """Time the product of experts (y), or its gradient for the tokens (dx) or the weights (dw)."""
  loop = grouped_matmul.grouped_reference, grouped_matmul.outer_reference
  kernels = [partial(each, kernels='mosaic_gpu') for each in (grouped_matmul.grouped_matmul, grouped_matmul.grouped_outer)]
  rows, met = tokens * chosen, min(X, tokens * chosen)
  once, outer = grouped_matmul.cost(rows, met, N, K), grouped_matmul.outer_cost(rows, X, N, K)
  call, least = {
    'y': (lambda matmul, outer, x, dy, w, *owners: matmul(x, w, *owners), once),
    'dx': (lambda matmul, outer, x, dy, w, *owners: matmul(dy, w, *owners, back=True), once),
    'dw': (lambda matmul, outer, x, dy, w, *owners: outer(dy, x, *owners, experts=len(w)), outer),
  }[output]
  make = partial(bf16_expert_inputs, X, chosen, tokens, N, K)
  return bench.timed('grouped_matmul bf16', case, partial(call, *kernels), make, least, {'loop': partial(call, *loop)})


def check_quantise(bench: Bench) -> Iterator[Case]:
  """Time the kernels that quantise or normalise tokens, beside XLA: those of a decode step, then `codes` for other tokens."""
  (_, _, _, E, F), T = bench.sizes((MODELS['Qwen2.5-7B'], 256), (TOY, 8))
  yield Case('norm', f'{T}x{E} of 2', partial(normalise_tokens, bench, T, E, 2))
  cases = [('norm', T, E), ('gated activation', T, F), ('alone', T, E)]
  for first, T, M in [*cases, *bench.sizes([('alone', 64, E), ('alone', 8192, E)], [])]:
    yield Case('quantise', f'{first} {T}x{M}', partial(quantise_tokens, bench, first, T, M))


def quantise_tokens(bench: Bench, first: str, T: int, M: int, before: Rows) -> Row:
  """Time the quantisation of T tokens of M numbers. `first` names what the kernel computes before it quantises."""
  each = quantisations()[first]
  least, peers = quantise.cost(T, M, each.moved), {'xla': each.reference}
  return bench.timed('quantise', f'{first} {T}x{M}', each.kernel, partial(each.make, T, M), least, peers)


def normalise_tokens(bench: Bench, T: int, M: int, parts: int, before: Rows) -> Row:
  """Time the norm of a sum."""
  least = quantise.norm_cost(T, M, parts)
  return bench.timed(
    'norm', f'{T}x{M} of {parts}', norm_kernel, partial(norm_inputs, T, M, parts), least, {'xla': norm_reference}
  )


def check_eviction(bench: Bench) -> Iterator[Case]:
  """Time compaction and the comparison of keys beside their references, and the compression of a whole layer."""
  names, B, S, N = bench.sizes((('Qwen2.5-7B', 'Qwen2.5-0.5B'), 256, 640, 512), (('toy',), 2, 40, 24))
  for name, dtype in itertools.product(names, (BF16, FP8)):
    case = f'{name} B {B} S {S} N {N} {dtype}'
    yield Case('compact', case, partial(move_slots, bench, case, name, B, S, N, dtype))
  B = bench.sizes(32, 2)
  yield Case('similarity', f'{names[0]} B {B} S {S}', partial(compare_keys, bench, names[0], B, S))
  for method in ('snapkv', 'rkv'):
    yield Case(f'eviction {method}', names[0], partial(compress_layer, bench, method))


def move_slots(bench: Bench, case: str, name: str, B: int, S: int, N: int, dtype: Any, before: Rows) -> Row:
  """Time compaction of N of S slots."""
  model = MODELS.get(name, TOY)

  def moved(call):  # the outputs are the donated inputs of the next call
    return lambda k, v, rows, keep: tuple(call(k, v, rows, keep))

  row = bench.timed(
    'compact',
    case,
    moved(partial(eviction.compact, kernels='mosaic_gpu')),
    partial(compaction_inputs, model, B, S, N, dtype),
    eviction.compact_cost(B, model.kv, N, model.width, dtype),
    {'reference': moved(eviction.compact_reference)},
    moving=2,
  )
  return judged(row, {'share of ceiling': 0.7})


def compare_keys(bench: Bench, name: str, B: int, S: int, before: Rows) -> Row:
  """Time the comparison of a row's keys with each other."""
  _, K, D, _, _ = MODELS.get(name, TOY)
  compare = partial(eviction.similarity, threshold=0.5, nearest_of_none=0)
  return bench.timed(
    'similarity',
    f'{name} B {B} S {S}',
    jax.vmap(partial(compare, kernels='mosaic_gpu')),
    lambda key: (jax.random.normal(key, (B, K, S, D), BF16) + 1, jnp.full(B, S)),
    eviction.similarity_cost(B, K, S, D),
    {'reference': jax.vmap(partial(compare, kernels='reference'))},
  )


def compress_layer(bench: Bench, method: Literal['snapkv', 'rkv'], before: Rows) -> Row:
  """Time the compression of a layer in all rows: scores and top-k by XLA, the rest by kernels.

  The lower bound reads all keys and moves the kept ones.
  """
  name, B, prompt, budget, interval, window = bench.sizes(('Qwen2.5-7B', 256, 512, 512, 128, 16), ('toy', 2, 24, 24, 8, 4))
  cache = Cache(budget=budget, interval=interval, window=window, method=method)
  layout = cache_layout(config_of(name), cache, UNQUANTISED, prompt, 4 * prompt, BF16, kernels='mosaic_gpu')
  S, K, D = layout.slots, layout.kv_heads, layout.head_dim

  def make(key):
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

  def call(layer, due, occupied, now):
    return compress(layout, layer, due, occupied=occupied, newest=now, gone=now)[:1]

  least = Cost(2 * B * K * S * D + eviction.compact_cost(B, K, budget, D, BF16).bytes, 0)
  return bench.timed(f'eviction {method}', name, call, make, least, moving=1) | {'B': B, 'S': S}


def check_append(bench: Bench) -> Iterator[Case]:
  """Time the append of a token per row to the caches of a layer, in place."""
  for name, B, S in bench.sizes([('Qwen2.5-7B', 256, 4096), ('Qwen3-8B', 256, 576)], [('toy', 2, 40)]):
    for dtype in (BF16, FP8):
      case = f'{name} B {B} {dtype}'
      yield Case('append', case, partial(append_token, bench, case, name, B, S, dtype))


def append_token(bench: Bench, case: str, name: str, B: int, S: int, dtype: Any, before: Rows) -> Row:
  """Time the append of a token per row from the joined product of q, k and v."""
  model = MODELS.get(name, TOY)

  def moved(append):  # the outputs are the donated inputs of the next call
    def call(k, v, old_queries, rest, x, *others):
      q, after = append(x, {'k': k, 'v': v} | rest, *others)
      return after['k'], after['v'], q

    return call

  def make(key):
    stored, *others = append_inputs(model, B, S, dtype, key)
    return stored.pop('k'), stored.pop('v'), jnp.zeros((B, model.queries, model.width), BF16), stored, *others

  read = 2 * (model.queries + 2 * model.kv) * model.width  # bytes of a token's product
  written = 2 * model.queries * model.width + 2 * model.kv * model.width * jnp.dtype(dtype).itemsize
  kernel, reference = hopper_append.append, lambda x, stored, *others: append_reference(stored, x, *others)
  return bench.timed('append', case, moved(kernel), make, Cost(B * (read + written), 0), {'xla': moved(reference)}, moving=3)
