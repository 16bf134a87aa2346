"""Matrix products of a mixture's experts in bfloat16 for NVIDIA Hopper, in Pallas Mosaic GPU: forward pass and both gradients.

Tokens are in n blocks of T. Each block is multiplied by one expert's weights, and the blocks of an expert are consecutive. Every
product is cut into tiles; their float32 sums stay in registers:

    y[i]  [T, N] = x[i] @ w[e]^T               sum [64, T]   = w [64, 64] @ x [T, 64]^T, over K     tiles: blocks x rows of N
    dx[i] [T, K] = dy[i] @ w[e]                sum [64, T]   = w [64, 64]^T @ dy [T, 64]^T, over N  tiles: blocks x columns of K
    dw[e] [N, K] = sum over i of dy[i]^T x[i]  sum [64, 128] = dy [64, 64]^T @ x [64, 128], over t  tiles: experts x N x K

t are the tokens of expert e. Weights fill the 64 rows of a product, so a block of few tokens wastes no rows.
The grid has as many programs as the device runs at the same time, and they divide the tiles. In each program one warpgroup
copies operands into a ring of stages. It runs ahead of the warpgroups that multiply, also from one tile to the next. The tiles
of a block are consecutive. If the next block has the same expert, it finds the weights in the L2 cache. Unused blocks have no
tiles. An expert without blocks has tiles of zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int

from sprl.kernels.hopper_block_matmul import TOKENS, TRANSPOSED, tiled
from sprl.kernels.launch_model import MULTIPROCESSORS, OVERHEAD, ROWS, SHARED, STAGES
from sprl.kernels.lowering import lowered_once

DEPTH = 64  # length of a stage's sum: a line of 128 bytes
COLUMNS = 128  # maximum columns of a tile of a weight's gradient


@dataclass(frozen=True)
class Launch:
  """The launch parameters of a product."""

  warpgroups: int  # warpgroups that multiply; one more copies
  products: int  # products of 64 rows per warpgroup and stage
  columns: int  # columns of a tile
  stages: int
  programs: int

  @property
  def rows(self) -> int:
    """Rows of a tile."""
    return self.warpgroups * self.products * ROWS


def obstacle(shape: tuple[int, ...], dtype: Any, tokens: int) -> str | None:
  """Return why the kernels cannot multiply blocks of `tokens` tokens by weights [.., N, K] in `dtype`, or None if they can."""
  N, K = shape[-2:]
  if dtype != jnp.bfloat16:
    return f'the product is {jnp.dtype(dtype)}, not bfloat16'
  if tokens not in TOKENS:
    return f'blocks have {tokens} tokens, not one of {", ".join(map(str, TOKENS))}'
  if N % DEPTH or K % DEPTH:  # Mosaic does not clip the copy engine's tiles
    return f'weights are [{N}, {K}]: expected multiples of {DEPTH}'
  return None


def launch(rows: int, columns: int, most: int, tiles: int) -> Launch:
  """Return the launch parameters of a product with `tiles` columns of tiles.

  Each tile is `columns` wide and has at most `most` of the `rows` rows.
  """
  units = max(each for each in (1, 2, 4) if each == 1 or each * ROWS <= min(rows, most))
  warpgroups = min(units, 2)
  resident = 1 if warpgroups > 1 else 2  # programs per multiprocessor
  room = SHARED[resident - 1] - OVERHEAD - 2 * warpgroups * columns * ROWS
  stages = min(STAGES, room // (2 * DEPTH * (units * ROWS + columns)))
  programs = min(tiles * -(-rows // (units * ROWS)), resident * MULTIPROCESSORS)
  return Launch(warpgroups, units // warpgroups, columns, stages, programs)


@lowered_once('back', 'interpret')
def grouped_matmul(
  x: BFloat16[Array, 'n T C'],
  w: BFloat16[Array, 'X N K'],
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  back: bool = False,
  interpret: Any = None,
) -> BFloat16[Array, 'n T R']:
  """Return x[i] @ w[expert[i]]^T, or x[i] @ w[expert[i]] with `back`, for the first `used` blocks. Others are undefined.

  `sprl.kernels.grouped_matmul.grouped_matmul` describes the arguments. `interpret=plgpu.InterpretGPUParams()` runs it on a CPU.
  """
  n, T, depth = x.shape
  rows = w.shape[2 if back else 1]
  plan = launch(rows, T, 4 * T, n)  # four fifths of the bytes that a tile reads are weights
  across = -(-rows // plan.rows)

  def kernel(x_ref, w_ref, expert_ref, used_ref, y_ref, a_s, x_s, y_s, **barriers):
    warpgroup = lax.axis_index('warpgroup')

    def start(tile):
      block = lax.div(tile, jnp.int32(across))
      return (block, lax.rem(tile, jnp.int32(across)) * plan.rows, expert_ref[block]), jnp.int32(depth // DEPTH)

    def fetch(where, step, stage, came):
      block, row, e = where
      along, out = pl.ds(step * DEPTH, DEPTH), pl.ds(row, plan.rows)
      plgpu.copy_gmem_to_smem(w_ref.at[(e, along, out) if back else (e, out, along)], a_s.at[stage], came)
      plgpu.copy_gmem_to_smem(x_ref.at[block, :, along], x_s.at[stage], came)

    def operands(stage, ours):
      a = a_s.at[stage, :, pl.ds(ours, ROWS)].T if back else a_s.at[stage, pl.ds(ours, ROWS)]
      return a, x_s.at[stage].T

    def write(where, ours, total):
      block, row, _ = where
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      y_s.at[warpgroup].T[...] = plgpu.layout_cast(total.astype(y_s.dtype), TRANSPOSED)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(y_s.at[warpgroup], y_ref.at[block, :, pl.ds(row + ours, ROWS)])

    _walk(plan, across * used_ref[0], start, fetch, operands, write, **barriers)
    plgpu.wait_smem_to_gmem(0)

  scratch = {
    'a_s': tiled((plan.stages, *((DEPTH, plan.rows) if back else (plan.rows, DEPTH))), w.dtype),
    'x_s': tiled((plan.stages, T, DEPTH), x.dtype),
    'y_s': tiled((plan.warpgroups, T, ROWS), x.dtype),
  }
  name = 'hopper_grouped_matmul_back' if back else 'hopper_grouped_matmul'
  out = jax.ShapeDtypeStruct((n, T, rows), jnp.bfloat16)
  return _call(name, kernel, plan, 2, out, scratch, interpret)(x, w, expert, used.reshape(1))


@lowered_once('experts', 'interpret')
def grouped_outer(
  dy: BFloat16[Array, 'n T N'],
  x: BFloat16[Array, 'n T K'],
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  experts: int,
  interpret: Any = None,
) -> Float32[Array, 'X N K']:
  """Return, for each expert, the sum over its blocks of dy[i]^T @ x[i].

  `sprl.kernels.grouped_matmul.grouped_outer` describes the arguments. `interpret=plgpu.InterpretGPUParams()` runs it on a CPU.
  """
  (n, T, N), K = dy.shape, x.shape[2]
  columns = COLUMNS if K % COLUMNS == 0 else DEPTH
  along = K // columns
  part = min(T, DEPTH)  # tokens that are guaranteed to be of one expert; a stage has one part, or parts of several blocks
  pieces = DEPTH // part
  plan = launch(N, columns, 4 * ROWS, experts * along)
  across = -(-N // plan.rows)
  # ends[e]: the first block of expert e; ends[e + 1]: the block after its last.
  owner = jnp.where(jnp.arange(n) < used, expert, experts)
  ends = jnp.sum(owner[:, None] < jnp.arange(experts + 1), axis=0, dtype=jnp.int32)

  def hopper_grouped_outer(dy_ref, x_ref, ends_ref, dw_ref, a_s, x_s, **barriers):
    def start(tile):
      e, tile = lax.div(tile, jnp.int32(across * along)), lax.rem(tile, jnp.int32(across * along))
      row, column = lax.rem(tile, jnp.int32(across)) * plan.rows, lax.div(tile, jnp.int32(across)) * columns
      first, last = ends_ref[e] * T, ends_ref[e + 1] * T
      return (first, last, row, column, e), lax.div(last - first + (DEPTH - 1), jnp.int32(DEPTH))

    def fetch(where, step, stage, came):
      first, last, row, column, _ = where
      for piece in range(pieces):
        token = first + step * DEPTH + piece * part
        tokens = pl.ds(jnp.where(token < last, token, n * T), part)  # beyond the array the copy engine reads zeros
        here = stage, pl.ds(piece * part, part)
        plgpu.copy_gmem_to_smem(dy_ref.at[tokens, pl.ds(row, plan.rows)], a_s.at[here], came)
        plgpu.copy_gmem_to_smem(x_ref.at[tokens, pl.ds(column, columns)], x_s.at[here], came)

    def operands(stage, ours):
      return a_s.at[stage, :, pl.ds(ours, ROWS)].T, x_s.at[stage]

    def write(where, ours, total):
      row, column, e = where[2:]

      @pl.when(row + ours < N)
      def _():
        dw_ref[e, pl.ds(row + ours, ROWS), pl.ds(column, columns)] = total

    _walk(plan, experts * across * along, start, fetch, operands, write, **barriers)

  scratch = {
    'a_s': tiled((plan.stages, DEPTH, plan.rows), dy.dtype),
    'x_s': tiled((plan.stages, DEPTH, columns), x.dtype),
  }
  out = jax.ShapeDtypeStruct((experts, N, K), jnp.float32)
  call = _call('hopper_grouped_outer', hopper_grouped_outer, plan, 2 * pieces, out, scratch, interpret)
  return call(dy.reshape(n * T, N), x.reshape(n * T, K), ends)


def _call(name, kernel, plan: Launch, copies, out, scratch, interpret):
  kernel.__name__ = name  # the program's name in profiles
  barriers = {
    'came': plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
    'free': plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
  }
  return plgpu.kernel(
    kernel,
    out_type=out,
    scratch_types=scratch | barriers,
    grid=(plan.programs,),
    grid_names=('program',),
    num_threads=plan.warpgroups + 1,
    thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
  )


def _walk(plan: Launch, tiles, start: Callable, fetch: Callable, operands: Callable, write: Callable, *, came, free):
  """Compute this program's tiles, one after the other.

  start(tile) -> where, steps               the tile's place in the arrays, and its number of steps
  fetch(where, step, stage, barrier)        copies the operands of a step into a stage
  operands(stage, rows)                     returns [64, 64] and [64, columns]: a warpgroup's operands for these rows of the tile
  write(where, rows, sum [64, columns])     writes the result
  """
  program, warpgroup = lax.axis_index('program'), lax.axis_index('warpgroup')
  count = lax.div(tiles - program + (plan.programs - 1), jnp.int32(plan.programs))
  stages = jnp.int32(plan.stages)

  def copy():
    def tile(i, done):
      where, steps = start(program + i * plan.programs)

      def step(j, _):
        stage = lax.rem(done + j, stages)
        pl.when(done + j >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
        fetch(where, j, stage, came.at[stage])

      lax.fori_loop(0, steps, step, None)
      return done + steps

    if plan.warpgroups > 1:
      plgpu.set_max_registers(40, action='decrease')
    done = lax.fori_loop(0, count, tile, jnp.int32(0))
    last = lax.max(jnp.int32(0), done - stages)
    lax.fori_loop(last, done, lambda j, _: plgpu.barrier_wait(free.at[lax.rem(j, stages)]), None)

  def multiply():
    ours = [(warpgroup * plan.products + product) * ROWS for product in range(plan.products)]

    def tile(i, done):
      where, steps = start(program + i * plan.programs)

      def summed(*sums):
        def step(j, _):
          stage = lax.rem(done + j, stages)
          plgpu.barrier_wait(came.at[stage])
          for rows, total in zip(ours, sums, strict=True):
            plgpu.wgmma(total, *operands(stage, rows))
          plgpu.wgmma_wait(plan.products)  # the products of the previous step are done, so its stage can be refilled
          pl.when(j > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(done + j - 1, stages)]))

        lax.fori_loop(0, steps, step, None)
        return tuple(total[...] for total in sums)

      totals = pl.run_scoped(summed, *[plgpu.WGMMAAccumulatorRef((ROWS, plan.columns), jnp.float32)] * plan.products)
      pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(done + steps - 1, stages)]))
      for rows, total in zip(ours, totals, strict=True):
        write(where, rows, total)
      return done + steps

    if plan.warpgroups > 1:
      plgpu.set_max_registers(232, action='increase')
    lax.fori_loop(0, count, tile, jnp.int32(0))

  lax.cond(warpgroup == plan.warpgroups, copy, multiply)
