"""The update: for any packing and accumulation its gradient equals that of a plain loss written from the formulas."""

import dataclasses
import re
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small

from sprl.config import Correction, Loss, Optimizer
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig, micro_logprobs, score
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update, needs_old_logprobs
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.routing import Balance, balance_loss, balance_metrics

FLOAT32 = jnp.dtype('float32')
RATE = 100.0  # of plain gradient descent: so large that the step shows the gradient to many digits
TEMPERATURE = 0.7
COLUMNS, ADVANTAGE = 7, np.array([1.5, -0.5, -1.0, 2.0, np.nan, 0.25, -2.0], np.float32)
SETTINGS = UpdateConfig(Correction(), Loss(), ForwardConfig(temperature=TEMPERATURE, dtype=FLOAT32, chunk=8))
SGD = Optimizer(name='sgd', learning_rate=RATE, clip_norm=None)
TWO_ROWS = Shape(micros=2, rows=1, tokens=32, sequences=7, columns=COLUMNS)


@pytest.fixture(scope='module')
def world():
  """A model and two groups of rollouts. One rollout has tokens of an environment; one sequence is filtered out.

  The sampler's log-probs differ a little from the model's, so that every correction has an effect.
  """
  config, params = small.model(num_hidden_layers=1)
  trajectories = small.rollouts([(5, 3, 7, 1), (4, 6, 2)], (6, 3))
  broken = trajectories[2].mask.copy()
  broken[8:10] = False
  trajectories[2] = dataclasses.replace(trajectories[2], mask=broken)
  rng = np.random.default_rng(3)
  forced = [np.asarray(small.teacher_forced(config, params, t, TEMPERATURE)) for t in trajectories]
  trajectories = [
    dataclasses.replace(t, sampler_logp=np.where(t.mask, l + rng.normal(0, 0.4, len(l)), 0).astype(np.float32))
    for t, l in zip(trajectories, forced)
  ]
  return types.SimpleNamespace(
    config=config, params=params, graph=transformer.graph(config), trajectories=trajectories, forced=forced
  )


def packed(world, shape=TWO_ROWS, share=True):
  return pack(world.trajectories, ADVANTAGE, shape, share)[0]


@pytest.fixture(scope='module')
def batch(world):
  found = packed(world)
  assert int(found.used) == 2
  return found


@pytest.fixture(scope='module')
def scored(world, batch):
  """The old policy's log-probs of the batch."""
  return np.asarray(score(world.graph, world.params, batch, SETTINGS.forward))


def fresh(world, settings):
  optimizer = make_optimizer(settings, 10)
  return optimizer, TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer)


def step(world, batch, config, **logprobs):
  """Return (gradient that one update of plain gradient descent took, metrics)."""
  optimizer, state = fresh(world, SGD)
  before = jax.tree.map(np.array, state.params)
  given = dataclasses.replace(small.unscored(batch), **logprobs)
  after, metrics = make_update(world.graph, optimizer, config)(state, batch, given)
  return jax.tree.map(lambda a, b: (a - np.asarray(b)) / RATE, before, after.params), metrics


@partial(jax.jit, static_argnums=0)
def logprobs_and_gradient(graph, params, tokens, segments, kept, cotangents):
  """Return (log-probs and entropies [B, T], gradient for their cotangents), from the logits of one sequence a row.

  `kept` [B, T, V] are the tokens among which each token was drawn.
  """

  def forward(params):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = transformer.forward(graph, params, tokens, positions, PackedAttention.of(segments)).hidden
    logits = jnp.where(jnp.roll(kept, -1, axis=1), hidden @ transformer.head_weight(params).T / TEMPERATURE, -1e9)
    logp = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], 2)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(entropy[:, :-1], ((0, 0), (1, 0)))

  found, pullback = jax.vjp(forward, params)
  return found, pullback(cotangents)[0]


