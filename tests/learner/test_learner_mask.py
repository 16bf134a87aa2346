"""The learner-side mask hides the tokens that the sampler evicted (docs/methods/sparse.md, Learner-side mask)."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.cache.layer import NEVER
from sprl.cache.layout import cache_layout
from sprl.config import UNQUANTISED, Cache, Correction, Loss, Optimizer, Packing, Rollout, Sampling
from sprl.learner.batch import pack, shape
from sprl.learner.logprobs import ForwardConfig, score
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.models.attention import EvictedAttention, PackedAttention
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.types import Request

SAMPLING = Sampling(temperature=0.9, max_tokens=20, max_prompt=12, prompt_buckets=(12,), chunk=10)
PACKING = Packing(row_tokens=64, rows=2, share_prefix=False, score_chunk=16)
FORWARD = ForwardConfig(temperature=0.9, dtype=jnp.dtype('float32'), chunk=16)


@pytest.fixture(scope='module')
def model():
  return small.model('qwen3')


@partial(jax.jit, static_argnums=0)
def alone(graph, params, tokens, evicted):
  """Return the log-probs of one sequence under its evictions, from the logits of one row. The first token has none."""
  positions = jnp.arange(tokens.shape[1])[None]
  attention = EvictedAttention(PackedAttention.of(jnp.ones(tokens.shape, jnp.int32)), positions, evicted)
  hidden = transformer.forward(graph, params, tokens, positions, attention).hidden
  logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T / FORWARD.temperature)
  return jnp.take_along_axis(logp[0, :-1], tokens[0, 1:, None], 1)[:, 0]


def test_packed_rows_have_the_log_probs_of_each_masked_sequence_alone(model):
  config, params = model
  graph, rng = transformer.graph(config), np.random.default_rng(0)
  trajectories, expected = [], []
  for t in small.rollouts([(9, 20), (14, 6)], (5, 12)):
    n = len(t.tokens)
    gone = np.arange(n) + rng.integers(1, 9, (config.num_layers, config.num_kv_heads, n))  # some tokens last a few steps only
    evicted = np.where(rng.random(gone.shape) < 0.4, gone, NEVER).astype(np.int32)
    trajectories.append(dataclasses.replace(t, evicted=evicted))
    padded = np.pad(t.tokens, (0, 32 - n))[None], np.pad(evicted, ((0, 0), (0, 0), (0, 32 - n)), constant_values=NEVER)[None]
    expected.append(np.append(0, alone(graph, params, *padded))[:n])
  batch, _ = pack(trajectories, np.ones(4, np.float32), shape(SAMPLING, Rollout(2, 2), PACKING, 1), False)
  expected = small.rectangle(trajectories, expected, 20)
  np.testing.assert_allclose(score(graph, params, batch, FORWARD), expected, atol=1e-4)
  dense = score(graph, params, dataclasses.replace(batch, evicted=np.full_like(batch.evicted, NEVER)), FORWARD)
  assert np.max(np.abs(dense - expected)) > 0.1


# --- with a sampler that records its evictions -----------------------------------------------------------------------


@pytest.fixture(scope='module')
def world(model):
  """(config, weights, trajectories of a sparse sampler, their batch)."""
  config, params = model
  layout = cache_layout(config, Cache(budget=10, interval=3, window=3), UNQUANTISED, 12, 20, FORWARD.dtype, record=True)
  engine = EngineConfig(config, SAMPLING, layout, 4, 2, 0, tuple(range(8)), lambda ids: '')
  rng = np.random.default_rng(0)
  prompts = [rng.integers(8, 259, n).astype(np.int32) for n in (5, 12)]
  requests = [Request(g * 2 + k, g, prompt, 20) for g, prompt in enumerate(prompts) for k in range(2)]
  trajectories = generate(engine, sampler_weights(params, FORWARD.dtype), requests)
  assert sum(np.any(t.evicted < NEVER) for t in trajectories) >= 3
  batch, _ = pack(trajectories, np.array([1, -1, 0.5, -0.5], np.float32), shape(SAMPLING, Rollout(2, 2), PACKING, 1), False)
  return config, params, trajectories, batch


@pytest.mark.slow
def test_packed_rows_have_the_log_probs_of_the_sampler(world):
  config, params, trajectories, batch = world
  expected = small.rectangle(trajectories, [t.sampler_logp for t in trajectories], 20)
  np.testing.assert_allclose(score(transformer.graph(config), params, jax.device_put(batch), FORWARD), expected, atol=1e-4)


@pytest.mark.slow
def test_an_update_under_the_mask_has_no_mismatch_and_a_gradient(world):
  config, params, _, batch = world
  optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=1.0, clip_norm=None), 1)
  update = make_update(transformer.graph(config), optimizer, UpdateConfig(Correction(level=None), Loss(), FORWARD))
  state = TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
  batch = jax.device_put(batch)
  state, metrics = update(state, batch, small.unscored(batch))
  assert metrics['rollout_corr/abs_dlogp_max'] < 1e-4
  assert metrics['update/grad_norm'] > 1e-3
  assert all(np.all(np.isfinite(w)) for w in jax.tree.leaves(state.params))
