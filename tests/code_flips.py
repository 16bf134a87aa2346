"""Comparison of FP8 paths that tolerates flipped codes.

Two programs or two CPUs may sum a product in different orders. The last digit of the sum then decides the FP8 code of a number
next to a rounding boundary. The token's log-prob moves by an FP8 step, about 1e-2 nats, and the cache passes the difference on to
later tokens of the sequence. About one quantised number in 10^5 flips, so a test bounds the number of sequences that differ.
"""

import numpy as np


def flipped(got, expected, atol=1e-5):
  """Return the indices of the sequences whose log-probs differ by more than `atol`. Both arguments are lists of arrays."""
  return [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not np.abs(a - b).max() <= atol]
