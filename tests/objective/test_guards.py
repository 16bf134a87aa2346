"""Guards: metrics that stop a run (sentinels), and health ranges that warn."""

import math

import pytest

from sprl.objective.guards import sentinels, warnings

HEALTHY = {
  'rollout_corr/probs_pearson': 0.001,
  'rollout_corr/kl': 0.002,
  'rollout_corr/rollout_is_mean': 1.0,
  'rollout_corr/rollout_is_eff_sample_size': 0.9,
  'rollout_corr/rollout_is_std': 0.1,
  'rollout_corr/chi2_token': 0.01,
  'sparse/agreement_p05': 0.95,
  'reward': 0.5,
}


def test_a_healthy_step_gives_no_reason_to_stop_or_warn():
  assert sentinels(HEALTHY, 1) == []
  assert warnings(HEALTHY) == {}


def test_a_metric_that_is_not_finite_stops_the_run_by_name():
  for bad in (math.nan, math.inf):
    (reason,) = sentinels(HEALTHY | {'rollout_corr/probs_pearson': bad})
    assert 'rollout_corr/probs_pearson' in reason
  assert sentinels(HEALTHY | {'reward': math.nan}) == []  # not a metric of log-probs


@pytest.mark.parametrize('name', ['fp8/kv_saturation', 'fp8/query_saturation'])
def test_saturated_fp8_stops_the_run(name):
  assert sentinels(HEALTHY | {name: 9e-5}) == []
  (reason,) = sentinels(HEALTHY | {name: 2e-4})
  assert f'{name} = 0.0002' in reason
  assert 'config.quant.kv_scale' in reason


@pytest.mark.parametrize('name', ['fp8/kv_saturation', 'fp8/query_saturation'])
def test_saturation_of_frozen_scales_warns_that_they_are_out_of_date(name):
  assert sentinels(HEALTHY | {name: 0.5}, frozen_scales=True) == []
  assert "out of date (config.quant.kv_scale = 'frozen')" in warnings(HEALTHY | {name: 2e-4})[name]
  assert warnings(HEALTHY | {name: 9e-5}) == {}


def test_a_kl_spike_stops_the_run():
  assert sentinels(HEALTHY | {'rollout_corr/kl': 0.99}) == []
  for spike in (1.01, -1.01):
    (reason,) = sentinels(HEALTHY | {'rollout_corr/kl': spike})
    assert 'rollout_corr/kl' in reason


# Older weights sampled tokens, and no correction weight differs from 1.
UNCORRECTED = HEALTHY | {'async/stale_tokens': 0.4, 'rollout_corr/corrected_fraction': 0.0}


@pytest.mark.parametrize('deviation', [0.0, 0.03])  # of the ratio to the old policy, in later minibatches
def test_uncorrected_staleness_stops_the_run(deviation):
  """A ratio to recomputed log-probs does not correct for the weights that sampled (docs/methods/async.md, Traps)."""
  (reason,) = sentinels(UNCORRECTED | {'policy/ratio_deviation': deviation})
  assert "config.correction.level = 'token'" in reason
  assert "config.correction.mode = 'bypass'" in reason


def test_weights_other_than_one_and_ratios_to_the_sampler_correct():
  assert sentinels(UNCORRECTED | {'rollout_corr/corrected_fraction': 1e-3}) == []
  assert sentinels(UNCORRECTED, weighted=False) == []


def test_without_stale_tokens_no_correction_is_needed():
  assert sentinels(UNCORRECTED | {'async/stale_tokens': 0.0}) == []


@pytest.mark.parametrize('name', ['async/stale_tokens', 'rollout_corr/corrected_fraction'])
def test_a_missing_metric_stops_nothing(name):
  assert sentinels({n: v for n, v in UNCORRECTED.items() if n != name}) == []


def test_two_steps_at_the_length_limit_stop_the_run():
  assert sentinels(HEALTHY, 1) == []
  assert 'length limit' in sentinels(HEALTHY, 2)[0]


def test_each_health_range_warns_by_name():
  unwell = {
    'rollout_corr/rollout_is_mean': 2.1,
    'rollout_corr/rollout_is_eff_sample_size': 0.29,
    'rollout_corr/rollout_is_std': 1.1,
    'rollout_corr/kl': -0.11,
    'rollout_corr/chi2_token': 1.1,
    'rollout_corr/token_mult_prob_error': 1.06,
    'sparse/agreement_p05': 0.85,
    'fp8/kv_saturation': 2e-4,
    'fp8/query_saturation': 2e-4,
  }
  said = warnings(HEALTHY | unwell)
  assert list(said) == list(unwell)
  assert all(sentence.startswith(f'{name} = ') for name, sentence in said.items())
