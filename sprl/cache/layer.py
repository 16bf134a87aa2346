"""The cache of one layer: the keys and values of the tokens that are kept, and what eviction stores beside them."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from sprl.cache.layout import CacheLayout
from sprl.quant import fp8

NEVER = jnp.iinfo(jnp.int32).max  # recorded for a token that was not evicted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
  """Keys and values of one layer, and what eviction stores beside them (None if the method does not need it).

  Slots 0..n-1 of a row are occupied. The other slots hold padding or old values, which nothing reads. A layer with a sliding
  window is a ring (sprl/cache/ring.py).
  """

  k: Float[Array, '*B K S D'] | UInt8[Array, '*B K S D']  # rotated keys; FP8 codes are stored as bytes, see `fp8.to_bytes`
  v: Float[Array, '*B K S D'] | UInt8[Array, '*B K S D']
  second: UInt8[Array, '*B K S W'] | None = None  # second FP8 codes of the keys (sprl/cache/key_bias.py)
  position: Int[Array, '*B K S'] | None = None  # absolute position of each slot's token; slots that hold none: any
  queries: Float[Array, '*B H A D'] | None = None  # the newest A queries; position p is at index p % A
  carried: Float[Array, '*B K S'] | None = None  # the stored number of the eviction method for each slot
  evicted: Int[Array, '*B K T'] | None = None  # for the token at each position: position of the first query without it, or NEVER

  @classmethod
  def empty(cls, layout: CacheLayout, rows: int, slots: int, evicts: bool = True) -> 'LayerCache':
    """Return a layer of `rows` sequences without tokens. A layer with a sliding window never evicts."""
    shape = (rows, layout.kv_heads, slots)
    k, v = (jnp.zeros((*shape, layout.head_dim), jnp.uint8 if layout.fp8 else layout.storage) for _ in range(2))
    second = jnp.zeros((*shape, layout.second_codes), jnp.uint8) if layout.key_bias else None
    if not (layout.sparse and evicts):
      return cls(k, v, second)
    return cls(
      k,
      v,
      second,
      position=jnp.full(shape, -1, jnp.int32),
      queries=jnp.zeros((rows, layout.heads, layout.queries, layout.head_dim), layout.dtype) if layout.queries else None,
      carried=jnp.full(shape, layout.initial_carried, jnp.float32) if layout.carries else None,
      evicted=jnp.full((*shape[:2], layout.positions), NEVER, jnp.int32) if layout.record else None,
    )

  def cut(self, slots: int) -> 'LayerCache':
    """Return the layer with its first `slots` slots only. The others must be empty or padding."""
    of_slots = {name: getattr(self, name) for name in ('k', 'v', 'second', 'position', 'carried')}
    return replace(self, **{name: None if x is None else x[:, :, :slots] for name, x in of_slots.items()})

  @property
  def contents(self) -> dict[str, Array]:
    """The arrays of keys and values, by name."""
    return {name: x for name in ('k', 'v', 'second') if (x := getattr(self, name)) is not None}

  @property
  def axes(self) -> 'LayerCache':
    """The axis names of its arrays. `queries` is split by kv head: the query heads of a group stay with their kv head."""
    names: dict[str, Any] = {
      field: None if x is None else ('rows', 'kv_heads', *[None] * (x.ndim - 2)) for field, x in vars(self).items()
    }
    return LayerCache(**names)

  @property
  def keys(self) -> Float[Array, '*B K S D']:
    """The stored keys: numbers, or FP8 codes."""
    return fp8.from_bytes(self.k) if self.k.dtype == jnp.uint8 else self.k

  @property
  def values(self) -> Float[Array, '*B K S D']:
    """The stored values: numbers, or FP8 codes."""
    return fp8.from_bytes(self.v) if self.v.dtype == jnp.uint8 else self.v