def plain(world, token_loss, aggregate, keep=lambda p, b: np.ones(p.shape, bool)):
  """Return (loss, gradient) with one sequence a row, without packing, chunks and microbatches.

  token_loss(l, entropy, b, A, mask) takes [B, T] arrays. aggregate(loss, surviving tokens, all tokens) returns a number.
  """
  B, T = len(world.trajectories), max(len(t.tokens) for t in world.trajectories)
  tokens, segments, b = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32), np.zeros((B, T), np.float32)
  mask, kept = np.zeros((B, T), bool), np.ones((B, T, world.config.vocab_size), bool)
  for i, t in enumerate(world.trajectories):
    n = len(t.tokens)
    tokens[i, :n], segments[i, :n], b[i, :n] = t.tokens, 1, t.sampler_logp
    mask[i, :n] = t.mask & np.isfinite(ADVANTAGE[i])
    for at, ids in zip(np.flatnonzero(t.mask), t.support if t.support is not None else ()):
      kept[i, at] = np.isin(np.arange(kept.shape[2]), ids)
  A = np.nan_to_num(ADVANTAGE)[:, None]

  @jax.jit
  def loss(l, entropy):
    survive = mask & keep(sg(l), b)
    return aggregate(jnp.where(survive, token_loss(l, entropy, b, A, mask), 0), survive, mask)

  network = partial(logprobs_and_gradient, world.graph, world.params, tokens, segments, kept)
  (l, entropy), _ = network((np.zeros((B, T), np.float32),) * 2)
  value, cotangents = jax.value_and_grad(loss, argnums=(0, 1))(l, entropy)
  return value, network(cotangents)[1]


def check_gradient(got, expected):
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected)):
    scale = float(np.abs(b).max())
    np.testing.assert_allclose(a, b, atol=5e-5 * scale + 1e-8, err_msg=jax.tree_util.keystr(path))


def seq_mean_token_mean(loss, survive, mask):
  rows = mask.any(axis=1).sum()
  return (loss.sum(axis=1) / jnp.maximum(survive.sum(axis=1), 1)).sum() / rows


sg = jax.lax.stop_gradient


@pytest.fixture(scope='module')
def adamw(world, batch):
  """(optimizer, update with the default settings, its program before compilation)."""
  optimizer, state = fresh(world, Optimizer(learning_rate=1e-3, clip_norm=None))
  update = make_update(world.graph, optimizer, SETTINGS)
  return optimizer, update, update.lower(state, batch, small.unscored(batch))


# --- the gradient ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def on_policy(world):
  """Loss and gradient of the defaults: ppo at ratio 1, tokens weighted by min(rho, 2)."""

  def token_loss(l, entropy, b, A, mask):
    r, w = jnp.exp(l - sg(l)), jnp.minimum(jnp.exp(sg(l) - b), 2.0)
    return -w * r * A

  return plain(world, token_loss, seq_mean_token_mean)


def test_microbatches_of_shared_rows_sum_to_the_plain_gradient(world, batch, on_policy, adamw):
  optimizer, update, _ = adamw
  state, metrics = update(TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer), batch, small.unscored(batch))
  [moments] = [found for found in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(found)]
  check_gradient(jax.tree.map(lambda m: m / (1 - Optimizer.b1), moments.mu), on_policy[1])  # mu = (1 - b1) * gradient
  np.testing.assert_allclose(metrics['update/loss'], on_policy[0], atol=5e-5)
  norm = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(on_policy[1])))
  np.testing.assert_allclose(metrics['update/grad_norm'], norm, rtol=5e-5)


def is_adam(state):
  return isinstance(state, optax.ScaleByAdamState)


@pytest.mark.slow
def test_supports_restrict_the_gradient_of_log_probs_and_entropy(world):
  """Each token was drawn from itself and up to nine other tokens."""
  rng = np.random.default_rng(8)
  recorded = []
  for t in world.trajectories:
    ids = np.where(rng.random((t.mask.sum(), 10)) < 0.3, -1, rng.integers(0, world.config.vocab_size, (t.mask.sum(), 10)))
    ids[:, 4] = t.tokens[t.mask]
    recorded.append(dataclasses.replace(t, support=ids.astype(np.int32)))
  world = types.SimpleNamespace(**vars(world) | {'trajectories': recorded})

  def token_loss(l, entropy, b, A, mask):
    r, w = jnp.exp(l - sg(l)), jnp.minimum(jnp.exp(sg(l) - b), 2.0)
    return -w * r * A - 0.1 * entropy

  settings = dataclasses.replace(SETTINGS, loss=Loss(entropy_coef=0.1))
  gradient, metrics = step(world, packed(world), settings)
  expected = plain(world, token_loss, seq_mean_token_mean)
  check_gradient(gradient, expected[1])
  np.testing.assert_allclose(metrics['update/loss'], expected[0], atol=5e-5)
  assert metrics['policy/entropy'] < np.log(10)


