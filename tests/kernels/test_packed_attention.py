"""Attention of packed rows: reference and kernels against float64, and the choice between them.

The kernels run in Pallas's GPU interpreter, which raises on races. tests/kernels/test_compiled.py compiles them for the device.
"""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.config import SettingsError
from sprl.kernels import hopper_packed_attention as hopper
from sprl.kernels import packed_attention as module
from sprl.kernels import platform
from sprl.kernels.packed_attention import Visible, cost, packed_attention, reference

slow = pytest.mark.slow
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def row(*lengths, padding=0):
  """Return (segments, prefixes, positions) of a row of groups: each of `lengths` is (prompt, completion, completion, ...)."""
  segments, prefixes, positions, n = [], [], [], 0
  for prompt, *completions in lengths:
    n, first = n + 1, n + 1
    segments += [first] * prompt
    prefixes += [0] * prompt
    positions += range(prompt)
    for completion in completions:
      n += 1
      segments += [n] * completion
      prefixes += [first] * completion
      positions += range(prompt, prompt + completion)
  return [np.array([x + [0] * padding], np.int32) for x in (segments, prefixes, positions)]


def mask(segments, prefixes, positions, window=None):
  """Return [B, T, T] by the definition: which key each query sees."""
  B, T = segments.shape
  seen = np.zeros((B, T, T), bool)
  for b, t in np.ndindex(B, T):
    for s in range(t + 1):
      near = window is None or positions[b, t] - positions[b, s] < window
      seen[b, t, s] = segments[b, s] and segments[b, s] in (segments[b, t], prefixes[b, t]) and near
  return seen


def by_hand(q, k, v, dout, seen):
  """Return the float64 output and its gradients, by the formulas of softmax attention."""
  q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
  out, dq, dk, dv = np.zeros(q.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
  scale = q.shape[-1] ** -0.5
  for b, h in np.ndindex(q.shape[0], q.shape[2]):
    head = h // (q.shape[2] // k.shape[2])
    scores = np.where(seen[b], q[b, :, h] @ k[b, :, head].T * scale, -np.inf)
    p = np.where(seen[b], np.exp(scores - np.max(scores, axis=1, keepdims=True, initial=-1e30)), 0)
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1e-300)
    out[b, :, h] = p @ v[b, :, head]
    dp = dout[b, :, h] @ v[b, :, head].T
    ds = p * (dp - np.sum(dout[b, :, h] * out[b, :, h], axis=1, keepdims=True)) * scale
    dq[b, :, h] = ds @ k[b, :, head]
    dk[b, :, head] += ds.T @ q[b, :, h]
    dv[b, :, head] += p.T @ dout[b, :, h]
  return out, dq, dk, dv


def arrays(T, H=4, K=2, D=64, dtype=jnp.bfloat16, B=1):
  keys = jax.random.split(jax.random.key(0), 4)
  return [jax.random.normal(key, (B, T, heads, D), dtype) for key, heads in zip(keys, (H, K, K, H))]


@partial(jax.jit, static_argnums=0)
def with_gradients(attend, q, k, v, dout, visible):
  out, back = jax.vjp(lambda *x: attend(*x, visible), q, k, v)
  return out, *back(dout)


def visible_of(segments, prefixes, positions, window):
  visible = Visible.in_rows(jnp.asarray(segments), jnp.asarray(prefixes))
  return visible if window is None else visible.within(window, jnp.asarray(positions))


def kernel(q, k, v, visible):
  return hopper.packed_attention(q, k, v, visible, INTERPRET)


ROWS = {
  'two groups': (row((5, 4, 1, 3), (2, 6), padding=3), None),
  'window': (row((9, 4, 1, 3), (2, 6), padding=1), 4),
  'no padding': (row((1, 1), (12,)), None),
}


@pytest.mark.parametrize('case', ROWS)
def test_reference_matches_float64(case):
  (segments, prefixes, positions), window = ROWS[case]
  x = arrays(segments.shape[1], D=8, dtype=jnp.float32)
  found = with_gradients(reference, *x, visible_of(segments, prefixes, positions, window))
  for got, expected in zip(found, by_hand(*x, mask(segments, prefixes, positions, window))):
    np.testing.assert_allclose(got, expected, atol=3e-6)


def test_mask_is_the_definition():
  for (segments, prefixes, positions), window in ROWS.values():
    visible = visible_of(segments, prefixes, positions, window)
    np.testing.assert_array_equal(visible.mask(segments.shape[1])[:, 0], mask(segments, prefixes, positions, window))


LONG = {
  # Blocks of 128 queries over several segments, segments over several blocks, prompts that end within a block, padding.
  'two blocks': (row((40, 50, 30), (10, 20), padding=6), None),
  'groups': (row((70, 90, 60), (20, 40), padding=20), None),
  'a long prompt': (row((300, 50, 30), padding=4), None),
  'window': (row((70, 90, 60), (20, 40), padding=20), 50),
}


MORE = (('groups', 4, 64), ('a long prompt', 4, 64), ('window', 4, 64), ('groups', 4, 128))


