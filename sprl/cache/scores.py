"""Which keys a compression keeps: the scoring methods of cache eviction (sparse_rollouts 5), for one layer of one row.

  rkv        mix * importance - (1 - mix) * redundancy
  snapkv     importance: what the last queries look at, max-pooled over neighbouring slots
  h2o        the attention that a key has received since it was written
  streaming  the first positions, then the newest
  keydiff    distance from the mean direction of the keys
  gkv        as rkv, with an importance that outlives compressions and both terms relative to their largest
  tova_like  the last query's attention (what the R-KV repository calls h2o)

The newest `window` slots are kept whatever their score, so scores are made for the old slots before them; elsewhere they are
finite and mean nothing. Slots that hold no key have no influence: S may be anything from n up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.kernels.eviction import similarity
from sprl.settings import Cache, Kernels

# Full float32: the shorter products that an accelerator takes by default would order close scores otherwise.
_product = partial(jnp.einsum, precision='highest')


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
  """One layer of one row's cache at the moment of a compression. A is the method's window, G the queries of a kv head."""

  k: Float[Array, 'K S D']  # keys, dequantised and rotated, in any width; those of slots from n on may be anything finite
  n: Int[Array, '']  # occupied slots, 0..n-1
  position: Int[Array, 'K S']  # absolute positions of the slots, -1 = empty
  q: Float[Array, 'K G A D']  # the last A queries, in any order
  q_position: Int[Array, ' A']  # their positions; -1 where the row has had fewer queries than A
  carried: Float[Array, 'K S']  # what the method carries per slot; gkv: -1 = no history yet
  kernels: Kernels = field(default='auto', metadata={'static': True})  # what compares keys


class Scored(NamedTuple):
  """The order in which slots are kept, and what the method carries on, before the survivors are gathered."""

  score: Float[Array, 'K S']  # higher = kept
  carried: Float[Array, 'K S']


class Method(NamedTuple):
  """A way of scoring, and what it needs of the sampler."""

  score: Callable[[View, Cache], Scored]
  window: Callable[[int], int] = lambda budget: 8  # budget -> newest tokens that are always kept, by default
  queries: bool = False  # the last `window` queries
  carries: bool = False  # a number per slot
  accumulates: bool = False  # the carried number grows by the attention probabilities of every step (done elsewhere)


def window(cache: Cache) -> int:
  """The newest tokens that a compression always keeps."""
  return cache.window or METHODS[cache.method].window(cache.budget)


# --- the methods -----------------------------------------------------------------------------------------------------


def rkv(view: View, cache: Cache) -> Scored:
  """R-KV (5.1)."""
  redundancy = _redundancy(view, cache.similarity, nearest_of_none=0 if cache.protect_slot0 else -1)
  return Scored(_mixed(_importance(view, cache), redundancy, cache.mix, 0.1), view.carried)


def snapkv(view: View, cache: Cache) -> Scored:
  """SnapKV at decode time (5.2)."""
  return Scored(_importance(view, cache), view.carried)


def h2o(view: View, cache: Cache) -> Scored:
  """H2O (5.3): the probabilities of every step, summed up by the sampler."""
  return Scored(view.carried, view.carried)


def streaming(view: View, cache: Cache) -> Scored:
  """StreamingLLM (5.4)."""
  recency = view.position.astype(jnp.float32)  # exact up to 2^24; also right where slots are not in order of position
  return Scored(jnp.where(view.position < cache.sinks, jnp.inf, recency), view.carried)


def keydiff(view: View, cache: Cache) -> Scored:
  """KeyDiff (5.5): minus the cosine with the mean of the unit keys."""
  direction = _unit(view.k.astype(jnp.float32))
  anchor = jnp.where(_occupied(view)[:, None], direction, 0).sum(axis=1) / jnp.maximum(view.n, 1)
  return Scored(-_product('ksd,kd->ks', direction, _unit(anchor)), view.carried)


def gkv(view: View, cache: Cache) -> Scored:
  """G-KV (5.6). Old slots carry their importance on; the window and empty slots carry -1, no history."""
  old = _old(view, cache)
  per_query = _attention(view).max(axis=1)
  now = _relative(_query_mean(per_query, view), old)
  lasting = jnp.maximum(cache.decay * view.carried, now)  # never below 0, so that a carried -1 loses
  redundancy = _relative(_redundancy(view, cache.similarity, nearest_of_none=-1), old)
  return Scored(_mixed(lasting, redundancy, cache.mix, 0.5), jnp.where(old, lasting, -1))


def tova_like(view: View, cache: Cache) -> Scored:
  """The last query's attention probabilities, meaned over the query heads of a group (end of 5.3): no sum, no pooling."""
  last = jnp.argmax(view.q_position)
  return Scored(_attention(view)[:, :, last].mean(axis=1), view.carried)


