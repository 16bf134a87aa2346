"""Health checks of the mismatch metrics."""

from sprl.io.health import health_checks, health_markdown


def test_each_metric_is_compared_with_its_own_range():
  record = {
    'step': 3,
    'rollout_corr/rollout_is_mean': 0.4,
    'rollout_corr/rollout_is_eff_sample_size': 1.0,
    'rollout_corr/kl': -0.2,
    'rollout_corr/chi2_token': float('nan'),
    'rollout_corr/token_mult_prob_error': 1.01,
  }
  assert {gate.metric.removeprefix('rollout_corr/'): gate.passed for gate in health_checks(record)} == {
    'rollout_is_mean': False,
    'rollout_is_eff_sample_size': True,
    'kl': False,
    'chi2_token': False,
    'token_mult_prob_error': True,
  }


def test_a_run_without_mismatch_metrics_has_no_gates():
  assert health_checks({'step': 1, 'reward/mean': 0.5}) == []


def test_the_table_marks_values_out_of_range():
  table = health_markdown(health_checks({'rollout_corr/kl': 0.25, 'rollout_corr/rollout_is_std': 0.125}))
  assert table.splitlines()[2:] == [
    '| `rollout_corr/kl` | 0.25 | -0.1 to 0.1 | **look closer** |',
    '| `rollout_corr/rollout_is_std` | 0.125 | 0 to 1 | ok |',
  ]
