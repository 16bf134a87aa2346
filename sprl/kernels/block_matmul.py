"""Block-scaled FP8 matrix products: the reference, and the choice of what computes them (fp8_rollouts 2.3)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32

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


def cost(M: int, N: int, K: int) -> Cost:
  """The cost of M tokens, quantised already, times weights [N, K], to bfloat16."""
  scales = 4 * (M * -(-K // 128) + -(-N // 128) * -(-K // 128))
  return Cost(M * K + N * K + scales + 2 * M * N, 2 * M * N * K)


def _obstacle(w, dtype, rows, group) -> str | None:
  from sprl.kernels import hopper_block_matmul

  return hopper_block_matmul.obstacle(w, dtype, rows, group)
