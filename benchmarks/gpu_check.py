"""Are the kernels right on this GPU, and how near to its limits? One command, under 8 minutes on an H100 or H200.

    python benchmarks/gpu_check.py --save                 # benchmarks/results/gpu_check_NVIDIA_H200.json, say
    python benchmarks/gpu_check.py --save $OUT            # the same file, in another folder
    python benchmarks/gpu_check.py --save --only decode_step --limit 1500    # every line of one check: .._decode_step.json
    python benchmarks/gpu_check.py --rehearse             # toy sizes in the GPU interpreter, on any machine

1. ceilings: what the device copies and multiplies at best, measured
2. parity: every kernel, and the library's attention, against its reference, on random numbers
3. time of each kernel, and of a layer's eviction, at real models' shapes, as a share of those ceilings, beside XLA's, cuDNN's,
   cuBLAS's and PyTorch's; of the FP8 product beside the other candidate for it, which is written in Triton
4. a decode step of Qwen2.5-1.5B and 7B with random weights, against the time that its bytes and products need, and an
   estimate of the most rows that fit; transformers' generate beside it
5. an update of Qwen2.5-1.5B on packed rows of 4,096 tokens: model FLOP per second, over the matrix rate

What is asked of a figure stands beside it, as met or MISSED. A check that fails is a line of the table, by name; the others go
on. Each check has its SECONDS, and what those before it left of theirs, and starts no new line after them; what is known is
written after each, so that a run cut off keeps it. Decode steps are 20 programs of 28 layers, too much to compile in theirs: one
command measures those of which most is asked, and a second, --only decode_step as above, the rest of the table. PyTorch is the
reference interpreter's (`make reference`, or SPRL_REFERENCE_PYTHON); without CUDA it is told as missing.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, ROOT, record, report
from common import peer as by_peer
from device_timing import Ceilings, ceilings, seconds
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_resources import EXPERTS, MODELS, Model

from sprl.cache.compaction import compress
from sprl.cache.layer import LayerCache
from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import DENSE, UNQUANTISED, Cache, Correction, Loss, Optimizer, Quant, Sampling
from sprl.kernels import (
  attention,
  block_matmul,
  decode_attention,
  eviction,
  grouped_matmul,
  hopper_block_matmul,
  hopper_decode_attention,
  hopper_eviction,
  hopper_grouped_matmul,
  linear_logprob,
)
from sprl.kernels.cost import Cost
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import ModelConfig
from sprl.models.moe import blocks
from sprl.quant.block import quantise, quantise_groups
from sprl.sampler import decode
from sprl.sampler.weights import SamplerWeights, sampler_weights
from sprl.types import LogProbs, Trajectory

LIMIT = 430  # seconds after which no line begins
TORCH = 80  # that PyTorch has for all that is asked of it
CEILINGS = 15  # that measuring them takes, about
SECONDS = {  # of each check, after which it begins no line
  'parity': 45, 'attention': 40, 'rows': 35, 'matmul': 40, 'eviction': 20, 'append': 5, 'update': 35, 'decode_step': 115,
}  # fmt: skip
BF16, FP8 = jnp.dtype('bfloat16'), jnp.dtype('float8_e4m3fn')
KERNELS = (
  (hopper_decode_attention, 'decode_attention'),
  (hopper_block_matmul, 'block_matmul'),
  (hopper_block_matmul, 'grouped_matmul'),
  (hopper_grouped_matmul, 'grouped_matmul'),
  (hopper_grouped_matmul, 'grouped_outer'),
  (hopper_eviction, 'compact'),
  (hopper_eviction, 'similarity'),
)
TOY = Model(4, 2, 128, 256, 384)
DECODES = [('Qwen2.5-7B', 256, 640), ('Qwen2.5-7B', 256, 4096), ('Qwen2.5-1.5B', 256, 4096), ('Qwen3-8B', 64, 4096)]
ROWS = [('Qwen2.5-1.5B', 2, 4096), ('Qwen2.5-7B', 1, 8192)]
GENERATED = 'Qwen2.5-1.5B', 64, 512, 64  # by transformers: a model, rows, prompt and new tokens
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Bench:
  """What checks are run with."""

  rehearse: bool
  ceilings: Ceilings
  torch: Row = dataclasses.field(default_factory=dict)  # what peers/torch_gpu.py found

  def sizes(self, real: Any, toy: Any) -> Any:
    """The sizes to take."""
    return toy if self.rehearse else real

  def timed(
    self, name: str, case: str, kernel: Callable, make: Callable, least: Cost, peers=None, makes=None, moving=0, fp8=False
  ) -> Row:
    """The kernel's line: its time, beside the time that its bytes and operations need at the least, and beside its peers'.

    `makes`: of peers, by name, that are given arrays of their own, as they would want them.
    """
    rate = (self.ceilings.fp8 or 2 * self.ceilings.bf16) if fp8 else self.ceilings.bf16
    least_seconds = max(least.bytes / self.ceilings.copy, least.flops / rate)
    time_of = partial(seconds, moving=moving, **({'runs': 1, 'launches': 1, 'inputs': 2} if self.rehearse else {}))
    ours = time_of(kernel, make)
    row = {'check': name, 'case': case, 'us': 1e6 * ours, 'share of ceiling': least_seconds / ours}
    row |= {'GB/s': least.bytes / ours / 1e9, 'TFLOP/s': least.flops / ours / 1e12}
    for peer, call in (peers or {}).items():
      try:
        row[f'{peer} us'] = 1e6 * time_of(call, (makes or {}).get(peer, make))
      except Exception as error:  # a library that cannot: said, and no reason to stop
        row['note'] = f'{row.get("note", "")} {peer}: {type(error).__name__}'.strip()
    others = [row[f'{peer} us'] for peer in peers or {} if f'{peer} us' in row]
    return row | ({'times best peer': min(others) / row['us']} if others else {})


def judged(row: Row, asked: dict[str, float]) -> Row:
  """The row, with what is asked of its columns at the least beside it."""
  told = []
  for column, least in asked.items():
    value = row.get(column)
    verdict = 'not measured' if value is None else f'{value:.3g}, {"met" if value >= least else "MISSED"}'
    told.append(f'{column} >= {least:g}: {verdict}')
  return row | {'asked': '; '.join(told)}


def failed(check: str, case: str, error: Exception) -> Row:
  """The line of what failed; where it did is printed."""
  traceback.print_exception(error)
  return {'check': check, 'case': case, 'status': f'FAILED: {type(error).__name__}'}


def torch_time(bench: Bench, row: Row, kind: str, *shape: int) -> Row:
  """The row with PyTorch's time of the same call, where there is one, among its peers."""
  theirs = bench.torch.get(kind, {}).get(json.dumps(shape))
  if theirs is None:
    return row
  return row | {'torch us': theirs, 'times best peer': min(theirs / row['us'], row.get('times best peer', np.inf))}


