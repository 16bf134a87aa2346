"""FP8 in the learner's forward passes (quant.learner): against float64, and against the log-probs of an FP8 sampler."""

import dataclasses
import logging
from functools import partial

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.cache.layout import cache_layout
from sprl.config import Cache, Correction, Loss, Optimizer, Quant, Run, Sampling
from sprl.learner.batch import Shape, pack
from sprl.learner.copies import copies_of
from sprl.learner.logprobs import ForwardConfig, score
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.models.lora import Base, init_adapters
from sprl.quant.block import BlockScaled, Emulated
from sprl.quant.joined import separated
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import quantised_linears, sampler_weights
from sprl.types import Request

FLOAT32 = jnp.dtype('float32')
W8A8 = Quant(learner='w8a8')
SHAPE = Shape(micros=2, rows=1, tokens=32, sequences=4, columns=5)
ADVANTAGE = np.array([1.5, -0.5, -1.0, 2.0], np.float32)
RATE = 100.0  # of plain gradient descent: so large that the step shows the gradient to many digits


@pytest.fixture(scope='module')
def world():
  """A model whose widths are no multiples of a block, and four rollouts of 11 tokens.

  It has one layer: the flipped code of a prompt's token would change all later tokens in a second one.
  """
  config, params = small.model('llama', hidden_size=160, intermediate_size=200, num_hidden_layers=1)
  trajectories = small.rollouts([(5, 5), (5, 5)], (6, 6))
  return config, params, trajectories, pack(trajectories, ADVANTAGE, SHAPE, True)[0]


def forward_config(quant, **changes):
  return dataclasses.replace(ForwardConfig(1.0, FLOAT32, 8, quant=quant.in_learner), **changes)


def computation(quant, remat='layer'):
  return UpdateConfig(Correction(level=None), Loss(), forward_config(quant), remat)


# --- against float64 -------------------------------------------------------------------------------------------------


def through(exact, rounded):
  """Return `rounded` with the gradient of `exact`."""
  return exact + jax.lax.stop_gradient(rounded - exact)


def rounded_groups(x):
  """Return activations [T, M] as FP8 products multiply them, with XLA's own cast: a scale for each token and 128 features."""
  narrow = x.astype(jnp.float32)
  groups = jnp.pad(narrow, ((0, 0), (0, -x.shape[1] % 128))).reshape(len(x), -1, 128)
  scale = jnp.repeat(jnp.maximum(jnp.abs(groups).max(-1), 1e-10) / np.float32(448), 128, axis=-1)[:, : x.shape[1]]
  return jnp.clip(narrow / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


def product_by_hand(x, w, w8):
  """Return x @ w^T at rounded operands."""
  return through(x, rounded_groups(x)) @ through(w, w8).T


def llama_by_hand(config, params, rounded, tokens):
  """Return the log-probs of tokens 1, 2, ... of one sequence, in the dtype of the weights."""
  T, D = len(tokens), config.head_dim
  angle = jnp.arange(T)[:, None] * config.rope.theta ** (-jnp.arange(0, D, 2) / D)
  cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]

  def norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps) * scale

  def turned(x):
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  x = params['embed'][tokens]
  for layer, w8 in zip(transformer.layers(params), transformer.layers(rounded)):

    def linear(part, name, x, layer=layer, w8=w8):
      return product_by_hand(x, layer[part][name]['kernel'], w8[part][name]['kernel'])

    h = norm(x, layer['attention_norm']['scale'])
    q, k, v = (linear('attention', name, h).reshape(T, -1, D) for name in 'qkv')
    k, v = (jnp.repeat(each, config.num_heads // config.num_kv_heads, 1) for each in (turned(k), v))
    scores = jnp.einsum('thd,shd->hts', turned(q), k) / D**0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf))
    x = x + linear('attention', 'o', jnp.einsum('hts,shd->thd', weights, v).reshape(T, -1))
    h = norm(x, layer['mlp_norm']['scale'])
    gate = linear('mlp', 'gate', h)
    x = x + linear('mlp', 'down', gate / (1 + jnp.exp(-gate)) * linear('mlp', 'up', h))
  logits = norm(x, params['norm']['scale']) @ params['head']['kernel'].T
  return jnp.take_along_axis(jax.nn.log_softmax(logits)[:-1], tokens[1:, None], 1)[:, 0]


