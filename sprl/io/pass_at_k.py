"""Scores on held-out problems: pass@k, and 95 % confidence intervals of a mean."""

import math

import numpy as np
from jaxtyping import Float, Int

_Z = 1.959963984540054  # the normal distribution's 97.5 % quantile


def pass_at_k(correct: Int[np.ndarray, ' N'], n: int, k: int) -> Float[np.ndarray, ' N']:
  """Estimate for each problem the probability that at least one of k samples is correct.

  `correct` is the number of correct samples c among the n samples of each problem. The estimate is unbiased for k <= n (Chen et
  al. 2021, arXiv 2107.03374, eq. 1): 1 - C(n - c, k) / C(n, k), one minus the share of the k-subsets without a correct sample.

  Raises ValueError if k is not in 1..n or a count is not in 0..n.
  """
  if not 1 <= k <= n:
    raise ValueError(f'pass@{k} of {n} samples per problem: k must be between 1 and {n}')
  if not all(0 <= c <= n for c in correct):
    raise ValueError(f'correct = {correct}: every count must be between 0 and {n}')
  return np.array([1.0 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct], float)


def interval(scores: Float[np.ndarray, ' N']) -> tuple[float, float, float]:
  """Return (mean, low, high): the mean score of N problems and its 95 % confidence interval.

  `scores` holds one score per problem. The samples of one problem are correlated, so average them first.

  If all scores are 0 or 1, the interval is Wilson's: it stays within [0, 1] and has a width even if all scores are equal.
  Otherwise it is the normal interval, mean +- 1.96 standard errors (ddof 1), limited to [0, 1] if all scores are in [0, 1].

  Equal scores other than 0 and 1 have no standard error to go by. If N > 1 and they are in [0, 1], the interval is Wilson's with
  their mean p: the variance of a score in [0, 1] is at most p (1 - p). Otherwise the interval is infinite.

  Raises ValueError if there are no scores.
  """
  n = len(scores)
  if n == 0:
    raise ValueError('no scores: an interval needs at least one problem')
  mean = float(np.mean(scores))
  equal, within = np.ptp(scores) < 1e-12, np.min(scores) >= 0 and np.max(scores) <= 1  # means of equal rewards differ by rounding
  if np.isin(scores, (0.0, 1.0)).all() or (equal and within and n > 1):
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return mean, max(0.0, centre - half), min(1.0, centre + half)
  if equal:
    return mean, -math.inf, math.inf
  half = _Z * float(np.std(scores, ddof=1)) / math.sqrt(n)
  least, most = (0.0, 1.0) if within else (-math.inf, math.inf)
  return mean, max(least, mean - half), min(most, mean + half)
