"""The learner's state and the optimiser that moves it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

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
  def create(cls, params: Params, optimizer: optax.GradientTransformation) -> 'TrainState':
    """The state before the first update."""
    zero = jnp.zeros((), jnp.int32)
    return cls(params, optimizer.init(params), zero, zero + 0, zero + 0)


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


def make_optimizer(settings: Optimizer, updates: int) -> optax.GradientTransformation:
  """The optax chain: clip by global norm, then the named optimiser. Weight decay spares vectors (norms, biases)."""
  rate = schedule(settings, updates)
  moments = jnp.dtype(settings.moment_dtype)
  s = settings

  def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)

  step = {
    'adamw': lambda: optax.adamw(rate, s.b1, s.b2, s.eps, mu_dtype=moments, weight_decay=s.weight_decay, mask=matrices),
    'adam': lambda: optax.adam(rate, s.b1, s.b2, s.eps, mu_dtype=moments),
    'lion': lambda: optax.lion(rate, s.b1, s.b2, mu_dtype=moments, weight_decay=s.weight_decay, mask=matrices),
    'sgd': lambda: optax.sgd(rate),
    'adafactor': lambda: optax.chain(  # its own decay would be by update, whatever the learning rate
      optax.adafactor(), optax.add_decayed_weights(-s.weight_decay, matrices), optax.scale_by_learning_rate(rate, flip_sign=False)
    ),
  }[settings.name]()
  return optax.chain(optax.clip_by_global_norm(s.clip_norm), step) if s.clip_norm > 0 else step
