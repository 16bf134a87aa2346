"""Who sees whom in a packed row."""

import jax.numpy as jnp
import numpy as np

from sprl.models.memory import CausalMemory, Memory


def allowed(segments, prefixes=None):
  rows = [None if x is None else jnp.array([x]) for x in (segments, prefixes)]
  return np.asarray(CausalMemory.of(*rows).allowed[0]).astype(int)


def test_two_completions_of_one_prompt():
  #              a  b  c  d  e  .
  expected = [
    [1, 0, 0, 0, 0, 0],  # a
    [1, 1, 0, 0, 0, 0],  # b
    [1, 1, 1, 0, 0, 0],  # c
    [1, 1, 1, 1, 0, 0],  # d
    [1, 1, 0, 0, 1, 0],  # e
    [0, 0, 0, 0, 0, 0],  # padding
  ]
  np.testing.assert_array_equal(allowed([1, 1, 2, 2, 3, 0], [0, 0, 1, 1, 1, 0]), expected)


def test_two_groups_of_one_row_do_not_see_each_other():
  expected = [
    [1, 0, 0, 0],
    [1, 1, 0, 0],
    [0, 0, 1, 0],
    [0, 0, 1, 1],
  ]
  np.testing.assert_array_equal(allowed([1, 2, 3, 4], [0, 1, 0, 3]), expected)


def test_padding_is_never_seen_on_either_side_nor_in_the_middle():
  seen = allowed([0, 1, 0, 1, 0])
  np.testing.assert_array_equal(seen, [[0] * 5, [0, 1, 0, 0, 0], [0] * 5, [0, 1, 0, 1, 0], [0] * 5])


def test_it_answers_as_a_memory_and_remembers_nothing():
  memory = CausalMemory.of(jnp.array([[1, 1]]))
  assert isinstance(memory, Memory)
  q, v = jnp.ones((1, 2, 2, 4)), jnp.arange(16.0).reshape(1, 2, 2, 4)
  out, after = memory.attend(0, q, jnp.zeros((1, 2, 2, 4)), v)
  assert after is memory
  np.testing.assert_allclose(out[0, 0], v[0, 0], atol=1e-6)
  np.testing.assert_allclose(out[0, 1], (v[0, 0] + v[0, 1]) / 2, atol=1e-6)
