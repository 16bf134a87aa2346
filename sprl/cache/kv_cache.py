"""The sampler's memory: a fixed number of key and value slots for each row."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.kernels.attention import attention
from sprl.kernels.decode_attention import decode_attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
  """Slots 0..length-1 of a row hold its tokens' keys (rotated at their true positions) and values.

  One array a layer: under donation a decode step then writes in place, where a stacked array would be copied.
  `attend` writes new tokens behind `length`, which `advance` moves once all layers have seen them.
  """

  k: tuple[Float[Array, 'B K S D'], ...]
  v: tuple[Float[Array, 'B K S D'], ...]
  length: Int[Array, ' B']

  @classmethod
  def empty(cls, layers: int, rows: int, kv_heads: int, slots: int, head_dim: int, dtype) -> 'KVCache':
    """A cache with no tokens in it."""
    zeros = tuple(jnp.zeros((rows, kv_heads, slots, head_dim), dtype) for _ in range(layers))
    return cls(zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros(rows, jnp.int32))

  @property
  def slots(self) -> int:
    """S."""
    return self.k[0].shape[2]

  def attend(
    self, layer: int, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
  ) -> tuple[Float[Array, 'B T H D'], 'KVCache']:
    """New token t of row b goes to slot length[b] + t and sees the slots up to its own."""
    T = q.shape[1]
    slot = self.length[:, None] + jnp.arange(T)
    keys = self._write(self.k[layer], k, slot)
    values = self._write(self.v[layer], v, slot)
    if T == 1:
      out = decode_attention(q[:, 0], keys, values, self.length + 1)[:, None]
    else:
      allowed = jnp.arange(self.slots) <= slot[:, :, None]
      out = attention(q, jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), allowed)
    k_all = (*self.k[:layer], keys, *self.k[layer + 1 :])
    v_all = (*self.v[:layer], values, *self.v[layer + 1 :])
    return out, dataclasses.replace(self, k=k_all, v=v_all)

  @staticmethod
  def _write(store, new, slot):
    rows = jnp.arange(store.shape[0])[:, None]
    return store.at[rows, :, slot].set(new.astype(store.dtype), mode='drop')

  def advance(self, count: Int[Array, ' B']) -> 'KVCache':
    """The cache whose rows hold `count` more tokens; anything written beyond (padding) is no part of it."""
    return dataclasses.replace(self, length=self.length + count)

  def fork(self, other: 'KVCache', parent: Int[Array, ' B'], take: Bool[Array, ' B']) -> 'KVCache':
    """This cache with row b replaced by row parent[b] of `other` (with as many slots or fewer) where take[b]."""

    def rows(mine, theirs):
      chosen = jnp.pad(theirs, ((0, 0), (0, 0), (0, mine.shape[2] - theirs.shape[2]), (0, 0)))[parent]
      return jnp.where(take[:, None, None, None], chosen, mine)

    return KVCache(
      jax.tree.map(rows, self.k, other.k),
      jax.tree.map(rows, self.v, other.v),
      jnp.where(take, other.length[parent], self.length),
    )
