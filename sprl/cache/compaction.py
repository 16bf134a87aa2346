"""Compress a layer's cache: score the slots, choose which to keep, move those to the front (docs/methods/sparse.md, eq. 4).

A long prompt is compressed after its queries have attended. A row that decodes is compressed before its query attends. The caller
distinguishes the two by `gone`, the position of the first query that does not find the evicted tokens.

Only rows that are due are compressed, in place and a few at a time. Work and memory therefore grow with the number of evictions,
not with the batch. On a mesh, each device compresses its own rows and heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.cache.eviction import View, method
from sprl.cache.layer import LayerCache
from sprl.cache.layout import CacheLayout
from sprl.cache.row_blocks import for_row_blocks, put_rows, take_rows
from sprl.config import SettingsError
from sprl.kernels.eviction import compact, compares_without_cosines
from sprl.sharding.rules import psum

SHARE = 0.05  # temporary memory of a compression, as a share of the cache


def compress(
  layout: CacheLayout,
  layer: LayerCache,
  due: Bool[Array, ' B'],
  *,
  occupied: Int[Array, ' B'],
  newest: Int[Array, ' B'],
  gone: Int[Array, ' B'],
  keys: Callable[[LayerCache], Float[Array, 'K S D']] = lambda layer: layer.keys,
  values: Callable[[LayerCache], Float[Array, 'K S D']] = lambda layer: layer.values,
  chosen: Int[Array, 'B N'] | None = None,
  choose: bool = True,
  at_once: bool = False,
) -> tuple[LayerCache, Int[Array, 'B N'] | None]:
  """Compress a layer to N = `budget` tokens in each row that is due.

  Args:
    layout: the cache's layout; it must be sparse.
    layer: the layer before the compression.
    due: the rows to compress.
    occupied: occupied slots of each row, including those of this step's tokens.
    newest: position of the newest query.
    gone: position of the first query that does not find an evicted token. The record of evictions stores it.
    keys: function that returns the keys of one row of the layer, decoded if the cache is FP8.
    values: function that returns the values of one row of the layer, decoded likewise. XLA removes them if no method reads them.
    chosen: with scope `global`, the slots that the first layer chose for all layers.
    choose: whether this layer chooses. If False, it keeps the `chosen` slots.
    at_once: compress all rows in one block, without a loop, and keep the results of the rows that are due.

  Returns:
    The compressed layer, and `chosen`, updated if this layer chooses.

  Raises SettingsError if the method's function returns anything but `Scored` with arrays [K, S].
  """
  B = due.shape[0]

  def compress_block(rows, carry):
    layer, chosen = carry
    part, kept, now, lost = (layer, chosen, newest, gone) if at_once else take_rows((layer, chosen, newest, gone), rows)
    # 0 if the row only fills up the block: the kernel compares no keys of it.
    count = jnp.where(rows < B, take_rows(occupied, rows), 0)
    if choose:
      keep, carried = jax.vmap(partial(_choose, layout, keys, values))(part, count, now)
    else:
      assert kept is not None
      keep = jnp.broadcast_to(kept[:, None], (len(rows), layer.k.shape[1], kept.shape[1]))
      carried = part.carried
    others = jax.vmap(partial(_compacted, layout))(part, carried, keep, count, lost)
    k, v = compact(layer.k, layer.v, rows, keep, layout.kernels)
    others = {name: put(getattr(layer, name), rows, new) for name, new in others.items()}
    if choose and chosen is not None:
      chosen = put(chosen, rows, keep[:, 0])
    return replace(layer, k=k, v=v, **others), chosen

  def put(old, rows, new):
    return jnp.where(due.reshape(-1, *[1] * (old.ndim - 1)), new, old) if at_once else put_rows(old, rows, new)

  with jax.named_scope('compress'):
    if at_once:
      return compress_block(jnp.where(due, jnp.arange(B), B), (layer, chosen))
    return for_row_blocks(due, rows_at_once(layout, B, layer.k.shape[2]), compress_block, (layer, chosen))


def rows_at_once(layout: CacheLayout, rows: int, slots: int) -> int:
  """Return how many rows to compress together, so that their cosines and their copies of keys and values stay within SHARE.

  Blocks are larger for methods that do not compare keys, and where the kernel compares them, because no cosines are stored.
  """
  return max(1, min(rows, int(SHARE * layout.kv_bytes(rows) / row_bytes(layout, slots))))


def row_bytes(layout: CacheLayout, slots: int) -> int:
  """Return the temporary memory of the compression of one row of a layer."""
  D, itemsize = layout.head_dim, layout.storage.itemsize
  keys = jax.ShapeDtypeStruct((layout.kv_heads, slots, D), jnp.float32 if layout.fp8 else layout.storage)
  stored = method(layout.settings.method).compares and not compares_without_cosines(keys, layout.kernels, local=True)
  cosines = 4 * slots if stored else 0
  return layout.kv_heads * slots * (cosines + D * (4 + 4 * itemsize))


def _choose(layout, keys, values, layer, occupied, newest):
  """Return the slots of one row to keep [K, N], in ascending order, and the method's stored numbers [K, S]."""
  settings, a = layout.settings, layout.window
  K, S = layer.position.shape
  none: Any = None  # in place of what the method does not ask for: a method that reads it all the same fails
  q = q_position = none
  if layer.queries is not None:
    q = layer.queries.reshape(K, layout.heads // layout.kv_heads, -1, layout.head_dim).astype(jnp.float32)
    # Index i holds the largest position p <= newest with p % A == i; A = layout.queries.
    q_position = jnp.maximum(newest - (newest - jnp.arange(layout.queries)) % layout.queries, -1)
  view = View(
    k=keys(layer),
    n=occupied,
    position=layer.position,
    q=q,
    q_position=q_position,
    carried=layer.carried,
    v=values(layer),
    kernels=layout.kernels,
  )
  score, carried = _checked(method(settings.method).score(view, settings), layout, (K, S))
  if settings.scope != 'head':
    score = jnp.broadcast_to(psum(jnp.sum(score, axis=0), 'kv_heads'), score.shape)
  score = jnp.where((jnp.arange(S) < occupied - a) & ~jnp.isnan(score), score, -jnp.inf)  # NaN would be the largest
  best = jnp.sort(jax.lax.top_k(score, layout.budget - a)[1], axis=-1)
  window = jnp.broadcast_to(occupied - a + jnp.arange(a), (K, a))
  return jnp.concatenate([best, window], axis=-1), carried


def _checked(returned, layout, shape):
  """Return what a method returned. Other shapes would be broadcast to [K, S] without an error."""
  found = returned if isinstance(returned, tuple) else (returned,)
  if [getattr(x, 'shape', None) for x in found] != [shape, shape if layout.carries else None]:
    described = ', '.join(f'{x.dtype}{list(x.shape)}' if hasattr(x, 'dtype') else str(x) for x in found)
    raise SettingsError(
      f'config.cache.method = {layout.settings.method!r}: its function returned {described}; expected a score [K, S] = '
      f'{list(shape)} and {"stored numbers of this shape" if layout.carries else "None, because it stores no numbers"}, as '
      'sprl.cache.eviction.Scored(score, carried)'
    )
  return returned


def _compacted(layout, layer, carried, keep, occupied, gone):
  """Return the new `position`, `second`, `carried` and `evicted` of one row, by name.

  Kept slots are at the front. The other slots are empty.
  """
  K, S = layer.position.shape
  N = keep.shape[1]

  def move(x, empty):
    kept = jnp.take_along_axis(x, keep, axis=1)
    return jnp.concatenate([kept, jnp.full_like(x[:, N:], empty)], axis=1)

  new = {'position': move(layer.position, -1)}
  if layer.second is not None:
    moved = jnp.take_along_axis(layer.second, keep[..., None], axis=1)
    new['second'] = jnp.concatenate([moved, layer.second[:, N:]], axis=1)
  if layer.carried is not None:
    new['carried'] = move(carried, layout.initial_carried)
  if layer.evicted is not None:
    head = jnp.arange(K)[:, None]
    kept = jnp.zeros((K, S), bool).at[head, keep].set(True)
    lost = (jnp.arange(S) < occupied) & ~kept
    place = jnp.where(lost, layer.position, layer.evicted.shape[1])  # out of bounds: dropped
    new['evicted'] = layer.evicted.at[head, place].set(gone, mode='drop')
  return new
