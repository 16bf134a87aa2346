"""FP8 keys and values against the casts of ml_dtypes: scales, errors, and key biases outside of FP8."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small

from sprl.cache.key_bias import KeyBias, rotated_biases
from sprl.cache.kv_cache import KVCache, Step
from sprl.cache.layout import cache_layout
from sprl.cache.scales import FIRST_FORWARD, Scales, from_amax, percentile, with_margin
from sprl.config import Cache, Quant, Streaming
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.sampler import decode
from sprl.sampler.weights import sampler_weights

DENSE, PLAIN, KV8 = Cache(), Quant(), Quant(sampler='kv8')
B, T, H, K, D = 2, 24, 4, 2, 16


def layout_of(quant, cache=DENSE, family='llama', completion=24):
  return cache_layout(tiny(family, num_hidden_layers=1, head_dim=D), cache, quant, T, completion, 'float32')


def unit():
  return Scales(*(jnp.ones(1) for _ in range(3)))


def tokens(n=T, seed=0, key=1.0):
  rng = np.random.default_rng(seed)
  q, k, v = (rng.normal(size=(B, n, heads, D)) for heads in (H, K, K))
  return tuple(jnp.asarray(x, jnp.float32) for x in (q, key * k, v))


@jax.jit
def prefill(cache, count, *qkv):
  out, cache = cache.attend(0, Step(count), *qkv)
  return out, cache.advance(Step(count))


@jax.jit
def decode_step(cache, active, *qkv):
  step = Step(active, decoding=True)
  out, cache = cache.attend(0, step, *qkv)
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
    score = k[:, h // (H // K)] @ query / np.sqrt(D)
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
  """The scales saturate queries only. The counts are of prefill and decode steps, by row and kv head."""
  q, k, v = tokens(T + 1)
  scale = 1.5 / 448  # clamps queries beyond 1.5
  scales = Scales(jnp.array([scale]), jnp.ones(1), jnp.ones(1))
  empty = KVCache.empty(layout_of(Quant(sampler='w8a8_kv8')), B, scales=scales)
  lengths = [20, T]
  _, cache = prefill(empty, jnp.array(lengths), *(x[:, :T] for x in (q, k, v)))
  active = np.array([0, 1], np.int32)
  _, cache = decode_step(cache, active, *(x[:, T:] for x in (q, k, v)))
  expected = np.zeros((B, K), int)
  for b, t, h in np.ndindex(B, T + 1, H):
    if t < lengths[b] or (t == T and active[b]):
      expected[b, h // (H // K)] += np.sum(np.abs(np.asarray(q, np.float64)[b, t, h]) > 448 * np.float32(scale))
  assert expected.min() > 20
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
  biases = [KeyBias.of(layout, (jnp.asarray(large_bias(seed).reshape(-1), jnp.float32),)) for seed in (0, 1)]
  old, new = Scales(*(jnp.full(1, x) for x in (1.0, 0.5, 0.02))), Scales(*(jnp.full(1, x) for x in (1.0, 0.9, 0.03)))
  cache = KVCache.empty(layout, B, scales=old, bias=biases[0])
  rng = np.random.default_rng(0)
  codes = [rng.normal(size=cache.layers[0].k.shape).astype(ml_dtypes.float8_e4m3fn) * 20 for _ in range(2)]
  held = dataclasses.replace(cache.layers[0], **dict(zip('kv', (jnp.asarray(x.view(np.uint8)) for x in codes))))
  rescaled = jax.jit(KVCache.rescaled)(dataclasses.replace(cache, layers=(held,)), new, biases[1])
  k, v = (np.asarray(x).view(ml_dtypes.float8_e4m3fn).astype(np.float64) for x in (rescaled.layers[0].k, rescaled.layers[0].v))
  bias_tables = [np.stack([rotated(large_bias(seed), p) for p in range(layout.slots)], axis=1) for seed in (0, 1)]
  exact = codes[0].astype(np.float64) * 0.5 + bias_tables[0] - bias_tables[1]
  assert relative(k * 0.9, np.clip(exact, -448 * 0.9, 448 * 0.9)) < 0.03
  assert relative(v * 0.03, codes[1].astype(np.float64) * 0.02) < 0.03


# --- key biases ------------------------------------------------------------------------------------------------------


def rotated(x, position):
  """Return heads [..., D] rotated to a position, float64. Plane i holds coordinates i and i + D/2."""
  half = x.shape[-1] // 2
  angle = position * 10_000.0 ** (-2 * np.arange(half) / x.shape[-1])
  a, b = np.asarray(x[..., :half], np.float64), np.asarray(x[..., half:], np.float64)
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def large_bias(seed=0):
  """Return [K, D]: 50 to 200 on four channels of each head, as in Qwen2's keys."""
  rng = np.random.default_rng(seed)
  bias = 0.1 * rng.normal(size=(K, D))
  for head in bias:
    head[rng.choice(D, 4, replace=False)] = rng.uniform(50, 200, 4) * rng.choice([-1, 1], 4)
  return bias


