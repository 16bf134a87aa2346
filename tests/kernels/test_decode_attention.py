"""Decode attention: reference and kernel against loops in float64, and the choice between them.

The kernel runs in Pallas's GPU interpreter, which raises on races. It has the blocks, barriers and copies of the device, and the
arithmetic of the CPU. tests/kernels/test_compiled.py compiles the kernel for the device.
"""

import dataclasses
import logging
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.cache.attend import attend
from sprl.cache.kv_cache import KVCache, Step
from sprl.cache.layout import CacheLayout
from sprl.cache.scales import Scales
from sprl.config import Cache, SettingsError
from sprl.kernels import attention_launch, hopper_eviction, platform
from sprl.kernels import hopper_decode_attention as hopper
from sprl.kernels.decode_attention import Attended, cost, decode_attention, reference
from sprl.kernels.rope import Rope

BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
slow = pytest.mark.slow
INTERPRETED = partial(hopper.decode_attention, interpret=plgpu.InterpretGPUParams(detect_races=True))
KERNEL = jax.jit(INTERPRETED, static_argnums=(6, 7))  # tests with equal shapes share a compilation


def by_hand(q, k, v, length, k_scale, v_scale, second, fp8_softmax=False):
  """Compute decode attention in float64, one row and head at a time. ml_dtypes rounds the weights of an FP8 softmax."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  (B, H, D), (K, S) = q.shape, k.shape[1:3]
  if second is not None:
    q, k = (np.concatenate([x, np.asarray(more, np.float64)], axis=-1) for x, more in zip((q, k), second))
  out, share, lse = np.zeros((B, H, D)), np.zeros((B, K, S)), np.full((B, H), -np.inf)
  for b, h in np.ndindex(B, H):
    kv, n = h // (H // K), length[b]
    if n == 0:
      continue
    score = k_scale * k[b, kv, :n] @ q[b, h] / np.sqrt(D)
    weight = np.exp(score - score.max())
    lse[b, h] = score.max() + np.log(weight.sum())
    weight /= weight.sum()
    seen = weight
    if fp8_softmax:  # the largest weight is 2^8, up to half a power of two
      total = 2 ** (np.log2(np.e) * score - np.round(np.log2(np.e) * score.max()) + 8)
      seen = total.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / total.sum()
    out[b, h] = v_scale * seen @ v[b, kv, :n]
    share[b, kv, :n] += weight / (H // K)
  return Attended(out, share, lse)


def random_arguments(B, K, G, S, D, dtype, length, second=False, seed=0):
  """Return random arguments of decode_attention. Slots from a row's length on hold large stale numbers."""
  rng = np.random.default_rng(seed)
  q = jnp.asarray(rng.normal(size=(B, K * G, D)), BF16)
  k, v, more = (rng.normal(size=(B, K, S, width)) for width in (D, D, 16))
  beyond = np.arange(S) >= np.asarray(length)[:, None]
  for x in (k, v, more):
    np.moveaxis(x, 1, 2)[beyond] = 440.0
  scales = jnp.float32(1.7), jnp.float32(0.3)
  further = (jnp.asarray(rng.normal(size=(B, K * G, 16)), BF16), jnp.asarray(more, dtype)) if second else None
  return q, jnp.asarray(k, dtype), jnp.asarray(v, dtype), jnp.asarray(length, jnp.int32), scales, further


def check(found, arguments, bits):
  """Compare with float64, within the rounding of probabilities and output to `bits` bits."""
  q, k, v, length, scales, second = arguments
  expected = by_hand(q, k, v, np.asarray(length), *(float(s) for s in scales), second)
  # Weights that add up to 1 are rounded one by one and multiply values of a few units. Then the output is rounded.
  largest = np.abs(np.asarray(expected.out)).max(initial=1.0)
  np.testing.assert_allclose(np.asarray(found.out, np.float64), expected.out, atol=3 * largest * 2.0**-bits)
  np.testing.assert_allclose(found.lse, expected.lse, atol=1e-5, rtol=1e-5)
  if found.share is not None:
    np.testing.assert_allclose(found.share, expected.share, atol=2e-6)


