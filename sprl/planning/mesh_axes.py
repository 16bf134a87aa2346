"""Sizes of mesh axes for devices that need not exist, and how a run divides devices between learner and rollouts."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from sprl import config as settings
from sprl.config import Devices, Meshes, Run, SettingsError
from sprl.config_checks import MOST_DEVICES, device_numbers
from sprl.models.config import ModelConfig
from sprl.sharding.mesh import AXES, TENSOR, divide, filled, make_mesh, tensor_axes

NAMES = ('data', 'fsdp', 'expert', 'sequence', 'tensor')  # outermost first: devices along the last axis are neighbours


@dataclass(frozen=True)
class MeshAxes:
  """Number of devices along each axis of a mesh. Raises SettingsError for more than MOST_DEVICES devices."""

  data: int = 1
  fsdp: int = 1
  expert: int = 1
  sequence: int = 1
  tensor: int = 1

  def __post_init__(self):
    if self.devices > MOST_DEVICES:
      found = f'found {self}, {self.devices} devices'
      raise SettingsError(f'--mesh, --rollout_mesh, config.mesh: {found}; expected at most {MOST_DEVICES}')

  @classmethod
  def parse(cls, text: str, flag: str = '--mesh') -> 'MeshAxes':
    """Parse axes such as 'data=2,fsdp=8'; axes not named are 1. Raises SettingsError, which names `flag`."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(',')):
      name, _, size = part.partition('=')
      if name not in NAMES or name in sizes or not size.isdecimal() or not 1 <= int(size[:9]) <= MOST_DEVICES:
        accepted = ', '.join(f'{each}=N' for each in NAMES)
        raise SettingsError(f'{flag}={text}: found {part!r}; expected any of {accepted}, each at most once')
      sizes[name] = int(size)
    return cls(**sizes)

  @property
  def devices(self) -> int:
    """Number of devices."""
    return math.prod(dataclasses.astuple(self))

  @property
  def rows(self) -> int:
    """Number of parts that the rows of a batch are split into."""
    return self.data * self.fsdp * self.expert

  def gathered(self) -> 'MeshAxes':
    """The same devices for rollouts: weights are whole on each device, or split over tensor and expert only."""
    return MeshAxes(data=self.data * self.fsdp * self.sequence, expert=self.expert, tensor=self.tensor)

  def without_sequence(self) -> 'MeshAxes':
    """The same devices with whole sequences (`sprl.sharding.mesh.without_sequence`): `data` takes the place of `sequence`."""
    return dataclasses.replace(self, data=self.data * self.sequence, sequence=1)

  def heads(self, config: ModelConfig) -> tuple[int, int]:
    """Numbers of query heads and kv heads on one device."""
    H, K = config.num_heads, config.num_kv_heads
    kv, group, _ = tensor_axes(self.tensor, (H, K))
    return H // (kv * group), K // kv

  def flags(self, given: settings.Mesh, name: str) -> list[str]:
    """Command-line flags that turn the mesh `given` for config.mesh.`name` into this one."""
    sizes = {axis: (getattr(self, axis), getattr(given, axis)) for axis in NAMES}
    return [f'--config.mesh.{name}.{axis}={size}' for axis, (size, was) in sizes.items() if size > 1 or was not in (1, -1)]

  def mesh(self, config: ModelConfig) -> AbstractMesh:
    """The mesh for this model, without devices."""
    sizes = dataclasses.asdict(self) | dict(zip(TENSOR, tensor_axes(self.tensor, (config.num_heads, config.num_kv_heads))))
    return AbstractMesh(tuple(sizes[name] for name in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))

  def mesh_of(self, config: ModelConfig, devices: list[Any]) -> Mesh:
    """The mesh for this model, of these devices."""
    return make_mesh(settings.Mesh(**dataclasses.asdict(self)), devices, (config.num_heads, config.num_kv_heads))

  def __str__(self) -> str:
    return ' '.join(f'{name}={size}' for name, size in dataclasses.asdict(self).items() if size > 1) or 'one device'


def run_axes(run: Run, mesh: str | None = None, rollout_mesh: str | None = None) -> tuple[MeshAxes, MeshAxes]:
  """Return the learner's axes and the rollouts' axes (all engines together).

  The texts of the flags --mesh and --rollout_mesh come before config.mesh, where an axis of -1 takes the remaining devices. If
  neither describes rollouts, they use the learner's devices with gathered weights. Raises SettingsError, for example for an axis
  of -1 if config.devices does not tell the number of devices.
  """

  def configured(mesh: settings.Mesh, devices: int | None, name: str) -> MeshAxes:
    sizes = {axis: getattr(mesh, axis) for axis in NAMES}
    if devices is None and -1 in sizes.values():
      free = next(axis for axis in NAMES if sizes[axis] == -1)
      raise SettingsError(f'config.mesh.{name}.{free} = -1: expected a size; or set --mesh or config.devices')
    return MeshAxes(**filled(mesh, math.prod(sizes.values()) if devices is None else devices, name))

  devices, default = run.devices, Meshes()
  learns, samples = (len(device_numbers(text) or ()) if text else None for text in (devices.learner, devices.rollout))
  if mesh is not None:
    learner = MeshAxes.parse(mesh)
  elif run.mesh == default and learns is None:
    learner = MeshAxes()
  else:
    learner = configured(run.mesh.learner, learns, 'learner')
  if rollout_mesh is not None:
    return learner, MeshAxes.parse(rollout_mesh, '--rollout_mesh')
  if run.mesh.rollout == default.rollout and samples is None and (mesh is not None or run.mesh == default):
    return learner, learner.gathered()
  samples = samples or learner.devices
  if samples % devices.engines:
    raise SettingsError(f'config.devices.engines = {devices.engines}: expected a divisor of {samples}, the rollout devices')
  engine = configured(run.mesh.rollout, samples // devices.engines, 'rollout')
  return learner, dataclasses.replace(engine, data=engine.data * devices.engines)


def separate_devices(devices: Devices, learner: MeshAxes, rollout: MeshAxes) -> bool:
  """Return whether rollouts and learner use separate devices. Raises SettingsError if config.devices contradicts the axes."""
  named = [n for text in (devices.learner, devices.rollout) if text for n in device_numbers(text) or ()]
  there = range(max(learner.devices, rollout.devices, *(n + 1 for n in named)))  # None is all of them
  learns, engines = divide(devices, there)
  samples = learns if engines is None else [n for each in engines for n in each]
  for key, flag, numbers, axes in (('learner', '--mesh', learns, learner), ('rollout', '--rollout_mesh', samples, rollout)):
    if len(numbers) != axes.devices and getattr(devices, key):
      raise SettingsError(
        f'config.devices.{key} = {getattr(devices, key)!r}: found {len(numbers)} devices; expected {axes.devices}, as in {flag}'
      )
  if rollout.data % devices.engines:
    raise SettingsError(
      f'--rollout_mesh: data = {rollout.data}; expected a multiple of config.devices.engines = {devices.engines}'
    )
  return set(learns).isdisjoint(samples)
