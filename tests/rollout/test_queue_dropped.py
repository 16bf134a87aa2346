"""benchmarks/queue_dropped.py: the bias of dropped sequences, against values worked out by hand."""

import pytest
from queue_dropped import bias


def test_the_bias_compares_the_kept_sequences_with_all():
  """Two kept sequences of 10 and 20 tokens, and two dropped ones that had 25 of 50 and 15 of 40 tokens: 15 against 30."""
  assert bias([10, 20], [50, 40], drawn=40.0) == pytest.approx(
    {'kept': 2, 'dropped': 2, 'kept length': 15.0, 'drawn': 20.0, 'dropped length': 45.0, 'bias': -0.5}
  )
