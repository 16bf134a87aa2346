"""Router replay R3: the sampler records each token's experts, and the learner uses them (docs/methods/fp8.md, eq. 11)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.cache.layout import cache_layout
from sprl.config import DENSE, Cache, Quant, Sampling, Streaming
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig, score, score_and_route
from sprl.models import transformer
from sprl.sampler.engine import Engine, generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.types import Request, Trajectory

FLOAT32 = jnp.dtype('float32')
FORWARD = ForwardConfig(1.0, FLOAT32, 16)
SAMPLING = Sampling(max_tokens=12, max_prompt=16, prompt_buckets=(16,), chunk=5)
# Reads given tokens as decode steps do. Evicts nothing, because an eviction would change the log-probs.
UNEVICTED = Cache(budget=28, interval=3, window=2, method='streaming', streaming=Streaming(sinks=2))


def network(layers):
  return small.model('qwen3_moe', num_hidden_layers=layers, num_experts=16)


@pytest.fixture(scope='module')
def model():
  return network(1)


def engine(model, cache):
  layout = cache_layout(model[0], cache, Quant(), 16, 12, 'float32', routes=True)
  return EngineConfig(model[0], SAMPLING, layout, 4, 1, 0, tuple(range(20)), lambda ids: '')


def requests():
  rng = np.random.default_rng(0)
  return [
    Request(g * 2 + k, g, prompt, 12) for g, n in enumerate((3, 16, 9)) for prompt in [rng.integers(20, 259, n)] for k in (0, 1)
  ]


@pytest.fixture(scope='module')
def sampled(model):
  return generate(engine(model, UNEVICTED), sampler_weights(model[1], FLOAT32), requests())


def packed(trajectories):
  return pack(trajectories, np.ones(6, np.float32), Shape(micros=3, rows=1, tokens=64, sequences=6, columns=12), True)[0]


def learner(model, batch):
  """Return (log-probs [B, C], routes [A, R, T, M, k]) of the learner's path."""
  return score_and_route(transformer.graph(model[0]), model[1], jax.device_put(batch), FORWARD)


def without_routes(trajectories):
  return [dataclasses.replace(t, routes=None) for t in trajectories]


def gap(trajectories, logp):
  recorded = small.rectangle(trajectories, [t.sampler_logp for t in trajectories], 12)
  return np.abs(np.asarray(logp) - recorded)[recorded != 0]


def test_every_token_that_the_sampler_read_has_recorded_experts(sampled):
  assert len({len(t.completion) for t in sampled}) > 1
  for t in sampled:
    assert t.routes.dtype == np.int8
    assert t.routes.base is None  # a view would keep all positions of the row alive
    assert t.routes.shape == (len(t.tokens), 1, 2)
    assert np.all(t.routes[:-1] >= 0)
    assert np.all(t.routes[:-1] < 16)
    assert np.all(t.routes[-1] == -1)  # the sampler does not read the last token
    assert np.all(t.routes[:-1, :, 0] != t.routes[:-1, :, 1])


def test_in_float32_the_router_of_the_learner_agrees(model, sampled):
  batch = packed(without_routes(sampled))
  assert batch.routes is None
  logp, chosen = learner(model, batch)
  assert gap(sampled, logp).max() < 1e-4
  recorded = packed(sampled).routes
  assert recorded.dtype == np.int8
  known = recorded >= 0
  assert known.sum() > 50
  np.testing.assert_array_equal(np.asarray(chosen)[known], recorded[known])


def test_given_tokens_have_the_experts_of_their_first_reading(model, sampled):
  """A request that continues in another row takes equal steps, so its experts are equal."""
  whole = {t.uid: t for t in sampled}
  asked = [
    dataclasses.replace(r, given=whole[r.uid].completion[:7], resumed=7, max_tokens=5)
    for r in requests()
    if len(whole[r.uid].completion) > 7
  ]
  assert asked
  for t in generate(engine(model, UNEVICTED), sampler_weights(model[1], FLOAT32), asked):
    np.testing.assert_array_equal(t.tokens, whole[t.uid].tokens)
    np.testing.assert_array_equal(t.routes, whole[t.uid].routes)


@pytest.mark.parametrize('cache', [DENSE, UNEVICTED], ids=['dense', 'sparse'])
def test_an_interrupted_request_keeps_the_experts_of_its_first_reading(model, cache):
  """Other weights read the tokens again after the interruption. Tokens that were read before it keep their experts."""
  before, after = (sampler_weights(params, FLOAT32) for params in (model[1], jax.tree.map(jnp.negative, model[1])))
  config = dataclasses.replace(engine(model, cache), stop_ids=())
  whole = {t.uid: t for t in generate(config, before, requests())}
  running, done = Engine(config, before), {}
  for request in requests():
    running.add(request)
  running.dispatch()
  running.collect()
  parts = {part.request.uid: part for part in running.abort() if len(part.tokens)}  # without those that wait for a row
  running.swap(after, 1)
  for part in parts.values():
    running.add(part.rest())
  while running.load:
    running.dispatch()
    done |= {c.request.uid: c for c in running.collect()}
  changed = 0
  for uid, part in parts.items():
    later, read = done[uid], part.request.start + len(part.tokens) - 1  # the last token was drawn and not read yet
    joined = Trajectory.of(part.then(later))
    np.testing.assert_array_equal(joined.routes[:read], whole[uid].routes[:read])
    np.testing.assert_array_equal(joined.routes[read:], later.routes[read:])
    assert joined.routes.shape == (len(joined.tokens), 1, 2)
    changed += not np.array_equal(later.routes[:read], whole[uid].routes[:read])
  assert changed == len(parts) == 2


def test_replayed_routes_reduce_the_mismatch_of_fp8():
  """At least a third of the mismatch of FP8 linears is due to tokens with other experts (here 0.18 of 0.40 nats a token)."""
  model = network(2)
  weights = sampler_weights(model[1], FLOAT32, Quant(sampler='w8a8'))
  trajectories = generate(engine(model, DENSE), weights, requests())
  batch = packed(trajectories)
  logp, taken = learner(model, batch)
  known = batch.routes >= 0
  np.testing.assert_array_equal(np.asarray(taken)[known], batch.routes[known])
  free, chosen = learner(model, packed(without_routes(trajectories)))
  assert np.mean(np.asarray(chosen)[known] != batch.routes[known]) > 0.01
  assert gap(trajectories, logp).mean() < gap(trajectories, free).mean() / 1.5
  scored = score(transformer.graph(model[0]), model[1], jax.device_put(batch), FORWARD)
  np.testing.assert_allclose(scored, logp, atol=1e-5)
