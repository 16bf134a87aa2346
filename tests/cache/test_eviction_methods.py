"""Eviction methods: scores against loops in float64, independence of empty slots and other rows, and the kept slots."""

import functools
from dataclasses import replace

import eviction_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.cache.eviction import METHODS, View, eviction_window
from sprl.config import Cache, Gkv, Rkv, Streaming

SHAPES = [  # B, K, G, A, S, D
  (4, 2, 2, 8, 40, 8),
  pytest.param((4, 1, 3, 5, 24, 4), marks=pytest.mark.slow),
  pytest.param((4, 3, 1, 2, 16, 16), marks=pytest.mark.slow),
]
SHAPE = SHAPES[0]
SETTINGS = [
  *(Cache(method=method) for method in METHODS),
  Cache(method='rkv', rkv=Rkv(0.4)),
  pytest.param(Cache(method='rkv', rkv=Rkv(0.0)), marks=pytest.mark.slow),
  Cache(method='streaming', streaming=Streaming(1)),
  Cache(method='gkv', gkv=Gkv(0.3)),
]


def name(setting):
  changed = {k: v for k, v in vars(setting).items() if v != getattr(Cache(method=setting.method), k)}
  return '-'.join([setting.method, *(f'{k}={v}' for k, v in changed.items())])


@functools.partial(jax.jit, static_argnums=1)
def scored(view, cache):
  return jax.vmap(METHODS[cache.method].score, in_axes=(0, None))(view, cache)


def keys(rng, n, D):
  """Return random keys. Their cosines are so far from the threshold that float32 cannot move one across it."""
  while True:
    k = rng.normal(size=(n, D)).astype(np.float32)
    direction = k / np.linalg.norm(k, axis=-1, keepdims=True)
    if np.abs(direction @ direction.T - oracle.SIMILARITY).min() > 2e-4:
      return k


@functools.cache
def random_view(shape, seed=0):
  """Return rows of ragged length with garbage in empty slots. The rows have all, some, one or none of their last queries."""
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
  return View(k, n, position, q, q_position, carried, v=rng.normal(size=(B, K, S, D)).astype(np.float32))


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('cache', SETTINGS, ids=name)
def test_scores_equal_those_of_loops_over_the_occupied_slots(cache, shape):
  B, K, _, a, _, _ = shape
  view, cache = random_view(shape), replace(cache, window=a)
  score, carried = map(np.asarray, scored(view, cache))
  assert score.dtype == carried.dtype == np.float32
  for b in range(B):
    n = view.n[b]
    for h in range(K):
      k = view.k[b, h, :n]
      assert np.abs(oracle.cosines(k.astype(float)) - oracle.SIMILARITY).min() > 1e-4
      mine = (k, view.position[b, h, :n], view.q[b, h], view.q_position[b], view.carried[b, h, :n])
      expected = oracle.score(cache.method, *mine, a, cache)
      np.testing.assert_allclose(score[b, h, : n - a], expected[0], atol=1e-5)
      np.testing.assert_allclose(carried[b, h, : n - a], expected[1], atol=1e-5)


def test_importance_is_zero_without_queries():
  view = random_view(SHAPE)
  assert np.all(view.q_position[3] < 0)
  old = slice(0, view.n[3] - 8)
  for method in ('snapkv', 'tova_like'):
    np.testing.assert_allclose(scored(view, Cache(method=method, window=8)).score[3, :, old], 0, atol=1e-6)
  carried = scored(view, Cache(method='gkv', window=8)).carried[3, :, old]
  np.testing.assert_allclose(carried, np.maximum(0.8 * view.carried[3], 0)[:, old], atol=1e-6)


def test_gkv_carries_no_history_for_its_window():
  view = random_view(SHAPE)
  carried = scored(view, Cache(method='gkv', window=8)).carried
  for b, n in enumerate(view.n):
    assert np.all(carried[b, :, : n - 8] >= 0)
    np.testing.assert_array_equal(carried[b, :, n - 8 :], -1)


