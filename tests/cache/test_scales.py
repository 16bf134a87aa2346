"""FP8 keys and values against the casts of ml_dtypes: scales, errors, and keys with large biases."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small

from sprl.cache.attend import attend
from sprl.cache.key_bias import KeyBias, mean_turn, reach
from sprl.cache.kv_cache import KVCache, Step
from sprl.cache.layout import cache_layout
from sprl.cache.scales import FIRST_FORWARD, Scales, from_amax, percentile, with_margin
from sprl.config import Cache, Quant, Streaming
from sprl.kernels.rope import Rope
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.sampler import decode
from sprl.sampler.weights import sampler_weights

DENSE, PLAIN, KV8 = Cache(), Quant(), Quant(sampler='kv8')
B, T, H, K, D = 2, 24, 4, 2, 16
WIDE = 64  # head width of the tests of key biases: a quarter of the planes have second codes


def layout_of(quant, cache=DENSE, family='llama', completion=24):
  width = WIDE if family == 'qwen2' else D
  return cache_layout(tiny(family, num_hidden_layers=1, head_dim=width), cache, quant, T, completion, 'float32')


def unit():
  return Scales(*(jnp.ones(1) for _ in range(3)))


def tokens(n=T, seed=0, key=1.0, width=D):
  rng = np.random.default_rng(seed)
  q, k, v = (rng.normal(size=(B, n, heads, width)) for heads in (H, K, K))
  return tuple(jnp.asarray(x, jnp.float32) for x in (q, key * k, v))


@jax.jit
def prefill(cache, count, *qkv):
  out, cache = attend(0, cache, Step(count), *qkv)
  return out, cache.advance(Step(count))


@jax.jit
def decode_step(cache, active, *qkv):
  step = Step(active, decoding=True)
  out, cache = attend(0, cache, step, *qkv)
  return out, cache.advance(step)


BOTH = np.ones(B, np.int32)


def amax(*qkv):
  return np.array([[np.abs(x).max()] for x in qkv], np.float32)


def relative(got, exact):
  got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
  return np.linalg.norm(got - exact) / np.linalg.norm(exact)


def rounded(x, scale):
  """Return x rounded to e4m3 by ml_dtypes. x / scale must be in range."""
  codes = (np.asarray(x, np.float32) / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn)
  return codes.astype(np.float64) * float(scale)


def output(q, k, v, softmax='none'):
  """Return [H, D] float64, the output of one query over keys and values [n, K, D]. An FP8 softmax has rounded weights."""
  out = []
  for h, query in enumerate(q):
    score = k[:, h // (H // K)] @ query / np.sqrt(q.shape[-1])
    weight = 2.0 ** (np.log2(np.e) * score - np.round(np.log2(np.e) * score.max()) + 8)
    seen = rounded(weight, 1.0) if softmax == 'fp8' else weight
    out.append(seen / weight.sum() @ v[:, h // (H // K)])
  return np.array(out)


# --- the scales themselves -------------------------------------------------------------------------------------------


def test_scales_put_the_largest_value_at_the_divisor():
  seen = np.array([[100.0, 0.0, 3.0], [200.0, 50.0, 0.0], [10.0, 1.0, 7.0]], np.float32)
  scales = from_amax(seen, (200.0, 100.0, 50.0))
  np.testing.assert_allclose(scales.q, [0.5, 1.0, 0.015], rtol=1e-6)  # 1 for layers without values
  np.testing.assert_allclose(scales.k, [2.0, 0.5, 1.0], rtol=1e-6)
  np.testing.assert_allclose(scales.v, [0.2, 0.02, 0.14], rtol=1e-6)
  assert {x.dtype for x in scales} == {jnp.dtype('float32')}
  trainer = from_amax(seen, with_margin(1.05))
  np.testing.assert_allclose(trainer.k[0] * 448, 200 * 1.05, rtol=1e-6)
  first = from_amax(seen, FIRST_FORWARD)
  headroom = [float(x[0]) * 448 / largest for x, largest in zip(first, (100.0, 200.0, 10.0))]
  np.testing.assert_allclose(headroom, [2.24, 2.24, 4.48], rtol=1e-6)


def test_the_percentile_is_the_nearest_rank_of_99_9():
  """The percentile is the smallest value that at least 99.9 % of the values do not exceed."""
  seen = np.random.default_rng(0).random((3503, 3, 2)).astype(np.float32)
  found = jax.jit(percentile)
  for N in (1, 2, 5, 999, 1000, 1001, 2000, 2001, 3500):  # microbatches after the N-th do not count
    got = found(seen, jnp.int32(N))
    for i, j in np.ndindex(3, 2):
      values = np.sort(seen[:N, i, j])
      rank = next(r for r in range(1, N + 1) if Fraction(r, N) >= Fraction(999, 1000))
      assert float(got[i, j]) == values[rank - 1]
    if N < 1000:
      np.testing.assert_array_equal(got, seen[:N].max(axis=0))
    if N == 3500:
      assert np.all(np.asarray(got) < seen[:N].max(axis=0))


# --- the error of FP8 ------------------------------------------------------------------------------------------------


def stored(scales, qkv, count=(T, T)):
  """Return (keys, values, number of clamped numbers of each row), read from an FP8 cache."""
  _, cache = prefill(KVCache.empty(layout_of(KV8), B, scales=scales), jnp.array(count), *qkv)
  held = jax.device_get(cache.layers[0])
  assert held.k.dtype == held.v.dtype == np.uint8
  codes = (np.swapaxes(x.view(ml_dtypes.float8_e4m3fn).astype(np.float32), 1, 2)[:, :T] for x in (held.k, held.v))
  k, v = (x * float(scale[0]) for x, scale in zip(codes, (scales.k, scales.v)))
  return k, v, cache.saturated.sum(1).tolist()


@pytest.mark.parametrize('largest', [3.0, 40.0, 447.0])
def test_below_448_a_calibrated_scale_is_no_better_than_1(largest):
  """docs/methods/fp8.md, Cache scales: the error is flat for every scale that does not clamp."""
  q, k, v = tokens(key=1.0)
  k = k * (largest / float(jnp.abs(k).max()))
  for scales in (unit(), from_amax(amax(q, k, v), with_margin(1.05)), from_amax(amax(q, k, v), FIRST_FORWARD)):
    keys, values, saturated = stored(scales, (q, k, v))
    assert saturated == [0, 0]
    assert abs(relative(keys, k) - 0.0265) < 0.0015
    assert abs(relative(values, v) - 0.0265) < 0.0015


def test_above_448_a_scale_of_1_clamps_and_a_calibrated_scale_does_not():
  q, k, v = tokens(seed=1)
  k = np.array(k) * (1500 / float(jnp.abs(k).max()))
  k[0, 20:] = 5000.0  # padding, not counted
  v = np.array(v)
  v[1, 3, 0, :5] = 500.0
  k, v = jnp.asarray(k), jnp.asarray(v)
  counts = [int(np.sum(np.abs(k[0, :20]) > 448)), int(np.sum(np.abs(k[1]) > 448)) + 5]
  assert min(counts) > 20
  keys, _, saturated = stored(unit(), (q, k, v), (20, T))
  assert saturated == counts
  np.testing.assert_array_equal(keys, rounded(np.clip(k, -448, 448), 1.0))
  assert relative(keys[1], k[1]) > 0.2
  calibrated = from_amax(amax(q, k[:, :20], v), with_margin(1.05))
  keys, values, saturated = stored(calibrated, (q, k, v), (20, T))
  assert saturated == [0, 0]
  assert abs(relative(keys[1], k[1]) - 0.0265) < 0.0015
  assert relative(values[1], v[1]) < 0.04
  tight = from_amax(amax(q, k[1], v), with_margin(1 / 1.05))  # the largest value just does not fit
  assert stored(tight, (q, k, v), (20, T))[2][1] >= 1


def test_decode_steps_count_saturation_of_active_rows_only():
  q, k, v = tokens()
  _, cache = prefill(KVCache.empty(layout_of(KV8), B, scales=unit()), jnp.array([4, 4]), q, k, v)
  one = tuple(x[:, 5:6] for x in (q, k * 1e5, v))
  expected = [int(np.sum(np.abs(one[1][b]) > 448)) for b in range(B)]
  assert decode_step(cache, BOTH, *one)[1].saturated.sum(1).tolist() == expected
  assert decode_step(cache, np.array([1, 0], np.int32), *one)[1].saturated.sum(1).tolist() == [expected[0], 0]


def test_clamped_queries_of_real_tokens_are_counted_apart_from_the_cache():
  """The scales saturate queries only. The counts are of prefill and decode steps, by row and query head."""
  q, k, v = tokens(T + 1)
  scale = 1.5 / 448  # clamps queries beyond 1.5
  scales = Scales(jnp.array([scale]), jnp.ones(1), jnp.ones(1))
  empty = KVCache.empty(layout_of(Quant(sampler='w8a8_kv8')), B, scales=scales)
  lengths = [20, T]
  _, cache = prefill(empty, jnp.array(lengths), *(x[:, :T] for x in (q, k, v)))
  active = np.array([0, 1], np.int32)
  _, cache = decode_step(cache, active, *(x[:, T:] for x in (q, k, v)))
  expected = np.zeros((B, H), int)
  for b, t, h in np.ndindex(B, T + 1, H):
    if t < lengths[b] or (t == T and active[b]):
      expected[b, h] += np.sum(np.abs(np.asarray(q, np.float64)[b, t, h]) > 448 * np.float32(scale))
  assert expected.min() > 10
  np.testing.assert_array_equal(cache.saturated_queries, expected)
  assert cache.saturated.sum() == 0
  _, unrounded = prefill(KVCache.empty(layout_of(KV8), B, scales=scales), jnp.array(lengths), *(x[:, :T] for x in (q, k, v)))
  assert unrounded.saturated_queries.sum() == 0  # kv8 does not round queries


@pytest.mark.parametrize(('sampler', 'softmax'), [('kv8', 'none'), ('w8a8_kv8', 'none'), ('w8a8_kv8', 'fp8')])
def test_attention_equals_float64_attention_over_rounded_numbers(sampler, softmax):
  """Prefill and decode steps round the same numbers."""
  layout = layout_of(Quant(sampler=sampler, softmax=softmax))
  scales = Scales(jnp.array([0.013]), jnp.array([0.017]), jnp.array([0.019]))
  q, k, v = tokens()
  n = T - 3
  out, cache = prefill(KVCache.empty(layout, B, scales=scales), jnp.array([n, n]), q, k, v)
  outs = [out[:, :n]]
  for t in range(n, T):
    out, cache = decode_step(cache, BOTH, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
    outs.append(out)
  got = np.concatenate(outs, axis=1)
  queries = rounded(q, 0.013) if sampler == 'w8a8_kv8' else np.asarray(q, np.float64)
  keys, values = rounded(k, 0.017), rounded(v, 0.019)
  for b, t in np.ndindex(B, T):
    np.testing.assert_allclose(got[b, t], output(queries[b, t], keys[b, : t + 1], values[b, : t + 1], softmax), atol=2e-5)
  if softmax == 'fp8':
    last = [output(queries[b, -1], keys[b], values[b]) for b in range(B)]
    assert relative(got[:, -1], last) > 0.005  # rounding shows
  if sampler == 'w8a8_kv8':
    assert relative(queries, q) > 0.02


def test_a_rescaled_cache_holds_the_same_keys_and_values():
  """With other scales and another key bias keys and values are equal to two roundings."""
  layout = layout_of(KV8, family='qwen2')
  old, new = Scales(*(jnp.full(1, x) for x in (1.0, 0.5, 0.02))), Scales(*(jnp.full(1, x) for x in (1.0, 0.9, 0.03)))
  cache = KVCache.empty(layout, B, scales=old, bias=bias_of(layout, large_bias(0)))
  rng, held = np.random.default_rng(0), cache.layers[0]
  shapes = {'k': held.k.shape, 'v': held.v.shape, 'second': held.second.shape}
  codes = {name: (20 * rng.normal(size=shape)).astype(ml_dtypes.float8_e4m3fn) for name, shape in shapes.items()}
  held = dataclasses.replace(held, **{name: jnp.asarray(x.view(np.uint8)) for name, x in codes.items()})
  other = bias_of(layout, large_bias(1))
  rescaled = jax.jit(KVCache.rescaled)(dataclasses.replace(cache, layers=(held,)), new, other)
  exact = whole_keys(held, cache.bias, 0.5) + mean_of(layout, large_bias(0))[:, None]
  found = whole_keys(rescaled.layers[0], rescaled.bias, 0.9) + mean_of(layout, large_bias(1))[:, None]
  assert relative(found, exact) < 0.03
  assert relative(number(rescaled.layers[0].v) * 0.03, codes['v'].astype(np.float64) * 0.02) < 0.03


# --- key biases ------------------------------------------------------------------------------------------------------


def rotated(x, position):
  """Return heads [..., D] rotated to a position, float64. Plane i holds coordinates i and i + D/2."""
  half = x.shape[-1] // 2
  angle = position * 10_000.0 ** (-2 * np.arange(half) / x.shape[-1])
  a, b = np.asarray(x[..., :half], np.float64), np.asarray(x[..., half:], np.float64)
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def large_bias(seed=0):
  """Return [K, WIDE]: 50 to 200 on four channels of each head, as in Qwen2's keys."""
  rng = np.random.default_rng(seed)
  bias = 0.1 * rng.normal(size=(K, WIDE))
  for head in bias:
    head[rng.choice(WIDE, 4, replace=False)] = rng.uniform(50, 200, 4) * rng.choice([-1, 1], 4)
  return bias