# --- parity ------------------------------------------------------------------------------------------------------------


def off(found: Any, expected: Any) -> float:
  """The relative error of an array, by norms."""
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def parity(name: str, case: str, error: float, bound: float) -> Row:
  """The line of a comparison."""
  return {'check': name, 'case': case, 'error': error, 'status': 'ok' if error <= bound else f'WRONG: beyond {bound:g}'}


def attention_inputs(model: Model, B: int, S: int, dtype: Any, key: jax.Array, length: Any = None) -> tuple[Any, ...]:
  """Random arguments of decode attention."""
  H, K, D, _, _ = model
  q, k, v = jax.random.split(key, 3)
  scale = jnp.float32(1)
  cache = [jax.random.normal(each, (B, K, S, D), BF16).astype(dtype) for each in (k, v)]
  full = jnp.full(B, S, jnp.int32) if length is None else jnp.asarray(length, jnp.int32)
  return jax.random.normal(q, (B, H, D), BF16), *cache, full, (scale, scale)


def biased_inputs(model: Model, B: int, S: int, dtype: Any, key: jax.Array, length: Any) -> tuple[Any, ...]:
  """The same with a bias, which moves scores as much as keys do."""
  H, K, D, _, _ = model
  bias = D**0.5 * jax.random.normal(jax.random.fold_in(key, 1), (B, K, H // K, S))
  return *attention_inputs(model, B, S, dtype, key, length), bias


def linear_inputs(M: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Random arguments of a block-scaled product."""
  x, w = jax.random.split(key)
  weights = quantise(jax.random.normal(w, (N, K), BF16), 'float32')
  return *quantise_groups(jax.random.normal(x, (M, K), BF16), 'float32'), weights.codes, weights.scale


def expert_inputs(X: int, chosen: int, tokens: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Random arguments of the experts' product: each token goes through so many of X."""
  route, x, w = jax.random.split(key, 3)
  laid = blocks(jax.lax.top_k(jax.random.uniform(route, (tokens, X)), chosen)[1], X)
  rows = jnp.take(jax.random.normal(x, (tokens, K), BF16), laid.assignment // chosen, axis=0, mode='fill', fill_value=0)
  weights = quantise(jax.random.normal(w, (X, N, K), BF16), 'float32')
  return *quantise_groups(rows, 'float32'), weights.codes, weights.scale, laid.expert, laid.used


def wide_expert_inputs(X: int, chosen: int, tokens: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """The same in bfloat16: x [n, T, K], dy [n, T, N], w, and whose each block is."""
  route, x, dy, w = jax.random.split(key, 4)
  laid = blocks(jax.lax.top_k(jax.random.uniform(route, (tokens, X)), chosen)[1], X)

  def rows(key, width):
    given = jax.random.normal(key, (tokens, width), BF16)
    return jnp.take(given, laid.assignment // chosen, axis=0, mode='fill', fill_value=0)

  return rows(x, K), rows(dy, N), jax.random.normal(w, (X, N, K), BF16), laid.expert, laid.used


def compaction_inputs(model: Model, B: int, S: int, N: int, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
  """Random arguments of compaction: ascending slots."""
  k, v, order = jax.random.split(key, 3)
  _, K, D, _, _ = model
  cache = [jax.random.normal(each, (B, K, S, D), BF16) for each in (k, v)]
  if dtype == FP8:
    cache = [jax.lax.bitcast_convert_type(x.astype(FP8), jnp.uint8) for x in cache]
  keep = jnp.sort(jnp.argsort(jax.random.uniform(order, (B, K, S)))[..., :N], axis=-1).astype(jnp.int32)
  return *cache, jnp.arange(B), keep


def wide(arguments: Any) -> Any:
  """The arguments with numbers in float32, for a reference."""
  return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in (BF16, FP8) else x, arguments)


class Comparison(NamedTuple):
  """A kernel beside what computes the same."""

  check: str
  case: str
  make: Callable[[jax.Array], tuple[Any, ...]]  # a key to the arguments of both
  kernel: Callable[..., dict]  # its outputs, by name
  reference: Callable[..., dict]
  bound: float  # on the relative error of each output


def check_parity(bench: Bench) -> Iterator[Row]:
  """Every kernel against its reference. A comparison that fails is a line, and the others go on."""
  for each in comparisons(bench):
    try:
      rows = compared(each)
    except Exception as error:
      rows = [failed(each.check, each.case, error)]
    yield from rows


def compared(each: Comparison) -> list[Row]:
  """The lines of a comparison, one for each output."""
  arguments = jax.jit(each.make)(jax.random.key(7))
  found = jax.jit(each.kernel)(*arguments)
  with jax.default_matmul_precision('highest'):
    expected = jax.jit(each.reference)(*arguments)
  return [parity(each.check, f'{name} {each.case}', off(found[name], x), each.bound) for name, x in expected.items()]


def comparisons(bench: Bench) -> Iterator[Comparison]:
  """All that is compared."""
  yield from attention_comparisons(bench)
  yield from matmul_comparisons(bench)
  yield from eviction_comparisons(bench)
  yield from row_comparisons(bench)
  yield logprob_comparison(bench)


def attention_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Decode attention of rows of all lengths, an empty one too: with shares, and with a bias and slots split between programs."""

  def outputs(attend):
    def call(*inputs):
      out, share, lse = attend(*inputs)
      found = {'out': out, 'sum': jnp.exp(lse)}  # of exponentials: 0 where nothing is seen, and lse -inf
      return found if share is None else found | {'share': share}

    return call

  for model, S in bench.sizes([(MODELS['Qwen2.5-0.5B'], 640), (MODELS['Qwen2.5-7B'], 1000)], [(TOY, 72)]):
    lengths = [0, 1, 63, 64, 65, S // 2, S - 1, S]
    for dtype, share in ((BF16, True), (FP8, True), (BF16, False)):
      make, what = (attention_inputs, 'share') if share else (biased_inputs, 'bias')
      yield Comparison(
        'parity attention',
        f'D {model.width} G {model.queries // model.kv} S {S} {dtype} {what}',
        partial(make, model, len(lengths), S, dtype, length=lengths),
        outputs(partial(decode_attention.decode_attention, share=share, kernels='mosaic_gpu')),
        outputs(lambda *inputs, share=share: decode_attention.reference(*wide(inputs), share=share)),
        0.01,
      )


def matmul_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Block-scaled products, of one weight and of experts."""
  blocked = {'rows': 128, 'group': 128}
  shapes = bench.sizes([(1, 256, 896), (16, 1536, 1536), (64, 3584, 18944), (300, 3584, 3584), (4096, 4864, 896)], [(9, 64, 384)])
  ours = partial(block_matmul.block_matmul, **blocked, dtype=BF16, kernels='mosaic_gpu')
  for name, multiply in {'block_matmul': ours, **triton_candidate(bench)}.items():
    for M, N, K in shapes if multiply is ours else shapes[2:4]:  # of the candidate few tokens, and many
      yield Comparison(
        f'parity {name}',
        f'{M}x{N}x{K}',
        partial(linear_inputs, M, N, K),
        lambda *x, multiply=multiply: {'y': multiply(*x)},
        lambda *x: {'y': block_matmul.reference(*x, **blocked, dtype=jnp.float32)},
        0.005,
      )

  def used_tiles(multiply):
    def call(x, x_scale, w, w_scale, expert, used):
      y = multiply(x, x_scale, w, w_scale, expert, used, **blocked)
      return {'y': jnp.where((jnp.arange(len(x)) < used)[:, None, None], y, 0)}

    return call

  for X, chosen, tokens, N, K in bench.sizes([(128, 8, 64, 768, 2048), (128, 8, 4096, 2048, 768)], [(4, 2, 9, 64, 384)]):
    yield Comparison(
      'parity grouped_matmul',
      f'{tokens}x{chosen} of {X} {N}x{K}',
      partial(expert_inputs, X, chosen, tokens, N, K),
      used_tiles(partial(block_matmul.grouped_matmul, dtype=BF16, kernels='mosaic_gpu')),
      used_tiles(partial(block_matmul.grouped_reference, dtype=jnp.float32)),
      0.005,
    )

  def experts(matmul, outer):  # tokens' product, and the gradients of tokens and weights
    def call(x, dy, w, expert, used):
      here = (jnp.arange(len(x)) < used)[:, None, None]
      y, dx = matmul(x, w, expert, used), matmul(dy, w, expert, used, back=True)
      return {'y': jnp.where(here, y, 0), 'dx': jnp.where(here, dx, 0), 'dw': outer(dy, x, expert, used, len(w))}

    return call

  by_kernel = [partial(each, kernels='mosaic_gpu') for each in (grouped_matmul.grouped_matmul, grouped_matmul.grouped_outer)]
  by_loop = experts(grouped_matmul.grouped_reference, grouped_matmul.outer_reference)
  for X, chosen, tokens, N, K in bench.sizes([(128, 8, 64, 768, 2048), (128, 8, 4096, 2048, 768)], [(4, 2, 9, 64, 192)]):
    yield Comparison(
      'parity grouped_matmul bf16',
      f'{tokens}x{chosen} of {X} {N}x{K}',
      partial(wide_expert_inputs, X, chosen, tokens, N, K),
      experts(*by_kernel),
      lambda *inputs: by_loop(*wide(inputs)),
      0.005,
    )


def triton_candidate(bench: Bench) -> dict[str, Callable]:
  """The block-scaled product in Triton, by its name; none where it cannot be imported, or there is no GPU."""
  if bench.rehearse:
    return {}
  try:
    from peers.triton_block_matmul import block_matmul as multiply
  except Exception as error:  # not installed, or for another version of jax: said, and no reason to stop
    print(f'triton: {type(error).__name__}: {error}', flush=True)
    return {}
  return {'triton': multiply}


def eviction_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Compaction, to the bit, and the comparison of keys."""
  B, S, N = bench.sizes((16, 640, 512), (2, 40, 24))

  def front(move):
    return lambda *inputs: {name: x[:, :, :N] for name, x in zip(('k', 'v'), move(*inputs))}

  models = bench.sizes([MODELS['Qwen2.5-0.5B'], MODELS['Qwen2.5-7B']], [TOY])
  for model, dtype in itertools.product(models, (BF16, FP8)):
    yield Comparison(
      'parity compact',
      f'D {model.width} S {S} N {N} {dtype}',
      partial(compaction_inputs, model, B, S, N, dtype),
      front(partial(eviction.compact, ordered=True, kernels='mosaic_gpu')),
      front(eviction.compact_reference),
      0,
    )

  model = models[-1]

  def keys(key):  # cosines about a half, in rows of which ever more is occupied
    return jax.random.normal(key, (B, model.kv, S, model.width), BF16) + 1, jnp.arange(B) * S // max(B - 1, 1)

  def occupied(compare):
    one = partial(compare, threshold=0.5, nearest_of_none=0)
    return lambda k, n: {'sums': jnp.where((jnp.arange(S) < n[:, None])[:, None], jax.vmap(one)(k, n), 0)}

  # A cosine next to the threshold may fall on its other side: one of some hundreds in a sum.
  kernel = partial(eviction.similarity, kernels='mosaic_gpu')
  yield Comparison('parity similarity', f'S {S}', keys, occupied(kernel), occupied(eviction.similarity_reference), 1e-3)


def row_comparisons(bench: Bench) -> Iterator[Comparison]:
  """The library's attention of packed rows, and its gradients."""

  def outputs(attend):
    return lambda *inputs: dict(zip(('out', 'dq', 'dk', 'dv'), both_ways(attend)(*inputs)))

  for name in bench.sizes(('Qwen2.5-0.5B', 'Qwen2.5-7B'), ('toy',)):
    model, T = MODELS.get(name, TOY), bench.sizes(1024, 64)
    yield Comparison(
      'parity rows',
      f'D {model.width} G {model.queries // model.kv} T {T}',
      partial(packed_inputs, model, 2, T),
      outputs(by_library(bench)),
      lambda *inputs: outputs(attention.reference)(*wide(inputs)),
      0.01,
    )


def packed_inputs(model: Model, R: int, T: int, key: jax.Array) -> tuple[Any, ...]:
  """Random arguments of attention within packed rows and of its gradients: a prompt and seven completions that share it."""
  H, K, D, _, _ = model
  shapes = ((R, T, H, D), (R, T, K, D), (R, T, K, D), (R, T, H, D))
  q, k, v, dout = (jax.random.normal(each, shape, BF16) for each, shape in zip(jax.random.split(key, 4), shapes))
  segments = jnp.broadcast_to(1 + jnp.arange(T) * 8 // T, (R, T))
  return q, k, v, PackedAttention.of(segments, jnp.where(segments > 1, 1, 0)).allowed, dout


def both_ways(attend: Callable) -> Callable:
  """Attention and its gradients."""

  def call(q, k, v, allowed, dout):
    out, back = jax.vjp(lambda *x: attend(*x, allowed), q, k, v)
    return out, *back(dout)

  return call


def by_library(bench: Bench) -> Callable:
  """The library's attention; on a machine without its GPU XLA's, by the same call."""
  return partial(attention.by_library, causal=True, implementation='xla' if bench.rehearse else 'cudnn')


def logprob_comparison(bench: Bench) -> Comparison:
  """Log-probs and entropies of the learner's head, in chunks, against whole logits in float32."""
  T, V, E = bench.sizes((1024, 151936, 1536), (9, 50, 64))

  def make(key):
    hidden, head, target = jax.random.split(key, 3)
    return (
      jax.random.normal(hidden, (T, E), BF16),
      2 * E**-0.5 * jax.random.normal(head, (V, E), BF16),
      jax.random.randint(target, (T,), 0, V),
    )

  def outputs(of):
    return lambda *inputs: dict(zip(('log-prob', 'entropy'), of(*inputs)))

  kernel, reference = outputs(linear_logprob.linear_logprob), outputs(linear_logprob.reference)
  return Comparison('parity linear_logprob', f'{T}x{V}x{E}', make, kernel, reference, 1e-4)


# --- the kernels' time -------------------------------------------------------------------------------------------------


def check_attention(bench: Bench) -> Iterator[Row]:
  """Decode attention beside XLA's and cuDNN's, which know no FP8."""

  def library(implementation):
    def attend(q, k, v, length, scales):  # k, v: [B, S, K, D]
      return jax.nn.dot_product_attention(
        q[:, None], k, v, query_seq_lengths=jnp.ones_like(length), key_value_seq_lengths=length, implementation=implementation
      )

    return attend

  def turned(q, k, v, length, scales):  # as the library takes it; cuDNN would have the whole cache copied, XLA reads it turned
    return q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), length, scales

  peers = {'xla': lambda *inputs: library('xla')(*turned(*inputs)), 'cudnn': library('cudnn')}
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
        {'cudnn': lambda key, make=make: turned(*make(key))},
      )
      if dtype == BF16 and not share:
        bf16 = row['us']
        yield judged(torch_time(bench, row, 'decode', B, H, K, S, D), {'share of ceiling': 0.8, 'times best peer': 1.0})
      elif dtype == FP8:
        yield judged(row | {'times bf16': bf16 / row['us']}, {'times bf16': 1.7})
      else:
        yield row


def check_rows(bench: Bench) -> Iterator[Row]:
  """The learner's attention, both ways, beside others that take a packed row's mask, and two that know no mask."""

  def xla(q, k, v, allowed):
    return jax.nn.dot_product_attention(q, k, v, mask=allowed, implementation='xla')

  def unmasked(q, k, v, allowed):  # what the library would take of a row that is one segment
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')

  peers: dict[str, Callable] = {'reference': attention.reference, 'xla': xla}
  with contextlib.suppress(ImportError):
    import tokamax  # pyright: ignore[reportMissingImports]

    peers['tokamax'] = lambda q, k, v, allowed: tokamax.dot_product_attention(q, k, v, mask=allowed, is_causal=True)
  for name, R, T in bench.sizes(ROWS, [('toy', 1, 64)]):
    model = MODELS.get(name, TOY)
    H, K, D, _, _ = model
    least, case, make = attention.cost(R, T, H, K, D, backward=True), f'{name} {R} x {T}', partial(packed_inputs, model, R, T)
    calls = {peer: both_ways(call) for peer, call in peers.items()}
    row = bench.timed('rows', case, both_ways(by_library(bench)), make, least, calls)
    row |= {} if 'tokamax' in peers else {'note': f'{row.get("note", "")} tokamax: not installed'.strip()}
    yield judged(row, {'times best peer': 1.0})
    bounds = {'cudnn, causal': (unmasked, make), 'pallas, all pairs, float16': (pallas_rows, partial(halves, make))}
    for bound, (call, its) in bounds.items():
      try:
        yield bench.timed(f'rows by {bound}', case, both_ways(call), its, least)
      except Exception as error:
        yield {'check': f'rows by {bound}', 'case': case, 'note': f'{type(error).__name__}: {error}'[:80]}
    torch = bench.torch.get('rows', {}).get(json.dumps((R, T, H, K, D)))
    if torch is not None:
      yield {'check': 'rows by torch, causal', 'case': case, 'us': torch, 'TFLOP/s': least.flops / torch / 1e6}


def halves(make: Callable, key: jax.Array) -> tuple[Any, ...]:
  """What `make` makes, in float16: it is all that the backward pass of Pallas's own attention compiles for."""
  return tuple(x.astype(jnp.float16) if x.dtype == BF16 else x for x in make(key))


def pallas_rows(q, k, v, allowed):
  """Pallas's own attention of Hopper GPUs, forwards and backwards; it has no mask that its backward pass knows."""
  from jax.experimental.pallas.ops.gpu import attention_mgpu

  config = attention_mgpu.TuningConfig(
    block_q=64, block_kv=128, max_concurrent_steps=2, compute_wgs_bwd=2,
    block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64,
  )  # fmt: skip
  return attention_mgpu.attention(q * q.shape[-1] ** -0.5, k, v, config)


def check_matmul(bench: Bench) -> Iterator[Row]:
  """Block-scaled products, of codes at hand, beside Triton's, and cuBLAS's of such in bfloat16; and quantising the tokens."""

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
  yield from wide_experts(bench)
  for M, K in bench.sizes([(64, 3584), (8192, 3584)], [(4, 256)]):
    yield bench.timed(
      'quantise tokens',
      f'{M}x{K}',
      partial(quantise_groups, format='float32'),
      lambda key, M=M, K=K: (jax.random.normal(key, (M, K), BF16),),
      Cost(M * K * 3 + M * K // 32, 0),
    )


def wide_experts(bench: Bench) -> Iterator[Row]:
  """The products of experts in bfloat16, and of their gradients, beside the loop over blocks."""
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
    for what in ('y', 'dx', 'dw') if tokens > 64 else ('y',):  # few tokens are a decode step's, which has no gradients
      call, least = calls[what]
      case, make = f'{name} {linear} M {tokens}x{chosen} of {X} {what}', partial(wide_expert_inputs, X, chosen, tokens, N, K)
      yield bench.timed('grouped_matmul bf16', case, partial(call, *kernels), make, least, {'loop': partial(call, *loop)})


def check_eviction(bench: Bench) -> Iterator[Row]:
  """Compaction and comparison of keys beside their references."""
  names, B, S, N = bench.sizes((('Qwen2.5-0.5B', 'Qwen2.5-7B'), 256, 640, 512), (('toy',), 2, 40, 24))

  def moved(call):  # returns what it was given in place, for the next call
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
  """A layer's compression in all rows: scores and top-k, XLA's, with what the kernels do. Least: keys read, the kept moved."""
  name, B, prompt, budget, interval, window = bench.sizes(('Qwen2.5-7B', 256, 512, 512, 128, 16), ('toy', 2, 24, 24, 8, 4))
  for method in ('snapkv', 'rkv'):
    cache = Cache(budget=budget, interval=interval, window=window, method=method)
    plan = cache_layout(config_of(name), cache, UNQUANTISED, prompt, 4 * prompt, BF16, kernels='mosaic_gpu')
    S, K, D = plan.slots, plan.kv_heads, plan.head_dim

    def make(key, plan=plan, S=S, K=K, D=D):
      k, v, q = jax.random.split(key, 3)
      empty = LayerCache.empty(plan, B, S)
      assert empty.queries is not None  # both methods look at the newest
      layer = dataclasses.replace(
        empty,
        k=jax.random.normal(k, (B, K, S, D), BF16),
        v=jax.random.normal(v, (B, K, S, D), BF16),
        queries=jax.random.normal(q, empty.queries.shape, empty.queries.dtype),
        position=jnp.broadcast_to(jnp.arange(S), (B, K, S)),
      )
      return layer, jnp.ones(B, bool), jnp.full(B, S), jnp.full(B, S - 1)

    def call(layer, due, occupied, now, plan=plan):
      return compress(plan, layer, due, occupied=occupied, now=now)[:1]

    least = Cost(2 * B * K * S * D + eviction.compact_cost(B, K, budget, D, BF16).bytes, 0)
    yield bench.timed(f'eviction {method}', f'{name} B {B} S {S}', call, make, least, moving=1)


def check_append(bench: Bench) -> Iterator[Row]:
  """Writing a token's keys in place, which XLA does in one program."""
  name, B, S = bench.sizes(('Qwen2.5-7B', 256, 4096), ('toy', 2, 40))
  _, K, D, _, _ = MODELS.get(name, TOY)

  def append(k, new, slot):
    return (k.at[jnp.arange(B)[:, None], :, slot[:, None]].set(new[:, None], mode='drop'),)

  def make(key):
    return jnp.zeros((B, K, S, D), BF16), jax.random.normal(key, (B, K, D), BF16), jax.random.randint(key, (B,), 0, S)

  yield bench.timed('append (XLA)', f'{name} B {B}', append, make, Cost(4 * B * K * D, 0), moving=1)


# --- whole programs ----------------------------------------------------------------------------------------------------


def config_of(name: str) -> ModelConfig:
  """A model's config, with true shapes."""
  layers, vocabulary = {'Qwen2.5-1.5B': (28, 151936), 'Qwen2.5-7B': (28, 152064)}.get(name, (2, 512))
  H, K, D, E, F = MODELS.get(name, TOY)
  return ModelConfig.from_json(
    {
      'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'vocab_size': vocabulary, 'hidden_size': E,
      'intermediate_size': F, 'num_hidden_layers': layers, 'num_attention_heads': H, 'num_key_value_heads': K, 'head_dim': D,
      'max_position_embeddings': 32768, 'rms_norm_eps': 1e-6, 'rope_theta': 1e6, 'tie_word_embeddings': name == 'Qwen2.5-1.5B',
      'hidden_act': 'silu', 'eos_token_id': 0,
    }
  )  # fmt: skip


def memory() -> int:
  """Bytes of the device's memory."""
  return (jax.devices()[0].memory_stats() or {}).get('bytes_limit', 64 * 2**30)


def check_decode_step(bench: Bench) -> Iterator[Row]:
  """Seconds of a step of all rows at a context of `tokens`, eviction included, against its bytes and products."""
  sparse = bench.sizes(Cache(budget=512, interval=128, method='rkv'), Cache(budget=24, interval=8, window=4, method='rkv'))
  kv8, both = Quant(sampler='kv8'), Quant(sampler='w8a8_kv8', arithmetic='blockwise')
  modes = {
    'bf16': (DENSE, UNQUANTISED),
    'sparse w8a8_kv8': (sparse, both),
    'w8a8_kv8': (DENSE, both),
    'sparse': (sparse, UNQUANTISED),
    'kv8': (DENSE, kv8),
  }
  short, long = bench.sizes((4096, 16384), (64, 96))
  models = bench.sizes(('Qwen2.5-7B', 'Qwen2.5-1.5B'), ('toy',))
  first = [(name, short, ('bf16', 'sparse w8a8_kv8')) for name in models]  # first what most is asked of
  later = [(name, tokens, tuple(modes)) for tokens in (short, long) for name in models]
  dense: dict[tuple[str, int], Row] = {}
  done = set()
  for name, tokens, wanted in (*first, *later):
    config, params = config_of(name), None
    for mode in wanted:
      if (name, tokens, mode) in done:
        continue
      done.add((name, tokens, mode))
      cache, quant = modes[mode]
      if params is None:
        params = jax.jit(partial(transformer.init_params, config, dtype=BF16))(jax.random.key(0))
      try:
        row = decode_step(bench, config, params, cache, quant, tokens)
      except Exception as error:
        yield failed('decode step', f'{name} {mode} S {tokens}', error)
        continue
      dense |= {(name, tokens): row} if mode == 'bf16' else {}
      asked = {}
      if tokens == short and row['rows'] == bench.sizes(256, 2):
        asked = {'share of bytes': 0.7} | ({'times dense bf16': 3.0} if mode == 'sparse w8a8_kv8' else {})
      row = beside_dense(row, dense.get((name, tokens)), asked)
      yield {'check': 'decode step', 'case': f'{name} {mode} S {tokens} B {row.pop("rows")}', **row}
  if 'generate' in bench.torch:
    name, rows, prompt, new = GENERATED
    case = f'{name} B {rows} after {prompt}, {new} new'
    yield {'check': "transformers' generate", 'case': case, 'tokens/s': bench.torch['generate']}


def beside_dense(row: Row, dense: Row | None, asked: dict[str, float]) -> Row:
  """A decode step's row beside dense bfloat16's, judged. A gain over a batch of another size is told, with that size, only."""
  if dense is not None:
    row = row | {'times dense bf16': row['tokens/s'] / dense['tokens/s']}
    if dense['rows'] != row['rows']:
      row |= {'note': f'dense bf16 has B {dense["rows"]}'}
      asked = {column: least for column, least in asked.items() if column != 'times dense bf16'}
  return judged(row, asked) if asked else row


def held(*trees: Any) -> int:
  """Bytes of the arrays in the device's memory; a buffer that several share counts once."""
  return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree.leaves(trees)}.values())


def decode_step(bench: Bench, config: ModelConfig, params: Any, cache: Cache, quant: Quant, tokens: int) -> Row:
  """The line of one way of decoding."""
  steps = cache.interval if cache.budget else bench.sizes(32, 4)
  prompt = bench.sizes(512, 24)
  plan = cache_layout(config, cache, quant, prompt, tokens - prompt, BF16)
  served = (
    sampler_weights(params, BF16, quant) if 'w8a8' in quant.sampler else SamplerWeights(params)
  )  # as they are: jit would copy them
  if plan.fp8:
    served = served._replace(scales=Scales(*(jnp.full(config.num_layers, 0.05) for _ in range(3))))
  ours = [*jax.tree.leaves(served.params['layers']), served.head]
  weights = sum(w.size * w.dtype.itemsize for w in ours)
  rows = bench.sizes(256, 2)
  usable = 0.85 * memory()
  while rows > 1 and 1.1 * plan.bytes(rows) > usable - held(params, served):
    rows //= 2
  sampling = Sampling(max_tokens=3 * steps + 1, max_prompt=prompt)
  state = decode.empty_state(plan, served, rows, 3 * steps + 1, jax.random.key(0))
  seen = jnp.full(rows, tokens - 3 * steps - 2)
  since = jnp.arange(rows) % cache.interval  # the last compression: at every step some rows are due
  cache_now = dataclasses.replace(
    state.cache,
    seen=seen,
    length=cache.budget + since if cache.budget else seen + 0,  # donated: a buffer of its own
    count=since,
  )
  state = dataclasses.replace(
    state, cache=cache_now, done=jnp.zeros(rows, bool), limit=jnp.full(rows, 10 * steps), count=jnp.ones(rows, jnp.int32)
  )
  run = partial(decode.decode, transformer.graph(config), sampling=sampling, stop_ids=(), steps=steps)
  state = jax.block_until_ready(run(served, state))
  start = time.perf_counter()
  state = jax.block_until_ready(run(served, state))
  step = (time.perf_counter() - start) / steps
  attended = float(jnp.mean(state.kept[:, steps : 2 * steps]))
  keys = plan.bytes(rows) / plan.slots * attended
  layers = sum(w.size for w in ours)
  rate = (bench.ceilings.fp8 or 2 * bench.ceilings.bf16) if 'w8a8' in quant.sampler else bench.ceilings.bf16
  least = max(weights / bench.ceilings.copy, 2 * rows * layers / rate) + keys / bench.ceilings.copy
  bandwidth = (weights + keys) / bench.ceilings.copy
  return {
    'rows': rows, 'us': 1e6 * step, 'tokens/s': rows / step, 'share of ceiling': least / step, 'share of bytes': bandwidth / step,
    'most rows (estimated)': int(rows * (usable - held(served)) / (1.1 * plan.bytes(rows))),  # the sampler alone
  }  # fmt: skip


def check_update(bench: Bench) -> Iterator[Row]:
  """Model FLOP a second of whole updates (no recomputation counted), over the matrix rate."""
  name = bench.sizes('Qwen2.5-1.5B', 'toy')
  config = config_of(name)
  T, sequences = bench.sizes((4096, 4), (64, 2))
  rng = np.random.default_rng(0)
  trajectories = [trajectory(rng, i, T // 8, T - T // 8, config.vocab_size) for i in range(sequences)]
  batch, _ = pack(trajectories, rng.normal(size=sequences), Shape(sequences, 1, T, sequences, T - T // 8), share_prefix=False)
  params = jax.jit(partial(transformer.init_params, config))(jax.random.key(0))
  optimizer = make_optimizer(Optimizer(), 10)
  state = TrainState.create(params, optimizer)
  computation = UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, BF16, bench.sizes(1024, 16)), 'layer')
  update = make_update(transformer.graph(config), optimizer, computation)
  batch = jax.device_put(batch)
  del params
  times = []
  for _ in range(3):
    start = time.perf_counter()
    state, metrics = update(state, batch, LogProbs(sampler=batch.sampler_logp))
    jax.block_until_ready((state, metrics))
    times.append(time.perf_counter() - start)
  H, K, D, E, F = MODELS.get(name, TOY)
  matrices = config.num_layers * (E * D * (2 * H + 2 * K) + 3 * E * F) + config.vocab_size * E
  flops = sequences * (6 * matrices * T + 6 * config.num_layers * H * D * T * T)  # half of T^2 is seen: 12 / 2
  row = {
    'check': 'update', 'case': f'{name} {sequences} x {T} tokens', 'us': 1e6 * times[-1], 'TFLOP/s': flops / times[-1] / 1e12,
    'tokens/s': sequences * T / times[-1], 'share of ceiling': flops / times[-1] / bench.ceilings.bf16,
  }  # fmt: skip
  yield judged(row, {'share of ceiling': 0.4})


def trajectory(rng: np.random.Generator, uid: int, prompt: int, new: int, vocabulary: int) -> Trajectory:
  """Random tokens."""
  mask = np.arange(prompt + new) >= prompt
  return Trajectory(
    uid=uid,
    group=uid,
    tokens=rng.integers(0, vocabulary, prompt + new).astype(np.int32),
    mask=mask,
    sampler_logp=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
    version=np.where(mask, 0, -1).astype(np.int32),
    kept=np.where(mask, np.arange(prompt + new), 0).astype(np.int32),
    prompt_length=prompt,
    finish='length',
    reward=float(uid % 2),
  )


# --- all of it ---------------------------------------------------------------------------------------------------------

CHECKS = {
  'parity': check_parity,
  'attention': check_attention,
  'rows': check_rows,
  'matmul': check_matmul,
  'eviction': check_eviction,
  'append': check_append,
  'update': check_update,
  'decode_step': check_decode_step,
}


def run(bench: Bench, name: str, until: float, later: tuple[str, ...] = ()) -> Iterator[Row]:
  """The lines of a check; one that fails, or finds no time left, says so. It leaves those that come `later` their SECONDS."""
  start = time.monotonic()
  until = min(until, max(start + SECONDS[name], until - sum(SECONDS[each] for each in later)))
  if start > until:
    yield {'check': name, 'case': '', 'status': 'not begun: out of time'}
    return
  try:
    for row in CHECKS[name](bench):
      print('  '.join(f'{key} {value:.4g}' if isinstance(value, float) else f'{value}' for key, value in row.items()), flush=True)
      yield {'status': 'ok', **row}
      if time.monotonic() > until:
        yield {'check': name, 'case': 'the rest of it', 'status': 'out of time'}
        break
  except Exception as error:
    yield failed(name, '', error)
  print(f'{name}: {time.monotonic() - start:.0f} s', flush=True)
  jax.clear_caches()


def by_torch(rehearse: bool) -> Row:
  """What PyTorch takes for the same, in a process of its own: before JAX takes the GPU's memory. Says what is missing."""
  of = {name: tuple(MODELS[name][:3]) for name in MODELS}
  cases = {
    'device': 'cuda',
    'decode': [(B, *of[name][:2], S, of[name][2]) for name, B, S in DECODES],
    'rows': [(R, T, *of[name]) for name, R, T in ROWS],
    'generate': [str(ROOT / 'benchmarks' / 'models' / GENERATED[0]), *GENERATED[1:]],
  }
  if rehearse:
    H, K, D, _, _ = TOY
    cases = {'device': 'cpu', 'decode': [(2, H, K, 64, D)], 'rows': [(1, 64, H, K, D)], 'generate': None}
  try:
    return by_peer('torch_gpu.py', json.dumps(cases), limit=TORCH)
  except SystemExit as missing:
    print(f'PyTorch: {missing}', flush=True)
    return {'missing': str(missing)}


def driver() -> str:
  """The GPU driver's version, as its own tool tells it; '' where there is none."""
  query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
  with contextlib.suppress(OSError, subprocess.CalledProcessError):
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
  return ''


def table(rows: list[Row]) -> list[Row]:
  """The rows, all with the same columns."""
  between = dict.fromkeys(key for row in rows for key in row if key not in ('check', 'case', 'asked', 'status'))
  return [{column: row.get(column) for column in ('check', 'case', *between, 'asked', 'status')} for row in rows]


def summary(rows: list[Row], **about: Any) -> Row:
  """What the last line says: how much was checked, what went wrong, and what was asked for and missed."""
  asked = [(row, each) for row in rows for each in filter(None, str(row.get('asked') or '').split('; '))]
  return {
    **about,
    'checks': len(rows),
    'asked': len(asked),
    'met': sum(each.endswith(', met') for _, each in asked),
    'missed': [f'{row["check"]} {row["case"]}: {each}' for row, each in asked if each.endswith('MISSED')],
    'bad': [f'{row["check"]} {row["case"]}'.strip() for row in rows if row['status'] != 'ok'],
  }


def interpreted() -> None:
  """Lets the kernels run in Pallas's GPU interpreter."""
  for module, name in KERNELS:
    setattr(module, name, partial(getattr(module, name), interpret=plgpu.InterpretGPUParams()))


def main() -> None:
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--rehearse', action='store_true', help='toy sizes in the interpreter')
  parser.add_argument('--only', default=','.join(CHECKS), help='checks, separated by commas')
  parser.add_argument('--limit', type=float, default=LIMIT, help='seconds after which no line begins')
  told = 'write gpu_check_DEVICE.json, with the names of checks where they are not all, to benchmarks/results or here'
  parser.add_argument('--save', nargs='?', const=RESULTS, type=Path, help=told)
  args = parser.parse_args()
  checks = args.only.split(',')
  if unknown := set(checks) - set(CHECKS):
    parser.error(f'--only={args.only}: no check is named {", ".join(sorted(unknown))}; expected of {", ".join(CHECKS)}')
  until = time.monotonic() + args.limit
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.92')  # read when JAX first asks for the GPU
  if not (args.rehearse or driver()):
    raise SystemExit('no GPU here; --rehearse runs the script without one')
  torch = by_torch(args.rehearse)
  if args.rehearse:
    interpreted()
  elif jax.default_backend() != 'gpu':
    raise SystemExit('JAX has no GPU here: install sprl with its extra `cuda`')
  found = ceilings(args.rehearse)
  print(found, flush=True)
  device = re.sub(r'\W+', '_', jax.devices()[0].device_kind)
  about = {
    'device': device,
    'driver': driver(),
    'runtime': jax.devices()[0].client.platform_version,
    **found._asdict(),
    'torch': torch,
  }
  name = '_'.join(['gpu_check', device, *(checks if set(checks) != set(CHECKS) else [])])  # some leave the file of all alone
  rows, bench = [], Bench(args.rehearse, found, torch)
  for i, check in enumerate(checks):
    for row in run(bench, check, until, tuple(checks[i + 1 :])):
      rows.append(row)
    if args.save:
      record(name, table(rows), summary(rows, **about), args.save)
  report(name, table(rows), summary(rows, **about))


if __name__ == '__main__':
  main()