def test_biases_are_rotated_like_keys():
  config = tiny('qwen2', num_hidden_layers=2, head_dim=D)
  biases = [large_bias(seed) for seed in (0, 1)]
  positions = np.array([[0, 1, 2, 30], [7, 5, 3, 0]])
  vectors = tuple(jnp.asarray(b.reshape(-1), jnp.float32) for b in biases)
  tables = jax.jit(rotated_biases, static_argnums=(2, 3))(vectors, positions, D, config.rope)
  assert [table.shape for table in tables] == [(2, 4, K, D)] * 2
  for bias, table in zip(biases, tables):
    for b, t in np.ndindex(positions.shape):
      np.testing.assert_allclose(table[b, t], rotated(bias, positions[b, t]), atol=1e-3)


def test_large_key_biases_outside_of_fp8_cost_no_precision():
  """Decode steps, also after evictions, are compared with a float64 cache that has the same evictions."""
  budget, interval, sinks, steps, prompts = 20, 4, 4, 12, [T, T - 7]
  cache = Cache(method='streaming', budget=budget, interval=interval, window=4, streaming=Streaming(sinks))
  layout = layout_of(KV8, cache, 'qwen2')
  assert layout.key_bias
  bias = large_bias()
  table = np.stack([rotated(bias, p) for p in range(layout.positions)], axis=1)  # [K, positions, D]
  q, k, v = map(np.asarray, tokens(T + steps))
  at = np.concatenate([np.tile(np.arange(T), (B, 1)), [[n + i for i in range(steps)] for n in prompts]], axis=1)
  biased = k + np.moveaxis(table, 0, 1)[at]
  q, v = q / 8, np.round(4 * v)  # smaller queries, so that one key does not take all weight; small integers are exact in FP8
  scales = from_amax(amax(q, k, v), with_margin(1.05))._replace(v=jnp.ones(1))
  coarse = 1.05 * np.abs(biased).max() / 448
  arrays = tuple(jnp.asarray(x, jnp.float32) for x in (q, biased, v))
  key_bias = KeyBias.of(layout, (jnp.asarray(bias.reshape(-1), jnp.float32),))
  _, held = prefill(KVCache.empty(layout, B, scales=scales, bias=key_bias), jnp.array(prompts), *(x[:, :T] for x in arrays))
  kept = [[*range(sinks), *range(n - budget + sinks, n)] if n > budget else [*range(n)] for n in prompts]  # columns of the arrays
  for i in range(steps):
    out, held = decode_step(held, BOTH, *(x[:, T + i : T + i + 1] for x in arrays))
    for b in range(B):
      kept[b].append(T + i)
      if (i + 1) % interval == 0 and len(kept[b]) > budget:
        kept[b] = kept[b][:sinks] + kept[b][-(budget - sinks) :]
    query = [q[b, T + i].astype(np.float64) for b in range(B)]
    exact = np.stack([output(query[b], biased[b, kept[b]].astype(np.float64), v[b, kept[b]]) for b in range(B)])
    inside = np.stack([output(query[b], rounded(biased[b, kept[b]], coarse), v[b, kept[b]]) for b in range(B)])
    error = relative(out[:, 0], exact)
    assert 0 < error < 0.02
    assert error < relative(inside, exact) / 10
  assert held.saturated.sum(1).tolist() == [0, 0]
  assert held.seen.tolist() == [n + steps for n in prompts]
  assert held.length.tolist() == [budget] * B


@jax.jit
def read_given(cache, count, *qkv):
  step = Step(count, decoding=True)
  out, cache = cache.attend(0, step, *qkv)
  return out, cache.advance(step)


def test_given_tokens_after_an_eviction_find_key_biases_at_their_true_positions():
  """Streaming keeps 4 sinks and the newest 8 tokens of the prompt, so slot i no longer holds the token at position i."""
  cache = Cache(method='streaming', budget=12, interval=4, window=4, streaming=Streaming(4))
  layout, bias = layout_of(KV8, cache, 'qwen2'), large_bias()
  q, k, v = map(np.asarray, tokens(T + 2))
  q, v = q / 8, np.round(4 * v)
  biased = k + np.stack([rotated(bias, p) for p in range(T + 2)])
  scales = from_amax(amax(q, k, v), with_margin(1.05))._replace(v=jnp.ones(1))
  arrays = tuple(jnp.asarray(x, jnp.float32) for x in (q, biased, v))
  key_bias = KeyBias.of(layout, (jnp.asarray(bias.reshape(-1), jnp.float32),))
  start = KVCache.empty(layout, B, T, scales=scales, bias=key_bias)
  _, held = prefill(start, jnp.array([T, T]), *(x[:, :T] for x in arrays))
  assert held.layers[0].k.shape[2] == layout.slots == 16
  out, _ = read_given(held, jnp.array([2, 2]), *(x[:, T:] for x in arrays))
  kept = [0, 1, 2, 3, *range(T - 8, T + 2)]
  exact = np.stack([output(q[b, T + 1].astype(np.float64), biased[b, kept].astype(np.float64), v[b, kept]) for b in range(B)])
  assert 0 < relative(out[:, 1], exact) < 0.05


