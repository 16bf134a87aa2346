"""Block-scaled FP8 matrix products: the reference, and the choice of what computes them (fp8_rollouts 2.3)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int

from sprl.kernels.cost import Cost
from sprl.kernels.platform import chosen
from sprl.settings import Kernels


def block_matmul(
  x: Float8e4m3fn[Array, 'M K'],
  x_scale: Float32[Array, 'M C'],
  w: Float8e4m3fn[Array, 'N K'],
  w_scale: Float32[Array, 'R C'],
  rows: int,
  group: int,
  dtype: Any,
  kernels: Kernels = 'auto',
) -> Float[Array, 'M N']:
  """y[m, n] = sum_c (sum_k x[m, k] w[n, k], k in group c) x_scale[m, c] w_scale[n / rows, c], in `dtype`.

  Groups are of `group` features, the last one ragged. Groups are summed in float32, and within one no coarser than the tensor
  core does.
  """
  if not chosen('block-scaled matmul', kernels, lambda: _obstacle(w, dtype, rows, group)):
    return reference(x, x_scale, w, w_scale, rows, group, dtype)
  from sprl.kernels import hopper_block_matmul  # here: Mosaic takes a second to import, which no other platform needs

  return hopper_block_matmul.block_matmul(x, x_scale, w, w_scale)


def reference(
  x: Float8e4m3fn[Array, 'M K'],
  x_scale: Float32[Array, 'M C'],
  w: Float8e4m3fn[Array, 'N K'],
  w_scale: Float32[Array, 'R C'],
  rows: int,
  group: int,
  dtype: Any,
) -> Float[Array, 'M N']:
  """`block_matmul` in jnp, a group at a time; summed in float32 throughout."""
  M, N, K = len(x), *w.shape

  def groups(codes):  # [R, K] -> [C, R, group]
    exact = codes.astype(jnp.bfloat16)  # e4m3 fits into bfloat16, which every device multiplies
    return jnp.pad(exact, ((0, 0), (0, -K % group))).reshape(len(codes), -1, group).swapaxes(0, 1)

  def add(y, one):
    x8, w8, sx, sw = one
    inner = jax.lax.dot_general(x8, w8, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y + inner * sx[:, None] * sw, None

  spread = jnp.repeat(w_scale, rows, 0)[:N]
  y, _ = jax.lax.scan(add, jnp.zeros((M, N)), (groups(x), groups(w), x_scale.T, spread.T))
  return y.astype(dtype)


def grouped_matmul(
  x: Float8e4m3fn[Array, 'n T K'],
  x_scale: Float32[Array, 'n T C'],
  w: Float8e4m3fn[Array, 'X N K'],
  w_scale: Float32[Array, 'X R C'],
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  rows: int,
  group: int,
  dtype: Any,
  kernels: Kernels = 'auto',
) -> Float[Array, 'n T N']:
  """`block_matmul` of blocks of T tokens, block i with the weights of expert[i]; of the first `used` blocks.

  What comes out for the others may be anything. Blocks that follow each other and have one expert read its weights once.
  """
  if not chosen('grouped block-scaled matmul', kernels, lambda: _grouped_obstacle(w, dtype, rows, group, x.shape[1])):
    return grouped_reference(x, x_scale, w, w_scale, expert, used, rows, group, dtype)
  from sprl.kernels import hopper_block_matmul

  return hopper_block_matmul.grouped_matmul(x, x_scale, w, w_scale, expert, used)


def grouped_reference(
  x: Float8e4m3fn[Array, 'n T K'],
  x_scale: Float32[Array, 'n T C'],
  w: Float8e4m3fn[Array, 'X N K'],
  w_scale: Float32[Array, 'X R C'],
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  rows: int,
  group: int,
  dtype: Any,
) -> Float[Array, 'n T N']:
  """`grouped_matmul` in jnp, a block at a time."""
  held = jax.lax.bitcast_convert_type(w, jnp.uint8)  # XLA's CPU backend would widen all of them to look one up

  def block(i, y):
    codes = jax.lax.bitcast_convert_type(held[expert[i]], w.dtype)
    one = reference(x[i], x_scale[i], codes, w_scale[expert[i]], rows, group, dtype)
    return jax.lax.dynamic_update_index_in_dim(y, one, i, 0)

  return jax.lax.fori_loop(0, used, block, jnp.zeros((*x.shape[:2], w.shape[1]), dtype))


def cost(M: int, N: int, K: int) -> Cost:
  """The cost of M tokens, quantised already, times weights [N, K], to bfloat16."""
  scales = 4 * (M * -(-K // 128) + -(-N // 128) * -(-K // 128))
  return Cost(M * K + N * K + scales + 2 * M * N, 2 * M * N * K)


def grouped_cost(M: int, X: int, N: int, K: int) -> Cost:
  """The cost of M tokens, quantised already, each times the weights of one of the X experts that any goes through."""
  one, weights = cost(M, N, K), cost(0, N, K)
  return Cost(one.bytes + (X - 1) * weights.bytes, one.flops)


def _grouped_obstacle(w, dtype, rows, group, tokens) -> str | None:
  from sprl.kernels import hopper_block_matmul

  return hopper_block_matmul.grouped_obstacle(w, dtype, rows, group, tokens)


def _obstacle(w, dtype, rows, group) -> str | None:
  from sprl.kernels import hopper_block_matmul

  return hopper_block_matmul.obstacle(w, dtype, rows, group)
