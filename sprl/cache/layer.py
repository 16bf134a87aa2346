"""One layer's slots: what is held of every token that is still remembered."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from sprl.cache.plan import CachePlan
from sprl.quant import fp8

NEVER = jnp.iinfo(jnp.int32).max  # the evict step of a token that is still there


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
  """Keys and values, and what eviction needs beside them; None where it needs nothing.

  Slots 0..n-1 of a row are occupied. What lies on the others (padding, a row that has ended) means nothing.
  """

  k: Float[Array, '*B K S D'] | UInt8[Array, '*B K S D']  # in FP8 its bytes, which can be written in place
  v: Float[Array, '*B K S D'] | UInt8[Array, '*B K S D']
  position: Int[Array, '*B K S'] | None = None
  queries: Float[Array, '*B H A D'] | None = None  # the newest A, that of position p at p % A
  carried: Float[Array, '*B K S'] | None = None  # the method's number for each slot
  evicted: Int[Array, '*B K P'] | None = None  # by position: the first query that did not find it any more

  @classmethod
  def empty(cls, plan: CachePlan, layer: int, rows: int, slots: int) -> 'Layer':
    """No tokens."""
    shape = (rows, plan.kv_heads, slots)
    k, v = (jnp.zeros((*shape, plan.head_dim), jnp.uint8 if plan.fp8 else plan.storage) for _ in range(2))
    if not plan.evicts(layer):
      return cls(k, v)
    return cls(
      k,
      v,
      position=jnp.full(shape, -1, jnp.int32),
      queries=jnp.zeros((rows, plan.heads, plan.queries, plan.head_dim), plan.dtype) if plan.queries else None,
      carried=jnp.full(shape, plan.initial) if plan.carries else None,
      evicted=jnp.full((*shape[:2], plan.positions), NEVER, jnp.int32) if plan.record else None,
    )

  @property
  def axes(self) -> 'Layer':
    """The names of its arrays' axes. Of the queries, all that share a kv head lie with it."""
    names: dict[str, Any] = {
      field: None if x is None else ('rows', 'kv_heads', *[None] * (x.ndim - 2)) for field, x in vars(self).items()
    }
    return Layer(**names)

  @property
  def keys(self) -> Float[Array, '*B K S D']:
    """The keys as numbers, or FP8 codes."""
    return fp8.from_bytes(self.k) if self.k.dtype == jnp.uint8 else self.k

  @property
  def values(self) -> Float[Array, '*B K S D']:
    """The values, as `keys`."""
    return fp8.from_bytes(self.v) if self.v.dtype == jnp.uint8 else self.v

  @property
  def positions(self) -> Int[Array, '*B K S']:
    """The slots' positions; in a layer that evicts nothing a slot's number."""
    return jnp.broadcast_to(jnp.arange(self.k.shape[-2]), self.k.shape[:-1]) if self.position is None else self.position
