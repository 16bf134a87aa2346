"""Choose between a GPU kernel and XLA to quantise activations. The reference is `sprl.quant.block.quantise_groups`."""

from typing import Any

import jax

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


def cost(T: int, M: int, read: int = 1) -> Cost:
  """Return the cost of codes and scales [T, M], from `read` bfloat16 arrays of this shape; a gated activation reads two."""
  return Cost(T * M * (2 * read + 1) + 4 * T * (M // 128), 0)
