"""The one matrix product of the house: `dot(x, w)`, and what its weight may be."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sprl.kernels.grouped_matmul import grouped_matmul
from sprl.parallel.rules import Names, kept, shard
from sprl.quant import block
from sprl.quant.block import BlockScaled, Emulated, block_dot, fake_groups
from sprl.settings import Kernels

PRODUCT = 'product'  # what a policy of recomputation knows these products by


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
  """A frozen weight and what is trained beside it: w + scale * b @ a (sprl/models/lora.py)."""

  w: Float[Array, 'N M']
  a: Float[Array, 'R M']
  b: Float[Array, 'N R']
  scale: float = field(metadata={'static': True})

  def merged(self) -> Float[Array, 'N M']:
    """The sum as one weight, in float32."""
    a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
    return self.w.astype(jnp.float32) + self.scale * jnp.matmul(b, a, precision='highest')


def plain(w: Float[Array, '*S'] | LowRank) -> Float[Array, '*S']:
  """A weight as one array, whatever it is trained as."""
  return w.merged() if isinstance(w, LowRank) else w


def dot(
  x: Float[Array, '*B M'], w: Float[Array, 'N M'] | LowRank | BlockScaled | Emulated, axes: Names | None = None
) -> Float[Array, '*B N']:
  """x @ w^T in x's dtype; `axes` name w's for a mesh. Under a quantised weight x is quantised too, and nothing differentiated.

  Under a low-rank one neither it nor its gradient is ever a matrix of w's shape.
  """
  match w:
    case LowRank():
      inner, outer = (None, None) if axes is None else ((None, axes[1]), (axes[0], None))
      beside = _dot(_dot(x, w.a, inner), w.b, outer)
      return checkpoint_name(_dot(x, jax.lax.stop_gradient(w.w), axes) + w.scale * beside, PRODUCT)
    case BlockScaled():
      return block_dot(x, w, axes or (None, None))
    case Emulated():
      return _dot(fake_groups(x, w.format), w.values, axes)
    case _:
      return checkpoint_name(_dot(x, w, axes), PRODUCT)


def grouped_dot(
  x: Float[Array, 'n T M'],
  w: Float[Array, 'X N M'] | BlockScaled | Emulated,
  expert: Int[Array, ' n'],
  used: Int[Array, ''],
  kernels: Kernels = 'auto',
) -> Float[Array, 'n T N']:
  """`dot` of blocks of tokens with the weights of their experts, in the first `used` blocks; others may be anything.

  Not differentiated. `kernels` says what multiplies; FP8 codes bring that with them.
  """
  match w:
    case BlockScaled():
      return block.grouped_dot(x, w, expert, used)
    case Emulated():
      return grouped_matmul(fake_groups(x, w.format), w.values, expert, used, kernels=kernels)
    case _:
      return grouped_matmul(x, w.astype(x.dtype), expert, used, kernels=kernels)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(x: Float[Array, '*B M'], w: Float[Array, 'N M'], axes: Names | None) -> Float[Array, '*B N']:
  """x @ w^T in x's dtype; w may be held in a wider one (float32 master weights under bfloat16 activations).

  w is [out, in]: the layout of checkpoints, and the one that CPUs and FP8 tensor cores read fastest.
  The gradient of w is one product over all leading dims, summed in float32 and returned in w's own dtype. Written out because
  autodiff would emit a transposed product, for which XLA's CPU backend has no fast bfloat16 path, and would round the
  gradient of a float32 weight to bfloat16 on the way.
  """
  return jax.lax.dot_general(x, _gathered(w, x.dtype, axes), (((x.ndim - 1,), (1,)), ((), ())))


def _gathered(w, dtype, axes):
  """The weight in use; cast before it is gathered. Said to be kept until then, or the layer before would gather it already."""
  w = w.astype(dtype)
  return w if axes is None else shard(kept(w, *axes), *axes)


def _forward(x, w, axes):
  return _dot(x, w, axes), (x, w)  # w as it is kept, to be gathered once more: all gathered ones would not fit


def _backward(axes, saved, g):
  x, w = saved
  dx = jnp.matmul(g, _gathered(w, x.dtype, axes))
  rows = tuple(range(x.ndim - 1))
  dw = jax.lax.dot_general(g, x, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
  if axes is not None:
    dx, dw = shard(dx, 'rows', *[None] * (x.ndim - 2), axes[1]), kept(dw, *axes)
  return dx, dw.astype(w.dtype)


_dot.defvjp(_forward, _backward)
