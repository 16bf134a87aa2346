"""Transfers between host and devices, in one process or in several.

    place(tree, shardings)      numpy arrays, equal in every process, to the devices; each process sends the parts of its devices
    fetch(tree)                 device arrays to numpy; an array that is split over processes is gathered first, by all of them
    park(x), parked.back()      copies the parts of this process's devices to its host, and puts them back

All transfers are explicit, as the loop's transfer guard requires.
"""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

HOST = 'pinned_host'  # JAX's name for host memory that a device can read and write

Span = tuple[tuple[int, int], ...]  # of a part of an array: start and stop along each axis


def place(tree: Any, shardings: Any) -> Any:
  """Return the numpy arrays of `tree` on the devices, laid out by the tree `shardings`.

  With several processes, all call this with equal arrays.
  """
  return jax.tree.map(_placed, tree, shardings)


def _placed(x: Any, sharding: Sharding) -> jax.Array:
  x = np.asarray(x)
  where = sharding.addressable_devices_indices_map(x.shape)
  parts = jax.device_put([x[index] for index in where.values()], list(where))
  return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def fetch(tree: Any) -> Any:
  """Return the arrays of `tree` as numpy arrays.

  With several processes, all must call this. An array that is split over processes is first replicated on all of its devices, so
  each must have room for it.
  """
  return jax.device_get(jax.tree.map(_whole, tree))


def _whole(x: Any) -> Any:
  if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
    return x
  assert isinstance(x.sharding, NamedSharding), x.sharding
  return relayout(x, NamedSharding(x.sharding.mesh, P()))


def relayout(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  """Return x in another layout on the same devices. With several processes, all must call this."""
  return _relayout_program(sharding)(x)


@cache
def _relayout_program(sharding: NamedSharding):
  def same(x):
    if x.dtype != jnp.float8_e4m3fn:
      return x
    # As bytes: XLA's CPU backend would widen the whole FP8 array to move it.
    held = jax.lax.with_sharding_constraint(jax.lax.bitcast_convert_type(x, jnp.uint8), sharding)
    return jax.lax.bitcast_convert_type(held, x.dtype)

  return jax.jit(same, out_shardings=sharding)


def home(sharding: Sharding) -> Any:
  """Return the sharding's first device that belongs to this process."""
  return min(sharding.addressable_devices, key=lambda device: device.id)


@dataclass(frozen=True)
class Parked:
  """The parts of an array that this process's devices held, on its host. Replicas of a part are stored once."""

  shape: tuple[int, ...]
  sharding: Sharding
  parts: dict[Span, np.ndarray]

  def back(self) -> jax.Array:
    """Return the array on its devices again, in its old layout."""
    where = self.sharding.addressable_devices_indices_map(self.shape)
    parts = jax.device_put([self.parts[span_of(index, self.shape)] for index in where.values()], list(where))
    return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


def park(x: jax.Array) -> Parked:
  """Copy the array to the host: in each process, the parts that its devices hold. x stays on the devices."""
  parts = {span_of(shard.index, x.shape): shard.data for shard in x.addressable_shards}
  return Parked(x.shape, x.sharding, {span: np.array(jax.device_get(part)) for span, part in parts.items()})


def span_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Span:
  """Return the part of an array of this shape that JAX names by slices."""
  return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape))


def return_free_memory() -> None:
  """Return the C allocator's free memory to the system: several hundred megabytes after compilations. glibc only."""
  if sys.platform == 'linux' and hasattr(libc := ctypes.CDLL(None), 'malloc_trim'):
    libc.malloc_trim(0)
