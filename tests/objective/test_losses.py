import math

import jax
import jax.numpy as jnp
import numpy as np
import objective_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.objective.advantages import advantages
from sprl.objective.correction import correct, preset
from sprl.objective.losses import VARIANTS, aggregation, kl, objective, token_loss
from sprl.settings import Advantage, Correction, Loss

LOSSES = [
  *(Loss(variant=v) for v in VARIANTS),
  Loss(clip_low=0.1, clip_high=0.28, dual_clip=1.5),
  Loss(variant='gspo', dual_clip=1.05, clip_low=0.6, clip_high=1.5),
  Loss(variant='tis', tis_low=0.7, tis_high=1.1),
  Loss(variant='topr', topr_positive=0.5, topr_negative=2.0),
  Loss(variant='cispo', cispo_mask=True, clip_low=0.1, clip_high=0.1),
  Loss(variant='cispo', clip_low=1.5, clip_high=3.0),
  Loss(variant='dppo_kl', dppo_delta=0.05),
]
MODES = ('decoupled', 'bypass')


def run(x, s, mode='decoupled', weight=None):
  weight = np.ones(x['mask'].shape) if weight is None else weight
  arrays = (jnp.asarray(a) for a in (x['new'], x['old'], x['roll'], x['advantage'], x['reward'], weight, x['mask']))
  return token_loss(*arrays, s, mode)


def one_row(r, A, reward=0.0):
  """Tokens of log-prob -1 with ratio r to both denominators, and one that the model did not write."""
  mask = np.array([[x is not None for x in r]])
  log_r = np.log([[1.0 if x is None else x for x in r]])
  ones = np.ones(mask.shape)
  log_p = -ones - log_r
  x = {'new': -ones, 'old': log_p, 'roll': log_p, 'advantage': A * ones, 'reward': np.array([reward]), 'mask': mask}
  return {k: v if v.dtype == bool else v.astype(np.float32) for k, v in x.items()}


# --- by hand: l = -1, so that a loss -c A l reads c A ---------------------------------------------------------------------

SQUARE = {0.5: math.log(2) ** 2, 1: 0.0, 1.5: math.log(1.5) ** 2}
HAND = {  # variant: losses at r = 0.5, 1, 1.5 for A = 2, and for A = -2
  'ppo': ([-1, -2, -2.4], [1.6, 2, 3]),
  'vanilla': ([2, 2, 2], [-2, -2, -2]),
  'tis': ([1, 2, 2], [-1, -2, -2]),
  'topr': ([1, 2, 2], [-1, -2, -2]),
  'cispo': ([1.6, 2, 2.4], [-1.6, -2, -2.4]),
  'kimi15': ([2 + 0.05 * q for q in SQUARE.values()], [-2 + 0.05 * q for q in SQUARE.values()]),
  'gspo': ([-2 * 0.75 ** (1 / 3)] * 3, [2 * 0.75 ** (1 / 3)] * 3),  # r = (0.5 * 1 * 1.5)^(1/3) = 0.909, inside the clip range
  'segment': ([-2 * 0.75 ** (1 / 3)] * 3, [2 * 0.75 ** (1 / 3)] * 3),
}


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('variant', HAND)
def test_hand_values_below_at_and_above_ratio_one(variant, mode):
  for A, expected in zip((2.0, -2.0), HAND[variant]):
    loss, _ = run(one_row([0.5, 1, 1.5, None], A), Loss(variant=variant), mode)
    np.testing.assert_allclose(loss, [[*expected, 0]], rtol=1e-5, err_msg=f'A = {A}')


def test_clip_higher_lets_good_tokens_rise_further():
  loss, facts = run(one_row([0.7, 1.25, 1.4], 1.0), Loss(clip_low=0.2, clip_high=0.28))
  np.testing.assert_allclose(loss, [[-0.7, -1.25, -1.28]], rtol=1e-5)
  np.testing.assert_array_equal(facts.clipped, [[False, False, True]])


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone():
  loss, facts = run(one_row([0.5, 2.0, 5.0], -2.0), Loss(dual_clip=3.0))
  np.testing.assert_allclose(loss, [[1.6, 4, 6]], rtol=1e-5)
  np.testing.assert_array_equal(facts.clipped, [[True, False, True]])
  np.testing.assert_allclose(run(one_row([5.0], 2.0), Loss(dual_clip=3.0))[0], [[-2.4]], rtol=1e-5)


