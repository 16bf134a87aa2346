"""pass@k and confidence intervals against values worked out by hand."""

import itertools
import math

import numpy as np
import pytest

from sprl.io.pass_at_k import interval, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
  for n, k in [(1, 1), (4, 1), (4, 2), (5, 3), (6, 6)]:
    for c in range(n + 1):
      samples = [True] * c + [False] * (n - c)
      subsets = [any(subset) for subset in itertools.combinations(samples, k)]
      np.testing.assert_allclose(pass_at_k(np.array([c]), n, k), [sum(subsets) / len(subsets)], rtol=1e-15)


def test_pass_at_k_by_hand():
  # 4 samples, 2 correct: 1 - C(2,2)/C(4,2) = 5/6; 1 correct: 1 - C(3,2)/C(4,2) = 1/2
  np.testing.assert_allclose(pass_at_k(np.array([0, 1, 2, 3, 4]), 4, 2), [0, 1 / 2, 5 / 6, 1, 1])


@pytest.mark.parametrize(('correct', 'n', 'k'), [([1], 4, 5), ([1], 4, 0), ([5], 4, 1), ([-1], 4, 1)])
def test_invalid_counts_are_refused(correct, n, k):
  with pytest.raises(ValueError, match='must be between'):
    pass_at_k(np.array(correct), n, k)


def test_scores_of_0_and_1_get_wilsons_interval():
  # 8 of 10 correct, z = 1.96: centre (0.8 + 0.19207)/1.38415 = 0.71674, half 0.22657 (Wilson 1927; any table of it)
  mean, low, high = interval(np.array([1.0] * 8 + [0.0] * 2))
  assert mean == pytest.approx(0.8)
  assert (low, high) == pytest.approx((0.490162, 0.943318), abs=1e-6)


def test_equal_scores_still_have_an_interval():
  z2 = 1.959963984540054**2
  assert interval(np.ones(20)) == pytest.approx((1.0, 20 / (20 + z2), 1.0))
  assert interval(np.zeros(20)) == pytest.approx((0.0, 0.0, z2 / (20 + z2)))


def test_other_scores_get_the_normal_interval():
  # mean 0.5, deviations -0.25, 0, 0, 0.25: variance (ddof 1) 0.125/3, standard error sqrt(0.125/12) = 0.1020621
  mean, low, high = interval(np.array([0.25, 0.5, 0.5, 0.75]))
  assert (mean, low, high) == pytest.approx((0.5, 0.5 - 1.96 * 0.1020621, 0.5 + 1.96 * 0.1020621), abs=1e-5)


def test_scores_in_0_to_1_have_an_interval_in_0_to_1():
  # deviations -0.5, 0, 0.5: standard error 0.5 / sqrt(3), and 1.96 of these are more than the mean
  assert interval(np.array([0.0, 0.5, 1.0])) == (0.5, 0.0, 1.0)
  assert interval(np.array([0.0, 0.5, 2.5]))[1] < 0  # scores without bounds


def test_equal_partial_scores_get_wilsons_interval_of_their_mean():
  # p = 0.5, z = 1.96, n = 10: centre (0.5 + 0.19207)/1.38415 = 0.5, half 1.96/1.38415 * sqrt(0.025 + 0.009604) = 0.263407
  for scores in (np.full(10, 0.5), np.array([0.5, np.nextafter(0.5, 1)] * 5)):
    assert interval(scores) == pytest.approx((0.5, 0.236593, 0.763407), abs=1e-6)


def test_wilsons_interval_holds_for_scores_between_0_and_1():
  """Nine of ten problems score 0.5, the others 1. The scores of most sets of 5 are equal."""
  draws = np.random.default_rng(0).choice([0.5, 1.0], p=[0.9, 0.1], size=(2000, 5))
  covers = [low <= 0.55 <= high for _, low, high in map(interval, draws)]
  assert np.mean(covers) > 0.95


@pytest.mark.parametrize('scores', [[0.5], [2.5], [2.5, 2.5], [-1.0, -1.0, -1.0]])
def test_one_score_and_equal_scores_without_bounds_have_an_infinite_interval(scores):
  assert interval(np.array(scores)) == (scores[0], -math.inf, math.inf)


def test_no_scores_are_refused():
  with pytest.raises(ValueError, match='at least one problem'):
    interval(np.array([]))