METHODS: dict[str, Method] = {
  'rkv': Method(rkv, queries=True),
  'snapkv': Method(snapkv, queries=True),
  'h2o': Method(h2o, window=lambda budget: budget // 2, carries=True, accumulates=True),
  'streaming': Method(streaming),
  'keydiff': Method(keydiff),
  'gkv': Method(gkv, window=lambda budget: 16, queries=True, carries=True),
  'tova_like': Method(tova_like, window=lambda budget: 1, queries=True),
}


# --- what they are made of -------------------------------------------------------------------------------------------


def _importance(view: View, cache: Cache) -> Float[Array, 'K S']:
  """I of R-KV: softmax over the old slots of the group's largest logit, meaned over queries, then pooled."""
  probability = jax.nn.softmax(_logits(view).max(axis=1), where=_old(view, cache))
  mean = _query_mean(probability, view)  # 0 behind the old slots, which the maximum of any old slot's neighbours passes over
  return jax.lax.reduce_window(mean, -jnp.inf, jax.lax.max, (1, cache.pool), (1, 1), 'SAME')


def _redundancy(view: View, threshold: float, nearest_of_none: int) -> Float[Array, 'K S']:
  """Rd: softmax over the keys of their mean cosine with all keys, each of which spares its most recent near-duplicate.

  A key without near-duplicates spares slot `nearest_of_none`.
  """
  total = similarity(view.k, view.n, threshold, nearest_of_none, view.kernels)
  return jax.nn.softmax(total / jnp.maximum(view.n, 1), where=_occupied(view))


def _attention(view: View) -> Float[Array, 'K G A S']:
  """Attention probabilities of each query head over the keys up to the query's position; 0 for a query that never was."""
  seen = _occupied(view) & (view.position[:, None] <= view.q_position[:, None])
  return jax.nn.softmax(_logits(view), where=seen[:, None])


def _logits(view: View) -> Float[Array, 'K G A S']:
  return _product('kgad,ksd->kgas', view.q, view.k) * view.k.shape[-1] ** -0.5


def _query_mean(x: Float[Array, 'K A S'], view: View) -> Float[Array, 'K S']:
  """Mean over the queries that there were; 0 of none."""
  was = view.q_position >= 0
  return jnp.where(was[:, None], x, 0).sum(axis=1) / jnp.maximum(was.sum(), 1)


def _relative(x: Float[Array, 'K S'], old: Bool[Array, ' S']) -> Float[Array, 'K S']:
  """x over its largest old value, and 0 in the other slots. Nothing but zeros stays so."""
  x = jnp.where(old, x, 0)
  largest = x.max(axis=-1, keepdims=True)
  return x / jnp.where(largest > 0, largest, 1)


def _mixed(importance, redundancy, mix: float, default: float) -> Float[Array, 'K S']:
  mix = default if mix < 0 else mix
  return mix * importance - (1 - mix) * redundancy


def _unit(x: Float[Array, '*n D']) -> Float[Array, '*n D']:
  return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-8)


def _occupied(view: View) -> Bool[Array, ' S']:
  return jnp.arange(view.k.shape[1]) < view.n


def _old(view: View, cache: Cache) -> Bool[Array, ' S']:
  """The slots before the window, among which the method chooses."""
  return jnp.arange(view.k.shape[1]) < view.n - window(cache)
