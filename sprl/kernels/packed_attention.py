"""Attention of the learner and of prefill. Each query sees at most two stretches of adjacent keys, so there is no mask.

The tokens of a segment of a packed row are adjacent, and a segment comes after the segment that it continues. So a query sees a
stretch of its own segment, and a stretch of the prefix:

    row         a b c d e .       a prompt `ab` with two completions `cd` and `e`, then padding
    segments    1 1 2 2 3 0
    prefixes    0 0 1 1 1 0
    own         0 0 2 2 4 -       first key of the own stretch, which ends with the token itself
    prefix      - - 0 0 0 -       first key of the prefix, which ends behind b

A sliding window moves the first key of both stretches. On Hopper GPUs a kernel reads the stretches and visits the blocks of keys
that they touch, in both directions. The reference makes the mask of one chunk of queries at a time from them.
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
  """The keys that each query sees: start <= s < end and, of its prefix, prefix_start <= s < prefix_end.

  A stretch is empty if its first key is not below its end. prefix_end <= start where both have keys. With a window, a query sees
  only the keys of these whose positions are less than `window` below its own.
  """

  start: Int[Array, 'B T']
  end: Int[Array, 'B T']
  prefix_start: Int[Array, 'B T']
  prefix_end: Int[Array, 'B T']
  positions: Int[Array, 'B T'] | None = None  # in the tokens' sequences; they rise by one from token to token of a segment
  window: int | None = field(default=None, metadata={'static': True})

  @classmethod
  def in_rows(cls, segments: Int[Array, 'B T'], prefixes: Int[Array, 'B T'] | None = None) -> 'Visible':
    """Return what tokens of packed rows see: earlier tokens of their segment, and the segment that `prefixes` names (0: none).

    Segments are numbered from 1 to T at most; 0 is padding. The tokens of a segment are adjacent. The segments that continue
    another are behind it and adjacent to each other.
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
    """Return what queries see that see all keys up to number `key`, which is included."""
    zeros = jnp.zeros_like(key)
    return cls(zeros, key + 1, zeros, zeros)

  def within(self, window: int, positions: Int[Array, 'B T']) -> 'Visible':
    """Return what tokens of packed rows see of the newest `window` tokens of their sequences, their own included."""
    return replace(self, window=window, positions=positions)

  def narrowed(self) -> 'Visible':
    """Return the same with the window in the stretches."""
    if self.window is None or self.positions is None:
      return self
    # The window covers the keys from here on, counted in the numbers of the prefix's keys.
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
  """When the sampler's cache evicted each key, by kv head: queries from that position on do not see it."""

  positions: Int[Array, 'B T']  # of the queries
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
  """Softmax attention with grouped heads; scores and softmax are float32. A query that sees no key gives zeros.

  The kernel computes neither evictions nor `fp8_softmax`, which rounds the softmax weights to e4m3 and has no gradient: these
  always use the reference. Raises SettingsError if the kernel is forced and cannot take the shapes.
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
  """Compute `packed_attention` in jnp."""
  if evictions is None:
    return by_chunks(_seen, q, k, v, visible.narrowed(), None, fp8_softmax)
  return by_chunks(_held, q, k, v, (visible.narrowed(), evictions.positions), evictions.evicted, fp8_softmax)


def _seen(visible, _, keys):
  return visible.mask(keys)


def _held(of_queries, evicted, keys):
  visible, positions = of_queries
  return visible.mask(keys) & (positions[:, None, :, None] < evicted[:, :, None, :])


def cost(B: int, T: int, H: int, K: int, D: int, backward: bool = False) -> Cost:
  """Return the cost of B rows, each one segment of T tokens, in bfloat16; with `backward`, of both passes.

  The forward pass has two products of T^2 / 2 pairs per head and moves q, k, v and the output. The backward pass has five
  products and moves these again, the output's gradient, and three gradients.
  """
  of_q, of_k = 2 * B * T * H * D, 2 * B * T * K * D
  if not backward:
    return Cost(2 * of_q + 2 * of_k, 2 * B * H * T * T * D)
  return Cost(6 * of_q + 6 * of_k, 7 * B * H * T * T * D)
