"""Comparison of FP8 paths, which allows for flipped codes.

Two programs may sum a product in different orders, and so may two CPUs. If a number lies next to a rounding boundary, its last
digit then decides its FP8 code. The token's log-prob moves by an FP8 step, about 1e-2 nats, and the cache passes the difference
on to later tokens of the sequence. This happens to about one quantised number in 10^5, so a test counts the sequences that differ
and bounds their number.
"""

import numpy as np


def flipped(got, expected, atol=1e-5):
  """Return the numbers of the sequences whose log-probs differ by more than `atol`; both arguments are lists of arrays."""
  return [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not np.abs(a - b).max() <= atol]
