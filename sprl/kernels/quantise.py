"""Choose between a GPU kernel and XLA to normalise or quantise activations. The reference is in `sprl.quant.block`."""

from typing import Any

import jax
from jaxtyping import Array, Float

from sprl.config import Kernels
from sprl.kernels.cost import Cost
from sprl.kernels.platform import chosen


def runs(shape: tuple[int, int], dtype: Any, group: int, pow2: bool, kernels: Kernels, norm: bool = False) -> bool:
  """Return whether a kernel quantises tokens of this shape. `norm` says whether a norm comes first.

  `kernels` can exclude the kernel but not force it: the number of tokens changes from call to call, and XLA quantises shapes that
  the kernel cannot take.
  """

  def obstacle() -> str | None:
    from sprl.kernels import hopper_quantise  # imported here: Mosaic takes a second to import

    return hopper_quantise.obstacle(jax.ShapeDtypeStruct(shape, dtype), group, pow2, norm)

  return kernels != 'reference' and chosen('quantised activations', 'auto', obstacle)


def normalises(tokens: int, width: int, dtype: Any, kernels: Kernels) -> bool:
  """Return whether a kernel adds up and normalises bfloat16 tokens. `kernels` can exclude it but not force it."""

  def obstacle() -> str | None:
    from sprl.kernels import hopper_quantise

    return hopper_quantise.obstacle(jax.ShapeDtypeStruct((tokens, width), dtype), hopper_quantise.GROUP, False, norm=True)

  return kernels != 'reference' and chosen('norms', 'auto', obstacle)


def normalised(
  x: Float[Array, '*B M'], added: Float[Array, 'P *B M'], scale: Float[Array, ' M'], eps: float
) -> tuple[Float[Array, '*B M'], Float[Array, '*B M']]:
  """Return y / rms(y) * scale and y = x + the sum of the parts `added`, both in x's dtype. The kernel must run (`normalises`)."""
  from sprl.kernels import hopper_quantise

  rows = (-1, x.shape[-1])
  normed, total = hopper_quantise.normalised(x.reshape(rows), added.reshape(len(added), *rows), scale, eps)
  return normed.reshape(x.shape), total.reshape(x.shape)


def cost(T: int, M: int, read: int = 1) -> Cost:
  """Return the cost of codes and scales [T, M], from `read` bfloat16 arrays of this shape; a gated activation reads two."""
  return Cost(T * M * (2 * read + 1) + 4 * T * (M // 128), 0)


def norm_cost(T: int, M: int, parts: int) -> Cost:
  """Return the cost of the norm of a bfloat16 sum [T, M], whose second term has float32 parts."""
  return Cost(T * M * (6 + 4 * parts) + 2 * M, 0)
