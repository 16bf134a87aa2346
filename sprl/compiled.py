"""A plan held against XLA's compilers: the run's programs compiled for devices that are not here."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from sprl import programs, settings
from sprl.models.config import ModelConfig
from sprl.parallel import aot
from sprl.parallel.aot import Compiled
from sprl.parallel.mesh import make_mesh
from sprl.planning import memory
from sprl.planning.layout import Axes
from sprl.planning.plan import Kind, Plan, kinds, own_kind
from sprl.planning.show import GIB, MIB, table
from sprl.settings import Run, SettingsError

TPUS = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}  # v5e


@dataclass(frozen=True)
class Check:
  """A program's memory as planned, and as XLA's compiler has it."""

  name: str
  planned: int  # bytes of a device
  compiled: Compiled

  def json(self) -> dict[str, Any]:
    """The same as plain numbers and names."""
    return dataclasses.asdict(self) | {'total': self.compiled.total}


def check_compilable(run: Run, name: str, count: int) -> None:
  """Raises SettingsError where the run's programs cannot be compiled for so many devices of a kind."""
  devices(name, count)
  if run.optimizer.offload:
    raise SettingsError('config.optimizer.offload = True: expected False with --compile, whose devices have no host beside them')


def devices(name: str, count: int) -> list[Any]:
  """So many compile-only devices of a kind. Raises SettingsError: of another kind or number, or where the compiler is missing."""
  if name not in ('h200', 'v5e'):
    raise SettingsError(f'--device={name}: expected h200 or v5e with --compile')
  if why := (aot.missing() if name == 'h200' else aot.missing_tpu()):
    raise SettingsError(f'--compile: {why}')
  if name == 'v5e':
    if count not in TPUS:
      raise SettingsError(f'--mesh: {count} devices; expected one of {", ".join(map(str, TPUS))} with --device=v5e --compile')
    return aot.tpus(f'v5e:{TPUS[count]}')
  if count > aot.NODE and count % aot.NODE:
    raise SettingsError(f'--mesh: {count} devices; expected at most {aot.NODE}, or a multiple of that, with --compile')
  return aot.h200s(count)


def mesh_of(config: ModelConfig, axes: Axes, of: list[Any]) -> Mesh:
  """The mesh of these devices."""
  sizes = settings.Mesh(data=axes.data, fsdp=axes.fsdp, tensor=axes.tensor, expert=axes.expert)
  return make_mesh(sizes, of, (config.num_heads, config.num_kv_heads))


def checks(config: ModelConfig, run: Run, planned: Plan) -> list[Check]:
  """The update, and the decode steps of the kind of rollouts that the run asks for (others have theirs in the benchmark)."""
  kind = next(each for each in planned.kinds if each.name == own_kind(run))
  update = check_update(config, run, planned)
  return [update, check_decode(config, run, planned, kind)] if kind.rows else [update]


def check_update(config: ModelConfig, run: Run, planned: Plan) -> Check:
  """The update compiled. A reference model takes part in scoring, not in it."""
  of = devices(planned.device.name, planned.learner.devices)
  program = programs.update(config, run, planned.shape, mesh_of(config, planned.learner, of))
  return Check(
    'update',
    planned.update.total - planned.update.reference,
    aot.compile_for(program.jitted, *program.arguments, **program.static),
  )


def check_decode(config: ModelConfig, run: Run, planned: Plan, kind: Kind) -> Check:
  """The decode steps of one kind of rollouts compiled, on their own: without what a learner holds beside them."""
  of, axes = devices(planned.device.name, planned.rollout.devices), planned.rollout
  name, cache, quant = next(each for each in kinds(run) if each[0] == kind.name)
  memory_plan = memory.memory_plan(config, run, cache, quant)
  mesh = mesh_of(config, axes, of)
  with aot.meant_for(mesh):  # what serves, and from which weights, hangs on the device
    program = programs.decoding(config, run, memory_plan, quant, kind.rows * axes.rows, mesh)
  elsewhere = kind.memory.prefill + memory.probe_bytes(config, run, quant, axes)
  return Check(
    f'decode, {name}',
    kind.memory.total(kind.rows) - elsewhere,
    aot.compile_for(program.jitted, *program.arguments, **program.static),
  )


def page(checks: Sequence[Check]) -> str:
  """What XLA made of the plan's programs, as text."""
  head = ['GiB of each device', 'planned', 'compiled', 'arguments', 'temporary', 'planned / compiled']
  rows = [
    [
      each.name, f'{each.planned / GIB:.2f}', f'{each.compiled.total / GIB:.2f}', f'{each.compiled.arguments / GIB:.2f}',
      f'{each.compiled.temporary / GIB:.2f}', f'{each.planned / each.compiled.total:.2f}',
    ]
    for each in checks
  ]  # fmt: skip
  sent = [row for each in checks for row in _sent(each)]
  lines = ['Compiled by XLA:', '', *table(head, rows)]
  if sent:
    lines += ['', *table(['collectives', 'kind', 'among', 'within loops', 'count', 'MiB of results'], sent)]
  return '\n'.join(lines)


def _sent(check: Check) -> list[list[str]]:
  """A row a kind of collective, in a loop of so many loops: it stands in the program's text once, whatever the loop's trips."""
  found: dict[tuple[str, int, int], list[int]] = {}
  for each in check.compiled.collectives:
    found.setdefault((each.kind, each.devices, each.depth), []).append(each.bytes)
  return [
    [check.name, kind, f'{among} devices', str(depth), str(len(sizes)), f'{sum(sizes) / MIB:,.1f}']
    for (kind, among, depth), sizes in sorted(found.items())
  ]
