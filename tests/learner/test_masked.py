"""The learner that forgets as the sampler did: its log-probs are the sampler's, and gradients flow through what was kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.cache.layer import NEVER
from sprl.learner.packing import pack, shape
from sprl.learner.score import score
from sprl.learner.state import TrainState, make_optimizer
from sprl.learner.update import Computation, make_update
from sprl.models import transformer
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.engine import Engine
from sprl.sampler.served import serve
from sprl.sampler.slots import generate
from sprl.settings import UNQUANTISED, Cache, Correction, Loss, Optimizer, Packing, Rollout, Sampling
from sprl.trajectory import Request

SAMPLING = Sampling(temperature=0.9, max_tokens=20, max_prompt=12, prompt_buckets=(12,), chunk=7)
PACKING = Packing(row_tokens=64, rows=2, share_prefix=False, score_chunk=16)
FLOAT32 = jnp.dtype('float32')


@pytest.fixture(scope='module')
def world():
  """(config, weights, trajectories of a sparse sampler that wrote down what it forgot, their batch)."""
  config, params = small.model('qwen3')
  plan = cache_plan(config, Cache(budget=10, interval=3, window=3), UNQUANTISED, 12, 20, FLOAT32, record=True)
  engine = Engine(config, SAMPLING, plan, 4, 2, 0, tuple(range(8)), lambda ids: '')
  rng = np.random.default_rng(0)
  prompts = [rng.integers(8, 259, n).astype(np.int32) for n in (5, 12, 9)]
  requests = [Request(g * 2 + k, g, prompt, 20) for g, prompt in enumerate(prompts) for k in range(2)]
  trajectories = generate(engine, serve(params, FLOAT32), requests)
  advantage = np.array([1, -1, 0.5, -0.5, 2, -2], np.float32)
  batch, _ = pack(trajectories, advantage, shape(SAMPLING, Rollout(3, 2), PACKING, 1), False)
  return config, params, trajectories, batch


def test_packed_rows_score_as_the_sampler_did(world):
  config, params, trajectories, batch = world
  assert sum(np.any(t.evicted < NEVER) for t in trajectories) >= 4
  logp = score(transformer.graph(config), params, jax.device_put(batch), 0.9, FLOAT32, 16)
  expected = small.rectangle(trajectories, [t.sampler_logp for t in trajectories], 20)
  np.testing.assert_allclose(logp, expected, atol=1e-4)
  dense = score(transformer.graph(config), params, jax.device_put(dataclasses.replace(batch, evicted=None)), 0.9, FLOAT32, 16)
  assert np.max(np.abs(dense - expected)) > 0.1


def test_an_update_under_the_mask_has_the_ratio_1_and_a_gradient(world):
  config, params, _, batch = world
  optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=1.0, clip_norm=0.0), 1)
  computation = Computation(Correction(level='off'), Loss(), 0.9, FLOAT32, 16, 'layer')
  update = make_update(transformer.graph(config), optimizer, computation)
  state = TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
  state, metrics = update(state, jax.device_put(batch), None, None)
  assert metrics['rollout_corr/abs_dlogp_max'] < 1e-4
  assert metrics['update/grad_norm'] > 1e-3
  assert all(np.all(np.isfinite(w)) for w in jax.tree.leaves(state.params))
