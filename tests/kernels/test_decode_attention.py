"""Decode attention: reference and kernel against loops in float64, and the choice between them.

The kernel runs in Pallas's GPU interpreter, which raises on races: blocks, barriers and copies as on the device, the
arithmetic as on the CPU. tests/kernels/test_compiled.py compiles it for the device.
"""

import dataclasses
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.cache.kv_cache import KVCache
from sprl.cache.plan import CachePlan
from sprl.cache.scales import Scales
from sprl.kernels import hopper_decode_attention as hopper
from sprl.kernels import hopper_eviction, platform
from sprl.kernels.decode_attention import Attended, cost, decode_attention, reference
from sprl.kernels.rope import Rope
from sprl.settings import Cache, SettingsError

BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
INTERPRETED = partial(hopper.decode_attention, interpret=plgpu.InterpretGPUParams(detect_races=True))


def by_hand(q, k, v, length, k_scale, v_scale, bias):
  """float64, one row and head at a time."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  (B, H, D), (K, S) = q.shape, k.shape[1:3]
  out, share, lse = np.zeros((B, H, D)), np.zeros((B, K, S)), np.full((B, H), -np.inf)
  for b, h in np.ndindex(B, H):
    kv, n = h // (H // K), length[b]
    if n == 0:
      continue
    beside = 0.0 if bias is None else np.asarray(bias, np.float64).reshape(B, H, S)[b, h, :n]
    score = (k_scale * k[b, kv, :n] @ q[b, h] + beside) / np.sqrt(D)
    weight = np.exp(score - score.max())
    lse[b, h] = score.max() + np.log(weight.sum())
    weight /= weight.sum()
    out[b, h] = v_scale * weight @ v[b, kv, :n]
    share[b, kv, :n] += weight / (H // K)
  return Attended(out, share, lse)


def some(B, K, G, S, D, dtype, length, bias=False, seed=0):
  """Arguments of decode_attention; slots that no row occupies hold what a longer tenant has left."""
  rng = np.random.default_rng(seed)
  q = jnp.asarray(rng.normal(size=(B, K * G, D)), BF16)
  k, v = (rng.normal(size=(B, K, S, D)) for _ in range(2))
  beyond = np.arange(S) >= np.asarray(length)[:, None]
  for x in (k, v):
    np.moveaxis(x, 1, 2)[beyond] = 440.0
  scales = jnp.float32(1.7), jnp.float32(0.3)
  beside = jnp.asarray(3 * rng.normal(size=(B, K, G, S)), jnp.float32) if bias else None
  return q, jnp.asarray(k, dtype), jnp.asarray(v, dtype), jnp.asarray(length, jnp.int32), scales, beside


def check(found, arguments, bits):
  """Within the rounding of probabilities and output to 16-bit numbers of so many bits."""
  q, k, v, length, scales, bias = arguments
  expected = by_hand(q, k, v, np.asarray(length), *(float(s) for s in scales), bias)
  # A sum of weights that add up to 1, each rounded, times values of a few units; then the output itself is rounded.
  largest = np.abs(np.asarray(expected.out)).max(initial=1.0)
  np.testing.assert_allclose(np.asarray(found.out, np.float64), expected.out, atol=3 * largest * 2.0**-bits)
  np.testing.assert_allclose(found.lse, expected.lse, atol=1e-5, rtol=1e-5)
  if found.share is not None:
    np.testing.assert_allclose(found.share, expected.share, atol=2e-6)


def interpreted(arguments, share=True):
  assert hopper.obstacle(arguments[0], arguments[1], arguments[5], share) is None
  out, lse, shares = INTERPRETED(*arguments, share)
  assert (shares is not None) == share
  return Attended(out, shares, lse)


@pytest.mark.parametrize('dtype', [BF16, FP8])
@pytest.mark.parametrize('bias', [False, True])
def test_the_reference(dtype, bias):
  arguments = some(4, 2, 3, 9, 6, dtype, [0, 1, 5, 9], bias)
  exact = (arguments[0].astype(jnp.float32), *arguments[1:])
  check(reference(*exact), exact, 20)
  assert reference(*exact, share=False).share is None


@pytest.mark.parametrize('dtype', [BF16, FP8])
@pytest.mark.parametrize(('K', 'G', 'D', 'bias'), [(2, 7, 64, False), (1, 8, 128, True), (2, 3, 96, False), (1, 1, 256, True)])
def test_the_kernel_over_ragged_rows(dtype, K, G, D, bias):
  # Lengths: none, one, either side of a block's end, all. 200 slots are no multiple of a block.
  arguments = some(6, K, G, 200, D, dtype, [0, 1, 63, 64, 65, 200], bias)
  check(interpreted(arguments), arguments, 8)


@pytest.mark.parametrize('dtype', [BF16, FP8])
def test_splits_are_merged(dtype):
  arguments = some(3, 1, 4, 776, 64, dtype, [0, 1, 776])
  assert hopper.launch(3, 776, 64, dtype, share=False, bias=False).splits == 4
  check(interpreted(arguments, share=False), arguments, 8)


@st.composite
def shapes(draw):
  """Arguments of `some`, all that the kernel takes."""
  dtype = draw(st.sampled_from([BF16, FP8]))
  S = 8 * draw(st.integers(1, 20))
  length = draw(st.lists(st.one_of(st.sampled_from([0, 1, S]), st.integers(0, S)), min_size=1, max_size=3))
  D = draw(st.sampled_from([64, 96, 128] if dtype == FP8 else [64, 80, 96, 128]))
  K, G, bias, seed = draw(st.integers(1, 2)), draw(st.integers(1, 8)), draw(st.booleans()), draw(st.integers(0, 99))
  return len(length), K, G, S, D, dtype, length, bias, seed


@given(shapes(), st.booleans())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_the_kernel_over_random_shapes(shape, share):
  arguments = some(*shape)
  check(interpreted(arguments, share), arguments, 8)


@given(shapes(), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
@pytest.mark.slow
def test_the_kernel_over_many_shapes(shape, share):
  arguments = some(*shape)
  check(interpreted(arguments, share), arguments, 8)


def test_a_row_with_one_slot_more_than_there_are_sees_them_all():
  arguments = some(2, 1, 2, 64, 64, BF16, [64, 64])
  beyond = (*arguments[:3], arguments[3].at[1].set(65), *arguments[4:])
  for found, expected in zip(interpreted(beyond), interpreted(arguments)):
    np.testing.assert_array_equal(found, expected)


def test_queries_beyond_float16_attend_to_one_slot():
  q, k, v, length, scales, _ = some(1, 1, 1, 8, 64, FP8, [8])
  out, _, _ = INTERPRETED(q * 1e6, k, v, length, scales, None, False)
  slot = np.argmax(np.asarray(k[0, 0], np.float64) @ np.asarray(q[0, 0], np.float64))
  np.testing.assert_allclose(out[0, 0].astype(jnp.float32), v[0, 0, slot].astype(jnp.float32) * scales[1], rtol=0.01)


@pytest.mark.parametrize('storage', [BF16, FP8])
def test_a_cache_decodes_as_with_the_reference(monkeypatch, storage):
  monkeypatch.setattr(hopper, 'decode_attention', INTERPRETED)
  monkeypatch.setattr(hopper_eviction, 'compact', partial(hopper_eviction.compact, interpret=plgpu.InterpretGPUParams()))
  B, T, K, G, D = 2, 40, 2, 3, 128
  plan = CachePlan(
    settings=Cache(budget=56, interval=8, window=4, method='h2o'),
    layers=1,
    kv_heads=K,
    heads=K * G,
    head_dim=D,
    rope=Rope(),
    prompt=T,
    positions=T + 40,
    dtype=jnp.dtype(BF16),
    storage=jnp.dtype(storage),
  )
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.normal(size=(B, T + 1, n, D)), BF16) for n in (K * G, K, K))

  def decoded(kernels):
    cache = KVCache.empty(dataclasses.replace(plan, kernels=kernels), B, scales=Scales(*(jnp.full(1, 0.02) for _ in range(3))))
    _, cache = cache.expecting(jnp.array([T, T - 7])).attend(0, q[:, :T], k[:, :T], v[:, :T])
    out, cache = cache.advance().expecting(jnp.ones(B, jnp.int32)).attend(0, q[:, T:], k[:, T:], v[:, T:])
    return out.astype(jnp.float32), cache.layers[0].carried

  for found, expected in zip(decoded('mosaic_gpu'), decoded('reference')):
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_a_cost_by_hand():
  # 2 rows, 4 heads over 2, 8 slots of 64: keys and values 2*2*2*8*64 bytes in FP8; q and out 2*4*64 numbers of 2 bytes each
  assert cost(2, 4, 2, 8, 64, FP8) == (2 * 2 * 2 * 8 * 64 + 2 * 2 * 2 * 4 * 64 + 4 * 2 * 4, 4 * 2 * 4 * 8 * 64)
  assert cost(2, 4, 2, 8, 64, BF16, share=True, bias=True).bytes - cost(2, 4, 2, 8, 64, BF16).bytes == 4 * 2 * 8 * (2 + 4)


# --- which one runs ----------------------------------------------------------------------------------------------------

TAKEN = {'B': 1, 'K': 1, 'G': 4, 'S': 64, 'D': 64, 'cache': BF16, 'queries': BF16}


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({}, None),
    ({'G': 9}, '9 queries share'),
    ({'D': 72}, '72 wide'),
    ({'D': 80}, None),
    ({'D': 80, 'cache': FP8}, '80 wide'),
    ({'D': 32}, '32 wide'),
    ({'S': 63}, '63 slots'),
    ({'S': 8192}, '8192 slots'),
    ({'queries': jnp.float32}, 'queries are float32'),
    ({'cache': jnp.float32}, 'the cache is float32'),
  ],
)
def test_what_the_kernel_takes(changes, reason):
  is_ = TAKEN | changes
  q = jax.ShapeDtypeStruct((is_['B'], is_['K'] * is_['G'], is_['D']), is_['queries'])
  k = jax.ShapeDtypeStruct((is_['B'], is_['K'], is_['S'], is_['D']), is_['cache'])
  found = hopper.obstacle(q, k, None, share=True)
  assert found is None if reason is None else reason in found


def arguments_of_an_odd_cache():
  q, k, v, length, scales, _ = some(1, 1, 2, 9, 64, BF16, [9])
  return q, k, v, length, scales


def test_a_forced_kernel_that_cannot_run_is_refused():
  with pytest.raises(SettingsError, match=r"config.model.kernels = 'mosaic_gpu'.*decode attention.*9 slots"):
    decode_attention(*arguments_of_an_odd_cache(), kernels='mosaic_gpu')


@pytest.fixture
def on_a_gpu(monkeypatch, caplog):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(hopper, 'decode_attention', INTERPRETED)
  platform._note.cache_clear()
  caplog.set_level(logging.INFO, logger='sprl')
  return caplog


def test_on_a_hopper_gpu_the_kernel_runs_and_the_log_says_so(monkeypatch, on_a_gpu):
  monkeypatch.setattr(platform, 'hopper', lambda: True)
  arguments = some(1, 1, 2, 16, 64, BF16, [9])
  for _ in range(2):
    check(decode_attention(*arguments), arguments, 8)
  assert on_a_gpu.messages == ['decode attention: the Mosaic GPU kernel runs']


@pytest.mark.parametrize(('generation', 'reason'), [(True, '9 slots are no multiple of 8'), (False, 'not of the Hopper')])
def test_on_a_gpu_the_log_says_why_the_reference_runs(monkeypatch, on_a_gpu, generation, reason):
  monkeypatch.setattr(platform, 'hopper', lambda: generation)
  arguments = arguments_of_an_odd_cache()
  np.testing.assert_array_equal(decode_attention(*arguments).out, reference(*arguments).out)
  [line] = on_a_gpu.messages
  assert line.startswith('decode attention: the reference runs, as')
  assert reason in line


def test_the_reference_can_be_forced_and_is_all_that_a_cpu_has(monkeypatch, on_a_gpu):
  arguments = arguments_of_an_odd_cache()
  decode_attention(*arguments, kernels='reference')
  monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu')
  decode_attention(*arguments)
  assert on_a_gpu.messages == []
