"""The ledger: its parts sum to the gap, the part of an absent cause is 0, and only rounding is left of the replayed whole.

The default tests use random tokens with the log-probs of a replay. tests/sampler/ checks that a replay returns the log-probs of
the sampler. The slow tests sample.
"""

import dataclasses
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import tiny

from sprl.config import UNQUANTISED, Cache, Quant
from sprl.config_reader import resolve
from sprl.ledger import EDGES, PARTS, histograms, ledger, scalars
from sprl.model import Model
from sprl.sampler import calibrate
from sprl.sampler.engine import generate
from sprl.sampler.replay import replay
from sprl.types import Request

SPARSE = Cache(budget=12, interval=3, window=2)


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """(settings of a dense, unquantised float32 run, its model, weights)."""
  return opened(tiny.write_inputs(tmp_path_factory.mktemp('ledger'), num_hidden_layers=1))


def opened(file, **settings):
  spec = importlib.util.spec_from_file_location('config', file)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  config.arm, config.cache.budget, config.quant.sampler, config.model.dtype = None, None, 'none', 'float32'
  config.model.update(settings)
  run = resolve(config)
  model = Model.open(run)
  return run, model, model.load()


def sampler(world, cache=SPARSE, quant=UNQUANTISED, weights=None):
  """Return ((run, model, engine), the ledger's weights and scales, the sampler's weights)."""
  run, model, params = world
  run = dataclasses.replace(run, cache=cache, quant=quant)
  layout = model.cache_layout(run.sampling, cache, quant, routes=run.model.router_replay == 'R3')
  engine = model.engine_config(run.sampling, layout, 4, 2, 0)
  scales = None
  if layout.fp8:
    found = calibrate.amax_of_prompts(model.graphdef, layout, params, prompts(), 2, quant)
    scales = calibrate.scales((found,), quant, layout, params)
  sampled_with = params if weights is None else weights
  return (run, model, engine), {'params': params, 'scales': scales}, model.sampler_weights(sampled_with, quant, scales)


def prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(3, 259, n).astype(np.int32) for n in (9, 14)]


def sampled(world, cache=SPARSE, quant=UNQUANTISED):
  """Return the arguments of a ledger for two groups of trajectories that this sampler drew."""
  settings, given, weights = sampler(world, cache, quant)
  requests = [Request(g * 4 + k, g, prompt, 12) for g, prompt in enumerate(prompts()) for k in range(4)]
  return settings, given, generate(settings[2], weights, requests)


def rescored(world, cache=SPARSE, quant=UNQUANTISED, weights=None):
  """Return the arguments of a ledger for random tokens, as if this sampler had drawn them."""
  settings, given, sampler_weights = sampler(world, cache, quant, weights)
  trajectories = small.rollouts([(12, 11, 9, 12), (12, 4, 10, 12)], (9, 14))
  logprobs = replay(settings[2], sampler_weights, trajectories)
  return settings, given, [dataclasses.replace(t, sampler_logp=logp) for t, logp in zip(trajectories, logprobs)]


def size(x):
  return float(np.mean(np.abs(x)))


def entries_of(arguments, **more):
  """Return the entries of the ledger. Assert that the parts sum to the gap."""
  settings, given, trajectories = arguments
  entries = ledger(*settings, trajectories, **given, **more)
  pairs = {name for name in entries if name.startswith('interaction_')}
  assert {*entries} - {'unreplayed'} - pairs == {'gap', *PARTS, 'interaction'}
  assert all(x.shape == (sum(t.mask.sum() for t in trajectories),) for x in entries.values())
  np.testing.assert_allclose(sum(entries[part] for part in PARTS), entries['gap'], atol=1e-6)
  np.testing.assert_allclose(sum(entries[pair] for pair in pairs), entries['interaction'], atol=1e-6)
  return entries


def check_reproduced(entries):
  assert np.max(np.abs(entries['reproduction'])) < 1e-5


def check_alone(cause, entries):
  assert size(entries[cause]) > 1e-3
  np.testing.assert_allclose(entries[cause], entries['gap'], atol=2e-5)
  for other in {*PARTS, 'interaction'} - {cause, 'numerics', 'reproduction'}:
    assert not np.any(entries[other])
  check_reproduced(entries)


@pytest.mark.parametrize(
  ('cause', 'cache', 'quant'),
  [('eviction', SPARSE, UNQUANTISED), ('weights', Cache(), Quant(sampler='w8a8')), ('kv', Cache(), Quant(sampler='kv8'))],
)
def test_one_cause_alone_explains_the_gap(world, cause, cache, quant):
  check_alone(cause, entries_of(rescored(world, cache, quant)))


def test_fp8_in_learner_and_sampler_cancels(world):
  """The learner's linears and the sampler's round alike. Alone, either is a mismatch; together little of it remains."""
  quant = Quant(sampler='w8a8', learner='w8a8')
  together = entries_of(rescored(world, Cache(), quant))
  alone = entries_of(rescored(world, Cache(), Quant(learner='w8a8')))
  assert size(together['learner_fp8']) > 1e-3
  assert size(together['gap']) < size(together['weights']) / 5
  np.testing.assert_allclose(together['learner_fp8'] + together['weights'], together['gap'], atol=5e-5)
  np.testing.assert_allclose(alone['learner_fp8'], alone['gap'], atol=2e-5)
  check_reproduced(together)