def test_topr_splits_on_the_reward_and_not_on_the_advantage():
  s = Loss(variant='topr', topr_positive=0.5, topr_negative=3.0)
  np.testing.assert_allclose(run(one_row([0.5, 2.0], -2.0, reward=1.0), s)[0], [[-1, -1]], rtol=1e-5)
  np.testing.assert_allclose(run(one_row([0.5, 2.0], 2.0, reward=0.0), s)[0], [[3, 6]], rtol=1e-5)


def test_cispo_mask_drops_tokens_that_moved_with_their_advantage():
  s = Loss(variant='cispo', cispo_mask=True, clip_low=0.1, clip_high=0.1)
  np.testing.assert_allclose(run(one_row([0.5, 1.0, 1.5], 2.0), s)[0], [[1.8, 2, 0]], rtol=1e-5)
  np.testing.assert_allclose(run(one_row([0.5, 1.0, 1.5], -2.0), s)[0], [[0, -2, -2.2]], rtol=1e-5)


def test_dppo_drops_tokens_by_probability_difference():
  s = Loss(variant='dppo_kl')  # P = e^-1 = 0.368; q = 0.736, 0.368, 0.123: P - q = -0.368, 0, 0.245
  penalty = [1e-3 * math.log(r) ** 2 for r in (0.5, 1, 3)]
  np.testing.assert_allclose(run(one_row([0.5, 1.0, 3.0], 2.0), s)[0], [[-1 + penalty[0], -2, penalty[2]]], rtol=1e-5)
  np.testing.assert_allclose(run(one_row([0.5, 1.0, 3.0], -2.0), s)[0], [[penalty[0], 2, 6 + penalty[2]]], rtol=1e-5)


def test_segment_takes_each_contiguous_run_of_model_tokens_by_itself():
  loss, _ = run(one_row([0.9, 1.1, None, 1.1, None], 1.0), Loss(variant='segment'))
  np.testing.assert_allclose(loss, [[-math.sqrt(0.99), -math.sqrt(0.99), 0, -1.1, 0]], rtol=1e-5)
  loss, _ = run(one_row([0.9, 1.1, None, 1.1, None], 1.0), Loss(variant='gspo'))
  np.testing.assert_allclose(loss, [[-(1.089 ** (1 / 3))] * 2 + [0, -(1.089 ** (1 / 3)), 0]], rtol=1e-5)


# --- modes, weights, equalities --------------------------------------------------------------------------------------


@pytest.mark.parametrize('s', LOSSES, ids=oracle.name)
@pytest.mark.parametrize('mode', MODES)
def test_agrees_with_the_oracle(s, mode):
  x = oracle.batch(11)
  weight = np.random.default_rng(0).uniform(0, 2, x['mask'].shape)
  with jax.enable_x64(True):
    loss, facts = run(x, s, mode, weight)
  names = ('new', 'old', 'roll', 'advantage', 'reward')
  expected = oracle.token_loss(*(x[k] for k in names), weight, x['mask'], s, mode)
  np.testing.assert_allclose(loss, expected, rtol=1e-9, atol=1e-12)
  assert not (np.asarray(facts.clipped) & ~x['mask']).any()


def test_decoupled_ppo_equals_two_policy_ppo_where_the_sampler_is_the_old_policy():
  x = oracle.batch(2)
  x['old'] = x['roll']
  weight = correct(jnp.asarray(x['old']), jnp.asarray(x['roll']), jnp.asarray(x['mask']), Correction()).weight
  three, _ = run(x, Loss(variant='decoupled_ppo'), 'decoupled', weight)
  two, _ = run(x, Loss(variant='ppo'), 'bypass')
  np.testing.assert_allclose(three, two, rtol=1e-6)


