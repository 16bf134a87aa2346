"""Block-wise FP8: weights quantised once, one scale a block; activations on the fly, one scale a token and group of features."""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int

from sprl.kernels.block_matmul import block_matmul, grouped_matmul
from sprl.parallel.rules import Names, local, shares, total
from sprl.quant import fp8
from sprl.settings import Kernels


class Format(NamedTuple):
  """What shares a scale, and whether scales are powers of two. Along the contracted axis `columns` and `group` agree."""

  rows: int  # of a weight's block, along [out]
  columns: int  # along [in]
  group: int  # features of an activation
  pow2: bool


FORMATS = {
  'float32': Format(128, 128, 128, False),
  'pow2': Format(128, 128, 128, True),
  'mxfp8': Format(1, 32, 32, True),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emulated:
  """A quantised weight for devices that do not multiply FP8: the codes times their scales."""

  values: Float[Array, '*X N M']
  format: str = field(metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaled:
  """A quantised weight: e4m3 codes, and for each block the scale that multiplies them; blocks at the edges are ragged.

  Experts stand one beside the other, each with blocks of its own: [X, N, M].
  """

  codes: Float8e4m3fn[Array, '*X N M']
  scale: Float32[Array, '*X R C']
  format: str = field(metadata={'static': True})
  kernels: Kernels = field(default='auto', metadata={'static': True})  # what multiplies by it

  def dequantised(self, dtype=jnp.float32) -> Float[Array, '*X N M']:
    """The codes times their scales."""
    rows, columns, *_ = FORMATS[self.format]
    return fp8.decast(self.codes, _spread(self.scale, rows, columns, self.codes.shape), dtype)

  def emulated(self, dtype=jnp.float32) -> Emulated:
    """The same weight for a device without FP8."""
    return Emulated(self.dequantised(dtype), self.format)


def quantise(w: Float[Array, '*X N M'], format: str) -> BlockScaled:
  """The weight's nearest in `format`.

  It is rounded to bfloat16 first: a sampler given float32 weights and one given bfloat16 ones must come to the same codes.
  """
  if w.ndim > 2:
    return jax.vmap(partial(quantise, format=format))(w)
  rows, columns, _, pow2 = FORMATS[format]
  return BlockScaled(*_quantise(w.astype(jnp.bfloat16).astype(jnp.float32), rows, columns, pow2), format)


def quantise_groups(x: Float[Array, '*B M'], format: str) -> tuple[Float8e4m3fn[Array, '*B M'], Float32[Array, '*B G']]:
  """Codes of the activations, and one scale for each token and group."""
  *lead, M = x.shape
  _, _, group, pow2 = FORMATS[format]
  codes, scale = _quantise(x.astype(jnp.float32).reshape(-1, M), 1, group, pow2)
  return codes.reshape(x.shape), scale.reshape(*lead, -(-M // group))


def fake_groups(x: Float[Array, '*B M'], format: str) -> Float[Array, '*B M']:
  """The activations as `quantise_groups` leaves them, in their own dtype."""
  codes, scale = quantise_groups(x, format)
  return fp8.decast(codes, jnp.repeat(scale, FORMATS[format].group, -1)[..., : x.shape[-1]], x.dtype)


def block_dot(x: Float[Array, '*B M'], w: BlockScaled, axes: Names = (None, None)) -> Float[Array, '*B N']:
  """x @ w^T of quantised x and w in x's dtype: y[i, n] = sum_k (sum_m x8[i, m] w8[n, m], m in block k) sx[i, k] sw[n, k].

  Summed in float32: by a kernel of FP8 products where one can run, else group by group in bfloat16, which holds e4m3 exactly.
  On a mesh each device multiplies its part of the weight, whose `axes` are named; one that it does not cut between blocks is
  gathered.
  """
  rows, columns, group, _ = FORMATS[w.format]
  outputs, features = _split(axes[0], w.codes.shape[0], rows), _split(axes[1], w.codes.shape[1], columns)

  def product(x, codes, scale):
    x8, x_scale = quantise_groups(x.reshape(-1, x.shape[-1]), w.format)
    y = block_matmul(x8, x_scale, codes, scale, rows, group, x.dtype, w.kernels).reshape(*x.shape[:-1], len(codes))
    return y if features is None else total(y, features)

  lead, part = ('rows', *[None] * (x.ndim - 2)), (outputs, features)
  return local(product, ((*lead, features), part, part), (*lead, outputs))(x, w.codes, w.scale)


def grouped_dot(
  x: Float[Array, 'n T M'], w: BlockScaled, expert: Int[Array, ' n'], used: Int[Array, '']
) -> Float[Array, 'n T N']:
  """`block_dot` of blocks of tokens with the weights of their experts, in the first `used` blocks; others may be anything."""
  rows, _, group, _ = FORMATS[w.format]
  codes, scale = quantise_groups(x, w.format)
  return grouped_matmul(codes, scale, w.codes, w.scale, expert, used, rows, group, x.dtype, w.kernels)


def cut_within_blocks(axes: Names, shape: tuple[int, ...], format: str, mesh: Mesh | AbstractMesh) -> bool:
  """Whether the mesh would cut a weight [..., N, M] with these axes elsewhere than between its blocks."""
  rows, columns, *_ = FORMATS[format]
  sizes = zip(axes[-2:], shape[-2:], (rows, columns), strict=True)
  return any((n := shares(name, mesh)) > 1 and size % (n * block) for name, size, block in sizes)


def _split(name: str | None, size: int, block: int) -> str | None:
  """The name of an axis that the mesh in use cuts between blocks; None for one that is whole, or has to be."""
  n = shares(name)
  return name if n > 1 and size % (n * block) == 0 else None


def _quantise(x, rows, columns, pow2):
  """[N, M] float32 -> codes [N, M] and scale [ceil(N / rows), ceil(M / columns)]."""
  N, M = x.shape
  padded = jnp.pad(x, ((0, -N % rows), (0, -M % columns)))
  amax = jnp.abs(padded).reshape(-(-N // rows), rows, -(-M // columns), columns).max((1, 3))
  scale = jnp.maximum(amax, fp8.FLOOR) / fp8.MAX
  scale = fp8.pow2(scale) if pow2 else scale
  return fp8.cast(x, _spread(scale, rows, columns, x.shape)), scale


def _spread(scale, rows, columns, shape):
  """Each block's scale at each of its elements."""
  return jnp.repeat(jnp.repeat(scale, rows, -2), columns, -1)[..., : shape[-2], : shape[-1]]