def check_together(world, arguments):
  """Assert that the parts of three causes are their averages over all orders, from replays that this function makes itself."""
  (run, model, engine), given, trajectories = arguments
  entries = entries_of(arguments)
  check_reproduced(entries)

  def log_probs(on):
    quant = run.quant if 'weights' in on else UNQUANTISED
    cache, kv = run.cache if 'eviction' in on else Cache(), run.quant if 'kv' in on else UNQUANTISED
    layout = model.cache_layout(run.sampling, cache, kv)
    weights = model.sampler_weights(given['params'], quant, given['scales'])
    logp = replay(dataclasses.replace(engine, layout=layout), weights, trajectories)
    return np.concatenate([x[t.mask] for x, t in zip(logp, trajectories)]).astype(np.float64)

  names = ('weights', 'kv', 'eviction')
  found = {frozenset(on): log_probs(on) for n in range(4) for on in itertools.combinations(names, n)}
  for name in names:
    orders = [order[: order.index(name)] for order in itertools.permutations(names)]
    expected = np.mean([found[frozenset(before)] - found[frozenset({*before, name})] for before in orders], axis=0)
    assert size(expected) > 1e-3
    np.testing.assert_allclose(entries[name], expected, atol=1e-5)
  alone = sum(found[frozenset()] - found[frozenset({name})] for name in names)
  np.testing.assert_allclose(entries['interaction'], found[frozenset()] - found[frozenset(names)] - alone, atol=1e-5)
  assert {name for name in entries if name.startswith('interaction_')} == {
    'interaction_weights_kv', 'interaction_weights_eviction', 'interaction_kv_eviction'
  }  # fmt: skip
  assert size(entries['interaction']) > 1e-3


def test_three_causes_have_their_averages_over_all_orders(world):
  check_together(world, rescored(world, SPARSE, Quant(sampler='w8a8_kv8')))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('cause', 'cache', 'quant'),
  [('eviction', SPARSE, UNQUANTISED), ('weights', Cache(), Quant(sampler='w8a8')), ('kv', Cache(), Quant(sampler='kv8'))],
)
def test_one_cause_explains_the_gap_of_drawn_tokens(world, cause, cache, quant):
  check_alone(cause, entries_of(sampled(world, cache, quant)))


@pytest.mark.slow
def test_three_causes_of_drawn_tokens_have_their_averages_over_all_orders(world):
  check_together(world, sampled(world, SPARSE, Quant(sampler='w8a8_kv8')))


@pytest.mark.slow
def test_router_replay_removes_the_effect_of_other_experts(tmp_path):
  mixed = opened(tiny.write_inputs(tmp_path, 'qwen3_moe'), router_replay='R3')
  entries = entries_of(sampled(mixed, Cache(), Quant(sampler='w8a8')))
  unreplayed = entries['unreplayed']
  np.testing.assert_allclose(unreplayed + entries['routing'], entries['gap'], atol=1e-6)
  np.testing.assert_allclose(entries['weights'], unreplayed, atol=2e-5)  # FP8 linears alone explain the gap without replay
  check_reproduced(entries)
  assert size(entries['gap']) < 0.9 * size(unreplayed)


def test_older_weights_are_staleness(world):
  older = jax.tree.map(lambda w: w + 0.02 * jnp.sin(jnp.arange(w.size, dtype=w.dtype)).reshape(w.shape), world[2])
  check_alone('staleness', entries_of(rescored(world, Cache(), weights=older), sampled_with=older))


def test_forged_log_probs_are_a_reproduction_error(world):
  settings, given, trajectories = rescored(world)
  forged = [
    dataclasses.replace(t, sampler_logp=np.where(t.mask, t.sampler_logp - 0.25, 0).astype(np.float32)) for t in trajectories
  ]
  np.testing.assert_allclose(entries_of((settings, given, forged))['reproduction'], 0.25, atol=1e-5)


def test_scalars_and_histograms_by_hand():
  entries = {'gap': np.array([-20.0, -0.5, 0.0, 0.0005, 0.02, 4.0])}
  found = scalars(entries)
  assert found['ledger/gap_mean'] == pytest.approx(np.mean(entries['gap']))
  assert found['ledger/gap_abs'] == pytest.approx(24.5205 / 6)
  assert found['ledger/gap_p99'] == pytest.approx(np.quantile(np.abs(entries['gap']), 0.99))
  counts = histograms(entries)
  assert counts['edges'] == list(EDGES)
  gap = counts['histograms']['gap']
  assert len(gap) == len(EDGES) + 1
  assert (gap[0], sum(gap)) == (1, 6)  # below the first edge
  assert gap[EDGES.index(-0.001) + 1] == 2
