"""Matrix products of a mixture's experts and their gradients: reference implementation and choice of kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from sprl.config import Kernels
from sprl.kernels.cost import Cost
from sprl.kernels.platform import chosen


def runs(shape: tuple[int, ...], dtype: Any, tokens: int, kernels: Kernels = 'auto') -> bool:
  """Whether the kernels compute products and gradients for weights [.., N, K] in `dtype` and blocks of `tokens` tokens.

  Raises SettingsError if `kernels` forces them and they cannot run.
  """
  return chosen('grouped matmul', kernels, lambda: obstacle(shape, dtype, tokens))


def obstacle(shape: tuple[int, ...], dtype: Any, tokens: int) -> str | None:
  """Return why the kernels cannot run for these shapes, or None if they can."""
  from sprl.kernels import hopper_grouped_matmul  # imported here: Mosaic takes a second to import

  return hopper_grouped_matmul.obstacle(shape, dtype, tokens)


def grouped_matmul(
  x: Float[Array, 'n T C'],
  w: Float[Array, 'X N K'],
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  back: bool = False,
  kernels: Kernels = 'auto',
) -> Float[Array, 'n T R']:
  """Multiply each block of tokens by the weights of its expert: y[i] = x[i] @ w[expert[i]]^T.

  X is the number of experts. Sums are float32. x, w and the result have the same dtype.

  Args:
    x: n blocks of T tokens, [n, T, K]; with `back` [n, T, N].
    w: the weights of all experts.
    expert: the expert of each block. Consecutive blocks of one expert find its weights in the GPU's L2 cache.
    used: number of blocks that hold tokens; they come first. The result is undefined in the other blocks.
    back: multiply by w[expert[i]] without the transposition, as the gradient of x needs it.
    kernels: implementation.

  Returns:
    y, [n, T, N]; with `back` [n, T, K].
  """
  if not runs(w.shape, x.dtype, x.shape[1], kernels):
    return grouped_reference(x, w, expert, used, back)
  from sprl.kernels import hopper_grouped_matmul

  return hopper_grouped_matmul.grouped_matmul(x, w, expert, used, back)


def grouped_outer(
  dy: Float[Array, 'n T N'],
  x: Float[Array, 'n T K'],
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  experts: int,
  kernels: Kernels = 'auto',
) -> Float32[Array, 'X N K']:
  """Return the gradient of the weights of `grouped_matmul`: for each expert, the sum over its blocks of dy[i]^T @ x[i].

  X = `experts` is the number of experts. An expert without blocks gets zeros.

  Args:
    dy: the gradient of y, n blocks of T tokens.
    x: the input of `grouped_matmul`.
    expert: the expert of each block, in ascending order over the first `used` blocks.
    used: number of blocks that hold tokens; they come first. Other blocks do not count.
    experts: number of experts.
    kernels: implementation.
  """
  if not runs((dy.shape[2], x.shape[2]), x.dtype, x.shape[1], kernels):
    return outer_reference(dy, x, expert, used, experts)
  from sprl.kernels import hopper_grouped_matmul

  return hopper_grouped_matmul.grouped_outer(dy, x, expert, used, experts)


def grouped_reference(
  x: Float[Array, 'n T C'], w: Float[Array, 'X N K'], expert: Int[Array, ' n'], used: Int[Array, ''], back: bool = False
) -> Float[Array, 'n T R']:
  """Compute `grouped_matmul` in jnp, block by block."""

  def block(i, y):
    weights = w[expert[i]]
    one = jnp.matmul(x[i], weights if back else weights.T, preferred_element_type=jnp.float32)
    return jax.lax.dynamic_update_index_in_dim(y, one.astype(y.dtype), i, 0)

  return jax.lax.fori_loop(0, used, block, jnp.zeros((*x.shape[:2], w.shape[2 if back else 1]), x.dtype))


def outer_reference(
  dy: Float[Array, 'n T N'], x: Float[Array, 'n T K'], expert: Int[Array, ' n'], used: Int[Array, ''], experts: int
) -> Float32[Array, 'X N K']:
  """Compute `grouped_outer` in jnp, block by block."""

  def block(i, dw):
    return dw.at[expert[i]].add(jnp.matmul(dy[i].T, x[i], preferred_element_type=jnp.float32))

  return jax.lax.fori_loop(0, used, block, jnp.zeros((experts, dy.shape[2], x.shape[2])))


def cost(M: int, X: int, N: int, K: int) -> Cost:
  """Return the cost of multiplying M tokens in bfloat16, each by the weights [N, K] of one of X experts."""
  return Cost(2 * (M * K + X * N * K + M * N), 2 * M * N * K)


def outer_cost(M: int, X: int, N: int, K: int) -> Cost:
  """Return the cost of the weight gradients of X experts over M tokens in total."""
  return Cost(2 * M * (N + K) + 4 * X * N * K, 2 * M * N * K)