def bias_of(layout, bias):
  return KeyBias.of(layout, (jnp.asarray(bias.reshape(-1), jnp.float32),))


def table_of(layout, bias):
  """Return the bias of each head [K, positions, D], rotated to each position of the layout."""
  return np.stack([rotated(bias, p) for p in range(layout.positions)], axis=1)


def mean_of(layout, bias):
  return table_of(layout, bias).mean(axis=1)


def number(codes):
  """Return the numbers of FP8 codes that are stored as bytes."""
  return np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def whole_keys(held, bias, scale):
  """Return the centred keys [B, K, S, D] that the first and second codes of a layer stand for."""
  k, second = number(held.k), number(held.second) / 16
  for head, coordinates in enumerate(np.asarray(bias.twice[0])):
    k[:, head][..., coordinates] += second[:, head]
  return k * scale


def biased_tokens(layout, bias, at):
  """Return (queries, keys with the bias rotated to the positions `at` [B, n], values) of random tokens, and their FP8 scales.

  Small queries, so that one key does not take all weight. Values are small integers, which are exact in FP8.
  """
  q, k, v = map(np.asarray, tokens(np.shape(at)[1], width=WIDE))
  biased = k + np.moveaxis(table_of(layout, bias), 0, 1)[at]
  largest = np.abs(biased - mean_of(layout, bias)).max()
  scales = Scales(jnp.ones(1), jnp.full(1, 1.05 * largest / 448, jnp.float32), jnp.ones(1))
  return (q / 8, biased, np.round(4 * v)), scales


