"""Advantages: values worked out by hand, invalid sequences, wrong estimators, and agreement with the oracle."""

import re
import typing

import numpy as np
import objective_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.config import Advantage, Estimator, SettingsError
from sprl.objective.advantages import ESTIMATORS, advantages, equal_groups, overlong_penalty

ALL = [
  Advantage(),
  Advantage('dr_grpo'),
  Advantage('rloo'),
  Advantage('reinforce_baseline'),
  Advantage('reinforce'),
]


def computed(reward, group, valid, s):
  result = advantages(np.float32(reward), np.int32(group), np.asarray(valid, bool), s)
  assert result.dtype == np.float32
  return result


def test_two_groups_by_hand():
  reward, group, valid = [1, 0, 0, 1, 3, 5], [0, 0, 0, 0, 17, 17], [True] * 6
  std = 1 / np.sqrt(3)  # group 0: mean 1/2, squares 4 * 1/4, ddof 1: std sqrt(1/3)
  hand = {
    'grpo': [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std, -1 / np.sqrt(2), 1 / np.sqrt(2)],
    'dr_grpo': [0.5, -0.5, -0.5, 0.5, -1, 1],
    'rloo': [2 / 3, -2 / 3, -2 / 3, 2 / 3, -2, 2],
    'reinforce_baseline': [-2 / 3, -5 / 3, -5 / 3, -2 / 3, 4 / 3, 10 / 3],
    'reinforce': [1, 0, 0, 1, 3, 5],
  }
  for estimator, expected in hand.items():
    np.testing.assert_allclose(computed(reward, group, valid, Advantage(estimator)), expected, rtol=1e-5)


def test_an_invalid_sequence_has_advantage_0_and_is_in_no_statistic():
  valid = np.array([True, True, False, True, True, False])
  for s in ALL:
    a = computed([1, 0, 0, 2, 5, 0], [0, 0, 0, 3, 3, 3], valid, s)
    b = computed([1, 0, np.nan, 2, 5, 1e9], [0, 0, 0, 3, 3, 3], valid, s)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a[~valid], 0)


@pytest.mark.parametrize('reward', [0.1, 1 / 3, 0.7])
def test_equal_rewards_give_exact_zeros(reward):
  for s in ALL[:3]:
    np.testing.assert_array_equal(computed([reward] * 7, [2] * 7, [True] * 7, s), 0)


def test_a_group_of_one_gets_zero():
  for s in ALL[:3]:
    np.testing.assert_array_equal(computed([3.0, 1.0], [0, 1], [True, True], s), 0)


@pytest.mark.parametrize('scale', [1e30, 3e38])
def test_large_rewards_do_not_overflow(scale):
  found = computed([scale, 0, 0, scale], [0, 0, 0, 0], [True] * 4, Advantage())
  np.testing.assert_allclose(found, np.array([1, -1, -1, 1]) * np.sqrt(3) / 2, rtol=1e-6)


def test_each_estimator_has_a_function():
  assert set(ESTIMATORS) == set(typing.get_args(Estimator))
  with pytest.raises(SettingsError, match=r"config\.advantage\.estimator = 'other': expected grpo, .*, `file\.py:NAME`"):
    computed([1.0], [0], [True], Advantage('other'))  # type: ignore[arg-type]


@pytest.mark.parametrize(
  ('returned', 'message'),
  [
    (lambda r: r[:, None], 'float64[4, 1]; expected [B] = [4]'),
    (lambda r: r.mean(), 'float64[]; expected [B] = [4]'),
    (lambda r: np.where(r == 0.5, np.nan, r), 'nan for a reward of 0.5; expected finite'),
    (lambda r: r * 1e300, '1e+300 for a reward of 1.0; expected finite numbers of float32'),
  ],
)
def test_advantages_of_another_shape_or_not_finite_are_refused(monkeypatch, returned, message):
  monkeypatch.setitem(ESTIMATORS, 'grpo', lambda reward, group, valid: returned(reward))
  with pytest.raises(SettingsError, match=rf"config\.advantage\.estimator = 'grpo'.*{re.escape(message)}"):
    computed([1, 0.5, 0, 0], [0, 0, 1, 1], [True, True, False, True], Advantage())


def test_an_estimator_may_return_anything_for_invalid_sequences(monkeypatch):
  monkeypatch.setitem(ESTIMATORS, 'grpo', lambda reward, group, valid: np.where(valid, reward, np.nan))
  np.testing.assert_array_equal(computed([1, 2], [0, 0], [True, False], Advantage()), [1, 0])


def test_the_overlong_penalty_is_that_of_dapo():
  """16,384 tokens are free, the next 4,096 cost up to half of the reward's range (arXiv 2503.14476, eq. 13)."""
  length = np.array([100, 16_384, 17_408, 18_432, 20_480])
  np.testing.assert_allclose(overlong_penalty(length, 20_480, 0.2), [0, 0, 0.125, 0.25, 0.5], atol=1e-12)
  np.testing.assert_array_equal(overlong_penalty(length, 20_480, None), 0)


def test_equal_groups_compare_valid_members():
  valid = np.array([True, True, False, True, True, True])
  equal = equal_groups(np.float32([1, 1, 0, 1, 0, 2]), np.int32([0, 0, 0, 4, 4, 5]), valid)
  np.testing.assert_array_equal(equal, [True, True, False, False, False, True])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7), st.booleans()), min_size=8, max_size=8), st.sampled_from(ALL))
def test_advantages_agree_with_the_oracle(rows, s):
  reward, group, valid = np.array([r for r, _, _ in rows]) / 4, [g for _, g, _ in rows], [v for _, _, v in rows]
  np.testing.assert_allclose(computed(reward, group, valid, s), oracle.advantages(reward, group, valid, s), rtol=2e-4, atol=2e-5)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.sampled_from(['grpo', 'dr_grpo', 'rloo']))
def test_relative_advantages_ignore_a_shift_and_sum_to_zero(reward, estimator):
  group = [0, 0, 0, 0, 1, 1, 1, 1]
  a = computed(reward, group, [True] * 8, Advantage(estimator))
  b = computed(np.array(reward) + 16, group, [True] * 8, Advantage(estimator))
  np.testing.assert_array_equal(a, b)
  assert abs(a[:4].sum()) < 1e-5
  assert abs(a[4:].sum()) < 1e-5
