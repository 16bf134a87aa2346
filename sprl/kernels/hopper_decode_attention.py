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

A program usually computes one kv head of one row and writes its output in bfloat16, scaled. The programs of a team form a cluster
and own as many of these rows together. A long row is computed in parts, which are merged by their maxima and sums. If one row is
much longer than the others of its team, or if rows and kv heads are too few to fill the device, the team divides the parts of its
rows. Each program then writes the float32 results of its parts to global memory, where the L2 cache holds them. After all members
have written, each merges one row. A row's parts and their order depend on its own length only, so its output does not depend on
the other rows. sprl/kernels/attention_launch.py chooses the teams.

The attention probabilities of the slots (`share`) need the final sum, so programs that return them have no team: they keep the
scores in shared memory until the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sprl.kernels.attention_launch import BLOCK, QUERIES, SECOND, Launch, launch, up
from sprl.kernels.fp8_softmax import origin, rounded
from sprl.kernels.hopper_cluster import meet
from sprl.kernels.hopper_product import product
from sprl.kernels.lowering import lowered_once

LEAST = -1e30  # stands for -inf: -inf - -inf would be nan
FP8 = jnp.float8_e4m3fn

Shape = jax.ShapeDtypeStruct
MATRIX = plgpu.Layout.WGMMA  # [64 n, 8 m]: the layout of the tensor core's results
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED  # a layout in which the transposed matrix is read and written in vectors
PER_QUERY = MATRIX.reduce(0)


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
    return (
      f'{S} slots are not a multiple of 8: config.sampling.max_prompt + config.sampling.max_tokens, or config.cache.budget + '
      "config.cache.interval, or the model's sliding window"
    )
  if second is not None and (second[1].dtype, second[1].shape[-1]) != (FP8, SECOND):
    return f'keys have {second[1].shape[-1]} second codes in {second[1].dtype}: expected {SECOND} in float8_e4m3fn'
  if launch(B * K, S, D, k.dtype, share, second is not None).stages == 0:
    return f'the scores of {S} slots leave too little shared memory for two blocks'
  return None


