"""The two operations of eviction for NVIDIA Hopper, in Pallas Mosaic GPU: move kept slots to the front, and compare keys.

`compact` moves the kept slots of a row to its front, in place. One program moves the keys or the values of one row and kv head.
All its threads read a group of kept slots. Then the copy engine (TMA) writes the group to its place, in one piece. Slot t comes
from slot keep[t]. keep ascends, so keep[t] >= t, and a write never reaches slots that later groups still read.

`similarity` compares 64 keys of a row and kv head with all keys, 64 at a time, from a ring that the copy engine fills. Only the
sums of the cosines and each key's newest near-duplicate leave the registers. No [S, S] array exists.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from sprl.kernels.hopper_product import product
from sprl.kernels.lowering import lowered_once
from sprl.kernels.rounding import to_bfloat16

THREADS = 128  # threads of a program of `compact`
GROUP = 8192  # maximum bytes of a group of slots
HELD = 32  # maximum registers per thread that hold a group; twice as many take three times as long to compile
LINE = 16  # bytes; the copy engine moves multiples of it
ALIGNMENT = 128  # bytes; the copy engine reads shared memory from a multiple of it
BLOCK = 64  # keys of a tensor core product
STAGES = 2  # two programs then share a multiprocessor, also with float32 keys, and hide each other's waits

MATRIX = plgpu.Layout.WGMMA
PER_KEY = MATRIX.reduce(1)
LANE = plgpu.LoweringSemantics.Lane
Shape = jax.ShapeDtypeStruct


def compaction_obstacle(k: Array | Shape) -> str | None:
  """Return why `compact` cannot move slots of this shape and dtype, or None if it can."""
  if k.shape[-1] * k.dtype.itemsize % LINE:
    return f'heads are {k.shape[-1]} wide in {k.dtype}, not a multiple of {LINE} bytes'
  if not _slots_of_a_group(k.shape[-1], k.dtype.itemsize):
    return f'heads are {k.shape[-1]} wide in {k.dtype}: a slot needs more than {HELD} registers of each thread'
  return None


@lowered_once('interpret')
def compact(
  k: Shaped[Array, 'B K S D'],
  v: Shaped[Array, 'B K S D'],
  rows: Int[Array, ' R'],
  keep: Int[Array, 'R K N'],
  interpret: Any = None,
) -> tuple[Shaped[Array, 'B K S D'], Shaped[Array, 'B K S D']]:
  """Return k, v with slots keep[r] of row rows[r] moved to its slots 0..N-1. keep[r, h] must ascend.

  `sprl.kernels.eviction.compact` describes the arguments. `interpret=plgpu.InterpretGPUParams()` runs the kernel on a CPU.
  """
  (B, K, S, D), N = k.shape, keep.shape[-1]
  slots = [jax.new_ref(x.reshape(B * K, S, D)) for x in (k, v)]
  layout, _ = _spread(D, k.dtype.itemsize)
  size = _slots_of_a_group(D, k.dtype.itemsize)
  aligned = ALIGNMENT // math.gcd(ALIGNMENT, D * k.dtype.itemsize)  # slots that fill whole multiples of ALIGNMENT

  def hopper_compact(k_ref, v_ref, rows_ref, keep_ref, *, group_s):  # the program's name in profiles
    entry = lax.axis_index('entry')
    row = rows_ref[lax.div(entry, jnp.int32(K))]

    def move(ref):
      place = row * K + lax.rem(entry, jnp.int32(K))

      def group(i, _):
        first, half = i * size, lax.rem(i, jnp.int32(2))
        # Past the end, the last slot is read again but not written.
        sources = [keep_ref[entry, lax.min(first + j, jnp.int32(N - 1))] for j in range(size)]
        kept = [plgpu.load(ref.at[place, source], layout=layout, optimized=False) for source in sources]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # waits for the group before the last, which used this half
        for j, numbers in enumerate(kept):
          group_s[half, j] = numbers
        plgpu.commit_smem()  # also: every thread has read the group

        def put(count):
          plgpu.copy_smem_to_gmem(group_s.at[half, pl.ds(0, count)], ref.at[place, pl.ds(first, count)])

        lax.cond(first + size <= N, lambda: put(size), lambda: put(N % size or size))

      lax.fori_loop(0, -(-N // size), group, None)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(row < B)
    def _():
      lax.cond(lax.axis_index('store') == 0, lambda: move(k_ref), lambda: move(v_ref))

  plgpu.kernel(
    hopper_compact,
    out_type=(),
    scratch_types={'group_s': plgpu.SMEM((2, -(-size // aligned) * aligned, D), k.dtype)},
    grid=(2, rows.shape[0] * K),
    grid_names=('store', 'entry'),
    # Threads synchronise before the copies. No other barrier is needed: no thread reads shared memory that another writes.
    compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=LANE),
    interpret=interpret,
  )(*slots, rows, keep.reshape(-1, N))
  new_k, new_v = (jax.freeze(ref).reshape(k.shape) for ref in slots)
  return new_k, new_v


def _slots_of_a_group(D, itemsize):
  _, registers = _spread(D, itemsize)
  return min(GROUP // (D * itemsize), HELD // registers)


def _spread(D, itemsize):
  """Return the layout of a slot in the threads' registers, and the number of registers per thread.

  Each thread holds a part of the slot if D divides evenly. Otherwise each of the four warps holds the whole slot, and all four
  read the same lines: Mosaic (jax 0.12) does not let warps read different slots. The copy engine could fetch slots without
  threads, but only in multiples of 128 bytes and with one barrier arrival of all threads for each.
  """
  if D % THREADS == 0:
    return plgpu.Layout.WG_STRIDED((D,), vec_size=D // THREADS), -(-D * itemsize // (4 * THREADS))
  word = 4 // itemsize  # numbers
  lanes = math.gcd(32, D // word)
  tiles = plgpu.Tiling(((lanes * word,), (word,)))
  layout = plgpu.Layout.TILED(tiles, (plgpu.Replicated(4),), (plgpu.Replicated(32 // lanes), -2), -1)
  return layout, D // (lanes * word)


def similarity_obstacle(k: Array | Shape) -> str | None:
  """Return why `similarity` cannot compare keys of this shape and dtype, or None if it can."""
  D = k.shape[-1]
  if k.dtype not in (jnp.bfloat16, jnp.float32):
    return f'keys are {k.dtype}, neither bfloat16 nor float32'
  most = 256 if k.dtype == jnp.bfloat16 else 192  # the widest heads that the tests compile
  if D % 64 or most < D:
    return f'heads are {D} wide in {k.dtype}, not a multiple of 64 up to {most}'
  return None


@lowered_once('threshold', 'nearest_of_none', 'interpret')
def similarity(
  k: Float[Array, 'R K S D'],
  n: Int[Array, ' R'],
  threshold: float,
  nearest_of_none: int,
  interpret: Any = None,
) -> Float[Array, 'R K S']:
  """Return, for each key, the sum of its cosines with the other keys, without the cosines of keys that spare it.

  `sprl.kernels.eviction.similarity` describes the arguments; here they have R rows. Products of bfloat16 keys are exact. A
  float32 key is the sum of two bfloat16 numbers, 16 bits together. `interpret=plgpu.InterpretGPUParams()` runs it on a CPU.
  """
  (R, K, S, D), padded = k.shape, -k.shape[2] % BLOCK
  wide = k.astype(jnp.float32)
  inverse = 1 / (jnp.sqrt(jnp.sum(wide * wide, axis=-1)) + 1e-8)
  inverse = jnp.pad(inverse.reshape(R * K, S), ((0, 0), (0, padded)))
  parts = [k] if k.dtype == jnp.bfloat16 else [part.astype(jnp.bfloat16) for part in (to_bfloat16(k), k - to_bfloat16(k))]
  # Padded to whole tiles of 8 keys: Mosaic (jax 0.12) does not clip the copy engine's tiles.
  parts = [jnp.pad(x.reshape(R * K, S, D), ((0, 0), (0, -S % 8), (0, 0))) for x in parts]
  P = len(parts)
  scratch = {
    'ours_s': [_tiled((BLOCK, D)) for _ in parts],
    'theirs_s': [_tiled((STAGES, BLOCK, D)) for _ in parts],
    'inverse_s': plgpu.SMEM((STAGES, BLOCK), jnp.float32),
    'own_s': plgpu.SMEM((BLOCK,), jnp.float32),
    'ours_came': plgpu.Barrier(num_arrivals=P + 1),
    'theirs_came': plgpu.Barrier(num_arrivals=P + 1, num_barriers=STAGES),
  }

  def hopper_similarity(*refs, **scratch):
    _compare(*refs, **scratch, kv_heads=K, threshold=threshold, nearest_of_none=nearest_of_none)

  total, nearest, cosine = plgpu.kernel(
    hopper_similarity,
    out_type=[Shape((R * K, S + padded), jnp.float32)] * 3,
    scratch_types=scratch,
    grid=((S + padded) // BLOCK, R * K),
    grid_names=('block', 'entry'),
    compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
    interpret=interpret,
  )(parts, inverse, n)
  # Subtract each key's cosine from the sum of the key that it spares. -1 stands for no key: it maps to an index out of range,
  # which `drop` ignores.
  nearest = jnp.where(jnp.arange(S + padded) < jnp.repeat(n, K)[:, None], nearest, -1).astype(jnp.int32)
  entry = jnp.arange(R * K)[:, None]
  total = total.at[entry, jnp.where(nearest < 0, S + padded, nearest)].add(-cosine, mode='drop')
  return total[:, :S].reshape(R, K, S)


def _compare(
  k_refs,  # P arrays [N, S rounded up to 8, D] whose sum is the keys
  inverse_ref,  # [N, S rounded up to BLOCK]: 1 / length of each key
  n_ref,  # [R]
  total_ref,  # [N, S rounded up to BLOCK]
  nearest_ref,  # shape of total_ref: slot of the newest near-duplicate, -1 for none
  cosine_ref,  # shape of total_ref: cosine with the newest near-duplicate
  *,
  ours_s,
  theirs_s,
  inverse_s,
  own_s,
  ours_came,
  theirs_came,
  kv_heads,
  threshold,
  nearest_of_none,
):
  block, entry = lax.axis_index('block'), lax.axis_index('entry')
  n = n_ref[lax.div(entry, jnp.int32(kv_heads))]
  blocks = jnp.where(block * BLOCK < n, pl.cdiv(n, jnp.int32(BLOCK)), 0)
  here = pl.ds(block * BLOCK, BLOCK)

  def fetch(j):
    stage, there = lax.rem(j, jnp.int32(STAGES)), pl.ds(j * BLOCK, BLOCK)
    for k_ref, part_s in zip(k_refs, theirs_s):
      plgpu.copy_gmem_to_smem(k_ref.at[entry, there], part_s.at[stage], theirs_came.at[stage])
    plgpu.copy_gmem_to_smem(inverse_ref.at[entry, there], inverse_s.at[stage], theirs_came.at[stage])

  for k_ref, part_s in zip(k_refs, ours_s):
    plgpu.copy_gmem_to_smem(k_ref.at[entry, here], part_s, ours_came)
  plgpu.copy_gmem_to_smem(inverse_ref.at[entry, here], own_s, ours_came)
  lax.fori_loop(0, lax.min(blocks, jnp.int32(STAGES)), lambda j, _: fetch(j), None)
  plgpu.barrier_wait(ours_came)
  shape = (BLOCK, BLOCK)
  slot = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX) + block * BLOCK
  length = _columns(plgpu.load(own_s, layout=PER_KEY), shape)

  def step(j, carry):
    total, nearest, found = carry
    stage = lax.rem(j, jnp.int32(STAGES))
    plgpu.barrier_wait(theirs_came.at[stage])
    other = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX) + j * BLOCK
    lengths = lax.broadcast_in_dim(plgpu.load(inverse_s.at[stage], layout=MATRIX.reduce(0)), shape, [1])
    cosine = _product(shape, ours_s, [part_s.at[stage] for part_s in theirs_s]) * length * lengths
    pair = (other < n) & (other != slot)
    cosine = jnp.where(pair, cosine, 0.0)
    near = jnp.where(pair & ((cosine > threshold) | (other == nearest_of_none)), other, -1).astype(jnp.float32)
    newest = jnp.max(near, axis=1)
    theirs = jnp.sum(jnp.where(near == _columns(newest, shape), cosine, 0.0), axis=1)
    any_ = newest >= 0.0
    plgpu.commit_smem()  # lengths are read before the next copy overwrites them
    pl.when(j + STAGES < blocks)(lambda: fetch(j + STAGES))
    return total + jnp.sum(cosine, axis=1), jnp.where(any_, newest, nearest), jnp.where(any_, theirs, found)

  def filled(value):
    return plgpu.layout_cast(jnp.full((BLOCK,), value, jnp.float32), PER_KEY)

  results = lax.fori_loop(0, blocks, step, (filled(0.0), filled(-1.0), filled(0.0)))
  for ref, result in zip((total_ref, nearest_ref, cosine_ref), results):
    ref[entry, here] = result


def _product(shape, ours, theirs):
  """Return the product of two sums of parts in float32, without the product of the two small parts."""
  places = ((0, 0), (0, 1), (1, 0)) if len(ours) > 1 else ((0, 0),)
  return product(shape, *((ours[a], theirs[b].T) for a, b in places))


def _columns(per_key, shape):
  return lax.broadcast_in_dim(per_key, shape, [0])


def _tiled(shape):
  """Return bfloat16 shared memory in swizzled tiles of 8 rows of 128 bytes, which copy engine and tensor core share."""
  tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiles)
