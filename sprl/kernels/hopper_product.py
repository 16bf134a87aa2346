"""Products of the tensor core of a Hopper GPU."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def product(shape: tuple[int, int], *pairs: tuple[Any, Any], meanwhile: Callable[[], None] | None = None) -> Any:
  """Return the sum of a @ b over the pairs in float32. `a` is in shared memory or in registers, `b` in shared memory.

  `meanwhile()` runs after the products are issued, before their result is waited for.
  """

  def multiply(acc):
    for a, b in pairs:
      plgpu.wgmma(acc, a, b)
    if meanwhile is not None:
      meanwhile()
    return acc[...]

  return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