@pytest.mark.parametrize(('case', 'H', 'D'), [('two blocks', 2, 64), *(pytest.param(*each, marks=slow) for each in MORE)])
def test_kernels_match_float64_without_races(case, H, D):
  (segments, prefixes, positions), window = LONG[case]
  x = arrays(segments.shape[1], H, H // 2, D)
  found = with_gradients(kernel, *x, visible_of(segments, prefixes, positions, window))
  for got, expected in zip(found, by_hand(*x, mask(segments, prefixes, positions, window))):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.012 * np.abs(expected).max())


def test_kernel_reads_prompts_behind_older_tokens():
  """Prefill: the queries are the last tokens of a cache with more slots, of which those behind the newest are not read."""
  q, k, v, _ = arrays(40)
  k, v = (jnp.pad(x, ((0, 0), (24, 8), (0, 0), (0, 0)), constant_values=3.0) for x in (k, v))
  visible = Visible.up_to(24 + jnp.arange(40)[None])
  seen = np.arange(72) <= 24 + np.arange(40)[:, None]
  got = jax.jit(kernel)(q, k, v, visible)
  np.testing.assert_allclose(np.asarray(got, np.float64), by_hand(q, k, v, q, seen[None])[0], atol=0.02)


@pytest.mark.parametrize('window', [None, 50, 200])
def test_visited_blocks_hold_every_visible_key_and_whole_blocks_no_other(window):
  """The lists of blocks, of both directions, against the mask; a second row has one long segment."""
  rows = [row((70, 90, 60, 33), (20, 40), (9, 300), padding=18), row((560, 80))]
  segments, prefixes, positions = (np.concatenate(x) for x in zip(*rows))
  seen = mask(segments, prefixes, positions, window)
  for queries, keys in ((128, 128), (128, 64), (64, 128)):
    spans = np.asarray(hopper._spans(hopper._stretches(visible_of(segments, prefixes, positions, window)), queries, keys))
    blocks = np.asarray(hopper._viewing_blocks(jnp.asarray(spans), 640 // keys))
    for b, i, j in np.ndindex(2, 640 // queries, 640 // keys):
      first, behind, own, end, *seen_by_all = spans[b, i]
      visited = (first <= j < behind) + (own <= j < end)
      part = seen[b, i * queries : (i + 1) * queries, j * keys : (j + 1) * keys]
      start, stop, prefix_start, prefix_stop = seen_by_all
      low, high = j * keys, (j + 1) * keys
      whole = (start <= low and high <= stop) or (prefix_start <= low and high <= prefix_stop)
      assert visited <= 1
      assert visited or not part.any()
      assert part.all() or not whole
      assert not visited or blocks[b, j, 0] <= i < blocks[b, j, 1]


def test_a_row_of_sixteen_completions_visits_less_than_a_fifth_of_the_triangle():
  segments, prefixes, _ = row((512, *[512] * 16))
  spans = hopper._spans(hopper._stretches(visible_of(segments, prefixes, None, None)), 128, 128)
  visited = np.sum(spans[..., 1] - spans[..., 0] + spans[..., 3] - spans[..., 2])
  n = segments.shape[1] // 128
  by_segments = 17 * (4 * 5 // 2) + 16 * 4 * 4  # triangles of the segments, and completions times prompt
  assert visited == by_segments
  assert visited / (n * (n + 1) / 2) < 1 / 5


# --- choice ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_hopper(monkeypatch, caplog):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(platform, 'hopper', lambda: True)
  monkeypatch.setattr(module.hopper, 'packed_attention', lambda q, k, v, visible: jnp.full_like(q, 7))
  platform._note.cache_clear()
  caplog.set_level(logging.INFO, logger='sprl')
  return caplog


def call(dtype=jnp.bfloat16, D=64, **options):
  q, k, v, _ = arrays(8, D=D, dtype=dtype)
  return packed_attention(q, k, v, Visible.in_rows(jnp.ones((1, 8), jnp.int32)), **options)


def test_kernel_runs_on_hopper_and_is_logged(on_hopper):
  assert np.all(call() == 7)
  assert on_hopper.messages == ['attention of whole rows: the Mosaic GPU kernel runs']


@pytest.mark.parametrize(
  ('changed', 'reason'), [({'dtype': jnp.float32}, 'queries are float32 and keys float32'), ({'D': 80}, 'heads are 80 wide')]
)
def test_reference_runs_where_the_kernel_cannot(on_hopper, changed, reason):
  assert not np.any(call(**changed) == 7)
  assert reason in on_hopper.text
  with pytest.raises(SettingsError, match=f"config.model.kernels = 'mosaic_gpu'.*attention of whole rows.*{reason}"):
    call(**changed, kernels='mosaic_gpu')


def test_reference_rounds_the_softmax_and_runs_if_forced(on_hopper):
  assert not np.any(call(fp8_softmax=True) == 7)
  assert not np.any(call(kernels='reference') == 7)
  assert on_hopper.messages == []


def test_cost_by_hand():
  B, T, H, K, D = 2, 8, 6, 2, 16
  pairs = B * H * T * T / 2
  q, k = 2 * B * T * H * D, 2 * B * T * K * D
  assert cost(B, T, H, K, D) == (q + k + k + q, 2 * 2 * pairs * D)
  assert cost(B, T, H, K, D, backward=True) == ((q + k + k + q) + (q + k + k + q + q) + (q + k + k), 7 * 2 * pairs * D)