def by_hand(config, params, trajectories):
  """Return log-probs [B, C] and the gradient of the update's loss, both in float64."""
  rounded = jax.tree.map(lambda w: fp8_oracle.weight(w) if w.ndim == 2 else np.asarray(w), jax.device_get(params))
  with jax.enable_x64(True):
    wide, rounded = (jax.tree.map(lambda w: jnp.asarray(np.asarray(w), jnp.float64), tree) for tree in (params, rounded))

    @jax.jit
    def loss_of(params, tokens, advantage):
      logp = llama_by_hand(config, params, rounded, tokens)[-5:]
      return -advantage * jnp.mean(logp) / len(trajectories), logp

    found = [jax.value_and_grad(loss_of, has_aux=True)(wide, jnp.asarray(t.tokens), a) for t, a in zip(trajectories, ADVANTAGE)]
    logp = np.stack([np.asarray(logp) for (_, logp), _ in found])
    return logp, jax.tree.map(lambda *each: np.sum([np.asarray(g) for g in each], axis=0), *[g for _, g in found])


def gradient_of_update(world, quant, remat='layer'):
  """Return the gradient that one update of plain gradient descent took, over two microbatches."""
  config, params, _, batch = world
  optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=RATE, clip_norm=None), 10)
  state = TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
  after, _ = make_update(transformer.graph(config), optimizer, computation(quant, remat))(state, batch, small.unscored(batch))
  return jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / RATE, params, after.params)


def by_path(params):
  """Return the weights by their paths; quantised ones stay whole."""
  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda w: isinstance(w, BlockScaled | Emulated))
  return {jax.tree_util.keystr(path): w for path, w in leaves}


def distances(got, expected):
  """Return the relative distance of each array, by its path."""
  return {
    jax.tree_util.keystr(path): np.linalg.norm(a - b) / np.linalg.norm(b)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
  }


BLOCKWISE = pytest.param(dataclasses.replace(W8A8, arithmetic='blockwise'), marks=pytest.mark.slow, id='blockwise')


@pytest.mark.parametrize('quant', [pytest.param(W8A8, id='emulate'), BLOCKWISE])
def test_log_probs_and_all_gradients_are_those_of_rounded_operands(world, quant):
  config, params, trajectories, batch = world
  logp, gradient = by_hand(config, params, trajectories)
  found = score(transformer.graph(config), params, batch, forward_config(quant))
  plain = score(transformer.graph(config), params, batch, forward_config(Quant()))
  # Sums in float32 move a few numbers over a rounding boundary; one FP8 step moves a log-prob by about 1e-2.
  assert np.median(np.abs(found - logp)) < 1e-5
  assert np.abs(found - logp).max() < 0.5
  assert np.median(np.abs(plain - logp)) > 0.1
  near, far = distances(gradient_of_update(world, quant), gradient), distances(gradient_of_update(world, Quant()), gradient)
  assert max(near.values()) < 0.02, near  # one number over a boundary moves all gradients by about half a per cent
  assert min(far.values()) > 0.1, far


@pytest.mark.parametrize('remat', ['none', pytest.param('dots', marks=pytest.mark.slow)])
def test_rematerialisation_does_not_change_the_gradient(world, remat):
  apart = distances(gradient_of_update(world, W8A8, remat), gradient_of_update(world, W8A8))
  assert max(apart.values()) < 1e-4  # the recomputed products have the same operands


