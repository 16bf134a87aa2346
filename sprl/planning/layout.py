"""How a model lies on a mesh that need not be there: what one device holds of each weight, row and head."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from sprl import settings
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.transformer import Params
from sprl.parallel.mesh import AXES, TENSOR, divide, filled, tensor_axes
from sprl.parallel.rules import KEPT, spec
from sprl.settings import Devices, Meshes, Run, SettingsError, device_numbers

NAMES = ('data', 'fsdp', 'expert', 'tensor')  # from far to near: the devices of the last are neighbours


@dataclass(frozen=True)
class Axes:
  """Sizes of a mesh's axes."""

  data: int = 1
  fsdp: int = 1
  expert: int = 1
  tensor: int = 1

  @classmethod
  def parse(cls, text: str, flag: str = '--mesh') -> 'Axes':
    """Axes from 'data=2,fsdp=8'; those not named are 1. Raises SettingsError."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(',')):
      name, _, size = part.partition('=')
      if name not in NAMES or name in sizes or not size.isdecimal() or int(size) < 1:
        accepted = ', '.join(f'{each}=N' for each in NAMES)
        raise SettingsError(f'{flag}={text}: {part!r} cannot be; expected any of {accepted}, each once')
      sizes[name] = int(size)
    return cls(**sizes)

  @property
  def sizes(self) -> tuple[int, ...]:
    """In the order of NAMES."""
    return tuple(getattr(self, name) for name in NAMES)

  @property
  def devices(self) -> int:
    """How many there are."""
    return math.prod(self.sizes)

  @property
  def rows(self) -> int:
    """Into how many parts a batch's rows are split."""
    return self.data * self.fsdp * self.expert

  def gathered(self) -> 'Axes':
    """The same devices with weights whole on each, or split over tensor and expert: what rollouts want of them."""
    return Axes(self.data * self.fsdp, 1, self.expert, self.tensor)

  @classmethod
  def of(cls, mesh: settings.Mesh, devices: int | None, name: str) -> 'Axes':
    """Axes of config.mesh.`name` over so many devices, which fill its -1; None: nobody knows how many. Raises SettingsError."""
    sizes = {axis: getattr(mesh, axis) for axis in NAMES}
    free = [axis for axis, size in sizes.items() if size == -1]
    if devices is None and free:
      raise SettingsError(
        f'config.mesh.{name}.{free[0]} = -1: expected a size, as no devices are here to be counted; or --mesh, or config.devices'
      )
    return cls(**filled(mesh, math.prod(sizes.values()) if devices is None else devices, name))

  def flags(self, given: settings.Mesh, name: str) -> list[str]:
    """What makes config.mesh.`name` this mesh, where it is `given` otherwise. A -1 fills what the others leave."""
    sizes = {axis: (getattr(self, axis), getattr(given, axis)) for axis in NAMES}
    return [f'--config.mesh.{name}.{axis}={size}' for axis, (size, was) in sizes.items() if size > 1 or was not in (1, -1)]

  def mesh(self, config: ModelConfig) -> AbstractMesh:
    """The mesh, without devices."""
    sizes = {name: getattr(self, name) for name in NAMES}
    sizes |= dict(zip(TENSOR, tensor_axes(self.tensor, (config.num_heads, config.num_kv_heads))))
    return AbstractMesh(tuple(sizes[name] for name in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))

  def __str__(self) -> str:
    return ' '.join(f'{name}={size}' for name, size in zip(NAMES, self.sizes) if size > 1) or 'one device'


def laid_out(run: Run, mesh: str | None = None, rollout_mesh: str | None = None) -> tuple[Axes, Axes]:
  """The learner's mesh, and that of the rollouts on all engines together: as the flags --mesh and --rollout_mesh have them,
  or else as config.mesh. Where neither says anything of rollouts, they have the learner's devices with weights gathered.

  Raises SettingsError.
  """
  devices, default = run.devices, Meshes()
  count = _count(devices.learner)
  if mesh is not None:
    learner = Axes.parse(mesh)
  elif run.mesh == default and count is None:
    learner = Axes()
  else:
    learner = Axes.of(run.mesh.learner, count, 'learner')
  if rollout_mesh is not None:
    return learner, Axes.parse(rollout_mesh, '--rollout_mesh')
  if run.mesh.rollout == default.rollout and not devices.rollout and (mesh is not None or run.mesh == default):
    return learner, learner.gathered()
  there = _count(devices.rollout) or learner.devices
  if there % devices.engines:
    raise SettingsError(f'config.devices.engines = {devices.engines}: expected a divisor of {there}, the rollout devices')
  engine = Axes.of(run.mesh.rollout, there // devices.engines, 'rollout')
  return learner, dataclasses.replace(engine, data=engine.data * devices.engines)


def _count(text: str) -> int | None:
  numbers = device_numbers(text) if text else None
  return None if numbers is None else len(numbers)


def apart(devices: Devices, learner: Axes, rollout: Axes) -> bool:
  """Whether rollouts have devices of their own. Raises SettingsError where config.devices and these meshes cannot both be."""
  named = [n for text in (devices.learner, devices.rollout) if text for n in device_numbers(text) or ()]
  there = range(max(learner.devices, rollout.devices, *(n + 1 for n in named)))  # '' is all of them
  learns, engines = divide(devices, there)
  samples = learns if engines is None else [n for each in engines for n in each]
  for key, numbers, axes in (('learner', learns, learner), ('rollout', samples, rollout)):
    if len(numbers) != axes.devices and getattr(devices, key):
      flag = {'learner': '--mesh', 'rollout': '--rollout_mesh'}[key]
      raise SettingsError(
        f'config.devices.{key} = {getattr(devices, key)!r}: {len(numbers)} devices; expected {axes.devices}, as {flag} has'
      )
  if rollout.data % devices.engines:
    raise SettingsError(
      f'--rollout_mesh: data = {rollout.data}; expected a multiple of config.devices.engines = {devices.engines}'
    )
  return set(learns).isdisjoint(samples)


def ceil(n: int, parts: int) -> int:
  """The most that one of `parts` has of n, shared out as evenly as can be."""
  return -(-n // parts)


def heads(config: ModelConfig, tensor: int) -> tuple[int, int]:
  """Query and kv heads on one device."""
  H, K = config.num_heads, config.num_kv_heads
  kv, group, _ = tensor_axes(tensor, (H, K))
  return H // (kv * group), K // kv


def widths(config: ModelConfig, tensor: int) -> list[int]:
  """Of each layer, what one device has of the width of the MLP that all tokens go through, with experts or without; 0: none."""
  mixed = config.experts
  return [
    (mixed.shared_width if mixed and layer in mixed.layers else config.intermediate_size) // tensor
    for layer in range(config.num_layers)
  ]


def shards(config: ModelConfig, axes: Axes, dtype) -> Params:
  """What one device holds of each weight, by the rules that a run lays weights out with: a tree of ShapeDtypeStruct."""
  whole = transformer.abstract_params(config, dtype)
  mesh = axes.mesh(config)

  def shard(w, names):
    place = NamedSharding(mesh, spec(mesh, names, w.shape, KEPT))
    return jax.ShapeDtypeStruct(place.shard_shape(w.shape), w.dtype)

  return jax.tree.map(shard, whole, transformer.logical_axes(config))


def experts(params: Params) -> list[Any]:
  """Each layer's experts; nothing of a layer that has none."""
  return [layer['mlp'].get('experts', {}) for layer in transformer.layers(params)]


def size(tree: Any) -> int:
  """How many numbers the arrays of a tree hold."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def nbytes(tree: Any) -> int:
  """The bytes that they take."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
