"""Compaction and similarity of keys: references and kernels against loops in float64, and the choice between them.

The kernels run in Pallas's GPU interpreter, which raises on races. tests/kernels/test_compiled.py compiles them for the device.
"""

import dataclasses
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.cache.compaction import compress
from sprl.cache.layer import LayerCache
from sprl.cache.layout import CacheLayout
from sprl.config import Cache, SettingsError
from sprl.kernels import hopper_eviction as hopper
from sprl.kernels.eviction import compact, compact_cost, compact_reference, similarity, similarity_cost, similarity_reference
from sprl.kernels.rope import Rope

BF16 = jnp.bfloat16
slow = pytest.mark.slow
RACES = plgpu.InterpretGPUParams(detect_races=True)
COMPACT = jax.jit(partial(hopper.compact, interpret=RACES))
SIMILARITY = jax.jit(partial(hopper.similarity, interpret=RACES), static_argnums=(2, 3))


# --- compaction --------------------------------------------------------------------------------------------------------


def slots(B, K, S, D, N, dtype, rows, seed=0):
  """Return random arguments of compact: distinct slots in each row and kv head."""
  rng = np.random.default_rng(seed)
  k, v = (jnp.asarray(rng.integers(0, 200, (B, K, S, D)), dtype) for _ in range(2))
  keep = np.stack([[rng.permutation(S)[:N] for _ in range(K)] for _ in rows])
  return k, v, jnp.asarray(rows, jnp.int32), jnp.asarray(np.sort(keep, axis=-1), jnp.int32)


def check_moved(found, arguments):
  k, v, rows, keep = (np.asarray(x) for x in arguments)
  for x, moved in zip((k, v), found):
    expected = x.copy()
    for r, h in np.ndindex(keep.shape[:2]):
      if rows[r] < len(x):
        expected[rows[r], h, : keep.shape[2]] = x[rows[r], h, keep[r, h]]
    np.testing.assert_array_equal(np.asarray(moved), expected)


def test_reference_moves_kept_slots():
  arguments = slots(4, 2, 12, 6, 7, BF16, [2, 0, 4, 4])
  check_moved(compact_reference(*arguments), arguments)


SHAPES = [(70, 37, 256), (40, 33, 96), (150, 131, 64), (40, 40, 128), (9, 1, 128), (40, 17, 80)]
DEFAULT = (BF16, *SHAPES[0]), (jnp.uint8, *SHAPES[1])


@pytest.mark.parametrize(
  ('dtype', 'S', 'N', 'D'),
  [pytest.param(*case, marks=() if case in DEFAULT else slow) for s in SHAPES for case in ((BF16, *s), (jnp.uint8, *s))],
)
def test_kernel_moves_kept_slots(dtype, S, N, D):
  arguments = slots(3, 2, S, D, N, dtype, [2, 3, 0])
  check_moved(COMPACT(*arguments), arguments)


@given(st.integers(1, 80), st.data())
@settings(max_examples=15)
@slow
def test_kernel_moves_any_slots(S, data):
  N = data.draw(st.integers(1, S))
  arguments = slots(2, 1, S, 128, N, BF16, data.draw(st.permutations([0, 1, 2])), seed=data.draw(st.integers(0, 99)))
  check_moved(COMPACT(*arguments), arguments)


# --- similarity --------------------------------------------------------------------------------------------------------


def keys(R, K, S, D, n, dtype, seed=0):
  """Return random keys with many near-duplicates. Slots from a row's n on hold stale numbers."""
  rng = np.random.default_rng(seed)
  directions = rng.normal(size=(R, K, 5, D))
  k = np.take_along_axis(directions, rng.integers(0, 5, (R, K, S, 1)), axis=2) + 0.9 * rng.normal(size=(R, K, S, D))
  np.moveaxis(k, 1, 2)[np.arange(S) >= np.asarray(n)[:, None]] = 1e3
  return jnp.asarray(k * rng.uniform(0.1, 9, (R, K, S, 1)), dtype), jnp.asarray(n, jnp.int32)