def test_copies_in_the_compute_dtype_change_no_number(world, monkeypatch):
  """Two microbatches in bfloat16 with float32 weights: each weight is cast once, and its gradient stays a float32 sum."""
  config, params, _, batch = world
  narrow = dataclasses.replace(computation(Quant()), forward=forward_config(Quant(), dtype=jnp.dtype('bfloat16')))

  def updated():
    optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=RATE, clip_norm=None), 10)
    state = TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
    return make_update(transformer.graph(config), optimizer, narrow)(state, batch, small.unscored(batch))[0].params

  assert len(copies_of(params, Quant(), narrow.forward.dtype, cast=True)) == 7 + 1  # the linears of the layer, and the head
  copied = updated()
  monkeypatch.setattr('sprl.learner.update.copies_for', lambda *_: {})
  for got, expected in zip(jax.tree.leaves(copied), jax.tree.leaves(updated()), strict=True):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


# --- against the sampler ---------------------------------------------------------------------------------------------


def log_rho(config, params, sampler, learners, dtype=FLOAT32, length=12):
  """Return |log rho| of the tokens that a sampler draws in three groups of three, for each value of quant.learner."""
  quant = Quant(sampler=sampler)
  sampling = Sampling(max_tokens=length, max_prompt=16, prompt_buckets=(16,), chunk=6)
  engine = EngineConfig(config, sampling, cache_layout(config, Cache(), quant, 16, length, dtype), 9, 1, 0, (), lambda ids: '')
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in (3, 16, 9)]
  requests = [Request(g * 3 + k, g, prompt, length) for g, prompt in enumerate(prompts) for k in range(3)]
  trajectories = generate(engine, sampler_weights(params, dtype, quant), requests)
  batch = pack(trajectories, np.ones(9, np.float32), Shape(3, 1, 96, 9, length), True)[0]
  assert batch.mask.sum() == 9 * length

  def gap(learner):
    logp = score(transformer.graph(config), params, batch, forward_config(Quant(learner=learner), dtype=dtype))
    return np.abs(np.asarray(logp) - batch.sampler_logp)[batch.mask]

  return [gap(learner) for learner in learners]


@pytest.mark.parametrize('family', ['qwen2', pytest.param('qwen3_moe', marks=pytest.mark.slow)])
def test_with_an_fp8_sampler_the_mismatch_almost_vanishes(family):
  """End-to-end FP8: sampler and learner multiply the same rounded operands. The remainder is flipped codes (code_flips)."""
  config, params = small.model(family, num_hidden_layers=1 if family == 'qwen3_moe' else 2)
  rollout_only, end_to_end = log_rho(config, params, 'w8a8', ('none', 'w8a8'))
  assert np.median(rollout_only) > 0.02
  assert np.median(end_to_end) < 1e-4
  assert end_to_end.mean() < rollout_only.mean() / 20


@pytest.mark.slow
def test_in_bfloat16_the_mismatch_halves():
  """The two paths sum in different orders. In bfloat16 this moves many numbers, and FP8 codes with them. `-s` prints a table."""
  config = tiny('qwen2', hidden_size=256, intermediate_size=512, num_hidden_layers=4)
  params = transformer.init_params(config, jax.random.key(0), scale=0.06)
  mean = {}
  for dtype in ('float32', 'bfloat16'):
    for sampler in ('none', 'w8a8'):
      learners = ('none', 'w8a8') if sampler == 'w8a8' else ('none',)
      for learner, gap in zip(learners, log_rho(config, params, sampler, learners, jnp.dtype(dtype), 24)):
        mean[dtype, sampler, learner] = gap.mean()
        print(f'{dtype} sampler={sampler} learner={learner}: mean {gap.mean():.1e}, median {np.median(gap):.1e}')
  assert mean['float32', 'w8a8', 'w8a8'] < 0.1 * mean['float32', 'w8a8', 'none']
  assert mean['bfloat16', 'none', 'none'] < mean['bfloat16', 'w8a8', 'w8a8'] < 0.7 * mean['bfloat16', 'w8a8', 'none']