@pytest.mark.slow
def test_unshared_rows_with_recomputed_layers_give_the_plain_gradient(world, on_policy):
  batch = packed(world, Shape(micros=1, rows=7, tokens=16, sequences=7, columns=COLUMNS), share=False)
  assert int(batch.used) == 1
  check_gradient(step(world, batch, dataclasses.replace(SETTINGS, remat='layer'))[0], on_policy[1])


@pytest.mark.slow
def test_scored_old_log_probs_change_nothing_on_policy(world, batch, scored, on_policy):
  check_gradient(step(world, batch, SETTINGS, old=scored)[0], on_policy[1])


@pytest.mark.slow
def test_a_second_update_of_the_network_has_the_gradient_of_all_loss_terms(world, batch, scored):
  """Terms: clipped ratios to an older policy, token-mean over survivors, k3 to a reference, entropy. Layers are recomputed."""
  rng = np.random.default_rng(5)
  correction = Correction(cap=1.5, reject=('token_k1=0.6:1.8',))
  loss = Loss(clip_high=0.28, aggregate='token-mean', kl_coef=0.3, entropy_coef=0.02)
  mask = batch.mask
  old = np.where(mask, scored + rng.normal(0, 0.25, mask.shape), 0).astype(np.float32)
  ref = np.where(mask, scored + rng.normal(0, 0.5, mask.shape), 0).astype(np.float32)
  gradient, metrics = step(world, batch, UpdateConfig(correction, loss, SETTINGS.forward, 'layer'), old=old, ref=ref)

  T = max(len(t.tokens) for t in world.trajectories)
  p, u = np.zeros((7, T), np.float32), np.zeros((7, T), np.float32)
  for i, t in enumerate(world.trajectories):
    here = slice(t.prompt_length, len(t.tokens))
    p[i, here], u[i, here] = old[i, : len(t.completion)], ref[i, : len(t.completion)]

  def token_loss(l, entropy, b, A, mask):
    r, w = jnp.exp(l - p), jnp.minimum(jnp.exp(p - b), 1.5)
    policy = jnp.maximum(-r * A, -jnp.clip(r, 0.8, 1.28) * A)
    return w * policy + 0.3 * (jnp.exp(u - l) - 1 - (u - l)) - 0.02 * entropy

  def kept(l, b):
    return (np.exp(p - b) >= 0.6) & (np.exp(p - b) <= 1.8)

  def token_mean(loss, survive, mask):
    n = survive.sum(axis=1)
    counted = jnp.where(n > 0, n, mask.sum(axis=1))  # a fully rejected sequence still counts
    return loss.sum() / counted.sum()

  expected = plain(world, token_loss, token_mean, kept)
  check_gradient(gradient, expected[1])
  np.testing.assert_allclose(metrics['update/loss'], expected[0], rtol=1e-4)  # a small difference of large terms
  assert float(metrics['policy/kl_ref']) > 0


# --- the gradient of a policy without a network ----------------------------------------------------------------------