def check_fp8_softmax(found, arguments, rtol):
  """Compare with float64 and weights rounded by ml_dtypes. Only the output's own rounding separates the two.

  Subnormal weights differ with the blocks of a kernel, by less than 2^-16 of the largest weight each.
  """
  q, k, v, length, scales, second = arguments
  exact, unrounded = (by_hand(q, k, v, np.asarray(length), *(float(s) for s in scales), second, fp8) for fp8 in (True, False))
  out, tolerance = np.asarray(found.out, np.float64), rtol * np.abs(exact.out) + 1e-5
  assert np.all(np.abs(out - exact.out) <= tolerance)
  assert np.mean(np.abs(out - unrounded.out) > tolerance) > 0.5  # rounding shows
  np.testing.assert_allclose(found.lse, exact.lse, atol=1e-5, rtol=1e-5)
  if found.share is not None:
    np.testing.assert_allclose(found.share, exact.share, atol=2e-6)


def in_float32(arguments):
  """Return the arguments with float32 queries."""
  q, *others, second = arguments
  return q.astype(jnp.float32), *others, second and (second[0].astype(jnp.float32), second[1])


def interpreted(arguments, share=True, fp8_softmax=False):
  assert hopper.obstacle(arguments[0], arguments[1], arguments[5], share) is None
  out, lse, shares = KERNEL(*arguments, share, fp8_softmax)
  assert (shares is not None) == share
  return Attended(out, shares, lse)


@pytest.mark.parametrize('dtype', [BF16, FP8])
@pytest.mark.parametrize('second', [False, True])
def test_reference_matches_float64(dtype, second):
  arguments = random_arguments(4, 2, 3, 9, 6, dtype, [0, 1, 5, 9], second)
  exact = in_float32(arguments)
  check(reference(*exact), exact, 20)
  assert reference(*exact, share=False).share is None


@pytest.mark.parametrize('second', [False, True])
def test_reference_with_fp8_softmax_matches_float64(second):
  arguments = in_float32(random_arguments(4, 2, 3, 90, 6, FP8, [0, 1, 50, 90], second))
  check_fp8_softmax(jax.jit(partial(reference, fp8_softmax=True))(*arguments), arguments, 1e-5)


# Lengths: none, one, both sides of a block's end, all. 200 slots are not a multiple of a block.
RAGGED = 200, [0, 1, 63, 64, 65, 200]
HEADS = [(2, 3, 96, False), (1, 8, 128, True), (2, 7, 64, False), (1, 1, 256, True)]
DEFAULT = (BF16, *HEADS[0]), (FP8, *HEADS[1])


@pytest.mark.parametrize(
  ('dtype', 'K', 'G', 'D', 'second'),
  [
    pytest.param(*case, marks=() if case in DEFAULT else slow)
    for heads in HEADS
    for case in ((BF16, *heads[:3], False), (FP8, *heads))
  ],
)
def test_kernel_matches_float64_over_ragged_rows(dtype, K, G, D, second):
  S, length = RAGGED
  arguments = random_arguments(len(length), K, G, S, D, dtype, length, second)
  check(interpreted(arguments), arguments, 8)


@pytest.mark.parametrize('dtype', [BF16, pytest.param(FP8, marks=slow)])
def test_kernel_merges_splits(dtype):
  arguments = random_arguments(3, 1, 4, 776, 64, dtype, [0, 1, 776])
  check(interpreted(arguments, share=False), arguments, 8)


def test_a_long_row_has_the_same_bits_alone_in_its_team_and_among_others(monkeypatch):
  """Rows 0, 2 and 4 are a team of four programs, which divides the parts of row 0 if it is much longer than the others."""
  monkeypatch.setattr(attention_launch, 'PROGRAMS', 6)  # so that six rows fill the device
  monkeypatch.setattr(attention_launch, 'LONG', 4)
  arguments = random_arguments(6, 1, 2, 776, 64, BF16, [776] * 6)
  plan = hopper.launch(6, 776, 64, BF16, share=False, second=False)
  assert (plan.members, plan.rows, plan.teams) == (4, 4, 2)
  assert attention_launch.shares(plan, [13, 0, 1, 0]) == [4, 4, 4, 2]
  assert attention_launch.shares(plan, [13, 7, 9, 0]) == [13, 7, 9, 0]
  outs = []
  for length in ([776, 300, 0, 400, 1, 500], [776, 1, 400, 0, 576, 64]):
    ragged = *arguments[:3], jnp.asarray(length, jnp.int32), *arguments[4:]
    found = interpreted(ragged, share=False)
    check(found, ragged, 8)
    outs.append((np.asarray(found.out[0].astype(jnp.float32)), np.asarray(found.lse[0])))
  np.testing.assert_array_equal(*(out for out, _ in outs))
  np.testing.assert_array_equal(*(lse for _, lse in outs))


