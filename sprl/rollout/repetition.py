"""How much of an answer repeats itself (docs/methods/losses.md, eq. 44)."""

import numpy as np
from jaxtyping import Int


def repetition(tokens: Int[np.ndarray, ' C']) -> float:
  """Return the length of the longest n-gram that occurs twice, over the length of the completion (eq. 44).

  The two occurrences may overlap. Near 1 in an endless loop. O(C log^2 C).

  A repeated n-gram contains repeated shorter ones, so bisection finds the longest. Grams of 2^k tokens are numbered by pairing
  the numbers of two grams of 2^(k-1). A gram of n tokens is two overlapping grams: n = 7 is the grams of 4 at i and at i + 3.
  """
  length = len(tokens)
  if length < 2:
    return 0.0
  numbers = [np.unique(tokens, return_inverse=True)[1]]
  while 2 ** len(numbers) < length:
    half = 2 ** (len(numbers) - 1)
    numbers.append(np.unique(_pairs(numbers[-1], half, length), return_inverse=True)[1])

  def repeats(n: int) -> bool:
    k = n.bit_length() - 1
    grams = _pairs(numbers[k], n - 2**k, length)
    return len(np.unique(grams)) < len(grams)

  low, high = 0, length - 1  # bounds of the longest repeated length
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if repeats(middle) else (low, middle - 1)
  return low / length


def _pairs(number, shift, length):
  """Return one integer for the grams at i and i + shift together, wherever both exist."""
  number = number.astype(np.int64)
  return number[: len(number) - shift] * length + number[shift:]
