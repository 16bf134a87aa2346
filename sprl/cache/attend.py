"""Attend to the cache: what a forward pass does in each layer.

The network calls `CachedAttention` with the new queries, keys and values of a layer. On each device `_layer_step`:

1. rounds the queries to FP8 if the layout says so, and casts keys and values to the cache's format,
2. writes keys and values to the slots after the row's, or to the ring of a layer with a sliding window,
3. compresses the rows that are due (sprl/cache/compaction.py),
4. attends.

A decode step compresses before its query attends, a prompt after its queries have attended. On a GPU one kernel does 1 and 2 for
one token per row (sprl/kernels/append.py).
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sprl.cache import ring
from sprl.cache.compaction import compress
from sprl.cache.key_bias import FINER
from sprl.cache.kv_cache import KVCache, Step, fp8_codes
from sprl.cache.layer import LayerCache
from sprl.cache.row_blocks import take_rows
from sprl.kernels.append import CodeForm, Projected, append, runs
from sprl.kernels.attention import attention, attention_share
from sprl.kernels.decode_attention import decode_attention
from sprl.kernels.packed_attention import Visible, chunk_mask, packed_attention
from sprl.quant import fp8
from sprl.sharding.rules import local

HEADS = ('rows', None, 'kv_heads', None)  # axis names of new queries, keys and values; query heads stay with their kv head


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
    """Return the outputs of attention, and a `CachedAttention` with the new cache."""
    assert sliding_window == self.cache.layout.sliding_window(layer), 'the cache has the layout of another model'
    out, cache = attend(layer, self.cache, self.step, q, k, v)
    return out, CachedAttention(cache, self.step)

  def appends(self, layer: int, product: jax.ShapeDtypeStruct) -> bool:
    """Return whether `attend_projected` takes the joined product [B, N] of one token per row (sprl/kernels/append.py).

    The kernel does not take a block of rows, which is a copy of some rows of the layers.
    """
    return self.cache.block is None and runs(product, self.cache.layers[layer].k, self.cache.layout.kernels)

  def attend_projected(self, layer: int, x: Projected) -> tuple[Float[Array, 'B 1 H D'], 'CachedAttention']:
    """Compute `attend` for one token per row, of which x is the joined product. `appends` must be true."""
    out, cache = _on_each_device(layer, self.cache, self.step, _projected_step, (x,), (x.axes,))
    return out, CachedAttention(cache, self.step)


def attend(
  layer: int, cache: KVCache, step: Step, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
) -> tuple[Float[Array, 'B T H D'], KVCache]:
  """Write a layer's new keys and values, compress rows that are due, and return the outputs and the cache.

  New token t of row b goes to slot length[b] + t and attends to the slots up to its own. A decode step compresses before its
  query attends. In a cache that evicts, a prompt that is padded to more tokens than the budget is compressed after its queries
  have attended; the layer then has at most the layout's slots. A decode step of several tokens a row does not compress. The rows'
  lengths stay as they are until `KVCache.advance`.

  A layer with a sliding window writes to its ring, and its queries see the newest tokens of the window.
  """
  return _on_each_device(layer, cache, step, _block_step, (q, k, v), (HEADS, HEADS, HEADS))


def _layer_step(layer, cache, step, q, k, v):
  """Return the outputs of new queries, and the cache with the new tokens: `attend` for the rows and kv heads of one device."""
  layout = cache.layout
  if layout.fp8_queries and cache.scales is not None:
    q, cache = _round_queries(layer, cache, step, q)
  with jax.named_scope('write'):
    stored, cache = _stored(layer, cache, step, k, v)
  if (window := layout.sliding_window(layer)) is not None:
    return _attend_window(layer, cache, window, step, q, stored)
  with jax.named_scope('write'):
    cache = _write(layer, cache, step, q, stored)
  if q.shape[1] == 1:
    return _attend_token(layer, cache, step, q[:, 0])
  out, cache = _attend_many(layer, cache, step, q)
  if layout.sparse and not step.decoding and q.shape[1] > layout.budget:
    cache = _compress(layer, cache, step)
    # Nothing in the next layer needs this compression, so without the barrier XLA delays it and holds all layers' whole prompts.
    out, held = jax.lax.optimization_barrier((out, cache.layers[layer].cut(layout.slots)))
    cache = cache.with_layer(layer, held)
  return out, cache


def _projected_step(layer, cache, step, x):
  """Return what `_layer_step` returns for one token per row, of which x is the joined product."""
  with jax.named_scope('write'):
    q, cache = _append(layer, cache, step, x)
  return _attend_token(layer, cache, step, q)


# --- 1 and 2: store and write the new tokens ---------------------------------------------------------------------------


def _round_queries(layer, cache, step, q):
  """Return the queries rounded to FP8, and the cache that counts the numbers clamped (docs/methods/fp8.md, eq. 7)."""
  assert cache.scales is not None
  scale = cache.scales.q[layer]
  count = cache.saturated_queries + _clamped(q, scale, step)
  return fp8.fake(q, scale), dataclasses.replace(cache, saturated_queries=count)


def _stored(layer, cache, step, k, v):
  """Return new keys and values as they are stored, by the names of LayerCache, and the cache that counts clamped numbers."""
  if cache.scales is None:
    return {'k': k, 'v': v}, cache
  centred = k if cache.bias is None else cache.bias.centred(layer, k)
  saturated = cache.saturated + _clamped(centred, cache.scales.k[layer], step) + _clamped(v, cache.scales.v[layer], step)
  return fp8_codes(layer, cache.scales, cache.bias, k, v), dataclasses.replace(cache, saturated=saturated)


def _clamped(x, scale, step):
  """Return how many numbers of each row's real tokens FP8 clamps, by head: [B, T, N, D] -> [B, N]."""
  real = jnp.arange(x.shape[1]) < step.count[:, None]
  return jnp.sum(fp8.saturated(x, scale) & real[..., None, None], axis=(1, 3), dtype=jnp.int32)


