"""The learner's half of a step: graded trajectories to new weights, and to the weights and scales that the sampler uses next.

    batches, packing = learner.pack(trajectories)            # one TrainBatch an update; advantages are computed here
    batches, logprobs = learner.score(batches)               # LogProbs(sampler, old, ref) of each
    metrics = learner.update(batches, logprobs)              # correct -> loss -> gradient -> optimiser, jitted
    learner.measure_scales(batches)                          # scales of the FP8 cache
    weights = learner.sampler_weights()

The learner's programs run on the learner's devices only. If rollouts use separate devices, they continue meanwhile.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from sprl.cache.layout import CacheLayout
from sprl.config import Run
from sprl.kernels.support import record_format
from sprl.learner.batch import Shape, Tokens, TrainBatch, empty, pack, put, shape
from sprl.learner.logprobs import ForwardConfig, score, score_and_route
from sprl.learner.optimizer import last_rate, left_out, schedule
from sprl.learner.state import TrainState
from sprl.learner.update import abstract_logprobs, needs_old_logprobs
from sprl.model import Model
from sprl.models.lora import Base, network
from sprl.models.transformer import Params
from sprl.objective.advantages import advantages, equal_groups, estimator, overlong_penalty
from sprl.sampler import calibrate
from sprl.sampler.weights import SamplerWeights
from sprl.sharding.rules import OnMesh, row_shards, token_shards
from sprl.sharding.transfer import fetch, home, return_free_memory
from sprl.types import LogProbs, Trajectory, sequences, trained_on

LARGEST = {'update/bad_streak', 'rollout_corr/abs_dlogp_max'}  # metrics whose value of a step is the largest of its updates


@dataclass(kw_only=True)
class Learner:
  """The train state and the calls that move it."""

  run: Run
  model: Model
  layout: CacheLayout  # of the sampler's cache
  jitted_update: Callable  # from `make_update`
  state: TrainState
  reference: Params | None = None  # frozen weights of the KL term
  base: Base | None = None  # frozen weights under `state`, where it holds adapters
  amax: calibrate.AmaxHistory = field(default_factory=tuple)  # largest queries, keys and values behind the FP8 cache's scales
  calibrated_updates: int = -1  # finished updates of the weights that `amax` was last measured with
  seconds: dict[str, float] = field(default_factory=dict)  # of the parts of the latest step
  tokens: Tokens = field(default_factory=Tokens)  # of the latest step

  def __post_init__(self) -> None:
    estimator(self.run.advantage)  # raises before the first rollout

  def pack(self, trajectories: Sequence[Trajectory]) -> tuple[list[TrainBatch], dict[str, float]]:
    """Compute advantages and pack the trajectories into one batch for each minibatch, on the learner's devices.

    Groups must be adjacent and in order. Returns the batches, the means of their `packing/` metrics and, with
    `advantage.overlong`, `reward/overlong_penalty`. A minibatch whose groups were all filtered out has no batch.
    """
    run, self.seconds = self.run, {}
    with self._on_its_devices('pack'):
      packed = minibatches(trajectories, run, batch_shape(run, self.model))
      packed = [(batch, metrics) for batch, metrics in packed if batch.used]
      self.tokens = Tokens.of([batch for batch, _ in packed], self.model.config.sliding_windows)
      means = {name: float(np.mean([metrics[name] for _, metrics in packed])) for name in (packed[0][1] if packed else ())}
      if run.advantage.overlong is not None:
        means['reward/overlong_penalty'] = float(np.mean(overlong(trajectories, run)))
      return [put(batch, self.model.mesh) for batch, _ in packed], means

  def score(self, batches: Sequence[TrainBatch]) -> tuple[list[TrainBatch], list[LogProbs]]:
    """Score each batch with the weights before the step's updates, where an update needs that, and with the reference.

    Returns the batches too: under router replay R2 they carry the experts of this pass, which the updates replay.
    """
    return_free_memory()  # the update needs the most memory of a step
    with self._on_its_devices('score'):
      scored = [self._score(batch) for batch in batches]
      jax.block_until_ready([logprobs for _, logprobs in scored])
    return [batch for batch, _ in scored], [logprobs for _, logprobs in scored]

  def update(self, batches: Sequence[TrainBatch], logprobs: Sequence[LogProbs]) -> dict[str, float]:
    """Take one update a batch, in order, as often as there are epochs.

    The learning rate ends a step at the same place of its schedule however many minibatches have no batch: the updates of a step
    have the last rates of the step.

    Returns the mean of each metric over the updates, but the largest value of those in LARGEST; nothing if there was no update.
    """
    measured, settings = [], self.run.optimizer
    with self._on_its_devices('update'):
      if missing := settings.updates - settings.epochs * len(batches):
        self.state = replace(self.state, opt_state=left_out(self.state.opt_state, missing))
      for _ in range(settings.epochs):
        for batch, of_batch in zip(batches, logprobs, strict=True):
          self.state, metrics = self.jitted_update(self.state, batch, of_batch, self.base)
          measured.append(metrics)
      measured = fetch(measured)
    if not measured:
      return {}
    means = {name: float(np.mean([metrics[name] for metrics in measured])) for name in measured[0]}
    return means | {name: float(max(metrics[name] for metrics in measured)) for name in LARGEST & means.keys()}

  def measure_scales(self, batches: Sequence[TrainBatch]) -> None:
    """Measure the scales of the FP8 cache on the batches just trained on, with the newest weights.

    Does nothing without an FP8 cache, without batches, and where quant.kv_scale takes its scales elsewhere.
    """
    if not self.calibrates or not batches or self.scale_rule.measured_on != 'batch':
      return
    with self._on_its_devices('calibrate'):
      params = self.params
      found = [
        calibrate.amax.on(self.model.mesh)(
          self.model.graphdef, self.layout, params, tokens=batch.tokens, positions=batch.positions, segments=batch.segments,
          prefixes=batch.prefixes, used=batch.used,
        )
        for batch in batches
      ]  # fmt: skip
      self._remember(np.max(fetch(found), axis=0))

  def measure_scales_on_prompts(self, prompts: Sequence[Int[np.ndarray, ' _']]) -> None:
    """Measure the scales of the FP8 cache on prompts, of which as many are used as go through the network together.

    Before the first update, or where the rule measures the next prompts. If it measures the first prompts, later calls change
    nothing.
    """
    model, run = self.model, self.run
    found = calibrate.amax_of_prompts(model.graphdef, self.layout, self.params, prompts, run.prefill, run.quant, model.mesh)
    self._remember(found)

  def sampler_weights(self) -> SamplerWeights:
    """Return the newest weights as the sampler multiplies them, with the scales of its cache."""
    scales = calibrate.scales(self.amax, self.run.quant, self.layout, self.params) if self.layout.fp8 else None
    return self.model.sampler_weights(self.params, self.run.quant, scales)

  @property
  def learning_rate(self) -> float:
    """The learning rate of the latest update: see `last_rate`."""
    settings = self.run.optimizer
    rate = schedule(settings, self.run.steps * settings.updates)
    with jax.default_device(home(self.model.replicated)):
      return last_rate(rate, self.state.opt_state, skipped=int(fetch(self.state.bad_streak)) > 0)

  @property
  def params(self) -> Params:
    """The newest weights of the network."""
    return network(self.state.params, self.base)

  @property
  def calibrates(self) -> bool:
    """Whether the sampler's cache has scales to be measured."""
    return self.layout.fp8 and self.scale_rule.measured_on != 'nothing'

  @property
  def scale_rule(self) -> calibrate.ScaleRule:
    """How the scales of the sampler's cache are found."""
    return calibrate.RULES[self.run.quant.kv_scale]

  @property
  def scales_current(self) -> bool:
    """Whether the scales of the cache, if it has any, belong to the newest weights (docs/methods/fp8.md, Cache scales).

    Those of the first prompts are current once they exist.
    """
    if self.scale_rule.measured_on == 'first prompts' and self.amax:
      return True
    return not self.calibrates or self.calibrated_updates == int(jax.device_get(self.state.updates))

  def _score(self, batch: TrainBatch) -> tuple[TrainBatch, LogProbs]:
    run, graphdef, mesh = self.run, self.model.graphdef, self.model.mesh
    config, old, ref = ForwardConfig.of(run, self.model.dtype), None, None
    if self.reference is not None:  # the router of the reference chooses its own experts
      ref = score.on(mesh)(graphdef, self.reference, replace(batch, routes=None), config)
    if run.model.router_replay == 'R2':
      old, routes = score_and_route.on(mesh)(graphdef, self.params, batch, config)
      batch = replace(batch, routes=routes)
    elif needs_old_logprobs(run.correction, run.optimizer.updates):
      old = score.on(mesh)(graphdef, self.params, batch, config)
    return batch, LogProbs(sampler=batch.sampler_logp, old=old, ref=ref)

  def _remember(self, found: Float[Array | np.ndarray, '3 L']) -> None:
    self.amax = calibrate.remember(self.amax, found, self.run.quant)
    self.calibrated_updates = int(jax.device_get(self.state.updates))

  @contextmanager
  def _on_its_devices(self, part: str) -> Iterator[None]:
    """Create arrays on the learner's devices, not on the rollouts', and refuse implicit transfers between host and device.

    Notes the seconds of the part of a step.
    """
    start = time.perf_counter()
    with jax.default_device(home(self.model.replicated)), jax.transfer_guard('disallow'):
      yield
    self.seconds[part] = time.perf_counter() - start


