"""Eviction methods: the score of each slot of a cache (docs/methods/sparse.md, eq. 7 to 17).

  rkv        mix * importance - (1 - mix) * redundancy
  snapkv     importance: attention of the last queries, max-pooled over neighbouring slots
  h2o        attention that a key has received since it was written
  streaming  the first positions, then the newest
  keydiff    distance from the mean direction of the keys
  gkv        as rkv, with an importance that survives compressions; both terms are divided by their largest value
  tova_like  attention of the last query (called h2o in the R-KV repository)

A score function sees one layer of one row. Slots with higher scores are kept. The newest `window` slots are always kept, so the
method chooses among the old slots before them. Scores of other slots are arbitrary. Slots without a key have no influence on a
score, so S may be any number from n up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.config import Cache, Kernels
from sprl.foreign import own_function, referenced
from sprl.kernels.eviction import similarity

POOL = 7  # slots under the max-pool of importances
SIMILARITY = 0.5  # cosine above which two keys are near-duplicates
GKV_MIX = 0.5  # weight of importance in G-KV

# Full float32: the shorter products that an accelerator uses by default could swap two close scores.
_product = partial(jnp.einsum, precision='highest')


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
  """One layer of one row's cache at a compression. A is the number of stored queries, G the query heads of a kv head.

  `q`, `q_position` and `carried` are None where the method does not ask for them.
  """

  k: Float[Array, 'K S D']  # rotated keys, dequantised, in any dtype; slots from n on may hold any finite number
  n: Int[Array, '']  # occupied slots are 0..n-1
  position: Int[Array, 'K S']  # absolute position of each slot; slots from n on: any
  q: Float[Array, 'K G A D']  # with `queries`: the last A queries, in any order
  q_position: Int[Array, ' A']  # with `queries`: their positions; -1: the row has had fewer than A queries
  carried: Float[Array, 'K S']  # with `carries` or `accumulates`: the number of each slot; gkv: -1 means no history yet
  v: Float[Array, 'K S D']  # values, dequantised, in any dtype; slots from n on may hold any finite number
  kernels: Kernels = field(default='auto', metadata={'static': True})  # implementation of the comparison of keys


class Scored(NamedTuple):
  """The score of each slot, and the number that the method stores for it until the next compression; None: it stores none."""

  score: Float[Array, 'K S']  # higher is kept
  carried: Float[Array, 'K S'] | None


class Method(NamedTuple):
  """A score function, and what it needs from the sampler."""

  score: Callable[[View, Cache], Scored]
  window: Callable[[int], int] = lambda budget: 8  # budget -> default number of newest tokens that are always kept
  queries: bool = False  # needs the last `window` queries
  carries: bool = False  # stores a number for each slot, at first -1
  accumulates: bool = False  # stores a number, at first 0, to which the sampler adds each step's attention probabilities
  compares: bool = True  # compares all pairs of keys; the blocks of rows then leave room for the cosines


def method(name: str) -> Method:
  """Return the method of this name in METHODS, or that of a user's file, `file.py:NAME`: a Method, or its score function.

  Raises SettingsError for another name, and for a file without it.
  """
  if name in METHODS:
    return METHODS[name]
  found = referenced('config.cache.method', name, METHODS)
  return found if isinstance(found, Method) else Method(own_function('config.cache.method', name, METHODS))


def eviction_window(cache: Cache) -> int:
  """Return the number of newest tokens that a compression always keeps."""
  if cache.window is not None:
    return cache.window
  assert cache.budget is not None, 'a dense cache has no window'
  return method(cache.method).window(cache.budget)


# --- methods ---------------------------------------------------------------------------------------------------------


def rkv(view: View, cache: Cache) -> Scored:
  """R-KV (arXiv 2505.24133; docs/methods/sparse.md, eq. 7 to 10)."""
  mix = cache.rkv.mix
  redundancy = _redundancy(view, nearest_of_none=0)
  return Scored(mix * _importance(view, cache) - (1 - mix) * redundancy, view.carried)


def snapkv(view: View, cache: Cache) -> Scored:
  """SnapKV at decode time (arXiv 2404.14469; docs/methods/sparse.md, eq. 7)."""
  return Scored(_importance(view, cache), view.carried)


def h2o(view: View, cache: Cache) -> Scored:
  """H2O (arXiv 2306.14048; docs/methods/sparse.md, eq. 11): the probabilities that the sampler has added up."""
  return Scored(view.carried, view.carried)


def streaming(view: View, cache: Cache) -> Scored:
  """StreamingLLM (arXiv 2309.17453; docs/methods/sparse.md, eq. 12)."""
  recency = view.position.astype(jnp.float32)  # exact up to 2^24
  return Scored(jnp.where(view.position < cache.streaming.sinks, jnp.inf, recency), view.carried)


def keydiff(view: View, cache: Cache) -> Scored:
  """KeyDiff (arXiv 2504.15364; docs/methods/sparse.md, eq. 13): minus the cosine with the mean of the unit keys."""
  direction = _unit(view.k.astype(jnp.float32))
  anchor = jnp.where(_occupied(view)[:, None], direction, 0).sum(axis=1) / jnp.maximum(view.n, 1)
  return Scored(-_product('ksd,kd->ks', direction, _unit(anchor)), view.carried)


def gkv(view: View, cache: Cache) -> Scored:
  """G-KV (arXiv 2512.00504; docs/methods/sparse.md, eq. 14 to 16).

  Old slots store their importance until the next compression. The window and empty slots store -1: no history.
  """
  old = _old(view, cache)
  per_query = _attention(view).max(axis=1)
  now = _relative(_query_mean(per_query, view), old)
  lasting = jnp.maximum(cache.gkv.decay * view.carried, now)  # `now` is never negative, so it replaces a stored -1
  redundancy = _relative(_redundancy(view, nearest_of_none=-1), old)
  return Scored(GKV_MIX * lasting - (1 - GKV_MIX) * redundancy, jnp.where(old, lasting, -1))


def tova_like(view: View, cache: Cache) -> Scored:
  """Attention probabilities of the last query, averaged over the heads of a group (docs/methods/sparse.md, eq. 17)."""
  last = jnp.argmax(view.q_position)
  return Scored(_attention(view)[:, :, last].mean(axis=1), view.carried)


METHODS: dict[str, Method] = {
  'rkv': Method(rkv, queries=True),
  'snapkv': Method(snapkv, queries=True, compares=False),
  'h2o': Method(h2o, window=lambda budget: max(1, budget // 2), accumulates=True, compares=False),
  'streaming': Method(streaming, compares=False),
  'keydiff': Method(keydiff, compares=False),
  'gkv': Method(gkv, window=lambda budget: 16, queries=True, carries=True),
  'tova_like': Method(tova_like, window=lambda budget: 1, queries=True, compares=False),
}


# --- terms -----------------------------------------------------------------------------------------------------------


def _importance(view: View, cache: Cache) -> Float[Array, 'K S']:
  """Return the importance of eq. 7: a softmax over old slots of the group's largest logit, averaged over queries, then pooled."""
  probability = jax.nn.softmax(_logits(view).max(axis=1), where=_old(view, cache))
  mean = _query_mean(probability, view)  # 0 after the old slots, so the max-pool of an old slot ignores them
  return jax.lax.reduce_window(mean, -jnp.inf, jax.lax.max, (1, POOL), (1, 1), 'SAME')


