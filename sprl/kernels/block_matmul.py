"""Block-scaled FP8 matrix products: the reference, and the choice of kernel (docs/methods/fp8.md, eq. 4)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int

from sprl.config import Kernels
from sprl.kernels.cost import Cost
from sprl.kernels.platform import chosen


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
  """Return y[m, n] = sum_c (sum_{k in group c} x[m, k] w[n, k]) x_scale[m, c] w_scale[n / rows, c], in `dtype`.

  A group has `group` features; the last may have fewer. Groups are summed in float32. The sum within a group is at least as
  precise as that of the tensor core.
  """
  if not chosen('block-scaled matmul', kernels, lambda: _obstacle(w, dtype, rows, group)):
    return reference(x, x_scale, w, w_scale, rows, group, dtype)
  from sprl.kernels import hopper_block_matmul  # imported here: Mosaic takes a second to import

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
  """Compute `block_matmul` in jnp, group by group, with float32 sums."""
  M, N, K = len(x), *w.shape

  def groups(codes):  # [R, K] -> [C, R, group]
    exact = codes.astype(jnp.bfloat16)  # bfloat16 holds every e4m3 number, and every device multiplies it
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
  """Compute `block_matmul` of blocks of T tokens; block i meets the weights of expert[i].

  Only the first `used` blocks are computed; the others are undefined. Consecutive blocks of one expert read its weights once.
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
  """Compute `grouped_matmul` in jnp, block by block."""
  held = jax.lax.bitcast_convert_type(w, jnp.uint8)  # as bytes: XLA's CPU backend would widen all experts to index one

  def block(i, y):
    codes = jax.lax.bitcast_convert_type(held[expert[i]], w.dtype)
    one = reference(x[i], x_scale[i], codes, w_scale[expert[i]], rows, group, dtype)
    return jax.lax.dynamic_update_index_in_dim(y, one, i, 0)

  return jax.lax.fori_loop(0, used, block, jnp.zeros((*x.shape[:2], w.shape[1]), dtype))


def cost(M: int, N: int, K: int) -> Cost:
  """Return the cost of M quantised tokens times weights [N, K], to bfloat16."""
  scales = 4 * (M * -(-K // 128) + -(-N // 128) * -(-K // 128))
  return Cost(M * K + N * K + scales + 2 * M * N, 2 * M * N * K)


def grouped_cost(M: int, X: int, N: int, K: int) -> Cost:
  """Return the cost of M quantised tokens, each times the weights of one of the X experts in use."""
  one, weights = cost(M, N, K), cost(0, N, K)
  return Cost(one.bytes + (X - 1) * weights.bytes, one.flops)


def _grouped_obstacle(w, dtype, rows, group, tokens) -> str | None:
  from sprl.kernels import hopper_block_matmul

  return hopper_block_matmul.grouped_obstacle(w, dtype, rows, group, tokens)


def _obstacle(w, dtype, rows, group) -> str | None:
  from sprl.kernels import hopper_block_matmul

  return hopper_block_matmul.obstacle(w, dtype, rows, group)
