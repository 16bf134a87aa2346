"""What the network attends to. It is asked through one call, `out, memory = memory.attend(layer, q, k, v)`.

The learner's memory is the packed row itself (CausalMemory); the sampler's is its KV cache. Compression, storage formats and
paging are a memory's own business: the network does not know of them.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.kernels.attention import attention
from sprl.parallel.rules import local
from sprl.settings import Kernels


@runtime_checkable
class Memory(Protocol):
  """Takes in the new tokens' rotated keys and values, and answers their queries."""

  def attend(
    self, layer: int, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
  ) -> tuple[Float[Array, 'B T H D'], 'Memory']:
    """The queries' outputs, and the memory with the new keys and values in it."""
    ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalMemory:
  """A packed row as its own memory: a token sees earlier tokens of its segment and of the segment that it continues.

  Worked example, a prompt `ab` with two completions `cd` and `e`, then padding:

      tokens    a b c d e .
      segments  1 1 2 2 3 0      0 is padding, which nobody sees
      prefixes  0 0 1 1 1 0      segments 2 and 3 continue segment 1
      d sees a b c d;  e sees a b e
  """

  allowed: Bool[Array, 'B 1 T T']
  kernels: Kernels = field(default='auto', metadata={'static': True})  # what attends

  @classmethod
  def of(
    cls, segments: Int[Array, 'B T'], prefixes: Int[Array, 'B T'] | None = None, kernels: Kernels = 'auto'
  ) -> 'CausalMemory':
    """The memory of packed rows."""
    key, query = segments[:, None, :], segments[:, :, None]
    allowed = key == query
    if prefixes is not None:
      allowed |= key == prefixes[:, :, None]
    T = segments.shape[1]
    return cls((allowed & (key != 0) & jnp.tril(jnp.ones((T, T), bool)))[:, None], kernels)

  def attend(
    self, layer: int, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
  ) -> tuple[Float[Array, 'B T H D'], 'CausalMemory']:
    """Attention within the row; nothing is remembered between calls."""
    return _local_attention(q, k, v, self.allowed, self.kernels), self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EvictedMemory:
  """A packed row that forgets as the sampler's cache did (sparse_rollouts 6, after G-KV).

  `evicted[b, l, k, j]` is the position, in its own sequence, of the first query that no longer found token j in the cache of
  layer l and head k. The [B, K, T, T] mask exists for one layer at a time.
  """

  dense: CausalMemory
  positions: Int[Array, 'B T']
  evicted: Int[Array, 'B L K T']

  def attend(
    self, layer: int, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
  ) -> tuple[Float[Array, 'B T H D'], 'EvictedMemory']:
    """Attention to what the sampler still had."""
    had = self.positions[:, None, :, None] < self.evicted[:, layer, :, None, :]
    return _local_attention(q, k, v, self.dense.allowed & had, self.dense.kernels), self


def _local_attention(q, k, v, allowed, kernels):
  """Attention, which needs of other devices neither rows nor heads."""
  queries, keys = ('rows', None, 'heads', None), ('rows', None, 'kv_heads', None)
  seen = ('rows', None if allowed.shape[1] == 1 else 'kv_heads', None, None)
  attend = partial(attention, causal=True, kernels=kernels)
  return local(attend, (queries, keys, keys, seen), queries)(q, k, v, allowed)
