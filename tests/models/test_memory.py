"""Who sees whom in a packed row."""

import jax.numpy as jnp
import numpy as np

from sprl.cache.layer import NEVER
from sprl.models.memory import CausalMemory, EvictedMemory, Memory


def allowed(segments, prefixes=None):
  rows = [None if x is None else jnp.array([x]) for x in (segments, prefixes)]
  return np.asarray(CausalMemory.of(*rows).allowed[0, 0]).astype(int)


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


def test_a_row_forgets_what_the_sampler_had_evicted_head_by_head_and_layer_by_layer():
  """Values are one-hot and scores equal, so that an output is 1 / seen on what was seen and 0 elsewhere."""
  T = 5
  evicted = np.full((1, 2, 2, T), NEVER)
  evicted[0, 0, 1, 0] = 3  # layer 0, head 1: token 0 is gone for the query at position 3 and after
  evicted[0, 1, 0, 1] = 2
  evicted[0, 1, 0, 2] = 4
  segments, prefixes = jnp.array([[1, 1, 1, 2, 2]]), jnp.array([[0, 0, 0, 1, 1]])
  positions = jnp.arange(T)[None]
  memory = EvictedMemory(CausalMemory.of(segments, prefixes), positions, jnp.asarray(evicted))
  assert isinstance(memory, Memory)
  q, k = jnp.ones((1, T, 4, T)), jnp.zeros((1, T, 2, T))
  v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (1, T, 2, T))
  causal = np.tril(np.ones((T, T)))
  gone = [(0, 1, slice(3, None), 0), (1, 0, slice(2, None), 1), (1, 0, slice(4, None), 2)]
  for layer in (0, 1):
    out, after = memory.attend(layer, q, k, v)
    assert after is memory
    for head in (0, 1):
      seen = causal.copy()
      for at, which, queries, token in gone:
        if (at, which) == (layer, head):
          seen[queries, token] = 0
      for query_head in (2 * head, 2 * head + 1):
        np.testing.assert_allclose(out[0, :, query_head], seen / seen.sum(axis=1, keepdims=True), atol=1e-6)


def test_positions_not_places_decide_what_was_evicted():
  """The second completion of a shared prompt stands behind the first in the row, at the same positions."""
  segments, prefixes = jnp.array([[1, 1, 2, 2, 3, 3]]), jnp.array([[0, 0, 1, 1, 1, 1]])
  positions = jnp.array([[0, 1, 2, 3, 2, 3]])
  evicted = np.full((1, 1, 1, 6), NEVER)
  evicted[0, 0, 0, 0] = 3
  memory = EvictedMemory(CausalMemory.of(segments, prefixes), positions, jnp.asarray(evicted))
  v = jnp.eye(6)[None, :, None]
  out, _ = memory.attend(0, jnp.ones((1, 6, 1, 6)), jnp.zeros((1, 6, 1, 6)), v)
  seen = np.array(
    [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1]]
  )
  np.testing.assert_allclose(out[0, :, 0], seen / seen.sum(axis=1, keepdims=True), atol=1e-6)
