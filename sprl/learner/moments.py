"""Adam's moments in fewer bytes, without the averages that stop moving."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, BFloat16, Float32, UInt32


def rounded(x: Float32[Array, '*S'], seed: UInt32[Array, '']) -> BFloat16[Array, '*S']:
  """x rounded up or down at random to one of its two neighbours in bfloat16, so that the mean is x; not finite: as it is.

  bfloat16 is the upper half of a float32's bits. Adding 16 random bits carries into it as often as the lower half says.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + _noise(x.shape, seed)
  cut = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), cut, x.astype(jnp.bfloat16))


def _noise(shape, seed):
  """16 random bits an element, the upper ones of MurmurHash3's finaliser of its number; jax.random takes five times as long."""
  number = seed
  for axis in range(len(shape)):
    number = number + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(math.prod(shape[axis + 1 :]) & 0xFFFFFFFF)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    number = (number ^ (number >> shift)) * np.uint32(factor)
  return jnp.broadcast_to(number >> 16, shape)


def scale_by_adam(b1: float, b2: float, eps: float, dtype) -> optax.GradientTransformation:
  """optax.scale_by_adam with both moments held in `dtype`, float32 or bfloat16.

  optax holds the first moment in a dtype of one's choice, and rounds to nearest, which b1 forgives. The second moves by
  (1 - b2) (g^2 / v - 1) of itself: at b2 = 0.999 no g^2 in [0, 3 v] gets past bfloat16's half step of 1/512, and v would stay
  where its largest gradient left it. Rounded at random it is right in the mean. The random numbers follow from the count of
  updates, so that a resumed run rounds alike. Steps are then those of the moments as they are held.
  """
  inner: Any = optax.scale_by_adam(b1, b2, eps, mu_dtype=dtype)

  def init(params):
    state = inner.init(params)
    return state._replace(nu=optax.tree.cast(state.nu, dtype))

  def update(updates, state, params=None):
    steps, new = inner.update(updates, state._replace(nu=optax.tree.cast(state.nu, jnp.float32)), params)
    if dtype == jnp.bfloat16:
      leaves, tree = jax.tree.flatten(new.nu)
      seeds = jax.random.bits(jax.random.fold_in(jax.random.key(0), state.count), (len(leaves),), jnp.uint32)
      new = new._replace(nu=tree.unflatten([rounded(v, seed) for v, seed in zip(leaves, seeds)]))
      new = jax.tree.map(jax.lax.optimization_barrier, new)  # all that is read from here on: they may be written over the old
      m, v = (optax.tree.bias_correction(optax.tree.cast(x, jnp.float32), b, new.count) for x, b in ((new.mu, b1), (new.nu, b2)))
      steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v)
    return steps, new

  return optax.GradientTransformation(init, update)
