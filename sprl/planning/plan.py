"""A run's plan: one device's memory, work and least times, for rollouts of several kinds and for the update."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from sprl.learner.packing import Shape, shape
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.moe import check_split
from sprl.planning import layout, memory, work
from sprl.planning.devices import Device
from sprl.planning.layout import Axes, ceil, size
from sprl.planning.memory import Rollouts, Update
from sprl.planning.work import Work
from sprl.sampler.served import check_linears
from sprl.settings import DENSE, UNQUANTISED, Cache, Quant, Run, SettingsError

BUDGET = 512  # of sparse rollouts, where the config has none: the papers' smallest


@dataclass(frozen=True)
class Kind:
  """One way of rolling out, on one device."""

  name: str
  budget: int  # 0: everything is remembered
  sampler: str  # config.quant.sampler
  kv_bytes: int  # of a sequence, on all the devices that share its heads
  slots: int  # of a sequence, in the last layer
  memory: Rollouts
  most_rows: int  # that fit on a device; below 0: not even the weights do
  rows: int  # that decode there: as many as the run asks for, or as fit
  step: Work  # one decode step with them
  seconds: float  # that it takes at the least
  full: Work  # one with the most that fit
  full_seconds: float


@dataclass(frozen=True)
class Evaluation:
  """Answers to held-out problems, on one of the learner's devices, which keeps its state meanwhile. Bytes."""

  memory: str  # config.eval.memory: everything remembered, or as rollouts are sampled
  rows: int  # that decode there
  rows_asked: int  # on all devices
  state: int  # the learner's
  served: int  # the weights of rollouts
  sampling: int  # the evaluation's own weights and rows

  @property
  def total(self) -> int:
    """All of it."""
    return self.state + self.served + self.sampling


@dataclass(frozen=True)
class Plan:
  """What a run needs of each device. Bytes, operations and seconds are of one device unless said otherwise."""

  model: str
  device: Device
  usable: float  # bytes of its memory that a run may fill
  learner: Axes
  rollout: Axes  # all engines together
  apart: bool  # rollouts have devices of their own
  flags: tuple[str, ...]  # that have a run of these settings laid out so
  parameters: int  # of the whole model
  shape: Shape  # of a minibatch
  update: Update
  work: Work  # all updates of a step
  seconds: float
  evaluation: Evaluation
  rows_asked: int  # of all devices
  kinds: tuple[Kind, ...]

  def json(self) -> dict[str, Any]:
    """The same as plain numbers and names."""
    plain = dataclasses.asdict(self)
    plain['update'] |= {'state': self.update.state, 'total': self.update.total, 'fits': self.update.total <= self.usable}
    plain['evaluation'] |= {'total': self.evaluation.total, 'fits': self.evaluation.total <= self.usable}
    plain['work'] |= _sums(self.work)
    plain['update_tokens_per_second'] = self.work.tokens / self.seconds
    for kind, told in zip(self.kinds, plain['kinds']):
      told['step'] |= _sums(kind.step)
      told['full'] |= _sums(kind.full)
      told['tokens_per_second'] = kind.step.tokens / kind.seconds
      told['full_tokens_per_second'] = kind.full.tokens / kind.full_seconds
    return plain


def _sums(done: Work) -> dict[str, int]:
  return {'flops': done.flops, 'bytes': done.bytes, 'sent': done.sent}


