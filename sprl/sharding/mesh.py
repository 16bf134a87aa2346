"""The device mesh: the number of devices along each axis, and the devices that learn and that sample.

The settings have five axes: data, fsdp, expert, sequence and tensor. `tensor` splits the network's matrices. It becomes three
axes of the mesh, so that a head is never cut. Worked example, 12 query heads and 2 kv heads over tensor = 8:

    tensor_kv     2    splits the kv heads: each part has one kv head and its six query heads
    tensor_group  2    splits these six query heads: each half has three and a copy of the kv head
    tensor_rest   2    splits no heads; MLP and vocabulary are split by all three axes
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sprl import config as settings
from sprl.config import SettingsError
from sprl.config_checks import device_numbers

TENSOR = ('tensor_kv', 'tensor_group', 'tensor_rest')
AXES = ('data', 'fsdp', 'expert', 'sequence', *TENSOR)


def make_mesh(mesh: settings.Mesh, devices=None, heads: tuple[int, int] | None = None, name: str = 'learner') -> Mesh:
  """Return the mesh of the settings over `devices` (default: all devices).

  `heads` are the model's numbers of query and kv heads. `name` is the mesh's name in errors: `learner` or `rollout`. Axes with
  one device are left out, so that no partition spec names them.

  Raises SettingsError if the product of the axes is not the number of devices.
  """
  devices = np.array(jax.devices() if devices is None else devices)
  sizes = filled(mesh, devices.size, name)
  sizes |= dict(zip(TENSOR, tensor_axes(sizes.pop('tensor'), heads)))
  axes = tuple(axis for axis in AXES if sizes[axis] > 1) or AXES[:1]
  return Mesh(devices.reshape([sizes[axis] for axis in axes]), axes, axis_types=(AxisType.Auto,) * len(axes))


def filled(mesh: settings.Mesh, devices: int, name: str = 'learner') -> dict[str, int]:
  """Return the sizes of the axes over a number of devices; an axis of -1 takes the devices that the others leave.

  Raises SettingsError if the product of the axes is not `devices`. `name` is the mesh's name in the error.
  """
  sizes = {'data': mesh.data, 'fsdp': mesh.fsdp, 'expert': mesh.expert, 'sequence': mesh.sequence, 'tensor': mesh.tensor}
  free = [axis for axis, size in sizes.items() if size == -1]
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if len(free) == 1 and fixed > 0 and devices % fixed == 0:
    sizes[free[0]] = devices // fixed
  if math.prod(sizes.values()) != devices or min(sizes.values()) < 1:
    raise SettingsError(f'config.mesh.{name} = {sizes}: expected axes whose product is {devices} devices, at most one of them -1')
  return sizes


def tensor_axes(tensor: int, heads: tuple[int, int] | None) -> tuple[int, int, int]:
  """Return the sizes of tensor_kv, tensor_group and tensor_rest. `heads`: numbers of query and kv heads, or None for any."""
  if heads is None:
    return tensor, 1, 1
  H, K = heads
  kv = math.gcd(tensor, K)
  # Query heads are stored kv head by kv head. A cut within a kv head's query heads gives contiguous parts only if every part has
  # one kv head.
  group = math.gcd(tensor // kv, H // K) if kv == K else 1
  return kv, group, tensor // kv // group


def sizes(mesh: Mesh) -> dict[str, int]:
  """Return the sizes of the settings' five axes."""
  tensor = math.prod(mesh.shape.get(axis, 1) for axis in TENSOR)
  return {axis: mesh.shape.get(axis, 1) for axis in AXES if axis not in TENSOR} | {'tensor': tensor}


def without_sequence(mesh: Mesh, heads: tuple[int, int]) -> Mesh:
  """Return the learner's devices as a mesh of the sampler, which has whole sequences: `data` takes the place of `sequence`."""
  axes = sizes(mesh)
  if axes['sequence'] == 1:
    return mesh
  axes |= {'data': axes['data'] * axes['sequence'], 'sequence': 1}
  return make_mesh(settings.Mesh(**axes), mesh.devices, heads)


def divide(asked: settings.Devices, devices: Sequence) -> tuple[list, list[list] | None]:
  """Return the learner's devices and the devices of each engine; None instead if the only engine uses the learner's devices.

  Raises SettingsError for a device that does not exist, for sets that overlap in part, and if `engines` does not divide the
  rollout devices.
  """

  def chosen(key: str) -> list:
    numbers = device_numbers(getattr(asked, key)) if getattr(asked, key) else range(len(devices))
    assert numbers is not None, 'checked with the settings'
    if missing := [n for n in numbers if n >= len(devices)]:
      raise SettingsError(
        f'config.devices.{key} = {getattr(asked, key)!r}: expected device numbers below {len(devices)}, '
        f'the number of devices; there is no device {missing[0]}'
      )
    return [devices[n] for n in numbers]

  learner, rollout = chosen('learner'), chosen('rollout')
  if set(learner) != set(rollout) and set(learner) & set(rollout):
    raise SettingsError(
      f'config.devices.rollout = {asked.rollout!r}, learner = {asked.learner!r}: expected the same devices, or sets '
      'without a common device'
    )
  if len(rollout) % asked.engines:
    raise SettingsError(
      f'config.devices.engines = {asked.engines}: expected a divisor of {len(rollout)}, the number of rollout devices'
    )
  if set(learner) == set(rollout) and asked.engines == 1:
    return learner, None
  size = len(rollout) // asked.engines
  return learner, [rollout[i : i + size] for i in range(0, len(rollout), size)]


def check_dealt(asked: settings.Devices, learner: Sequence, rollout: Sequence, processes: int) -> None:
  """Check that `processes` host processes have equal shares of the learner's and of the rollout devices, in process order.

  Then an array cut into one part per process has one contiguous part in each. Raises SettingsError otherwise.

  On CPUs one more check: there XLA runs one program over several devices of a process at a time. A learner's and a rollout's
  program, started in different orders in two processes, would wait for each other. So either the learner or the rollouts may
  have only one device per process.
  """
  for key, devices in (('learner', learner), ('rollout', rollout)):
    setting, owners = f'config.devices.{key} = {getattr(asked, key)!r}', [device.process_index for device in devices]
    if missing := sorted(set(range(processes)) - set(owners)):
      raise SettingsError(f'{setting}: expected devices of every process; SPRL_PROCESS={missing[0]} has none')
    if owners != sorted(owners) or len({owners.count(process) for process in owners}) > 1:
      raise SettingsError(
        f'{setting}: expected equal numbers of devices of every process, in process order; found SPRL_PROCESS={owners}'
      )
  if set(learner).isdisjoint(rollout) and learner[0].platform == 'cpu' and min(len(learner), len(rollout)) > processes:
    raise SettingsError(
      f'config.devices.learner = {asked.learner!r}, rollout = {asked.rollout!r}: expected one device per process '
      'for one of them: a CPU process runs one program over several devices at a time'
    )


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Return the sharding that puts a whole copy on every device of the mesh."""
  return NamedSharding(mesh, P())