def test_gkv_without_history_equals_gkv_without_decay():
  view = random_view(SHAPE)
  new = replace(view, carried=np.full_like(view.carried, -1))
  present = scored(new, Cache(method='gkv', window=8))
  forgotten = scored(view, Cache(method='gkv', window=8, gkv=Gkv(0.0)))
  jax.tree.map(np.testing.assert_array_equal, present, forgotten)
  assert not np.allclose(present.score, scored(view, Cache(method='gkv', window=8)).score)


# --- independence ----------------------------------------------------------------------------------------------------


def compare(a, b, n):
  for row, length in enumerate(n):
    for x, y in zip(a, b):
      np.testing.assert_allclose(x[row, :, :length], y[row, :, :length], atol=1e-6)


@pytest.mark.parametrize('method', METHODS)
def test_empty_slots_have_no_influence(method):
  view, cache = random_view(SHAPE), Cache(method=method, window=8)
  usual = scored(view, cache)
  empty = (np.arange(view.k.shape[2]) >= view.n[:, None])[:, None]
  newest = np.take_along_axis(view.k, (view.n - 1)[:, None, None, None], axis=2)
  for k, carried in ((1e6, 1e6), (newest, 9.0)):  # large, or near-duplicates of each other and of the newest key
    changed = replace(
      view,
      k=np.where(empty[..., None], k, view.k).astype(np.float32),
      carried=np.where(empty, carried, view.carried).astype(np.float32),
    )
    compare(usual, scored(changed, cache), view.n)


@pytest.mark.parametrize('method', METHODS)
def test_a_row_does_not_depend_on_the_other_rows(method):
  view, other, cache = random_view(SHAPE), random_view(SHAPE, 1), Cache(method=method, window=8)
  together = scored(view, cache)
  for b in range(len(view.n)):
    among_others = jax.tree.map(
      lambda x, y, b=b: np.where((np.arange(4) == b).reshape(-1, *[1] * (x.ndim - 1)), x, y), view, other
    )
    alone = scored(among_others, cache)
    compare([x[b : b + 1] for x in alone], [x[b : b + 1] for x in together], view.n[b : b + 1])


@pytest.mark.parametrize('method', METHODS)
def test_the_order_of_the_queries_does_not_matter(method):
  view, cache = random_view(SHAPE), Cache(method=method, window=8)
  shifted = replace(view, q=np.roll(view.q, 3, axis=3), q_position=np.roll(view.q_position, 3, axis=1))
  compare(scored(view, cache), scored(shifted, cache), view.n)


@pytest.mark.parametrize('method', METHODS)
def test_a_row_shorter_than_the_window_gives_no_nan(method):
  view = random_view(SHAPE)
  for n in (0, 1, 7, 8):
    result = scored(replace(view, n=np.full_like(view.n, n)), Cache(method=method, window=8))
    assert not any(np.any(np.isnan(x)) for x in result)


# --- kept slots ------------------------------------------------------------------------------------------------------


def kept(score, n, a, budget):
  """Return the slots of one kv head that a compression keeps: the best old ones and the window."""
  best = np.argsort(-np.asarray(score)[: n - a], kind='stable')[: budget - a]
  return [*sorted(int(i) for i in best), *range(n - a, n)]


def one_head(k, n=None, q=None, carried=None, position=None):
  """Return a batch of one row with one kv head."""
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
    v=np.zeros_like(k)[None, None],
  )


def test_each_method_has_its_default_window():
  defaults = {'rkv': 8, 'snapkv': 8, 'h2o': 256, 'streaming': 8, 'keydiff': 8, 'gkv': 16, 'tova_like': 1}
  assert {method: eviction_window(Cache(method=method, budget=512)) for method in defaults} == defaults
  assert eviction_window(Cache(method='gkv', window=3)) == 3


def test_streaming_keeps_the_sinks_and_the_newest():
  budget, a, S = 12, 3, 24
  cache = Cache(method='streaming', budget=budget, window=a)
  positions, written = list(range(18)), 18
  for _ in range(4):
    n = len(positions)
    view = one_head(np.ones((S, 2)), n, position=positions + [-1] * (S - n))
    positions = [positions[i] for i in kept(scored(view, cache).score[0, 0], n, a, budget)]
    assert positions == [0, 1, 2, 3, *range(written - (budget - 4), written)]
    positions += list(range(written, written + 6))
    written += 6