@pytest.mark.parametrize('mode', MODES)
def test_topr_is_tis_on_bad_sequences_and_vanilla_on_good_ones(mode):
  x = oracle.batch(3)
  for reward, other in ((0.0, 'tis'), (1.0, 'vanilla')):
    x['reward'] = np.full(len(x['reward']), reward)
    np.testing.assert_array_equal(run(x, Loss(variant='topr'), mode)[0], run(x, Loss(variant=other), mode)[0])


def test_bypass_ignores_the_weight_except_under_reinforce():
  x = oracle.batch(4)
  half = np.full(x['mask'].shape, 0.5)
  for variant in VARIANTS:
    one, weighted = (run(x, Loss(variant=variant), 'bypass', w)[0] for w in (None, half))
    np.testing.assert_allclose(weighted, one * (0.5 if variant == 'reinforce' else 1), err_msg=variant)


@pytest.mark.parametrize('mode', MODES)
def test_equal_policies_are_plain_policy_gradient(mode):
  """The identity case: no gap, no update yet. Every weight is 1 and the gradient is that of -A l."""
  x = oracle.batch(5)
  x['roll'] = x['new'] = x['old']
  fixed = correct(jnp.asarray(x['old']), jnp.asarray(x['roll']), jnp.asarray(x['mask']), preset('sparse_rl_code'))
  assert (np.asarray(fixed.mask) == x['mask']).all()

  def gradient(s, weight):
    return jax.grad(lambda l: run(x | {'new': l}, s, mode, weight)[0].sum())(jnp.asarray(x['new'], jnp.float32))

  for variant in ('ppo', 'tis', 'topr', 'cispo', 'kimi15', 'dppo_kl', 'reinforce', 'vanilla'):
    np.testing.assert_allclose(gradient(Loss(variant=variant), fixed.weight), np.where(x['mask'], -x['advantage'], 0), atol=1e-5)
  np.testing.assert_allclose(run(x, Loss(), mode, fixed.weight)[0], np.where(x['mask'], -x['advantage'], 0), atol=1e-5)