def test_the_linears_and_their_codes_are_those_of_the_sampler(world):
  _, params, *_ = world
  for sampler in (
    Quant(sampler='w8a8', skip_names=('o', 'up')),
    Quant(sampler='w8a8', format='pow2', arithmetic='blockwise'),
  ):
    learner = dataclasses.replace(sampler, sampler='none', learner='w8a8').in_learner
    copies = jax.jit(partial(copies_of, quant=learner, dtype=FLOAT32))(params)
    weights = separated(sampler_weights(params, FLOAT32, sampler).params)
    held = by_path(weights)
    assert {name for name, w in held.items() if isinstance(w, BlockScaled | Emulated)} == set(copies)
    for name, copy in copies.items():
      jax.tree.map(np.testing.assert_array_equal, copy, held[name])


def test_with_an_adapter_the_policy_is_that_of_the_merged_weights(world):
  config, params, _, batch = world
  run = Run(quant=W8A8)
  lora = dataclasses.replace(run.lora, rank=2)
  adapters = jax.tree.map(lambda a: a + 0.1, init_adapters(config, lora, jax.random.key(0)))
  under = Base(params, 8.0).under(adapters)
  merged = separated(sampler_weights(under, FLOAT32).params)
  got, expected = (np.asarray(score(transformer.graph(config), w, batch, forward_config(W8A8))) for w in (under, merged))
  assert np.median(np.abs(got - expected)) < 1e-5
  assert np.abs(got - score(transformer.graph(config), params, batch, forward_config(W8A8))).mean() > 0.1


def test_adapters_get_gradients_and_frozen_weights_none(world):
  config, params, _, batch = world
  lora = dataclasses.replace(Run().lora, rank=2)
  adapters, base = init_adapters(config, lora, jax.random.key(0)), Base(params, 8.0)
  optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=1.0, clip_norm=None), 10)
  update = make_update(transformer.graph(config), optimizer, computation(W8A8))
  first = jax.tree.map(np.asarray, jax.device_get(adapters))
  after, _ = update(TrainState.create(adapters, optimizer), batch, small.unscored(batch), base)
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), first, jax.device_get(after.params))
  for layer in moved['layers'].values():
    for part in layer.values():
      for name, pair in part.items():
        assert pair['b'] > 1e-4, name  # B is 0 at first, so A has no gradient yet
        assert pair['a'] == 0, name


# --- the train state -------------------------------------------------------------------------------------------------


class Compilations(logging.Handler):
  """Counts what JAX compiles of the update."""

  count = 0

  def emit(self, record):
    self.count += record.getMessage().startswith('Compiling jit(update)')


def test_master_weights_stay_float32_and_move_by_less_than_an_fp8_step(world):
  config, params, _, batch = world
  rate = 1e-5
  optimizer = make_optimizer(Optimizer(learning_rate=rate, warmup_steps=0), 10)
  update = make_update(transformer.graph(config), optimizer, computation(W8A8))
  state = TrainState.create(jax.tree.map(jnp.copy, params), optimizer)
  logging.getLogger('jax').addHandler(seen := Compilations())
  with jax.log_compiles():
    for _ in range(3):
      state, metrics = update(state, batch, small.unscored(batch))
  logging.getLogger('jax').removeHandler(seen)
  assert seen.count == 1  # new weights, and new copies of them, compile nothing
  assert int(state.updates) == 3
  assert float(metrics['update/grad_norm']) > 0
  changed = []
  for name in quantised_linears(params, W8A8.in_learner):
    before, after = (np.asarray(by_path(tree)[name]) for tree in (params, state.params))
    assert after.dtype == np.float32
    step = np.abs(after - before)
    assert 0 < step.max() < 4 * rate
    assert (step > 0).mean() > 0.9
    changed.append((fp8_oracle.weight(before) != fp8_oracle.weight(after)).mean())
  assert 0 < np.mean(changed) < 0.05  # few codes change, though almost every weight moved
