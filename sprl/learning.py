"""The learner's half of a step: graded trajectories to new weights, and to what the sampler is served next.

    advantages -> pack -> score -> update -> calibrate

It touches the learner's devices and nothing of the rollouts, so that on devices of its own it may run while those go on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sprl.cache.plan import CachePlan
from sprl.learner.packing import Shape, empty, pack, shape
from sprl.learner.score import score, score_and_route
from sprl.learner.state import TrainState
from sprl.learner.update import scores_old
from sprl.models.lora import Base, network
from sprl.models.transformer import Params
from sprl.objective.advantages import advantages, equal_groups
from sprl.parallel.rules import OnMesh, row_shards
from sprl.parallel.transfer import fetch, home
from sprl.policy import Policy
from sprl.process import return_free_memory
from sprl.sampler import calibrate
from sprl.sampler.served import Served
from sprl.settings import Run
from sprl.trajectory import Trajectory


@dataclass(frozen=True)
class Learned:
  """What a step's updates said of themselves."""

  measured: list[dict[str, Any]]  # of each update, on the host
  packing: list[dict[str, float]]  # of each minibatch
  seconds: dict[str, float]


class Stopwatch:
  """Seconds of a step's parts, in the order they end."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def lap(self, name: str) -> None:
    """Ends part `name`."""
    now = time.perf_counter()
    self.seconds[name] = now - self._last
    self._last = now


def compile_ahead(update: OnMesh, run: Run, policy: Policy, state: TrainState, base: Base | None) -> None:
  """Compiles the run's update for states of these shapes and places before there is one: compiling takes memory too.

  Where batches carry what the sampler forgot or routed, the first of them compiles it.
  """
  if run.cache.masked_learner or run.model.router_replay != 'none':
    return
  batch = policy.put(empty(_sizes(run, policy)))
  old = batch.sampler_logp if scores_old(run.correction, run.optimizer.updates) else None
  ref = batch.sampler_logp if run.loss.kl_coef > 0 else None
  with jax.default_device(home(policy.replicated)):  # as in `learn`: for another default it is another program
    update.lower(state, batch, old, ref, base).compile()
  return_free_memory()


def _sizes(run: Run, policy: Policy) -> Shape:
  return shape(run.sampling, run.rollout, run.packing, run.optimizer.minibatches, row_shards(policy.mesh))


@dataclass
class Learning:
  """The train state, and what it takes to move it.

  `largest` is what the FP8 cache's scales are made of: the largest queries, keys and values of the last looks. The latest was at
  the weights after `looked_at` updates.
  """

  run: Run
  policy: Policy
  plan: CachePlan
  update: Callable  # that of `make_update`
  state: TrainState
  reference: Params | None = None
  base: Base | None = None  # the frozen weights under `state`, where it holds adapters
  largest: calibrate.History = field(default_factory=tuple)
  looked_at: int = -1

  def __post_init__(self):
    run = self.run
    self.calibrates = self.plan.fp8 and run.quant.kv_scale != 'unit'
    self._sizes = _sizes(run, self.policy)

  @property
  def renewed(self) -> bool:
    """Whether the scales of the cache, where it has any to be found, are of the newest weights (fp8_rollouts 7.4)."""
    return not self.calibrates or self.looked_at == int(jax.device_get(self.state.version))

  @property
  def params(self) -> Params:
    """The network's newest weights."""
    return network(self.state.params, self.base)

  def serve(self) -> Served:
    """The newest weights as the sampler multiplies them."""
    scales = calibrate.scales(self.largest, self.run.quant, self.plan.layers) if self.plan.fp8 else None
    return self.policy.serve(self.params, self.run.quant, scales)

  def look_at(self, prompts: Sequence[Int[np.ndarray, ' _']], rows: int) -> None:
    """Finds scales on prompts, before there are rollouts to find them on."""
    found = calibrate.amax_of_prompts(self.policy.graphdef, self.plan, self.params, prompts, rows, self.run.quant)
    self._remember(found)

  def learn(self, trajectories: Sequence[Trajectory]) -> Learned:
    """One step: its minibatches one after the other, as often as there are epochs. Groups stand together, in order."""
    with jax.default_device(home(self.policy.replicated)):  # nothing of it on the rollouts' devices
      return self._learn(trajectories)

  def _learn(self, trajectories: Sequence[Trajectory]) -> Learned:
    run, policy, times = self.run, self.policy, Stopwatch()
    chunk, temperature, n = run.packing.score_chunk, run.sampling.temperature, len(trajectories)
    advantage = advantages_of(trajectories, run)
    packed = [
      pack(trajectories[part], advantage[part], self._sizes, run.packing.share_prefix)
      for part in _parts(n, run.optimizer.minibatches)
    ]
    minibatches = [(batch, metrics) for batch, metrics in packed if batch.used]  # all filtered out: no update
    return_free_memory()  # the update is where most is needed
    with jax.transfer_guard('disallow'):  # what goes to the device or comes back is said here: device_put, device_get
      batches = [policy.put(batch) for batch, _ in minibatches]
      how = temperature, policy.dtype, chunk, policy.kernels
      ref = [  # whose router is its own
        None if self.reference is None else score(policy.graphdef, self.reference, replace(batch, routes=None), *how)
        for batch in batches
      ]
      old: list[Any] = [None] * len(batches)
      if run.model.router_replay == 'R2':
        scored = [score_and_route(policy.graphdef, self.params, batch, *how) for batch in batches]
        old, batches = [logp for logp, _ in scored], [replace(b, routes=routes) for b, (_, routes) in zip(batches, scored)]
      elif scores_old(run.correction, run.optimizer.updates):
        old = [score(policy.graphdef, self.params, batch, *how) for batch in batches]
      jax.block_until_ready((old, ref))
      times.lap('score')
      measured = []
      for _ in range(run.optimizer.epochs):
        for batch, old_logp, ref_logp in zip(batches, old, ref):
          self.state, metrics = self.update(self.state, batch, old_logp, ref_logp, self.base)
          measured.append(metrics)
      measured = fetch(measured)
      times.lap('update')
      if self.calibrates and batches and run.quant.kv_scale != 'first_forward':
        params, limit = self.params, run.quant.kv_batches
        found = [calibrate.amax_of_batch(policy.graphdef, self.plan, params, batch, limit) for batch in batches]
        self._remember(np.max(fetch(found), axis=0))
        times.lap('calibrate')
    return Learned(measured, [metrics for _, metrics in minibatches], times.seconds)

  def _remember(self, found: Float[Array | np.ndarray, '3 L']) -> None:
    self.largest = calibrate.remembered(self.largest, found, self.run.quant)
    self.looked_at = int(jax.device_get(self.state.version))


def advantages_of(trajectories: Sequence[Trajectory], run: Run) -> Float[np.ndarray, ' B']:
  """Group-relative advantages; NaN marks members of filtered groups, which are not trained on."""
  reward = jnp.array([t.reward for t in trajectories], jnp.float32)
  group = jnp.asarray(np.unique([t.group for t in trajectories], return_inverse=True)[1], jnp.int32)
  valid: Bool[np.ndarray, ' B'] = np.ones(len(trajectories), bool)
  if run.rollout.filter_equal:
    valid = ~np.asarray(equal_groups(reward, group, jnp.asarray(valid)))
  result = np.array(advantages(reward, group, jnp.asarray(valid), run.advantage), np.float32)
  result[~valid] = np.nan
  return result


def _parts(n: int, count: int) -> list[slice]:
  return [slice(i * n // count, (i + 1) * n // count) for i in range(count)]
