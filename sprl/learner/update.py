"""The update: one jitted, donated function from (state, batch) to (state, metrics).

1. corrections: sampler-to-old weights and surviving tokens, over the whole minibatch, constants from here on;
2. gradient: the microbatches one after the other, summed; logits only ever exist in chunks;
3. step: the optimiser, unless the gradient is not finite, which is counted instead.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from sprl.learner.packing import TrainBatch
from sprl.learner.score import micro_logprobs
from sprl.learner.state import TrainState
from sprl.models.lora import network
from sprl.models.routing import balance_loss, balance_metrics
from sprl.objective import diagnostics, losses
from sprl.objective.correction import Corrected, correct
from sprl.parallel.rules import OnMesh, anew, shard
from sprl.settings import Correction, Kernels, Loss, Remat, Run

sg = jax.lax.stop_gradient


@dataclass(frozen=True)
class Computation:
  """What the update optimises and how it computes: static, hashable."""

  correction: Correction
  loss: Loss
  temperature: float  # of the sampler, by which logits are divided
  dtype: Any
  chunk: int
  remat: Remat
  kernels: Kernels = 'auto'  # what attends, and multiplies by experts

  @classmethod
  def of(cls, run: Run, dtype: Any) -> 'Computation':
    """That of a run whose compute dtype is `dtype`."""
    model = run.model
    return cls(run.correction, run.loss, run.sampling.temperature, dtype, run.packing.score_chunk, model.remat, model.kernels)


def scores_old(correction: Correction, updates: int) -> bool:
  """Whether the old policy needs a scoring pass of its own.

  With one update a rollout batch, the learner's forward pass *is* the old policy's (r = exp(l - stop_gradient(l))), unless
  the correction must see the whole batch before the first gradient: to reject, or to normalise its weights.
  """
  c = correction
  rejects = bool(c.reject) or c.token_mask or c.max_prob_diff > 0 or c.veto > 0 or c.max_sequence_error > 0
  return updates > 1 or rejects or c.normalise


def make_update(graphdef: nnx.GraphDef, optimizer: optax.GradientTransformationExtraArgs, computation: Computation) -> OnMesh:
  """update(state, batch, old_logp, ref_logp, base=None) -> (state, metrics), jitted; `state` is donated.

  `old_logp` [B, C] may be None where `scores_old` allows it, `ref_logp` [B, C] where the loss has no KL term. With a `base`
  (models.lora.Base) what the state holds and the update moves are adapters to it.
  """
  return OnMesh(jax.jit(partial(_update, graphdef, optimizer, computation), donate_argnums=0))


def _update(graphdef, optimizer, computation: Computation, state: TrainState, batch: TrainBatch, old_logp, ref_logp, base=None):
  correction, loss_settings = computation.correction, computation.loss
  mask = batch.mask
  advantage = jnp.broadcast_to(batch.advantage[:, None], mask.shape)

  def corrected_by(logp, mask) -> Corrected:
    return correct(logp, batch.sampler_logp, mask, correction, batch.micro)

  # --- 1. corrections ------------------------------------------------------------------------------------------------
  corrected = None if old_logp is None else corrected_by(old_logp, mask)
  coefficient = losses.aggregation(mask if corrected is None else corrected.mask, mask, loss_settings, correction.count_rejected)

  # --- 2. gradient ---------------------------------------------------------------------------------------------------
  def micro_loss(params, i):
    logp, entropy, routed = micro_logprobs(
      graphdef, network(params, base), batch, i, computation.temperature, computation.dtype, computation.chunk, computation.remat,
      computation.kernels,
    )  # fmt: skip
    here = mask & (batch.micro == i)[:, None]
    old = sg(logp) if old_logp is None else old_logp
    weight = (corrected or corrected_by(old, here)).weight
    if correction.mode == 'bypass' and loss_settings.variant == 'reinforce':
      weight = corrected_by(sg(logp), here).weight  # of the weights being trained, whatever the scored ones were
    loss, facts = losses.objective(
      logp, old, batch.sampler_logp, ref_logp, entropy, advantage, batch.reward, weight, here,
      jnp.where(here, coefficient, 0), loss_settings, correction.mode,
    )  # fmt: skip
    if routed.balance is not None and loss_settings.balance_coef > 0:
      share = jnp.sum(batch.segments[i] > 0) / jnp.sum(batch.segments > 0)
      loss += loss_settings.balance_coef * share * balance_loss(routed.balance)
    return loss, (sg(logp), sg(entropy), diagnostics.policy_sums(facts, here), sg(routed.balance))

  def accumulate(i, carry):
    grads, *sums = carry
    (loss, aux), new = jax.value_and_grad(micro_loss, has_aux=True)(anew(state.params, i), i)
    return jax.tree.map(jnp.add, (grads, *sums), (new, loss, *aux))

  shapes = jax.eval_shape(lambda: jax.value_and_grad(micro_loss, has_aux=True)(state.params, jnp.int32(0)))
  (zero_loss, zero_aux), zero_grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
  grads, loss, logp, entropy, sums, balance = jax.lax.fori_loop(0, batch.used, accumulate, (zero_grads, zero_loss, *zero_aux))

  # --- 3. step -------------------------------------------------------------------------------------------------------
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm) & jnp.isfinite(loss)
  before = jax.tree.map(lambda leaf: moved(leaf, jax.memory.Space.Device), state.opt_state)  # moments may lie on the host

  def take(params, opt_state, grads):
    updates, stepped = optimizer.update(grads, opt_state, params, norm=norm)
    stepped = optax.tree_map_params(optimizer, factor_whole, stepped, params)
    return optax.apply_updates(params, updates), stepped

  def leave(params, opt_state, _):
    return params, opt_state

  taken = finite & (batch.used > 0)  # with no gradient at all, momentum and weight decay would still move the weights
  held = state.params, before
  if any(space_of(leaf) != jax.memory.Space.Device for leaf in jax.tree.leaves(state.opt_state)):
    params, opt_state = jax.tree.map(partial(jnp.where, taken), take(*held, grads), held)  # moments come and go one by one
  else:  # a choice between two ways, not of numbers: weights and moments are written over the old ones, of which no copy is kept
    params, opt_state = jax.lax.cond(taken, take, leave, *held, grads)
  bad = (~finite).astype(jnp.int32)
  bad_streak = (state.bad_streak + 1) * bad

  old = logp if old_logp is None else old_logp
  metrics = {
    'update/loss': loss,
    'update/grad_norm': norm,
    'update/skipped': bad,
    'update/bad_streak': bad_streak,
    'policy/entropy': jnp.sum(entropy) / jnp.maximum(jnp.sum(mask), 1),
    **diagnostics.policy_metrics(sums),
    **diagnostics.mismatch(
      old, batch.sampler_logp, mask, advantage, batch.reward, corrected or corrected_by(old, mask), correction
    ),
  }
  if balance is not None:
    metrics |= balance_metrics(balance)
  if ref_logp is not None:
    drift = losses.kl(logp, ref_logp, loss_settings.kl_estimator, loss_settings.kl_clip)
    metrics['policy/kl_ref'] = jnp.sum(jnp.where(mask, drift, 0)) / jnp.maximum(jnp.sum(mask), 1)
  stepped = TrainState(
    params=params,
    opt_state=jax.tree.map(lambda new, old: moved(new, space_of(old)), opt_state, state.opt_state),
    version=state.version + 1,
    skipped=state.skipped + bad,
    bad_streak=bad_streak,
  )
  return stepped, metrics


def factor_whole(moment: Array, p: Array) -> Array:
  """A moment of a weight `p`; where it is but a factor of one (adafactor's), whole on every device, as policy.abstract_state lays
  it. XLA would lay it as its gradient lies, and the next update, given another state, would be compiled anew."""
  return moment if moment.shape == p.shape else shard(moment, *[None] * moment.ndim)


def space_of(leaf: Array) -> Any:
  """The jax.memory.Space in which an array of a traced function lies: the device's or the host's."""
  return jax.typeof(leaf).memory_space


def moved(leaf: Array, space) -> Array:
  """The array in that jax.memory.Space."""
  return leaf if space_of(leaf) == space else jax.device_put(leaf, space)