class Table:
  """A policy of two tables: logits of tokens [B, C, 4] and of experts [B, C, 3]. All drawn tokens have the id 0.

  It replaces the network, so that a test of settings compiles only a small program.
  """

  def __init__(self, monkeypatch, graph, batch, experts=False):
    rng = np.random.default_rng(7)
    self.graph, self.batch, self.experts = graph, batch, experts
    self.params = {
      'logits': jnp.float32(rng.normal(0, 1, (*batch.mask.shape, 4))),
      'experts': jnp.float32(rng.normal(0, 1, (7, COLUMNS, 3))),
    }
    monkeypatch.setattr('sprl.learner.update.micro_logprobs', self.micro_logprobs)

  def logprobs(self, params):
    """Return (log-probs of token 0, entropies), both [B, C]."""
    logp = jax.nn.log_softmax(params['logits'] / TEMPERATURE)
    return logp[..., 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)

  def balance(self, params, here):
    """Return the balance of these cells, if each token goes to its likeliest expert."""
    p = jax.nn.softmax(params['experts'])
    chosen = jax.nn.one_hot(jnp.argmax(p, axis=-1), 3)
    load, probability = (jnp.einsum('bcx,bc->x', x, here.astype(jnp.float32)) for x in (chosen, p))
    tokens = jnp.sum(here).astype(jnp.float32)
    return Balance(load=load[None], probability=probability[None], entropy=tokens[None], tokens=tokens[None])

  def micro_logprobs(self, graphdef, params, batch, i, config, remat):
    here = batch.mask & (batch.micro == i)[:, None]
    logp, entropy = (jnp.where(here, x, 0) for x in self.logprobs(params))
    return logp, entropy, types.SimpleNamespace(balance=self.balance(params, here) if self.experts else None)

  def step(self, config, **logprobs):
    """Return (gradient that one update took, metrics)."""
    optimizer = make_optimizer(SGD, 1)
    state = TrainState.create(jax.tree.map(jnp.copy, self.params), optimizer)
    given = dataclasses.replace(small.unscored(self.batch), **logprobs)
    after, metrics = make_update(self.graph, optimizer, config)(state, self.batch, given)
    return jax.tree.map(lambda a, b: (np.asarray(a) - b) / RATE, self.params, after.params), metrics

  def check(self, found, loss):
    """Assert that an update found the gradient and the value of loss(l, entropy)."""
    gradient, metrics = found
    value, expected = jax.jit(jax.value_and_grad(lambda params: loss(*self.logprobs(params))))(self.params)
    np.testing.assert_allclose(metrics['update/loss'], value, rtol=1e-4)
    check_gradient(gradient, expected)


@pytest.fixture
def table(monkeypatch, world, batch):
  return Table(monkeypatch, world.graph, batch)


def test_a_second_update_has_the_gradient_of_all_loss_terms(table, batch):
  """The terms are clipped ratios to an older policy, token-mean over survivors, k3 to a reference, and an entropy bonus."""
  rng = np.random.default_rng(5)
  correction = Correction(cap=1.5, reject=('token_k1=0.6:1.8',))
  loss = Loss(clip_high=0.28, aggregate='token-mean', kl_coef=0.3, entropy_coef=0.02)
  now, mask, A = np.asarray(table.logprobs(table.params)[0]), batch.mask, batch.advantage[:, None]
  p, u = (np.float32(now + rng.normal(0, spread, mask.shape)) for spread in (0.25, 0.5))
  rho = np.exp(np.where(mask, p - batch.sampler_logp, 0))
  survive = mask & (rho >= 0.6) & (rho <= 1.8)
  assert 0 < survive.sum() < mask.sum()
  n = survive.sum(axis=1)
  counted = np.where(n > 0, n, mask.sum(axis=1)).sum()  # a fully rejected sequence still counts

  def expected(l, entropy):
    r = jnp.exp(l - p)
    policy = jnp.minimum(rho, 1.5) * jnp.maximum(-r * A, -jnp.clip(r, 0.8, 1.28) * A)
    token = policy + 0.3 * (jnp.exp(u - l) - 1 - (u - l)) - 0.02 * entropy
    return jnp.where(survive, token, 0).sum() / counted

  found = table.step(UpdateConfig(correction, loss, SETTINGS.forward), old=p, ref=u)
  table.check(found, expected)
  drift = np.where(mask, np.exp(u - now) - 1 - (u - now), 0).sum() / mask.sum()
  np.testing.assert_allclose(found[1]['policy/kl_ref'], drift, rtol=1e-4)


def test_bypass_reinforce_weights_whole_sequences_by_the_current_policy(table, batch):
  correction = Correction(mode='bypass', level='sequence', cap=1.2)
  loss = Loss(variant='reinforce', aggregate='seq-mean-token-sum-norm')
  now, mask, A = np.asarray(table.logprobs(table.params)[0]), batch.mask, batch.advantage[:, None]
  w = np.minimum(np.exp(np.where(mask, now - batch.sampler_logp, 0).sum(axis=1, keepdims=True)), 1.2)

  def expected(l, entropy):
    return jnp.where(mask, -w * A * l, 0).sum() / (mask.any(axis=1).sum() * COLUMNS)

  # A scored old policy has no effect: the weight compares current and sampler.
  found = table.step(UpdateConfig(correction, loss, SETTINGS.forward), old=now + np.float32(1))
  table.check(found, expected)
  np.testing.assert_allclose(found[1]['rollout_corr/rollout_is_mean'], w[mask.any(axis=1)].mean(), rtol=1e-4)