@pytest.mark.parametrize(('K', 'G', 'D', 'second'), [HEADS[1], *(pytest.param(*heads, marks=slow) for heads in HEADS[2:])])
def test_kernel_with_fp8_softmax_matches_float64_over_ragged_rows(K, G, D, second):
  S, length = RAGGED
  arguments = random_arguments(len(length), K, G, S, D, FP8, length, second)
  check_fp8_softmax(interpreted(arguments, fp8_softmax=True), arguments, 2.0**-8)


def test_kernel_with_fp8_softmax_merges_splits_and_growing_maxima():
  """Later slots have larger scores, so that most blocks raise the running maximum."""
  q, k, v, length, scales, second = random_arguments(3, 1, 4, 776, 64, FP8, [0, 1, 776])
  growing = (k.astype(jnp.float32) * jnp.linspace(0.2, 2, 776)[:, None]).astype(FP8)
  arguments = q, growing, v, length, scales, second
  check_fp8_softmax(interpreted(arguments, share=False, fp8_softmax=True), arguments, 2.0**-8)


@st.composite
def shapes(draw):
  """Draw arguments of `random_arguments` that the kernel accepts."""
  dtype = draw(st.sampled_from([BF16, FP8]))
  S = 8 * draw(st.integers(1, 20))
  length = draw(st.lists(st.one_of(st.sampled_from([0, 1, S]), st.integers(0, S)), min_size=1, max_size=3))
  D = draw(st.sampled_from([64, 96, 128] if dtype == FP8 else [64, 80, 96, 128]))
  K, G, second, seed = draw(st.integers(1, 2)), draw(st.integers(1, 8)), draw(st.booleans()), draw(st.integers(0, 99))
  return len(length), K, G, S, D, dtype, length, second and dtype == FP8, seed


@given(shapes(), st.booleans())
@settings(max_examples=40)
@slow
def test_kernel_matches_float64_on_random_shapes(shape, share):
  arguments = random_arguments(*shape)
  check(interpreted(arguments, share), arguments, 8)


def test_row_longer_than_its_slots_attends_to_all():
  S, length = RAGGED
  arguments = random_arguments(len(length), 2, 3, S, 96, BF16, length)
  beyond = (*arguments[:3], arguments[3].at[-1].set(S + 1), *arguments[4:])
  for found, expected in zip(interpreted(beyond), interpreted(arguments)):
    np.testing.assert_array_equal(found, expected)


def test_queries_beyond_float16_attend_to_one_slot():
  q, k, v, length, scales, _ = random_arguments(1, 1, 1, 8, 64, FP8, [8])
  out, _, _ = KERNEL(q * 1e6, k, v, length, scales, None, False)
  slot = np.argmax(np.asarray(k[0, 0], np.float64) @ np.asarray(q[0, 0], np.float64))
  np.testing.assert_allclose(out[0, 0].astype(jnp.float32), v[0, 0, slot].astype(jnp.float32) * scales[1], rtol=0.01)


@pytest.mark.parametrize(('storage', 'fp8_softmax'), [pytest.param(BF16, False, marks=slow), (FP8, False), (FP8, True)])
def test_cache_decodes_alike_with_kernels_and_references(monkeypatch, storage, fp8_softmax):
  monkeypatch.setattr(hopper, 'decode_attention', INTERPRETED)
  monkeypatch.setattr(hopper_eviction, 'compact', partial(hopper_eviction.compact, interpret=plgpu.InterpretGPUParams()))
  B, T, K, G, D = 2, 40, 2, 3, 128
  layout = CacheLayout(
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
    fp8_softmax=fp8_softmax,
  )
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.normal(size=(B, T + 1, n, D)), BF16) for n in (K * G, K, K))

  @partial(jax.jit, static_argnums=0)
  def decoded(kernels):
    cache = KVCache.empty(dataclasses.replace(layout, kernels=kernels), B, scales=Scales(*(jnp.full(1, 0.02) for _ in range(3))))
    prompt, token = Step(jnp.array([T, T - 7])), Step(jnp.ones(B, jnp.int32), decoding=True)
    _, cache = attend(0, cache, prompt, q[:, :T], k[:, :T], v[:, :T])
    out, cache = attend(0, cache.advance(prompt), token, q[:, T:], k[:, T:], v[:, T:])
    return out.astype(jnp.float32), cache.layers[0].carried

  for found, expected in zip(decoded('mosaic_gpu'), decoded('reference')):
    # The reference rounds unquantised weights to bfloat16, the kernel to float16. Weights in e4m3 are equal: only outputs differ.
    np.testing.assert_allclose(found, expected, **({'rtol': 2.0**-7, 'atol': 1e-5} if fp8_softmax else {'atol': 0.02}))


