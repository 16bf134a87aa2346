"""Attention masks of packed rows: shared prompts, padding, evicted tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.cache.layer import NEVER
from sprl.models.attention import Attention, EvictedAttention, PackedAttention

attend = jax.jit(
  lambda attention, layer, q, k, v, window=None: attention.attend(layer, q, k, v, window)[0], static_argnums=(1, 5)
)


@jax.jit
def mask(segments, prefixes):
  return PackedAttention.of(segments, prefixes).visible.mask(segments.shape[1])


def mask_of_row(segments, prefixes=None):
  """Return the mask of one row, padded to six tokens."""
  n = len(segments)
  rows = (np.pad(row, (0, 6 - n))[None] for row in (segments, prefixes or [0] * n))
  return np.asarray(mask(*rows)[0, 0])[:n, :n].astype(int)


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
  np.testing.assert_array_equal(mask_of_row([1, 1, 2, 2, 3, 0], [0, 0, 1, 1, 1, 0]), expected)


def test_two_groups_in_one_row_do_not_see_each_other():
  expected = [
    [1, 0, 0, 0],
    [1, 1, 0, 0],
    [0, 0, 1, 0],
    [0, 0, 1, 1],
  ]
  np.testing.assert_array_equal(mask_of_row([1, 2, 3, 4], [0, 1, 0, 3]), expected)


def test_padding_is_masked_on_both_sides_and_in_the_middle():
  seen = mask_of_row([0, 1, 1, 0, 2])
  expected = [[0] * 5, [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0] * 5, [0, 0, 0, 0, 1]]
  np.testing.assert_array_equal(seen, expected)
  alone = PackedAttention.of(jnp.array([[0, 1, 1, 0, 2]]))  # without prefixes
  np.testing.assert_array_equal(alone.visible.mask(5)[0, 0], expected)


def test_packed_attention_averages_visible_values_and_stays_unchanged():
  attention = PackedAttention.of(jnp.array([[1, 1]]))
  assert isinstance(attention, Attention)
  q, v = jnp.ones((1, 2, 2, 4)), jnp.arange(16.0).reshape(1, 2, 2, 4)
  out, after = attention.attend(0, q, jnp.zeros((1, 2, 2, 4)), v)
  assert after is attention
  np.testing.assert_allclose(out[0, 0], v[0, 0], atol=1e-6)
  np.testing.assert_allclose(out[0, 1], (v[0, 0] + v[0, 1]) / 2, atol=1e-6)


def test_evicted_tokens_are_masked_by_layer_and_head():
  """Values are one-hot and scores are equal, so an output is 1 / (number of visible tokens) at visible tokens, 0 elsewhere."""
  T = 5
  evicted = np.full((1, 2, 2, T), NEVER)
  evicted[0, 0, 1, 0] = 3  # layer 0, head 1: queries from position 3 on do not see token 0
  evicted[0, 1, 0, 1] = 2
  evicted[0, 1, 0, 2] = 4
  segments, prefixes = jnp.array([[1, 1, 1, 2, 2]]), jnp.array([[0, 0, 0, 1, 1]])
  attention = EvictedAttention(PackedAttention.of(segments, prefixes), jnp.arange(T)[None], jnp.asarray(evicted))
  assert isinstance(attention, Attention)
  q, k = jnp.ones((1, T, 4, T)), jnp.zeros((1, T, 2, T))
  v = jnp.broadcast_to(jnp.eye(T)[None, :, None], (1, T, 2, T))
  causal = np.tril(np.ones((T, T)))
  gone = [(0, 1, slice(3, None), 0), (1, 0, slice(2, None), 1), (1, 0, slice(4, None), 2)]
  for layer in (0, 1):
    out = attend(attention, layer, q, k, v)
    for head in (0, 1):
      seen = causal.copy()
      for at, which, queries, token in gone:
        if (at, which) == (layer, head):
          seen[queries, token] = 0
      for query_head in (2 * head, 2 * head + 1):
        np.testing.assert_allclose(out[0, :, query_head], seen / seen.sum(axis=1, keepdims=True), atol=1e-6)


def test_evictions_follow_positions_not_places_in_the_row():
  """The second completion of a shared prompt is after the first in the row, at the same positions."""
  segments, prefixes = jnp.array([[1, 1, 2, 2, 3, 3]]), jnp.array([[0, 0, 1, 1, 1, 1]])
  positions = jnp.array([[0, 1, 2, 3, 2, 3]])
  evicted = np.full((1, 1, 1, 6), NEVER)
  evicted[0, 0, 0, 0] = 3
  attention = EvictedAttention(PackedAttention.of(segments, prefixes), positions, jnp.asarray(evicted))
  out = attend(attention, 0, jnp.ones((1, 6, 1, 6)), jnp.zeros((1, 6, 1, 6)), jnp.eye(6)[None, :, None])
  seen = np.array(
    [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1]]
  )
  np.testing.assert_allclose(out[0, :, 0], seen / seen.sum(axis=1, keepdims=True), atol=1e-6)


def test_a_sliding_window_follows_positions_not_places_in_the_row():
  """A window of 3: the second completion of a shared prompt sees the last token of the prompt, although b stands before it."""
  segments, prefixes = jnp.array([[1, 1, 2, 2, 3, 3]]), jnp.array([[0, 0, 1, 1, 1, 1]])
  positions = jnp.array([[0, 1, 2, 3, 2, 3]])
  seen = np.array(
    [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1]]
  )
  expected = seen / seen.sum(axis=1, keepdims=True)
  packed = PackedAttention.of(segments, prefixes, positions=positions)
  # Nothing is evicted in a layer with a window, so it does not read the record.
  evicted = EvictedAttention(packed, positions, jnp.zeros((1, 1, 1, 6), jnp.int32))
  for attention in (packed, evicted):
    out = attend(attention, 0, jnp.ones((1, 6, 1, 6)), jnp.zeros((1, 6, 1, 6)), jnp.eye(6)[None, :, None], 3)
    np.testing.assert_allclose(out[0, :, 0], expected, atol=1e-6)
  with pytest.raises(ValueError, match='a sliding window of 3: expected the positions'):
    attend(PackedAttention.of(segments, prefixes), 0, jnp.ones((1, 6, 1, 6)), *[jnp.ones((1, 6, 1, 6))] * 2, 3)
