"""FP8 keys and values: what the scales are, what they cost, and what keeping key biases apart saves (fp8_rollouts 3)."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small

from sprl.cache.key_bias import KeyBias
from sprl.cache.kv_cache import KVCache
from sprl.cache.scales import FIRST_FORWARD, Scales, from_amax, percentile, rotated_biases, with_margin
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.sampler import decode
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.served import serve
from sprl.settings import Cache, Quant

DENSE, BF16, KV8 = Cache(), Quant(), Quant(sampler='kv8')
B, T, H, K, D = 2, 24, 4, 2, 16


def plan_of(quant, cache=DENSE, family='llama', layers=1, prompt=T, completion=24):
  config = tiny(family, num_hidden_layers=layers, head_dim=D)
  return cache_plan(config, cache, quant, prompt, completion, 'float32')


def unit(layers=1):
  return Scales(*(jnp.ones(layers) for _ in range(3)))


def tokens(n=T, seed=0, key=1.0):
  rng = np.random.default_rng(seed)
  q, k, v = (rng.normal(size=(B, n, heads, D)) for heads in (H, K, K))
  return tuple(jnp.asarray(x, jnp.float32) for x in (q, key * k, v))


@jax.jit
def prefill(cache, count, *qkv):
  out, cache = cache.expecting(count).attend(0, *qkv)
  return out, cache.advance()


@jax.jit
def step(cache, *qkv, active=(1, 1)):
  out, cache = cache.expecting(jnp.array(active, jnp.int32)).attend(0, *qkv)
  return out, cache.advance(decoding=True)


def amax(*qkv):
  return np.array([[np.abs(x).max()] for x in qkv], np.float32)


def relative(got, meant):
  got, meant = np.asarray(got, np.float64), np.asarray(meant, np.float64)
  return np.linalg.norm(got - meant) / np.linalg.norm(meant)


def rounded(x, scale):
  """x after e4m3, by another library's cast; x / scale must lie in its range."""
  codes = (np.asarray(x, np.float32) / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn)
  return codes.astype(np.float64) * float(scale)


