"""The update: one jitted function from (state, batch, log-probs) to (state, metrics), the state donated.

1. correct: importance weights and surviving tokens of the whole minibatch, constants from here on;
2. loss of a microbatch: forward pass with the weights' copies in FP8 or the compute dtype, and policy objective; logits exist a
   chunk at a time;
3. gradient: summed over the microbatches, one after the other;
4. optimiser: one step, unless the gradient is not finite, which is counted instead;
5. metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from sprl.config import Correction, Loss, Remat, Run
from sprl.learner.batch import TrainBatch
from sprl.learner.copies import with_copies
from sprl.learner.logprobs import ForwardConfig, copies_for, micro_logprobs
from sprl.learner.state import TrainState, guarded_step
from sprl.models.lora import Base, network
from sprl.models.routing import balance_loss, balance_metrics
from sprl.models.transformer import Params
from sprl.objective import diagnostics, losses
from sprl.objective.correction import reject, weigh
from sprl.sharding.rules import OnMesh, tie_to_iteration
from sprl.types import LogProbs

sg = jax.lax.stop_gradient


@dataclass(frozen=True)
class UpdateConfig:
  """Static, hashable settings of the update."""

  correction: Correction
  loss: Loss
  forward: ForwardConfig
  remat: Remat = 'none'  # what the backward pass recomputes

  @classmethod
  def of(cls, run: Run, dtype: Any) -> 'UpdateConfig':
    """Return the settings of a run that computes in `dtype`. Its `model.remat` is decided, not 'auto'."""
    assert run.model.remat != 'auto', 'sprl/planning/remat.py decides before the update is made'
    return cls(run.correction, run.loss, ForwardConfig.of(run, dtype), run.model.remat)


def needs_old_logprobs(correction: Correction, updates: int) -> bool:
  """Return whether an update needs a separate scoring pass of the old policy.

  With one update a rollout batch, the forward pass of the update is the old policy's: r = exp(current - stop_gradient(current)).
  A correction that must see the whole batch before the first gradient needs the pass: to reject, or to normalise its weights.
  """
  c = correction
  return updates > 1 or bool(c.reject) or c.veto is not None or c.normalise is not None


def abstract_logprobs(batch: TrainBatch, run: Run) -> LogProbs:
  """Return LogProbs with the fields that an update of this run is given, for compiling it before anything is scored."""
  like = batch.sampler_logp
  old = like if needs_old_logprobs(run.correction, run.optimizer.updates) else None
  return LogProbs(sampler=like, old=old, ref=like if run.loss.kl_coef > 0 else None)


def make_update(
  graphdef: nnx.GraphDef, optimizer: optax.GradientTransformationExtraArgs, config: UpdateConfig, mesh: Mesh | None = None
) -> OnMesh:
  """Return the jitted update(state, batch, logprobs, base=None) -> (state, metrics) on a mesh; `state` is donated."""
  return OnMesh(jax.jit(partial(update, graphdef, optimizer, config), donate_argnums=0), mesh)


def update(
  graphdef: nnx.GraphDef,
  optimizer: optax.GradientTransformationExtraArgs,
  config: UpdateConfig,
  state: TrainState,
  batch: TrainBatch,
  logprobs: LogProbs,
  base: Base | None = None,
) -> tuple[TrainState, dict[str, Float[Array, ''] | Int[Array, '']]]:
  """Take one update on a minibatch (docs/methods/losses.md, eq. 34) and return the new state and scalar metrics.

  `logprobs.old` may be None where `needs_old_logprobs` is False: it is then stop_gradient(current). `logprobs.ref` may be None
  without a KL term. `logprobs.current` is computed here. With a `base`, the state holds adapters of these frozen weights.
  """
  correction, loss_settings, mask = config.correction, config.loss, batch.mask
  advantage = jnp.broadcast_to(batch.advantage[:, None], mask.shape)

  # --- 1. correct ----------------------------------------------------------------------------------------------------
  survivors = reject(logprobs, mask, correction)
  coefficient = losses.aggregation(surviving=survivors.mask, mask=mask, prompt=batch.prompt, settings=loss_settings)
  # w compares the sampler with the old policy. It takes the current one if that is the old one, or if the loss has no ratio.
  of_current = logprobs.old is None or (correction.mode == 'bypass' and loss_settings.weighted('bypass'))

  def weigh_against(policy, tokens):
    return weigh(replace(logprobs, old=policy), tokens, correction, batch.micro)

  of_old = None if of_current else weigh_against(logprobs.old, mask)

  # --- 2. loss of a microbatch ---------------------------------------------------------------------------------------
  forward = config.forward
  copies = copies_for(network(state.params, base), batch, forward)

  def micro_loss(params, i):
    weights = with_copies(network(params, base), tie_to_iteration(copies, i))
    logp, entropy, routed = micro_logprobs(graphdef, weights, batch, i, forward, config.remat)
    here = mask & (batch.micro == i)[:, None]
    old = sg(logp) if logprobs.old is None else logprobs.old
    loss, ratios = losses.objective(
      replace(logprobs, old=old, current=logp),
      loss_settings,
      correction.mode,
      advantage=advantage,
      reward=batch.reward,
      weight=(of_old or weigh_against(sg(logp), here)).weight,
      mask=here,
      coefficient=jnp.where(here, coefficient, 0),
      entropy=entropy,
    )
    if routed.balance is not None and loss_settings.balance_coef > 0:
      share = jnp.sum(batch.segments[i] > 0) / jnp.sum(batch.segments > 0)
      loss += loss_settings.balance_coef * share * balance_loss(routed.balance)
    return loss, sg((logp, entropy, diagnostics.policy_sums(ratios, here), routed.balance))

  # --- 3. gradient ---------------------------------------------------------------------------------------------------
  loss, gradient, found = accumulate(micro_loss, state.params, batch.used)
  current, entropy, policy_sums, balance = found

  # --- 4. optimiser --------------------------------------------------------------------------------------------------
  state, metrics = guarded_step(state, optimizer, gradient, loss, batch.used)

  # --- 5. metrics ----------------------------------------------------------------------------------------------------
  tokens = jnp.maximum(jnp.sum(mask), 1)
  scored = replace(logprobs, old=current if logprobs.old is None else logprobs.old, current=current)
  metrics |= {
    'policy/entropy': jnp.sum(entropy) / tokens,
    **diagnostics.policy_metrics(policy_sums),
    **diagnostics.mismatch(
      scored,
      correction,
      mask=mask,
      advantage=advantage,
      weights=of_old or weigh_against(current, mask),
      survivors=survivors,
    ),
  }
  if balance is not None:
    metrics |= balance_metrics(balance)
  if logprobs.ref is not None:
    drift = losses.kl(scored, loss_settings.kl_estimator)
    metrics['policy/kl_ref'] = jnp.sum(jnp.where(mask, drift, 0)) / tokens
  return state, metrics


def accumulate[A](
  loss_of: Callable[[Params, Int[Array, '']], tuple[Float[Array, ''], A]], params: Params, microbatches: Int[Array, '']
) -> tuple[Float[Array, ''], Params, A]:
  """Sum loss, gradient and auxiliary results of loss_of(params, i) -> (loss, auxiliary) over the microbatches i.

  For use inside a jitted function. Sums are float32; one gradient of the size of the weights exists beside the sum.
  """

  gradient_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True), inline=True)  # one trace for the shapes and for the loop

  def body(i, sums):
    (loss, auxiliary), gradient = gradient_of(tie_to_iteration(params, i), i)
    return jax.tree.map(jnp.add, sums, (loss, gradient, auxiliary))

  first = jnp.int32(0)
  (loss, auxiliary), gradient = jax.eval_shape(gradient_of, params, first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (loss, gradient, auxiliary))
  return jax.lax.fori_loop(first, microbatches, body, zeros)
