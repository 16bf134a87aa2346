"""The FP8 cache's scales: how they are found, and what of the keys is quantised at all (fp8_rollouts 3).

A scale is a layer's; a stored number times its scale is the number meant. Scales travel with the weights they belong to and
are arrays like them, so that new ones compile nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sprl.kernels.rope import Rope, rotate, turns
from sprl.quant import fp8

FIRST_FORWARD = (200.0, 200.0, 100.0)  # divisors of the largest |Q|, |K|, |V| (vLLM's constants): headroom 2.24, 2.24, 4.48


class Scales(NamedTuple):
  """Dequantisation multipliers of a model's queries, keys and values, one a layer."""

  q: Float[Array, ' L']
  k: Float[Array, ' L']
  v: Float[Array, ' L']


def from_amax(amax: Float[np.ndarray, '3 L'], divisors: tuple[float, float, float]) -> Scales:
  """Scales that put a layer's largest |Q|, |K| and |V| at the divisors; where nothing was seen, 1."""
  q, k, v = np.where(amax > 0, amax / np.array(divisors, np.float32)[:, None], 1).astype(np.float32)
  return jax.device_put(Scales(q, k, v))


def with_margin(margin: float) -> tuple[float, float, float]:
  """The divisors that leave `margin` times the largest value seen just representable."""
  return fp8.MAX / margin, fp8.MAX / margin, fp8.MAX / margin


def percentile(amax: Float[Array, 'N 3 L'], count: Int[Array, '']) -> Float[Array, '3 L']:
  """The nearest-rank 99.9th percentile over the first `count` microbatches: of fewer than 1,000, the largest (NeMo-RL's rule)."""
  seen = jnp.where(jnp.arange(amax.shape[0])[:, None, None] < count, amax, jnp.inf)
  rank = -(-999 * count // 1000)
  return jnp.sort(seen, axis=0)[jnp.maximum(rank - 1, 0)]


def rotated_biases(biases: tuple[Float[Array, ' KD'], ...], positions: Int[Array, 'B T'], head_dim: int, rope: Rope):
  """Each layer's key bias as the rotation leaves it at these positions: what keys of Qwen2 hold whatever the token.

  An FP8 number's error is relative to the number: a bias of 100 drowns what the token says. Kept apart, and added back exactly,
  it costs nothing of the format's precision.
  """
  angles = turns(positions, head_dim, rope)
  shape = (*positions.shape, -1, head_dim)
  return tuple(
    rotate(jnp.broadcast_to(b.astype(jnp.float32).reshape(-1, head_dim), (*shape[:2], b.size // head_dim, head_dim)), angles)
    for b in biases
  )
