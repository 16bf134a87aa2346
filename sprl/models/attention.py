"""The attention argument of the network: where keys and values come from, and which of them a query sees.

In each layer the network calls `out, attention = attention.attend(layer, q, k, v, sliding_window)`. The learner passes packed
rows (PackedAttention, EvictedAttention), the sampler its KV cache (sprl/cache/attend.py). Masks, storage formats and eviction
belong to the attention object.

Letters: B rows, T tokens, H query heads, K kv heads, L layers, D head width.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sprl.config import Kernels
from sprl.kernels.append import Projected
from sprl.kernels.packed_attention import Evictions, Visible, packed_attention
from sprl.models.sequence import KEYS, QUERIES, own_tokens, whole_rows
from sprl.sharding.rules import local


@runtime_checkable
class Attention(Protocol):
  """Anything that takes a layer's rotated keys and values and answers its queries."""

  def attend(
    self,
    layer: int,
    q: Float[Array, 'B T H D'],
    k: Float[Array, 'B T K D'],
    v: Float[Array, 'B T K D'],
    sliding_window: int | None = None,
  ) -> tuple[Float[Array, 'B T H D'], 'Attention']:
    """Return the outputs of the queries, and the attention object for the next layer.

    `sliding_window` is the number of newest tokens that a query of this layer sees, its own included; None: all tokens.
    """
    ...


@runtime_checkable
class Appends(Protocol):
  """An attention that may take the joined product of a token's q, k and v, and rotate them itself: a KV cache on a GPU."""

  def appends(self, layer: int, product: jax.ShapeDtypeStruct) -> bool:
    """Return whether `attend_projected` takes the product [B, N] of one token per row."""
    ...

  def attend_projected(self, layer: int, x: Projected) -> tuple[Float[Array, 'B 1 H D'], Attention]:
    """Return the outputs of the queries, and the attention object for the next layer."""
    ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedAttention:
  """Causal attention within packed rows. A token sees earlier tokens of its own segment and of the segment that it continues.

  Worked example, a prompt `ab` with two completions `cd` and `e`, then padding:

      tokens    a b c d e .
      segments  1 1 2 2 3 0      0 is padding, which no token sees
      prefixes  0 0 1 1 1 0      segments 2 and 3 continue segment 1
      d sees a b c d;  e sees a b e
  """

  visible: Visible
  positions: Int[Array, 'B T'] | None = None  # of each token in its sequence; layers with a sliding window need them
  kernels: Kernels = field(default='auto', metadata={'static': True})  # implementation of attention

  @classmethod
  def of(
    cls,
    segments: Int[Array, 'B T'],
    prefixes: Int[Array, 'B T'] | None = None,
    kernels: Kernels = 'auto',
    positions: Int[Array, 'B T'] | None = None,
  ) -> 'PackedAttention':
    """Return the attention of packed rows. `prefixes`: the segment that a token's segment continues, None if none does.

    The tokens of a segment are adjacent, behind those of the segment that it continues. `positions` are those of the tokens in
    their sequences. Without prefixes their default is the index in the row, from which the positions of a segment differ by a
    constant.
    """
    if positions is None and prefixes is None:
      positions = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    rows: Any = ('rows', None)
    in_rows = local(Visible.in_rows, (rows, None if prefixes is None else rows), Visible(rows, rows, rows, rows))
    return cls(in_rows(segments, prefixes), positions, kernels)

  def attend(
    self,
    layer: int,
    q: Float[Array, 'B T H D'],
    k: Float[Array, 'B T K D'],
    v: Float[Array, 'B T K D'],
    sliding_window: int | None = None,
  ) -> tuple[Float[Array, 'B T H D'], 'PackedAttention']:
    """Return the outputs within each row, and this object unchanged. Raises ValueError for a window without positions."""
    visible = self.visible
    if sliding_window is not None:
      if self.positions is None:
        raise ValueError(f'found a layer with a sliding window of {sliding_window}: expected the positions of rows with prefixes')
      visible = visible.within(sliding_window, self.positions)
    return _attend(q, k, v, visible, None, self.kernels), self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EvictedAttention:
  """Packed rows in which a query sees only the tokens that the sampler's cache still held (docs/methods/sparse.md, eq. 22).

  Layers with a sliding window evict nothing.
  """

  dense: PackedAttention
  positions: Int[Array, 'B T']  # position of each token in its own sequence
  evicted: Int[Array, 'B L K T']  # position of the first query that did not find the token in the cache of a layer and kv head

  def attend(
    self,
    layer: int,
    q: Float[Array, 'B T H D'],
    k: Float[Array, 'B T K D'],
    v: Float[Array, 'B T K D'],
    sliding_window: int | None = None,
  ) -> tuple[Float[Array, 'B T H D'], 'EvictedAttention']:
    """Return the outputs over the tokens that the sampler still held, and this object unchanged."""
    if sliding_window is not None:
      return self.dense.attend(layer, q, k, v, sliding_window)[0], self
    evictions = Evictions(self.positions, self.evicted[:, layer])
    return _attend(q, k, v, self.dense.visible, evictions, self.dense.kernels), self


def _attend(q, k, v, visible, evictions, kernels):
  """Return the attention of packed rows. Each device computes its own rows and heads."""
  names = visible.names(), None if evictions is None else evictions.names()
  attend = local(partial(packed_attention, kernels=kernels), (QUERIES, KEYS, KEYS, *names), QUERIES)
  return own_tokens(attend(*whole_rows(q, k, v), visible, evictions))
