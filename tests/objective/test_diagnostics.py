import math

import jax
import jax.numpy as jnp
import numpy as np
import objective_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.objective.correction import correct, preset
from sprl.objective.diagnostics import effective_sample_size, mismatch, policy_metrics, policy_sums, repetition
from sprl.objective.losses import Facts
from sprl.settings import REJECT_OPTIONS, Correction

EVERYTHING = Correction(
  weight='icepop',
  cap=1.3,
  floor=0.7,
  normalise=True,
  reject=REJECT_OPTIONS,
  reject_bounds=tuple({'k1': '0.6_1.5', 'k2': '0.1', 'k3': '0.2'}[o[-2:]] for o in REJECT_OPTIONS),
  token_mask=True,
  veto=0.3,
  max_sequence_error=1.9,
)
SETTINGS = [
  Correction(),
  EVERYTHING,
  Correction(level='sequence', weight='clip', normalise=True),
  Correction(reject=('token_k1',), reject_bounds=('0_1.2',)),
  preset('disabled'),
  preset('sparse_rl_code'),
  preset('geo_rs_seq_tis'),
]


def run(x, s):
  old, roll, advantage, reward = (jnp.asarray(x[k]) for k in ('old', 'roll', 'advantage', 'reward'))
  mask = jnp.asarray(x['mask'])
  return mismatch(old, roll, mask, advantage, reward, correct(old, roll, mask, s), s)


def floats(x):
  return {k: np.asarray(v, bool if k == 'mask' else np.float32) for k, v in x.items()}


@pytest.mark.parametrize('s', SETTINGS, ids=range(len(SETTINGS)))
def test_every_metric_agrees_with_the_oracle(s):
  x = oracle.batch(0, B=6)
  with jax.enable_x64(True):
    got = run(x, s)
    expected = oracle.mismatch(x['old'], x['roll'], x['mask'], x['advantage'], x['reward'], s)
    assert set(got) == set(expected)
    for name, value in expected.items():
      np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_single_precision_is_enough():
  x = oracle.batch(3)
  expected = oracle.mismatch(x['old'], x['roll'], x['mask'], x['advantage'], x['reward'], EVERYTHING)
  for name, value in jax.jit(run, static_argnums=1)(floats(x), EVERYTHING).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('s', SETTINGS, ids=range(len(SETTINGS)))
def test_a_batch_of_nothing_has_finite_metrics(s):
  x = floats(oracle.batch(0))
  x['mask'][:] = False
  x['old'][:] = np.nan
  for name, value in run(x, s).items():
    assert np.isfinite(value), name


def test_identical_policies():
  x = floats(oracle.batch(1))
  x['roll'] = x['old']
  m = run(x, Correction(reject=('token_k1', 'seq_sum_k3'), reject_bounds=('2.0', '0.1'), veto=1e-4))
  ones = ('ppl_ratio', 'probs_pearson', 'token_mult_prob_error', 'rollout_is_mean', 'rollout_is_eff_sample_size')
  zeros = ('kl', 'k3_kl', 'chi2_token', 'chi2_seq', 'js_divergence_error', 'rollout_is_std', 'veto_fraction', 'abs_dlogp_max')
  for name in ones:
    np.testing.assert_allclose(m[f'rollout_corr/{name}'], 1, rtol=1e-6, err_msg=name)
  for name in (*zeros, 'rollout_rs_masked_fraction', 'adv_signed_bias', 'probs_diff_mean'):
    np.testing.assert_allclose(m[f'rollout_corr/{name}'], 0, atol=1e-6, err_msg=name)
  assert m['sparse/ess'] == m['sparse/agreement_p05'] == 1


def test_the_two_kl_directions_are_blind_to_different_gaps():
  x = {
    'old': np.float32([[-5.0]]),
    'roll': np.float32([[-15.0]]),
    'mask': np.array([[True]]),
    'advantage': np.float32([[1.0]]),
    'reward': np.float32([1.0]),
  }
  m = run(x, Correction())
  np.testing.assert_allclose(m['rollout_corr/gen_kl_error'], 22_015, atol=1)
  np.testing.assert_allclose(m['rollout_corr/policy_kl_error'], 9.0, atol=1e-3)
  m = run(x | {'old': x['roll'], 'roll': x['old']}, Correction())
  np.testing.assert_allclose(m['rollout_corr/gen_kl_error'], 9.0, atol=1e-3)
  np.testing.assert_allclose(m['rollout_corr/policy_kl_error'], 22_015, atol=1)


