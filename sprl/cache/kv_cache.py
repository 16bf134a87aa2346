"""The sampler's KV cache: a fixed number of slots for each row, evicted to a budget and stored in FP8 if the layout says so.

A layer with a sliding window keeps a ring of its window instead, to which the budget does not apply. Lengths, and the records of
kept tokens and evictions, are those of the full layers, which have no window.

Dense, sparse and FP8 caches are the same cache with another CacheLayout. A forward pass of T tokens per row goes

    step  = Step(count, decoding=...)                        # the real tokens of each row
    out   = forward(..., CachedAttention(cache, step))       # each layer writes, compresses where due, attends (attend.py)
    cache = out.attention.cache.advance(step)                # the tokens are part of the cache from now on
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from sprl.cache.key_bias import KeyBias
from sprl.cache.layer import LayerCache
from sprl.cache.layout import CacheLayout
from sprl.cache.row_blocks import replace_rows
from sprl.cache.scales import Scales
from sprl.quant import fp8
from sprl.sharding.rules import is_names, local, shard


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
  """The tokens of one forward pass."""

  count: Int[Array, ' B']  # real tokens of each row; padding follows them
  decoding: bool = dataclasses.field(default=False, metadata={'static': True})  # they count as decode steps, which compress
  # Whether rows can be due. False is the caller's promise that none is: the program then has no compression.
  compresses: bool = dataclasses.field(default=True, metadata={'static': True})
  # The caller's promise that all rows with a token are due: they are compressed at once, not in a loop.
  all_due: bool = dataclasses.field(default=False, metadata={'static': True})

  @property
  def axes(self) -> 'Step':
    """The axis names of its array."""
    names: Any = ('rows',)
    return dataclasses.replace(self, count=names)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
  """The keys and values of all layers, and the state of each row.

  Keys are stored rotated at their true positions. Each layer has its own arrays: with donation a decode step then writes in
  place, where one stacked array would be copied.
  """

  layers: tuple[LayerCache, ...]
  length: Int[Array, ' B']  # occupied slots of the full layers
  seen: Int[Array, ' B']  # tokens taken in, which is the position of the next one
  decoded: Int[Array, ' B']  # tokens taken in by decode steps, which time the compressions
  saturated: Int[Array, 'B K']  # numbers of the row's keys and values that FP8 clamped
  saturated_queries: Int[Array, 'B H']  # numbers of its queries that FP8 clamped
  scales: Scales | None  # None: not FP8
  bias: KeyBias | None  # how FP8 keys are stored; None: without regard to their bias
  chosen: Int[Array, 'B N'] | None  # scope global: the slots that the first full layer kept
  layout: CacheLayout = dataclasses.field(metadata={'static': True})
  block: Int[Array, ' R'] | None = None  # a block of rows: the layers have all rows, the other arrays only these; None: all rows

  @classmethod
  def empty(
    cls,
    layout: CacheLayout,
    rows: int,
    slots: int | None = None,
    scales: Scales | None = None,
    bias: KeyBias | None = None,
  ) -> 'KVCache':
    """Return a cache of `rows` sequences without tokens, with `slots` slots per full layer (None: the layout's)."""
    zeros = jnp.zeros(rows, jnp.int32)
    shared = layout.sparse and layout.settings.scope == 'global'
    return cls(
      layers=tuple(
        LayerCache.empty(layout, rows, layout.slots_of(layer, slots), evicts=layout.sliding_window(layer) is None)
        for layer in range(layout.layers)
      ),
      length=zeros,
      seen=zeros + 0,  # separate arrays, because a buffer can be donated only once
      decoded=zeros + 0,
      saturated=jnp.zeros((rows, layout.kv_heads), jnp.int32),
      saturated_queries=jnp.zeros((rows, layout.heads), jnp.int32),
      scales=scales if layout.fp8 else None,
      bias=bias if layout.key_bias else None,
      chosen=jnp.zeros((rows, layout.budget), jnp.int32) if shared else None,
      layout=layout,
    )

  @staticmethod
  def bytes(layout: CacheLayout, rows: int) -> int:
    """Bytes of the whole cache of `rows` sequences: keys, values, arrays of eviction, FP8 scales and key biases."""

    def made():
      scales = Scales(*(jnp.ones(layout.layers) for _ in range(3)))
      vectors = (jnp.zeros(layout.kv_heads * layout.head_dim),) * layout.layers
      return KVCache.empty(layout, rows, scales=scales, bias=KeyBias.of(layout, vectors) if layout.key_bias else None)

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(made)))

  # --- between forward passes ----------------------------------------------------------------------------------------

  def due(self, step: Step) -> Bool[Array, ' B']:
    """Return the rows that this step compresses: at an interval, or when the prompt is read (docs/methods/sparse.md, eq. 3)."""
    if not (self.layout.sparse and step.compresses):
      return jnp.zeros(self.length.shape, bool)
    over = (step.count > 0) & (self.length + step.count > self.layout.budget)
    return over & ((self.decoded + 1) % self.layout.settings.interval == 0) if step.decoding else over

  def attended(self, step: Step) -> Int[Array, ' B']:
    """Return the slots of a full layer that the query of a decode step sees, its own included (docs/methods/sparse.md, eq. 6).

    A row without a token sees none, so attention reads none of its slots.
    """
    return jnp.where(step.count > 0, self._length_after(step), 0)

  def advance(self, step: Step) -> 'KVCache':
    """Return the cache after the forward pass of a step, with the step's real tokens in it."""
    return dataclasses.replace(
      self,
      seen=self.seen + step.count,
      length=self._length_after(step),
      decoded=self.decoded + step.count if step.decoding else self.decoded,
    )

  def _length_after(self, step):
    length = self.length + step.count
    return jnp.where(self.due(step), self.layout.budget, length) if self.layout.sparse and step.compresses else length

  def fork(self, other: 'KVCache', parent: Int[Array, ' B'], take: Bool[Array, ' B']) -> 'KVCache':
    """Return this cache with row b replaced by row parent[b] of `other` where take[b].

    `other` may have fewer slots than this cache. With donation the other rows are neither read nor written.
    """
    initial = {'position': -1, 'carried': self.layout.initial_carried}
    layers = partial(replace_rows, empty=lambda field: initial.get(field, 0))

    def row(mine, theirs):
      theirs = shard(theirs, *[None] * theirs.ndim)[parent]
      return jnp.where(take.reshape(-1, *[1] * (mine.ndim - 1)), theirs, mine)

    # A row may start from any prompt, so each device with rows gets the prompts' keys and values of its heads.
    mine, theirs = (tuple(layer.axes for layer in cache.layers) for cache in (self, other))
    theirs = jax.tree.map(lambda names: (None, *names[1:]), theirs, is_leaf=is_names)
    return dataclasses.replace(
      self,
      layers=local(layers, (mine, theirs, ('rows',), ('rows',)), mine)(self.layers, other.layers, parent, take),
      length=row(self.length, other.length),
      seen=row(self.seen, other.seen),
      decoded=row(self.decoded, other.decoded),
      saturated=row(self.saturated, other.saturated),
      saturated_queries=row(self.saturated_queries, other.saturated_queries),
    )

  def rows(self, which: Int[Array, ' P']) -> 'KVCache':
    """Return the cache of these rows."""
    own = self.without_scales
    taken = jax.tree.map(lambda names, x: shard(x[which], *names), own.axes, own, is_leaf=is_names)
    return dataclasses.replace(taken, scales=self.scales, bias=self.bias)

  def with_rows(self, which: Int[Array, ' P'], other: 'KVCache') -> 'KVCache':
    """Return this cache with row which[i] replaced by row i of `other`. A row beyond the last stands for no row.

    Both caches must have the same slots, scales and key biases.
    """
    mine, theirs = self.without_scales, other.without_scales
    changed = jax.tree.map(lambda x, new: x.at[which].set(new, mode='drop'), mine, theirs)
    return dataclasses.replace(changed, scales=self.scales, bias=self.bias)

  def on_layers_of(self, other: 'KVCache', block: Int[Array, ' R'] | None) -> 'KVCache':
    """Return this cache with the layers of `other`. `block` has the numbers of its rows in `other`; None: all rows."""
    return dataclasses.replace(self, layers=other.layers, scales=other.scales, bias=other.bias, block=block)

  @property
  def row_state(self) -> 'KVCache':
    """The arrays that have an entry for each row, without the layers."""
    none: Any = None  # not (), which would be the names of an array without axes
    return dataclasses.replace(self.without_scales, layers=none, block=None)

  @property
  def without_scales(self) -> 'KVCache':
    """The arrays that have an entry for each row."""
    return dataclasses.replace(self, scales=None, bias=None)

  def rescaled(self, scales: Scales, bias: KeyBias | None = None) -> 'KVCache':
    """Return the same keys and values, to FP8 precision, with the scales and key biases of other weights."""
    if self.scales is None:
      return self
    layers = []
    for i, held in enumerate(self.layers):
      k, v = (jnp.swapaxes(x, 1, 2) for x in (self.keys(i, held), self.values(i, held)))
      codes = fp8_codes(i, scales, bias, k, v)
      layers.append(dataclasses.replace(held, **{name: jnp.swapaxes(x, 1, 2) for name, x in codes.items()}))
    return dataclasses.replace(self, layers=tuple(layers), scales=scales, bias=bias)

  def keys(self, layer: int, held: LayerCache, centred: bool = False) -> Float[Array, '*B K S D']:
    """Return the keys of a layer as numbers; `centred`: without the mean of the rotated biases, if they are stored so."""
    if self.scales is None:
      return held.keys
    if self.bias is None:
      return fp8.decast(held.keys, self.scales.k[layer])
    assert held.second is not None
    k = self.bias.keys(layer, held.keys, held.second, self.scales.k[layer])
    return k if centred else self.bias.whole(layer, k)

  def values(self, layer: int, held: LayerCache) -> Float[Array, '*B K S D']:
    """Return the values of a layer as numbers."""
    return held.values if self.scales is None else fp8.decast(held.values, self.scales.v[layer])

  # --- layers and meshes ---------------------------------------------------------------------------------------------

  @property
  def axes(self) -> 'KVCache':
    """The axis names of its arrays: rows and kv heads are split over devices."""
    row: Any = ('rows',)
    others: dict[str, Any] = {
      'saturated': ('rows', 'kv_heads'),
      'saturated_queries': ('rows', 'kv_heads'),
      'scales': None if self.scales is None else jax.tree.map(lambda x: (None,), self.scales),
    }
    return dataclasses.replace(
      self,
      layers=self.layers and tuple(None if layer is None else layer.axes for layer in self.layers),
      **dict.fromkeys(('length', 'seen', 'decoded'), row),
      **others,
      bias=None if self.bias is None else self.bias.axes,
      chosen=None if self.chosen is None else ('rows', None),
      block=None if self.block is None else row,
    )

  def only(self, layer: int) -> 'KVCache':
    """Return a copy with one of its layers."""
    layers = tuple(x if i == layer else None for i, x in enumerate(self.layers))
    return dataclasses.replace(self, layers=layers, bias=None if self.bias is None else self.bias.only(layer))

  def with_layer(self, layer: int, held: LayerCache, **changes: Any) -> 'KVCache':
    """Return a copy with one layer and other fields replaced."""
    return dataclasses.replace(self, layers=(*self.layers[:layer], held, *self.layers[layer + 1 :]), **changes)


def fp8_codes(
  layer: int, scales: Scales, bias: KeyBias | None, k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
) -> dict[str, UInt8[Array, 'B T K _']]:
  """Return the FP8 codes of keys and values as bytes, by the names of LayerCache."""
  k = k if bias is None else bias.centred(layer, k)
  first = fp8.cast(k, scales.k[layer])
  codes = {'k': first, 'v': fp8.cast(v, scales.v[layer])}
  if bias is not None:
    codes['second'] = bias.second(layer, k, first, scales.k[layer])
  return {name: fp8.to_bytes(x) for name, x in codes.items()}
