"""Decode attention for NVIDIA Hopper, in Pallas Mosaic GPU: one program for each row, kv head and split of the slots.

The bytes of the cache bound a decode step. A program therefore reads them once, through a ring of blocks that the copy engine
(TMA) fills. Everything else stays on the multiprocessor:

    1. scores^T [block, 8] = k [block, D] @ q^T [D, 8]        slots are the tensor core's 64 rows: no row is padding
    2. running maximum and sum of each query over the slots     exp2 everywhere: the scores' factor includes log2(e)
    3. out^T [D, 8] += v^T [D, block] @ p^T [block, 8]

The G <= 8 queries of a group are the 8 columns of one product and share one read of the cache. FP8 codes are widened to float16,
which holds every e4m3 number exactly. Keys are widened in registers. Values are widened into shared memory, because the tensor
core reads a transposed operand only from there, and none of 8 bits; the threads do so while the tensor core computes the scores
of the same block. `fp8_softmax` therefore rounds p to e4m3 numbers and stores these as float16 too: the product is that of the
codes. The second codes of keys (sprl/cache/key_bias.py) are 16 more columns of the first product.

A program that has a row for itself writes outputs in bfloat16, scaled: attention is one launch. If rows and kv heads are too few
to fill the device, several programs share the blocks of a row, and `_merged` combines their results by their log-sum-exp. The
attention probabilities of the slots (`share`) need the final sum, so programs that return them do not split rows: they keep the
scores in shared memory until the end.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sprl.kernels.fp8_softmax import origin, rounded

QUERIES = 8  # columns of a tensor core product: its minimum, and the largest group that the kernel takes
BLOCK = 64  # slots per step: the tensor core's rows
SECOND = 16  # second codes of a key, if it has any: the inner width of one product
STAGES = 4  # maximum number of blocks in flight
PROGRAMS = 264  # two per multiprocessor; with fewer rows times kv heads, rows are split
SPLIT = 256  # minimum number of slots of a split
# Bytes of shared memory per program if a multiprocessor holds three, two or one (228 KiB, less 1 KiB each), and the fewest stages
# for which that many programs pay off: more programs hide more waiting time, but share the memory for their rings.
SHARED = ((75 * 1024, 3), (113 * 1024, 2), (227 * 1024, 2))
OVERHEAD = 4096  # upper bound on the bytes of shared memory that Mosaic uses for reductions, barriers and alignment
LEAST = -1e30  # stands for -inf: -inf - -inf would be nan
FP8 = jnp.float8_e4m3fn

Shape = jax.ShapeDtypeStruct
MATRIX = plgpu.Layout.WGMMA  # [64 n, 8 m]: the layout of the tensor core's results
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED  # a layout in which the transposed matrix is read and written in vectors
PER_QUERY = MATRIX.reduce(0)


@dataclass(frozen=True)
class Launch:
  """The kernel's launch parameters for a shape."""

  stages: int  # blocks in flight; 0 if fewer than two fit
  splits: int  # programs that share a row's slots
  shared: int  # bytes of shared memory per program


