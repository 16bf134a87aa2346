"""Arrays from one set of devices to another, in another layout: device to device, without a whole array anywhere.

JAX copies between devices what both sides cut alike, and fetches everything else to the host. Here each device of the target
gets its part in pieces, each from a device that has it:

    weights split in 4 by the learner          0123 | 4567 | 89ab | cdef
    a target device that has the first half    0123 + 4567

What another process's devices have is brought over first, an array at a time and among the devices that hold it: each process's
then have all of it together. Of 2 processes of 2 devices each, which both are to have the first half of it:

    0123 | 4567    89ab | cdef    ->    01234567 | 89abcdef    01234567 | 89abcdef
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from sprl.parallel.transfer import relaid

Part = tuple[tuple[int, int], ...]  # start and end along each axis


def reshard[T](tree: T, shardings: Any) -> T:
  """The arrays of `tree`, laid out as the tree `shardings` says. Where processes share them, each has as many of the devices."""
  return jax.tree.map(_moved, tree, shardings)


def _moved(x: jax.Array, target: Sharding) -> jax.Array:
  if x.sharding.is_equivalent_to(target, x.ndim):
    return x
  near = at_hand(x)
  holders: dict[Part, list[jax.Array]] = {}
  for held in near.addressable_shards:
    holders.setdefault(_part(held.index, x.shape), []).append(held.data)
  arrays = []
  for n, (device, index) in enumerate(target.addressable_devices_indices_map(x.shape).items()):
    arrays.append(_assembled(_pieces(holders, _part(index, x.shape), n, device)))
  moved = jax.make_array_from_single_device_arrays(x.shape, target, arrays)
  if near is not x:
    jax.block_until_ready(moved)  # before the next array is brought over: there is room for one, not for all
  return moved


def at_hand(x: jax.Array) -> jax.Array:
  """The array, of which the devices of each process have all parts; split over a process's devices where it can be."""
  parts: dict[int, set[Part]] = {}
  for device, index in x.sharding.devices_indices_map(x.shape).items():
    parts.setdefault(device.process_index, set()).add(_part(index, x.shape))
  everything = set().union(*parts.values())
  if all(of_one == everything for of_one in parts.values()):
    return x
  devices = x.sharding.mesh.devices if isinstance(x.sharding, NamedSharding) else None
  assert devices is not None, x.sharding
  mesh = Mesh(devices.reshape(len(parts), -1), ('process', 'own'), axis_types=(AxisType.Auto,) * 2)
  cut = [whole // part for whole, part in zip(x.shape, x.sharding.shard_shape(x.shape))]
  axes = sorted(range(x.ndim), key=lambda axis: -cut[axis])  # along the axis that is split already, where that will do
  own = next((axis for axis in axes if x.shape[axis] % mesh.shape['own'] == 0), None)
  return relaid(x, NamedSharding(mesh, P() if own is None else P(*[None] * own, 'own')))


def _part(index: Sequence[slice] | None, shape: Sequence[int]) -> Part:
  return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape))


def _pieces(holders: Mapping[Part, Sequence[jax.Array]], wanted: Part, n: int, device) -> dict[Part, jax.Array]:
  """What makes up the wanted part, on `device`; of equal holders the n-th, so that several devices do not all ask one."""
  pieces = {}
  for part, held in holders.items():
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, wanted))
    if all(a < b for a, b in common):
      piece = held[n % len(held)][tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, part))]
      pieces[common] = jax.device_put(piece, device)
  return pieces


def _assembled(pieces: Mapping[Part, jax.Array], axis: int = 0) -> jax.Array:
  """The pieces of a grid, joined axis by axis."""
  if len(pieces) == 1:
    return next(iter(pieces.values()))
  stretches: dict[tuple[int, int], dict[Part, jax.Array]] = {}
  for part, piece in pieces.items():
    stretches.setdefault(part[axis], {})[part] = piece
  joined = [_assembled(stretches[stretch], axis + 1) for stretch in sorted(stretches)]
  return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis)
