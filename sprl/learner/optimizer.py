"""The optimiser: an optax chain from the settings, and Adam with both moments in bfloat16."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, BFloat16, Float32, Int32, UInt32

from sprl.config import Optimizer
from sprl.sharding.transfer import fetch, place

ADAM_EPSILON = 1e-8


def make_optimizer(settings: Optimizer, updates: int) -> optax.GradientTransformationExtraArgs:
  """Return the optax chain for a run of `updates` updates: clip by global norm, then the named optimiser.

  Its `update` takes `norm`, the global gradient norm where it is known. Weight decay follows the learning rate and leaves out
  vectors (norms, biases).
  """
  rate = schedule(settings, updates)
  moments = jnp.dtype(settings.moment_dtype)
  s = settings

  def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)

  adam, by_rate = scale_by_adam(s.b1, s.b2, ADAM_EPSILON, moments), optax.scale_by_learning_rate(rate)
  step = {
    'adamw': lambda: optax.chain(adam, optax.add_decayed_weights(s.weight_decay, matrices), by_rate),
    'adam': lambda: optax.chain(adam, by_rate),
    'lion': lambda: optax.lion(rate, s.b1, s.b2, mu_dtype=moments, weight_decay=s.weight_decay, mask=matrices),
    'sgd': lambda: optax.sgd(rate),
    'adafactor': lambda: optax.chain(  # the decay of optax.adafactor does not follow the learning rate
      optax.adafactor(), optax.add_decayed_weights(-s.weight_decay, matrices), optax.scale_by_learning_rate(rate, flip_sign=False)
    ),
  }[settings.name]()
  return optax.chain(clip_by_norm(s.clip_norm), step) if s.clip_norm is not None else optax.with_extra_args_support(step)


def schedule(settings: Optimizer, updates: int) -> optax.Schedule:
  """Return the learning rate by update: linear warm-up, then constant or down to 0 at the end."""
  peak, warm = settings.learning_rate, settings.warmup_steps
  left = max(updates - warm, 1)
  after = {
    'constant': optax.constant_schedule(peak),
    'linear': optax.linear_schedule(peak, 0.0, left),
    'cosine': optax.cosine_decay_schedule(peak, left),
  }[settings.schedule]
  return optax.join_schedules([optax.linear_schedule(peak / (warm + 1), peak, warm), after], [warm]) if warm else after


def last_rate(rate: optax.Schedule, opt_state: Any, skipped: bool) -> float:
  """Return the learning rate of the latest update, from the optimiser's state after it.

  `skipped` says that its gradient was not finite. A skipped update does not advance the schedule: it has the rate with which it
  would have been taken, and the next update has the same rate.
  """
  [state] = [s for s in jax.tree.leaves(opt_state, is_leaf=_is_schedule) if _is_schedule(s)]
  taken = int(fetch(state.count))
  return np.asarray(rate(np.int32(max(taken - (not skipped), 0)))).item()


def left_out(opt_state: Any, updates: int) -> Any:
  """Return the state of the optimiser with its schedule advanced by updates that are not taken. Moments and their counts stay."""

  def advanced(state):
    if not _is_schedule(state):
      return state
    more = place(np.int32(updates), state.count.sharding)
    return state._replace(count=jax.jit(_add, out_shardings=state.count.sharding)(state.count, more))

  return jax.tree.map(advanced, opt_state, is_leaf=_is_schedule)


def _add(count: Int32[Array, ''], more: Int32[Array, '']) -> Int32[Array, '']:
  return count + more


def _is_schedule(state: Any) -> bool:
  return isinstance(state, optax.ScaleByScheduleState)


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
  """Return optax.clip_by_global_norm(limit) whose `update` takes the norm as `norm=` where it is known already."""

  def init(params):
    return optax.EmptyState()

  def update(updates, state, params=None, *, norm=None, **_):
    scale = jnp.minimum(1, limit / (optax.tree.norm(updates) if norm is None else norm))
    return optax.tree.scale(scale, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


# --- moments in bfloat16 ---------------------------------------------------------------------------------------------


def scale_by_adam(b1: float, b2: float, eps: float, dtype) -> optax.GradientTransformation:
  """Return optax.scale_by_adam with both moments held in `dtype`, float32 or bfloat16.

  optax can hold the first moment in bfloat16, rounded to nearest, which b1 tolerates. The second moment v changes by
  (1 - b2) (g^2 / v - 1) of itself. At b2 = 0.999 no g^2 in [0, 2.9 v] exceeds the half step of bfloat16, 1/512, and v would
  stay at its largest value. Stochastic rounding keeps its mean right. The random numbers depend only on the count of updates, so
  a resumed run rounds in the same way. Steps are computed from the rounded moments.
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
      new = jax.tree.map(jax.lax.optimization_barrier, new)  # read the new moments only, so XLA can update the old in place
      m, v = (optax.tree.bias_correction(optax.tree.cast(x, jnp.float32), b, new.count) for x, b in ((new.mu, b1), (new.nu, b2)))
      steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v)
    return steps, new

  return optax.GradientTransformation(init, update)


def rounded(x: Float32[Array, '*S'], seed: UInt32[Array, '']) -> BFloat16[Array, '*S']:
  """Round x stochastically to one of its two neighbours in bfloat16, so that the mean is x. Non-finite values stay.

  bfloat16 is the upper half of the bits of a float32. Adding 16 random bits carries into the upper half with the probability
  that the lower half stands for.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + _noise(x.shape, seed)
  cut = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
  return jnp.where(jnp.isfinite(x), cut, x.astype(jnp.bfloat16))


def _noise(shape, seed):
  """Return 16 random bits per element: the upper bits of MurmurHash3's finaliser of its index. jax.random takes 5x as long."""
  number = seed
  for axis in range(len(shape)):
    number = number + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(math.prod(shape[axis + 1 :]) & 0xFFFFFFFF)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    number = (number ^ (number >> shift)) * np.uint32(factor)
  return jnp.broadcast_to(number >> 16, shape)
