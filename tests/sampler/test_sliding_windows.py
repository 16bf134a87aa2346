"""Rollouts of a model with sliding windows: prompts and completions are longer than the window, and rows are refilled.

The model has two layers with a window of 6 and a full layer, which a budget evicts.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from test_kept import TURNS, UIDS, Talk, differing

from sprl.cache.layer import NEVER
from sprl.cache.layout import cache_layout
from sprl.cache.scales import from_amax, with_margin
from sprl.config import Cache, Quant, Sampling
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig, score
from sprl.models import transformer
from sprl.sampler.engine import Engine, generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.replay import replay
from sprl.sampler.weights import quantised_linears, sampler_weights
from sprl.types import Request

P, C = 20, 24
SAMPLING = Sampling(temperature=0.9, max_tokens=C, max_prompt=P, prompt_buckets=(P,), chunk=7)
SPARSE = Cache(method='rkv', budget=12, interval=4, window=4)
FP8 = Quant(sampler='w8a8_kv8')


@cache
def network():
  return small.model('gemma3_text')


@cache
def weights_of(quant):
  config, params = network()
  weights = sampler_weights(params, jnp.dtype('float32'), quant)
  if quant.sampler == 'none':
    return weights
  return weights._replace(scales=from_amax(np.full((3, config.num_layers), 6.0, np.float32), with_margin(1.05)))


def engine_config(settings, quant):
  layout = cache_layout(network()[0], settings, quant, P, C, 'float32', record=True)
  return EngineConfig(network()[0], SAMPLING, layout, rows=3, prefill=2, seed=0, stop_ids=(), text=lambda ids: '')


@cache
def sampled(settings=Cache(), quant=Quant()):  # noqa: B008
  """Return four trajectories of two prompts, sampled in three rows. One prompt is shorter than the window."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in (4, P)]
  requests = [Request(2 * g + k, g, prompt, C - 5 * k) for g, prompt in enumerate(prompts) for k in range(2)]
  return generate(engine_config(settings, quant), weights_of(quant), requests)


def learner(trajectories, share_prefix):
  config, params = network()
  shape = Shape(micros=2, rows=2, tokens=96, sequences=4, columns=C)
  batch, _ = pack(trajectories, np.ones(4, np.float32), shape, share_prefix)
  logp = score(transformer.graph(config), params, jax.device_put(batch), ForwardConfig(0.9, jnp.dtype('float32'), 8))
  return np.asarray(logp), small.rectangle(trajectories, [t.sampler_logp for t in trajectories], C)


def without_evictions(trajectories):
  return [dataclasses.replace(t, evicted=None) for t in trajectories]


@pytest.mark.parametrize('settings', [Cache(), Cache(method='rkv', budget=P + C, interval=4, window=4)], ids=['dense', 'budget'])
def test_log_probs_of_packed_rows_equal_those_of_the_sampler(settings):
  """Without evictions, because there is no budget or because it is as long as the sequences. The samples share their prompts."""
  trajectories = without_evictions(sampled(settings))
  logp, recorded = learner(trajectories, share_prefix=True)
  np.testing.assert_allclose(logp, recorded, atol=1e-4)


def test_a_budget_evicts_tokens_of_the_full_layer_only_and_the_masked_learner_follows():
  trajectories = sampled(SPARSE)
  for t in trajectories:
    assert t.evicted.shape == (3, 2, len(t.tokens))
    assert np.all(t.evicted[:2] == NEVER)
    assert np.sum(t.evicted[2] != NEVER) > 0
    assert t.attended.max() <= max(SPARSE.budget + SPARSE.interval, t.prompt_length)
  logp, recorded = learner(trajectories, share_prefix=False)
  np.testing.assert_allclose(logp, recorded, atol=1e-4)
  dense, _ = learner(without_evictions(trajectories), share_prefix=False)
  assert np.abs(dense - recorded).max() > 0.01  # the evictions matter


@pytest.mark.parametrize(('settings', 'quant'), [(SPARSE, Quant()), pytest.param(SPARSE, FP8, marks=pytest.mark.slow)])
def test_replay_returns_the_recorded_log_probs(settings, quant):
  trajectories = sampled(settings, quant)
  again = replay(engine_config(settings, quant), weights_of(quant), trajectories)
  for t, logp in zip(trajectories, again):
    np.testing.assert_allclose(logp[t.mask], t.sampler_logp[t.mask], atol=1e-5)


@pytest.mark.slow
def test_fp8_concerns_the_linears_and_the_cache_of_every_layer():
  params = network()[1]
  assert len(quantised_linears(params, FP8)) == 3 * 7
  rounded, plain = sampled(Cache(), FP8), sampled()
  assert rounded[0].tokens[: rounded[0].prompt_length].tolist() == plain[0].tokens[: plain[0].prompt_length].tolist()
  logp, recorded = learner(without_evictions(rounded), share_prefix=True)
  assert 0.001 < np.abs(logp - recorded)[recorded != 0].mean() < 0.3


@pytest.mark.parametrize('settings', [Cache(), SPARSE], ids=['dense', 'sparse'])
def test_turns_that_go_on_from_kept_rings_equal_turns_that_read_everything(settings):
  """Stop strings end answers within a chunk. A ring that has drawn past one is not kept: it may have lost older tokens."""
  config = engine_config(settings, Quant())
  text = lambda ids: ''.join('.' if i % 5 == 0 else 'x' for i in ids)  # noqa: E731
  config = dataclasses.replace(config, text=text, sampling=dataclasses.replace(SAMPLING, stop=('.',)))
  again, reused = (Talk(Engine(config, weights_of(Quant())), reuse).turns(TURNS) for reuse in (False, True))
  assert differing(reused.found, again.found) == []
  past = sum(
    c.finish == 'stop' and len(c.tokens) % SAMPLING.chunk != 1 for (turn, _), c in again.found.items() if turn + 1 < TURNS
  )
  usage = reused.engine.usage
  assert usage.prefix_hits + usage.prefix_misses == len(UIDS) * (TURNS - 1)
  assert 0 < usage.prefix_misses <= past
  assert usage.prefix_hits > 0
