"""The train state: created, placed on the devices, and moved by one guarded optimiser step."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from sprl.models.transformer import Params
from sprl.sharding.mesh import replicated
from sprl.sharding.rules import shard
from sprl.sharding.transfer import HOST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
  """Everything that an update changes, and that a checkpoint holds of the learner."""

  params: Params  # master weights, or adapters
  opt_state: Any
  updates: Int[Array, '']  # updates done, including skipped ones
  skipped: Int[Array, '']  # updates left out because the gradient or the loss was not finite
  bad_streak: Int[Array, '']  # the latest consecutive ones of them

  @classmethod
  def create(cls, params: Params, optimizer: optax.GradientTransformation, places: 'TrainState | None' = None) -> 'TrainState':
    """Return the state before the first update, on the shardings in `places`. Moments and counts are created in their place."""

    def init(params):
      zero = jnp.zeros((), jnp.int32)
      # Distinct buffers, each of which can be donated.
      return optimizer.init(params), zero, zero + 0, zero + 0

    if places is None:
      return cls(params, *init(params))
    # Jitted, because `device_put` of one process's array does not make an array of all processes that orbax can save.
    begin = jax.jit(init, out_shardings=(places.opt_state, places.updates, places.skipped, places.bad_streak))
    return cls(jax.device_put(params, places.params), *begin(params))


def abstract_state(params: Params, optimizer: optax.GradientTransformation, offload: bool = False) -> TrainState:
  """Return shapes and shardings of the train state of `params`, a tree of arrays or of ShapeDtypeStruct with shardings.

  Moments of the optimiser lie where their weights do, or with `offload` in the pinned memory of the host. Leaves of another
  shape than their weight are replicated.
  """
  everywhere = replicated(jax.tree.leaves(params)[0].sharding.mesh)

  def whole(leaf) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

  state = jax.eval_shape(partial(TrainState.create, optimizer=optimizer), params)

  def moment(leaf, p):
    if leaf.shape != p.shape:
      return whole(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=p.sharding.with_memory_kind(HOST) if offload else p.sharding)

  opt_state = optax.tree_map_params(optimizer, moment, state.opt_state, params, transform_non_params=whole)
  scalar = whole(state.updates)
  return TrainState(params=params, opt_state=opt_state, updates=scalar, skipped=scalar, bad_streak=scalar)


def guarded_step(
  state: TrainState,
  optimizer: optax.GradientTransformationExtraArgs,
  gradient: Params,
  loss: Float[Array, ''],
  microbatches: Int[Array, ''],
) -> tuple[TrainState, dict[str, Array]]:
  """Take one step of the optimiser, and return the new state and `update/` metrics. For use inside a jitted function.

  If the gradient or the loss is not finite, weights and moments stay as they are and the update is counted as skipped. With no
  microbatch they stay too: momentum and weight decay would otherwise move the weights.
  """
  norm = optax.tree.norm(gradient)
  finite = jnp.isfinite(norm) & jnp.isfinite(loss)
  moments = jax.tree.map(lambda leaf: _in_space(leaf, jax.memory.Space.Device), state.opt_state)

  def step(params, opt_state, gradient):
    updates, stepped = optimizer.update(gradient, opt_state, params, norm=norm)
    stepped = optax.tree_map_params(optimizer, _replicate_factors, stepped, params)
    return optax.apply_updates(params, updates), stepped

  def skip(params, opt_state, _):
    return params, opt_state

  taken = finite & (microbatches > 0)
  before = state.params, moments
  if any(_space(leaf) != jax.memory.Space.Device for leaf in jax.tree.leaves(state.opt_state)):
    # `where`, so that offloaded moments stream past the device one by one.
    params, opt_state = jax.tree.map(partial(jnp.where, taken), step(*before, gradient), before)
  else:  # `lax.cond`, not `where`, so that XLA can update weights and moments in place
    params, opt_state = jax.lax.cond(taken, step, skip, *before, gradient)

  skipped = (~finite).astype(jnp.int32)
  bad_streak = (state.bad_streak + 1) * skipped
  state = TrainState(
    params=params,
    opt_state=jax.tree.map(lambda new, old: _in_space(new, _space(old)), opt_state, state.opt_state),
    updates=state.updates + 1,
    skipped=state.skipped + skipped,
    bad_streak=bad_streak,
  )
  return state, {
    'update/loss': loss,
    'update/grad_norm': norm,
    'update/skipped': skipped,
    'update/bad_streak': bad_streak,
  }


def _replicate_factors(moment: Array, p: Array) -> Array:
  """Replicate a moment that is a factor of one (adafactor), as `abstract_state` places it.

  XLA would lay it out like its gradient, and the next update would be compiled again for another input sharding.
  """
  return moment if moment.shape == p.shape else shard(moment, *[None] * moment.ndim)


def _space(leaf: Array) -> Any:
  """Return the jax.memory.Space of an array in a traced function: the device's or the host's."""
  return jax.typeof(leaf).memory_space


def _in_space(leaf: Array, space) -> Array:
  return leaf if _space(leaf) == space else jax.device_put(leaf, space)
