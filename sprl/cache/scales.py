"""The scales of an FP8 cache, from the largest queries, keys and values (docs/methods/fp8.md, eq. 8).

Each layer has one scale for queries, one for keys and one for values. A stored code times its scale is the number it stands for.
Scales belong to one version of the weights. They are traced arrays, so new scales compile nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sprl.quant import fp8

FIRST_FORWARD = (200.0, 200.0, 100.0)  # vLLM's divisors of the largest |q|, |k|, |v|: headroom 2.24, 2.24, 4.48


class Scales(NamedTuple):
  """Dequantisation multipliers of each layer's queries, keys and values."""

  q: Float[Array, ' L']
  k: Float[Array, ' L']
  v: Float[Array, ' L']


def from_amax(amax: Float[np.ndarray, '3 L'], divisors: tuple[float, float, float]) -> Scales:
  """Return the scales amax / divisor for q, k and v. A scale is 1 where amax is 0: nothing was seen. NaN stays NaN."""
  q, k, v = np.where(amax == 0, 1, amax / np.array(divisors, np.float32)[:, None]).astype(np.float32)
  return jax.device_put(Scales(q, k, v))


def unit(layers: int) -> Scales:
  """Return scales of 1, for `quant.kv_scale=unit` and where nothing was measured yet."""
  return from_amax(np.zeros((3, layers), np.float32), (1.0, 1.0, 1.0))


def with_margin(margin: float) -> tuple[float, float, float]:
  """Return divisors of the largest values: the scales then make `margin` times the largest value representable."""
  return fp8.MAX / margin, fp8.MAX / margin, fp8.MAX / margin


def percentile(amax: Float[Array, 'N 3 L'], count: Int[Array, '']) -> Float[Array, '3 L']:
  """Return the nearest-rank 99.9th percentile over the first `count` microbatches (NeMo-RL's rule).

  Of fewer than 1,000 microbatches it is the largest.
  """
  seen = jnp.where(jnp.arange(amax.shape[0])[:, None, None] < count, amax, jnp.inf)
  rank = -(-999 * count // 1000)
  return jnp.sort(seen, axis=0)[jnp.maximum(rank - 1, 0)]
