"""Between numpy and devices, of which other processes may have some.

    place(batch, shardings)     arrays of numpy, the same in every process, on the devices: each process sends its own their parts
    fetch(tree)                 numpy arrays; what is split over processes is gathered first, which all of them must do
    park(tree), parked.back()   what this process's devices hold, kept on its host and put back

All of them say what they move, as the transfer guard of the loop wants it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P


def place(tree: Any, shardings: Any) -> Any:
  """The arrays of `tree` laid out as the tree `shardings` says."""
  return jax.tree.map(_placed, tree, shardings)


def _placed(x: Any, sharding: Sharding) -> jax.Array:
  x = np.asarray(x)
  where = sharding.addressable_devices_indices_map(x.shape)
  parts = jax.device_put([x[index] for index in where.values()], list(where))
  return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def fetch(tree: Any) -> Any:
  """The arrays of `tree` as numpy's."""
  return jax.device_get(jax.tree.map(_whole, tree))


def _whole(x: Any) -> Any:
  if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
    return x
  assert isinstance(x.sharding, NamedSharding), x.sharding
  return relaid(x, NamedSharding(x.sharding.mesh, P()))


def relaid(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  """The array in another layout on the same devices; over processes, all of them must ask for it."""
  return _relaying(sharding)(x)


@cache
def _relaying(sharding: NamedSharding):
  def same(x):
    if x.dtype != jnp.float8_e4m3fn:
      return x
    # As bytes: XLA's CPU backend would widen the whole array to move it.
    held = jax.lax.with_sharding_constraint(jax.lax.bitcast_convert_type(x, jnp.uint8), sharding)
    return jax.lax.bitcast_convert_type(held, x.dtype)

  return jax.jit(same, out_shardings=sharding)


def home(sharding: Sharding) -> Any:
  """The first of the devices that is this process's."""
  return min(sharding.addressable_devices, key=lambda device: device.id)


@dataclass(frozen=True)
class Parked:
  """An array's parts that this process has, on its host; equal ones once."""

  shape: tuple[int, ...]
  sharding: Sharding
  parts: dict[tuple[tuple[int, int], ...], np.ndarray]

  def back(self) -> jax.Array:
    """The array as it was."""
    where = self.sharding.addressable_devices_indices_map(self.shape)
    parts = jax.device_put([self.parts[_span(index, self.shape)] for index in where.values()], list(where))
    return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


def park(x: jax.Array) -> Parked:
  """A copy of the array on the hosts, of each process what its devices hold."""
  parts = {_span(shard.index, x.shape): shard.data for shard in x.addressable_shards}
  return Parked(x.shape, x.sharding, {span: np.array(jax.device_get(part)) for span, part in parts.items()})


def _span(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape))
