"""Diagnostics of the mismatch and of the update, against the oracle and values worked out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import objective_oracle as oracle
import pytest

from sprl.config import Correction
from sprl.config_checks import REJECTIONS
from sprl.objective.correction import reject, weigh
from sprl.objective.diagnostics import effective_sample_size, mismatch, policy_metrics, policy_sums
from sprl.objective.losses import TokenRatios
from sprl.presets import ARMS, CORRECTIONS
from sprl.types import LogProbs

EVERYTHING = Correction(
  weight='icepop',
  cap=1.3,
  floor=0.7,
  normalise='global',
  reject=tuple(o + {'k1': '=0.6:1.5', 'k2': '=0.1', 'k3': '=0.2'}[o[-2:]] for o in REJECTIONS),
  veto=0.3,
)
SETTINGS = [
  Correction(),
  EVERYTHING,
  Correction(level='sequence', weight='clip', normalise='global'),
  Correction(reject=('token_k1=0:1.2',)),
  CORRECTIONS['disabled'],
  ARMS['sparse_rl_code'],
  CORRECTIONS['geo_rs_seq_tis'],
]


SHAPE = (6, 11)  # one shape for all batches, so that each operation compiles once


def metrics_of(x, s):
  logprobs = LogProbs(sampler=jnp.asarray(x['roll']), old=jnp.asarray(x['old']))
  mask, micro = jnp.asarray(x['mask']), jnp.zeros(len(x['mask']), jnp.int32)
  weights, survivors = weigh(logprobs, mask, s, micro), reject(logprobs, mask, s)
  return mismatch(logprobs, s, mask=mask, advantage=jnp.asarray(x['advantage']), weights=weights, survivors=survivors)


def batch(seed):
  return {k: np.asarray(v, bool if k == 'mask' else np.float32) for k, v in oracle.batch(seed, B=6).items()}


def batch_with(old, roll):
  """Return a batch with these log-probs in its corner."""
  old, roll = np.float32(old), np.float32(roll)
  x = {name: np.zeros(SHAPE, np.float32) for name in ('old', 'roll')} | {'mask': np.zeros(SHAPE, bool)}
  corner = tuple(slice(0, n) for n in old.shape)
  x['old'][corner], x['roll'][corner], x['mask'][corner] = old, roll, True
  return x | {'advantage': np.ones(SHAPE, np.float32)}


@pytest.mark.parametrize('s', SETTINGS, ids=range(len(SETTINGS)))
def test_every_metric_agrees_with_the_oracle(s):
  x = oracle.batch(0, B=6)
  with jax.enable_x64(True):
    got = metrics_of(x, s)
    expected = oracle.mismatch(x['old'], x['roll'], x['mask'], x['advantage'], s)
    assert set(got) == set(expected)
    for name, value in expected.items():
      np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_single_precision_is_enough():
  x = oracle.batch(3, B=6)
  expected = oracle.mismatch(x['old'], x['roll'], x['mask'], x['advantage'], EVERYTHING)
  for name, value in metrics_of(batch(3), EVERYTHING).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize('s', SETTINGS, ids=range(len(SETTINGS)))
def test_an_empty_batch_has_finite_metrics(s):
  x = batch(0)
  x['mask'][:] = False
  x['old'][:] = np.nan
  for name, value in metrics_of(x, s).items():
    assert np.isfinite(value), name


def test_identical_policies_have_no_mismatch():
  x = batch(1)
  x['roll'] = x['old']
  m = metrics_of(x, Correction(reject=('token_k1=2.0', 'seq_sum_k3=0.1'), veto=1e-4))
  ones = ('ppl_ratio', 'probs_pearson', 'token_mult_prob_error', 'rollout_is_mean', 'rollout_is_eff_sample_size')
  zeros = ('kl', 'k3_kl', 'chi2_token', 'chi2_seq', 'js_divergence_error', 'rollout_is_std', 'abs_dlogp_max')
  for name in ones:
    np.testing.assert_allclose(m[f'rollout_corr/{name}'], 1, rtol=1e-6, err_msg=name)
  for name in (*zeros, 'rollout_rs_masked_fraction', 'adv_signed_bias'):
    np.testing.assert_allclose(m[f'rollout_corr/{name}'], 0, atol=1e-6, err_msg=name)
  assert m['sparse/ess'] == m['sparse/agreement_p05'] == 1
  assert m['sparse/veto_fraction'] == 0


def test_each_kl_direction_misses_gaps_that_the_other_shows():
  m = metrics_of(batch_with([[-5.0]], [[-15.0]]), Correction())
  np.testing.assert_allclose(m['rollout_corr/k3_kl'], 22_015, atol=1)
  np.testing.assert_allclose(m['rollout_corr/policy_kl_error'], 9.0, atol=1e-3)
  m = metrics_of(batch_with([[-15.0]], [[-5.0]]), Correction())
  np.testing.assert_allclose(m['rollout_corr/k3_kl'], 9.0, atol=1e-3)
  np.testing.assert_allclose(m['rollout_corr/policy_kl_error'], 22_015, atol=1)


def test_effective_sample_size_by_hand():
  w, mask = np.zeros(SHAPE, np.float32), np.zeros(SHAPE, bool)
  w[0, :5], mask[0, :4] = [1, 1, 1, 9, 77], True
  np.testing.assert_allclose(effective_sample_size(jnp.asarray(w), jnp.asarray(mask)), (12 / 4) ** 2 / (84 / 4), rtol=1e-6)


def test_the_effective_sample_size_of_icepop_counts_weights_that_it_zeroes():
  log_rho = np.log(np.float32([1, 1, 1, 9]))  # 9 is above the cap: its weight is 0
  x = batch_with(log_rho[None], np.zeros((1, 4), np.float32))
  m = metrics_of(x, Correction(weight='icepop', floor=0.5, cap=5.0))
  np.testing.assert_allclose(m['rollout_corr/rollout_is_eff_sample_size'], (3 / 4) ** 2 / (3 / 4), rtol=1e-6)
  np.testing.assert_allclose(m['rollout_corr/rollout_is_std'], np.std([1, 1, 1, 0]), rtol=1e-6)


def test_the_veto_fraction_counts_rejected_sequences():
  """The released code of Sparse-RL counts accepted ones."""
  x = batch(2)
  x['roll'] = x['old'] + np.float32(0.01)
  x['mask'][:], x['mask'][4:], x['mask'][0, 6:] = True, False, False
  x['old'][0, 3] = x['roll'][0, 3] - 12
  m = metrics_of(x, ARMS['sparse_rl'])
  expected = {
    'sparse/veto_fraction': 1 / 4,
    'sparse/catastrophic_sequence_fraction': 1 / 4,
    'rollout_corr/rollout_rs_masked_fraction': 6 / 39,
    'rollout_corr/rollout_rs_seq_masked_fraction': 1 / 4,
  }
  for name, value in expected.items():
    np.testing.assert_allclose(m[name], value, rtol=1e-6, err_msg=name)
  without = metrics_of(x, CORRECTIONS['token_is'])
  assert without['sparse/veto_fraction'] == 0
  np.testing.assert_allclose(without['sparse/catastrophic_sequence_fraction'], 1 / 4)


def test_a_rejection_does_not_count_as_a_correction_of_the_survivors():
  roll = np.log([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
  x = batch_with(np.log([[0.4, 0.6, 0.01], [0.4, 0.6, 0.5]]), roll)  # the learner all but excludes one token
  rejecting = metrics_of(x, Correction(level=None, veto=0.1))
  assert rejecting['rollout_corr/rollout_rs_masked_fraction'] == 0.5
  assert rejecting['rollout_corr/corrected_fraction'] == 0
  weighted = metrics_of(x, Correction(level='token', veto=0.1))
  np.testing.assert_allclose(weighted['rollout_corr/corrected_fraction'], 2 / 3)
  assert metrics_of(x, Correction(level=None, veto=0.9))['rollout_corr/corrected_fraction'] == 1  # nothing survives


def test_a_nan_of_the_sampler_appears_in_the_metrics():
  x = batch(3)
  x['roll'][0, 0] = np.nan
  found = metrics_of(x, Correction())
  assert np.isnan([found[f'rollout_corr/{name}'] for name in ('kl', 'abs_dlogp_p99')]).all()
  assert np.isnan(found['sparse/agreement_p05'])


# --- the update ------------------------------------------------------------------------------------------------------


def test_policy_metrics_by_hand_and_summed_over_microbatches():
  r = np.array([[0.5, 1.0], [2.0, 4.5], [9.0, 1.0]])
  mask = jnp.array([[1, 1], [1, 1], [0, 1]], bool)
  ratios = TokenRatios(log_ratio=jnp.float32(np.log(r)), clipped=jnp.array([[1, 0], [0, 1], [1, 0]], bool))
  parts = [policy_sums(jax.tree.map(lambda x, i=i: x[i : i + 1], ratios), mask[i : i + 1]) for i in range(3)]
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


def test_policy_metrics_without_tokens_are_finite():
  ratios = TokenRatios(log_ratio=jnp.zeros((1, 2)), clipped=jnp.zeros((1, 2), bool))
  assert all(np.isfinite(v) for v in policy_metrics(policy_sums(ratios, jnp.zeros((1, 2), bool))).values())
