"""The two operations of eviction: compare keys with keys, and move kept slots to the front (docs/methods/sparse.md)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int, Shaped

from sprl.config import Kernels
from sprl.kernels.cost import Cost
from sprl.kernels.platform import chosen


def compact(
  k: Shaped[Array, 'B K S D'],
  v: Shaped[Array, 'B K S D'],
  rows: Int[Array, ' R'],
  keep: Int[Array, 'R K N'],
  kernels: Kernels = 'auto',
) -> tuple[Shaped[Array, 'B K S D'], Shaped[Array, 'B K S D']]:
  """Return k, v with slots keep[r] of row rows[r] moved to its slots 0..N-1.

  A row number B stands for no row. keep[r, h] must ascend. Slots from N on keep stale numbers.
  """
  if not chosen('compaction', kernels, lambda: _compaction_obstacle(k)):
    return compact_reference(k, v, rows, keep)
  from sprl.kernels import hopper_eviction  # imported here: Mosaic takes a second to import

  return hopper_eviction.compact(k, v, rows, keep)


def compact_reference(
  k: Shaped[Array, 'B K S D'], v: Shaped[Array, 'B K S D'], rows: Int[Array, ' R'], keep: Int[Array, 'R K N']
) -> tuple[Shaped[Array, 'B K S D'], Shaped[Array, 'B K S D']]:
  """Compute `compact` in jnp."""
  row = jnp.minimum(rows, k.shape[0] - 1)

  def moved(x):
    kept = jnp.take_along_axis(x[row], keep[..., None], axis=2)
    return x.at[rows, :, : keep.shape[-1]].set(kept, mode='drop')

  return moved(k), moved(v)


def compact_cost(R: int, K: int, N: int, D: int, dtype: Any) -> Cost:
  """Return the cost of moving N slots of keys and values in R rows."""
  return Cost(2 * 2 * R * K * N * D * jnp.dtype(dtype).itemsize + 4 * R * K * N, 0)


def similarity(
  k: Float[Array, 'K S D'], n: Int[Array, ''], threshold: float, nearest_of_none: int, kernels: Kernels = 'auto'
) -> Float[Array, 'K S']:
  """Return, for each of a row's first n keys, the sum of its cosines with the others (docs/methods/sparse.md, R-KV).

  Each key i spares its newest near-duplicate: the key of the highest slot whose cosine with it is above `threshold`, or slot
  `nearest_of_none` if there is none (-1: no slot). That cosine is left out of the spared key's sum. Slots from n on are
  undefined. Use `jax.vmap` for many rows.
  """
  if not compares_without_cosines(k, kernels):
    return similarity_reference(k, n, threshold, nearest_of_none)
  from sprl.kernels import hopper_eviction

  @custom_vmap
  def one(k, n):
    return hopper_eviction.similarity(k[None], n[None], threshold, nearest_of_none)[0]

  @one.def_vmap
  def many(size, batched, k, n):
    k, n = (x if each else jnp.broadcast_to(x, (size, *x.shape)) for x, each in zip((k, n), batched))
    return hopper_eviction.similarity(k, n, threshold, nearest_of_none), True

  return one(k, n)


def compares_without_cosines(
  k: Float[Array, '*B K S D'] | jax.ShapeDtypeStruct, kernels: Kernels = 'auto', local: bool = False
) -> bool:
  """Return whether `similarity` runs the kernel. The reference makes an array [K, S, S] of cosines for each row.

  `local` says that the caller will compare the keys of each device there (`sprl.kernels.platform.chosen`).
  """
  return chosen('similarity of keys', kernels, lambda: _similarity_obstacle(k), local)


def similarity_reference(
  k: Float[Array, 'K S D'], n: Int[Array, ''], threshold: float, nearest_of_none: int
) -> Float[Array, 'K S']:
  """Compute `similarity` in jnp.

  Cosines are symmetric, so R-KV (which masks by row and sums columns) and G-KV (the reverse) get the same numbers.
  """
  slot = jnp.arange(k.shape[1])
  occupied = slot < n
  pair = occupied[:, None] & occupied & (slot[:, None] != slot)
  wide = k.astype(jnp.float32)
  direction = wide / (jnp.linalg.norm(wide, axis=-1, keepdims=True) + 1e-8)
  # Full float32: an accelerator's default precision would move cosines across the threshold.
  cosine = jnp.where(pair, jnp.einsum('kid,kjd->kij', direction, direction, precision='highest'), 0)
  spared = jnp.where(pair & (cosine > threshold), slot, nearest_of_none).max(axis=-1)
  return jnp.where(slot == spared[..., None], 0, cosine).sum(axis=1)


def similarity_cost(R: int, K: int, S: int, D: int) -> Cost:
  """Return the cost of comparing all S bfloat16 keys of R rows."""
  return Cost(2 * R * K * S * D + 4 * R * K * S, 2 * R * K * S * S * D)


def _compaction_obstacle(k) -> str | None:
  from sprl.kernels import hopper_eviction

  return hopper_eviction.compaction_obstacle(k)


def _similarity_obstacle(k) -> str | None:
  from sprl.kernels import hopper_eviction

  return hopper_eviction.similarity_obstacle(k)