def _redundancy(view: View, nearest_of_none: int) -> Float[Array, 'K S']:
  """Return the redundancy of eq. 9: a softmax over keys of their mean cosine with all keys.

  Each key spares its most recent near-duplicate (eq. 8). A key without one spares slot `nearest_of_none`; -1: no slot.
  """
  cosines = similarity(view.k, view.n, SIMILARITY, nearest_of_none, view.kernels)
  return jax.nn.softmax(cosines / jnp.maximum(view.n, 1), where=_occupied(view))


def _attention(view: View) -> Float[Array, 'K G A S']:
  """Return each query's probabilities over the keys up to its own position; 0 for a query that does not exist."""
  seen = _occupied(view) & (view.position[:, None] <= view.q_position[:, None])
  return jax.nn.softmax(_logits(view), where=seen[:, None])


def _logits(view: View) -> Float[Array, 'K G A S']:
  return _product('kgad,ksd->kgas', view.q, view.k) * view.k.shape[-1] ** -0.5


def _query_mean(x: Float[Array, 'K A S'], view: View) -> Float[Array, 'K S']:
  """Return the mean over the queries that exist, 0 if there is none."""
  exists = view.q_position >= 0
  return jnp.where(exists[:, None], x, 0).sum(axis=1) / jnp.maximum(exists.sum(), 1)


def _relative(x: Float[Array, 'K S'], old: Bool[Array, ' S']) -> Float[Array, 'K S']:
  """Return x divided by its largest old value, and 0 in other slots. If all old values are 0, they stay 0."""
  x = jnp.where(old, x, 0)
  largest = x.max(axis=-1, keepdims=True)
  return x / jnp.where(largest > 0, largest, 1)


def _unit(x: Float[Array, '*B D']) -> Float[Array, '*B D']:
  return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-8)


def _occupied(view: View) -> Bool[Array, ' S']:
  return jnp.arange(view.k.shape[1]) < view.n


def _old(view: View, cache: Cache) -> Bool[Array, ' S']:
  """Return the mask of the slots before the window, among which the method chooses."""
  return jnp.arange(view.k.shape[1]) < view.n - eviction_window(cache)