def test_effective_sample_size_by_hand():
  w = jnp.array([[1.0, 1.0, 1.0, 9.0, 77.0]])
  np.testing.assert_allclose(effective_sample_size(w, jnp.array([[1, 1, 1, 1, 0]], bool)), (12 / 4) ** 2 / (84 / 4), rtol=1e-6)


def test_vetoed_sequences_are_those_that_fail_not_those_that_pass():
  x = floats(oracle.batch(2, B=4, spread=0.01))
  x['mask'][:] = True
  x['mask'][0, 6:] = False
  x['old'][0, 3] = x['roll'][0, 3] - 12
  x['reward'] = np.float32([0, 1, 1, 0.25])
  m = run(x, preset('sparse_rl'))
  expected = {
    'veto_fraction': 1 / 4,
    'catastrophic_token_fraction': 1 / 39,
    'masked_token_fraction': 6 / 39,
    'response_length_vetoed': 6,
    'response_length_kept': 11,
    'reward_vetoed': 0,
    'reward_kept': 0.75,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(m[f'sparse/{name}'], value, rtol=1e-6, err_msg=name)


def test_what_is_rejected_corrects_nothing_of_what_survives():
  roll = np.log([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
  old = np.log([[0.4, 0.6, 0.01], [0.4, 0.6, 0.5]])  # a token that the learner all but excludes
  x = {'old': old, 'roll': roll, 'mask': np.ones((2, 3), bool), 'advantage': np.ones((2, 3)), 'reward': np.ones(2)}
  rejecting = Correction(level='off', veto=0.1)
  assert run(x, rejecting)['sparse/masked_token_fraction'] == 0.5
  assert run(x, rejecting)['rollout_corr/corrected_fraction'] == 0
  weighted = run(x, Correction(level='token', veto=0.1))
  np.testing.assert_allclose(weighted['rollout_corr/corrected_fraction'], 2 / 3)
  assert run(x, Correction(level='off', veto=0.9))['rollout_corr/corrected_fraction'] == 1  # nothing survives


def test_a_nan_of_the_sampler_shows():
  x = floats(oracle.batch(3))
  x['roll'][0, 0] = np.nan
  assert np.isnan(run(x, Correction())['rollout_corr/probs_diff_mean'])


# --- the update ------------------------------------------------------------------------------------------------------


def test_policy_metrics_by_hand_and_summed_over_microbatches():
  r = np.array([[0.5, 1.0], [2.0, 4.5], [9.0, 1.0]])
  mask = jnp.array([[1, 1], [1, 1], [0, 1]], bool)
  facts = Facts(jnp.float32(np.log(r)), jnp.array([[1, 0], [0, 1], [1, 0]], bool))
  parts = [policy_sums(Facts(*(f[i : i + 1] for f in facts)), mask[i : i + 1]) for i in range(3)]
  m = policy_metrics(jax.tree.map(lambda *x: sum(x), *parts))
  used = np.array([0.5, 1, 2, 4.5, 1])
  expected = {
    'policy/ratio_mean': 9 / 5,
    'policy/ratio_deviation': (0.5 + 0 + 1 + 3.5 + 0) / 5,
    'policy/kl': -math.log(4.5) / 5,
    'policy/k3_kl': (4 - math.log(4.5)) / 5,
    'policy/ess': 81 / (5 * (used**2).sum()),
    'policy/clip_fraction': 2 / 5,
  }
  assert set(m) == set(expected)
  for name, value in expected.items():
    np.testing.assert_allclose(m[name], value, rtol=1e-5, err_msg=name)


def test_policy_metrics_of_nothing_are_finite():
  facts = Facts(jnp.zeros((2, 2)), jnp.zeros((2, 2), bool))
  assert all(np.isfinite(v) for v in policy_metrics(policy_sums(facts, jnp.zeros((2, 2), bool))).values())


# --- repetition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'longest'),
  [('', 0), ('a', 0), ('ab', 0), ('aa', 1), ('aaaa', 3), ('abcabcabc', 6), ('xabcyabcz', 3), ('abcdefg', 0), ('banana', 3)],
)
def test_repetition_by_hand(text, longest):
  assert repetition(np.array([ord(c) for c in text], np.int32)) == longest / max(len(text), 1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 100_000))
def test_repetition_agrees_with_trying_every_length(tokens, scale):
  grams = {n: [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for n in range(1, len(tokens))}
  longest = max((n for n, g in grams.items() if len(set(g)) < len(g)), default=0)
  assert repetition(np.array(tokens, np.int64) * scale) == longest / max(len(tokens), 1)


def test_repetition_of_a_long_answer_is_quick_and_exact():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 100_000, 9000).astype(np.int32)
  tokens[5000:7000] = tokens[1000:3000]
  assert repetition(tokens) == 2000 / 9000
