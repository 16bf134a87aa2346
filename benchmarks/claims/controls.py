"""Controls: arms that do what a method does, without its reason."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sprl.objective.correction import catastrophic


def at_random(log_rho: Float[Array, 'B T'], mask: Bool[Array, 'B T'], veto: float) -> Bool[Array, 'B T']:
  """Mark all tokens of sequences that are drawn at random, as many as `catastrophic` rejects.

  In its place, the veto rejects at the same rate for no reason. The bits of log_rho seed the draw.
  """
  count = jnp.sum(catastrophic(log_rho, mask, veto).any(axis=1))
  key = jax.random.key(jax.lax.bitcast_convert_type(jnp.sum(log_rho), jnp.uint32))
  place = jnp.where(mask.any(axis=1), jax.random.uniform(key, mask.shape[:1]), 2.0)  # rows without a token come last
  return mask & (jnp.argsort(jnp.argsort(place)) < count)[:, None]
