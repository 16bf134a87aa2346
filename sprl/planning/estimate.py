"""The plan of a run: memory, work and least time of one device, for rollouts of several kinds and for the update."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

from sprl.config import DENSE, UNQUANTISED, Cache, Quant, RematSetting, Run, SettingsError
from sprl.learner.batch import Shape, Tokens, shape
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.moe import check_split
from sprl.models.sequence import check_sequence
from sprl.planning import memory
from sprl.planning.devices import Device
from sprl.planning.memory import RolloutMemory, UpdateMemory, kv_bytes, rollout_cache, rollout_memory
from sprl.planning.mesh_axes import MeshAxes, separate_devices
from sprl.planning.remat import least_that_fits, with_remat
from sprl.planning.utilisation import update_flops
from sprl.planning.work import Work, decode_work, longest, update_work, visible_keys
from sprl.rollout.evaluate import at_once
from sprl.sampler.weights import check_learner_mesh, check_linears, same_weights

BUDGET = 512  # of sparse rollouts if the config sets none: the smallest budget in the papers
SAMPLERS = {'none': '', 'w8a8_kv8': ' fp8'}  # part of every plan, with the suffix of their name; others go by their own name


@dataclass(frozen=True)
class RolloutPlan:
  """One kind of rollouts on one device."""

  name: str
  budget: int | None  # None: nothing is evicted
  sampler: str  # config.quant.sampler
  kv_bytes: int  # of a sequence, on all devices that share its heads
  slots: int  # of a sequence, in the last layer
  memory: RolloutMemory
  most_rows: int  # sequences that fit on a device; negative if the weights alone do not fit
  asked: int  # sequences on a device that the run asks for
  rows: int  # of these, sequences that fit, which decode
  step: Work  # one decode step of `rows` sequences
  full: Work  # one decode step of `most_rows` sequences


@dataclass(frozen=True)
class EvaluationPlan:
  """Answers to held-out problems on the learner's devices.

  They are beside the learner's state, the sampler weights of the rollouts, and the caches of rollouts that continue.
  """

  memory: str  # config.eval.memory
  rows: int  # sequences on a device
  rows_asked: int  # on all devices
  total: int  # bytes


@dataclass(frozen=True)
class Plan:
  """What a run needs of each device. Bytes, operations and seconds are of one device unless said otherwise."""

  model: str
  parameters: int  # of the whole model
  device: Device
  usable: float  # bytes of its memory that a run may fill
  learner: MeshAxes
  rollout: MeshAxes  # all engines together
  apart: bool  # rollouts and learner use separate devices
  flags: tuple[str, ...]  # that give a run this layout
  shape: Shape  # of a minibatch
  remat: RematSetting  # config.model.remat; `auto` is decided
  update: UpdateMemory
  caches: int  # bytes of rollouts that continue after an update, held during it and during an evaluation
  work: Work  # all updates of a step, if every answer has max_tokens
  model_flops: int  # of all updates of a step whose rows are full, on all devices: without recomputation and scoring
  most_mfu: float  # upper bound of the updates' model FLOP/s over the devices' matrix rate in bfloat16; full rows reach most
  evaluation: EvaluationPlan
  rows_asked: int  # on all devices
  kinds: tuple[RolloutPlan, ...]

  @property
  def fits(self) -> dict[str, bool]:
    """Whether the usable memory suffices."""
    return {'update': self.update.total + self.caches <= self.usable, 'evaluation': self.evaluation.total <= self.usable}


def plan(config: ModelConfig, run: Run, learner: MeshAxes, rollout: MeshAxes, device: Device, usable: float = 0.9) -> Plan:
  """Plan a run for these meshes; `usable` is the fraction of a device's memory that it may fill.

  Raises SettingsError if the run itself would refuse its settings for this model, if it trains adapters, or if rollouts share the
  learner's devices but have another number of them.
  """
  if not 0 < usable <= 1:
    raise SettingsError(f'--usable={usable}: expected a number above 0, and at most 1')
  if run.lora.rank:
    raise SettingsError(f'config.lora.rank = {run.lora.rank}: expected None; the planner does not know the memory of adapters')
  run = on(device, run)
  apart = separate_devices(run.devices, learner, rollout)
  if not apart and learner.devices != rollout.devices:
    raise SettingsError(
      f'--rollout_mesh: found {rollout.devices} devices; expected {learner.devices}, as in --mesh, because rollouts share the '
      "learner's devices; config.devices gives them others"
    )
  engine = dataclasses.replace(rollout, data=rollout.data // run.devices.engines)
  check_linears(run.quant, config.num_layers)
  check_split(config, learner.expert, learner.tensor, '--mesh', run.quant.in_learner)
  check_split(config, rollout.expert, rollout.tensor, '--rollout_mesh', run.quant)
  check_learner_mesh(config, run.quant, run.model.kernels, learner.mesh(config))
  check_sequence(config, learner.mesh(config), '--mesh')
  if rollout.sequence > 1:
    raise SettingsError(f'--rollout_mesh = sequence={rollout.sequence}: expected 1; only the learner splits the tokens of a row')
  packed = shape(run.sampling, run.rollout, run.packing, run.optimizer.minibatches, learner.rows, run.branches, learner.sequence)
  capacity = usable * device.memory
  caches = 0 if apart else memory.caches_kept(config, run, rollout)
  run = with_remat(run, least_that_fits(config, run, packed, learner, capacity - caches))
  update = memory.update_memory(config, run, packed, learner)
  room = capacity - (0 if apart else update.state)
  work = partial(update_work, config, run, packed, memory=update, axes=learner, device=device)
  full = _full_rows(config, run, packed)
  model_flops = run.optimizer.epochs * update_flops(config, run.lora, full)
  return Plan(
    model=run.model.path,
    parameters=memory.size(transformer.abstract_params(config)),
    device=device,
    usable=capacity,
    learner=learner,
    rollout=rollout,
    apart=apart,
    flags=(*learner.flags(run.mesh.learner, 'learner'), *engine.flags(run.mesh.rollout, 'rollout')),
    shape=packed,
    remat=run.model.remat,
    update=update,
    caches=caches,
    work=work(longest(config, run, packed)),
    most_mfu=model_flops / (work(full).seconds * learner.devices * device.bfloat16),
    model_flops=model_flops,
    evaluation=_evaluation(
      config, run, learner.without_sequence() if apart or run.devices.engines > 1 else rollout, update.state + caches
    ),
    rows_asked=run.rows,
    kinds=tuple(
      _rollouts(name, config, run, cache, quant, rollout, device, room, apart)
      for name, (cache, quant) in kinds(run, config).items()
    ),
  )


def _full_rows(config: ModelConfig, run: Run, shape: Shape) -> Tokens:
  """Return the tokens of a step whose rows are full, and whose prompts and completions have the greatest length."""
  read = run.optimizer.minibatches * shape.micros * shape.rows * shape.tokens
  return Tokens(read, round(read * visible_keys(config, run, shape)), run.optimizer.minibatches * shape.sequences * shape.columns)


def on(device: Device, run: Run) -> Run:
  """Return the run with the kernels that `auto` selects on this device. Raises SettingsError if the device has none."""
  kernels = run.model.kernels
  if kernels == 'mosaic_gpu' and not device.hopper:
    raise SettingsError(f"config.model.kernels = 'mosaic_gpu': {device.name} is no GPU of the Hopper generation; expected 'auto'")
  there = ('mosaic_gpu' if device.hopper else 'reference') if kernels == 'auto' else kernels
  return dataclasses.replace(run, model=dataclasses.replace(run.model, kernels=there))


def own_kind(run: Run) -> str:
  """Name of the kind of rollouts that the run asks for."""
  return ('sparse' if run.cache.budget else 'dense') + SAMPLERS.get(run.quant.sampler, f' {run.quant.sampler}')


def kinds(run: Run, config: ModelConfig) -> dict[str, tuple[Cache, Quant]]:
  """Dense and sparse rollouts, unquantised and in FP8, with the run's other settings; and the run's own kind if it is another.

  A model with a sliding window on every layer has only dense rollouts, unless the run asks for a budget, which is an error.
  """
  caches = {
    'dense': dataclasses.replace(run.cache, budget=None),
    'sparse': run.cache if run.cache.budget else dataclasses.replace(run.cache, budget=BUDGET),
  }
  if config.sliding_windows and None not in config.sliding_windows and not run.cache.budget:
    del caches['sparse']
  named = {
    name + suffix: (cache, dataclasses.replace(run.quant, sampler=sampler))
    for name, cache in caches.items()
    for sampler, suffix in SAMPLERS.items()
  }
  return named | {own_kind(run): (caches['sparse' if run.cache.budget else 'dense'], run.quant)}


def _rollouts(
  name: str, config: ModelConfig, run: Run, cache: Cache, quant: Quant, axes: MeshAxes, device: Device, room: float, apart: bool
) -> RolloutPlan:  # fmt: skip
  layout = rollout_cache(config, run, cache, quant)
  held = rollout_memory(config, run, cache, quant, run.prefill * run.devices.engines, axes)
  newest = held.weights if apart else 0  # the next weights arrive while rollouts continue under the old ones
  most = math.floor((room - held.total(0) - newest) / held.row)
  asked = math.ceil(run.rows / axes.rows)
  rows = max(min(most, asked), 0)
  own = dataclasses.replace(run, quant=quant)
  step, full = (decode_work(config, own, layout, held, n, axes, device) for n in (rows, max(most, 0)))
  budget, kv = layout.settings.budget, kv_bytes(layout)
  return RolloutPlan(
    name, budget, quant.sampler, kv, layout.slots, held, most_rows=most, asked=asked, rows=rows, step=step, full=full
  )


def _evaluation(config: ModelConfig, run: Run, axes: MeshAxes, state: int) -> EvaluationPlan:
  """The evaluation as `sprl.rollout.evaluate` runs it."""
  settings = run.eval
  cache, quant = (run.cache, run.quant) if settings.memory == 'sampler' else (DENSE, UNQUANTISED)
  sets = [
    (settings.problems, settings.samples),
    *((each.problems or settings.problems, each.samples) for each in settings.sets.values()),
  ]
  asked, prompts = at_once(run, sets)
  rows = math.ceil(asked / axes.rows)
  answers = dataclasses.replace(  # nothing is recorded of them: neither supports, nor evictions, nor routes
    run,
    arm=None,
    model=dataclasses.replace(run.model, router_replay='none'),
    sampling=dataclasses.replace(run.eval_sampling, top_p=1.0),
  )
  held = rollout_memory(config, answers, cache, quant, prompts, axes)
  synced = 0 if same_weights(quant, run.quant) else memory.sampler_weight_bytes(config, run, run.quant, axes)
  return EvaluationPlan(settings.memory, rows, asked, state + synced + held.total(rows))
