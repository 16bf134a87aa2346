"""Compression: choose what to keep, move it to the front, forget the rest (sparse_rollouts 4).

Rows are compressed a few at a time and in place, those that are due and no others: work and memory grow with what is
evicted, not with the batch. On a mesh every device compresses the rows and heads that it has.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.cache.layer import Layer
from sprl.cache.plan import CachePlan
from sprl.cache.scores import METHODS, View
from sprl.kernels.eviction import compact
from sprl.parallel.rules import total
from sprl.quant import fp8

SHARE = 0.05  # of the cache: what the compression of a block of rows may take beside it


def compress(
  plan: CachePlan,
  layer: Layer,
  due: Bool[Array, ' B'],
  occupied: Int[Array, ' B'],
  now: Int[Array, ' B'],
  gone: Int[Array, ' B'],
  k_scale: Float[Array, ''] | None = None,
  bias: Callable[[Int[Array, 'K S']], Float[Array, 'K S D']] | None = None,
  chosen: Int[Array, 'B N'] | None = None,
  choose: bool = True,
) -> tuple[Layer, Int[Array, 'B N'] | None]:
  """The layer with `budget` tokens in each row that is due; `occupied` slots hold tokens, the newest query stands at `now`.

  Keys are what is held, times `k_scale` and plus `bias` of their positions where they are FP8 codes.
  `gone` is what is written down for an evicted token: the first position that no longer sees it. `chosen` are the slots that
  one layer chooses for all of them (scope global): filled in where `choose` is True, obeyed elsewhere.
  """
  B = due.shape[0]
  size = _block(plan, B, layer.k.shape[2])
  order = jnp.where(jnp.arange(B) < jnp.sum(due), jnp.argsort(~due, stable=True), B)  # B: no row, its writes are dropped
  order = jnp.pad(order, (0, -B % size), constant_values=B)
  ordered = plan.settings.sort_kept  # the newest slots follow those chosen

  def block(i, carry):
    layer, chosen = carry
    rows = jax.lax.dynamic_slice_in_dim(order, i * size, size)
    row = jnp.minimum(rows, B - 1)
    part = jax.tree.map(lambda x: x[row], layer)
    if choose:
      keep, carried = jax.vmap(partial(_keep, plan, k_scale, bias))(part, occupied[row], now[row])
    else:
      assert chosen is not None
      keep = jnp.broadcast_to(chosen[row, None], (size, layer.k.shape[1], chosen.shape[1]))
      carried = part.carried
    beside = jax.vmap(partial(_compacted, plan))(part, carried, keep, occupied[row], gone[row])
    k, v = compact(layer.k, layer.v, rows, keep, ordered, plan.kernels)
    others = {name: getattr(layer, name).at[rows].set(new, mode='drop') for name, new in beside.items()}
    layer = replace(layer, k=k, v=v, **others)
    if choose and chosen is not None:
      chosen = chosen.at[rows].set(keep[:, 0], mode='drop')
    return layer, chosen

  blocks = (jnp.sum(due) + size - 1) // size
  return jax.lax.fori_loop(0, blocks, block, (layer, chosen))


def _block(plan: CachePlan, rows: int, slots: int) -> int:
  """How many rows are compressed at one time: the cosines of a row's keys, and copies of its keys and values, within SHARE."""
  D, itemsize = plan.head_dim, plan.storage.itemsize
  row = plan.kv_heads * slots * (4 * slots + D * (4 + 4 * itemsize))
  return max(1, min(rows, int(SHARE * plan.bytes(rows) / row)))


def _keep(plan, k_scale, bias, layer, occupied, now):
  """The slots to keep, [K, budget], of one row, and what the method carries on."""
  settings, a = plan.settings, plan.window
  K, S = layer.position.shape
  ring = jnp.arange(max(plan.queries, 1))
  held = now - (now - ring) % max(plan.queries, 1)  # the newest position that falls on each place of the ring
  G = plan.heads // plan.kv_heads
  q = jnp.zeros((K, G, 1, plan.head_dim)) if layer.queries is None else layer.queries
  carried = jnp.zeros((K, S)) if layer.carried is None else layer.carried
  keys = layer.keys if k_scale is None else fp8.decast(layer.keys, k_scale)
  view = View(
    k=keys if bias is None else keys + bias(layer.position),
    n=occupied,
    position=layer.position,
    q=q.reshape(K, G, -1, plan.head_dim).astype(jnp.float32),
    q_position=jnp.maximum(held, -1),
    carried=carried,
    kernels=plan.kernels,
  )
  score, carried = METHODS[settings.method].score(view, settings)
  if settings.scope != 'head':
    score = jnp.broadcast_to(total(jnp.sum(jnp.where(view.position >= 0, score, 0), axis=0), 'kv_heads'), score.shape)
  score = jnp.where(jnp.arange(S) < occupied - a, score, -jnp.inf)
  best = jax.lax.top_k(score, settings.budget - a)[1]
  best = jnp.sort(best, axis=-1) if settings.sort_kept else best
  newest = jnp.broadcast_to(occupied - a + jnp.arange(a), (K, a))
  return jnp.concatenate([best, newest], axis=-1), carried


def _compacted(plan, layer, carried, keep, occupied, gone):
  """What lies beside the keys and values of one row, by its name in Layer: kept slots at the front and the others empty."""
  K, S = layer.position.shape
  N = keep.shape[1]

  def front(x, empty):
    taken = jnp.take_along_axis(x, keep, axis=1)
    return jnp.concatenate([taken, jnp.full_like(x[:, N:], empty)], axis=1)

  beside = {'position': front(layer.position, -1)}
  if layer.carried is not None:
    beside['carried'] = front(carried, plan.initial)
  if layer.evicted is not None:
    head = jnp.arange(K)[:, None]
    kept = jnp.zeros((K, S), bool).at[head, keep].set(True)
    lost = (jnp.arange(S) < occupied) & ~kept
    place = jnp.where(lost, layer.position, layer.evicted.shape[1])
    beside['evicted'] = layer.evicted.at[head, place].set(gone, mode='drop')
  return beside
