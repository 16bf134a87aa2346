"""The device mesh, and the rules that lay weights over it by the names of their axes."""

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sprl import settings
from sprl.settings import SettingsError, device_numbers

# Logical axis of a weight -> mesh axis. A weight axis that the mesh axis does not divide stays whole.
RULES = {'embed': 'fsdp', 'heads': 'tensor', 'kv_heads': 'tensor', 'mlp': 'tensor', 'vocab': 'tensor'}


def make_mesh(mesh: settings.Mesh, devices=None) -> Mesh:
  """The mesh of the settings over all devices.

  Raises SettingsError where the axes do not multiply up to the number of devices.
  """
  devices = np.array(jax.devices() if devices is None else devices)
  sizes = {'data': mesh.data, 'fsdp': mesh.fsdp, 'tensor': mesh.tensor}
  free = [name for name, size in sizes.items() if size == -1]
  fixed = int(np.prod([size for size in sizes.values() if size != -1]))
  if len(free) == 1 and fixed > 0 and devices.size % fixed == 0:
    sizes[free[0]] = devices.size // fixed
  if int(np.prod(list(sizes.values()))) != devices.size or min(sizes.values()) < 1:
    raise SettingsError(
      f'config.mesh = {sizes}: expected axes that multiply up to {devices.size} devices, one of them -1 at most'
    )
  return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


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


def divides(mesh: Mesh | AbstractMesh, axis: str | None, size: int) -> bool:
  """Whether a mesh axis (None: no axis) splits so many evenly."""
  return axis is None or size % mesh.shape[axis] == 0


def param_shardings(mesh: Mesh | AbstractMesh, axes, shapes):
  """A NamedSharding for each weight: `axes` is a tree of tuples of logical names, `shapes` the tree of its shapes."""

  def sharding(shape, names):
    rules = [RULES.get(name) for name in names]
    return NamedSharding(mesh, P(*[rule if divides(mesh, rule, size) else None for rule, size in zip(rules, shape.shape)]))

  return jax.tree.map(sharding, shapes, axes)


def replicated(mesh: Mesh) -> NamedSharding:
  """The same on every device."""
  return NamedSharding(mesh, P())
