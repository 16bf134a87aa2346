"""The device mesh: how many devices an axis has, which devices learn and which sample.

The settings know four axes. `tensor`, which splits the network's matrices, is three axes of the mesh, so that heads are cut
where they may be and nowhere else. Worked example, 12 query and 2 kv heads over tensor = 8:

    tensor_kv     2    splits the kv heads: one each, and six queries with it
    tensor_group  2    splits the six queries of a kv head, which both halves hold: three each
    tensor_rest   2    splits neither; MLP and vocabulary are split by all three
"""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sprl import settings
from sprl.settings import SettingsError, device_numbers

TENSOR = ('tensor_kv', 'tensor_group', 'tensor_rest')
AXES = ('data', 'fsdp', 'expert', *TENSOR)


def make_mesh(mesh: settings.Mesh, devices=None, heads: tuple[int, int] | None = None, name: str = 'learner') -> Mesh:
  """The mesh of the settings over all devices; `heads` are the model's query and kv heads, `name` is whose mesh it is.

  Axes of one device are left out: what is not split over them need not be said to be whole.

  Raises SettingsError where the axes do not multiply up to the number of devices.
  """
  devices = np.array(jax.devices() if devices is None else devices)
  sizes = filled(mesh, devices.size, name)
  sizes |= dict(zip(TENSOR, tensor_axes(sizes.pop('tensor'), heads)))
  axes = tuple(axis for axis in AXES if sizes[axis] > 1) or AXES[:1]
  return Mesh(devices.reshape([sizes[axis] for axis in axes]), axes, axis_types=(AxisType.Auto,) * len(axes))


def filled(mesh: settings.Mesh, devices: int, name: str = 'learner') -> dict[str, int]:
  """The sizes of the axes over so many devices, which fill the one that is -1. Raises SettingsError as `make_mesh` does."""
  sizes = {'data': mesh.data, 'fsdp': mesh.fsdp, 'expert': mesh.expert, 'tensor': mesh.tensor}
  free = [axis for axis, size in sizes.items() if size == -1]
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if len(free) == 1 and fixed > 0 and devices % fixed == 0:
    sizes[free[0]] = devices // fixed
  if math.prod(sizes.values()) != devices or min(sizes.values()) < 1:
    raise SettingsError(
      f'config.mesh.{name} = {sizes}: expected axes that multiply up to {devices} devices, one of them -1 at most'
    )
  return sizes


def tensor_axes(tensor: int, heads: tuple[int, int] | None) -> tuple[int, int, int]:
  """The sizes of the axes that `tensor` is made of, for a model of so many query and kv heads."""
  if heads is None:
    return tensor, 1, 1
  H, K = heads
  kv = math.gcd(tensor, K)
  # Queries lie kv head by kv head. To cut within these stretches and between them too would leave gaps, unless each is alone.
  group = math.gcd(tensor // kv, H // K) if kv == K else 1
  return kv, group, tensor // kv // group


def sizes(mesh: Mesh) -> Mapping[str, int]:
  """The axes as the settings know them."""
  tensor = math.prod(mesh.shape.get(axis, 1) for axis in TENSOR)
  return {axis: mesh.shape.get(axis, 1) for axis in AXES if axis not in TENSOR} | {'tensor': tensor}


def divide(settings: settings.Devices, devices) -> tuple[list, list[list] | None]:
  """(the learner's devices, those of each engine; None where the one engine has the learner's).

  Raises SettingsError: devices that are not there, two sets that overlap in part, engines that do not divide theirs.
  """

  def chosen(key: str) -> list:
    numbers = device_numbers(getattr(settings, key)) if getattr(settings, key) else range(len(devices))
    assert numbers is not None, 'checked with the settings'
    if missing := [n for n in numbers if n >= len(devices)]:
      raise SettingsError(
        f'config.devices.{key} = {getattr(settings, key)!r}: expected numbers below {len(devices)}, '
        f'the devices here; {missing[0]} is none'
      )
    return [devices[n] for n in numbers]

  learner, rollout = chosen('learner'), chosen('rollout')
  if set(learner) != set(rollout) and set(learner) & set(rollout):
    raise SettingsError(
      f'config.devices.rollout = {settings.rollout!r}, learner = {settings.learner!r}: expected the same devices, or sets that '
      'share none'
    )
  if len(rollout) % settings.engines:
    raise SettingsError(f'config.devices.engines = {settings.engines}: expected a divisor of {len(rollout)}, the rollout devices')
  if set(learner) == set(rollout) and settings.engines == 1:
    return learner, None
  size = len(rollout) // settings.engines
  return learner, [rollout[i : i + size] for i in range(0, len(rollout), size)]


def check_dealt(settings: settings.Devices, learner: Sequence, rollout: Sequence, processes: int) -> None:
  """Raises SettingsError where several processes do not all have their share of what learns, and of what samples: as many devices
  each, and those of one process before those of the next, so that what is cut in as many parts lies with each in one piece.

  XLA on CPUs starts one program over several devices of a process at a time. Those of learner and rollouts would wait for each
  other, begun in one order here and in another there, so that there one device of each process is all that one of them may have.
  """
  for key, devices in (('learner', learner), ('rollout', rollout)):
    setting, owners = f'config.devices.{key} = {getattr(settings, key)!r}', [device.process_index for device in devices]
    if missing := sorted(set(range(processes)) - set(owners)):
      raise SettingsError(f'{setting}: expected some devices of every process; SPRL_PROCESS={missing[0]} has none')
    if owners != sorted(owners) or len({owners.count(process) for process in owners}) > 1:
      raise SettingsError(
        f'{setting}: expected as many devices of every process, in their order; these are of SPRL_PROCESS={owners}'
      )
  if set(learner).isdisjoint(rollout) and learner[0].platform == 'cpu' and min(len(learner), len(rollout)) > processes:
    raise SettingsError(
      f'config.devices.learner = {settings.learner!r}, rollout = {settings.rollout!r}: expected of one of them a device of each '
      'process on CPUs, which run one program over several devices at a time'
    )


def replicated(mesh: Mesh) -> NamedSharding:
  """The same on every device."""
  return NamedSharding(mesh, P())
