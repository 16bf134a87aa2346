"""Attention of the learner and of prefill. Each query sees at most two contiguous ranges of keys, so no mask is stored.

Such a range is called a stretch. In a packed row, the tokens of a segment are adjacent, and a segment comes after the segment
that it continues. A query therefore sees one stretch in its own segment and one in its prefix:

    row         a b c d e .       a prompt `ab` with two completions `cd` and `e`, then padding
    segments    1 1 2 2 3 0
    prefixes    0 0 1 1 1 0
    own         0 0 2 2 4 -       first key of the own stretch, which ends with the query itself
    prefix      - - 0 0 0 -       first key of the prefix stretch, which ends with b

A sliding window moves the first key of both stretches. On Hopper GPUs, the forward and backward kernels visit only the blocks
of keys that the stretches touch. The reference builds the mask of one chunk of queries at a time.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.config import Kernels
from sprl.kernels import hopper_packed_attention as hopper
from sprl.kernels.attention import by_chunks
from sprl.kernels.cost import Cost
from sprl.kernels.platform import chosen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visible:
  """The keys that each query sees: start <= s < end in its own segment, and prefix_start <= s < prefix_end in its prefix.

  A stretch is empty if its first key is not below its end. If both stretches have keys, prefix_end <= start. With a window, a
  query sees only those of these keys whose positions are less than `window` below its own position.
  """

  start: Int[Array, 'B T']
  end: Int[Array, 'B T']
  prefix_start: Int[Array, 'B T']
  prefix_end: Int[Array, 'B T']
  positions: Int[Array, 'B T'] | None = None  # in their sequences; within a segment they rise by one per token
  window: int | None = field(default=None, metadata={'static': True})

  @classmethod
  def in_rows(cls, segments: Int[Array, 'B T'], prefixes: Int[Array, 'B T'] | None = None) -> 'Visible':
    """Return the visible keys in packed rows: earlier tokens of the own segment, and the segment that `prefixes` names (0: none).

    Segments are numbered from 1 to at most T; 0 is padding. The tokens of a segment are adjacent. Segments that continue the same
    segment come after it and are adjacent to each other.
    """
    B, T = segments.shape
    rows, at = jnp.arange(B)[:, None], jnp.arange(T, dtype=jnp.int32)
    first = jnp.full((B, T + 1), T, jnp.int32).at[rows, segments].min(at)
    behind = jnp.zeros((B, T + 1), jnp.int32).at[rows, segments].max(at + 1).at[:, 0].set(0)
    start = jnp.where(segments > 0, jnp.take_along_axis(first, segments, axis=1), T)
    end = jnp.broadcast_to(at + 1, (B, T))
    if prefixes is None:
      return cls(start, end, jnp.zeros_like(start), jnp.zeros_like(start))
    return cls(start, end, jnp.take_along_axis(first, prefixes, axis=1), jnp.take_along_axis(behind, prefixes, axis=1))

  @classmethod
  def up_to(cls, key: Int[Array, 'B T']) -> 'Visible':
    """Let each query see the keys 0 to `key`, inclusive."""
    zeros = jnp.zeros_like(key)
    return cls(zeros, key + 1, zeros, zeros)

  def within(self, window: int, positions: Int[Array, 'B T']) -> 'Visible':
    """Restrict packed rows to the newest `window` tokens of each sequence, including the query's own token."""
    return replace(self, window=window, positions=positions)

  def narrowed(self) -> 'Visible':
    """Return an equivalent `Visible` without a window: the stretches exclude the keys outside of the window."""
    if self.window is None or self.positions is None:
      return self
    # Index of the prefix's key at the window's oldest position. It may lie outside of the prefix.
    first = jnp.take_along_axis(self.positions, jnp.minimum(self.prefix_start, self.start.shape[1] - 1), axis=1)
    covered = self.prefix_start + self.positions - first - (self.window - 1)
    start = jnp.maximum(self.start, self.end - self.window)
    return Visible(start, self.end, jnp.maximum(self.prefix_start, covered), self.prefix_end)

  def mask(self, S: int) -> Bool[Array, 'B 1 T S']:
    """Return whether query t sees key s."""
    key, seen = jnp.arange(S), jax.tree.map(lambda x: x[..., None], self.narrowed())
    return (((seen.start <= key) & (key < seen.end)) | ((seen.prefix_start <= key) & (key < seen.prefix_end)))[:, None]

  def names(self) -> 'Visible':
    """Return the axis names of the arrays."""
    rows: Any = ('rows', None)
    return jax.tree.map(lambda _: rows, self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Evictions:
  """When the sampler's cache evicted each key, for each kv head: queries at later positions do not see the key."""

  positions: Int[Array, 'B T']  # positions of the queries
  evicted: Int[Array, 'B K S']  # position of the first query that does not see the key

  def names(self) -> 'Evictions':
    """Return the axis names of the arrays."""
    positions: Any = ('rows', None)
    evicted: Any = ('rows', 'kv_heads', None)
    return Evictions(positions, evicted)


def packed_attention(
  q: Float[Array, 'B T H D'],
  k: Float[Array, 'B S K D'],
  v: Float[Array, 'B S K D'],
  visible: Visible,
  evictions: Evictions | None = None,
  fp8_softmax: bool = False,
  kernels: Kernels = 'auto',
) -> Float[Array, 'B T H D']:
  """Return softmax attention with grouped heads. Scores and softmax are float32. A query that sees no key gives zeros.

  `fp8_softmax` rounds the softmax weights to e4m3 and has no gradient. The kernel supports neither it nor evictions; both use the
  reference. Raises SettingsError if the kernel is forced and cannot take the shapes.
  """
  plain = evictions is None and not fp8_softmax
  if plain and chosen('attention of whole rows', kernels, lambda: hopper.obstacle(q, k)):
    return hopper.packed_attention(q, k, v, visible)
  return reference(q, k, v, visible, evictions, fp8_softmax)


def reference(
  q: Float[Array, 'B T H D'],
  k: Float[Array, 'B S K D'],
  v: Float[Array, 'B S K D'],
  visible: Visible,
  evictions: Evictions | None = None,
  fp8_softmax: bool = False,
) -> Float[Array, 'B T H D']:
  """Return `packed_attention` computed in jnp: the kernel's reference."""
  if evictions is None:
    return by_chunks(chunk_mask, q, k, v, visible.narrowed(), None, fp8_softmax)
  return by_chunks(_held, q, k, v, (visible.narrowed(), evictions.positions), evictions.evicted, fp8_softmax)


def chunk_mask(visible: Visible, _: None, keys: int) -> Bool[Array, 'B 1 Q S']:
  """Return the mask of a chunk of queries, for `by_chunks`. `visible` has no window."""
  return visible.mask(keys)


def _held(of_queries, evicted, keys):
  visible, positions = of_queries
  return visible.mask(keys) & (positions[:, None, :, None] < evicted[:, :, None, :])


def cost(B: int, T: int, H: int, K: int, D: int, backward: bool = False) -> Cost:
  """Return the cost of B rows in bfloat16, each one segment of T tokens. With `backward`, return the cost of both passes.

  The forward pass has two products of T^2 / 2 pairs per head and moves q, k, v and the output. The backward pass has five
  products. It moves the same arrays again, and the gradients of the output, q, k and v.
  """
  of_q, of_k = 2 * B * T * H * D, 2 * B * T * K * D
  if not backward:
    return Cost(2 * of_q + 2 * of_k, 2 * B * H * T * T * D)
  return Cost(6 * of_q + 6 * of_k, 7 * B * H * T * T * D)
