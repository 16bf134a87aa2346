"""The ledger: its parts sum to the gap, a cause that is off is nothing, and one that is on is found where it is."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sprl.ledger import CAUSES, EDGES, histograms, ledger, scalars
from sprl.policy import Policy
from sprl.sampler import calibrate
from sprl.sampler.slots import generate
from sprl.settings import UNQUANTISED, Cache, Quant, resolve
from sprl.trajectory import Request

SPARSE = Cache(budget=12, interval=3, window=2)


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """(settings of a dense, unquantised float32 run, its policy, weights)."""
  return opened(tiny.write_inputs(tmp_path_factory.mktemp('ledger')))


def opened(file, **model):
  spec = importlib.util.spec_from_file_location('config', file)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  config.arm, config.cache.budget, config.quant.sampler, config.model.dtype = '', 0, 'bf16', 'float32'
  config.model.update(model)
  run = resolve(config)
  policy = Policy.open(run)
  return run, policy, policy.load()


def sampled(world, cache=SPARSE, quant=UNQUANTISED, weights=None):
  """(run, policy, engine, weights, scales, two groups of trajectories) of a sampler with this memory."""
  run, policy, params = world
  run = dataclasses.replace(run, cache=cache, quant=quant)
  plan = policy.plan(run.sampling, cache, quant, routes=run.model.router_replay == 'R3')
  engine = policy.engine(run.sampling, plan, 4, 2, 0)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(3, 259, n).astype(np.int32) for n in (9, 14)]
  scales = None
  if plan.fp8:
    scales = calibrate.scales_of_prompts(policy.graphdef, plan, params, prompts, 2, quant)
  requests = [Request(g * 4 + k, g, prompt, 12) for g, prompt in enumerate(prompts) for k in range(4)]
  served = policy.serve(params if weights is None else weights, quant, scales)
  return run, policy, engine, params, scales, generate(engine, served, requests)


def size(x):
  return float(np.mean(np.abs(x)))


def check_sums(entries, trajectories):
  assert set(entries) == {'gap', *CAUSES}
  assert all(x.shape == (sum(t.mask.sum() for t in trajectories),) for x in entries.values())
  np.testing.assert_allclose(sum(entries[cause] for cause in CAUSES), entries['gap'], atol=1e-6)


@pytest.mark.parametrize(
  ('cause', 'cache', 'quant'),
  [
    ('eviction', SPARSE, UNQUANTISED),
    ('weights', Cache(), Quant(sampler='w8a8')),
    ('kv', Cache(), Quant(sampler='kv8')),
  ],
)
def test_one_cause_alone_explains_the_whole_gap(world, cause, cache, quant):
  *settings, trajectories = sampled(world, cache, quant)
  entries = ledger(*settings, trajectories)
  check_sums(entries, trajectories)
  assert size(entries[cause]) > 1e-3
  np.testing.assert_allclose(entries[cause], entries['gap'], atol=2e-5)
  for other in {*CAUSES} - {cause, 'numerics', 'residual'}:
    assert not np.any(entries[other])
  assert np.max(np.abs(entries['residual'])) < 1e-5


def test_all_causes_together_leave_only_their_effect_on_each_other(world):
  *settings, trajectories = sampled(world, SPARSE, Quant(sampler='w8a8_kv8'))
  entries = ledger(*settings, trajectories)
  check_sums(entries, trajectories)
  for cause in ('weights', 'kv', 'eviction'):
    assert size(entries[cause]) > 1e-3
  assert 0 < size(entries['residual']) < sum(size(entries[cause]) for cause in ('weights', 'kv', 'eviction'))


@pytest.mark.slow
def test_router_replay_takes_out_of_the_gap_what_other_experts_put_into_it(tmp_path):
  mixed = opened(tiny.write_inputs(tmp_path, 'qwen3_moe'), router_replay='R3')
  *settings, trajectories = sampled(mixed, Cache(), Quant(sampler='w8a8'))
  entries = ledger(*settings, trajectories)
  unreplayed = entries.pop('unreplayed')
  check_sums(entries, trajectories)
  np.testing.assert_allclose(unreplayed + entries['routing'], entries['gap'], atol=1e-6)
  np.testing.assert_allclose(entries['weights'], unreplayed, atol=2e-5)  # whose gap FP8 linears alone explain
  assert np.max(np.abs(entries['residual'])) < 1e-5
  assert size(entries['gap']) < 0.9 * size(unreplayed)


def test_older_weights_are_found_as_staleness(world):
  older = jax.tree.map(lambda w: w + 0.02 * jnp.sin(jnp.arange(w.size, dtype=w.dtype)).reshape(w.shape), world[2])
  *settings, trajectories = sampled(world, Cache(), UNQUANTISED, older)
  entries = ledger(*settings, trajectories, sampled_with=older)
  check_sums(entries, trajectories)
  assert size(entries['staleness']) > 1e-3
  np.testing.assert_allclose(entries['staleness'], entries['gap'], atol=2e-5)


def test_log_probs_that_are_not_the_sampler_s_end_up_in_the_residual(world):
  *settings, trajectories = sampled(world, SPARSE)
  forged = [
    dataclasses.replace(t, sampler_logp=np.where(t.mask, t.sampler_logp - 0.25, 0).astype(np.float32)) for t in trajectories
  ]
  np.testing.assert_allclose(ledger(*settings, forged)['residual'], 0.25, atol=1e-5)


def test_scalars_and_histograms_are_of_the_entries():
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
