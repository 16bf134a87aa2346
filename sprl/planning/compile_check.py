"""Compares a plan with XLA's compilers: memory of the run's programs, compiled for absent devices."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sprl.config import Run, SettingsError
from sprl.models.config import ModelConfig
from sprl.planning import aot, programs
from sprl.planning.estimate import Plan, RolloutPlan, kinds, on, own_kind
from sprl.planning.memory import local, nbytes, rollout_cache
from sprl.planning.remat import with_remat
from sprl.planning.show import GIB, MIB, table


@dataclass(frozen=True)
class Check:
  """Memory of a program on one device, as planned and as compiled."""

  name: str
  planned: int  # bytes
  compiled: aot.Compiled


def check_compilable(run: Run, device: str, count: int) -> None:
  """Raise SettingsError if the run's programs cannot be compiled for `count` devices of this name."""
  aot.devices(device, count)
  if run.optimizer.offload:
    raise SettingsError('config.optimizer.offload = True: expected False with --compile, whose devices have no host memory')


def checks(config: ModelConfig, run: Run, plan: Plan) -> list[Check]:
  """Compile the update, and the decode steps of the kind of rollouts that the run asks for."""
  kind = next(each for each in plan.kinds if each.name == own_kind(run))
  update = check_update(config, run, plan)
  return [update, check_decode(config, run, plan, kind)] if kind.rows else [update]


def planned_update(plan: Plan) -> int:
  """Planned bytes of the update on a device. A reference model is part of scoring, not of the update."""
  return plan.update.total - plan.update.reference


def planned_decode(config: ModelConfig, run: Run, plan: Plan, kind: RolloutPlan) -> int:
  """Planned bytes of decode steps on a device, without the learner's state, prefill, or the probe of the FP8 codes."""
  probe = programs.abstract_sampler_weights(
    config, on(plan.device, run), kinds(run, config)[kind.name][1], plan.rollout.mesh(config)
  ).probe
  return kind.memory.total(kind.rows) - kind.memory.prefill - nbytes(local(probe))


def check_update(config: ModelConfig, run: Run, plan: Plan) -> Check:
  """Compile the update."""
  mesh = plan.learner.mesh_of(config, aot.devices(plan.device.name, plan.learner.devices))
  program = programs.update(config, with_remat(run, plan.remat), plan.shape, mesh)
  return Check('update', planned_update(plan), aot.compile_for(program.jitted, *program.arguments, **program.static))


def check_decode(config: ModelConfig, run: Run, plan: Plan, kind: RolloutPlan) -> Check:
  """Compile the decode steps of one kind of rollouts."""
  axes, (cache, quant) = plan.rollout, kinds(run, config)[kind.name]
  mesh = axes.mesh_of(config, aot.devices(plan.device.name, axes.devices))
  with aot.lowering_for(mesh):  # the device decides which form the sampler weights have
    program = programs.decoding(config, run, rollout_cache(config, run, cache, quant), quant, kind.rows * axes.rows, mesh)
  compiled = aot.compile_for(program.jitted, *program.arguments, **program.static)
  return Check(f'decode, {kind.name}', planned_decode(config, run, plan, kind), compiled)


def as_text(checks: Sequence[Check]) -> str:
  """Return planned and compiled memory, and the collectives in each program, as text.

  A collective in a loop is listed once, for any number of iterations.
  """
  rows, sent = [], []
  for each in checks:
    found = each.compiled
    sizes = [f'{size / GIB:.2f}' for size in (each.planned, found.total, found.arguments, found.temporary)]
    rows.append([each.name, *sizes, f'{each.planned / found.total:.2f}'])
    groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for collective in found.collectives:
      groups[collective.kind, collective.devices, collective.depth].append(collective.bytes)
    for (kind, devices, depth), bytes_ in sorted(groups.items()):
      sent.append([each.name, kind, f'{devices} devices', str(depth), str(len(bytes_)), f'{sum(bytes_) / MIB:,.1f}'])
  head = ['GiB of each device', 'planned', 'compiled', 'arguments', 'temporary', 'planned / compiled']
  lines = ['Compiled by XLA:', '', *table(head, rows)]
  if sent:
    lines += ['', *table(['collectives', 'kind', 'group', 'loops', 'count', 'MiB of results'], sent)]
  return '\n'.join(lines)