def by_hand(k, n, threshold, nearest_of_none):
  """Compute similarity in float64, key by key, as R-KV writes it: rows spare columns."""
  k = np.asarray(k, np.float64)
  total = np.zeros(k.shape[:2])
  for h in range(len(k)):
    unit = k[h, :n] / np.linalg.norm(k[h, :n], axis=-1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0)
    for i in range(n):
      near = [j for j in range(n) if j != i and cosine[i, j] > threshold]
      spared = max(near, default=nearest_of_none)
      total[h, :n] += [0 if j == spared else cosine[i, j] for j in range(n)]
  return total


def check_compared(found, arguments, threshold, none, tolerance):
  k, n = arguments
  for r in range(len(k)):
    expected = by_hand(k[r], int(n[r]), threshold, none)
    np.testing.assert_allclose(found[r, :, : n[r]], expected[:, : n[r]], atol=tolerance)


@pytest.mark.parametrize(
  ('D', 'dtype', 'held'), [(128, 'float32', True), (132, 'float32', False), (136, 'float32', True), (264, 'bfloat16', False)]
)
def test_heads_that_need_too_many_registers_are_left_to_the_reference(D, dtype, held):
  obstacle = hopper.compaction_obstacle(jax.ShapeDtypeStruct((2, 2, 64, D), dtype))
  assert (obstacle is None) == held
  assert held or 'registers' in obstacle


@pytest.mark.parametrize('D', [48, 80, 96, 112, 128, 256])
@pytest.mark.parametrize('dtype', ['bfloat16', 'uint8', 'float32'])
def test_the_copy_engine_reads_shared_memory_from_multiples_of_128_bytes(D, dtype, monkeypatch):
  """The halves of `group_s` follow each other. CUDA requires this alignment, which the interpreter does not check."""
  k = jax.ShapeDtypeStruct((2, 2, 64, D), dtype)
  assert hopper.compaction_obstacle(k) is None
  seen = Mock()
  monkeypatch.setattr(hopper.plgpu, 'kernel', seen)
  jax.eval_shape(hopper.compact, k, k, jax.ShapeDtypeStruct((2,), 'int32'), jax.ShapeDtypeStruct((2, 2, 40), 'int32'))
  _, slots, _ = seen.call_args.kwargs['scratch_types']['group_s'].shape
  assert slots * D * k.dtype.itemsize % 128 == 0


@pytest.mark.parametrize('none', [0, -1])
def test_reference_similarity_matches_float64(none):
  arguments = keys(3, 2, 23, 8, [23, 11, 1], jnp.float32)
  found = jax.jit(jax.vmap(partial(similarity_reference, threshold=0.5, nearest_of_none=none)))(*arguments)
  check_compared(found, arguments, 0.5, none, 1e-5)


@pytest.mark.parametrize(
  ('dtype', 'none'), [(BF16, 0), (jnp.float32, -1), pytest.param(BF16, -1, marks=slow), pytest.param(jnp.float32, 0, marks=slow)]
)
def test_kernel_similarity_matches_float64(dtype, none):
  arguments = keys(6, 1, 200, 64, [0, 1, 63, 64, 65, 200], dtype)
  # Each cosine of float32 keys has an error of at most 2^-16.
  check_compared(SIMILARITY(*arguments, 0.5, none), arguments, 0.5, none, 1e-4 if dtype == BF16 else 200 * 2**-16)


@slow
def test_kernel_compares_more_blocks_than_stages():
  arguments = keys(1, 2, 300, 128, [290], BF16)
  check_compared(SIMILARITY(*arguments, 0.3, 0), arguments, 0.3, 0, 1e-4)


