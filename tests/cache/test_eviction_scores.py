"""Every scoring method against its loops, and what the spec says that each of them keeps."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scores_oracle as oracle

from sprl.cache.scores import METHODS, View, window
from sprl.settings import Cache

THRESHOLDS = (0.2, 0.5, 0.7)
SHAPES = [  # B, K, G, A, S, D
  (4, 2, 2, 8, 40, 8),
  (4, 1, 3, 5, 24, 4),
  (4, 3, 1, 2, 16, 16),
]
SETTINGS = [
  Cache(method='rkv'),
  Cache(method='rkv', mix=0.4, pool=3, similarity=0.2),
  Cache(method='rkv', mix=0.0, protect_slot0=False),
  Cache(method='rkv', similarity=0.7, protect_slot0=False),
  Cache(method='snapkv'),
  Cache(method='snapkv', pool=1),
  Cache(method='h2o'),
  Cache(method='streaming'),
  Cache(method='streaming', sinks=1),
  Cache(method='keydiff'),
  Cache(method='gkv'),
  Cache(method='gkv', mix=0.9, decay=0.3, similarity=0.7),
  Cache(method='gkv', mix=0.0, similarity=0.2),
  Cache(method='tova_like'),
]


def name(setting):
  changed = {k: v for k, v in vars(setting).items() if v != getattr(Cache(method=setting.method), k)}
  return '-'.join([setting.method, *(f'{k}={v}' for k, v in changed.items())])


def scored(view, cache):
  return jax.jit(jax.vmap(METHODS[cache.method].score, in_axes=(0, None)), static_argnums=1)(view, cache)


def with_window(cache, a):
  return Cache(**{**vars(cache), 'window': a})


def keys(rng, n, D):
  """Keys of which no two have a cosine that float32 could put on the other side of a threshold."""
  while True:
    k = rng.normal(size=(n, D)).astype(np.float32)
    direction = k / np.linalg.norm(k, axis=-1, keepdims=True)
    if np.abs((direction @ direction.T)[..., None] - THRESHOLDS).min() > 2e-4:
      return k


@functools.cache
def random_view(shape, seed=0):
  """Rows of ragged length, and with all, some, one and none of their last queries."""
  B, K, G, A, S, D = shape
  rng = np.random.default_rng(seed)
  n = np.array([S, A + 1, S - 3, (A + S) // 2][:B], np.int32)
  k = rng.normal(size=(B, K, S, D)).astype(np.float32)
  position = np.full((B, K, S), -1, np.int32)
  q_position = np.full((B, A), -1, np.int32)
  for b in range(B):
    newest = np.arange(A) + 2 * S
    for h in range(K):
      k[b, h, : n[b]] = keys(rng, n[b], D)
      before = np.sort(rng.choice(2 * S, n[b] - A, replace=False))
      before[0] = 0  # a sink in every row
      position[b, h, : n[b]] = [*before, *newest]
    there = [A, A // 2, 1, 0][b]
    q_position[b, :there] = newest[A - there :]
    q_position[b] = rng.permutation(q_position[b])
  carried = np.where(rng.random((B, K, S)) < 0.3, -1, rng.random((B, K, S))).astype(np.float32)
  q = 2 * rng.normal(size=(B, K, G, A, D)).astype(np.float32)
  return View(k, n, position, q, q_position, carried)


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('cache', SETTINGS, ids=name)
def test_a_method_scores_as_its_loops_do(cache, shape):
  B, K, _, a, _, _ = shape
  view, cache = random_view(shape), with_window(cache, a)
  score, carried = map(np.asarray, scored(view, cache))
  assert score.dtype == carried.dtype == np.float32
  for b in range(B):
    n = view.n[b]
    for h in range(K):
      k = view.k[b, h, :n]
      assert np.abs(oracle.cosines(k.astype(float)) - cache.similarity).min() > 1e-4
      mine = (k, view.position[b, h, :n], view.q[b, h], view.q_position[b], view.carried[b, h, :n])
      expected = oracle.score(cache.method, *mine, a, cache)
      np.testing.assert_allclose(score[b, h, : n - a], expected[0], atol=1e-5)
      np.testing.assert_allclose(carried[b, h, : n - a], expected[1], atol=1e-5)


def test_importance_is_zero_without_queries():
  view = random_view(SHAPES[0])
  assert np.all(view.q_position[3] < 0)
  for method, zero in (('snapkv', 0), ('tova_like', 0), ('gkv', np.maximum(0.8 * view.carried[3], 0))):
    score = scored(view, Cache(method=method, window=8, mix=1.0)).score[3]
    old = slice(0, view.n[3] - 8)
    np.testing.assert_allclose(score[:, old], np.broadcast_to(zero, score.shape)[:, old], atol=1e-6)


def test_gkv_has_no_history_for_its_window():
  view = random_view(SHAPES[0])
  carried = scored(view, Cache(method='gkv', window=8)).carried
  for b, n in enumerate(view.n):
    assert np.all(carried[b, :, : n - 8] >= 0)
    np.testing.assert_array_equal(carried[b, :, n - 8 :], -1)


def test_gkv_without_history_or_decay_has_only_the_present():
  view = random_view(SHAPES[0])
  new = replace(view, carried=np.full_like(view.carried, -1))
  present = scored(new, Cache(method='gkv', window=8))
  forgotten = scored(view, Cache(method='gkv', window=8, decay=0.0))
  jax.tree.map(np.testing.assert_array_equal, present, forgotten)
  assert not np.allclose(present.score, scored(view, Cache(method='gkv', window=8)).score)


# --- what must not matter --------------------------------------------------------------------------------------------


def compare(a, b, n):
  for row, length in enumerate(n):
    for x, y in zip(a, b):
      np.testing.assert_allclose(x[row, :, :length], y[row, :, :length], atol=1e-6)


@pytest.mark.parametrize('cache', SETTINGS, ids=name)
def test_empty_slots_have_no_influence(cache):
  view, cache = random_view(SHAPES[0]), with_window(cache, 8)
  B, K, S, _ = view.k.shape
  usual = scored(view, cache)
  garbage = np.where(np.arange(S) < view.n[:, None], 0, 1e6).astype(np.float32)[:, None]
  compare(usual, scored(replace(view, k=view.k + garbage[..., None], carried=view.carried + garbage), cache), view.n)

  # More slots, whose keys are all the same and thus near-duplicates of each other and of the last key.
  def longer(x, fill):
    return np.concatenate([x, np.broadcast_to(fill, (B, K, 25, *x.shape[3:]))], axis=2)

  more = replace(
    view,
    k=longer(view.k, view.k[:, :, -1:]),
    position=longer(view.position, np.int32(-1)),
    carried=longer(view.carried, np.float32(9)),
  )
  compare(usual, scored(more, cache), view.n)


@pytest.mark.parametrize('cache', SETTINGS, ids=name)
def test_a_row_is_scored_as_if_alone(cache):
  view, cache = random_view(SHAPES[0]), with_window(cache, 8)
  together = scored(view, cache)
  for b in range(len(view.n)):
    alone = METHODS[cache.method].score(jax.tree.map(lambda x, b=b: jnp.asarray(x[b]), view), cache)
    compare([x[None] for x in alone], [x[b : b + 1] for x in together], view.n[b : b + 1])


@pytest.mark.parametrize('method', METHODS)
def test_the_order_of_the_queries_does_not_matter(method):
  view, cache = random_view(SHAPES[0]), Cache(method=method, window=8)
  turned = replace(view, q=np.roll(view.q, 3, axis=3), q_position=np.roll(view.q_position, 3, axis=1))
  compare(scored(view, cache), scored(turned, cache), view.n)


@pytest.mark.parametrize('method', METHODS)
def test_a_row_too_short_to_choose_from_is_scored_without_nan(method):
  view = random_view(SHAPES[0])
  for n in (0, 1, 7, 8):
    result = scored(replace(view, n=np.full_like(view.n, n)), Cache(method=method, window=8))
    assert not any(np.any(np.isnan(x)) for x in result)


# --- what is kept ----------------------------------------------------------------------------------------------------


def kept(score, n, a, budget):
  """Slots of one kv head that a compression keeps: the best of the old ones, and the window."""
  best = np.argsort(-np.asarray(score)[: n - a], kind='stable')[: budget - a]
  return [*sorted(int(i) for i in best), *range(n - a, n)]


def one_head(k, n=None, q=None, carried=None, position=None):
  """A batch of one row with one kv head."""
  k = np.asarray(k, np.float32)
  S = len(k)
  position = np.arange(S) if position is None else position
  q, q_position = (np.ones((1, 1, k.shape[1])), [S - 1]) if q is None else (q, np.arange(S - q.shape[1], S))
  carried = np.full(S, -1.0) if carried is None else carried
  return View(
    k[None, None],
    np.int32([S if n is None else n]),
    np.asarray(position, np.int32)[None, None],
    np.asarray(q, np.float32)[None, None],
    np.asarray(q_position, np.int32)[None],
    np.asarray(carried, np.float32)[None, None],
  )


def test_windows_by_default():
  defaults = {'rkv': 8, 'snapkv': 8, 'h2o': 256, 'streaming': 8, 'keydiff': 8, 'gkv': 16, 'tova_like': 1}
  assert {method: window(Cache(method=method, budget=512)) for method in defaults} == defaults
  assert window(Cache(method='gkv', window=3)) == 3


@pytest.mark.parametrize('turn', [1, -1], ids=['by position', 'by score'])
def test_streaming_keeps_the_sinks_and_the_newest(turn):
  budget, a, S = 12, 3, 24
  cache = Cache(method='streaming', budget=budget, window=a)
  positions, written = list(range(18)), 18
  for _ in range(4):
    n = len(positions)
    view = one_head(np.ones((S, 2)), n, position=positions + [-1] * (S - n))
    positions = [positions[i] for i in kept(scored(view, cache).score[0, 0], n, a, budget)]
    assert sorted(positions) == [0, 1, 2, 3, *range(written - (budget - 4), written)]
    positions = positions[:-a][::turn] + positions[-a:] + list(range(written, written + 6))
    written += 6


def test_h2o_keeps_the_heavy_hitters():
  heavy, budget, S = {1, 6, 9}, 6, 16
  cache = Cache(method='h2o', budget=budget)
  carried = np.zeros(S)
  for t in range(S):  # every query attends to what it sees alike, and ten times as much to the heavy ones
    share = np.array([10.0 if i in heavy else 1.0 for i in range(t + 1)])
    carried[: t + 1] += share / share.sum()
  result = scored(one_head(np.ones((S, 2)), carried=carried), cache)
  assert kept(result.score[0, 0], S, window(cache), budget) == [*sorted(heavy), 13, 14, 15]
  np.testing.assert_array_equal(result.carried[0, 0], np.float32(carried))


def test_keydiff_evicts_duplicates_of_the_mean_direction():
  rng = np.random.default_rng(0)
  distinct = [2, 3, 7, 11]
  mean = np.ones(8)
  k = np.array([mean + 0.01 * rng.normal(size=8) for _ in range(16)])
  k[distinct] = rng.normal(size=(4, 8))
  k *= rng.uniform(0.5, 20, size=(16, 1))  # lengths do not count
  cache = Cache(method='keydiff', budget=6, window=2)
  assert kept(scored(one_head(k), cache).score[0, 0], 16, 2, 6) == [*distinct, 14, 15]


def test_tova_like_keeps_what_the_last_query_attends_to():
  k, q = np.eye(8), np.zeros((2, 3, 8))
  q[:, 0, 1] = q[:, 1, 2] = 100.0  # earlier queries
  q[0, 2, 4] = q[1, 2, 5] = 100.0  # the last one's heads
  cache = Cache(method='tova_like', budget=3)
  result = scored(one_head(k, q=q), cache).score[0, 0]
  assert kept(result, 8, window(cache), 3) == [4, 5, 7]
  np.testing.assert_allclose(result[jnp.array([4, 5])], 0.5)


def redundancy(k, method):
  """Redundancy and, for gkv, its ratio to the largest: mix = 0 leaves nothing else of a score."""
  return -np.asarray(scored(one_head(k), Cache(method=method, window=2, mix=0.0)).score[0, 0])[: len(k) - 2]


@pytest.mark.parametrize('method', ['rkv', 'gkv'])
def test_the_latest_of_three_identical_keys_is_spared(method):
  k = np.eye(12)
  k[[5, 8]] = k[2]
  excess = 12 * np.log(redundancy(k, method))
  np.testing.assert_allclose(excess[[2, 5, 8]] - excess[0], [2, 1, 0], atol=1e-4)


@pytest.mark.parametrize('method', ['rkv', 'gkv'])
def test_two_identical_keys_protect_each_other(method):
  k = np.eye(12)
  k[5] = k[2]
  np.testing.assert_allclose(redundancy(k, method), redundancy(np.eye(12), method), atol=1e-6)


def test_keys_without_near_duplicates_protect_slot_0():
  k = np.full((12, 12), 0.3) + np.eye(12)  # equal cosines, below the threshold
  view = one_head(k)
  on, off = (scored(view, Cache(window=2, mix=0.0, protect_slot0=flag)).score[0, 0, :10] for flag in (True, False))
  assert np.argmax(on) == 0
  np.testing.assert_allclose(off, off[0], atol=1e-7)


def test_the_pool_does_not_reach_the_window():
  k, q = np.eye(12), np.zeros((1, 2, 12))
  q[..., 10] = q[..., 11] = 100.0  # looks only at the window
  q[..., 0] = 3.0
  score = scored(one_head(k, q=q), Cache(method='snapkv', window=2)).score[0, 0, :10]
  np.testing.assert_allclose(score[:4], score[0])  # three neighbours on each side
  np.testing.assert_allclose(score[4:], score[9])
  assert score[0] > score[9] > 0
