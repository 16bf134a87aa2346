"""From the scores of paired runs to an interval and a verdict."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from claims.experiment import ACCURACY, BEFORE, END, SECONDS, START, UNDER, Claim, Comparison, Records
from jaxtyping import Float
from scipy import stats

Verdict = Literal['holds', 'does not hold', 'cannot tell']
LEVEL = 0.95  # of the intervals


class Estimate(NamedTuple):
  """A mean difference and its two-sided interval."""

  mean: float
  low: float
  high: float
  seeds: int


def paired(ours: Float[np.ndarray, 'S P'], theirs: Float[np.ndarray, 'S P']) -> Estimate:
  """Return the mean of ours - theirs over S seeds and P problems, which both have in common.

  Seeds and problems are two samples: of trainings, and of problems that could have been asked. The variance of the mean is that
  of the seeds' means plus that of the problems' means, each divided by their number. It counts the noise of single
  answers twice, so the interval is rather too wide. It has Student's t with S - 1 degrees of freedom. With one problem (a measure
  that is a number per run) only seeds vary. Fewer than two seeds give an infinite interval.
  """
  difference = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
  (S, P), mean = difference.shape, float(difference.mean())
  if S < 2:
    return Estimate(mean, -np.inf, np.inf, S)
  variance = difference.mean(axis=1).var(ddof=1) / S
  if P > 1:
    variance += difference.mean(axis=0).var(ddof=1) / P
  half = float(stats.t.ppf((1 + LEVEL) / 2, S - 1) * np.sqrt(variance))
  return Estimate(mean, mean - half, mean + half, S)


def verdict(found: Estimate, above: float) -> Verdict:
  """Return whether a difference is above a threshold: the whole interval, none of it, or a part."""
  if found.low > above:
    return 'holds'
  return 'does not hold' if found.high < above else 'cannot tell'


def together(verdicts: Sequence[Verdict]) -> Verdict:
  """Return the verdict of a claim that holds if all its comparisons hold."""
  if 'does not hold' in verdicts:
    return 'does not hold'
  return 'cannot tell' if 'cannot tell' in verdicts or not verdicts else 'holds'


def judged(claim: Claim, records: Records) -> list[dict[str, Any]]:
  """Return a row for each comparison of a claim. The first row has the verdict of the claim."""
  found = [estimate(each, records) for each in claim.comparisons]
  verdicts: list[Verdict] = [verdict(one, each.above) for one, each in zip(found, claim.comparisons)]
  rows = []
  for each, one, of_one in zip(claim.comparisons, found, verdicts):
    rows.append(
      {
        'claim': claim.statement if not rows else '',
        'verdict': together(verdicts) if not rows else '',
        'comparison': compared(each),
        'above': each.above,
        'mean': one.mean,
        'low': one.low,
        'high': one.high,
        'seeds': one.seeds,
        'holds': of_one,
      }
    )
  return rows


def compared(each: Comparison) -> str:
  """Return the words of a comparison: `a - b`, with the measures if they are not the accuracy."""
  ours, theirs = each.measures
  if ours != theirs:
    return f'{each.arm} ({ours}) - {each.against} ({theirs})'
  return f'{each.arm} - {each.against}' + ('' if ours == ACCURACY else f' ({ours})')


def estimate(each: Comparison, records: Records) -> Estimate:
  """Return the paired difference of a comparison, over the seeds that both arms have."""
  sides = (each.arm, each.against)
  ours, theirs = (records.get(other if side == BEFORE else side, {}) for side, other in zip(sides, reversed(sides)))
  seeds = sorted(ours.keys() & theirs.keys())
  if not seeds:
    return Estimate(float('nan'), -np.inf, np.inf, 0)
  runs = zip((ours, theirs), sides, each.measures)
  return paired(*(np.array([values(of[seed], side, measure) for seed in seeds]) for of, side, measure in runs))


def values(found: Mapping[str, Any], side: str, measure: str) -> list[float]:
  """Return the numbers of a run that a comparison compares: a score for each problem, or one number."""
  if measure == ACCURACY:
    return found['before' if side == BEFORE else 'scores']
  if measure.startswith(UNDER):
    return found['under'][measure.removeprefix(UNDER)]
  if measure.endswith((START, END)):
    curve = found['curves'][measure.removesuffix(START).removesuffix(END)]
    part = -(-len(curve) // 5)
    several = curve[:part] if measure.endswith(START) else curve[-part:]
    return [float(np.mean([value for value in several if value is not None]))]
  if measure.startswith(SECONDS):
    reached = np.array(found['accuracy']['mean'][1:]) >= float(measure.removeprefix(SECONDS))
    return [float(np.log(found['clock'][int(reached.argmax()) if reached.any() else -1]))]
  return [found['measures'][measure]]