def test_cost_by_hand():
  # 2 rows, 4 heads over 2, 8 slots of 64: keys and values 2*2*2*8*64 bytes in FP8; q and out 2*4*64 numbers of 2 bytes each
  assert cost(2, 4, 2, 8, 64, FP8) == (2 * 2 * 2 * 8 * 64 + 2 * 2 * 2 * 4 * 64 + 4 * 2 * 4, 4 * 2 * 4 * 8 * 64)
  assert cost(2, 4, 2, 8, 64, BF16, share=True).bytes - cost(2, 4, 2, 8, 64, BF16).bytes == 4 * 2 * 8 * 2
  more, less = cost(2, 4, 2, 8, 64, FP8, second=16), cost(2, 4, 2, 8, 64, FP8)
  assert (more.bytes - less.bytes, more.flops - less.flops) == (16 * (2 * 2 * 8 + 2 * 2 * 4), 2 * 16 * 2 * 4 * 8)


# --- choice of kernel or reference -------------------------------------------------------------------------------------

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
    ({'cache': FP8, 'second': (FP8, 16)}, None),
    ({'cache': FP8, 'second': (FP8, 8)}, '8 second codes'),
    ({'second': (BF16, 16)}, '16 second codes in bfloat16'),
  ],
)
def test_obstacle_names_the_shape_or_dtype(changes, reason):
  is_ = TAKEN | changes
  q = jax.ShapeDtypeStruct((is_['B'], is_['K'] * is_['G'], is_['D']), is_['queries'])
  k = jax.ShapeDtypeStruct((is_['B'], is_['K'], is_['S'], is_['D']), is_['cache'])
  second = None
  if 'second' in changes:
    dtype, W = changes['second']
    second = tuple(jax.ShapeDtypeStruct((*x.shape[:-1], W), dtype) for x in (q, k))
  found = hopper.obstacle(q, k, second, share=True)
  assert found is None if reason is None else reason in found


def arguments_of_an_odd_cache():  # 9 slots: not a multiple of 8
  q, k, v, length, scales, _ = random_arguments(1, 1, 2, 9, 64, BF16, [9])
  return q, k, v, length, scales


def test_forced_kernel_that_cannot_run_raises():
  with pytest.raises(SettingsError, match=r"config\.model\.kernels = 'mosaic_gpu'.*decode attention.*9 slots"):
    decode_attention(*arguments_of_an_odd_cache(), kernels='mosaic_gpu')


@pytest.fixture
def on_a_gpu(monkeypatch, caplog):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(hopper, 'decode_attention', KERNEL)
  platform._note.cache_clear()
  caplog.set_level(logging.INFO, logger='sprl')
  return caplog


def test_kernel_runs_on_hopper_and_is_logged_once(monkeypatch, on_a_gpu):
  monkeypatch.setattr(platform, 'hopper', lambda: True)
  S, length = RAGGED
  arguments = random_arguments(len(length), 2, 3, S, 96, BF16, length)
  for _ in range(2):
    check(decode_attention(*arguments), arguments, 8)
  assert on_a_gpu.messages == ['decode attention: the Mosaic GPU kernel runs']


@pytest.mark.parametrize(('generation', 'reason'), [(True, '9 slots'), (False, 'not of the Hopper generation')])
def test_log_says_why_the_reference_runs_on_a_gpu(monkeypatch, on_a_gpu, generation, reason):
  monkeypatch.setattr(platform, 'hopper', lambda: generation)
  arguments = arguments_of_an_odd_cache()
  np.testing.assert_array_equal(decode_attention(*arguments).out, reference(*arguments).out)
  [line] = on_a_gpu.messages
  assert line.startswith('decode attention: the reference runs')
  assert reason in line


def test_reference_runs_if_forced_and_on_cpu(monkeypatch, on_a_gpu):
  arguments = arguments_of_an_odd_cache()
  decode_attention(*arguments, kernels='reference')
  monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu')
  decode_attention(*arguments)
  assert on_a_gpu.messages == []