@lowered_once('share', 'fp8_softmax', 'interpret')
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
  N, G, padded = B * K, H // K, up(D, 64)
  plan = launch(N, S, D, k.dtype, share, second is not None)
  quantised, team = k.dtype == FP8, plan.members > 1
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
  out_s = _tiled((QUERIES, padded), jnp.bfloat16, narrow)
  scratch = {
    'q_or_out_s': plgpu.RefUnion(_tiled((QUERIES, D), compute, narrow), out_s),  # a row's output, when its q is no longer read
    'k_s': _tiled((plan.stages, BLOCK, D), k.dtype, held),
    'v_s': _tiled((plan.stages, BLOCK, padded), k.dtype, held),
    'p_s': _tiled((QUERIES, BLOCK), compute, wide),
    'wide_s': _tiled((BLOCK, padded), compute, wide) if quantised else None,
    'wide_k': _tiled((BLOCK, D), compute, narrow) if quantised and interpret else None,
    'q_second_s': _tiled((QUERIES, SECOND), compute, SECOND) if second is not None else None,
    'second_s': plgpu.SMEM((plan.stages, BLOCK, SECOND), FP8) if second is not None else None,
    'wide_second': _tiled((BLOCK, SECOND), compute, SECOND) if second is not None and interpret else None,
    'scores_s': plgpu.SMEM((up(S, BLOCK), QUERIES), jnp.float32) if share else None,
    'lse_s': plgpu.SMEM((QUERIES,), jnp.float32),
    'stats_s': plgpu.SMEM((2, QUERIES), jnp.float32) if team else None,
    'q_came': plgpu.Barrier(num_arrivals=1 if second is None else 2),
    'k_came': plgpu.Barrier(num_arrivals=1 if second is None else 2, num_barriers=plan.stages),
    'v_came': plgpu.Barrier(num_barriers=plan.stages),
    'written': plgpu.ClusterBarrier(collective_axes=('member',)) if team else None,
  }
  outs = [
    Shape((N, G, D), jnp.bfloat16),
    Shape((N, QUERIES), jnp.float32),
    Shape((N, up(S, BLOCK)), jnp.float32) if share else None,
    Shape((plan.teams, plan.rows, plan.parts, padded, QUERIES), jnp.float32) if team else None,
    Shape((plan.teams, plan.rows, plan.parts, 2, QUERIES), jnp.float32) if team else None,
  ]

  def hopper_decode_attention(*refs, **scratch):  # the program's name in profiles
    _program(*refs, **scratch, plan=plan, kv_heads=K, group=G, fp8_softmax=fp8_softmax)

  out, lse, shares, *_ = plgpu.kernel(
    hopper_decode_attention,
    out_type=outs,
    scratch_types=scratch,
    grid=(plan.teams,),
    grid_names=('team',),
    cluster=(plan.members,) if team else (),
    cluster_names=('member',) if team else (),
    compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret and replace(interpret, inline_mgpu='ignore'),  # the interpreter needs no fences
  )(
    _saturated(queries, compute).reshape(N, G, -1),
    k.reshape(N, S, D),
    v.reshape(N, S, D),
    length,
    factors,
    None if second is None else second[1].reshape(N, S, SECOND),
  )
  lse = lse[..., :G] * math.log(2)
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
  out_ref,  # [N, G, D]
  lse_ref,  # [N, 8], base 2
  share_ref,  # [N, S rounded up to BLOCK] or None
  parts_ref,  # [teams, rows, parts, D rounded up to 64, 8], or None without teams
  stats_ref,  # [teams, rows, parts, 2, 8]: maximum, in base 2, and sum of each part; or None
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
  stats_s,
  q_came,
  k_came,
  v_came,
  written,
  plan: Launch,
  kv_heads,
  group,
  fp8_softmax,
):
  q_s, out_s = q_or_out_s
  team = lax.axis_index('team')
  member = lax.axis_index('member') if plan.members > 1 else jnp.int32(0)
  factor = factor_ref[0]
  N, stages = k_ref.shape[0], jnp.int32(plan.stages)
  # The copy engine writes zeros past G, S and D. Tracing would check a constant start against these bounds and fail.
  start = lax.min(team, jnp.int32(0))
  queries, columns = pl.ds(start, QUERIES), pl.ds(start, v_s.shape[2])

  # The rows of a team are apart, because neighbours are kv heads of one sequence: they are long at the same time.
  # A length is read again where it is needed: a register less.
  length_of = partial(_length, length_ref, kv_heads, k_ref.shape)
  work = _Work.of([pl.cdiv(length_of(team + i * plan.teams), jnp.int32(BLOCK)) for i in range(plan.rows)], member, plan)
  lo, hi = work.lo, work.hi

  def fetch(j):
    i = work.row(j)
    row, slots, stage = team + i * plan.teams, pl.ds((j - work.start(i)) * BLOCK, BLOCK), lax.rem(j - lo, stages)
    plgpu.copy_gmem_to_smem(k_ref.at[row, slots], k_s.at[stage], k_came.at[stage])
    if second_ref is not None:
      plgpu.copy_gmem_to_smem(second_ref.at[row, slots], second_s.at[stage], k_came.at[stage])
    plgpu.copy_gmem_to_smem(v_ref.at[row, slots, columns], v_s.at[stage], v_came.at[stage])

  for j in range(plan.stages):
    pl.when(lo + j < hi)(partial(fetch, lo + j))

  def step(limit, j, carry):
    acc, top, total = carry
    stage = lax.rem(j - lo, stages)
    plgpu.barrier_wait(k_came.at[stage])
    values = v_s.at[stage]

    def widen():
      plgpu.barrier_wait(v_came.at[stage])
      wide_s[...] = _widened(values, wide_s.dtype)

    products = [(_keys(k_s.at[stage], q_s.dtype, wide_k), q_s.T)]
    if second_s is not None:
      products.append((_keys(second_s.at[stage], q_s.dtype, wide_second), q_second_s.T))
    # While the tensor core multiplies, the threads widen the values. The product of the step before is done with `wide_s`.
    scores = product((BLOCK, QUERIES), *products, meanwhile=None if wide_s is None else widen) * factor
    scores = jnp.where(_slots(j) < limit, scores, -jnp.inf)
    if scores_s is not None:
      scores_s[pl.ds(j * BLOCK, BLOCK)] = scores
    largest = jnp.max(scores, axis=0)
    new_top = jnp.maximum(top, origin(largest) if fp8_softmax else largest)
    p, shrink = jnp.exp2(scores - _rows(new_top, scores)), jnp.exp2(top - new_top)
    p_s.T[...] = plgpu.layout_cast((rounded(p) if fp8_softmax else p).astype(p_s.dtype), TRANSPOSED)
    if wide_s is None:
      plgpu.barrier_wait(v_came.at[stage])
    plgpu.commit_smem()
    acc = acc * _rows(shrink, acc) + product(acc.shape, ((values if wide_s is None else wide_s).T, p_s.T))
    pl.when(j + stages < hi)(partial(fetch, j + stages))  # into the stage read in this step
    return acc, new_top, total * _rows(shrink, total) + p

  def part(begin, end, limit):
    """Return output, maximum and sum of some blocks, unscaled. Slots from `limit` on, counted over the team's rows, are empty."""
    nothing = _zeros((v_s.shape[2], QUERIES)), _filled(LEAST), _zeros((BLOCK, QUERIES))
    acc, top, weights = lax.fori_loop(begin, end, partial(step, limit), nothing)
    return acc, top, jnp.sum(weights, axis=0)  # here, not in every step: the sum over slots crosses warps

  def attend(i):
    """Attend to the blocks of the team's row i that this program owns."""
    row, first, last = team + i * plan.teams, work.start(i), work.end(i)
    length = length_of(row)
    limit = first * BLOCK + length
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output of the row before is in the memory of q

    @pl.when(first < last)
    def _():
      plgpu.copy_gmem_to_smem(q_ref.at[row, queries, pl.ds(0, k_s.shape[2])], q_s, q_came)
      if second_ref is not None:
        plgpu.copy_gmem_to_smem(q_ref.at[row, queries, pl.ds(k_s.shape[2], SECOND)], q_second_s, q_came)
      plgpu.barrier_wait(q_came)

    if parts_ref is None:
      write(row, part(first, last, limit))
      if share_ref is not None:
        write_share(row, length)
      return

    keep_stats(_filled(LEAST), _filled(0.0))

    def add(p, whole):
      begin, end = work.part(i, p)
      mine = work.mine(i, begin, end)
      found = acc, top, total = part(begin, jnp.where(mine, end, begin), limit)
      whole, *stats = _merged((whole, *(plgpu.load(stats_s.at[n], layout=PER_QUERY) for n in (0, 1))), found)
      # Maximum and sum of the whole row wait in shared memory: in registers, FP8 would need more than three programs can have.
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      keep_stats(*(jnp.where(work.divided, own, merged) for own, merged in zip((top, total), stats, strict=True)))

      @pl.when(work.divided & mine)
      def _():
        parts_ref[team, i, p] = acc
        plgpu.copy_smem_to_gmem(stats_s, stats_ref.at[team, i, p])

      return whole

    whole = lax.fori_loop(0, work.count(i), add, _zeros((v_s.shape[2], QUERIES)))
    stats = [plgpu.load(stats_s.at[n], layout=PER_QUERY) for n in (0, 1)]
    pl.when(jnp.logical_not(work.divided))(lambda: write(row, (whole, *stats)))

  def keep_stats(top, total):
    plgpu.commit_smem()  # the numbers before have been read
    stats_s[0], stats_s[1] = top, total
    plgpu.commit_smem()

  def write(row, whole):
    acc, top, total = whole
    out = acc / _rows(jnp.maximum(total, 1e-30), acc)
    out_s.T[...] = plgpu.layout_cast((out * factor_ref[1]).astype(out_s.dtype), TRANSPOSED)
    lse_s[...] = top + jnp.log(total) * math.log2(math.e)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(lse_s, lse_ref.at[row])
    plgpu.copy_smem_to_gmem(out_s, out_ref.at[row, queries, columns])  # the copy engine drops what is past G and D

  def write_share(row, length):
    lse = plgpu.load(lse_s, layout=PER_QUERY)

    def block(j, _):
      scores = plgpu.load(scores_s.at[pl.ds(j * BLOCK, BLOCK)], layout=MATRIX)
      query = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX)
      p = jnp.where((_slots(j) < length) & (query < group), jnp.exp2(scores - _rows(lse, scores)), 0.0)
      share_ref[row, pl.ds(j * BLOCK, BLOCK)] = jnp.sum(p, axis=1) * (1 / group)

    lax.fori_loop(0, share_ref.shape[1] // BLOCK, block, None)

  def each(i, _):
    exists = team + i * plan.teams < N
    ours = (lax.max(lo, work.start(i)) < lax.min(hi, work.end(i))) | (jnp.logical_not(work.divided) & (i == member))
    pl.when(exists & ours)(lambda: attend(i))

  if plan.members == 1:
    attend(jnp.int32(0))
  else:
    lax.fori_loop(0, plan.rows, each, None)

    @pl.when(work.divided)
    def _():
      plgpu.wait_smem_to_gmem(0)
      meet(written)
      row = team + member * plan.teams

      def add(p, whole):
        top, total = (plgpu.load(stats_ref.at[team, member, p, n], layout=PER_QUERY, optimized=False) for n in (0, 1))
        return _merged(whole, (plgpu.load(parts_ref.at[team, member, p], layout=MATRIX, optimized=False), top, total))

      nothing = _zeros((v_s.shape[2], QUERIES)), _filled(LEAST), _filled(0.0)
      pl.when((member < plan.rows) & (row < N))(lambda: write(row, lax.fori_loop(0, work.count(member), add, nothing)))

  plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Work:
  """How a team shares the blocks of its rows, as one of its members sees it. Blocks are numbered over all rows of the team.

  All numbers are traced. `sprl.kernels.attention_launch.shares` says the same in Python.
  """

  starts: Sequence[Any]  # first block of each row
  ends: Sequence[Any]
  divided: Any  # False: every member owns the row of its number
  member: Any
  plan: Launch
  lo: Any = 0  # the blocks of this member
  hi: Any = 0

  @classmethod
  def of(cls, blocks: Sequence[Any], member: Any, plan: Launch) -> '_Work':
    """Share rows of so many blocks."""
    ends = [reduce(lax.add, blocks[: i + 1]) for i in range(len(blocks))]
    starts = [jnp.int32(0), *ends[:-1]]
    if plan.members == 1:
      return cls(starts, ends, jnp.bool_(False), member, plan, starts[0], ends[0])
    longest = reduce(lax.max, blocks)
    longer = (longest > plan.least) & (longest * plan.members >= 2 * ends[-1])
    divided = longer if plan.rows == plan.members else longest >= 0  # always: Mosaic takes no boolean constants
    work = cls(starts, ends, divided, member, plan)
    lo, hi = ends[-1], jnp.int32(0)
    for i in range(plan.rows):
      for p in range(plan.parts):
        begin, end = work.part(i, p)
        mine = work.mine(i, begin, end)
        lo, hi = jnp.where(mine, lax.min(lo, begin), lo), jnp.where(mine, lax.max(hi, end), hi)
    return replace(work, lo=lo, hi=hi)

  def start(self, i):
    return _pick(self.starts, i)

  def end(self, i):
    return _pick(self.ends, i)

  def row(self, j):
    """Return the row of a block."""
    return reduce(lax.add, [(j >= start).astype(jnp.int32) for start in self.starts[1:]], jnp.int32(0))

  def size(self, i):
    """Return the number of blocks of a part of a row."""
    parts = jnp.int32(self.plan.parts)
    return lax.max(jnp.int32(self.plan.least), lax.div(self.end(i) - self.start(i) + (parts - 1), parts))

  def count(self, i):
    """Return the number of parts of a row."""
    return lax.div(self.end(i) - self.start(i) + (self.size(i) - 1), self.size(i))

  def part(self, i, p):
    """Return the first block of a part of a row, and the one after its last."""
    begin = self.start(i) + p * self.size(i)
    return begin, lax.min(begin + self.size(i), self.end(i))

  def mine(self, i, begin, end):
    """Return whether this member owns the part with these blocks of row i: the middle of the part decides."""
    total, middle = 2 * self.ends[-1], (begin + end) * self.plan.members
    inside = (self.member * total <= middle) & (middle < (self.member + 1) * total)
    return (begin < end) & jnp.where(self.divided, inside, i == self.member)


def _merged(one, other):
  """Merge (output, maximum, sum) of two parts of a row, unscaled.

  The larger maximum stays. One product and one sum of each number leave no choice of rounding to the compiler, so a row has the
  same bits whether one program computes its parts or several do.
  """
  (acc, top, total), (acc2, top2, total2) = one, other
  first, shrink = top >= top2, jnp.exp2(-jnp.abs(top - top2))
  larger = _rows(first, acc)
  acc = jnp.where(larger, acc, acc2) + jnp.where(larger, acc2, acc) * _rows(shrink, acc)
  total = jnp.where(first, total, total2) + jnp.where(first, total2, total) * shrink
  return acc, jnp.maximum(top, top2), total


def _pick(values, i):
  """Return values[i]; i may be traced."""
  if isinstance(i, int):
    return values[i]
  return reduce(lambda found, k: jnp.where(i == k, values[k], found), range(1, len(values)), values[0])


def _length(length_ref, kv_heads, shape, row):
  """Return the number of occupied slots of a row; 0 for a row past the last."""
  N, S = shape[:2]
  # Rows that have ended have length 0. The bound is for callers that count a token without a slot.
  length = lax.min(length_ref[lax.div(lax.min(row, jnp.int32(N - 1)), jnp.int32(kv_heads))], jnp.int32(S))
  return jnp.where(row < N, length, 0)


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
  # The codes change their layout, not the numbers: four fit into one register, and so into one shuffle.
  return plgpu.layout_cast(plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X), MATRIX).astype(dtype)


def _slots(j):
  """Return the slot numbers of block j, [BLOCK, 8]."""
  return plgpu.broadcasted_iota(jnp.int32, (BLOCK, QUERIES), 0, layout=MATRIX) + j * BLOCK


def _rows(per_query, like):
  return lax.broadcast_in_dim(per_query, like.shape, [1])


def _zeros(shape):
  return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX)


def _filled(value):
  return plgpu.layout_cast(jnp.full((QUERIES,), value, jnp.float32), PER_QUERY)


def _saturated(q, dtype):
  """Cast q to `dtype`, clipped to its range: at float16's 65,504 attention is one-hot in any case."""
  if q.dtype == dtype:
    return q
  limit = float(jnp.finfo(dtype).max)
  return jnp.clip(q.astype(jnp.float32), -limit, limit).astype(dtype)


def _tiled(shape, dtype, columns):
  """Return shared memory in swizzled tiles of 8 rows: the layout that copy engine and tensor core share."""
  swizzle = columns * jnp.dtype(dtype).itemsize
  tiles = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, dtype, transforms=tiles)
