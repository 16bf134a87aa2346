"""Block-scaled FP8 matrix products for NVIDIA Hopper, in Pallas Mosaic GPU.

y[m, n] = sum over blocks k of 128 features: (x8[m, k] . w8[n, k]) sx[m, k] sw[n / 128, k]. The tensor core sums e4m3 products
with fewer bits than float32. Each block's partial product therefore starts from zero and is added, times its scales, in float32:

    partial [64, C] = w8 [64, 128] @ x8 [C, 128]^T     weights are the product's 64 rows: few tokens leave no row unused
    sum    += partial * (sx [C] * sw)                  sw is one number per block
    y [C, 64] = sum^T                                  through shared memory, to write whole lines

Few tokens (narrow layout): the weights' bytes bound the time. Many small programs of one warpgroup each have a ring of stages
that the copy engine (TMA) fills. If the weights have too few rows to occupy the device, several programs share the blocks of a
tile, and XLA adds their float32 sums.

Many tokens (wide layout): the tensor core's rate bounds the time. One program per multiprocessor walks through tiles. One of its
warpgroups only copies. It runs ahead of the two warpgroups that multiply, also across the end of a tile.

Experts (`grouped_matmul`): each block of tokens is a tile with the number of its expert. The blocks of an expert are consecutive
and find its weights in the L2 cache. Programs of unused blocks have no work.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, Int

BLOCK = 128  # features that share a scale, and features of a stage; also the rows of a weight's block
ROWS = 64  # rows of a tensor core product
LINE = 32  # numbers of 4 bytes in 128 bytes, the least that the copy engine moves
MULTIPROCESSORS = 132
NARROW = 128  # largest number of tokens of the narrow layout
SHARED = (227 * 1024, 113 * 1024, 75 * 1024)  # bytes of shared memory per program if a multiprocessor holds one, two or three
OVERHEAD = 1024  # bytes of shared memory for barriers and alignment
STAGES = 8  # maximum
PATCH = 16  # tiles of tokens in a patch of `planar_snake`
PART = 4  # minimum number of blocks of a split
TOKENS = 8, 16, 32, 64, 128  # accepted tokens per block of an expert

MATRIX = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Launch:
  """The kernel's launch parameters for a shape."""

  warpgroups: int  # warpgroups that multiply; with two, a third one copies
  products: int  # products of 64 rows of weights per warpgroup and stage
  tokens: int  # tokens of a tile
  stages: int
  tiles: tuple[int, int, int]  # number of tiles along the weights' rows, the tokens and the blocks (splits)
  depth: int  # blocks that a tile sums
  programs: int

  @property
  def rows(self) -> int:
    """Rows of weights of a tile."""
    return self.warpgroups * self.products * ROWS

  @property
  def splits(self) -> int:
    """Number of programs that share a sum."""
    return self.tiles[2]


def obstacle(w: Array | Shape, dtype: Any, rows: int, group: int) -> str | None:
  """Return why the kernel cannot multiply weights of this shape to a result in `dtype`, or None if it can.

  A scale is shared by `rows` rows of weights and by `group` features.
  """
  if (rows, group) != (BLOCK, BLOCK):
    return f'a scale is shared by {rows} rows of {group} features, not by {BLOCK} rows of {BLOCK}'
  if dtype != jnp.bfloat16:
    return f'the product is {jnp.dtype(dtype)}, not bfloat16'
  N, K = w.shape
  if K % 16 or N % 8:
    return f'weights are [{N}, {K}]: expected multiples of 8 and 16'
  if (K > BLOCK and K % BLOCK) or (N > ROWS and N % ROWS):  # whole tiles of the copy engine; block_matmul pads tokens for it
    return f'weights are [{N}, {K}]: above {ROWS} and {BLOCK} expected multiples of them'
  return None