def test_the_balance_loss_weighs_microbatches_by_their_tokens(monkeypatch, world, batch):
  table = Table(monkeypatch, world.graph, batch, experts=True)
  still = dataclasses.replace(batch, advantage=0 * batch.advantage)
  table.batch = still  # without advantages, the balance loss is the whole loss
  share = [np.count_nonzero(row) / np.count_nonzero(batch.segments) for row in batch.segments]
  micros = [batch.mask & (batch.micro == i)[:, None] for i in range(2)]

  def expected(params):
    return sum(0.3 * s * balance_loss(table.balance(params, here)) for s, here in zip(share, micros))

  gradient, metrics = table.step(dataclasses.replace(SETTINGS, loss=Loss(balance_coef=0.3)))
  value, of_loss = jax.jit(jax.value_and_grad(expected))(table.params)
  np.testing.assert_allclose(metrics['update/loss'], value, rtol=5e-5)
  check_gradient(gradient, of_loss)
  for name, whole in balance_metrics(table.balance(table.params, batch.mask)).items():
    np.testing.assert_allclose(metrics[name], whole, rtol=5e-5, err_msg=name)


# --- the scored log-probs --------------------------------------------------------------------------------------------


def alone(world):
  """Return the log-probs of each sequence alone, as a rectangle. The sequence that is left out has zeros."""
  expected = small.rectangle(world.trajectories, world.forced, COLUMNS)
  expected[np.isnan(ADVANTAGE)] = 0
  return expected


def test_scores_of_shared_rows_equal_those_of_each_sequence_alone(world, scored):
  np.testing.assert_allclose(scored, alone(world), atol=2e-5)


@pytest.mark.slow
def test_scores_of_unshared_rows_equal_those_of_each_sequence_alone(world):
  batch = packed(world, Shape(micros=3, rows=3, tokens=16, sequences=7, columns=COLUMNS), share=False)
  np.testing.assert_allclose(score(world.graph, world.params, batch, SETTINGS.forward), alone(world), atol=2e-5)


# --- the state -------------------------------------------------------------------------------------------------------


def test_the_state_is_donated_and_other_lengths_compile_nothing(world, adamw):
  optimizer, update, _ = adamw
  state = TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer)
  old = jax.tree.leaves(state)
  batch = packed(world)
  state, _ = update(state, batch, small.unscored(batch))
  assert all(x.is_deleted() for x in old)
  compiled = update._cache_size()
  other = small.rollouts([(1, 1, 2, 1), (1, 1, 2)], (2, 2), seed=1)
  batch, _ = pack(other, np.ones(7, np.float32), TWO_ROWS, True)
  assert int(batch.used) == 1
  state, _ = update(state, batch, small.unscored(batch))
  assert update._cache_size() == compiled
  assert (int(state.updates), int(state.skipped)) == (2, 0)


def test_an_infinite_advantage_skips_the_update(world, adamw):
  optimizer, update, _ = adamw
  state = TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer)
  good = packed(world)
  state, _ = update(state, good, small.unscored(good))
  before = jax.tree.map(np.array, (state.params, state.opt_state))
  bad = dataclasses.replace(good, advantage=np.where(np.arange(7) == 1, np.inf, good.advantage).astype(np.float32))
  state, metrics = update(state, bad, small.unscored(bad))
  jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
  assert (float(metrics['update/skipped']), int(state.updates), int(state.skipped)) == (1, 2, 1)


def test_an_empty_batch_has_finite_metrics_and_moves_nothing(world, adamw):
  optimizer, update, _ = adamw
  state = TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer)
  batch = packed(world)
  state, _ = update(state, batch, small.unscored(batch))
  before = jax.tree.map(np.asarray, (state.params, state.opt_state))
  batch, _ = pack(world.trajectories, np.full(7, np.nan, np.float32), TWO_ROWS, True)
  state, metrics = update(state, batch, small.unscored(batch))
  assert all(np.isfinite(v) for v in metrics.values())
  assert float(metrics['update/grad_norm']) == 0
  assert (int(state.updates), int(state.skipped)) == (2, 0)
  jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)


def test_adam_overwrites_weights_and_moments_without_copies(world, adamw):
  text = adamw[2].compile().as_text()
  shapes = {','.join(map(str, p.shape)) for p in jax.tree.leaves(world.params)}
  copied = set(re.findall(r'= \w+\[([\d,]*)\]\S* copy\(%?(?:state|get-tuple-element)', text))  # of the donated arrays
  assert not shapes & copied