@given(st.integers(1, 150), st.sampled_from([0.1, 0.5]), st.sampled_from([0, -1]), st.integers(0, 99), st.data())
@settings(max_examples=8)
@slow
def test_kernel_compares_any_number_of_keys(S, threshold, none, seed, data):
  n = data.draw(st.lists(st.integers(0, S), min_size=1, max_size=2))
  arguments = keys(len(n), 2, S, 64, n, BF16, seed)
  check_compared(SIMILARITY(*arguments, threshold, none), arguments, threshold, none, 1e-4)


# --- compression of a layer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('method', ['rkv', pytest.param('gkv', marks=slow)])
def test_layer_is_compressed_alike_with_kernels_and_references(monkeypatch, method):
  monkeypatch.setattr(hopper, 'compact', COMPACT)
  monkeypatch.setattr(hopper, 'similarity', SIMILARITY)
  B, K, S, D = 3, 2, 64, 128
  layout = CacheLayout(
    settings=Cache(budget=40, interval=24, window=4, method=method),
    layers=1,
    kv_heads=K,
    heads=2 * K,
    head_dim=D,
    rope=Rope(),
    prompt=40,
    positions=200,
    dtype=jnp.dtype(BF16),
    storage=jnp.dtype(BF16),
  )
  rng = np.random.default_rng(0)
  layer = dataclasses.replace(
    LayerCache.empty(layout, B, S),
    k=keys(B, K, S, D, [S] * B, BF16)[0],
    v=jnp.asarray(rng.normal(size=(B, K, S, D)), BF16),
    position=jnp.broadcast_to(jnp.arange(S), (B, K, S)),
    queries=jnp.asarray(rng.normal(size=(B, 2 * K, 4, D)), BF16),
  )
  occupied, now = jnp.array([64, 50, 64]), jnp.array([63, 49, 63])

  @partial(jax.jit, static_argnums=0)
  def compressed(kernels):
    due = jnp.array([True, True, False])
    return compress(dataclasses.replace(layout, kernels=kernels), layer, due, occupied=occupied, newest=now, gone=now)[0]

  found, expected = compressed('mosaic_gpu'), compressed('reference')
  jax.tree.map(np.testing.assert_array_equal, (found.k, found.v, found.position), (expected.k, expected.v, expected.position))
  np.testing.assert_array_equal(found.k[2], layer.k[2])


def test_costs_by_hand():
  # 2 rows, 3 heads: 5 slots of 8 numbers of 2 bytes, for keys and values, read and written; and their indices
  assert compact_cost(2, 3, 5, 8, BF16) == (2 * 2 * 2 * 3 * 5 * 8 * 2 + 2 * 3 * 5 * 4, 0)
  assert similarity_cost(2, 3, 5, 8) == (2 * 3 * 5 * (8 * 2 + 4), 2 * 2 * 3 * 5 * 5 * 8)


@pytest.mark.parametrize(('D', 'reason'), [(64, None), (20, '20 wide')])
def test_forced_compaction_runs_or_raises(monkeypatch, D, reason):
  monkeypatch.setattr(hopper, 'compact', lambda k, v, rows, keep: (v, k))
  k, v, rows, keep = slots(1, 1, 4, D, 2, BF16, [0])
  run = partial(compact, k, v, rows, keep, 'mosaic_gpu')
  if reason is None:
    np.testing.assert_array_equal(run()[0], v)
  else:
    with pytest.raises(SettingsError, match=f"config.model.kernels = 'mosaic_gpu'.*compaction.*{reason}"):
      run()


@pytest.mark.parametrize(('D', 'dtype', 'reason'), [(96, BF16, '96 wide'), (64, jnp.float16, 'keys are float16')])
def test_forced_similarity_that_cannot_run_raises(D, dtype, reason):
  k, n = keys(1, 1, 8, D, [8], dtype)
  with pytest.raises(SettingsError, match=f"config.model.kernels = 'mosaic_gpu'.*similarity of keys.*{reason}"):
    similarity(k[0], n[0], 0.5, 0, 'mosaic_gpu')