def _write(layer, cache, step, q, stored):
  """Return the cache with the new tokens, as they are stored, in the slots after the row's."""
  (B, T, K), held = stored['k'].shape[:3], cache.layers[layer]
  rows, slot = jnp.arange(B)[:, None], cache.length[:, None] + jnp.arange(T)
  positions = cache.seen[:, None] + jnp.arange(T)

  def write(store, new):
    return store.at[rows, :, slot].set(new.astype(store.dtype), mode='drop')

  new = dataclasses.replace(held, **{name: write(getattr(held, name), x) for name, x in stored.items()})
  if held.position is not None:
    new = dataclasses.replace(new, position=write(held.position, jnp.broadcast_to(positions[..., None], (B, T, K))))
  if held.queries is not None:
    new = dataclasses.replace(new, queries=_newest_queries(cache, held.queries, step, q))
  return cache.with_layer(layer, new)


def _newest_queries(cache, held, step, q):
  """Return the ring of newest queries, `held` [B, H, A, D], with the new ones in it: position p is at index p % A."""
  newest = (cache.seen + step.count - 1)[:, None]
  place = newest - (newest - jnp.arange(held.shape[2])) % held.shape[2] - cache.seen[:, None]  # among the new; negative: old
  new = jnp.take_along_axis(jnp.swapaxes(q, 1, 2), jnp.maximum(place, 0)[:, None, :, None], axis=2)
  return jnp.where((place >= 0)[:, None, :, None], new.astype(held.dtype), held)


def _append(layer, cache, step, x):
  """Return the queries of one token per row, and the cache with the token: `_round_queries`, `_stored` and `_write` at once."""
  held, code, window = cache.layers[layer], None, cache.layout.sliding_window(layer)
  stored = {name: getattr(held, name) for name in ('k', 'v', 'second', 'position', 'queries')}
  counts = ['saturated'] + ['saturated_queries'] * cache.layout.fp8_queries
  if cache.scales is not None:
    mean, twice = (None, None) if cache.bias is None else (cache.bias.mean[layer], cache.bias.twice[layer])
    code = CodeForm(cache.scales, mean, twice, layer, cache.layout.fp8_queries, FINER)
    stored |= {name: getattr(cache, name) for name in counts}
  slot = cache.length if window is None else cache.seen % window
  slot = jnp.where(step.count > 0, slot, held.k.shape[2])
  q, new = append(x, {name: a for name, a in stored.items() if a is not None}, slot, cache.seen, code)
  counted = {name: new.pop(name) for name in counts if name in new}
  return q, cache.with_layer(layer, dataclasses.replace(held, **new), **counted)


# --- 3 and 4: compress and attend --------------------------------------------------------------------------------------


def _attend_token(layer, cache, step, q):
  """Return the outputs of one new query per row, whose token is written, and the cache."""
  if cache.layout.sliding_window(layer) is not None:
    slots = cache.layers[layer].k.shape[2]
    return _attend_one(layer, cache, step, q, jnp.where(step.count > 0, jnp.minimum(cache.seen + 1, slots), 0))
  cache = _compress(layer, cache, step) if cache.layout.sparse and step.decoding and step.compresses else cache
  return _attend_one(layer, cache, step, q, cache.attended(step))


def _compress(layer, cache, step):
  """Return the cache with the rows of the layer compressed that are due."""
  count = jnp.maximum(step.count, 1)  # a row without a new token is not due, but is computed to fill up a block of rows
  newest = cache.seen + count - 1
  held, chosen = compress(
    cache.layout,
    cache.layers[layer],
    cache.due(step),
    occupied=cache.length + count,
    newest=newest,
    gone=newest if step.decoding else newest + 1,  # the queries of a prompt have attended to all of it
    keys=partial(cache.keys, layer),
    values=partial(cache.values, layer),
    chosen=cache.chosen,
    choose=layer == cache.layout.full_layers[0] or cache.chosen is None,
    at_once=step.all_due,
  )
  return cache.with_layer(layer, held, chosen=chosen)


