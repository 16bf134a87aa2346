"""Intervals of scores, and of paired differences of scores, over seeds and problems."""

import math

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.95  # of the intervals


def paired_interval(differences: Float[np.ndarray, 'S P'], level: float = LEVEL) -> tuple[float, float, float]:
  """Return (mean, low, high): the mean of the paired differences of S seeds on P problems, and its interval, of 95 % by default.

  Seeds and problems are both random samples: of training runs, and of the problems of the task. The variance of the mean is
  (MS_seeds + max(MS_problems - MS_residual, 0)) / (S P), with the mean squares (MS) of a two-way layout. Each mean square
  contains the noise of single answers, which this sum counts once. The degrees of freedom, at least S - 1, are those of Hillis
  (Statistics in Medicine 26, 2007) for studies with several readers and cases. With one problem (a measure that is a number per
  run) only seeds vary, and the interval is Student's. The interval is infinite for fewer than two seeds, and if the
  differences vary so that both variances are estimated as 0. Equal differences have an interval without width.
  """
  (S, P), mean = differences.shape, float(np.mean(differences))
  if S < 2:
    return mean, -math.inf, math.inf
  of_seeds, of_problems = differences.mean(axis=1), differences.mean(axis=0)
  seeds, problems = P * of_seeds.var(ddof=1), 0.0
  if P > 1:
    residual = np.sum((differences - of_seeds[:, None] - of_problems + mean) ** 2) / ((S - 1) * (P - 1))
    problems = max(S * of_problems.var(ddof=1) - residual, 0.0)
    rounding = 1e-12 * float(np.square(differences).mean())
    seeds, problems = (part if part > rounding else 0.0 for part in (seeds, problems))
    if not seeds + problems and residual > rounding:
      return mean, -math.inf, math.inf
  freedom = (S - 1) * ((seeds + problems) / seeds) ** 2 if seeds else S - 1
  half = float(stats.t.ppf((1 + level) / 2, freedom) * np.sqrt((seeds + problems) / (S * P)))
  return mean, mean - half, mean + half


def interval_of_one_run(differences: Float[np.ndarray, ' P']) -> tuple[float, float, float]:
  """Return (mean, low, high): the mean of the paired differences on P problems, and its 95 % interval over problems (Student's).

  It says nothing about other seeds. It is infinite for one problem, and for differences that are all equal: these have no
  standard error to go by.
  """
  mean, P = float(np.mean(differences)), len(differences)
  if P < 2 or np.ptp(differences) == 0:
    return mean, -math.inf, math.inf
  half = float(stats.t.ppf((1 + LEVEL) / 2, P - 1) * np.std(differences, ddof=1) / math.sqrt(P))
  return mean, mean - half, mean + half