def in_float32(arrays):
  return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def test_the_mean_rotation_and_the_planes_with_second_codes_equal_those_of_all_positions():
  """The oracle rotates the bias to every position. Planes are ranked by what the mean leaves of them."""
  layout = layout_of(KV8, family='qwen2')
  bias = np.random.default_rng(3).standard_t(1.5, size=(K, WIDE))
  table, found = table_of(layout, bias), bias_of(layout, bias)
  np.testing.assert_allclose(found.mean[0], table.mean(axis=1), atol=1e-5)
  left = np.square(table - table.mean(axis=1, keepdims=True)).mean(axis=1).reshape(K, 2, -1).sum(axis=1)  # [K, planes]
  for coordinates, plane in zip(np.asarray(found.twice[0]), left):
    largest = np.argsort(-plane)[:8]
    assert sorted(coordinates) == sorted([*largest, *(largest + WIDE // 2)])
  assert np.abs(table - table.mean(axis=1, keepdims=True)).max() <= reach(layout, (jnp.asarray(bias.reshape(-1)),))[0]


def test_the_mean_rotation_of_a_plane_that_hardly_turns_is_finite():
  cos, sin, left = mean_turn(Rope(theta=1e30), 64, 100_000)
  angle = np.arange(100_000)[:, None] * 1e30 ** (-np.arange(32) / 32)
  np.testing.assert_allclose(cos, np.cos(angle).mean(axis=0), atol=1e-4)
  np.testing.assert_allclose(sin, np.sin(angle).mean(axis=0), atol=1e-4)
  assert left[-1] < 1e-3
  assert left[0] > 0.99


def test_large_key_biases_cost_no_precision_in_fp8():
  """Decode steps, also after evictions, are compared with a float64 cache that has the same evictions."""
  budget, interval, sinks, steps, prompts = 20, 4, 4, 12, [T, T - 7]
  cache = Cache(method='streaming', budget=budget, interval=interval, window=4, streaming=Streaming(sinks))
  layout = layout_of(KV8, cache, 'qwen2')
  assert layout.key_bias
  bias = large_bias()
  at = np.concatenate([np.tile(np.arange(T), (B, 1)), [[n + i for i in range(steps)] for n in prompts]], axis=1)
  (q, biased, v), scales = biased_tokens(layout, bias, at)
  unbiased = biased - np.moveaxis(table_of(layout, bias), 0, 1)[at]
  scale = 1.05 * np.abs(biased).max() / 448
  arrays = in_float32((q, biased, v))
  start = KVCache.empty(layout, B, scales=scales, bias=bias_of(layout, bias))
  _, held = prefill(start, jnp.array(prompts), *(x[:, :T] for x in arrays))
  kept = [[*range(sinks), *range(n - budget + sinks, n)] if n > budget else [*range(n)] for n in prompts]  # columns of the arrays
  errors = []
  for i in range(steps):
    out, held = decode_step(held, BOTH, *(x[:, T + i : T + i + 1] for x in arrays))
    for b in range(B):
      kept[b].append(T + i)
      if (i + 1) % interval == 0 and len(kept[b]) > budget:
        kept[b] = kept[b][:sinks] + kept[b][-(budget - sinks) :]

    def outputs(k, i=i):
      return np.stack([output(q[b, T + i].astype(np.float64), k[b, kept[b]], v[b, kept[b]]) for b in range(B)])

    exact = outputs(biased)
    without = outputs(biased - unbiased + rounded(unbiased, 0.01))  # the bias is not rounded at all
    errors.append([relative(found, exact) for found in (out[:, 0], without, outputs(rounded(biased, scale)))])
  ours, without, inside = np.mean(errors, axis=0)
  assert 0 < ours < 2 * without
  assert ours < inside / 10
  assert held.saturated.sum(1).tolist() == [0, 0]
  assert held.seen.tolist() == [n + steps for n in prompts]
  assert held.length.tolist() == [budget] * B


def test_biases_on_all_slow_planes_cost_no_precision_although_few_have_second_codes():
  layout, rng = layout_of(KV8, family='qwen2'), np.random.default_rng(0)
  bias = np.where(np.arange(WIDE) % (WIDE // 2) >= 16, 100 * rng.choice([-1, 1], (K, WIDE)), 0)  # 16 planes turn by < 28 degrees
  (q, biased, v), scales = biased_tokens(layout, bias, np.tile(np.arange(T), (B, 1)))
  start = KVCache.empty(layout, B, scales=scales, bias=bias_of(layout, bias))
  out, _ = prefill(start, jnp.array([T, T]), *in_float32((q, biased, v)))
  coarse = rounded(biased, 1.05 * np.abs(biased).max() / 448)
  exact, inside = (output(q[1, -1].astype(np.float64), k[1], v[1]) for k in (biased, coarse))
  assert 0 < relative(out[1, -1], exact) < 0.06
  assert relative(out[1, -1], exact) < relative(inside, exact) / 5


@jax.jit
def read_given(cache, count, *qkv):
  step = Step(count, decoding=True)
  out, cache = attend(0, cache, step, *qkv)
  return out, cache.advance(step)


def test_given_tokens_after_an_eviction_see_whole_keys():
  """Streaming keeps 4 sinks and the newest 8 tokens of the prompt. Second codes move with their keys."""
  cache = Cache(method='streaming', budget=12, interval=4, window=4, streaming=Streaming(4))
  layout, bias = layout_of(KV8, cache, 'qwen2'), large_bias()
  (q, biased, v), scales = biased_tokens(layout, bias, np.tile(np.arange(T + 2), (B, 1)))
  arrays = in_float32((q, biased, v))
  start = KVCache.empty(layout, B, T, scales=scales, bias=bias_of(layout, bias))
  _, held = prefill(start, jnp.array([T, T]), *(x[:, :T] for x in arrays))
  assert held.layers[0].k.shape[2] == held.layers[0].second.shape[2] == layout.slots == 16
  out, _ = read_given(held, jnp.array([2, 2]), *(x[:, T:] for x in arrays))
  kept = [0, 1, 2, 3, *range(T - 8, T + 2)]
  exact = np.stack([output(q[b, T + 1].astype(np.float64), biased[b, kept].astype(np.float64), v[b, kept]) for b in range(B)])
  assert 0 < relative(out[:, 1], exact) < 0.05


def test_prefill_and_decode_steps_attend_to_the_same_keys():
  """The last query of a prefill and that of a decode step over the same tokens give equal outputs."""
  layout, bias = layout_of(KV8, family='qwen2'), large_bias()
  (q, biased, v), scales = biased_tokens(layout, bias, np.tile(np.arange(T), (B, 1)))
  arrays, start = in_float32((q, biased, v)), KVCache.empty(layout, B, scales=scales, bias=bias_of(layout, bias))
  together, _ = prefill(start, jnp.array([T, T]), *arrays)
  _, held = prefill(start, jnp.array([T - 1, T - 1]), *arrays)
  alone, _ = decode_step(held, BOTH, *(x[:, -1:] for x in arrays))
  np.testing.assert_allclose(alone[:, 0], together[:, -1], atol=2e-5)
  exact = output(q[1, -1].astype(np.float64), biased[1], v[1])
  assert 0 < relative(together[1, -1], exact) < 0.05


def test_compression_scores_see_the_mean_of_the_biases():
  """keydiff keeps the keys that are far from the mean direction. The oracle has whole keys; without the mean it keeps others."""
  budget, window = 14, 4
  cache = Cache(method='keydiff', budget=budget, interval=8, window=window)
  layout, bias = layout_of(KV8, cache, 'qwen2'), large_bias()
  (q, biased, v), scales = biased_tokens(layout, bias, np.tile(np.arange(T), (B, 1)))
  start = KVCache.empty(layout, B, T, scales=scales, bias=bias_of(layout, bias))
  _, held = prefill(start, jnp.array([T, T]), *in_float32((q, biased, v)))

  def kept(k):
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    mean = unit.mean(axis=0)
    old = np.argsort(unit[: T - window] @ mean, kind='stable')[: budget - window]
    return [*sorted(old), *range(T - window, T)]

  positions = np.asarray(held.layers[0].position)[:, :, :budget].tolist()
  assert positions == [[kept(biased[b, :, h]) for h in range(K)] for b in range(B)]
  assert positions != [[kept(biased[b, :, h] - mean_of(layout, bias)[h]) for h in range(K)] for b in range(B)]


def test_the_cost_of_key_biases_does_not_grow_with_the_positions():
  """With ten times the positions and equal slots a decode step has equal operations and memory."""
  cache = Cache(method='keydiff', budget=T, interval=8, window=4)
  flops, held, temporary = [], [], []
  for completion in (1000, 10_000):
    layout = layout_of(KV8, cache, 'qwen2', completion)
    assert layout.slots == T + 8
    made = KVCache.empty(layout, B, scales=unit(), bias=bias_of(layout, large_bias()))
    compiled = decode_step.lower(made, BOTH, *(x[:, :1] for x in tokens(width=WIDE))).compile()
    flops.append(compiled.cost_analysis()['flops'])
    temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    held.append(KVCache.bytes(layout, B))
    assert held[-1] == sum(x.nbytes for x in jax.tree.leaves(made))
  assert flops[0] == flops[1]
  assert temporary[0] == temporary[1]
  assert held[0] == held[1]


def test_the_sampler_takes_key_biases_from_its_weights():
  """The prefill's hidden states are closer to those of a float32 cache if they are stored with regard to their biases."""
  config, params = small.model('qwen2', num_hidden_layers=1, head_dim=WIDE)
  params = jax.tree.map(lambda w: w, params)
  params['layers'][0]['attention']['k']['bias'] = jnp.asarray(large_bias().reshape(-1), jnp.float32)
  graph, rng = transformer.graph(config), np.random.default_rng(0)
  ids, lengths = jnp.asarray(rng.integers(0, 259, (3, 16)), jnp.int32), jnp.array([16, 9, 12])
  weights = sampler_weights(params, jnp.dtype('float32'))._replace(scales=Scales(*(jnp.full(1, 0.6) for _ in range(3))))
  fp8 = cache_layout(config, DENSE, KV8, 16, 4, 'float32')
  hidden = {}
  for name, layout in (
    ('exact', cache_layout(config, DENSE, PLAIN, 16, 4, 'float32')),
    ('apart', fp8),
    ('inside', dataclasses.replace(fp8, key_bias=False)),
  ):
    prompts = decode.prefill(graph, layout, weights, ids, lengths)
    assert (prompts.cache.bias is not None) == (name == 'apart')
    assert prompts.cache.saturated.sum(1).tolist() == [0, 0, 0]
    hidden[name] = prompts.hidden
  apart, inside = (relative(hidden[name], hidden['exact']) for name in ('apart', 'inside'))
  assert apart < 0.1
  assert apart < inside / 5
