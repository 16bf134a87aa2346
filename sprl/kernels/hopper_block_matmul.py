"""Block-scaled FP8 matrix products for NVIDIA Hopper, in Pallas Mosaic GPU.

y[m, n] = sum over blocks k of 128 features: (x8[m, k] . w8[n, k]) sx[m, k] sw[n / 128, k]. The tensor core sums e4m3 products
with fewer bits than float32. Each block's partial product therefore starts from zero. It is multiplied by its scales and added in
float32. With C tokens of a tile:

    partial [64, C] = w8 [64, 128] @ x8 [C, 128]^T     weights are the product's 64 rows: few tokens leave no row unused
    sum    += partial * (sx [C] * sw)                  sw is one number per block
    y [C, 64] = sum^T                                  stored through shared memory, to write whole lines

Narrow layout, for few tokens: the bytes of the weights bound the time. There are many small programs of one warpgroup. Each has a
ring of stages that the copy engine (TMA) fills.

Wide layout, for many tokens: the tensor core and the L2 cache bound the time. One program per multiprocessor walks through tiles.
One of its warpgroups only copies. It runs ahead of the two warpgroups that multiply, even past the end of a tile. Programs of
neighbouring tiles may form a cluster. Each then copies a part of the common weights, or tokens, to the memory of all. The two
warpgroups take turns on the tensor core, if each has one product per stage: one multiplies while the other scales and adds its
partial products. Without turns, the tensor core divides its time between both, and then waits while both add.

Split sums, for few rows of weights: the programs of a cluster share the blocks of a tile. Each writes its float32 sum to global
memory, where the L2 cache holds it. After all have written, each adds the sums for a part of the tokens, always in the same
order.

`launch_model.launch` chooses the layout, the tiles and the clusters for a shape.

Experts (`grouped_matmul`): each block of tokens is a tile with the number of its expert. The blocks of an expert are consecutive,
so they find its weights in the L2 cache. Programs of unused blocks have no work.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, Int

from sprl.kernels.hopper_cluster import meet
from sprl.kernels.hopper_product import product
from sprl.kernels.launch_model import BLOCK, LINE, ROWS, Launch, launch
from sprl.kernels.lowering import lowered_once

PATCH = 16  # tiles of tokens per patch of `planar_snake`
TOKENS = 8, 16, 32, 64, 128  # accepted tokens per block of an expert

MATRIX = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
Shape = jax.ShapeDtypeStruct


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
  if (K > BLOCK and K % BLOCK) or (N > ROWS and N % ROWS):  # the copy engine moves whole tiles; block_matmul pads the tokens
    return f'weights are [{N}, {K}]: above {ROWS} and {BLOCK} expected multiples of them'
  return None


def block_matmul(
  x: Float8e4m3fn[Array, 'M K'],
  x_scale: Float32[Array, 'M C'],
  w: Float8e4m3fn[Array, 'N K'],
  w_scale: Float32[Array, 'R C'],
  interpret: Any = None,
) -> BFloat16[Array, 'M N']:
  """Return the block-scaled product x @ w^T. `sprl.kernels.block_matmul.block_matmul` describes the arguments.

  `interpret=plgpu.InterpretGPUParams()` runs the kernel on a CPU.
  """
  (M, K), N = x.shape, w.shape[0]
  # Pads tokens with zeros to whole tiles of 8: Mosaic (jax 0.12) does not clip the copy engine's tiles.
  x, x_scale = (jnp.pad(a, ((0, -M % 8 if M > 8 else 0), (0, 0))) for a in (x, x_scale))
  return run(launch(len(x), N, K), x, x_scale, w, w_scale, interpret=interpret)[:M]


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
  """Return x[i] @ w[expert[i]]^T for the first `used` blocks. The result for other blocks is undefined.

  `sprl.kernels.block_matmul.grouped_matmul` describes the arguments. `interpret=plgpu.InterpretGPUParams()` runs it on a CPU.
  """
  (n, T, K), N = x.shape, w.shape[1]
  x, x_scale, w, w_scale = (a.reshape(-1, a.shape[-1]) for a in (x, x_scale, w, w_scale))
  y = run(launch(n * T, N, K, T), x, x_scale, w, w_scale, (expert, used.reshape(1)), N, interpret)
  return y.reshape(n, T, N)


@lowered_once('plan', 'N', 'interpret')
def run(plan: Launch, x, x_scale, w, w_scale, experts=(), N: int | None = None, interpret: Any = None) -> BFloat16[Array, 'M N']:
  """Run the kernel with the launch parameters `plan` and return y.

  `experts` is empty, or (expert of each tile of tokens, number of tiles in use). With experts, w is [X * N, K].
  """
  M, N = len(x), N or len(w)
  across, along, splits = plan.tiles
  # Transposed, so that the scales of a stage are consecutive. The copy engine needs rows of a multiple of 16 bytes.
  sx = jnp.pad(x_scale.T, ((0, 0), (0, -M % 4)))
  sizes = {'row': plan.together[0], 'token': plan.together[1], 'split': splits}
  cluster = {name: size for name, size in sizes.items() if size > 1}
  neighbours = tuple(name for name in cluster if name != 'split')
  # On a GPU a shared copy completes when all programs have copied their part, so none runs ahead of a slow one. In the
  # interpreter each program copies the whole tile. With two axes, the second arrival of a fast program could count as the first
  # arrival of a slow one, so there each program has its own barrier.
  shared = neighbours and not (interpret and len(neighbours) > 1)
  barrier = partial(plgpu.ClusterBarrier, collective_axes=neighbours) if shared else plgpu.Barrier
  scratch = {
    'w_s': tiled((plan.stages, plan.rows, BLOCK), w.dtype),
    'x_s': tiled((plan.stages, plan.tokens, BLOCK), x.dtype),
    'scale_s': plgpu.SMEM((plan.stages, -(-plan.tokens // LINE) * LINE), jnp.float32),
    'y_s': tiled((plan.warpgroups, plan.share, ROWS), jnp.bfloat16),
    'came': plgpu.Barrier(num_arrivals=3, num_barriers=plan.stages),
    'free': barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
    'turn': plgpu.Barrier(num_barriers=2) if plan.warpgroups == 2 and plan.products == 1 else None,  # two would spill registers
  }
  inputs = {'x_ref': x, 'sx_ref': sx, 'w_ref': w, 'sw_ref': w_scale} | dict(zip(('expert_ref', 'used_ref'), experts))
  outputs = {'y_ref': jax.ShapeDtypeStruct((M, N), jnp.bfloat16)}
  if splits > 1:
    scratch['summed'] = plgpu.ClusterBarrier(collective_axes=('split',), num_barriers=plan.warpgroups)
    outputs['parts_ref'] = jax.ShapeDtypeStruct((splits, along, across * plan.rows, plan.tokens), jnp.float32)

  def hopper_block_matmul(*refs, **scratch):
    _program(**dict(zip((*inputs, *outputs), refs, strict=True)), **scratch, plan=plan, N=N)

  if experts:
    hopper_block_matmul.__name__ = 'hopper_grouped_block_matmul'  # the program's name in profiles
  y, *_ = plgpu.kernel(
    hopper_block_matmul,
    out_type=tuple(outputs.values()),
    scratch_types=scratch,
    grid=(plan.clusters,),
    grid_names=('cluster',),
    cluster=tuple(cluster.values()),
    cluster_names=tuple(cluster),
    num_threads=plan.warpgroups + (plan.warpgroups > 1),
    thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret and replace(interpret, inline_mgpu='ignore'),  # the interpreter needs no fences
  )(*inputs.values())
  return y


def _program(
  x_ref,  # [M, K]
  sx_ref,  # [C, M rounded up to 4]
  w_ref,  # [N, K]; with experts [X * N, K]
  sw_ref,  # [R, C]; with experts [X * R, C]
  y_ref,  # [M, N]
  expert_ref=None,  # [tiles of tokens]
  used_ref=None,  # [1]
  parts_ref=None,  # with split sums [splits, tiles of tokens, N rounded up to tiles, tokens of a tile], float32
  *,
  w_s,
  x_s,
  scale_s,
  y_s,
  came,
  free,
  turn,
  summed=None,
  plan: Launch,
  N: int,
):
  cluster, warpgroup = lax.axis_index('cluster'), lax.axis_index('warpgroup')
  across, along, splits = plan.tiles
  (rows, tokens) = plan.together  # programs of a cluster along each axis; each has one tile
  place = {name: lax.axis_index(name) if size > 1 else 0 for name, size in (('row', rows), ('token', tokens), ('split', splits))}
  split = place['split']
  stages, depth, apart = jnp.int32(plan.stages), jnp.int32(plan.depth), plan.warpgroups > 1
  R = -(-N // BLOCK)
  tiles = across * along // (rows * tokens) if used_ref is None else across * used_ref[0]
  count = lax.div(tiles - cluster + (plan.clusters - 1), jnp.int32(plan.clusters))  # this program's tiles
  steps = count * depth

  def start(i):
    """Return where tile i of this program begins: row of weights, token, block; and its expert, or None."""
    tile = cluster + i * plan.clusters
    if expert_ref is not None:
      token, row = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
      return row * plan.rows, token * plan.tokens, jnp.int32(0), expert_ref[token]
    # Programs that run at the same time work on a patch of tiles. Its few weights and tokens stay in the L2 cache.
    token, row = plgpu.planar_snake(tile, (along // tokens, across // rows), 0, PATCH)
    return (row * rows + place['row']) * plan.rows, (token * tokens + place['token']) * plan.tokens, split * depth, None

  def offset(expert, size, i):
    return i if expert is None else expert * size + i

  if not apart:  # a program has one tile
    only = start(jnp.int32(0))

  def fetch(step):
    row, token, block, expert = start(lax.div(step, depth)) if apart else only
    block, stage = block + lax.rem(step, depth), lax.rem(step, stages)
    features, arrived = pl.ds(block * BLOCK, BLOCK), came.at[stage]
    weights, codes = w_ref.at[pl.ds(offset(expert, N, row), plan.rows), features], x_ref.at[pl.ds(token, plan.tokens), features]
    # Programs with the same weights or tokens each copy a part of them to the memory of all.
    plgpu.copy_gmem_to_smem(weights, w_s.at[stage], arrived, collective_axes='token' if tokens > 1 else None)
    plgpu.copy_gmem_to_smem(codes, x_s.at[stage], arrived, collective_axes='row' if rows > 1 else None)
    plgpu.copy_gmem_to_smem(sx_ref.at[block, pl.ds(token, scale_s.shape[1])], scale_s.at[stage], arrived)

  def copy():
    def step(j, _):
      pl.when(j >= stages)(lambda: plgpu.barrier_wait(free.at[lax.rem(j, stages)]))
      fetch(j)

    plgpu.set_max_registers(40, action='decrease')
    lax.fori_loop(0, steps, step, None)
    lax.fori_loop(
      lax.max(jnp.int32(0), steps - stages), steps, lambda j, _: plgpu.barrier_wait(free.at[lax.rem(j, stages)]), None
    )

  def take_turn(done):
    if turn is not None:
      pl.when((warpgroup > 0) | (done > 0))(lambda: plgpu.barrier_wait(turn.at[warpgroup]))

  def pass_turn(done):
    if turn is not None:  # after the last step nobody waits
      pl.when((warpgroup == 0) | (done < steps - 1))(lambda: plgpu.barrier_arrive(turn.at[1 - warpgroup]))

  def multiply():
    if apart:
      plgpu.set_max_registers(232, action='increase')
    else:
      lax.fori_loop(0, lax.min(steps, stages), lambda j, _: fetch(j), None)

    def tile(i, _):
      row, token, first, expert = start(i) if apart else only
      ours = warpgroup * (plan.products * ROWS)  # this warpgroup's first row in the tile; all its rows are in one block
      # Codes past the last row and block are zeros, or the next expert's. Any scale is right: y stores no result for them.
      scales = offset(expert, R, lax.min(lax.div(row + ours, jnp.int32(BLOCK)), jnp.int32(R - 1)))

      def step(j, sums):
        done = i * depth + j
        stage = lax.rem(done, stages)
        block = j if parts_ref is None else lax.min(first + j, jnp.int32(sw_ref.shape[1] - 1))
        sw = sw_ref[scales, block]  # loads during the wait for the stage
        plgpu.barrier_wait(came.at[stage])
        scale = plgpu.load(scale_s.at[stage, pl.ds(0, plan.tokens)], layout=MATRIX.reduce(0)) * sw
        new = []
        for n, total in enumerate(sums):
          take_turn(done)
          operands = w_s.at[stage, pl.ds(ours + n * ROWS, ROWS)], x_s.at[stage].T
          part = product((ROWS, plan.tokens), operands, meanwhile=partial(pass_turn, done))
          new.append(total + part * lax.broadcast_in_dim(scale, part.shape, [1]))
        plgpu.commit_smem()  # scales are read before the next copy overwrites them
        if apart:
          plgpu.barrier_arrive(free.at[stage])
        else:
          pl.when(done + stages < steps)(lambda: fetch(done + stages))
        return tuple(new)

      def write(total, row, token):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        y_s.at[warpgroup].T[...] = plgpu.layout_cast(total.astype(y_s.dtype), TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_s.at[warpgroup], y_ref.at[pl.ds(token, plan.share), pl.ds(row, ROWS)])

      nothing = plgpu.layout_cast(jnp.zeros((ROWS, plan.tokens), jnp.float32), MATRIX)
      totals = lax.fori_loop(0, depth, step, (nothing,) * plan.products)
      lines = [row + ours + n * ROWS for n in range(plan.products)]
      if parts_ref is None or summed is None:
        for line, total in zip(lines, totals, strict=True):
          write(total, line, token)
        return
      here = lax.div(token, jnp.int32(plan.tokens))
      for line, total in zip(lines, totals, strict=True):
        parts_ref[split, here, pl.ds(line, ROWS)] = total
      meet(summed.at[warpgroup])
      mine = pl.ds(split * plan.share, plan.share)
      parts = [[parts_ref.at[i, here, pl.ds(line, ROWS), mine] for i in range(splits)] for line in lines]

      @pl.when(split < plan.tokens // plan.share)
      def _():
        for line, refs in zip(lines, parts, strict=True):
          sums = [plgpu.load(ref, layout=MATRIX, optimized=False) for ref in refs]
          write(sum(sums[1:], sums[0]), line, token + split * plan.share)

    lax.fori_loop(0, count, tile, None)
    plgpu.wait_smem_to_gmem(0)

  if apart:
    lax.cond(warpgroup == plan.warpgroups, copy, multiply)
  else:
    multiply()


def tiled(shape, dtype):
  """Return shared memory in swizzled tiles of 8 rows of 128 bytes, the layout that copy engine and tensor core read."""
  columns = 128 // jnp.dtype(dtype).itemsize
  tiles = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, dtype, transforms=tiles)
