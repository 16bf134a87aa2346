"""Which resources do the GPU kernels need on an H200? They are compiled at real models' shapes, without a GPU and without timing.

    python benchmarks/kernel_resources.py --save kernel_resources    # 8 minutes of a core; needs: see sprl/planning/aot.py
    python benchmarks/kernel_resources.py --predict                  # predicted times of FP8 products, without a compiler

A row is a kernel at a model's shape and a batch. Attention of packed rows has three rows: its gradients are two more kernels, and
memory and cost are those of all three together. A row shows the report of ptxas and Mosaic (registers per thread, spilled bytes,
shared memory), the temporary memory of the compiled call, and the fewest bytes and operations that the call needs. `--predict`
shows the launches of joined linears instead, and the times that sprl/kernels/launch_model.py predicts in FP8 and in bfloat16.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from common import report

from sprl.kernels import (
  block_matmul,
  decode_attention,
  eviction,
  grouped_matmul,
  hopper_quantise,
  launch_model,
  packed_attention,
  quantise,
)
from sprl.kernels.cost import Cost
from sprl.kernels.launch_model import parts_of_sum
from sprl.kernels.packed_attention import Visible
from sprl.models.moe import ACTIVATIONS, Blocks, blocks

if TYPE_CHECKING:
  from sprl.planning.aot import Compiled

MIB = 2**20
BF16, F32, FP8 = map(jnp.dtype, ('bfloat16', 'float32', 'float8_e4m3fn'))
Shape = jax.ShapeDtypeStruct


class Model(NamedTuple):
  """The sizes of a model, from its config.json."""

  queries: int  # H
  kv: int  # K
  width: int  # D
  hidden: int  # E
  ffn: int  # F; in a mixture, one expert's

  @property
  def linears(self) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the distinct linears of a layer, by name."""
    H, K, D, E, F = self
    return {'q': (H * D, E), 'k': (K * D, E), 'o': (E, H * D), 'gate': (F, E), 'down': (E, F)}

  @property
  def joined(self) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the products of a layer in which q, k and v are one product, and gate and up another."""
    H, K, D, E, F = self
    return {'qkv': ((H + 2 * K) * D, E), 'o': (E, H * D), 'gate_up': (2 * F, E), 'down': (E, F)}


MODELS = {
  'Qwen2.5-0.5B': Model(14, 2, 64, 896, 4864),
  'Qwen2.5-1.5B': Model(12, 2, 128, 1536, 8960),
  'Qwen2.5-7B': Model(28, 4, 128, 3584, 18944),
  'Qwen3-8B': Model(32, 8, 128, 4096, 12288),
  'Qwen3-30B-A3B': Model(32, 4, 128, 2048, 768),
}
DENSE = [name for name in MODELS if name != 'Qwen3-30B-A3B']
EXPERTS = {'Qwen3-30B-A3B': (128, 8)}  # experts of a layer; experts per token


class Case(NamedTuple):
  """A kernel call to compile. `shape` is a text for the table."""

  kernel: str
  model: str
  shape: str
  dtype: Any
  call: Callable
  arguments: tuple[Any, ...]
  least: Cost  # lower bound of bytes and operations
  bound: float  # most bytes of temporary memory
  donate: tuple[int, ...] = ()

  def __str__(self) -> str:
    return ' '.join([self.kernel, self.model, self.shape, str(self.dtype)])

  def compile(self) -> 'Compiled':
    """Compile the call for an H200."""
    from sprl.planning.aot import compile_for_h200  # late: it sets options of CUDA's plugin, and gpu_check.py imports this file

    return compile_for_h200(self.call, *self.arguments, donate=self.donate)


def attention(model: str, B: int, S: int, dtype: Any, share: bool = False) -> Case:
  """Return the decode attention of one layer over S slots. `share` adds the probability of every slot, as h2o and others need."""
  H, K, D, _, _ = MODELS[model]
  scale = Shape((), jnp.float32)
  cache = Shape((B, K, S, D), dtype)
  return Case(
    'decode_attention',
    model,
    f'B {B} S {S}{" share" * share}',
    dtype,
    lambda *x: decode_attention.decode_attention(*x, share=share, kernels='mosaic_gpu'),
    (Shape((B, H, D), BF16), cache, cache, Shape((B,), jnp.int32), (scale, scale)),
    decode_attention.cost(B, H, K, S, D, dtype, share),
    # 8 % of the cache: the float32 partial results of a team, padded to 8 queries per group. With `share` there is no team.
    0.08 * 2 * cache.size * dtype.itemsize,
  )


def matmul(model: str, name: str, M: int) -> Case:
  """Return the product of one linear with M tokens."""
  N, K = {**MODELS[model].joined, **MODELS[model].linears}[name]
  C, R = -(-K // 128), -(-N // 128)
  return Case(
    'block_matmul',
    model,
    f'{name} {N}x{K} M {M}',
    FP8,
    partial(block_matmul.block_matmul, rows=128, group=128, dtype=BF16, kernels='mosaic_gpu'),
    (Shape((M, K), FP8), Shape((M, C), jnp.float32), Shape((N, K), FP8), Shape((R, C), jnp.float32)),
    block_matmul.cost(M, N, K),
    # Re-laid-out scales of the tokens, float32 partial sums (at most eight of the result), and pointers of a tuple.
    4 * (M + 3) * C + 4 * 8 * max(M, 64) * N + 1024,
  )


def experts(model: str, name: str, tokens: int) -> Case:
  """Return one linear of all experts, applied to the chosen experts of each token."""
  (N, K), (X, chosen) = {**MODELS[model].joined, **MODELS[model].linears}[name], EXPERTS[model]
  C, R = -(-K // 128), -(-N // 128)
  layout = block_shapes(model, tokens)
  n, T = layout.assignment.shape
  return Case(
    'grouped_matmul',
    model,
    f'{name} {N}x{K} x{X} M {tokens}x{chosen}',
    FP8,
    partial(block_matmul.grouped_matmul, rows=128, group=128, dtype=BF16, kernels='mosaic_gpu'),
    (
      Shape((n, T, K), FP8), Shape((n, T, C), jnp.float32), Shape((X, N, K), FP8), Shape((X, R, C), jnp.float32),
      layout.expert, layout.used,
    ),
    block_matmul.grouped_cost(tokens * chosen, min(X, tokens * chosen), N, K),
    4 * n * T * C,  # re-laid-out scales of the tokens
  )  # fmt: skip


def block_shapes(model: str, tokens: int) -> Blocks:
  """Return the shapes of the blocks that group tokens by expert."""
  X, chosen = EXPERTS[model]
  return jax.eval_shape(partial(blocks, experts=X), Shape((tokens, chosen), jnp.int32))


def bf16_experts(model: str, name: str, tokens: int) -> list[Case]:
  """Return one bfloat16 linear of all experts, and its gradients for tokens and for weights."""
  (N, K), (X, chosen) = MODELS[model].linears[name], EXPERTS[model]
  layout = block_shapes(model, tokens)
  n, T = layout.assignment.shape
  x, dy, w, owners = Shape((n, T, K), BF16), Shape((n, T, N), BF16), Shape((X, N, K), BF16), (layout.expert, layout.used)
  multiply, case = partial(grouped_matmul.grouped_matmul, kernels='mosaic_gpu'), f'{name} {N}x{K} x{X} M {tokens}x{chosen}'
  rows, met = tokens * chosen, min(X, tokens * chosen)
  once, outer = grouped_matmul.cost(rows, met, N, K), grouped_matmul.outer_cost(rows, X, N, K)
  sums = partial(grouped_matmul.grouped_outer, experts=X, kernels='mosaic_gpu')
  return [
    Case('grouped_matmul', model, case, BF16, multiply, (x, w, *owners), once, 0),
    Case('grouped_matmul_back', model, case, BF16, partial(multiply, back=True), (dy, w, *owners), once, 0),
    Case('grouped_outer', model, case, BF16, sums, (dy, x, *owners), outer, 8 * (X + n)),  # the ends of the experts' blocks
  ]


def compaction(model: str, B: int, S: int, N: int, dtype: Any) -> Case:
  """Return the move of N of S slots to the front, in every row."""
  _, K, D, _, _ = MODELS[model]
  cache = Shape((B, K, S, D), jnp.uint8 if dtype == FP8 else dtype)
  return Case(
    'compact',
    model,
    f'B {B} S {S} N {N}',
    dtype,
    partial(eviction.compact, kernels='mosaic_gpu'),
    (cache, cache, Shape((B,), jnp.int32), Shape((B, K, N), jnp.int32)),
    eviction.compact_cost(B, K, N, D, dtype),
    1024,
    donate=(0, 1),
  )


def similarity(model: str, B: int, S: int, dtype: Any = BF16) -> Case:
  """Return the comparison of all keys of every row with each other. Keys of an FP8 cache are compared in float32."""
  _, K, D, _, _ = MODELS[model]
  return Case(
    'similarity',
    model,
    f'B {B} S {S}',
    dtype,
    jax.vmap(partial(eviction.similarity, threshold=0.5, nearest_of_none=0, kernels='mosaic_gpu')),
    (Shape((B, K, S, D), dtype), Shape((B,), jnp.int32)),
    eviction.similarity_cost(B, K, S, D),
    # 24 bytes per key for four float32 numbers, with room to spare. Float32 keys: two bfloat16 copies, and workspace. Bfloat16
    # keys: one copy, if padding is needed.
    B * K * (S + 64) * (4 * 6 + D * (8 if dtype == jnp.float32 else 2 * (S % 8 > 0))),
  )


def packed_rows(model: str, R: int, T: int) -> Case:
  """Return the learner's attention of R packed rows of T tokens, with its gradients."""
  H, K, D, _, _ = MODELS[model]

  def both(q, k, v, segments, prefixes, dout):
    attend = partial(packed_attention.packed_attention, visible=Visible.in_rows(segments, prefixes), kernels='mosaic_gpu')
    out, back = jax.vjp(attend, q, k, v)
    return out, back(dout)

  q, k, ids = Shape((R, T, H, D), BF16), Shape((R, T, K, D), BF16), Shape((R, T), jnp.int32)
  return Case(
    'packed_attention',
    model,
    f'{R} x {T}',
    BF16,
    both,
    (q, k, k, ids, ids, q),
    packed_attention.cost(R, T, H, K, D, backward=True),
    4 * R * T * (2 * H + 32) + MIB,  # two float32 numbers per query and head; what each query and each key sees
  )


