"""Shapley values and pair interactions against averages over all orders of the causes, and their axioms."""

from fractions import Fraction
from itertools import combinations, permutations
from math import factorial

import numpy as np
import pytest

from sprl.ledger import interactions, shapley

NAMES = ('a', 'b', 'c', 'd')
TOKENS = 5


def subsets(names):
  return [frozenset(on) for size in range(len(names) + 1) for on in combinations(names, size)]


def game(count, seed=0):
  """Return random whole numbers [TOKENS] for each subset of `count` causes, exact in float64."""
  rng = np.random.default_rng(seed)
  return {on: rng.integers(-50, 50, TOKENS).astype(np.float64) for on in subsets(NAMES[:count])}


def exact(x):
  return [Fraction(int(value)) for value in x]


def oracle_shapley(values, names):
  """Return each cause's effect when it is switched on after those before it, averaged over all orders, as exact fractions."""
  total = {name: [Fraction(0)] * TOKENS for name in names}
  for order in permutations(names):
    for i, name in enumerate(order):
      without, added = exact(values[frozenset(order[:i])]), exact(values[frozenset(order[: i + 1])])
      total[name] = [t + (y - x) / factorial(len(names)) for t, x, y in zip(total[name], without, added)]
  return total


def oracle_pairs(values, names):
  """Return the second difference of each pair, with the causes on that precede both, averaged over all orders."""
  total = {frozenset(pair): [Fraction(0)] * TOKENS for pair in combinations(names, 2)}
  for order in permutations(names):
    for pair in total:
      first, second = sorted(pair)
      on = frozenset(order[: min(order.index(name) for name in pair)])
      corners = [exact(values[on | with_them]) for with_them in (frozenset(), {first}, {second}, pair)]
      total[pair] = [t + (n - x - y + b) / factorial(len(names)) for t, n, x, y, b in zip(total[pair], *corners)]
  return total


@pytest.mark.parametrize('count', [1, 2, 3, 4])
def test_values_are_averages_over_all_orders(count):
  values, names = game(count), NAMES[:count]
  for found, oracle in ((shapley(values), oracle_shapley(values, names)), (interactions(values), oracle_pairs(values, names))):
    assert found.keys() == oracle.keys()
    for key, expected in oracle.items():
      np.testing.assert_allclose(found[key], np.array(expected, float), rtol=0, atol=1e-12)


def test_two_causes_by_hand():
  values = {frozenset(): 1.0, frozenset('a'): 3.0, frozenset('b'): 11.0, frozenset('ab'): 7.0}
  values = {on: np.array([x]) for on, x in values.items()}
  assert shapley(values) == {'a': [-1.0], 'b': [7.0]}  # a adds 2 alone and -4 after b; b adds 10 and 4
  assert interactions(values) == {frozenset('ab'): [-6.0]}


def test_no_cause_has_no_values():
  values = {frozenset(): np.zeros(TOKENS)}
  assert (shapley(values), interactions(values)) == ({}, {})


@pytest.mark.parametrize('count', [1, 2, 3, 4])
def test_values_sum_to_the_effect_of_all_causes(count):
  values, names = game(count), frozenset(NAMES[:count])
  whole = values[names] - values[frozenset()]
  alone = {name: values[frozenset({name})] - values[frozenset()] for name in names}
  pairs = interactions(values)
  np.testing.assert_allclose(sum(shapley(values).values()), whole, atol=1e-12)
  np.testing.assert_allclose(sum(alone.values()) + sum(pairs.values()), whole, atol=1e-12)
  for name, x in shapley(values).items():  # a cause's value is its effect alone and half of its interactions
    np.testing.assert_allclose(x, alone[name] + sum(y for pair, y in pairs.items() if name in pair) / 2, atol=1e-12)


def test_causes_with_equal_effects_have_equal_values():
  values = game(3)
  for on in subsets('c'):
    values[on | {'b'}] = values[on | {'a'}]
  found = shapley(values)
  np.testing.assert_allclose(found['a'], found['b'], atol=1e-12)
  assert not np.allclose(found['a'], found['c'])


def test_a_cause_that_adds_a_constant_has_this_value_and_no_interaction():
  values = game(3)
  for on in subsets('ab'):
    values[on | {'c'}] = values[on] + 0.25
  np.testing.assert_allclose(shapley(values)['c'], 0.25, atol=1e-12)
  pairs = interactions(values)
  np.testing.assert_allclose([pairs[frozenset('ac')], pairs[frozenset('bc')]], 0.0, atol=1e-12)
  assert np.any(pairs[frozenset('ab')])


def test_float32_values_are_summed_in_float64():
  values = {on: x.astype(np.float32) for on, x in game(3).items()}
  assert all(x.dtype == np.float64 for x in (*shapley(values).values(), *interactions(values).values()))