def launch(N: int, S: int, D: int, dtype: Any, share: bool, second: bool) -> Launch:
  """Return the launch parameters for N = rows times kv heads, S slots and heads of width D, stored in `dtype`."""
  size, padded = jnp.dtype(dtype).itemsize, _up(D, 64)
  stage = BLOCK * (D + padded) * size + (BLOCK * SECOND if second else 0)
  widened = 2 * BLOCK * padded if size == 1 else 0
  scores = 4 * QUERIES * _up(S, BLOCK) if share else 0
  fixed = 2 * QUERIES * (padded + SECOND + BLOCK) + widened + scores + OVERHEAD
  room = next((room for room, least in SHARED if room >= fixed + least * stage), 0)
  stages = min(STAGES, max(0, room - fixed) // stage)
  splits = 1 if share else max(1, min(PROGRAMS // N, -(-S // SPLIT)))
  return Launch(stages, splits, fixed + stages * stage)


def obstacle(q: Array | Shape, k: Array | Shape, second: Any, share: bool) -> str | None:
  """Return why the kernel cannot take arrays of these shapes and dtypes, or None if it can."""
  (B, K, S, D), G = k.shape, q.shape[1] // k.shape[1]
  if q.dtype != jnp.bfloat16:
    return f'queries are {q.dtype}, not bfloat16'
  if k.dtype not in (jnp.bfloat16, FP8):
    return f'the cache is {k.dtype}, neither bfloat16 nor float8_e4m3fn'
  if G > QUERIES:
    return f'{G} queries share a kv head, more than {QUERIES}'
  if not 64 <= D <= 256 or D * k.dtype.itemsize % 32:
    return f'heads are {D} wide: expected 64 to 256, and a multiple of 32 bytes in the cache'
  if S % 8:
    return f'{S} slots are not a multiple of 8'
  if second is not None and (second[1].dtype, second[1].shape[-1]) != (FP8, SECOND):
    return f'keys have {second[1].shape[-1]} second codes in {second[1].dtype}: expected {SECOND} in float8_e4m3fn'
  if launch(B * K, S, D, k.dtype, share, second is not None).stages == 0:
    return f'the scores of {S} slots leave too little shared memory for two blocks'
  return None


def decode_attention(
  q: Float[Array, 'B H D'],
  k: Float[Array, 'B K S D'],
  v: Float[Array, 'B K S D'],
  length: Int[Array, ' B'],
  scales: tuple[Float[Array, ''], Float[Array, '']],
  second: tuple[Float[Array, 'B H W'], Float[Array, 'B K S W']] | None,
  share: bool,
  fp8_softmax: bool = False,
  interpret: Any = None,
) -> tuple[Float[Array, 'B H D'], Float[Array, 'B H'], Float[Array, 'B K S'] | None]:
  """Return output, log-sum-exp and, with `share`, the attention probability of each slot averaged over the group (else None).

  `sprl.kernels.decode_attention.decode_attention` describes the arguments. `interpret=plgpu.InterpretGPUParams()` runs the kernel
  on a CPU.
  """
  (B, H, D), (K, S) = q.shape, k.shape[1:3]
  N, G, padded = B * K, H // K, _up(D, 64)
  plan = launch(N, S, D, k.dtype, share, second is not None)
  quantised = k.dtype == FP8
  compute = jnp.float16 if quantised else jnp.bfloat16
  k_scale, v_scale = scales
  factors = jnp.stack([k_scale * (D**-0.5 * math.log2(math.e)), v_scale]).astype(jnp.float32)

  # Both operands of a product have the same tile width: the largest that divides D, up to the widest swizzle of 128 bytes. The
  # kernel itself writes the values widened from FP8, so they can have the widest.
  narrow, wide = math.gcd(D, 64), 64 if quantised else math.gcd(D, 64)
  held = math.gcd(D, 128) if quantised else narrow
  queries = q
  if second is not None:  # in one array, which XLA casts in one launch; it has whole tiles
    queries = jnp.concatenate([q, second[0], jnp.zeros((B, H, narrow - SECOND), q.dtype)], axis=-1)
  out_s = _tiled((QUERIES, padded), jnp.bfloat16, narrow) if plan.splits == 1 else None
  scratch = {
    'q_or_out_s': _shared(_tiled((QUERIES, D), compute, narrow), out_s),
    'k_s': _tiled((plan.stages, BLOCK, D), k.dtype, held),
    'v_s': _tiled((plan.stages, BLOCK, padded), k.dtype, held),
    'p_s': _tiled((QUERIES, BLOCK), compute, wide),
    'wide_s': _tiled((BLOCK, padded), compute, wide) if quantised else None,
    'wide_k': _tiled((BLOCK, D), compute, narrow) if quantised and interpret else None,
    'q_second_s': _tiled((QUERIES, SECOND), compute, SECOND) if second is not None else None,
    'second_s': plgpu.SMEM((plan.stages, BLOCK, SECOND), FP8) if second is not None else None,
    'wide_second': _tiled((BLOCK, SECOND), compute, SECOND) if second is not None and interpret else None,
    'scores_s': plgpu.SMEM((_up(S, BLOCK), QUERIES), jnp.float32) if share else None,
    'lse_s': plgpu.SMEM((QUERIES,), jnp.float32),
    'q_came': plgpu.Barrier(num_arrivals=1 if second is None else 2),
    'k_came': plgpu.Barrier(num_arrivals=1 if second is None else 2, num_barriers=plan.stages),
    'v_came': plgpu.Barrier(num_barriers=plan.stages),
  }
  outs = [
    Shape((N, G, D), jnp.bfloat16) if plan.splits == 1 else Shape((N, plan.splits, padded, QUERIES), jnp.float32),
    Shape((N, plan.splits, QUERIES), jnp.float32),
    Shape((N, _up(S, BLOCK)), jnp.float32) if share else None,
  ]

  def hopper_decode_attention(*refs, **scratch):  # the program's name in profiles
    _program(*refs, **scratch, kv_heads=K, group=G, splits=plan.splits, stages=plan.stages, fp8_softmax=fp8_softmax)

  out, lse, shares = plgpu.kernel(
    hopper_decode_attention,
    out_type=outs,
    scratch_types=scratch,
    grid=(plan.splits, N),
    grid_names=('split', 'row'),
    compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
  )(
    _saturated(queries, compute).reshape(N, G, -1),
    k.reshape(N, S, D),
    v.reshape(N, S, D),
    length,
    factors,
    None if second is None else second[1].reshape(N, S, SECOND),
  )
  lse = lse[..., :G]
  if plan.splits == 1:
    lse = lse[:, 0] * math.log(2)
  else:
    out, lse = _merged(out[..., :D, :G], lse)
    out = (out * v_scale).astype(q.dtype)
  return (
    out.reshape(B, H, D),
    lse.reshape(B, H),
    None if shares is None else shares[:, :S].reshape(B, K, S),
  )


def _program(
  q_ref,  # [N, G, D]; with second codes 16 more columns, and padding
  k_ref,  # [N, S, D]
  v_ref,  # [N, S, D]
  length_ref,  # [B]
  factor_ref,  # [2]: factor of q . k in the exponent of 2, and of the values
  second_ref,  # [N, S, 16] or None
  out_ref,  # [N, G, D], bfloat16; with splits [N, splits, D rounded up to 64, 8], float32
  lse_ref,  # [N, splits, 8], base 2
  share_ref,  # [N, S rounded up to BLOCK] or None
  *,
  q_or_out_s,
  k_s,
  v_s,
  p_s,
  wide_s,
  wide_k,
  q_second_s,
  second_s,
  wide_second,
  scores_s,
  lse_s,
  q_came,
  k_came,
  v_came,
  kv_heads,
  group,
  splits,
  stages,
  fp8_softmax,
):
  row, split = lax.axis_index('row'), lax.axis_index('split')
  q_s, out_s = q_or_out_s if splits == 1 else (q_or_out_s, None)
  # Rows that have ended have length 0. The bound is for callers that count a token without a slot.
  length = lax.min(length_ref[lax.div(row, jnp.int32(kv_heads))], jnp.int32(k_ref.shape[1]))
  factor = factor_ref[0]
  blocks = pl.cdiv(length, jnp.int32(BLOCK))
  first, last = lax.div(split * blocks, jnp.int32(splits)), lax.div((split + 1) * blocks, jnp.int32(splits))
  # The copy engine writes zeros past G, S and D. Tracing would check a constant start against these bounds and fail.
  start = lax.min(split, jnp.int32(0))
  queries, columns = pl.ds(start, QUERIES), pl.ds(start, v_s.shape[2])

  def fetch(j):
    slots, stage = pl.ds(j * BLOCK, BLOCK), lax.rem(j - first, jnp.int32(stages))
    plgpu.copy_gmem_to_smem(k_ref.at[row, slots], k_s.at[stage], k_came.at[stage])
    if second_ref is not None:
      plgpu.copy_gmem_to_smem(second_ref.at[row, slots], second_s.at[stage], k_came.at[stage])
    plgpu.copy_gmem_to_smem(v_ref.at[row, slots, columns], v_s.at[stage], v_came.at[stage])

  plgpu.copy_gmem_to_smem(q_ref.at[row, queries, pl.ds(0, k_s.shape[2])], q_s, q_came)
  if second_ref is not None:
    plgpu.copy_gmem_to_smem(q_ref.at[row, queries, pl.ds(k_s.shape[2], SECOND)], q_second_s, q_came)
  for j in range(stages):
    pl.when(first + j < last)(partial(fetch, first + j))
  plgpu.barrier_wait(q_came)

  def step(j, carry):
    acc, top, total = carry
    stage = lax.rem(j - first, jnp.int32(stages))
    plgpu.barrier_wait(k_came.at[stage])
    values = v_s.at[stage]

    def widen():
      plgpu.barrier_wait(v_came.at[stage])
      wide_s[...] = _widened(values, wide_s.dtype)

    products = [(_keys(k_s.at[stage], q_s.dtype, wide_k), q_s.T)]
    if second_s is not None:
      products.append((_keys(second_s.at[stage], q_s.dtype, wide_second), q_second_s.T))
    # While the tensor core multiplies, the threads widen the values. The product of the step before is done with `wide_s`.
    scores = _product((BLOCK, QUERIES), *products, meanwhile=None if wide_s is None else widen) * factor
    scores = jnp.where(_slots(j) < length, scores, -jnp.inf)
    if scores_s is not None:
      scores_s[pl.ds(j * BLOCK, BLOCK)] = scores
    largest = jnp.max(scores, axis=0)
    new_top = jnp.maximum(top, origin(largest) if fp8_softmax else largest)
    p, shrink = jnp.exp2(scores - _rows(new_top, scores)), jnp.exp2(top - new_top)
    p_s.T[...] = plgpu.layout_cast((rounded(p) if fp8_softmax else p).astype(p_s.dtype), TRANSPOSED)
    if wide_s is None:
      plgpu.barrier_wait(v_came.at[stage])
    plgpu.commit_smem()
    acc = acc * _rows(shrink, acc) + _product(acc.shape, ((values if wide_s is None else wide_s).T, p_s.T))
    pl.when(j + stages < last)(partial(fetch, j + stages))  # into the stage read in this step
    return acc, new_top, total * shrink + jnp.sum(p, axis=0)

  nothing = plgpu.layout_cast(jnp.zeros((v_s.shape[2], QUERIES), jnp.float32), MATRIX), _filled(LEAST), _filled(0.0)
  acc, top, total = lax.fori_loop(first, last, step, nothing)
  out = acc / _rows(jnp.maximum(total, 1e-30), acc)
  if out_s is None:
    out_ref[row, split] = out
  else:
    out_s.T[...] = plgpu.layout_cast((out * factor_ref[1]).astype(out_s.dtype), TRANSPOSED)
  lse = top + jnp.log(total) * math.log2(math.e)
  lse_s[...] = lse
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(lse_s, lse_ref.at[row, split])
  if out_s is not None:
    plgpu.copy_smem_to_gmem(out_s, out_ref.at[row, queries, columns])  # the copy engine drops what is past G and D

  if share_ref is not None:

    def write(j, _):
      scores = plgpu.load(scores_s.at[pl.ds(j * BLOCK, BLOCK)], layout=MATRIX)
      query = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX)
      p = jnp.where((_slots(j) < length) & (query < group), jnp.exp2(scores - _rows(lse, scores)), 0.0)
      share_ref[row, pl.ds(j * BLOCK, BLOCK)] = jnp.sum(p, axis=1) * (1 / group)

    lax.fori_loop(0, share_ref.shape[1] // BLOCK, write, None)
  plgpu.wait_smem_to_gmem(0)


def _product(shape, *pairs, meanwhile=None):
  """Return the sum of a @ b in float32. `a` is in shared memory or in registers, `b` in shared memory.

  `meanwhile()` runs after the products are issued, before their result is waited for.
  """

  def multiply(acc):
    for a, b in pairs:
      plgpu.wgmma(acc, a, b)
    if meanwhile is not None:
      meanwhile()
    return acc[...]

  return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _keys(ref, dtype, wide_k):
  """Return a block of keys as the left operand of a product in `dtype`.

  `wide_k` is shared memory for widened keys, in the interpreter only: it reads operands from shared memory only.
  """
  if ref.dtype == dtype:
    return ref
  keys = _widened(ref, dtype)
  if wide_k is None:
    return keys
  wide_k[...] = keys
  plgpu.commit_smem()
  return wide_k


def _widened(ref, dtype):
  """Return FP8 codes from shared memory as numbers in registers, in the layout of a left operand."""
  return plgpu.layout_cast(plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(dtype), MATRIX)


def _slots(j):
  """Return the slot numbers of block j, [BLOCK, 8]."""
  return plgpu.broadcasted_iota(jnp.int32, (BLOCK, QUERIES), 0, layout=MATRIX) + j * BLOCK


def _rows(per_query, like):
  return lax.broadcast_in_dim(per_query, like.shape, [1])


def _filled(value):
  return plgpu.layout_cast(jnp.full((QUERIES,), value, jnp.float32), PER_QUERY)


def _merged(out: Float[Array, 'N P D G'], lse: Float[Array, 'N P G']) -> tuple[Float[Array, 'N G D'], Float[Array, 'N G']]:
  """Merge the outputs and base-2 log-sum-exps of P splits into one output and one natural log-sum-exp (-inf for no slots)."""
  top = jnp.maximum(jnp.max(lse, axis=1, keepdims=True), LEAST)
  weight = jnp.exp2(lse - top)
  total = jnp.sum(weight, axis=1)
  out = jnp.sum(out * weight[:, :, None], axis=1) / jnp.maximum(total, 1e-30)[:, None]
  return jnp.swapaxes(out, 1, 2), (top[:, 0] + jnp.log2(total)) * math.log(2)


def _saturated(q, dtype):
  """Cast q to `dtype`, clipped to its range: at float16's 65,504 attention is one-hot in any case."""
  if q.dtype == dtype:
    return q
  limit = float(jnp.finfo(dtype).max)
  return jnp.clip(q.astype(jnp.float32), -limit, limit).astype(dtype)


def _shared(first, then):
  """Return one piece of shared memory for two arrays, of which the second is written when the first is no longer read."""
  return first if then is None else plgpu.RefUnion(first, then)


def _tiled(shape, dtype, columns):
  """Return shared memory in swizzled tiles of 8 rows: the layout that copy engine and tensor core share."""
  swizzle = columns * jnp.dtype(dtype).itemsize
  tiles = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, dtype, transforms=tiles)


def _up(n: int, multiple: int) -> int:
  return -(-n // multiple) * multiple
