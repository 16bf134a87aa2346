"""benchmarks/ledger.py: the rows of its table and its intervals."""

import numpy as np
import pytest
from ledger import interval, summary


def test_the_row_of_a_switch_by_hand():
  entries = {
    'kv': np.array([1.0, -3.0, 2.0]),
    'interaction_weights_kv': np.array([2.0, 0.0, -2.0]),
    'interaction_kv_eviction': np.array([0.0, 2.0, -2.0]),
    'interaction_weights_eviction': np.array([9.0, 9.0, 9.0]),
  }
  row = summary('kv', entries, np.array([0, 0, 1]))
  assert (row['mean'], row['|x|']) == (0, 2)
  assert row['p99'] == pytest.approx(2.98)
  assert row['alone'] == pytest.approx((0 + 4 + 4) / 3)  # [1, -3, 2] minus half of [2, 2, -4]
  assert summary('interaction_weights_kv', entries, np.array([0, 0, 1]))['alone'] is None


def test_the_interval_resamples_sequences_and_not_tokens():
  """Two sequences with 1 and 3 tokens: a bootstrap draws one of them twice in half of the cases."""
  assert interval(np.array([0.0, 4.0, 4.0, 4.0]), np.array([0, 1, 1, 1])) == (0, 4)
  assert interval(np.full(4, 2.5), np.array([0, 1, 1, 1])) == (2.5, 2.5)


def test_the_interval_has_the_width_of_the_normal_approximation_for_many_sequences():
  x = np.random.default_rng(1).normal(3.0, 1.0, 400)
  low, high = interval(x, np.arange(400))
  half = 1.96 * x.std() / 20
  np.testing.assert_allclose([low, high], [x.mean() - half, x.mean() + half], atol=0.15 * half)
