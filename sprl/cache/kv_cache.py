"""The sampler's KV cache: a fixed number of slots for each row, evicted to a budget and stored in FP8 if the layout says so.

A layer with a sliding window keeps a ring of its window instead, which the budget does not concern. Lengths, and the records of
kept tokens and evictions, are of the full layers: those without a window.

Dense, sparse and FP8 caches are the same cache with another CacheLayout. A forward pass of T tokens per row goes

    step  = Step(count, decoding=...)                        # the real tokens of each row
    out   = forward(..., CachedAttention(cache, step))       # each layer writes, compresses where due, and attends
    cache = out.attention.cache.advance(step)                # the tokens are part of the cache from now on
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.cache import ring
from sprl.cache.compaction import compress
from sprl.cache.key_bias import FINER, KeyBias
from sprl.cache.layer import LayerCache
from sprl.cache.layout import CacheLayout
from sprl.cache.row_blocks import replace_rows, take_rows
from sprl.cache.scales import Scales
from sprl.kernels.append import CodeForm, Projected, append, runs
from sprl.kernels.attention import attention, attention_share
from sprl.kernels.decode_attention import decode_attention
from sprl.kernels.packed_attention import Visible, packed_attention
from sprl.quant import fp8
from sprl.sharding.rules import is_names, local, shard

HEADS = ('rows', None, 'kv_heads', None)  # axis names of new queries, keys and values; query heads stay with their kv head


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
    own = self._of_rows
    taken = jax.tree.map(lambda names, x: shard(x[which], *names), own.axes, own, is_leaf=is_names)
    return dataclasses.replace(taken, scales=self.scales, bias=self.bias)

  def with_rows(self, which: Int[Array, ' P'], other: 'KVCache') -> 'KVCache':
    """Return this cache with row which[i] replaced by row i of `other`. A row beyond the last stands for no row.

    Both caches must have the same slots, scales and key biases.
    """
    mine, theirs = self._of_rows, other._of_rows
    changed = jax.tree.map(lambda x, new: x.at[which].set(new, mode='drop'), mine, theirs)
    return dataclasses.replace(changed, scales=self.scales, bias=self.bias)

  @property
  def of_rows(self) -> 'KVCache':
    """The arrays that have an entry for each row, without the layers."""
    none: Any = None  # not (), which would be the names of an array without axes
    return dataclasses.replace(self._of_rows, layers=none, block=None)

  def on_layers_of(self, other: 'KVCache', block: Int[Array, ' R'] | None) -> 'KVCache':
    """Return this cache with the layers of `other`. `block` has the numbers of its rows in `other`; None: all rows."""
    return dataclasses.replace(self, layers=other.layers, scales=other.scales, bias=other.bias, block=block)

  @property
  def _of_rows(self) -> 'KVCache':
    """The arrays that have an entry for each row."""
    return dataclasses.replace(self, scales=None, bias=None)

  def rescaled(self, scales: Scales, bias: KeyBias | None = None) -> 'KVCache':
    """Return the same keys and values, to FP8 precision, with the scales and key biases of other weights."""
    if self.scales is None:
      return self
    layers = []
    for i, held in enumerate(self.layers):
      k, v = jnp.swapaxes(self._keys(i, held), 1, 2), jnp.swapaxes(fp8.decast(held.values, self.scales.v[i]), 1, 2)
      codes = _codes(i, scales, bias, k, v)
      layers.append(dataclasses.replace(held, **{name: jnp.swapaxes(x, 1, 2) for name, x in codes.items()}))
    return dataclasses.replace(self, layers=tuple(layers), scales=scales, bias=bias)

  def _keys(self, layer, held, centred=False):
    """Return the keys of a layer as numbers; `centred`: without the mean of the rotated biases, if they are stored so."""
    if self.scales is None:
      return held.keys
    if self.bias is None:
      return fp8.decast(held.keys, self.scales.k[layer])
    k = self.bias.keys(layer, held.keys, held.second, self.scales.k[layer])
    return k if centred else self.bias.whole(layer, k)

  # --- in a forward pass ---------------------------------------------------------------------------------------------

  def attend(
    self, layer: int, step: Step, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
  ) -> tuple[Float[Array, 'B T H D'], 'KVCache']:
    """Write a layer's new keys and values, compress rows that are due, and return the outputs and the cache.

    New token t of row b goes to slot length[b] + t and attends to the slots up to its own. A decode step compresses before its
    query attends. A prompt is compressed after its queries attended; the layer then has the layout's slots at most, however
    many the prompt needed. Several tokens of decode steps do not compress. The rows' lengths stay as they are until `advance`.

    A layer with a sliding window writes to its ring, and its queries see the newest tokens of the window.
    """
    return self._on_each_device(layer, step, _attend, (q, k, v), (HEADS, HEADS, HEADS))

  def appends(self, layer: int, product: jax.ShapeDtypeStruct) -> bool:
    """Return whether `attend_projected` takes the joined product [B, N] of one token per row (sprl/kernels/append.py).

    The kernel does not take a block of rows, whose arrays are not those of the layers.
    """
    return self.block is None and runs(product, self.layers[layer].k, self.layout.kernels)

  def attend_projected(self, layer: int, step: Step, x: Projected) -> tuple[Float[Array, 'B 1 H D'], 'KVCache']:
    """Compute `attend` for one token per row, of which x is the joined product. `appends` must be true."""
    return self._on_each_device(layer, step, _attend_projected, (x,), (x.axes,))

  def _on_each_device(self, layer, step, attend, new, axes):
    alone = self._only(layer)
    attend = local(partial(attend, layer), (alone.axes, step.axes, *axes), (HEADS, alone.axes))
    out, after = attend(alone, step, *new)
    counts = {name: getattr(after, name) for name in ('saturated', 'saturated_queries')}
    return out, self._with(layer, after.layers[layer], chosen=after.chosen, **counts)

  def _append(self, layer, step, x):
    """Return the queries of one token per row, and the cache with the token: `_round_queries`, `_stored` and `_write` at once."""
    held, code, window = self.layers[layer], None, self.layout.sliding_window(layer)
    stored = {name: getattr(held, name) for name in ('k', 'v', 'second', 'position', 'queries')}
    counts = ['saturated'] + ['saturated_queries'] * self.layout.fp8_queries
    if self.scales is not None:
      mean, twice = (None, None) if self.bias is None else (self.bias.mean[layer], self.bias.twice[layer])
      code = CodeForm(self.scales, mean, twice, layer, self.layout.fp8_queries, FINER)
      stored |= {name: getattr(self, name) for name in counts}
    slot = self.length if window is None else self.seen % window
    slot = jnp.where(step.count > 0, slot, held.k.shape[2])
    q, new = append(x, {name: a for name, a in stored.items() if a is not None}, slot, self.seen, code)
    counted = {name: new.pop(name) for name in counts if name in new}
    return q, self._with(layer, dataclasses.replace(held, **new), **counted)

  def _round_queries(self, layer, step, q):
    """Return the queries rounded to FP8, and the cache that counts the numbers clamped (docs/methods/fp8.md, eq. 7)."""
    assert self.scales is not None
    scale = self.scales.q[layer]
    count = self.saturated_queries + _clamped(q, scale, step)
    return fp8.fake(q, scale), dataclasses.replace(self, saturated_queries=count)

  def _stored(self, layer, step, k, v):
    """Return new keys and values as they are stored, by the names of LayerCache, and the cache that counts clamped numbers."""
    if self.scales is None:
      return {'k': k, 'v': v}, self
    centred = k if self.bias is None else self.bias.centred(layer, k)
    saturated = self.saturated + _clamped(centred, self.scales.k[layer], step) + _clamped(v, self.scales.v[layer], step)
    return _codes(layer, self.scales, self.bias, k, v), dataclasses.replace(self, saturated=saturated)

  def _write(self, layer, step, q, stored):
    """Return the cache with the new tokens, as they are stored, in the slots after the row's."""
    (B, T, K), held = stored['k'].shape[:3], self.layers[layer]
    rows, slot = jnp.arange(B)[:, None], self.length[:, None] + jnp.arange(T)
    positions = self.seen[:, None] + jnp.arange(T)

    def write(store, new):
      return store.at[rows, :, slot].set(new.astype(store.dtype), mode='drop')

    new = dataclasses.replace(held, **{name: write(getattr(held, name), x) for name, x in stored.items()})
    if held.position is not None:
      new = dataclasses.replace(new, position=write(held.position, jnp.broadcast_to(positions[..., None], (B, T, K))))
    if held.queries is not None:
      new = dataclasses.replace(new, queries=self._newest_queries(held.queries, step, q))
    return self._with(layer, new)

  def _newest_queries(self, ring, step, q):
    """Return the ring of newest queries [B, H, A, D] with the new ones in it: position p is at index p % A."""
    newest = (self.seen + step.count - 1)[:, None]
    place = newest - (newest - jnp.arange(ring.shape[2])) % ring.shape[2] - self.seen[:, None]  # among the new; negative: old
    new = jnp.take_along_axis(jnp.swapaxes(q, 1, 2), jnp.maximum(place, 0)[:, None, :, None], axis=2)
    return jnp.where((place >= 0)[:, None, :, None], new.astype(ring.dtype), ring)

  def _attend_many(self, layer, step, q):
    """Return the outputs of several new queries, which attend to all slots up to their own, and the cache."""
    held, layout = self.layers[layer], self.layout
    k, v = self._numbers(layer, held, q.dtype)
    slot = self.length[:, None] + jnp.arange(q.shape[1])
    visible = Visible.up_to(slot)
    if held.carried is not None and layout.accumulates:
      real = jnp.arange(q.shape[1]) < step.count[:, None]
      held = dataclasses.replace(held, carried=held.carried + attention_share(q, k, visible.mask(k.shape[1]), real))
    out = packed_attention(q, k, v, visible, fp8_softmax=layout.fp8_softmax, kernels=layout.kernels)
    return out, self._with(layer, held)

  def _numbers(self, layer, held, dtype):
    """Return the keys and values of a layer as [B, S, K, D] in `dtype`. The mean of rotated key biases is left out."""
    k, v = self._keys(layer, held, centred=True), held.values
    v = v if self.scales is None else fp8.decast(v, self.scales.v[layer])
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    return (k, v) if self.scales is None else (k.astype(dtype), v.astype(dtype))

  def _attend_window(self, layer, window, step, q, stored):
    """Write the new tokens, as they are stored, to the ring of a layer with a sliding window.

    Return the outputs and the cache. Several queries see the ring before this step and the new tokens, because a later token may
    overwrite one that an earlier query sees.
    """
    before, layout, T = self.layers[layer], self.layout, q.shape[1]
    slots = before.k.shape[2]
    write = partial(ring.write, seen=self.seen, count=step.count, window=window)
    with jax.named_scope('write'):
      cache = self._with(layer, LayerCache(**{name: write(getattr(before, name), x) for name, x in stored.items()}))
    if T == 1:
      return cache._attend_token(layer, step, q[:, 0])
    query = self.seen[:, None] + jnp.arange(T)
    if slots < window:  # never wraps: slots are positions
      held, position = cache.layers[layer], jnp.arange(slots)[None]
    else:
      new = {name: jnp.swapaxes(x, 1, 2).astype(before.k.dtype) for name, x in stored.items()}
      held = LayerCache(**{name: jnp.concatenate([getattr(before, name), x], axis=2) for name, x in new.items()})
      position = jnp.concatenate([ring.positions(self.seen, slots, window), query], axis=1)
    distance = query[:, :, None] - position[:, None]
    allowed = (position >= 0)[:, None] & (distance >= 0) & (distance < window)
    k, v = self._numbers(layer, held, q.dtype)
    return attention(q, k, v, allowed[:, None], layout.fp8_softmax), cache

  def _attend_token(self, layer, step, q):
    """Return the outputs of one new query per row, whose token is written, and the cache."""
    if self.layout.sliding_window(layer) is not None:
      slots = self.layers[layer].k.shape[2]
      return self._attend_one(layer, step, q, jnp.where(step.count > 0, jnp.minimum(self.seen + 1, slots), 0))
    cache = self._compress(layer, step) if self.layout.sparse and step.decoding and step.compresses else self
    return cache._attend_one(layer, step, q, cache.attended(step))

  def _attend_one(self, layer, step, q, length):
    """Return the outputs of one new query per row, which attends to the row's first `length` slots, and the cache."""
    held, layout = self.layers[layer], self.layout
    scales = None if self.scales is None else (self.scales.k[layer], self.scales.v[layer])
    second = None if self.bias is None else (self.bias.queries(layer, q), fp8.from_bytes(held.second))
    accumulates = held.carried is not None and layout.accumulates
    found = decode_attention(
      q, held.keys, held.values, length=length, scales=scales, second=second, share=accumulates,
      fp8_softmax=layout.fp8_softmax, kernels=layout.kernels,
    )  # fmt: skip
    if held.carried is not None and found.share is not None:
      held = dataclasses.replace(held, carried=held.carried + jnp.where((step.count > 0)[:, None, None], found.share, 0))
    return found.out[:, None], self._with(layer, held)

  def _compress(self, layer, step):
    count = jnp.maximum(step.count, 1)  # a row without a new token is not due, but is computed to fill up a block of rows
    newest = self.seen + count - 1
    held, chosen = compress(
      self.layout,
      self.layers[layer],
      self.due(step),
      occupied=self.length + count,
      newest=newest,
      gone=newest if step.decoding else newest + 1,  # the queries of a prompt have attended to all of it
      keys=partial(self._keys, layer),
      chosen=self.chosen,
      choose=layer == self.layout.full_layers[0] or self.chosen is None,
      at_once=step.all_due,
    )
    return self._with(layer, held, chosen=chosen)

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

  def _only(self, layer: int) -> 'KVCache':
    """Return a copy with one of its layers."""
    layers = tuple(x if i == layer else None for i, x in enumerate(self.layers))
    return dataclasses.replace(self, layers=layers, bias=None if self.bias is None else self.bias.only(layer))

  def _with(self, layer: int, held: LayerCache, **changes: Any) -> 'KVCache':
    """Return a copy with one layer and other fields replaced."""
    return dataclasses.replace(self, layers=(*self.layers[:layer], held, *self.layers[layer + 1 :]), **changes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedAttention:
  """Attention to a cache during one step (`sprl.models.attention.Attention`)."""

  cache: KVCache
  step: Step

  def attend(
    self,
    layer: int,
    q: Float[Array, 'B T H D'],
    k: Float[Array, 'B T K D'],
    v: Float[Array, 'B T K D'],
    sliding_window: int | None = None,
  ) -> tuple[Float[Array, 'B T H D'], 'CachedAttention']:
    """Return the outputs of `KVCache.attend`, and the attention with the new cache."""
    assert sliding_window == self.cache.layout.sliding_window(layer), 'the cache has the layout of another model'
    out, cache = self.cache.attend(layer, self.step, q, k, v)
    return out, CachedAttention(cache, self.step)

  def appends(self, layer: int, product: jax.ShapeDtypeStruct) -> bool:
    """Return whether `attend_projected` takes the joined product [B, N] of one token per row."""
    return self.cache.appends(layer, product)

  def attend_projected(self, layer: int, x: Projected) -> tuple[Float[Array, 'B 1 H D'], 'CachedAttention']:
    """Return the outputs of `KVCache.attend_projected`, and the attention with the new cache."""
    out, cache = self.cache.attend_projected(layer, self.step, x)
    return out, CachedAttention(cache, self.step)


def _attend(layer: int, cache: KVCache, step: Step, q, k, v):
  """`KVCache.attend` for rows and kv heads of one device."""
  if cache.block is None:
    return _attend_rows(layer, cache, step, q, k, v)
  # The barrier makes the copy of the block's rows wait for the layer's input. Otherwise XLA may copy them in all layers at once.
  rows, q = jax.lax.optimization_barrier((cache.block, q))
  held = cache.layers[layer]
  out, part = _attend_rows(layer, cache._with(layer, take_rows(held, rows)), step, q, k, v)
  new = part.layers[layer]
  if cache.layout.sliding_window(layer) is None:  # the other slots of keys and values hold nothing, see `LayerCache`
    new = dataclasses.replace(new, **{name: x[:, :, : cache.layout.budget] for name, x in new.contents.items()})
  return out, part._with(layer, jax.tree.map(lambda x, y: x.at[rows, :, : y.shape[2]].set(y, mode='drop'), held, new))


def _attend_rows(layer, cache, step, q, k, v):
  layout = cache.layout
  if layout.fp8_queries and cache.scales is not None:
    q, cache = cache._round_queries(layer, step, q)
  with jax.named_scope('write'):
    stored, cache = cache._stored(layer, step, k, v)
  if (window := layout.sliding_window(layer)) is not None:
    return cache._attend_window(layer, window, step, q, stored)
  with jax.named_scope('write'):
    cache = cache._write(layer, step, q, stored)
  if q.shape[1] == 1:
    return cache._attend_token(layer, step, q[:, 0])
  out, cache = cache._attend_many(layer, step, q)
  if layout.sparse and not step.decoding and q.shape[1] > layout.budget:
    cache = cache._compress(layer, step)
    # Nothing in the next layer needs this compression, so without the barrier XLA delays it and holds all layers' whole prompts.
    out, held = jax.lax.optimization_barrier((out, cache.layers[layer].cut(layout.slots)))
    cache = cache._with(layer, held)
  return out, cache


def _attend_projected(layer: int, cache: KVCache, step: Step, x: Projected):
  """`KVCache.attend_projected` for rows of one device."""
  with jax.named_scope('write'):
    q, cache = cache._append(layer, step, x)
  return cache._attend_token(layer, step, q)


def _codes(layer, scales, bias, k, v):
  """Return the FP8 codes of keys and values [B, T, K, D] as bytes, by the names of LayerCache."""
  k = k if bias is None else bias.centred(layer, k)
  first = fp8.cast(k, scales.k[layer])
  codes = {'k': first, 'v': fp8.cast(v, scales.v[layer])}
  if bias is not None:
    codes['second'] = bias.second(layer, k, first, scales.k[layer])
  return {name: fp8.to_bytes(x) for name, x in codes.items()}


def _clamped(x, scale, step):
  """Return how many numbers of each row's real tokens FP8 clamps, by head: [B, T, N, D] -> [B, N]."""
  real = jnp.arange(x.shape[1]) < step.count[:, None]
  return jnp.sum(fp8.saturated(x, scale) & real[..., None, None], axis=(1, 3), dtype=jnp.int32)
