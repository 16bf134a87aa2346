"""The learner's state and the optimiser that moves it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from sprl.learner.moments import scale_by_adam
from sprl.models.transformer import Params
from sprl.settings import Optimizer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
  """All that an update changes, and all that a checkpoint must hold of the learner."""

  params: Params  # master weights
  opt_state: Any
  version: Int[Array, '']  # finished updates
  skipped: Int[Array, '']  # updates left out because their gradient was not finite
  bad_streak: Int[Array, '']  # of those, the latest in a row

  @classmethod
  def create(cls, params: Params, optimizer: optax.GradientTransformation, places: 'TrainState | None' = None) -> 'TrainState':
    """The state before the first update, moved to `places`, a state of shardings; moments are made there at once."""
    zero = jnp.zeros((), jnp.int32)
    init = optimizer.init if places is None else jax.jit(optimizer.init, out_shardings=places.opt_state)
    state = cls(params, init(params), zero, zero + 0, zero + 0)
    return state if places is None else jax.device_put(state, places)


def schedule(settings: Optimizer, updates: int) -> optax.Schedule:
  """Learning rate by update: linear warm-up, then constant, or down to `final_fraction` of the peak after the last update."""
  peak, warm = settings.learning_rate, settings.warmup_steps
  left = max(updates - warm, 1)
  after = {
    'constant': optax.constant_schedule(peak),
    'linear': optax.linear_schedule(peak, peak * settings.final_fraction, left),
    'cosine': optax.cosine_decay_schedule(peak, left, settings.final_fraction),
  }[settings.schedule]
  return optax.join_schedules([optax.linear_schedule(peak / (warm + 1), peak, warm), after], [warm]) if warm else after


def clipped(limit: float) -> optax.GradientTransformationExtraArgs:
  """optax.clip_by_global_norm, for gradients whose norm may be known already: `update(gradients, state, params, norm=norm)`."""

  def init(params):
    return optax.EmptyState()

  def update(updates, state, params=None, *, norm=None, **_):
    scale = jnp.minimum(1, limit / (optax.tree.norm(updates) if norm is None else norm))
    return optax.tree.scale(scale, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def make_optimizer(settings: Optimizer, updates: int) -> optax.GradientTransformationExtraArgs:
  """The optax chain: clip by global norm, then the named optimiser. Weight decay spares vectors (norms, biases)."""
  rate = schedule(settings, updates)
  moments = jnp.dtype(settings.moment_dtype)
  s = settings

  def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)

  adam, by_rate = scale_by_adam(s.b1, s.b2, s.eps, moments), optax.scale_by_learning_rate(rate)
  step = {
    'adamw': lambda: optax.chain(adam, optax.add_decayed_weights(s.weight_decay, matrices), by_rate),
    'adam': lambda: optax.chain(adam, by_rate),
    'lion': lambda: optax.lion(rate, s.b1, s.b2, mu_dtype=moments, weight_decay=s.weight_decay, mask=matrices),
    'sgd': lambda: optax.sgd(rate),
    'adafactor': lambda: optax.chain(  # its own decay would be by update, whatever the learning rate
      optax.adafactor(), optax.add_decayed_weights(-s.weight_decay, matrices), optax.scale_by_learning_rate(rate, flip_sign=False)
    ),
  }[settings.name]()
  return optax.chain(clipped(s.clip_norm), step) if s.clip_norm > 0 else optax.with_extra_args_support(step)