def quantisations(model: str, T: int) -> list[Case]:
  """Return the kernels that quantise T tokens after attention, a norm or a gated activation, and the norm without FP8."""
  H, _, D, E, F = MODELS[model]
  gated = partial(hopper_quantise.gated_codes, activate=ACTIVATIONS['silu'])
  calls = [
    ('codes', hopper_quantise.codes, H * D, (Shape((T, H * D), BF16),), 1),
    ('gated_codes', gated, F, (Shape((T, 2 * F), BF16),), 2),
  ]
  norms = []
  if hopper_quantise.obstacle(Shape((T, E), BF16), 128, False, norm=True) is None:
    x, scale, parts = Shape((T, E), BF16), Shape((E,), BF16), parts_of_sum(T, E, F)
    calls += [('normalised_codes', partial(hopper_quantise.normalised_codes, eps=1e-6), E, (x, scale), 1)]
    norm, arguments = partial(hopper_quantise.normalised, eps=1e-6), (x, Shape((parts, T, E), F32), scale)
    norms = [Case('normalised', model, f'{T}x{E} of {parts}', BF16, norm, arguments, quantise.norm_cost(T, E, parts), 1024)]
  found = [
    # The temporary array has the scales before they are transposed.
    Case(name, model, f'{T}x{M}', BF16, call, arguments, quantise.cost(T, M, read), 4 * T * -(-M // 128) + 1024)
    for name, call, M, arguments, read in calls
  ]
  return [*found, *norms]


def distinct(cases: Iterable[Case]) -> list[Case]:
  """Return one case per distinct program, the first. Models share shapes, and a process compiles each program once."""
  return list({(case.kernel, 'share' in case.shape, str(case.arguments)): case for case in reversed(list(cases))}.values())[::-1]


CASES = distinct(
  [
    *[attention(*each) for each in itertools.product(MODELS, (64, 256), (640, 4096), (BF16, FP8), (False, True))],
    *[compaction(model, 64, 640, 512, dtype) for model in MODELS for dtype in (BF16, FP8)],
    *[similarity(model, 16, S, dtype) for model in MODELS for S in (640, 4224) for dtype in (BF16, F32)],
    *[similarity('Qwen2.5-1.5B', 16, 612, dtype) for dtype in (BF16, F32)],  # the slots do not fill a tile
    *[matmul(model, name, M) for model in MODELS for name in MODELS[model].linears for M in (16, 64, 256, 4096)],
    *[matmul('Qwen2.5-7B', name, M) for name in MODELS['Qwen2.5-7B'].linears for M in (1, 512, 16384)],
    *[matmul(model, name, M) for model in DENSE for name in MODELS[model].joined for M in (1, 16, 64, 256, 512, 4096)],
    *[matmul('Qwen3-30B-A3B', name, M) for name in ('qkv', 'o') for M in (1, 16, 64, 256, 512, 4096)],
    *[experts('Qwen3-30B-A3B', 'gate_up', tokens) for tokens in (64, 256, 4096)],
    *[experts(model, name, tokens) for model in EXPERTS for name in ('gate', 'down') for tokens in (1, 64, 256, 512, 1024, 4096)],
    *[
      case for each in itertools.product(EXPERTS, ('gate', 'down'), (1, 64, 256, 512, 1024, 4096)) for case in bf16_experts(*each)
    ],
    *[packed_rows(model, 4, 4096) for model in MODELS],
    *[case for model in DENSE for T in (64, 512) for case in quantisations(model, T)],
  ]
)


def kernel_rows(case: Case) -> list[dict[str, Any]]:
  """Compile the case; return the row of each of its kernels."""
  compiled = case.compile()
  return [
    {
      'kernel': case.kernel if len(compiled.kernels) == 1 else kernel.name.removeprefix('hopper_'),
      'model': case.model,
      'shape': case.shape,
      'dtype': str(case.dtype),
      'registers': kernel.registers,
      'spilled': kernel.spills,
      'shared KiB': kernel.shared / 1024,
      'temporary MiB': compiled.temporary / MIB,
      'least MiB': case.least.bytes / MIB,
      'MFLOP': case.least.flops / 1e6,
      'FLOP/byte': case.least.flops / case.least.bytes,
    }
    for kernel in compiled.kernels
  ]


def predicted(model: str, name: str, M: int) -> dict[str, Any]:
  """Return the launch of a joined product with M tokens, and its predicted time beside bfloat16's.

  A mixture is assumed to have one block of tokens per expert. M is then the rows of these blocks, padding included.
  """
  (N, K), block = MODELS[model].joined[name], None
  if name in ('gate_up', 'down') and model in EXPERTS:
    layout, (X, _) = block_shapes(model, M), EXPERTS[model]
    block = layout.assignment.shape[1]
    M = X * block
  plan = launch_model.launch(M, N, K, block)
  seconds, bf16 = launch_model.seconds(plan, M, N, K, block), launch_model.bf16_seconds(M, N, K, block)
  return {
    'model': model,
    'product': f'{name} {N}x{K}{f" x{X} in blocks of {block}" if block else ""}',
    'M': M,
    'rows': plan.rows,
    'tokens': plan.tokens,
    'splits': plan.splits,
    'together': 'x'.join(map(str, plan.together)),
    'stages': plan.stages,
    'wave use %': round(100 * plan.wave_use),
    'partial MiB': plan.partial_bytes / MIB,
    'us': seconds * 1e6,
    'bf16 us': bf16 * 1e6,
    'speedup': bf16 / seconds,
  }


def main() -> None:
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  parser.add_argument('--predict', action='store_true', help='predict the times of FP8 products instead; needs no compiler')
  args = parser.parse_args()
  if args.predict:
    names = [(model, name) for model in (*DENSE[1:], *EXPERTS) for name in MODELS[model].joined]
    rows = [predicted(*each, M) for each in names for M in (1, 16, 64, 256, 512, 4096)]
    rows = list({tuple(line.values()): line for line in rows}.values())  # small values of M give the experts the same blocks
    result = {'products': len(rows), 'lowest speedup': min(line['speedup'] for line in rows)}
    return report(args.save or 'launch_model', rows, result, bool(args.save))
  from sprl.planning.aot import missing

  if reason := missing():
    raise SystemExit(reason)
  rows = [line for case in CASES for line in kernel_rows(case)]
  result = {'compiled': len(rows), 'spilled': sum(line['spilled'] for line in rows)}
  report(args.save or 'kernel_resources', rows, result, bool(args.save))


if __name__ == '__main__':
  main()
