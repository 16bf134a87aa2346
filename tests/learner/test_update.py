"""The update: its gradient is that of one big plain loss written from the spec, whatever the packing and accumulation."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.learner.packing import Shape, pack
from sprl.learner.score import score
from sprl.learner.state import TrainState, make_optimizer
from sprl.learner.update import Computation, make_update, scores_old
from sprl.models import transformer
from sprl.models.memory import CausalMemory
from sprl.objective.losses import VARIANTS
from sprl.parallel.mesh import make_mesh, replicated
from sprl.settings import Correction, Loss, Mesh, Optimizer

pytestmark = pytest.mark.usefixtures('compiled_fast')

FLOAT32 = jnp.dtype('float32')
RATE = 100.0  # of plain gradient descent, large so that the step shows the gradient to many digits
COLUMNS, ADVANTAGE = 7, np.array([1.5, -0.5, -1.0, 2.0, np.nan, 0.25, -2.0], np.float32)
SETTINGS = Computation(Correction(), Loss(), temperature=1.0, dtype=FLOAT32, chunk=8, remat='none')
SGD = Optimizer(name='sgd', learning_rate=RATE, clip_norm=0.0)


@pytest.fixture(scope='module')
def world():
  """A model and two groups of rollouts, one with words of an environment in between, one sequence filtered out.

  Their sampler is near the model but not at it, so that all corrections have work to do.
  """
  config, params = small.model(num_hidden_layers=1)
  trajectories = small.rollouts([(5, 3, 7, 1), (4, 6, 2)], (6, 3))
  broken = trajectories[2].mask.copy()
  broken[8:10] = False
  trajectories[2] = dataclasses.replace(trajectories[2], mask=broken)
  rng = np.random.default_rng(3)
  forced = [np.asarray(small.teacher_forced(config, params, t)) for t in trajectories]
  trajectories = [
    dataclasses.replace(t, sampler_logp=np.where(t.mask, l + rng.normal(0, 0.4, len(l)), 0).astype(np.float32))
    for t, l in zip(trajectories, forced)
  ]
  return types.SimpleNamespace(
    config=config, params=params, graph=transformer.graph(config), trajectories=trajectories, forced=forced
  )


def packed(world, rows=1, tokens=32, micros=2, share=True):
  return pack(world.trajectories, ADVANTAGE, Shape(micros, rows, tokens, 7, COLUMNS), share)[0]


def fresh(world, settings=SGD, params=None):
  optimizer = make_optimizer(settings, 10)
  params = jax.tree.map(jnp.copy, world.params if params is None else params)
  return optimizer, TrainState.create(params, optimizer)


def step(world, batch, computation, old=None, ref=None, params=None):
  """(gradient that one update of plain gradient descent took, metrics)."""
  optimizer, state = fresh(world, params=params)
  before = jax.tree.map(np.array, state.params)
  after, metrics = make_update(world.graph, optimizer, computation)(state, batch, old, ref)
  return jax.tree.map(lambda a, b: (a - np.asarray(b)) / RATE, before, after.params), metrics


def plain(world, temperature, token_loss, aggregate, keep=lambda p, b: np.ones(p.shape, bool)):
  """(loss, gradient) with all sequences side by side, whole logits, no packing, no chunks, no microbatches.

  token_loss(l, entropy, b, A) of [B, T] arrays; `aggregate` turns it, the surviving tokens and all tokens into a number.
  """
  B, T = len(world.trajectories), max(len(t.tokens) for t in world.trajectories)
  tokens, segments, b = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32), np.zeros((B, T), np.float32)
  mask = np.zeros((B, T), bool)
  for i, t in enumerate(world.trajectories):
    n = len(t.tokens)
    tokens[i, :n], segments[i, :n], b[i, :n] = t.tokens, 1, t.sampler_logp
    mask[i, :n] = t.mask & np.isfinite(ADVANTAGE[i])
  A = np.nan_to_num(ADVANTAGE)[:, None]

  def logprobs(params):
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    hidden, _ = transformer.forward(world.graph, params, jnp.asarray(tokens), positions, CausalMemory.of(jnp.asarray(segments)))
    logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T / temperature)
    chosen = jnp.take_along_axis(logp[:, :-1], jnp.asarray(tokens)[:, 1:, None], 2)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(entropy[:, :-1], ((0, 0), (1, 0)))

  def loss(params):
    l, entropy = logprobs(params)
    survive = mask & keep(jax.lax.stop_gradient(l), b)
    return aggregate(jnp.where(survive, token_loss(l, entropy, b, A, mask), 0), survive, mask)

  return jax.jit(jax.value_and_grad(loss))(world.params)


def agree(got, expected):
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected)):
    scale = float(np.abs(b).max())
    np.testing.assert_allclose(a, b, atol=2e-5 * scale + 1e-8, err_msg=jax.tree_util.keystr(path))


def seq_mean_token_mean(loss, survive, mask):
  rows = mask.any(axis=1).sum()
  return (loss.sum(axis=1) / jnp.maximum(survive.sum(axis=1), 1)).sum() / rows


sg = jax.lax.stop_gradient


# --- the gradient ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def on_policy(world):
  """Loss and gradient of the defaults, by hand: ppo at ratio 1, tokens weighted by min(rho, 2)."""

  def token_loss(l, entropy, b, A, mask):
    r, w = jnp.exp(l - sg(l)), jnp.minimum(jnp.exp(sg(l) - b), 2.0)
    return -w * r * A

  return plain(world, 1.0, token_loss, seq_mean_token_mean)


def test_microbatches_of_shared_rows_add_up_to_the_plain_gradient(world, on_policy):
  batch = packed(world)
  assert int(batch.used) == 2
  gradient, metrics = step(world, batch, SETTINGS)
  agree(gradient, on_policy[1])
  np.testing.assert_allclose(metrics['update/loss'], on_policy[0], rtol=1e-5)
  norm = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(on_policy[1])))
  np.testing.assert_allclose(metrics['update/grad_norm'], norm, rtol=1e-5)


def test_unshared_rows_in_one_microbatch_with_recomputed_layers_give_it_too(world, on_policy):
  batch = packed(world, rows=7, tokens=16, micros=1, share=False)
  assert int(batch.used) == 1
  agree(step(world, batch, dataclasses.replace(SETTINGS, remat='layer'))[0], on_policy[1])


def test_scored_old_log_probs_change_nothing_on_policy(world, on_policy):
  batch = packed(world)
  old = score(world.graph, world.params, batch, 1.0, FLOAT32, 8)
  agree(step(world, batch, SETTINGS, old)[0], on_policy[1])


def test_a_second_update_with_rejection_reference_entropy_and_temperature(world):
  """Clipped ratios to an older policy, token-mean over what rejection leaves, k3 to a reference, an entropy bonus."""
  temperature, rng = 0.7, np.random.default_rng(5)
  correction = Correction(cap=1.5, reject=('token_k1',), reject_bounds=('0.6_1.8',))
  loss = Loss(clip_high=0.28, aggregate='token-mean', kl_coef=0.3, entropy_coef=0.02)
  batch = packed(world, rows=2, tokens=32, micros=1)
  mask = np.asarray(batch.mask)
  scored = np.asarray(score(world.graph, world.params, batch, temperature, FLOAT32, 8))
  old = np.where(mask, scored + rng.normal(0, 0.25, mask.shape), 0).astype(np.float32)
  ref = np.where(mask, scored + rng.normal(0, 0.5, mask.shape), 0).astype(np.float32)
  computation = Computation(correction, loss, temperature, FLOAT32, 4, 'none')
  gradient, metrics = step(world, batch, computation, jnp.asarray(old), jnp.asarray(ref))

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
    counted = jnp.where(n > 0, n, mask.sum(axis=1))  # a sequence rejected whole still counts
    return loss.sum() / counted.sum()

  expected = plain(world, temperature, token_loss, token_mean, kept)
  agree(gradient, expected[1])
  np.testing.assert_allclose(metrics['update/loss'], expected[0], rtol=1e-4)  # a small difference of large terms
  assert float(metrics['policy/kl_ref']) > 0


def test_bypass_reinforce_weights_whole_sequences(world):
  correction = Correction(mode='bypass', level='sequence', cap=1.2)
  loss = Loss(variant='reinforce', aggregate='seq-mean-token-sum-norm')
  batch = packed(world, rows=2, micros=1)
  gradient, _ = step(world, batch, Computation(correction, loss, 1.0, FLOAT32, 8, 'none'))

  def token_loss(l, entropy, b, A, mask):
    rho = jnp.exp(jnp.where(mask, sg(l) - b, 0).sum(axis=1, keepdims=True))
    return -jnp.minimum(rho, 1.2) * A * l

  def norm(loss, survive, mask):
    return loss.sum() / (mask.any(axis=1).sum() * COLUMNS)

  agree(gradient, plain(world, 1.0, token_loss, norm)[1])


@pytest.mark.parametrize('variant', sorted(VARIANTS))
def test_every_loss_takes_a_finite_step(world, variant):
  bypass = variant == 'reinforce'
  correction = Correction(mode='bypass', level='token') if bypass else Correction()
  batch = packed(world, micros=2)
  with jax.disable_jit():  # compiling each would take the most of a minute
    gradient, metrics = step(world, jax.device_put(batch), Computation(correction, Loss(variant), 1.0, FLOAT32, 32, 'none'))
  bad = [name for name, value in metrics.items() if not np.isfinite(value)]
  assert not bad
  assert float(metrics['update/skipped']) == 0
  assert max(float(np.abs(g).max()) for g in jax.tree.leaves(gradient)) > 0


# --- the scored log-probs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(('share', 'rows', 'tokens', 'micros'), [(True, 1, 32, 2), (False, 3, 16, 3)])
def test_scores_are_those_of_each_sequence_alone(world, share, rows, tokens, micros):
  batch = packed(world, rows, tokens, micros, share)
  scored = score(world.graph, world.params, batch, 1.0, FLOAT32, 8)
  expected = small.rectangle(world.trajectories, world.forced, COLUMNS)
  expected[np.isnan(ADVANTAGE)] = 0  # left out
  np.testing.assert_allclose(scored, expected, atol=2e-5)


# --- the state -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def adamw(world):
  optimizer, _ = fresh(world, Optimizer(learning_rate=1e-3))
  return optimizer, make_update(world.graph, optimizer, SETTINGS)


def test_the_state_is_donated_and_nothing_compiles_again_when_lengths_change(world, adamw):
  optimizer, update = adamw
  state = TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer)
  old = jax.tree.leaves(state)
  state, _ = update(state, packed(world), None, None)
  assert all(x.is_deleted() for x in old)
  compiled = update._cache_size()
  other = small.rollouts([(1, 1, 2, 1), (1, 1, 2)], (2, 2), seed=1)
  batch, _ = pack(other, np.ones(7, np.float32), Shape(2, 1, 32, 7, COLUMNS), True)
  assert int(batch.used) == 1
  state, _ = update(state, batch, None, None)
  assert update._cache_size() == compiled
  assert (int(state.version), int(state.skipped)) == (2, 0)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(world, adamw):
  optimizer, update = adamw
  state = TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer)
  good = packed(world)
  state, _ = update(state, good, None, None)
  before = jax.tree.map(np.array, (state.params, state.opt_state))
  for streak, advantage in enumerate((np.inf, np.nan), start=1):
    bad = dataclasses.replace(good, advantage=np.where(np.arange(7) == 1, advantage, good.advantage).astype(np.float32))
    state, metrics = update(state, bad, None, None)
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    assert float(metrics['update/skipped']) == 1
    assert (int(state.version), int(state.skipped), int(state.bad_streak)) == (1 + streak, streak, streak)
  state, metrics = update(state, good, None, None)
  assert (int(state.version), int(state.skipped), int(state.bad_streak)) == (4, 2, 0)
  assert float(metrics['update/skipped']) == 0
  assert any(np.any(a != np.asarray(b)) for a, b in zip(jax.tree.leaves(before[0]), jax.tree.leaves(state.params)))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_an_empty_batch_moves_nothing_but_the_count_whatever_the_momentum(world, adamw):
  optimizer, update = adamw
  state = TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer)
  state, _ = update(state, packed(world), None, None)
  before = jax.tree.map(np.asarray, (state.params, state.opt_state))
  batch, _ = pack(world.trajectories, np.full(7, np.nan, np.float32), Shape(2, 1, 32, 7, COLUMNS), True)
  state, metrics = update(state, batch, None, None)
  assert all(np.isfinite(v) for v in metrics.values())
  assert float(metrics['update/grad_norm']) == 0
  assert (int(state.version), int(state.skipped)) == (2, 0)
  jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)


def test_moments_on_the_host_change_nothing_but_where_they_lie(world, adamw):
  optimizer, update = adamw
  batch = packed(world)

  def two_updates(host):
    here = replicated(make_mesh(Mesh(), jax.devices()[:1]))
    there = here.with_memory_kind('pinned_host')
    abstract = jax.eval_shape(lambda: TrainState.create(world.params, optimizer))
    places = jax.tree.map(lambda _: here, abstract)
    if host:
      moments = jax.tree.map(lambda leaf: there if leaf.ndim else here, abstract.opt_state)
      places = dataclasses.replace(places, opt_state=moments)
    state, compiled = TrainState.create(jax.tree.map(jnp.copy, world.params), optimizer, places), update._cache_size()
    for _ in range(2):
      state, _ = update(state, batch, None, None)
    assert update._cache_size() == compiled + 1
    assert jax.tree.map(lambda leaf: leaf.sharding.memory_kind, state) == jax.tree.map(lambda place: place.memory_kind, places)
    return state

  jax.tree.map(np.testing.assert_array_equal, two_updates(True), two_updates(False))


@pytest.mark.parametrize('name', ['adamw', 'adam', 'lion', 'sgd', 'adafactor'])
def test_weights_and_moments_in_bfloat16_stay_so_and_move(world, name):
  half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), world.params)
  optimizer, state = fresh(world, Optimizer(name=name, learning_rate=0.1, moment_dtype='bfloat16'), half)
  kinds = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  after, _ = make_update(world.graph, optimizer, SETTINGS)(state, packed(world), None, None)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == kinds
  moved = [np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(half))]
  assert any(moved)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_adam_writes_over_weights_and_moments_and_copies_none(world, dtype):
  held = jax.tree.map(lambda p: p.astype(dtype), world.params)
  optimizer, state = fresh(world, Optimizer(moment_dtype=dtype), held)
  text = make_update(world.graph, optimizer, SETTINGS).lower(state, packed(world), None, None).compile().as_text()
  shapes = {','.join(map(str, p.shape)) for p in jax.tree.leaves(held)}
  copied = set(re.findall(r'= \w+\[([\d,]*)\]\S* copy\(%?(?:state|get-tuple-element)', text))  # of what comes in
  assert not shapes & copied


def test_no_array_of_whole_logits_is_ever_made(world):
  """The largest array with a vocabulary axis is a chunk of logits or a weight, never a row of logits a position."""
  batch = packed(world, rows=8, tokens=64, micros=1)
  optimizer, state = fresh(world)
  text = make_update(world.graph, optimizer, SETTINGS).lower(state, batch, None, None).as_text()
  V, E = world.config.vocab_size, world.config.hidden_size
  sizes = [[int(n) for n in dims.split('x')] for dims in re.findall(r'tensor<((?:\d+x)*\d+)xf32>', text)]
  with_vocabulary = {int(np.prod(dims)) // V for dims in sizes if V in dims}
  assert with_vocabulary == {SETTINGS.chunk, E}


def test_bfloat16_activations_leave_float32_weights(world):
  optimizer, state = fresh(world)
  out = jax.eval_shape(
    make_update(world.graph, optimizer, dataclasses.replace(SETTINGS, dtype=jnp.dtype('bfloat16'))),
    state, packed(world), None, None,
  )  # fmt: skip
  assert {x.dtype for x in jax.tree.leaves(out[0].params)} == {FLOAT32}


# --- a mixture of experts --------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def mixed(world):
  """The same rollouts, and a model with experts."""
  config, params = small.model('qwen3_moe', num_hidden_layers=1)
  changed = {'config': config, 'params': params, 'graph': transformer.graph(config)}
  return types.SimpleNamespace(**vars(world) | changed)


def balancing(mixed, coefficient, advantage=0.0, **sizes):
  """(update, state, batch) that learns from this much of the advantages, and how to spread tokens."""
  settings = dataclasses.replace(SETTINGS, loss=Loss(balance_coef=coefficient))
  optimizer, state = fresh(mixed, dataclasses.replace(SGD, learning_rate=0.3))
  batch = packed(mixed, **sizes)
  return make_update(mixed.graph, optimizer, settings), state, dataclasses.replace(batch, advantage=advantage * batch.advantage)


def test_the_balance_loss_spreads_the_tokens_and_is_nothing_to_a_coefficient_of_zero(mixed):
  update, state, batch = balancing(mixed, 1.0, rows=2, micros=1)
  history = []
  for _ in range(8):
    state, metrics = update(state, batch, None, None)
    history.append({name: float(metrics[name]) for name in ('update/loss', 'moe/balance_loss', 'moe/dropped')})
  assert history[0]['update/loss'] == pytest.approx(history[0]['moe/balance_loss'], rel=1e-5)  # there is no other loss
  assert history[-1]['moe/balance_loss'] < history[0]['moe/balance_loss'] - 0.05
  assert {h['moe/dropped'] for h in history} == {0.0}
  update, state, batch = balancing(mixed, 0.0, rows=2, micros=1)
  assert float(update(state, batch, None, None)[1]['update/grad_norm']) == 0


def test_balance_is_of_all_microbatches_and_the_policy_s_gradient_is_what_it_was(mixed):
  found = {}
  for micros, rows in ((1, 2), (2, 1)):
    update, state, batch = balancing(mixed, 0.0, 1.0, rows=rows, micros=micros)
    state, metrics = update(state, batch, None, None)
    found[micros] = state.params, {name: float(x) for name, x in metrics.items() if name.startswith('moe/')}
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found[1][0], found[2][0])
  assert found[1][1] == pytest.approx(found[2][1], rel=1e-5)


@pytest.mark.parametrize(
  ('correction', 'updates', 'needed'),
  [
    (Correction(), 1, False),
    (Correction(), 2, True),
    (Correction(level='sequence', cap=5.0), 1, False),
    (Correction(normalise=True), 1, True),
    (Correction(veto=1e-4), 1, True),
    (Correction(token_mask=True), 1, True),
    (Correction(max_prob_diff=0.1), 1, True),
    (Correction(max_sequence_error=1.5), 1, True),
    (Correction(reject=('token_k3',), reject_bounds=('0.1',)), 1, True),
  ],
)
def test_when_the_old_policy_needs_a_pass_of_its_own(correction, updates, needed):
  assert scores_old(correction, updates) is needed