def test_h2o_keeps_the_newest_token_for_any_budget():
  assert [eviction_window(Cache(method='h2o', budget=budget)) for budget in (1, 2, 3, 8)] == [1, 1, 1, 4]


def test_h2o_keeps_the_heavy_hitters():
  heavy, budget, S = {1, 6, 9}, 6, 16
  cache = Cache(method='h2o', budget=budget)
  carried = np.zeros(S)
  for t in range(S):  # each query attends ten times as much to the heavy keys as to the others
    share = np.array([10.0 if i in heavy else 1.0 for i in range(t + 1)])
    carried[: t + 1] += share / share.sum()
  result = scored(one_head(np.ones((S, 2)), carried=carried), cache)
  assert kept(result.score[0, 0], S, eviction_window(cache), budget) == [*sorted(heavy), 13, 14, 15]
  np.testing.assert_array_equal(result.carried[0, 0], np.float32(carried))


def test_keydiff_evicts_duplicates_of_the_mean_direction():
  rng = np.random.default_rng(0)
  distinct = [2, 3, 7, 11]
  mean = np.ones(8)
  k = np.array([mean + 0.01 * rng.normal(size=8) for _ in range(16)])
  k[distinct] = rng.normal(size=(4, 8))
  k *= rng.uniform(0.5, 20, size=(16, 1))  # norms have no effect
  cache = Cache(method='keydiff', budget=6, window=2)
  assert kept(scored(one_head(k), cache).score[0, 0], 16, 2, 6) == [*distinct, 14, 15]


def test_tova_like_keeps_the_keys_that_the_last_query_attends_to():
  k, q = np.eye(8), np.zeros((2, 3, 8))
  q[:, 0, 1] = q[:, 1, 2] = 100.0  # earlier queries
  q[0, 2, 4] = q[1, 2, 5] = 100.0  # the heads of the last one
  cache = Cache(method='tova_like', budget=3)
  result = scored(one_head(k, q=q), cache).score[0, 0]
  assert kept(result, 8, eviction_window(cache), 3) == [4, 5, 7]
  np.testing.assert_allclose(result[jnp.array([4, 5])], 0.5)


def redundancy(k, method):
  """Return the redundancy of the old slots, for gkv relative to the largest. Importance is 0 (gkv) or has weight 0 (rkv)."""
  view = one_head(k)
  if method == 'gkv':
    view = replace(view, q_position=np.full_like(view.q_position, -1))
    return -2 * np.asarray(scored(view, Cache(method='gkv', window=2)).score[0, 0])[: len(k) - 2]
  return -np.asarray(scored(view, Cache(method='rkv', window=2, rkv=Rkv(0.0))).score[0, 0])[: len(k) - 2]


@pytest.mark.parametrize('method', ['rkv', 'gkv'])
def test_the_latest_of_three_identical_keys_is_spared(method):
  k = np.eye(12)
  k[[5, 8]] = k[2]
  excess = 12 * np.log(redundancy(k, method))
  np.testing.assert_allclose(excess[[2, 5, 8]] - excess[0], [2, 1, 0], atol=1e-4)


@pytest.mark.parametrize('method', ['rkv', 'gkv'])
def test_two_identical_keys_spare_each_other(method):
  k = np.eye(12)
  k[5] = k[2]
  np.testing.assert_allclose(redundancy(k, method), redundancy(np.eye(12), method), atol=1e-6)


def test_keys_without_near_duplicates_spare_slot_0_in_rkv_only():
  k = np.full((12, 12), 0.3) + np.eye(12)  # equal cosines, below the threshold
  assert np.argmin(redundancy(k, 'rkv')) == 0
  np.testing.assert_allclose(redundancy(k, 'gkv'), 1, atol=1e-6)


def test_the_pool_does_not_reach_into_the_window():
  k, q = np.eye(12), np.zeros((1, 2, 12))
  q[..., 10] = q[..., 11] = 100.0  # attends to the window
  q[..., 0] = 3.0
  score = scored(one_head(k, q=q), Cache(method='snapkv', window=2)).score[0, 0, :10]
  np.testing.assert_allclose(score[:4], score[0])  # three neighbours on each side
  np.testing.assert_allclose(score[4:], score[9])
  assert score[0] > score[9] > 0
