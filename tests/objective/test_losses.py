"""Policy losses, KL, aggregation and the whole objective, against values worked out by hand, loops and finite differences."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import objective_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.config import Advantage, Correction, Dppo, Loss, SettingsError, Tis, Topr
from sprl.objective import masked
from sprl.objective.advantages import advantages
from sprl.objective.correction import reject, weigh
from sprl.objective.losses import VARIANTS, aggregation, kl, objective, token_loss
from sprl.presets import ARMS
from sprl.types import LogProbs

LOSSES = [
  *(Loss(variant=v) for v in VARIANTS),
  Loss(clip_low=0.1, clip_high=0.28, dual_clip=1.5),
  Loss(variant='gspo', dual_clip=1.05, clip_low=0.6, clip_high=1.5),
  Loss(variant='tis', tis=Tis(0.7, 1.1)),
  Loss(variant='topr', topr=Topr(positive_weight=0.5)),
  Loss(variant='topr', topr=Topr(level='geometric')),
  Loss(variant='topr', topr=Topr(level='sequence')),
  Loss(variant='cispo', clip_low=0.1, clip_high=0.1),
  Loss(variant='cispo', clip_high=3.0),
  Loss(variant='dppo_kl', dppo_kl=Dppo(delta=0.05)),
]
MODES = ('decoupled', 'bypass')
AGGREGATES = ('seq-mean-token-mean', 'token-mean', 'prompt-mean-token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm')
PROMPT = np.array([0, 0, 1, 1, 1])  # of each row
SHAPE = (5, 11)  # one shape and float64 for all batches, so that each operation compiles once


@pytest.fixture(autouse=True)
def double_precision():
  with jax.enable_x64(True):
    yield


def log_probs_of(x, **more):
  """Return the LogProbs of a dictionary with `new`, `old` and `roll`."""
  arrays = {'current': x['new'], 'old': x['old'], 'sampler': x['roll'], **more}
  return LogProbs(**{name: jnp.asarray(a) for name, a in arrays.items()})


def loss_of(x, s, mode='decoupled', weight=None):
  weight = np.ones(SHAPE) if weight is None else weight
  others = {'advantage': x['advantage'], 'reward': x['reward'], 'weight': weight, 'mask': x['mask']}
  return token_loss(log_probs_of(x), s, mode, **{name: jnp.asarray(a) for name, a in others.items()})


def one_row(r, A, reward=0.0):
  """Return a row of tokens with log-prob -1 and these ratios to both denominators. None marks a token of an environment."""
  mask, log_p = np.zeros(SHAPE, bool), np.full(SHAPE, -1.0)
  mask[0, : len(r)] = [x is not None for x in r]
  log_p[0, : len(r)] -= np.log([1.0 if x is None else x for x in r])
  new = np.full(SHAPE, -1.0)
  return {
    'new': new,
    'old': log_p,
    'roll': log_p.copy(),
    'advantage': A * np.ones(SHAPE),
    'reward': np.full(5, reward),
    'mask': mask,
  }


def losses_of(r, A, s, mode='decoupled', reward=0.0):
  """Return (losses of `one_row`, whether a bound takes effect on each)."""
  loss, ratios = loss_of(one_row(r, A, reward), s, mode)
  assert not np.any(np.asarray(loss)[1:])
  return loss[0, : len(r)], ratios.clipped[0, : len(r)]


@pytest.mark.parametrize(
  ('returned', 'found'),
  [
    (lambda t: (t.logp.mean(), t.log_r, t.mask), r'float64\[\], float64\[5, 11\], bool\[5, 11\]'),
    (lambda t: (t.logp, t.log_r.mean(axis=1, keepdims=True), t.mask), r'float64\[5, 11\], float64\[5, 1\], bool'),
    (lambda t: (t.logp, t.log_r), r'float64\[5, 11\], float64\[5, 11\]; '),
    (lambda t: t.logp, r'returned float64\[5, 11\]; '),
    (lambda t: (t.logp, t.log_r, 0.0 * t.logp), r'float64\[5, 11\], float64\[5, 11\], float64\[5, 11\]'),
    (lambda t: (t.logp, None, t.mask), r'float64\[5, 11\], NoneType, bool\[5, 11\]'),
  ],
)
def test_a_loss_of_another_shape_is_refused(monkeypatch, returned, found):
  monkeypatch.setitem(VARIANTS, 'ppo', lambda t, s: returned(t))
  with pytest.raises(SettingsError, match=rf"config\.loss\.variant = 'ppo'.*{found}.*\[B, T\] = \[5, 11\]"):
    loss_of(one_row([1.0], 1.0), Loss())


# --- by hand: l = -1, so a loss -c A l is c A -------------------------------------------------------------------------------

SQUARE = {0.5: math.log(2) ** 2, 1: 0.0, 1.5: math.log(1.5) ** 2}
HAND = {  # variant: losses at r = 0.5, 1, 1.5 for A = 2, and for A = -2
  'ppo': ([-1, -2, -2.4], [1.6, 2, 3]),
  'reinforce': ([2, 2, 2], [-2, -2, -2]),
  'tis': ([1, 2, 2], [-1, -2, -2]),
  'topr': ([1, 2, 2], [-1, -2, -2]),
  'cispo': ([1, 2, 2.4], [-1, -2, -2.4]),
  'kimi15': ([2 + 0.05 * q for q in SQUARE.values()], [-2 + 0.05 * q for q in SQUARE.values()]),
  # r = (0.5 * 1 * 1.5)^(1/3) = 0.909: below gspo's range, which binds for A < 0, and inside that of segment
  'gspo': ([-2 * 0.75 ** (1 / 3)] * 3, [2 * 0.9997] * 3),
  'segment': ([-2 * 0.75 ** (1 / 3)] * 3, [2 * 0.75 ** (1 / 3)] * 3),
}


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('variant', HAND)
def test_hand_values_below_at_and_above_ratio_one(variant, mode):
  for A, expected in zip((2.0, -2.0), HAND[variant]):
    loss, _ = losses_of([0.5, 1, 1.5, None], A, Loss(variant=variant), mode)
    np.testing.assert_allclose(loss, [*expected, 0], rtol=1e-5, err_msg=f'A = {A}')


def test_clip_higher_raises_the_upper_bound_of_good_tokens():
  loss, clipped = losses_of([0.7, 1.25, 1.4], 1.0, Loss(clip_low=0.2, clip_high=0.28))
  np.testing.assert_allclose(loss, [-0.7, -1.25, -1.28], rtol=1e-5)
  np.testing.assert_array_equal(clipped, [False, False, True])


def test_dual_clip_bounds_only_the_loss_of_bad_tokens():
  loss, clipped = losses_of([0.5, 2.0, 5.0], -2.0, Loss(dual_clip=3.0))
  np.testing.assert_allclose(loss, [1.6, 4, 6], rtol=1e-5)
  np.testing.assert_array_equal(clipped, [True, False, True])
  np.testing.assert_allclose(losses_of([5.0], 2.0, Loss(dual_clip=3.0))[0], [-2.4], rtol=1e-5)


@pytest.mark.parametrize('widths', [{'clip_low': 0.0}, {'clip_high': 0.0}, {'clip_low': 0.0, 'clip_high': 0.0}], ids=str)
@pytest.mark.parametrize('variant', ['ppo', 'gspo', 'segment'])
def test_the_gradient_of_equal_policies_does_not_depend_on_the_width_of_a_clip(variant, widths):
  """At r = 1 both losses are equal for every width. The gradient is that of the policy, -A, as in PyTorch."""
  for A in (2.0, -2.0):
    x = one_row([1.0], A)
    gradient = jax.grad(lambda new, x=x: loss_of({**x, 'new': new}, Loss(variant=variant, **widths))[0].sum())
    np.testing.assert_allclose(gradient(x['new'])[0, 0], -A, rtol=1e-12)


def test_topr_splits_on_the_reward_and_not_on_the_advantage():
  s = Loss(variant='topr', topr=Topr(positive_weight=0.5))
  np.testing.assert_allclose(losses_of([0.5, 2.0], -2.0, s, reward=1.0)[0], [-1, -1], rtol=1e-5)
  np.testing.assert_allclose(losses_of([0.5, 2.0], 2.0, s)[0], [1, 2], rtol=1e-5)


def test_topr_at_sequence_level_bounds_the_ratio_of_the_whole_answer():
  for level, ratio in (('sequence', 0.5 * 0.8), ('geometric', math.sqrt(0.5 * 0.8))):
    s = Loss(variant='topr', topr=Topr(level=level))
    np.testing.assert_allclose(losses_of([0.5, 0.8], -2.0, s)[0], [-2 * ratio] * 2, rtol=1e-5, err_msg=level)
    np.testing.assert_allclose(losses_of([2.0, 1.5], -2.0, s)[0], [-2, -2], rtol=1e-5, err_msg=level)
    np.testing.assert_allclose(losses_of([0.5, 0.8], 2.0, s, reward=1.0)[0], [2, 2], rtol=1e-5, err_msg=level)


def test_cispo_has_no_lower_bound_by_default():
  np.testing.assert_allclose(losses_of([0.3, 1.8], 1.0, Loss(variant='cispo'))[0], [0.3, 1.2], rtol=1e-5)
  bounded = Loss(variant='cispo', clip_low=0.2)
  np.testing.assert_allclose(losses_of([0.3, 1.8], 1.0, bounded)[0], [0.8, 1.2], rtol=1e-5)


def test_dppo_drops_tokens_by_probability_difference():
  s = Loss(variant='dppo_kl')  # P = e^-1 = 0.368; q = 0.736, 0.368, 0.123: P - q = -0.368, 0, 0.245
  penalty = [1e-3 * math.log(r) ** 2 for r in (0.5, 1, 3)]
  np.testing.assert_allclose(losses_of([0.5, 1.0, 3.0], 2.0, s)[0], [-1 + penalty[0], -2, penalty[2]], rtol=1e-5)
  np.testing.assert_allclose(losses_of([0.5, 1.0, 3.0], -2.0, s)[0], [penalty[0], 2, 6 + penalty[2]], rtol=1e-5)


def test_segment_uses_the_mean_of_each_contiguous_run():
  loss, _ = losses_of([0.9, 1.1, None, 1.1, None], 1.0, Loss(variant='segment'))
  np.testing.assert_allclose(loss, [-math.sqrt(0.99), -math.sqrt(0.99), 0, -1.1, 0], rtol=1e-5)
  loss, _ = losses_of([0.9, 1.1, None, 1.1, None], 1.0, Loss(variant='gspo', clip_high=0.2))
  np.testing.assert_allclose(loss, [-(1.089 ** (1 / 3))] * 2 + [0, -(1.089 ** (1 / 3)), 0], rtol=1e-5)


# --- modes, weights, equalities --------------------------------------------------------------------------------------


@pytest.mark.parametrize('s', LOSSES, ids=oracle.name)
@pytest.mark.parametrize('mode', MODES)
def test_losses_agree_with_the_oracle(s, mode):
  x = oracle.batch(11)
  weight = np.random.default_rng(0).uniform(0, 2, SHAPE)
  loss, ratios = loss_of(x, s, mode, weight)
  names = ('new', 'old', 'roll', 'advantage', 'reward')
  expected = oracle.token_loss(*(x[k] for k in names), weight, x['mask'], s, mode)
  np.testing.assert_allclose(loss, expected, rtol=1e-9, atol=1e-12)
  assert not (np.asarray(ratios.clipped) & ~x['mask']).any()


def test_decoupled_ppo_is_bypass_ppo_where_sampler_is_old():
  x = oracle.batch(2)
  x['old'] = x['roll']
  weight = weigh(log_probs_of(x), jnp.asarray(x['mask']), Correction()).weight
  three, _ = loss_of(x, Loss(variant='ppo'), 'decoupled', weight)
  two, _ = loss_of(x, Loss(variant='ppo'), 'bypass')
  np.testing.assert_allclose(three, two, rtol=1e-6)


@pytest.mark.parametrize('mode', MODES)
def test_topr_is_tis_on_bad_sequences_and_reinforce_on_good_ones(mode):
  x = oracle.batch(3)
  for reward, other in ((0.0, 'tis'), (1.0, 'reinforce')):
    x['reward'] = np.full(len(x['reward']), reward)
    np.testing.assert_array_equal(loss_of(x, Loss(variant='topr'), mode)[0], loss_of(x, Loss(variant=other), mode)[0])


def test_bypass_ignores_the_weight_except_under_reinforce():
  x = oracle.batch(4)
  for variant in VARIANTS:
    one, weighted = (loss_of(x, Loss(variant=variant), 'bypass', w)[0] for w in (None, np.full(SHAPE, 0.5)))
    np.testing.assert_allclose(weighted, one * (0.5 if variant == 'reinforce' else 1), err_msg=variant)


@pytest.mark.parametrize('mode', MODES)
def test_equal_policies_give_the_plain_policy_gradient(mode):
  """Without a gap and before any update every weight is 1, and the gradient is the gradient of -A l."""
  x = oracle.batch(5)
  x['roll'] = x['new'] = x['old']
  correction, mask = ARMS['sparse_rl_code'], jnp.asarray(x['mask'])
  weight = weigh(log_probs_of(x), mask, correction, jnp.arange(len(mask)) // 2).weight
  assert (np.asarray(reject(log_probs_of(x), mask, correction).mask) == x['mask']).all()
  plain = np.where(x['mask'], -x['advantage'], 0)
  for variant in ('ppo', 'tis', 'topr', 'cispo', 'kimi15', 'dppo_kl', 'reinforce'):
    gradient = jax.grad(lambda l, s: loss_of(x | {'new': l}, s, mode, weight)[0].sum())(x['new'], Loss(variant=variant))
    np.testing.assert_allclose(gradient, plain, atol=1e-12)
  np.testing.assert_allclose(loss_of(x, Loss(), mode, weight)[0], plain, atol=1e-12)


def test_the_current_log_prob_as_the_old_one_is_on_policy():
  x = oracle.batch(6)
  g = jax.grad(lambda l: loss_of(x | {'new': l, 'old': jax.lax.stop_gradient(l)}, Loss())[0].sum())(x['new'])
  np.testing.assert_allclose(g, np.where(x['mask'], -x['advantage'], 0), rtol=1e-12)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('s', 'mode'),
  [(s, 'decoupled') for s in LOSSES] + [(Loss(variant=v), 'bypass') for v in ('ppo', 'tis', 'segment', 'reinforce')],
  ids=lambda x: x if isinstance(x, str) else oracle.name(x),
)
def test_gradients_equal_finite_differences_and_reach_only_current(s, mode):
  x = oracle.batch(7)
  x['mask'][3:], x['mask'][:, 5:] = False, False  # few tokens: finite differences move each twice
  rng = np.random.default_rng(1)
  weight, ref = rng.uniform(0, 2, SHAPE), x['new'] + rng.normal(0, 0.3, SHAPE)
  s = Loss(**{**vars(s), 'kl_coef': 0.1})
  survive = x['mask'] & (rng.random(SHAPE) < 0.8)

  def expected(l):
    loss = oracle.token_loss(l, x['old'], x['roll'], x['advantage'], x['reward'], weight, x['mask'], s, mode, frozen=x['new'])
    return oracle.aggregated(loss + 0.1 * oracle.kl(l, ref, 'k3', 10.0), survive, x['mask'], s, PROMPT)

  mask = jnp.asarray(x['mask'])
  coefficient = aggregation(surviving=jnp.asarray(survive), mask=mask, prompt=jnp.asarray(PROMPT), settings=s)

  def loss(logprobs, others):
    return objective(logprobs, s, mode, **others, mask=mask, coefficient=coefficient)[0]

  logprobs = log_probs_of(x, ref=ref)
  others = {name: jnp.asarray(a) for name, a in (('advantage', x['advantage']), ('reward', x['reward']), ('weight', weight))}
  value, (of_logprobs, of_others) = jax.value_and_grad(loss, argnums=(0, 1))(logprobs, others)
  np.testing.assert_allclose(value, expected(x['new']), rtol=1e-9)
  for other in jax.tree.leaves((dataclasses.replace(of_logprobs, current=None), of_others)):
    np.testing.assert_array_equal(other, 0)
  numeric, h = np.zeros(SHAPE), 1e-6
  for i in map(tuple, np.argwhere(x['mask'])):
    up, down = x['new'].copy(), x['new'].copy()
    up[i] += h
    down[i] -= h
    numeric[i] = (expected(up) - expected(down)) / (2 * h)
  assert np.abs(numeric).max() > 0.01
  np.testing.assert_allclose(of_logprobs.current, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('variant', VARIANTS)
def test_values_outside_the_mask_may_be_nan_or_extreme(variant):
  x = oracle.batch(8)
  poisoned = x | {k: np.where(x['mask'], x[k], np.nan) for k in ('new', 'old', 'roll', 'advantage')}
  poisoned['new'][0, 0] = -1e4  # a token that the policy now excludes
  clean = x | {k: np.where(x['mask'], poisoned[k], 0) for k in ('new', 'old', 'roll', 'advantage')}

  def loss(b, mode):
    return jax.value_and_grad(lambda l: loss_of(b | {'new': l}, Loss(variant=variant), mode)[0].sum())(b['new'])

  for mode in MODES:
    for a, b in zip(loss(poisoned, mode), loss(clean, mode)):
      assert np.isfinite(np.asarray(a)).all()
      np.testing.assert_array_equal(a, b)


def test_a_huge_ratio_is_clamped():
  x = one_row([1.0, 1.0], 1.0)
  x['old'][0, 0] = -1e4
  loss, _ = loss_of(x, Loss(clip_high=1e12))
  np.testing.assert_allclose(loss[0, :2], [-math.exp(20), -1], rtol=1e-5)


# --- kl --------------------------------------------------------------------------------------------------------------


def kl_of(current, ref, estimator='k3'):
  """Return the KL estimates of a row of tokens."""
  logprobs = {'current': current, 'ref': ref, 'sampler': current}
  rows = {name: np.pad([x], ((0, 4), (0, 11 - len(x)))) for name, x in logprobs.items()}
  found = kl(LogProbs(**{name: jnp.asarray(x) for name, x in rows.items()}), estimator)
  return np.asarray(found)[0, : len(current)]


def test_unknown_names_are_refused():
  ones, mask = jnp.ones(SHAPE), jnp.ones(SHAPE, bool)
  with pytest.raises(ValueError, match="estimator = 'k1': expected k2 or k3"):
    kl(LogProbs(**dict.fromkeys(('sampler', 'current', 'ref'), jnp.zeros(SHAPE))), 'k1')
  with pytest.raises(ValueError, match="aggregate = 'token_mean': expected one of seq-mean-token-mean, "):
    coefficients(mask, mask, dataclasses.replace(Loss(), aggregate='token_mean'))
  logprobs = LogProbs(**dict.fromkeys(('sampler', 'old', 'current'), jnp.zeros(SHAPE)))
  with pytest.raises(ValueError, match="mode = 'Decoupled': expected one of decoupled, bypass"):
    token_loss(logprobs, Loss(), 'Decoupled', advantage=ones, reward=ones[:, 0], weight=ones, mask=mask)


def test_kl_estimators_by_hand():
  log2 = math.log(2)  # u = -log 2, log 2
  for estimator, expected in {'k2': [log2**2 / 2] * 2, 'k3': [log2 - 0.5, 1 - log2]}.items():
    np.testing.assert_allclose(kl_of(np.log([0.5, 0.2]), np.log([0.25, 0.4]), estimator), expected, rtol=1e-12)


def test_kl_is_clamped_and_its_small_values_are_exact():
  with jax.enable_x64(False):  # single precision, as in an update
    value = kl_of(np.float32([-9, -1, -1]), np.float32([-1, -1.0001, -1e6]))
    assert value.dtype == np.float32
    np.testing.assert_allclose(value, [10.0, 5e-9, 10.0], rtol=1e-2)  # e^-20 - 1 + 20 = 19, clamped
    np.testing.assert_array_equal(kl_of(np.float32([-9, -1, -2]), np.float32([-9, -1, -2])), 0)


def test_k3_and_its_derivative_keep_their_digits_for_small_log_ratios():
  u = np.float32(np.concatenate([s * np.geomspace(1e-7, 19.0, 400) for s in (-1, 1)]))
  exact = u.astype(np.float64)
  with jax.enable_x64(False):
    value, derivative = jax.vmap(jax.value_and_grad(masked.k3))(u)
    outside = jax.vmap(jax.grad(masked.k3))(np.float32([-21, 21, np.inf]))
  series = exact**2 / 2 + exact**3 / 6 + exact**4 / 24 + exact**5 / 120
  np.testing.assert_allclose(value, np.where(np.abs(exact) < 1e-3, series, np.expm1(exact) - exact), rtol=1e-5)
  np.testing.assert_allclose(derivative, np.expm1(exact), rtol=1e-6)
  np.testing.assert_array_equal(outside, 0)


# --- aggregation -----------------------------------------------------------------------------------------------------


def coefficients(survive, mask, s):
  arrays = {'surviving': survive, 'mask': mask, 'prompt': PROMPT}
  return np.asarray(aggregation(**{name: jnp.asarray(x) for name, x in arrays.items()}, settings=s))


def test_aggregation_by_hand():
  mask = np.zeros(SHAPE, bool)
  mask[0, :4] = mask[1, :2] = mask[2, :1] = True  # rows 3 and 4 are padding
  survive = mask.copy()
  survive[0, 3] = survive[1] = False  # a token rejected in row 0, all of row 1
  hand = {  # coefficient of the tokens in row 0 and in row 2
    'seq-mean-token-mean': (1 / 9, 1 / 3),
    'token-mean': (1 / 6, 1 / 6),  # 3 + 2 + 1
    'prompt-mean-token-mean': (1 / 10, 1 / 2),  # 3 + 2 tokens of prompt 0, 1 of prompt 1
    'seq-mean-token-sum': (1 / 3, 1 / 3),
    'seq-mean-token-sum-norm': (1 / 33, 1 / 33),  # of 11 columns
  }
  for name, (first, third) in hand.items():
    expected = np.where(survive, np.array([first, 0, third, 0, 0])[:, None], 0)
    np.testing.assert_allclose(coefficients(survive, mask, Loss(aggregate=name)), expected, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize('name', AGGREGATES)
def test_an_empty_batch_has_no_loss(name):
  nothing, everything = np.zeros(SHAPE, bool), np.ones(SHAPE, bool)
  np.testing.assert_array_equal(coefficients(nothing, nothing, Loss(aggregate=name)), 0)
  np.testing.assert_array_equal(coefficients(nothing, everything, Loss(aggregate=name)), 0)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(AGGREGATES))
def test_microbatches_add_up_to_the_oracle_of_the_whole_batch(seed, name):
  x = oracle.batch(seed)
  rng = np.random.default_rng(seed)
  loss = rng.normal(size=SHAPE)
  survive = x['mask'] & (rng.random(SHAPE) < 0.5) & (rng.random((len(loss), 1)) < 0.7)
  c = coefficients(survive, x['mask'], Loss(aggregate=name))
  parts = sum((c[i : i + 2] * loss[i : i + 2]).sum() for i in range(0, len(loss), 2))
  np.testing.assert_allclose(
    parts, oracle.aggregated(loss, survive, x['mask'], Loss(aggregate=name), PROMPT), rtol=1e-9, atol=1e-12
  )


# --- the objective ---------------------------------------------------------------------------------------------------


def test_objective_by_hand_of_two_sequences_one_of_them_vetoed():
  """Loss and gradient follow docs/methods/losses.md, eq. 4, 14, 16, 22, 30, 33 and 34."""
  rho = np.array([[0.5, 1.0, 2.0], [1e-5, 1.0, 1.0]])
  r = np.array([[1.0, 1.1, 1.5], [1.0, 1.0, 1.0]])
  corner = np.s_[:2, :3]
  mask, roll, reward = np.zeros(SHAPE, bool), np.full(SHAPE, -3.0), np.array([1.0, 0, 0, 0, 0])
  mask[corner] = True
  old = roll.copy()
  old[corner] += np.log(rho)
  new = old.copy()
  new[corner] += np.log(r)
  ref = new.copy()
  ref[corner] += np.log([[2.0, 1.0, 1.0]] * 2)
  A = advantages(reward, np.array([0, 0, 1, 1, 1]), mask.any(axis=1), Advantage())
  a = 1 / math.sqrt(2)
  np.testing.assert_allclose(A[:2], [a, -a], rtol=1e-5)  # the vetoed reward still counts
  x = {'new': new, 'old': old, 'roll': roll}
  weight = weigh(log_probs_of(x), jnp.asarray(mask), ARMS['sparse_rl']).weight
  surviving = reject(log_probs_of(x), jnp.asarray(mask), ARMS['sparse_rl']).mask
  s = Loss(kl_coef=0.1, entropy_coef=0.01)
  others = {
    'advantage': np.broadcast_to(A[:, None], SHAPE), 'reward': reward, 'weight': weight, 'mask': mask,
    'coefficient': coefficients(surviving, mask, s), 'entropy': np.full(SHAPE, 2.0),
  }  # fmt: skip
  others = {name: jnp.asarray(x) for name, x in others.items()}

  def loss(l):
    return objective(log_probs_of(x | {'new': l}, ref=ref), s, 'decoupled', **others)[0]

  value, g = jax.value_and_grad(loss)(new)
  w = np.array([0.5, 1, 1.5]) / ((0.5 + 1 + 1.5 + 1e-5 + 1 + 1) / 6)
  policy = -a * w * np.array([1.0, 1.1, 1.2])  # r = 1.5 is clipped at 1.2
  k3 = np.array([2 - 1 - math.log(2), 0, 0])
  np.testing.assert_allclose(value, (policy + 0.1 * k3 - 0.01 * 2).sum() / 3 / 2, rtol=1e-5)  # 3 tokens survive, N stays 2
  by_hand = (-a * w * np.array([1.0, 1.1, 0.0]) + 0.1 * np.array([1 - 2, 0, 0])) / 6
  np.testing.assert_allclose(g[corner], [by_hand, [0, 0, 0]], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_the_reference_and_the_entropy_outside_the_mask_may_be_anything(poison):
  x, s = oracle.batch(8), Loss(kl_coef=0.1, entropy_coef=0.01)
  rng = np.random.default_rng(8)
  ref, entropy = x['new'] + rng.normal(0, 0.3, SHAPE), rng.random(SHAPE)
  loss = oracle.token_loss(
    x['new'], x['old'], x['roll'], x['advantage'], x['reward'], np.ones(SHAPE), x['mask'], s, 'decoupled', frozen=x['new']
  )
  whole = loss + 0.1 * oracle.kl(x['new'], ref, 'k3', 10.0) - 0.01 * entropy
  expected = oracle.aggregated(whole, x['mask'], x['mask'], s, PROMPT)
  new, old, roll, ref, entropy = (np.where(x['mask'], a, poison) for a in (x['new'], x['old'], x['roll'], ref, entropy))
  others = {'advantage': x['advantage'], 'reward': x['reward'], 'weight': np.ones(SHAPE), 'mask': x['mask'], 'entropy': entropy}
  others = {name: jnp.asarray(a) for name, a in others.items()}
  others['coefficient'] = jnp.asarray(coefficients(x['mask'], x['mask'], s))

  def objective_of(l):
    return objective(log_probs_of({'new': l, 'old': old, 'roll': roll}, ref=ref), s, 'decoupled', **others)[0]

  value, gradient = jax.value_and_grad(objective_of)(new)
  np.testing.assert_allclose(value, expected, rtol=1e-9)
  assert np.isfinite(gradient).all()


@pytest.mark.parametrize('variant', ['ppo', 'tis', 'topr', 'cispo', 'dppo_kl'])
def test_a_bound_changes_no_loss_of_a_token_without_an_advantage(variant):
  _, clipped = losses_of([0.1, 9.0], 0.0, Loss(variant=variant))
  assert not clipped.any()
