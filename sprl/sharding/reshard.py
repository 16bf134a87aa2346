"""Move arrays to other devices in another layout, from device to device.

No host holds the array. A device holds a whole array only if the target layout replicates it, or if no axis can be divided by the
devices of a process.

Between different sets of devices, `jax.device_put` copies directly only if each target part is also a part on a source device.
Otherwise an array that is split over devices goes through the host. Here each target device gets its part in pieces, each from a
device that holds it:

    weights split in 4 on the learner              0123 | 4567 | 89ab | cdef
    a target device that needs the first half      0123 + 4567

Parts on another process's devices are brought over first, one array at a time, by a collective among the source devices. Then
the devices of each process hold the whole array together. Two processes with two devices each, before and after:

    0123 | 4567    89ab | cdef    ->    01234567 | 89abcdef    01234567 | 89abcdef
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from sprl.sharding.transfer import Span, relayout, span_of


def reshard[T](tree: T, shardings: Any) -> T:
  """Return `tree` with each array laid out by the sharding at its place in the tree `shardings`.

  With several processes, all must call this, and each must have the same number of the source devices.
  """
  return jax.tree.map(_moved, tree, shardings)


def _moved(x: jax.Array, target: Sharding) -> jax.Array:
  if x.sharding.is_equivalent_to(target, x.ndim):
    return x
  near = complete_per_process(x)
  holders: dict[Span, list[jax.Array]] = {}
  for held in near.addressable_shards:
    holders.setdefault(span_of(held.index, x.shape), []).append(held.data)
  arrays = []
  for n, (device, index) in enumerate(target.addressable_devices_indices_map(x.shape).items()):
    arrays.append(_assembled(_pieces(holders, span_of(index, x.shape), n, device)))
  moved = jax.make_array_from_single_device_arrays(x.shape, target, arrays)
  if near is not x:
    jax.block_until_ready(moved)  # before the next array: memory has room for one copy, not for copies of all arrays
  return moved


def complete_per_process(x: jax.Array) -> jax.Array:
  """Return x so that each process holds all of it, split over the devices of the process if an axis is divisible.

  That is x itself if each process holds all of it already. The mesh must list the devices process by process.
  """
  parts: dict[int, set[Span]] = {}
  for device, index in x.sharding.devices_indices_map(x.shape).items():
    parts.setdefault(device.process_index, set()).add(span_of(index, x.shape))
  everything = set().union(*parts.values())
  if all(of_one == everything for of_one in parts.values()):
    return x
  devices = x.sharding.mesh.devices if isinstance(x.sharding, NamedSharding) else None
  assert devices is not None, x.sharding
  mesh = Mesh(devices.reshape(len(parts), -1), ('process', 'own'), axis_types=(AxisType.Auto,) * 2)
  cut = [whole // part for whole, part in zip(x.shape, x.sharding.shard_shape(x.shape))]
  axes = sorted(range(x.ndim), key=lambda axis: -cut[axis])  # prefers the axis that is split already
  own = next((axis for axis in axes if x.shape[axis] % mesh.shape['own'] == 0), None)
  return relayout(x, NamedSharding(mesh, P() if own is None else P(*[None] * own, 'own')))


def _pieces(holders: Mapping[Span, Sequence[jax.Array]], wanted: Span, n: int, device) -> dict[Span, jax.Array]:
  """Return the pieces of the wanted part, copied to `device`.

  `n` is the number of the target device in this process. If several devices hold a part, number n modulo their count is read, so
  that the reads are spread over them.
  """
  pieces = {}
  for part, held in holders.items():
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, wanted))
    if all(a < b for a, b in common):
      piece = held[n % len(held)][tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, part))]
      pieces[common] = jax.device_put(piece, device)
  return pieces


def _assembled(pieces: Mapping[Span, jax.Array], axis: int = 0) -> jax.Array:
  """Join pieces that form a grid, axis by axis."""
  if len(pieces) == 1:
    return next(iter(pieces.values()))
  ranges: dict[tuple[int, int], dict[Span, jax.Array]] = {}
  for part, piece in pieces.items():
    ranges.setdefault(part[axis], {})[part] = piece
  joined = [_assembled(ranges[each], axis + 1) for each in sorted(ranges)]
  return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis)
