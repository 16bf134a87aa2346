"""Block-wise FP8: one scale for each block of a weight, and for each token and group of features of an activation.

Weights are quantised once a sync, activations in every product (docs/methods/fp8.md, block-wise weights and activations).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int

from sprl.config import Kernels
from sprl.kernels import quantise as quantise_kernels
from sprl.kernels.block_matmul import block_matmul, grouped_matmul
from sprl.kernels.rounding import to_bfloat16
from sprl.quant import fp8
from sprl.sharding.rules import Names, activation, local, psum, shares


class Format(NamedTuple):
  """Sizes of the blocks of weights and the groups of activations that share a scale."""

  rows: int  # of a weight's block, along [out]
  group: int  # features of an activation, and columns of a weight's block: both lie along the contracted axis, [in]
  pow2: bool  # whether scales are powers of two


FORMATS = {
  'float32': Format(128, 128, False),
  'pow2': Format(128, 128, True),
  'mxfp8': Format(1, 32, True),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emulated:
  """A quantised weight as codes times scales, for devices that do not multiply FP8."""

  values: Float[Array, '*X N M']
  format: str = field(metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaled:
  """A quantised weight as e4m3 codes and one scale a block. Blocks at the edges may be smaller.

  The weights of experts are stacked, [X, N, M]; each expert has its own blocks.
  """

  codes: Float8e4m3fn[Array, '*X N M']
  scale: Float32[Array, '*X R C']
  format: str = field(metadata={'static': True})
  kernels: Kernels = field(default='auto', metadata={'static': True})  # implementation of its product

  def dequantised(self, dtype=jnp.float32) -> Float[Array, '*X N M']:
    """Return codes times scales."""
    rows, group, _ = FORMATS[self.format]
    return fp8.decast(self.codes, _spread(self.scale, rows, group, self.codes.shape), dtype)

  def emulated(self, dtype=jnp.float32) -> Emulated:
    """Return the weight for a device that does not multiply FP8."""
    return Emulated(self.dequantised(dtype), self.format)


def quantise(w: Float[Array, '*X N M'], format: str) -> BlockScaled:
  """Quantise a weight, or stacked weights of experts (docs/methods/fp8.md, eq. 2). `format` is a key of FORMATS.

  The weight is rounded to bfloat16 first, so that float32 and bfloat16 weights give the same codes.
  """
  if w.ndim > 2:
    return jax.vmap(partial(quantise, format=format))(w)
  rows, group, pow2 = FORMATS[format]
  return BlockScaled(*_quantise(to_bfloat16(w), rows, group, pow2), format)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
  """Activations as codes, and C scales a token, one for each group of features. A kernel quantised a norm or an activation."""

  codes: Float8e4m3fn[Array, 'T M']
  scale: Float32[Array, 'T C']
  lead: tuple[int, ...] = field(metadata={'static': True})  # the axes that the tokens had
  dtype: Any = field(metadata={'static': True})  # of products
  format: str = field(metadata={'static': True})

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the activations."""
    return (*self.lead, self.codes.shape[1])

  @property
  def ndim(self) -> int:
    """The number of the activations' axes."""
    return len(self.shape)


def quantises(shape: tuple[int, ...], dtype: Any, w: BlockScaled, norm: bool = False) -> bool:
  """Return whether a kernel quantises activations of this shape for a product with w. `norm`: behind a norm."""
  _, group, pow2 = FORMATS[w.format]
  return quantise_kernels.runs((math.prod(shape[:-1]), shape[-1]), dtype, group, pow2, w.kernels, norm)


def normalised_codes(
  x: Float[Array, '*B M'], added: Float[Array, '*B M'] | None, scale: Float[Array, ' M'], eps: float, w: BlockScaled
) -> tuple[Quantised, Float[Array, '*B M']]:
  """Return y / rms(y) * scale, rounded to x's dtype and quantised for a product with w, and y = x (+ added).

  The kernel must run (`quantises`).
  """
  from sprl.kernels import hopper_quantise

  *lead, M = x.shape
  rows = None if added is None else added.reshape(-1, M)
  codes, scales, total = hopper_quantise.normalised_codes(x.reshape(-1, M), scale, eps, rows)
  return Quantised(codes, scales, tuple(lead), x.dtype, w.format), total.reshape(x.shape)


def gated_codes(x: Float[Array, '*B N'], activate: Callable[[Array], Array], w: BlockScaled) -> Quantised:
  """Return activate(gate) * up for x = gate beside up, rounded to x's dtype and quantised for a product with w.

  The kernel must run (`quantises`).
  """
  from sprl.kernels import hopper_quantise

  *lead, N = x.shape
  codes, scales = hopper_quantise.gated_codes(x.reshape(-1, N), activate)
  return Quantised(codes, scales, tuple(lead), x.dtype, w.format)


