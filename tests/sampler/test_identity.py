"""Identity: the learner's teacher-forced log-probs are the sampler's recorded ones, to rounding, however rows are laid out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.learner.packing import Shape, pack
from sprl.learner.score import score
from sprl.models import transformer
from sprl.models.memory import CausalMemory
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.engine import Engine
from sprl.sampler.served import serve
from sprl.sampler.slots import generate
from sprl.settings import Cache, Quant, Sampling
from sprl.trajectory import Request

TEMPERATURE, TOLERANCE = 0.8, 1e-4
SAMPLING = Sampling(temperature=TEMPERATURE, max_tokens=12, max_prompt=16, prompt_buckets=(16,), chunk=6)


@pytest.fixture(scope='module', params=['llama', 'qwen2', 'qwen3', 'qwen3_moe'])
def sampled(request):
  """(config, weights, trajectories of three groups of three); 30 stop ids give them many lengths."""
  config, params = small.model(request.param)
  plan = cache_plan(config, Cache(), Quant(), 16, 12, 'float32')
  engine = Engine(config, SAMPLING, plan, 5, 2, 0, tuple(range(30)), lambda ids: '')
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in (3, 16, 9)]
  requests = [Request(g * 3 + k, g, prompt, 12) for g, prompt in enumerate(prompts) for k in range(3)]
  trajectories = generate(engine, serve(params, jnp.dtype('float32')), requests)
  assert len({len(t.completion) for t in trajectories}) > 2
  return config, params, trajectories


def test_packed_rows_of_several_groups_sharing_their_prompts(sampled):
  config, params, trajectories = sampled
  shape = Shape(micros=2, rows=1, tokens=96, sequences=9, columns=12)
  batch, metrics = pack(trajectories, np.ones(9, np.float32), shape, share_prefix=True)
  assert len(np.unique(batch.segments[0])) > 5  # at least two groups and padding in the first row
  assert metrics['packing/tokens_saved_by_sharing'] > 0

  def scored(batch):
    logp = score(transformer.graph(config), params, jax.device_put(batch), TEMPERATURE, jnp.dtype('float32'), 8)
    return np.asarray(logp)

  logp = scored(batch)
  recorded = small.rectangle(trajectories, [t.sampler_logp for t in trajectories], 12)
  np.testing.assert_allclose(logp, recorded, atol=TOLERANCE)
  noisy = dataclasses.replace(batch, tokens=np.where(batch.segments == 0, 77, batch.tokens))
  np.testing.assert_array_equal(scored(noisy), logp)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_rows_padded_on_either_side(sampled, side):
  config, params, trajectories = sampled
  T = 28
  place = [np.arange(len(t.tokens)) + (T - len(t.tokens) if side == 'left' else 0) for t in trajectories]
  tokens = np.full((2, 9, T), 5, np.int32)
  tokens[1] = 250  # another padding
  positions, segments = np.zeros((9, T), np.int32), np.zeros((9, T), np.int32)
  for b, (t, here) in enumerate(zip(trajectories, place)):
    tokens[:, b, here], positions[b, here], segments[b, here] = t.tokens, np.arange(len(here)), 1

  @jax.jit
  def logprobs(tokens):
    memory = CausalMemory.of(jnp.asarray(segments))
    hidden, _ = transformer.forward(transformer.graph(config), params, tokens, jnp.asarray(positions), memory)
    logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T / TEMPERATURE)
    return jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], 2)[..., 0]

  one, other = (np.asarray(logprobs(jnp.asarray(x))) for x in tokens)
  for b, (t, here) in enumerate(zip(trajectories, place)):
    predicted = here[t.prompt_length :] - 1
    np.testing.assert_allclose(one[b, predicted], t.sampler_logp[t.mask], atol=TOLERANCE)
    np.testing.assert_array_equal(one[b, predicted], other[b, predicted])


def test_fp8_experts_say_the_same_token_by_token_and_in_one_pass():
  """The weights as served, through the learner's path: what FP8 does to a token depends on that token alone."""
  config, params = small.model('qwen3_moe', num_hidden_layers=1)
  plan = cache_plan(config, Cache(), Quant(), 16, 12, 'float32')
  engine = Engine(config, SAMPLING, plan, 5, 2, 0, (), lambda ids: '')
  prompts = [np.random.default_rng(0).integers(0, 259, n).astype(np.int32) for n in (3, 16, 9)]
  served = serve(params, jnp.dtype('float32'), Quant(sampler='w8a8'))
  trajectories = generate(engine, served, [Request(g, g, prompt, 12) for g, prompt in enumerate(prompts)])
  off, plain = [], []
  for t in trajectories:
    off.append(small.teacher_forced(config, served.params, t, TEMPERATURE)[t.mask] - t.sampler_logp[t.mask])
    plain.append(small.teacher_forced(config, params, t, TEMPERATURE)[t.mask] - t.sampler_logp[t.mask])
  assert np.abs(np.concatenate(off)).max() < TOLERANCE
  assert np.abs(np.concatenate(plain)).mean() > 0.01  # it is FP8
