"""`dot(x, w)`: the matrix product of all linear layers, and the forms that its weight may have."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sprl.config import Kernels
from sprl.kernels.grouped_matmul import grouped_matmul
from sprl.kernels.launch_model import parts_of_sum
from sprl.kernels.platform import copies_slowly, on_accelerator
from sprl.quant import block
from sprl.quant.block import BlockScaled, Emulated, Quantised, block_dot, fake_groups
from sprl.sharding.rules import Names, activation, kept, parts, shard

FEW_ROWS = 256  # CPUs multiply up to this many rows by a weight in whole TILEs
TILE = 16  # rows that CPUs multiply together
PRODUCT = 'product'  # name of these products in checkpoint policies


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
  """A frozen weight with a trained adapter: w + scale * b @ a (sprl/models/lora.py)."""

  w: Float[Array, 'N M']
  a: Float[Array, 'R M']
  b: Float[Array, 'N R']
  scale: float = field(metadata={'static': True})

  def merged(self) -> Float[Array, 'N M']:
    """Return the sum as one float32 weight."""
    a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
    return self.w.astype(jnp.float32) + self.scale * jnp.matmul(b, a, precision='highest')


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StraightThrough:
  """A trained weight and its copy in FP8 or the compute dtype: products use the copy, and their gradients go to the weight."""

  w: Float[Array, '*X N M'] | LowRank
  copy: BlockScaled | Emulated | Float[Array, '*X N M']  # of the weight, or of the sum of weight and adapter


def plain(w: Float[Array, '*S'] | LowRank | StraightThrough) -> Float[Array, '*S']:
  """Return a weight as one array: an adapter is merged, a copy is dropped, other weights do not change."""
  w = w.w if isinstance(w, StraightThrough) else w
  return w.merged() if isinstance(w, LowRank) else w


def dot(
  x: Float[Array, '*B M'] | Quantised,
  w: Float[Array, 'N M'] | LowRank | BlockScaled | Emulated | StraightThrough,
  axes: Names | None = None,
) -> Float[Array, '*B N']:
  """Return x @ w^T in x's dtype. `axes` are the names of w's axes on a mesh.

  If w is quantised, x is quantised too (unless it is already), and the product has no gradient. A product with a StraightThrough
  weight uses its copy, and has gradients. The adapter of a LowRank weight is never expanded to a matrix of w's shape, and
  neither is its gradient.
  """
  if isinstance(w, BlockScaled):
    return block_dot(x, w, axes or (None, None))
  assert not isinstance(x, Quantised), 'only codes multiply codes'
  match w:
    case LowRank():
      inner, outer = (None, None) if axes is None else ((None, axes[1]), (axes[0], None))
      beside = _dot(_dot(x, w.a, inner), w.b, outer)
      return checkpoint_name(_dot(x, jax.lax.stop_gradient(w.w), axes) + w.scale * beside, PRODUCT)
    case Emulated():
      return _dot(fake_groups(x, w.format), w.values, axes)
    case StraightThrough():
      return checkpoint_name(_straight_through(x, w.w, w.copy, axes), PRODUCT)
    case _:
      return checkpoint_name(_dot(x, w, axes), PRODUCT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parts:
  """A product as float32 parts, whose sum is the product. A kernel that reads them adds them up."""

  of: Float[Array, 'P *B N']

  def whole(self, dtype: Any) -> Float[Array, '*B N']:
    """Return the product in `dtype`."""
    return jnp.sum(self.of, axis=0).astype(dtype)


def parted_dot(
  x: Float[Array, '*B M'] | Quantised,
  w: Float[Array, 'N M'] | LowRank | BlockScaled | Emulated | StraightThrough,
  axes: Names | None = None,
) -> Float[Array, '*B N'] | Parts:
  """Return `dot`, or its Parts if a GPU would split the sum. Part p sums the p-th equal range of M. Parts have no gradient."""
  rows = math.prod(x.shape[:-1])
  if not isinstance(w, jax.Array) or (several := parts_of_sum(rows // parts('rows', rows), len(w), x.shape[-1])) == 1:
    return dot(x, w, axes)
  assert not isinstance(x, Quantised), 'only codes multiply codes'
  left, right = (a.reshape(*a.shape[:-1], several, -1) for a in (x, _gathered(w, x.dtype, axes)))
  return Parts(jnp.einsum('...pm,npm->p...n', left, right, preferred_element_type=jnp.float32))


def operand(x: Float[Array, '*B M'], w: Float[Array, '*X N M'] | BlockScaled | Emulated) -> Float[Array, '*B M']:
  """Return the activations that a product with w multiplies: x, rounded to FP8 if w is quantised."""
  return fake_groups(x, w.format) if isinstance(w, BlockScaled | Emulated) else x


def values(w: Float[Array, '*S'] | BlockScaled | Emulated, dtype: Any) -> Float[Array, '*S']:
  """Return the values of a weight that its products multiply, in `dtype`: code times scale if it is quantised."""
  match w:
    case BlockScaled():
      return w.dequantised(dtype)
    case Emulated():
      return w.values.astype(dtype)
    case _:
      return w.astype(dtype)


def grouped_dot(
  x: Float[Array, 'n T M'],
  w: Float[Array, 'X N M'] | BlockScaled | Emulated,
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  kernels: Kernels = 'auto',
) -> Float[Array, 'n T N']:
  """Return `dot` of each block of T tokens with the weight of its expert. Blocks from `used` on are undefined. No gradient.

  `kernels` selects the implementation; a BlockScaled weight has its own.
  """
  match w:
    case BlockScaled():
      return block.grouped_dot(x, w, expert, used)
    case Emulated():
      return grouped_matmul(fake_groups(x, w.format), w.values, expert, used, kernels=kernels)
    case _:
      return grouped_matmul(x, w.astype(x.dtype), expert, used, kernels=kernels)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _straight_through(x, w, copy, axes: Names | None):
  """Return the product of x and the copy of w. Gradients ignore roundings to FP8 (docs/methods/fp8.md, eq. 12 to 14)."""
  if isinstance(copy, BlockScaled) and axes is not None:
    # Constrain the codes here, so that they are gathered inside the layer. Codes that are gathered before the layer would live
    # until the backward pass.
    copy = replace(copy, codes=kept(copy.codes, *axes))
  return dot(x, copy, axes)


def _straight_forward(x, w, copy, axes):
  return _straight_through(x, w, copy, axes), (x, w, copy)


def _straight_backward(axes, saved, g):
  """Return the gradients of the plain product at the rounded operands. XLA removes the unused forward product of `vjp`."""
  x, w, copy = saved
  if isinstance(copy, BlockScaled):
    codes = copy.codes if axes is None else shard(kept(copy.codes, *axes), *axes)  # gathers one byte per weight
    whole = replace(copy, codes=codes).dequantised(x.dtype)
  else:
    whole = _gathered(values(copy, x.dtype), x.dtype, axes)
  (dw,) = jax.vjp(lambda w: dot(operand(x, copy), w, axes), w)[1](g)
  return _input_gradient(g, whole, axes), dw, None


_straight_through.defvjp(_straight_forward, _straight_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(x: Float[Array, '*B M'], w: Float[Array, 'N M'], axes: Names | None) -> Float[Array, '*B N']:
  """Return x @ w^T in x's dtype. w may have a wider dtype (float32 master weights under bfloat16 activations).

  w is [out, in]: the layout of checkpoints, which is also the fastest for CPUs (`rows_dot`) and FP8 tensor cores.

  The gradient of w is one product over all leading dims, summed in float32 and returned in w's dtype. It is written by hand:
  autodiff would emit a transposed product, for which XLA's CPU backend has no fast bfloat16 path, and would round the gradient
  of a float32 weight to bfloat16.
  """
  return rows_dot(x, _gathered(w, x.dtype, axes))


def rows_dot(x: Float[Array, '*B M'], w: Float[Array, 'N M'], dtype: Any = None) -> Float[Array, '*B N']:
  """Return x @ w^T, summed and returned in `dtype` (None: x's).

  CPUs multiply few float32 rows by a weight in whole TILEs: the bits of a row then do not depend on its position or on the other
  rows. XLA's CPU library copies the right operand of a product into another layout. Where that costs more than the product, x is
  the right operand, and the small result is transposed.
  """
  rows = math.prod(x.shape[:-1])
  if x.dtype != jnp.float32 or rows > FEW_ROWS or on_accelerator():
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)
  whole = jnp.pad(x.reshape(rows, -1), ((0, -rows % TILE), (0, 0)))
  product = partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=dtype)
  # Without the barrier, XLA would swap the operands back.
  y = jax.lax.optimization_barrier(product(w, whole)).T if copies_slowly() else product(whole, w)
  return y[:rows].reshape(*x.shape[:-1], -1)


def _gathered(w, dtype, axes):
  """Cast the weight, then gather it. The sharding constraint in between stops XLA from gathering it a layer earlier."""
  w = w.astype(dtype)
  return w if axes is None else shard(kept(w, *axes), *axes)


def _forward(x, w, axes):
  return _dot(x, w, axes), (x, w)  # w before it is gathered: all gathered weights together would not fit


def _backward(axes, saved, g):
  x, w = saved
  rows = tuple(range(x.ndim - 1))
  dw = jax.lax.dot_general(g, x, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
  dw = dw if axes is None else kept(dw, *axes)
  return _input_gradient(g, _gathered(w, x.dtype, axes), axes), dw.astype(w.dtype)


def _input_gradient(g, w, axes):
  dx = jnp.matmul(g, w)
  return dx if axes is None else shard(dx, *activation(g.ndim, axes[1]))


_dot.defvjp(_forward, _backward)