def _attend_one(layer, cache, step, q, length):
  """Return the outputs of one new query per row, which attends to the row's first `length` slots, and the cache."""
  held, layout = cache.layers[layer], cache.layout
  scales = None if cache.scales is None else (cache.scales.k[layer], cache.scales.v[layer])
  second = None if cache.bias is None else (cache.bias.queries(layer, q), fp8.from_bytes(held.second))
  accumulates = held.carried is not None and layout.accumulates
  found = decode_attention(
    q, held.keys, held.values, length=length, scales=scales, second=second, share=accumulates,
    fp8_softmax=layout.fp8_softmax, kernels=layout.kernels,
  )  # fmt: skip
  if held.carried is not None and found.share is not None:
    held = dataclasses.replace(held, carried=held.carried + jnp.where((step.count > 0)[:, None, None], found.share, 0))
  return found.out[:, None], cache.with_layer(layer, held)


def _attend_many(layer, cache, step, q):
  """Return the outputs of several new queries, which attend to all slots up to their own, and the cache."""
  held, layout = cache.layers[layer], cache.layout
  k, v = _keys_and_values(layer, cache, held, q.dtype)
  slot = cache.length[:, None] + jnp.arange(q.shape[1])
  visible = Visible.up_to(slot)
  if held.carried is not None and layout.accumulates:
    real = jnp.arange(q.shape[1]) < step.count[:, None]
    held = dataclasses.replace(held, carried=held.carried + attention_share(chunk_mask, q, k, visible, real))
  out = packed_attention(q, k, v, visible, fp8_softmax=layout.fp8_softmax, kernels=layout.kernels)
  return out, cache.with_layer(layer, held)


def _attend_window(layer, cache, window, step, q, stored):
  """Write the new tokens, as they are stored, to the ring of a layer with a sliding window.

  Return the outputs and the cache. Several queries see the ring before this step and the new tokens, because a later token may
  overwrite one that an earlier query sees.
  """
  before, layout, T = cache.layers[layer], cache.layout, q.shape[1]
  slots = before.k.shape[2]
  write = partial(ring.write, seen=cache.seen, count=step.count, window=window)
  with jax.named_scope('write'):
    cache = cache.with_layer(layer, LayerCache(**{name: write(getattr(before, name), x) for name, x in stored.items()}))
  if T == 1:
    return _attend_token(layer, cache, step, q[:, 0])
  query = cache.seen[:, None] + jnp.arange(T)
  if slots < window:  # never wraps: slots are positions
    held, position = cache.layers[layer], jnp.arange(slots)[None]
  else:
    new = {name: jnp.swapaxes(x, 1, 2).astype(before.k.dtype) for name, x in stored.items()}
    held = LayerCache(**{name: jnp.concatenate([getattr(before, name), x], axis=2) for name, x in new.items()})
    position = jnp.concatenate([ring.positions(cache.seen, slots, window), query], axis=1)
  distance = query[:, :, None] - position[:, None]
  allowed = (position >= 0)[:, None] & (distance >= 0) & (distance < window)
  k, v = _keys_and_values(layer, cache, held, q.dtype)
  return attention(q, k, v, allowed[:, None], layout.fp8_softmax), cache


def _keys_and_values(layer, cache, held, dtype):
  """Return the keys and values of a layer as [B, S, K, D] in `dtype`. The mean of rotated key biases is left out."""
  k, v = (jnp.swapaxes(x, 1, 2) for x in (cache.keys(layer, held, centred=True), cache.values(layer, held)))
  return (k, v) if cache.scales is None else (k.astype(dtype), v.astype(dtype))


# --- devices and blocks of rows ----------------------------------------------------------------------------------------


def _on_each_device(layer, cache, step, attend, new, axes):
  """Return what `attend` returns for a layer. `new` are its arrays of new tokens, `axes` their axis names."""
  alone = cache.only(layer)
  attend = local(partial(attend, layer), (alone.axes, step.axes, *axes), (HEADS, alone.axes))
  out, after = attend(alone, step, *new)
  counts = {name: getattr(after, name) for name in ('saturated', 'saturated_queries')}
  return out, cache.with_layer(layer, after.layers[layer], chosen=after.chosen, **counts)


def _block_step(layer, cache, step, q, k, v):
  """Return what `_layer_step` returns: for all rows, or for those of `cache.block`, which are copied and written back."""
  if cache.block is None:
    return _layer_step(layer, cache, step, q, k, v)
  # The barrier makes the copy of the block's rows wait for the layer's input. Otherwise XLA may copy them in all layers at once.
  rows, q = jax.lax.optimization_barrier((cache.block, q))
  held = cache.layers[layer]
  out, part = _layer_step(layer, cache.with_layer(layer, take_rows(held, rows)), step, q, k, v)
  new = part.layers[layer]
  if cache.layout.sliding_window(layer) is None:  # the other slots of keys and values hold nothing, see `LayerCache`
    new = dataclasses.replace(new, **{name: x[:, :, : cache.layout.budget] for name, x in new.contents.items()})
  new = jax.tree.map(lambda x, y: x.at[rows, :, : y.shape[2]].set(y, mode='drop'), held, new)
  return out, part.with_layer(layer, new)