def quantise_groups(
  x: Float[Array, '*B M'], format: str, kernels: Kernels = 'reference'
) -> tuple[Float8e4m3fn[Array, '*B M'], Float32[Array, '*B C']]:
  """Return codes of activations, and C scales a token, one for each group of features (docs/methods/fp8.md, eq. 3)."""
  *lead, M = x.shape
  _, group, pow2 = FORMATS[format]
  if quantise_kernels.runs((math.prod(lead), M), x.dtype, group, pow2, kernels):
    from sprl.kernels import hopper_quantise

    codes, scale = hopper_quantise.codes(x.reshape(-1, M))
    return codes.reshape(x.shape), scale.reshape(*lead, -1)
  codes, scale = _quantise(x.astype(jnp.float32).reshape(-1, M), 1, group, pow2)
  return codes.reshape(x.shape), scale.reshape(*lead, -(-M // group))


def fake_groups(x: Float[Array, '*B M'], format: str) -> Float[Array, '*B M']:
  """Return activations after a round trip through `quantise_groups`, in their own dtype."""
  _, group, pow2 = FORMATS[format]
  scale = _scales(x.astype(jnp.float32).reshape(-1, x.shape[-1]), 1, group, pow2).reshape(*x.shape[:-1], -1)
  return fp8.fake(x, jnp.repeat(scale, group, -1)[..., : x.shape[-1]])


def block_dot(x: Float[Array, '*B M'] | Quantised, w: BlockScaled, axes: Names = (None, None)) -> Float[Array, '*B N']:
  """Quantise x, if it is not, and return x @ w^T in x's dtype, summed in float32 on each device (docs/methods/fp8.md, eq. 4).

  A kernel multiplies FP8 codes where one can run. Elsewhere the codes are multiplied group by group as bfloat16, which holds e4m3
  exactly. On a mesh each device multiplies its part of the weight; `axes` are the names of the weight's axes. If the mesh splits
  the features, each device's sum is rounded to x's dtype, the dtype of the kernel's results, before the devices add theirs. An
  axis that the mesh would cut within blocks is gathered.
  """
  rows, group, _ = FORMATS[w.format]
  outputs, features = _split(axes[0], w.codes.shape[0], rows), _split(axes[1], w.codes.shape[1], group)

  if isinstance(x, Quantised):  # kernels quantise on one device only
    y = block_matmul(x.codes, x.scale, w.codes, w.scale, rows, group, x.dtype, w.kernels)
    return y.reshape(*x.lead, -1)

  def product(x, codes, scale):
    x8, x_scale = quantise_groups(x.reshape(-1, x.shape[-1]), w.format, w.kernels)
    y = block_matmul(x8, x_scale, codes, scale, rows, group, x.dtype, w.kernels).reshape(*x.shape[:-1], len(codes))
    return y if features is None else psum(y, features)

  part = outputs, features
  return local(product, (activation(x.ndim, features), part, part), activation(x.ndim, outputs))(x, w.codes, w.scale)


def grouped_dot(
  x: Float[Array, 'n T M'], w: BlockScaled, expert: Int[Array, ' n'], used: Int[Array, '']
) -> Float[Array, 'n T N']:
  """Return `block_dot` of each block of T tokens with the weight of its expert. Blocks from `used` on are undefined."""
  rows, group, _ = FORMATS[w.format]
  codes, scale = quantise_groups(x, w.format, w.kernels)
  return grouped_matmul(codes, scale, w.codes, w.scale, expert, used, rows, group, x.dtype, w.kernels)


def cut_within_blocks(axes: Names, shape: tuple[int, ...], format: str, mesh: Mesh | AbstractMesh) -> bool:
  """Whether the mesh would cut a weight [..., N, M] with these axes within its blocks of scales."""
  rows, group, _ = FORMATS[format]
  sizes = zip(axes[-2:], shape[-2:], (rows, group), strict=True)
  return any((n := shares(name, mesh)) > 1 and size % (n * block) for name, size, block in sizes)


def _split(name: str | None, size: int, block: int) -> str | None:
  """Return the name of an axis that the mesh in use cuts between blocks; None if the axis is whole or must be gathered."""
  n = shares(name)
  return name if n > 1 and size % (n * block) == 0 else None


def _quantise(x, rows, columns, pow2):
  """Return codes [N, M] and scales [ceil(N / rows), ceil(M / columns)] of a float32 [N, M]."""
  scale = _scales(x, rows, columns, pow2)
  return fp8.cast(x, _spread(scale, rows, columns, x.shape)), scale


def _scales(x, rows, columns, pow2):
  N, M = x.shape
  padded = jnp.pad(x, ((0, -N % rows), (0, -M % columns)))
  amax = jnp.abs(padded).reshape(-(-N // rows), rows, -(-M // columns), columns).max((1, 3))
  scale = jnp.maximum(amax, fp8.FLOOR) / fp8.MAX
  return fp8.pow2(scale) if pow2 else scale


def _spread(scale, rows, columns, shape):
  """Repeat each block's scale for each of its elements."""
  return jnp.repeat(jnp.repeat(scale, rows, -2), columns, -1)[..., : shape[-2], : shape[-1]]
