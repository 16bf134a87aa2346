"""The share of an answer that repeats itself, against values worked out by hand and a search over all lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.rollout.repetition import repetition


@pytest.mark.parametrize(
  ('text', 'longest'),
  [('', 0), ('a', 0), ('ab', 0), ('aa', 1), ('aaaa', 3), ('abcabcabc', 6), ('xabcyabcz', 3), ('abcdefg', 0), ('banana', 3)],
)
def test_repetition_by_hand(text, longest):
  assert repetition(np.array([ord(c) for c in text], np.int32)) == longest / max(len(text), 1)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 100_000))
def test_repetition_agrees_with_trying_every_length(tokens, scale):
  grams = {n: [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for n in range(1, len(tokens))}
  longest = max((n for n, g in grams.items() if len(set(g)) < len(g)), default=0)
  assert repetition(np.array(tokens, np.int64) * scale) == longest / max(len(tokens), 1)


def test_repetition_of_a_long_answer_is_exact():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 100_000, 9000).astype(np.int32)
  tokens[5000:7000] = tokens[1000:3000]
  assert repetition(tokens) == 2000 / 9000