def test_no_array_has_the_logits_of_all_positions(world, adamw):
  """The largest array with a vocabulary axis is a chunk of logits or a weight."""
  V, E = world.config.vocab_size, world.config.hidden_size
  sizes = [[int(n) for n in dims.split('x')] for dims in re.findall(r'tensor<((?:\d+x)*\d+)xf32>', adamw[2].as_text())]
  with_vocabulary = {int(np.prod(dims)) // V for dims in sizes if V in dims}
  assert with_vocabulary == {SETTINGS.forward.chunk, E}
  assert SETTINGS.forward.chunk < TWO_ROWS.tokens


def test_bfloat16_activations_leave_float32_weights(world, batch):
  optimizer, state = fresh(world, SGD)
  config = dataclasses.replace(SETTINGS, forward=dataclasses.replace(SETTINGS.forward, dtype=jnp.dtype('bfloat16')))
  out, _ = jax.eval_shape(make_update(world.graph, optimizer, config), state, batch, small.unscored(batch))
  assert {x.dtype for x in jax.tree.leaves(out.params)} == {FLOAT32}


# --- a mixture of experts --------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def mixed(world):
  """The rollouts of `world`, and a model with experts."""
  config, params = small.model('qwen3_moe', num_hidden_layers=1)
  changed = {'config': config, 'params': params, 'graph': transformer.graph(config)}
  return types.SimpleNamespace(**vars(world) | changed)


def balancing(mixed, coefficient, rate=0.3):
  """Return (update, state) with this coefficient of the balance loss."""
  optimizer, state = fresh(mixed, dataclasses.replace(SGD, learning_rate=rate))
  return make_update(mixed.graph, optimizer, dataclasses.replace(SETTINGS, loss=Loss(balance_coef=coefficient))), state


@pytest.mark.slow
def test_the_balance_loss_covers_all_microbatches_and_spreads_the_tokens(mixed, batch):
  batch, logprobs = dataclasses.replace(batch, advantage=0 * batch.advantage), small.unscored(batch)
  balance = jax.jit(lambda batch, i: micro_logprobs(mixed.graph, mixed.params, batch, i, SETTINGS.forward)[2].balance)
  micros = [balance(batch, i) for i in range(int(batch.used))]
  tokens = np.array([np.count_nonzero(row) for row in batch.segments])
  update, state = balancing(mixed, 1.0)
  history = []
  for _ in range(13):
    state, metrics = update(state, batch, logprobs)
    history.append({name: float(x) for name, x in metrics.items() if name.startswith(('update/', 'moe/'))})
  losses = [float(balance_loss(micro)) for micro in micros]
  assert history[0]['update/loss'] == pytest.approx(np.average(losses, weights=tokens[:2]), rel=1e-5)  # the only loss
  for name, expected in balance_metrics(jax.tree.map(jnp.add, *micros)).items():
    assert history[0][name] == pytest.approx(float(expected), rel=1e-5), name
  assert np.mean([h['moe/balance_loss'] for h in history[-3:]]) < history[0]['moe/balance_loss'] - 0.05


@pytest.mark.slow
def test_policy_gradients_of_experts_are_equal_for_any_microbatches(mixed, batch):
  one = packed(mixed, Shape(micros=1, rows=2, tokens=32, sequences=7, columns=COLUMNS))
  update, _ = balancing(mixed, 0.0)
  after = [update(balancing(mixed, 0.0)[1], each, small.unscored(each))[0].params for each in (batch, one)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *after)
  still = dataclasses.replace(batch, advantage=0 * batch.advantage)  # without advantages only the balance loss has a gradient
  assert float(update(balancing(mixed, 0.0)[1], still, small.unscored(still))[1]['update/grad_norm']) == 0


# --- the scoring pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('correction', 'updates', 'needed'),
  [
    (Correction(), 1, False),
    (Correction(), 2, True),
    (Correction(level='sequence', cap=5.0), 1, False),
    (Correction(normalise='global'), 1, True),
    (Correction(veto=1e-4), 1, True),
    (Correction(reject=('token_k3=0.1',)), 1, True),
  ],
)
def test_an_update_needs_old_log_probs_to_reject_or_normalise(correction, updates, needed):
  assert needs_old_logprobs(correction, updates) is needed