def test_exact_on_policy_by_handing_over_the_current_log_prob():
  x = oracle.batch(6)
  new = jnp.asarray(x['new'], jnp.float32)
  g = jax.grad(lambda l: run(x | {'new': l, 'old': jax.lax.stop_gradient(l)}, Loss())[0].sum())(new)
  np.testing.assert_allclose(g, np.where(x['mask'], -x['advantage'], 0), rtol=1e-5)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('s', 'mode'),
  [(s, 'decoupled') for s in LOSSES] + [(Loss(variant=v), 'bypass') for v in ('ppo', 'tis', 'segment', 'reinforce')],
  ids=lambda x: x if isinstance(x, str) else oracle.name(x),
)
def test_gradient_is_that_of_finite_differences_and_reaches_logp_alone(s, mode):
  x = oracle.batch(7, B=3, T=5)
  rng = np.random.default_rng(1)
  weight, ref = rng.uniform(0, 2, x['mask'].shape), x['new'] + rng.normal(0, 0.3, x['mask'].shape)
  s = Loss(**{**vars(s), 'kl_coef': 0.1})
  survive = x['mask'] & (rng.random(x['mask'].shape) < 0.8)

  def expected(l):
    loss = oracle.token_loss(l, x['old'], x['roll'], x['advantage'], x['reward'], weight, x['mask'], s, mode, frozen=x['new'])
    return oracle.aggregated(loss + 0.1 * oracle.kl(l, ref, 'k3', 10.0), survive, x['mask'], s, True)

  with jax.enable_x64(True):
    mask = jnp.asarray(x['mask'])
    coefficient = aggregation(jnp.asarray(survive), mask, s, True)

    def loss(l, old, roll, ref, A, reward, weight):
      return objective(l, old, roll, ref, None, A, reward, weight, mask, coefficient, s, mode)[0]

    args = [jnp.asarray(a) for a in (x['new'], x['old'], x['roll'], ref, x['advantage'], x['reward'], weight)]
    np.testing.assert_allclose(loss(*args), expected(x['new']), rtol=1e-9)
    g, *others = jax.grad(loss, argnums=tuple(range(7)))(*args)
  for other in others:
    np.testing.assert_array_equal(other, 0)
  numeric, h = np.zeros(x['mask'].shape), 1e-6
  for i in np.ndindex(*x['mask'].shape):
    up, down = x['new'].copy(), x['new'].copy()
    up[i] += h
    down[i] -= h
    numeric[i] = (expected(up) - expected(down)) / (2 * h)
  assert np.abs(numeric).max() > 0.01
  np.testing.assert_allclose(g, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('variant', VARIANTS)
def test_what_the_mask_hides_may_be_nan_or_extreme(variant):
  x = oracle.batch(8)
  poisoned = {k: np.where(x['mask'], x[k], np.nan) for k in ('new', 'old', 'roll', 'advantage')} | {
    k: x[k] for k in ('reward', 'mask')
  }
  poisoned['new'][0, 0] = -1e4  # a token that the policy now excludes
  clean = {k: np.where(x['mask'], poisoned[k], 0) if k in ('new', 'old', 'roll', 'advantage') else x[k] for k in x}

  def loss(b, mode):
    return jax.value_and_grad(lambda l: run(b | {'new': l}, Loss(variant=variant), mode)[0].sum())(jnp.float32(b['new']))

  for mode in MODES:
    for a, b in zip(loss(poisoned, mode), loss(clean, mode)):
      assert np.isfinite(np.asarray(a)).all()
      np.testing.assert_array_equal(a, b)


def test_a_huge_ratio_is_clamped():
  x = one_row([1.0, 1.0], 1.0)
  x['old'][0, 0] = -1e4
  loss, _ = run(x, Loss(clip_high=1e12))
  np.testing.assert_allclose(loss, [[-math.exp(20), -1]], rtol=1e-5)


# --- kl --------------------------------------------------------------------------------------------------------------


def test_kl_estimators_by_hand():
  l, ref = jnp.log(jnp.array([[0.5, 0.2]])), jnp.log(jnp.array([[0.25, 0.4]]))  # u = -log 2, log 2
  log2 = math.log(2)
  for estimator, expected in {'k1': [log2, -log2], 'k2': [log2**2 / 2] * 2, 'k3': [log2 - 0.5, 1 - log2]}.items():
    np.testing.assert_allclose(kl(l, ref, estimator, 10.0), [expected], rtol=1e-5)


def test_kl_is_clamped_and_its_small_values_are_exact():
  l, ref = jnp.array([[-9.0, -1.0, -1.0]]), jnp.array([[-1.0, -1.0001, -1e6]])
  value = np.asarray(kl(l, ref, 'k3', 10.0))[0]
  np.testing.assert_allclose(value, [10.0, 5e-9, 10.0], rtol=1e-2)  # e^-20 - 1 + 20 = 19, clamped
  np.testing.assert_array_equal(kl(l, l, 'k3', 10.0), 0)


# --- aggregation -----------------------------------------------------------------------------------------------------


def test_aggregation_by_hand():
  mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
  survive = mask.at[0, 3].set(False).at[1].set(False)  # a token rejected in row 0, all of row 1; row 3 is padding
  a, b = [1, 1, 1, 0], [1, 0, 0, 0]
  zero = np.zeros(4)
  hand = {
    ('seq-mean-token-mean', True): (a / np.array(9), zero, b / np.array(3)),
    ('seq-mean-token-mean', False): (a / np.array(6), zero, b / np.array(2)),
    ('token-mean', True): (a / np.array(6), zero, b / np.array(6)),  # 3 + 2 + 1
    ('token-mean', False): (a / np.array(4), zero, b / np.array(4)),
    ('seq-mean-token-sum', True): (a / np.array(3), zero, b / np.array(3)),
    ('seq-mean-token-sum', False): (a / np.array(2), zero, b / np.array(2)),
    ('seq-mean-token-sum-norm', True): (a / np.array(12), zero, b / np.array(12)),
    ('seq-mean-token-sum-norm', False): (a / np.array(8), zero, b / np.array(8)),
  }
  for (name, count), expected in hand.items():
    got = aggregation(survive, mask, Loss(aggregate=name), count)
    np.testing.assert_allclose(got, [*expected, zero], rtol=1e-6, err_msg=f'{name} {count}')


@pytest.mark.parametrize('name', ['seq-mean-token-mean', 'token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm'])
def test_a_batch_of_nothing_has_no_loss(name):
  nothing = jnp.zeros((2, 3), bool)
  np.testing.assert_array_equal(aggregation(nothing, nothing, Loss(aggregate=name), True), 0)
  np.testing.assert_array_equal(aggregation(nothing, jnp.ones((2, 3), bool), Loss(aggregate=name), False), 0)


@settings(deadline=None, max_examples=25)
@given(
  st.integers(0, 10_000),
  st.sampled_from(['seq-mean-token-mean', 'token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm']),
  st.booleans(),
)
def test_microbatches_add_up_to_the_oracle_of_the_whole(seed, name, count):
  x = oracle.batch(seed)
  rng = np.random.default_rng(seed)
  loss = rng.normal(size=x['mask'].shape)
  survive = x['mask'] & (rng.random(x['mask'].shape) < 0.5) & (rng.random((len(loss), 1)) < 0.7)
  s = Loss(aggregate=name)
  c = np.asarray(aggregation(jnp.asarray(survive), jnp.asarray(x['mask']), s, count))
  parts = sum((c[i : i + 2] * loss[i : i + 2]).sum() for i in range(0, len(loss), 2))
  np.testing.assert_allclose(parts, oracle.aggregated(loss, survive, x['mask'], s, count), rtol=1e-4, atol=1e-6)


# --- the whole -------------------------------------------------------------------------------------------------------


def test_objective_of_two_sequences_one_of_them_vetoed_by_hand():
  """sparse_rollouts 10.8: the loss, its gradient, N and the group's statistics."""
  rho = np.array([[0.5, 1.0, 2.0], [1e-5, 1.0, 1.0]])
  r = np.array([[1.0, 1.1, 1.5], [1.0, 1.0, 1.0]])
  roll = np.full((2, 3), -3.0)
  old = roll + np.log(rho)
  new = old + np.log(r)
  ref = new + np.log([[2.0, 1.0, 1.0]] * 2)
  mask, reward = jnp.ones((2, 3), bool), jnp.array([1.0, 0.0])
  A = advantages(reward, jnp.array([0, 0]), jnp.ones(2, bool), Advantage())
  np.testing.assert_allclose(A, [1 / math.sqrt(2), -1 / math.sqrt(2)], rtol=1e-5)  # the vetoed reward still counts
  fixed = correct(jnp.float32(old), jnp.float32(roll), mask, preset('sparse_rl'))
  mean_w = (0.5 + 1 + 1.5 + 1e-5 + 1 + 1) / 6
  s = Loss(kl_coef=0.1, entropy_coef=0.01)
  c = aggregation(fixed.mask, mask, s, True)
  entropy = jnp.full((2, 3), 2.0)

  def loss(l):
    arrays = (jnp.float32(a) for a in (old, roll, ref))
    per_token = jnp.broadcast_to(A[:, None], (2, 3))
    return objective(l, *arrays, entropy, per_token, reward, fixed.weight, mask, c, s, 'decoupled')[0]

  value, g = jax.value_and_grad(loss)(jnp.float32(new))
  a = 1 / math.sqrt(2)
  w = np.array([0.5, 1, 1.5]) / mean_w
  pg = -a * w * np.array([1.0, 1.1, 1.2])  # r = 1.5 is clipped at 1.2
  k3 = np.array([2 - 1 - math.log(2), 0, 0])
  np.testing.assert_allclose(value, (pg + 0.1 * k3 - 0.01 * 2).sum() / 3 / 2, rtol=1e-5)  # 3 tokens survive, N stays 2
  by_hand = (-a * w * np.array([1.0, 1.1, 0.0]) + 0.1 * np.array([1 - 2, 0, 0])) / 6
  np.testing.assert_allclose(g, [by_hand, [0, 0, 0]], rtol=1e-4, atol=1e-7)