def launch(M: int, N: int, K: int, block: int | None = None) -> Launch:
  """Return the launch parameters for M tokens and weights [N, K], or for blocks of `block` tokens with their own weights."""
  narrow = M <= NARROW if block is None else block < 128
  tokens = block or (min(64, _up(M, 8)) if narrow else 128)
  # In the wide layout with experts, two products would spill registers.
  warpgroups, products = (1, 2 if tokens > 16 else 1) if narrow else (2, 2 if block is None else 1)
  rows = warpgroups * products * ROWS
  across, along, blocks = -(-N // rows), -(-M // tokens), -(-K // BLOCK)
  depth = -(-blocks // max(1, min(MULTIPROCESSORS // (across * along), blocks // PART))) if block is None else blocks
  splits = -(-blocks // depth)
  tiles = across * along * splits
  resident = min(len(SHARED), -(-tiles // MULTIPROCESSORS)) if narrow else 1
  stage = (rows + tokens) * BLOCK + 4 * _up(tokens, LINE)
  room = SHARED[resident - 1] - OVERHEAD - (2 * warpgroups * tokens * ROWS if splits == 1 else 0)
  programs = tiles if narrow else min(tiles, MULTIPROCESSORS)
  return Launch(warpgroups, products, tokens, min(STAGES, room // stage), (across, along, splits), depth, programs)


def block_matmul(
  x: Float8e4m3fn[Array, 'M K'],
  x_scale: Float32[Array, 'M C'],
  w: Float8e4m3fn[Array, 'N K'],
  w_scale: Float32[Array, 'R C'],
  interpret: Any = None,
) -> BFloat16[Array, 'M N']:
  """Return x @ w^T, as `sprl.kernels.block_matmul.block_matmul` describes it.

  `interpret=plgpu.InterpretGPUParams()` runs the kernel on a CPU.
  """
  (M, K), N = x.shape, w.shape[0]
  # Pads tokens with zeros to whole tiles of 8: Mosaic (jax 0.12) does not clip the copy engine's tiles.
  x, x_scale = (jnp.pad(a, ((0, -M % 8 if M > 8 else 0), (0, 0))) for a in (x, x_scale))
  return _call(launch(len(x), N, K), N, x, x_scale, w, w_scale, (), interpret)[:M]


def grouped_obstacle(w: Array | Shape, dtype: Any, rows: int, group: int, tokens: int) -> str | None:
  """Return why the kernel cannot multiply blocks of `tokens` tokens by weights [X, N, K] of experts, or None if it can."""
  if tokens not in TOKENS:
    return f'blocks have {tokens} tokens, not one of {", ".join(map(str, TOKENS))}'
  return obstacle(Shape(w.shape[1:], w.dtype), dtype, rows, group)


def grouped_matmul(
  x: Float8e4m3fn[Array, 'n T K'],
  x_scale: Float32[Array, 'n T C'],
  w: Float8e4m3fn[Array, 'X N K'],
  w_scale: Float32[Array, 'X R C'],
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  interpret: Any = None,
) -> BFloat16[Array, 'n T N']:
  """Return x[i] @ w[expert[i]]^T for the first `used` blocks. Other blocks are undefined.

  `sprl.kernels.block_matmul.grouped_matmul` describes the arguments. `interpret=plgpu.InterpretGPUParams()` runs it on a CPU.
  """
  (n, T, K), N = x.shape, w.shape[1]
  x, x_scale, w, w_scale = (a.reshape(-1, a.shape[-1]) for a in (x, x_scale, w, w_scale))
  return _call(launch(n * T, N, K, T), N, x, x_scale, w, w_scale, (expert, used.reshape(1)), interpret).reshape(n, T, N)


def _call(plan, N, x, x_scale, w, w_scale, experts, interpret):
  """Launch the kernel. `experts` is empty, or (expert of each tile of tokens, number of tiles in use)."""
  M = len(x)
  across, along, splits = plan.tiles
  # Transposed, so that the scales of a stage are consecutive. The copy engine needs rows of a multiple of 16 bytes.
  sx = jnp.pad(x_scale.T, ((0, 0), (0, -M % 4)))
  scratch = {
    'w_s': tiled((plan.stages, plan.rows, BLOCK), w.dtype),
    'x_s': tiled((plan.stages, plan.tokens, BLOCK), x.dtype),
    'scale_s': plgpu.SMEM((plan.stages, _up(plan.tokens, LINE)), jnp.float32),
    'y_s': tiled((plan.warpgroups, plan.tokens, ROWS), jnp.bfloat16) if splits == 1 else None,
    'came': plgpu.Barrier(num_arrivals=3, num_barriers=plan.stages),
    'free': plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
  }
  parts = jax.ShapeDtypeStruct((splits, across * plan.rows, along * plan.tokens), jnp.float32)

  def hopper_block_matmul(*refs, **scratch):  # the program's name in profiles
    _program(*refs, **scratch, plan=plan, N=N)

  def hopper_grouped_block_matmul(x_ref, sx_ref, w_ref, sw_ref, expert_ref, used_ref, y_ref, **scratch):
    _program(x_ref, sx_ref, w_ref, sw_ref, y_ref, expert_ref, used_ref, **scratch, plan=plan, N=N)

  y = plgpu.kernel(
    hopper_grouped_block_matmul if experts else hopper_block_matmul,
    out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16) if splits == 1 else parts,
    scratch_types=scratch,
    grid=(plan.programs,),
    grid_names=('program',),
    num_threads=plan.warpgroups + (plan.warpgroups > 1),
    thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
  )(x, sx, w, w_scale, *experts)
  return y if splits == 1 else jnp.sum(y, axis=0)[:N, :M].T.astype(jnp.bfloat16)


def _program(
  x_ref,  # [M, K]
  sx_ref,  # [C, M rounded up to 4]
  w_ref,  # [N, K]; with experts [X * N, K]
  sw_ref,  # [R, C]; with experts [X * R, C]
  y_ref,  # [M, N]; with split sums [splits, N, M], N and M rounded up to tiles, float32
  expert_ref=None,  # [tiles of tokens]
  used_ref=None,  # [1]
  *,
  w_s,
  x_s,
  scale_s,
  y_s,
  came,
  free,
  plan: Launch,
  N: int,
):
  program, warpgroup = lax.axis_index('program'), lax.axis_index('warpgroup')
  across, along, splits = plan.tiles
  stages, depth, apart = jnp.int32(plan.stages), jnp.int32(plan.depth), plan.warpgroups > 1
  R = -(-N // BLOCK)
  tiles = across * along * splits if used_ref is None else across * used_ref[0]
  count = lax.div(tiles - program + (plan.programs - 1), jnp.int32(plan.programs))  # this program's tiles
  steps = count * depth

  def start(i):
    """Return where tile i of this program begins: row of weights, token, block; and its expert, or None."""
    tile = program + i * plan.programs
    if expert_ref is not None:
      tokens, rows = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
      return rows * plan.rows, tokens * plan.tokens, jnp.int32(0), expert_ref[tokens]
    # Programs that run at the same time work on a patch of tiles. Its few weights and tokens stay in the L2 cache.
    split = 0
    if splits > 1:  # without splits, the divisor would take a register too many
      split, tile = lax.div(tile, jnp.int32(across * along)), lax.rem(tile, jnp.int32(across * along))
    token, row = plgpu.planar_snake(tile, (along, across), 0, PATCH)
    return row * plan.rows, token * plan.tokens, split * depth, None

  def offset(expert, size, i):
    return i if expert is None else expert * size + i

  if not apart:  # a program has one tile
    only = start(jnp.int32(0))

  def fetch(step):
    row, token, block, expert = start(lax.div(step, depth)) if apart else only
    block, stage = block + lax.rem(step, depth), lax.rem(step, stages)
    features = pl.ds(block * BLOCK, BLOCK)
    plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(offset(expert, N, row), plan.rows), features], w_s.at[stage], came.at[stage])
    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(token, plan.tokens), features], x_s.at[stage], came.at[stage])
    plgpu.copy_gmem_to_smem(sx_ref.at[block, pl.ds(token, scale_s.shape[1])], scale_s.at[stage], came.at[stage])

  def copy():
    def step(j, _):
      pl.when(j >= stages)(lambda: plgpu.barrier_wait(free.at[lax.rem(j, stages)]))
      fetch(j)

    plgpu.set_max_registers(40, action='decrease')
    lax.fori_loop(0, steps, step, None)
    lax.fori_loop(
      lax.max(jnp.int32(0), steps - stages), steps, lambda j, _: plgpu.barrier_wait(free.at[lax.rem(j, stages)]), None
    )

  def multiply():
    if apart:
      plgpu.set_max_registers(232, action='increase')
    else:
      lax.fori_loop(0, lax.min(steps, stages), lambda j, _: fetch(j), None)

    def tile(i, _):
      row, token, first, expert = start(i) if apart else only
      ours = warpgroup * (plan.products * ROWS)  # this warpgroup's rows of the tile; all are in one block
      # Codes beyond the last row and block are zeros, or the next expert's. Any scale will do for them: y has no place for them.
      scales = offset(expert, R, lax.min(lax.div(row + ours, jnp.int32(BLOCK)), jnp.int32(R - 1)))

      def step(j, sums):
        done = i * depth + j
        stage = lax.rem(done, stages)
        block = j if splits == 1 else lax.min(first + j, jnp.int32(sw_ref.shape[1] - 1))
        sw = sw_ref[scales, block]  # loads during the wait for the stage
        plgpu.barrier_wait(came.at[stage])
        scale = plgpu.load(scale_s.at[stage, pl.ds(0, plan.tokens)], layout=MATRIX.reduce(0)) * sw
        new = []
        for product, total in enumerate(sums):
          part = _product((ROWS, plan.tokens), w_s.at[stage, pl.ds(ours + product * ROWS, ROWS)], x_s.at[stage].T)
          new.append(total + part * lax.broadcast_in_dim(scale, part.shape, [1]))
        plgpu.commit_smem()  # scales are read before the next copy overwrites them
        if apart:
          plgpu.barrier_arrive(free.at[stage])
        else:
          pl.when(done + stages < steps)(lambda: fetch(done + stages))
        return tuple(new)

      nothing = plgpu.layout_cast(jnp.zeros((ROWS, plan.tokens), jnp.float32), MATRIX)
      for product, total in enumerate(lax.fori_loop(0, depth, step, (nothing,) * plan.products)):
        rows, tokens = pl.ds(row + ours + product * ROWS, ROWS), pl.ds(token, plan.tokens)
        if y_s is None:
          y_ref[lax.div(first, depth), rows, tokens] = total
        else:
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          y_s.at[warpgroup].T[...] = plgpu.layout_cast(total.astype(y_s.dtype), TRANSPOSED)
          plgpu.commit_smem()
          plgpu.copy_smem_to_gmem(y_s.at[warpgroup], y_ref.at[tokens, rows])

    lax.fori_loop(0, count, tile, None)
    plgpu.wait_smem_to_gmem(0)

  if apart:
    lax.cond(warpgroup == plan.warpgroups, copy, multiply)
  else:
    multiply()


def _product(shape, a, b):
  """Return a @ b in float32. Both operands are in shared memory."""

  def multiply(acc):
    plgpu.wgmma(acc, a, b)
    return acc[...]

  return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def tiled(shape, dtype):
  """Return shared memory in swizzled tiles of 8 rows of 128 bytes: the layout that copy engine and tensor core share."""
  columns = 128 // jnp.dtype(dtype).itemsize
  tiles = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, dtype, transforms=tiles)


def _up(n: int, multiple: int) -> int:
  return -(-n // multiple) * multiple