def plan(config: ModelConfig, run: Run, learner: Axes, rollout: Axes, device: Device, usable: float = 0.9) -> Plan:
  """The plan of a run with its learner and rollouts laid out so; `usable`: the part of a device's memory that it may fill.

  Raises SettingsError: what the run itself would refuse of its settings and its model, and rollouts that share the learner's
  devices but are laid out over another number of them.
  """
  if not 0 < usable <= 1:
    raise SettingsError(f'--usable={usable}: expected a number above 0, and at most 1')
  if run.lora.rank:
    raise SettingsError(f'config.lora.rank = {run.lora.rank}: expected 0; runs that train adapters are not planned for yet')
  run = on(device, run)
  apart = layout.apart(run.devices, learner, rollout)
  if not apart and learner.devices != rollout.devices:
    raise SettingsError(
      f'--rollout_mesh: {rollout.devices} devices; expected {learner.devices}, as --mesh has, where rollouts are on the '
      "learner's devices; config.devices gives them others"
    )
  engine = dataclasses.replace(rollout, data=rollout.data // run.devices.engines)
  check_linears(run.quant, config.num_layers)
  check_split(config, learner.expert, learner.tensor, '--mesh')
  check_split(config, rollout.expert, rollout.tensor, '--rollout_mesh', run.quant)
  packed = shape(run.sampling, run.rollout, run.packing, run.optimizer.minibatches, learner.rows)
  update = memory.update(config, run, packed, learner)
  done = work.update(config, run, packed, update, learner)
  capacity = usable * device.memory
  return Plan(
    model=run.model.path,
    device=device,
    usable=capacity,
    learner=learner,
    rollout=rollout,
    apart=apart,
    flags=(*learner.flags(run.mesh.learner, 'learner'), *engine.flags(run.mesh.rollout, 'rollout')),
    parameters=size(transformer.abstract_params(config)),
    shape=packed,
    update=update,
    work=done,
    seconds=done.seconds(device, learner, memory.compute_dtype(run)),
    evaluation=_evaluation(config, run, learner if apart or run.devices.engines > 1 else rollout, update.state),
    rows_asked=run.rows,
    kinds=tuple(
      _kind(name, config, run, cache, quant, rollout, device, capacity, 0 if apart else update.state)
      for name, cache, quant in kinds(run)
    ),
  )


def on(device: Device, run: Run) -> Run:
  """The run with the kernels that `auto` means on the device, whatever this machine has. Raises SettingsError: it has none."""
  kernels = run.model.kernels
  if kernels == 'mosaic_gpu' and not device.hopper:
    raise SettingsError(f"config.model.kernels = 'mosaic_gpu': {device.name} is no GPU of the Hopper generation; expected 'auto'")
  there = ('mosaic_gpu' if device.hopper else 'reference') if kernels == 'auto' else kernels
  return dataclasses.replace(run, model=dataclasses.replace(run.model, kernels=there))


NAMED = {'bf16': '', 'w8a8_kv8': ' fp8'}  # samplers that every plan has; another goes by its own name


def own_kind(run: Run) -> str:
  """The name of the kind of rollouts that the run asks for."""
  return ('sparse' if run.cache.budget else 'dense') + NAMED.get(run.quant.sampler, f' {run.quant.sampler}')


def kinds(run: Run) -> list[tuple[str, Cache, Quant]]:
  """Dense and sparse rollouts, in the compute dtype and in FP8, as near to the run's own as that goes; and the run's own where it
  is none of them."""
  dense = dataclasses.replace(run.cache, budget=0, masked_learner=False)
  sparse = run.cache if run.cache.budget else dataclasses.replace(run.cache, budget=BUDGET)
  plain, fp8 = (dataclasses.replace(run.quant, sampler=sampler) for sampler in NAMED)
  all_of_them = [('dense', dense, plain), ('dense fp8', dense, fp8), ('sparse', sparse, plain), ('sparse fp8', sparse, fp8)]
  own = [] if run.quant.sampler in NAMED else [(own_kind(run), sparse if run.cache.budget else dense, run.quant)]
  return all_of_them + own


def _kind(
  name: str, config: ModelConfig, run: Run, cache: Cache, quant: Quant, axes: Axes, device: Device, capacity: float, state: int
) -> Kind:  # fmt: skip
  plan = memory.memory_plan(config, run, cache, quant)
  held = memory.rollouts(config, run, cache, quant, run.prefill * run.devices.engines, axes)
  most = memory.most_rows(capacity, state, held)
  rows = max(min(most, ceil(run.rows, axes.rows)), 0)
  step, full = (work.decode(config, run, plan, held.weights, n, axes) for n in (rows, max(most, 0)))
  dtype = memory.compute_dtype(run)
  return Kind(
    name=name,
    budget=plan.settings.budget,
    sampler=quant.sampler,
    kv_bytes=memory.kv_bytes(plan, config.num_heads, config.num_kv_heads),
    slots=plan.slots(plan.layers - 1),
    memory=held,
    most_rows=most,
    rows=rows,
    step=step,
    seconds=step.seconds(device, axes, dtype),
    full=full,
    full_seconds=full.seconds(device, axes, dtype),
  )


def _evaluation(config: ModelConfig, run: Run, axes: Axes, state: int) -> Evaluation:
  """What `sprl.evaluation.evaluate` makes, beside what the trainer holds when it calls it."""
  settings, k = run.eval, run.eval.samples
  as_sampled = settings.memory == 'sampler'
  cache, quant = (run.cache, run.quant) if as_sampled else (DENSE, UNQUANTISED)
  asked = min(run.sampling.rows or run.rollout.prompts * run.rollout.group, settings.problems * k)
  answers = dataclasses.replace(run.sampling, max_tokens=settings.max_tokens or run.sampling.max_tokens)
  held = memory.rollouts(
    config, dataclasses.replace(run, sampling=answers), cache, quant, min(run.rollout.prompts, ceil(asked, k)), axes
  )
  served = memory.served_bytes(config, run, run.quant, axes)
  rows = ceil(asked, axes.rows)
  return Evaluation(settings.memory, rows, asked, state, served, held.total(rows))