def test_prefill_adds_key_biases_back():
  layout, bias = layout_of(KV8, family='qwen2'), large_bias()
  q, k, v = tokens()
  biased = np.asarray(k) + np.stack([rotated(bias, p) for p in range(T)])
  scales = from_amax(amax(q, k, v), with_margin(1.05))
  key_bias = KeyBias.of(layout, (jnp.asarray(bias.reshape(-1), jnp.float32),))
  given = jnp.asarray(biased, jnp.float32)
  out, _ = prefill(KVCache.empty(layout, B, scales=scales, bias=key_bias), jnp.array([T, T]), q / 8, given, v)
  exact = output(np.asarray(q[1, -1], np.float64) / 8, biased[1], np.asarray(v[1], np.float64))
  assert 0 < relative(out[1, -1], exact) < 0.05


def test_the_cost_of_key_biases_does_not_grow_with_the_positions():
  """With ten times the positions and equal slots a decode step has equal operations, and only the table of angles is larger."""
  cache = Cache(method='keydiff', budget=T, interval=8, window=4)
  flops, held, temporary = [], [], []
  for completion in (1000, 10_000):
    layout = layout_of(KV8, cache, 'qwen2', completion)
    assert layout.slots == T + 8
    bias = KeyBias.of(layout, (jnp.asarray(large_bias().reshape(-1), jnp.float32),))
    made = KVCache.empty(layout, B, scales=unit(), bias=bias)
    compiled = decode_step.lower(made, BOTH, *(x[:, :1] for x in tokens())).compile()
    flops.append(compiled.cost_analysis()['flops'])
    temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    held.append(KVCache.bytes(layout, B))
    assert held[-1] == sum(x.nbytes for x in jax.tree.leaves(made))
  assert flops[0] == pytest.approx(flops[1], rel=0.01)
  assert temporary[0] == pytest.approx(temporary[1], rel=0.01)
  assert held[1] - held[0] == 4 * D * 9000


@pytest.mark.parametrize('G', [1, 100], ids=['all positions', 'the slots only'])
def test_scores_and_biases_at_slots_equal_those_of_rotated_biases(G):
  """The oracle is q . R_p b in float64, over all positions and at the positions of given slots."""
  layout, bias, rng = layout_of(KV8, family='qwen2'), large_bias(), np.random.default_rng(0)
  key_bias = KeyBias.of(layout, (jnp.asarray(bias.reshape(-1), jnp.float32),))
  position, q = rng.integers(0, layout.positions, (B, K, 7)), rng.normal(size=(B, K, G, D)).astype(np.float32)
  assert (G * layout.positions > 7 * D) == (G == 100)
  table = np.stack([rotated(bias, p) for p in range(layout.positions)], axis=1)  # [K, positions, D]
  everywhere = np.einsum('bkgd,kpd->bkgp', q, table)
  scores = jax.jit(KeyBias.scores, static_argnums=1)
  np.testing.assert_allclose(scores(key_bias, 0, q, None), everywhere, atol=5e-3)
  there = np.take_along_axis(everywhere, position[:, :, None], axis=-1)
  np.testing.assert_allclose(scores(key_bias, 0, q, position), there, atol=5e-3)
  at = jax.jit(KeyBias.at, static_argnums=1)(key_bias, 0, position)
  np.testing.assert_allclose(at, np.stack([table[h, position[:, h]] for h in range(K)], axis=1), atol=1e-3)


def test_the_sampler_takes_key_biases_from_its_weights():
  """The prefill's hidden states are closer to those of a float32 cache if large key biases are outside of FP8."""
  config, params = small.model('qwen2', num_hidden_layers=1)
  params = jax.tree.map(lambda w: w, params)
  params['layers'][0]['attention']['k']['bias'] = jnp.asarray(large_bias().reshape(-1), jnp.float32)
  graph, rng = transformer.graph(config), np.random.default_rng(0)
  ids, lengths = jnp.asarray(rng.integers(0, 259, (3, 16)), jnp.int32), jnp.array([16, 9, 12])
  weights = sampler_weights(params, jnp.dtype('float32'))._replace(scales=Scales(*(jnp.full(1, 0.6) for _ in range(3))))
  fp8 = cache_layout(config, DENSE, KV8, 16, 4, 'float32')
  hidden = {}
  for name, layout in (
    ('exact', cache_layout(config, DENSE, PLAIN, 16, 4, 'float32')),
    ('outside', fp8),
    ('inside', dataclasses.replace(fp8, key_bias=False)),
  ):
    prompts = decode.prefill(graph, layout, weights, ids, lengths)
    assert (prompts.cache.bias is not None) == (name == 'outside')
    assert prompts.cache.saturated.sum(1).tolist() == [0, 0, 0]
    hidden[name] = prompts.hidden
  outside, inside = (relative(hidden[name], hidden['exact']) for name in ('outside', 'inside'))
  assert outside < 0.1
  assert outside < inside / 5
