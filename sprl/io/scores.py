"""How well a model does on held-out problems, and how sure one can be: pass@k, and 95 % confidence intervals of a mean."""

import math

import numpy as np
from jaxtyping import Float, Int

_Z = 1.959963984540054  # the normal distribution's 97.5 % quantile


def pass_at_k(correct: Int[np.ndarray, ' N'], n: int, k: int) -> Float[np.ndarray, ' N']:
  """Chance, for each problem, that k samples hold a right one, from `correct` right ones among n samples drawn.

  Unbiased for any k <= n (Chen et al. 2021, arXiv 2107.03374, section 2.1): 1 - C(n - c, k) / C(n, k), which is 1 minus the
  share of k-subsets with none right.

  Raises ValueError for k outside 1..n or a count outside 0..n.
  """
  if not 1 <= k <= n:
    raise ValueError(f'pass@{k} of {n} samples a problem: k must be between 1 and {n}')
  if not all(0 <= c <= n for c in correct):
    raise ValueError(f'correct = {correct}: every count must be between 0 and {n}')
  return np.array([1.0 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct], float)


def interval(scores: Float[np.ndarray, ' N']) -> tuple[float, float, float]:
  """Mean and 95 % confidence interval (mean, low, high) of one score a problem; N >= 1 problems.

  Problems are the independent unit: the samples of one problem are correlated, so average them first. Scores that are all 0 or
  1 get Wilson's interval, which stays inside [0, 1] and has width even when all are equal; others the normal one, mean +- 1.96
  standard errors over problems (ddof 1), cut to [0, 1] where all scores are in it, which for N = 1 is unbounded.

  Raises ValueError for no scores.
  """
  n = len(scores)
  if n == 0:
    raise ValueError('no scores: an interval needs at least one problem')
  mean = float(np.mean(scores))
  if np.isin(scores, (0.0, 1.0)).all():
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return mean, max(0.0, centre - half), min(1.0, centre + half)
  if n == 1:
    return mean, -math.inf, math.inf
  half = _Z * float(np.std(scores, ddof=1)) / math.sqrt(n)
  least, most = (0.0, 1.0) if np.min(scores) >= 0 and np.max(scores) <= 1 else (-math.inf, math.inf)
  return mean, max(least, mean - half), min(most, mean + half)