def minibatches(trajectories: Sequence[Trajectory], run: Run, sizes: Shape) -> list[tuple[TrainBatch, dict[str, float]]]:
  """Return the minibatches of a step as numpy arrays, each with its `packing/` metrics.

  Advantages compare all trajectories, one of each episode. Those that are withheld take no room in the rows. All sequences of an
  episode have its advantage.
  """
  advantage = batch_advantages(trajectories, run)[~np.array([t.withheld for t in trajectories], bool)]
  trained = trained_on(trajectories)
  edges = [i * len(trained) // run.optimizer.minibatches for i in range(run.optimizer.minibatches + 1)]
  made = []
  for start, end in pairwise(edges):
    episodes = [sequences(trajectory) for trajectory in trained[start:end]]
    repeated = np.repeat(advantage[start:end], [len(episode) for episode in episodes])
    made.append(pack(list(chain(*episodes)), repeated, sizes, run.packing.share_prefix))
  return made


def batch_advantages(trajectories: Sequence[Trajectory], run: Run) -> Float[np.ndarray, ' B']:
  """Return the advantage of each trajectory; NaN leaves it out of the update.

  Left out are trajectories without a known reward, and members of groups that rollout.equal_groups skips. The rewards of the
  latter count in the mean of a batch.
  Penalties for overlong answers count in the advantage, not in the reward, so that they do not make rewards of a group differ.
  Members of a group of equal rewards still have advantages by their penalties, unless rollout.equal_groups removes the group.
  """
  reward = np.array([t.reward for t in trajectories], np.float32)
  group = np.array([t.group for t in trajectories], np.int32)
  known = np.array([t.reward_known for t in trajectories], bool)
  trained = known & ~equal_groups(reward, group, known) if run.rollout.equal_groups == 'skip' else known
  return np.where(trained, advantages(reward - overlong(trajectories, run), group, known, run.advantage), np.nan)


def overlong(trajectories: Sequence[Trajectory], run: Run) -> Float[np.ndarray, ' B']:
  """Return what the length of each completion subtracts from its reward. Of an episode's sequences the longest counts."""
  length = np.array([max(len(s.completion) for s in sequences(t)) for t in trajectories], np.int32)
  return overlong_penalty(length, run.sampling.max_tokens, run.advantage.overlong)


def batch_shape(run: Run, model: Model) -> Shape:
  """Return the static sizes of the run's minibatches."""
  minibatches, mesh = run.optimizer.minibatches, model.mesh
  return shape(run.sampling, run.rollout, run.packing, minibatches, row_shards(mesh), run.branches, token_shards(mesh))


def compile_ahead(update: OnMesh, run: Run, model: Model, state: TrainState, base: Base | None) -> None:
  """Compile the learner's programs for a state of these shapes and shardings before the weights exist, which take memory too.

  Does nothing where batches carry evictions or routes: the first update compiles then. The first step also compiles the scoring
  of the reference model and the measurement of FP8 cache scales.
  """
  if run.masked_learner or run.model.router_replay != 'none':
    return
  support = record_format(run.sampling, model.config.vocab_size)
  batch = put(empty(batch_shape(run, model), support), model.mesh)
  with jax.default_device(home(model.replicated)):  # part of the key of a compiled program, as in `Learner.update`
    update.lower(state, batch, abstract_logprobs(batch, run), base).compile()
    if needs_old_logprobs(run.correction, run.optimizer.updates):
      config = ForwardConfig.of(run, model.dtype)
      score.on(model.mesh).lower(model.graphdef, network(state.params, base), batch, config).compile()
  return_free_memory()
