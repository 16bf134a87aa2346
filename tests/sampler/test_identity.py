"""Identity: in every layout of rows, the learner's teacher-forced log-probs equal the sampler's log-probs to rounding."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from code_flips import flipped

from sprl.cache.layout import cache_layout
from sprl.config import Cache, Quant, Sampling
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig, score
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.types import Request

TEMPERATURE, TOLERANCE = 0.8, 1e-4
SAMPLING = Sampling(temperature=TEMPERATURE, max_tokens=12, max_prompt=16, prompt_buckets=(16,), chunk=6)
T = 28
LAYERS = {'qwen3_moe': 1}
# Together the default families have biases, tied and untied heads, normalised queries and keys, and experts.
FAMILIES = [
  'qwen2',
  'qwen3_moe',
  *(pytest.param(family, marks=pytest.mark.slow) for family in ('llama', 'qwen3', 'mistral', 'olmo2')),
]


@cache
def network(family):
  return small.model(family, num_hidden_layers=LAYERS.get(family, 2))


def sample(config, weights):
  """Return trajectories of three groups of three. 30 stop ids give them many lengths."""
  layout = cache_layout(config, Cache(), Quant(), 16, 12, 'float32')
  engine = EngineConfig(config, SAMPLING, layout, 5, 1, 0, tuple(range(30)), lambda ids: '')
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in (3, 16, 9)]
  trajectories = generate(
    engine, weights, [Request(g * 3 + k, g, prompt, 12) for g, prompt in enumerate(prompts) for k in range(3)]
  )
  assert len({len(t.completion) for t in trajectories}) > 2
  return trajectories


@pytest.fixture(scope='module', params=FAMILIES)
def sampled(request):
  config, params = network(request.param)
  return config, params, sample(config, sampler_weights(params, jnp.dtype('float32')))


def teacher_forced(config, params, trajectories, side='right', pad=5):
  """Return the log-probs of each completion's tokens, from one pass over rows padded with token `pad` on one side."""
  starts = [T - len(t.tokens) if side == 'left' else 0 for t in trajectories]
  tokens = np.full((len(trajectories), T), pad, np.int32)
  positions, segments = np.zeros((2, len(trajectories), T), np.int32)
  for b, (t, start) in enumerate(zip(trajectories, starts)):
    n = len(t.tokens)
    here = slice(start, start + n)
    tokens[b, here], positions[b, here], segments[b, here] = t.tokens, np.arange(n), 1
  logp = np.asarray(_logprobs(config, params, *map(jnp.asarray, (tokens, positions, segments))))
  return [
    logp[b, start + t.prompt_length - 1 : start + len(t.tokens) - 1] for b, (t, start) in enumerate(zip(trajectories, starts))
  ]


@partial(jax.jit, static_argnums=0)
def _logprobs(config, params, tokens, positions, segments):
  memory = PackedAttention.of(segments)
  hidden = transformer.forward(transformer.graph(config), params, tokens, positions, memory).hidden
  logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T / TEMPERATURE)
  return jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], 2)[..., 0]


def test_packed_rows_that_share_prompts_have_the_log_probs_of_the_sampler(sampled):
  config, params, trajectories = sampled
  shape = Shape(micros=2, rows=1, tokens=96, sequences=9, columns=12)
  batch, metrics = pack(trajectories, np.ones(9, np.float32), shape, share_prefix=True)
  assert len(np.unique(batch.segments[0])) > 5  # at least two groups and padding in the first row
  assert metrics['packing/tokens_saved_by_sharing'] > 0

  def scored(batch):
    logp = score(transformer.graph(config), params, jax.device_put(batch), ForwardConfig(TEMPERATURE, jnp.dtype('float32'), 8))
    return np.asarray(logp)

  logp = scored(batch)
  recorded = small.rectangle(trajectories, [t.sampler_logp for t in trajectories], 12)
  np.testing.assert_allclose(logp, recorded, atol=TOLERANCE)
  noisy = dataclasses.replace(batch, tokens=np.where(batch.segments == 0, 77, batch.tokens))
  np.testing.assert_array_equal(scored(noisy), logp)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_rows_padded_on_either_side_have_the_log_probs_of_the_sampler(sampled, side):
  *network, trajectories = sampled
  logp, other = (teacher_forced(*network, trajectories, side, pad) for pad in (5, 250))
  for t, row, of_other_pad in zip(trajectories, logp, other):
    np.testing.assert_allclose(row, t.sampler_logp[t.mask], atol=TOLERANCE)
    np.testing.assert_array_equal(row, of_other_pad)


def test_fp8_experts_token_by_token_equal_one_pass():
  """The learner's path runs with the sampler's weights. The FP8 error of a token depends on that token alone.

  The two paths sum in different orders, which flips a few codes (code_flips). One FP8 layer then moves a log-prob by about 0.01.
  If tokens shared their scales, all sequences would differ.
  """
  config, params = network('qwen3_moe')
  weights = sampler_weights(params, jnp.dtype('float32'), Quant(sampler='w8a8'))
  trajectories = sample(config, weights)
  recorded = [t.sampler_logp[t.mask] for t in trajectories]
  logp = teacher_forced(config, weights.params, trajectories)
  assert len(flipped(logp, recorded, TOLERANCE)) <= 3  # of 9 sequences
  assert np.quantile(np.abs(np.concatenate(logp) - np.concatenate(recorded)), 0.75) < TOLERANCE
  assert max(np.abs(a - b).max() for a, b in zip(logp, recorded)) < 0.1
  unquantised = teacher_forced(config, params, trajectories)
  assert np.abs(np.concatenate(unquantised) - np.concatenate(recorded)).mean() > 0.01  # the weights are FP8