def answer(q, k, v):
  """[H, D] float64: one query's answer over keys and values [n, K, D]."""
  out = []
  for h, query in enumerate(q):
    score = k[:, h // (H // K)] @ query / np.sqrt(D)
    weight = np.exp(score - score.max())
    out.append(weight / weight.sum() @ v[:, h // (H // K)])
  return np.array(out)


# --- the scales themselves -------------------------------------------------------------------------------------------


def test_scales_put_the_largest_value_at_the_divisor():
  seen = np.array([[100.0, 0.0, 3.0], [200.0, 50.0, 0.0], [10.0, 1.0, 7.0]], np.float32)
  scales = from_amax(seen, (200.0, 100.0, 50.0))
  np.testing.assert_allclose(scales.q, [0.5, 1.0, 0.015], rtol=1e-6)  # nothing seen: 1
  np.testing.assert_allclose(scales.k, [2.0, 0.5, 1.0], rtol=1e-6)
  np.testing.assert_allclose(scales.v, [0.2, 0.02, 0.14], rtol=1e-6)
  assert {x.dtype for x in scales} == {jnp.dtype('float32')}
  trainer = from_amax(seen, with_margin(1.05))
  np.testing.assert_allclose(trainer.k[0] * 448, 200 * 1.05, rtol=1e-6)
  first = from_amax(seen, FIRST_FORWARD)
  headroom = [float(x[0]) * 448 / largest for x, largest in zip(first, (100.0, 200.0, 10.0))]
  np.testing.assert_allclose(headroom, [2.24, 2.24, 4.48], rtol=1e-6)


@pytest.mark.parametrize('N', [1, 2, 5, 999, 1000, 1001, 2000, 2001, 3500])
def test_the_percentile_is_the_nearest_rank_of_99_9(N):
  """The smallest value that at least 99.9 % of the values do not exceed."""
  seen = np.random.default_rng(N).random((N, 3, 2)).astype(np.float32)
  padded = np.concatenate([seen, np.full((3, 3, 2), 9.0, np.float32)])  # microbatches that were not looked at
  got = jax.jit(percentile)(jnp.asarray(padded), jnp.int32(N))
  for i, j in np.ndindex(3, 2):
    values = np.sort(seen[:, i, j])
    rank = next(r for r in range(1, N + 1) if Fraction(r, N) >= Fraction(999, 1000))
    assert float(got[i, j]) == values[rank - 1]
  if N < 1000:
    np.testing.assert_array_equal(got, seen.max(axis=0))
  if N == 3500:
    assert np.all(np.asarray(got) < seen.max(axis=0))


# --- what FP8 costs --------------------------------------------------------------------------------------------------


def stored(scales, qkv, count=(T, T)):
  """Keys and values read back from an FP8 cache, and how many numbers it clamped of each row."""
  _, cache = prefill(KVCache.empty(plan_of(KV8), B, scales=scales), jnp.array(count), *qkv)
  held = cache.layers[0]
  assert held.keys.dtype == held.values.dtype == jnp.float8_e4m3fn
  k, v = (np.swapaxes(x.astype(jnp.float32) * s[0], 1, 2)[:, :T] for x, s in ((held.keys, scales.k), (held.values, scales.v)))
  return k, v, cache.saturated.sum(1).tolist()


@pytest.mark.parametrize('largest', [3.0, 40.0, 447.0])
def test_below_448_a_calibrated_scale_is_no_better_than_1(largest):
  """fp8_rollouts 10.10."""
  q, k, v = tokens(key=1.0)
  k = k * (largest / float(jnp.abs(k).max()))
  for scales in (unit(), from_amax(amax(q, k, v), with_margin(1.05)), from_amax(amax(q, k, v), FIRST_FORWARD)):
    keys, values, saturated = stored(scales, (q, k, v))
    assert saturated == [0, 0]
    assert abs(relative(keys, k) - 0.0265) < 0.0015
    assert abs(relative(values, v) - 0.0265) < 0.0015


def test_beyond_448_a_scale_of_1_saturates_and_a_calibrated_one_does_not():
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


def test_decoding_counts_saturation_too_and_only_of_rows_that_go_on():
  q, k, v = tokens()
  _, cache = prefill(KVCache.empty(plan_of(KV8), B, scales=unit()), jnp.array([4, 4]), q[:, :4], k[:, :4], v[:, :4])
  one = tuple(x[:, 5:6] for x in (q, k * 1e5, v))
  expected = [int(np.sum(np.abs(one[1][b]) > 448)) for b in range(B)]
  assert step(cache, *one)[1].saturated.sum(1).tolist() == expected
  assert step(cache, *one, active=(1, 0))[1].saturated.sum(1).tolist() == [expected[0], 0]


def test_a_row_that_starts_from_a_prompt_has_that_prompt_s_saturation():
  plan = plan_of(KV8)
  prompts = dataclasses.replace(KVCache.empty(plan, 2, 8, unit()), saturated=jnp.array([[3, 0], [5, 2]]))
  mine = dataclasses.replace(KVCache.empty(plan, 3, scales=unit()), saturated=jnp.array([[10, 0], [20, 0], [15, 15]]))
  forked = mine.fork(prompts, jnp.array([1, 0, 0]), jnp.array([True, False, True]))
  assert forked.saturated.tolist() == [[5, 2], [20, 0], [3, 0]]


@pytest.mark.parametrize('sampler', ['kv8', 'w8a8_kv8'])
def test_attention_is_that_of_the_rounded_numbers(sampler):
  plan = plan_of(Quant(sampler=sampler))
  scales = Scales(jnp.array([0.013]), jnp.array([0.017]), jnp.array([0.019]))
  q, k, v = tokens()
  n = T - 3
  out, cache = prefill(KVCache.empty(plan, B, scales=scales), jnp.array([n, n]), q[:, :n], k[:, :n], v[:, :n])
  outs = [out]
  for t in range(n, T):
    out, cache = step(cache, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
    outs.append(out)
  got = np.concatenate(outs, axis=1)
  queries = rounded(q, 0.013) if sampler == 'w8a8_kv8' else np.asarray(q, np.float64)
  keys, values = rounded(k, 0.017), rounded(v, 0.019)
  for b, t in np.ndindex(B, T):
    np.testing.assert_allclose(got[b, t], answer(queries[b, t], keys[b, : t + 1], values[b, : t + 1]), atol=2e-5)
  if sampler == 'w8a8_kv8':
    assert relative(queries, q) > 0.02


# --- key biases ------------------------------------------------------------------------------------------------------


def turned(x, position):
  """Heads [..., D] at a position, float64: plane i holds coordinates i and i + D/2."""
  half = x.shape[-1] // 2
  angle = position * 10_000.0 ** (-2 * np.arange(half) / x.shape[-1])
  a, b = np.asarray(x[..., :half], np.float64), np.asarray(x[..., half:], np.float64)
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def large_bias(seed=0):
  """[K, D]: 50 to 200 on four channels of each head, as Qwen2's keys have it."""
  rng = np.random.default_rng(seed)
  bias = 0.1 * rng.normal(size=(K, D))
  for head in bias:
    head[rng.choice(D, 4, replace=False)] = rng.uniform(50, 200, 4) * rng.choice([-1, 1], 4)
  return bias


def test_biases_are_rotated_as_keys_are():
  config = tiny('qwen2', num_hidden_layers=2, head_dim=D)
  biases = [large_bias(seed) for seed in (0, 1)]
  positions = np.array([[0, 1, 2, 30], [7, 5, 3, 0]])
  tables = rotated_biases(tuple(jnp.asarray(b.reshape(-1), jnp.float32) for b in biases), jnp.asarray(positions), D, config.rope)
  assert [table.shape for table in tables] == [(2, 4, K, D)] * 2
  for bias, table in zip(biases, tables):
    for b, t in np.ndindex(positions.shape):
      np.testing.assert_allclose(table[b, t], turned(bias, positions[b, t]), atol=1e-3)


def test_keeping_large_biases_out_of_fp8_makes_attention_exact_again():
  """Prefill, decode and decode after evictions, each against the float32 cache with the same evictions."""
  cache = Cache(method='streaming', budget=20, interval=4, window=4)
  plans = {
    'exact': plan_of(BF16, cache, 'qwen2'),
    'apart': plan_of(KV8, cache, 'qwen2'),
    'inside': plan_of(dataclasses.replace(KV8, key_bias=False), cache, 'qwen2'),
  }
  assert [plan.key_bias for plan in plans.values()] == [False, True, False]
  bias, steps, prompts = large_bias(), 12, [T, T - 7]
  table = np.stack([turned(bias, p) for p in range(plans['apart'].positions)], axis=1)  # [K, P, D]
  q, k, v = map(np.asarray, tokens(T + steps))
  at = np.concatenate([np.tile(np.arange(T), (B, 1)), [[n + i for i in range(steps)] for n in prompts]], axis=1)
  biased = k + np.moveaxis(table, 0, 1)[at]
  q, v = q / 8, np.round(4 * v)  # scores of biased keys would leave no choice; small integers are exact in FP8
  scales = {
    name: from_amax(amax(q, x, v), with_margin(1.05))._replace(v=jnp.ones(1)) for name, x in (('apart', k), ('inside', biased))
  }
  arrays = tuple(jnp.asarray(x, jnp.float32) for x in (q, biased, v))
  outs = {}
  for name, plan in plans.items():
    kept = KeyBias.of(plan, (jnp.asarray(bias.reshape(-1), jnp.float32),))
    given = KVCache.empty(plan, B, scales=scales.get(name), bias=kept)
    out, held = prefill(given, jnp.array(prompts), *(x[:, :T] for x in arrays))
    outs[name] = [np.asarray(out[1, : prompts[1]])]
    for i in range(steps):
      out, held = step(held, *(x[:, T + i : T + i + 1] for x in arrays))
      outs[name].append(np.asarray(out))
    assert held.saturated.sum(1).tolist() == [0, 0]
    assert held.seen.tolist() == [n + steps for n in prompts]
    assert held.length.tolist() == [20, 20]
  for i in (0, 1, 5, 10, 12):  # prefill, decoding before any eviction, behind one, behind two, at one
    apart, inside = (relative(outs[name][i], outs['exact'][i]) for name in ('apart', 'inside'))
    assert 0 < apart < 0.02
    assert apart < inside / 10


@pytest.mark.parametrize('when', ['before', 'after'])
def test_what_keeping_biases_apart_costs_does_not_grow_with_the_positions(when):
  """The same slots, ten times the positions: a decode step multiplies no more, and holds one more table of angles."""
  cache = Cache(method='rkv', budget=T, interval=8, window=4, when=when)
  flops, held, temporary = [], [], []
  for completion in (1000, 10_000):
    plan = plan_of(KV8, cache, 'qwen2', completion=completion)
    assert plan.slots(0) == T + 8
    kept = KeyBias.of(plan, (jnp.asarray(large_bias().reshape(-1), jnp.float32),))
    made = KVCache.empty(plan, B, scales=unit(), bias=kept)
    compiled = step.lower(made, *(x[:, :1] for x in tokens())).compile()
    flops.append(compiled.cost_analysis()['flops'])
    temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    held.append(KVCache.bytes(plan, B))
    assert held[-1] == sum(x.nbytes for x in jax.tree.leaves(made))
  assert flops[0] == pytest.approx(flops[1], rel=0.01)
  assert temporary[0] == pytest.approx(temporary[1], rel=0.01)
  assert held[1] - held[0] == 4 * D * 9000


def test_a_bias_is_turned_as_keys_are_wherever_its_slots_lie():
  plan = plan_of(KV8, family='qwen2', layers=2)
  kept = KeyBias.of(plan, tuple(jnp.asarray(large_bias(i).reshape(-1), jnp.float32) for i in range(2)))
  position = np.array([[[0, 7, 40], [3, 3, -1]], [[1, 0, 2], [5, 46, 47]]])
  for layer in range(2):
    got = kept.at(layer, jnp.asarray(position))
    for at in zip(*np.nonzero(position >= 0)):
      np.testing.assert_allclose(got[at], turned(large_bias(layer)[at[1]], position[at]), atol=1e-3)


@pytest.mark.parametrize('G', [1, 100], ids=['all positions', 'the slots alone'])
def test_queries_meet_a_bias_as_they_would_its_turned_self(G):
  """q . R_p b in float64, of slots at any position and of slots that are positions."""
  plan = plan_of(KV8, family='qwen2')
  kept, rng = KeyBias.of(plan, (jnp.asarray(large_bias().reshape(-1), jnp.float32),)), np.random.default_rng(0)
  position, q = rng.integers(0, plan.positions, (B, K, 7)), rng.normal(size=(B, K, G, D))
  assert (G * plan.positions > 7 * D) == (G == 100)
  table = np.stack([turned(large_bias(), p) for p in range(plan.positions)], axis=1)  # [K, P, D]
  everywhere = np.einsum('bkgd,kpd->bkgp', q, table)
  np.testing.assert_allclose(kept.scores(0, jnp.asarray(q, jnp.float32), None), everywhere, atol=5e-3)
  there = np.take_along_axis(everywhere, position[:, :, None], axis=-1)
  np.testing.assert_allclose(kept.scores(0, jnp.asarray(q, jnp.float32), jnp.asarray(position)), there, atol=5e-3)


def test_the_sampler_takes_the_biases_from_the_weights_it_serves():
  """Whole prefills of a Qwen2 with large key biases: hidden states beside the float32 cache's."""
  config, params = small.model('qwen2')
  params = jax.tree.map(lambda w: w, params)
  for i, layer in enumerate(transformer.layers(params)):
    layer['attention']['k']['bias'] = jnp.asarray(large_bias(i).reshape(-1), jnp.float32)
  graph, rng = transformer.graph(config), np.random.default_rng(0)
  ids, lengths = jnp.asarray(rng.integers(0, 259, (3, 16)), jnp.int32), jnp.array([16, 9, 12])
  hidden = {}
  for name, quant in (('exact', BF16), ('apart', KV8), ('inside', dataclasses.replace(KV8, key_bias=False))):
    plan = cache_plan(config, DENSE, quant, 16, 4, 'float32')
    served = serve(params, jnp.dtype('float32'))._replace(scales=Scales(*(jnp.full(2, 0.6) for _ in range(3))))
    prompts = decode.prefill(graph, plan, served, ids, lengths)
    assert (prompts.cache.bias is not None) == (name == 'apart')
    assert prompts.cache.saturated.sum(1).tolist() == [0, 0, 0]
    hidden[name] = prompts.hidden
  apart, inside = (relative(hidden[name], hidden['exact']) for name in ('apart', 'inside'))
  assert apart < 0.1
  assert apart < inside / 5
