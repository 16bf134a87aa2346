import math

import pytest

from sprl.objective.guards import sentinels, warnings

HEALTHY = {
  'rollout_corr/probs_diff_mean': 0.001,
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


def test_a_metric_that_is_not_finite_stops_the_run_and_is_named():
  for bad in (math.nan, math.inf):
    (reason,) = sentinels(HEALTHY | {'rollout_corr/probs_diff_mean': bad})
    assert 'rollout_corr/probs_diff_mean' in reason
  assert sentinels(HEALTHY | {'reward': math.nan}) == []  # not a matter of log-probs


def test_a_cache_that_outgrew_its_scales_stops_the_run():
  assert sentinels(HEALTHY | {'fp8/kv_saturation': 9e-5}) == []
  (reason,) = sentinels(HEALTHY | {'fp8/kv_saturation': 2e-4})
  assert 'fp8/kv_saturation = 0.0002' in reason
  assert 'config.quant.kv_scale' in reason


def test_a_kl_spike_stops_the_run():
  assert sentinels(HEALTHY | {'rollout_corr/kl': 0.99}) == []
  for spike in (1.01, -1.01):
    (reason,) = sentinels(HEALTHY | {'rollout_corr/kl': spike})
    assert 'rollout_corr/kl' in reason


# Tokens were sampled by older weights, and no weight says so.
UNCORRECTED = HEALTHY | {'async/stale_tokens': 0.4, 'rollout_corr/corrected_fraction': 0.0}


@pytest.mark.parametrize('deviation', [0.0, 0.03])  # from the old policy, in later minibatches
def test_staleness_that_nothing_corrects_for_stops_the_run(deviation):
  """async_rollouts trap 1: ratios to log-probs that the learner itself has recomputed say nothing of who sampled."""
  (reason,) = sentinels(UNCORRECTED | {'policy/ratio_deviation': deviation})
  assert 'sampled by older weights' in reason
  assert "config.correction.level = 'token'" in reason
  assert "config.correction.mode = 'bypass'" in reason


def test_weights_that_differ_from_one_are_a_correction_and_so_are_ratios_to_the_sampler():
  assert sentinels(UNCORRECTED | {'rollout_corr/corrected_fraction': 1e-3}) == []
  assert sentinels(UNCORRECTED, weighted=False) == []


def test_where_nothing_is_stale_nothing_has_to_be_corrected():
  assert sentinels(UNCORRECTED | {'async/stale_tokens': 0.0}) == []


@pytest.mark.parametrize('name', ['async/stale_tokens', 'rollout_corr/corrected_fraction'])
def test_from_a_metric_that_is_not_there_nothing_is_concluded(name):
  assert sentinels({n: v for n, v in UNCORRECTED.items() if n != name}) == []


def test_two_steps_of_answers_that_never_end_stop_the_run():
  assert sentinels(HEALTHY, 1) == []
  assert 'length limit' in sentinels(HEALTHY, 2)[0]


def test_each_health_gate_warns_by_name():
  unwell = {
    'rollout_corr/rollout_is_mean': 2.1,
    'rollout_corr/rollout_is_eff_sample_size': 0.29,
    'rollout_corr/rollout_is_std': 1.1,
    'rollout_corr/kl': -0.11,
    'rollout_corr/chi2_token': 1.1,
    'rollout_corr/token_mult_prob_error': 1.06,
    'sparse/agreement_p05': 0.85,
  }
  said = warnings(HEALTHY | unwell)
  assert list(said) == list(unwell)
  assert all(sentence.startswith(f'{name} = ') for name, sentence in said.items())
