"""From the scores of paired runs to an interval and a verdict."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from claims.experiment import ACCURACY, BEFORE, END, SECONDS, START, UNDER, Claim, Comparison, Experiment, Records
from jaxtyping import Float

from sprl.io.paired import LEVEL, paired_interval

Verdict = Literal['holds', 'does not hold', 'cannot tell']


class Estimate(NamedTuple):
  """A mean difference and its two-sided interval."""

  mean: float
  low: float
  high: float


def interval(differences: Float[np.ndarray, 'S P'], level: float = LEVEL) -> Estimate:
  """Return the mean of the paired differences of S seeds on P problems, and its interval over both (sprl/io/paired.py)."""
  return Estimate(*paired_interval(differences, level))


def over_models(of_start: Sequence[float]) -> Estimate:
  """Return the mean of the warm starts' means, and Student's interval if the warm starts are a sample of models."""
  return interval(np.array(of_start)[:, None])


def verdict(found: Estimate, above: float, wider: Estimate | None = None) -> Verdict:
  """Return `holds` if the whole interval is above the threshold, `does not hold` if it is below, else `cannot tell`.

  `wider` is the interval that has to be below the threshold for `does not hold`, by default `found`.
  """
  if found.low > above:
    return 'holds'
  return 'does not hold' if (wider or found).high < above else 'cannot tell'


def together(verdicts: Sequence[Verdict]) -> Verdict:
  """Return the verdict of a claim that holds if all its comparisons hold."""
  if 'does not hold' in verdicts:
    return 'does not hold'
  return 'cannot tell' if 'cannot tell' in verdicts or not verdicts else 'holds'


def judged(claim: Claim, experiment: Experiment, records: Records) -> list[dict[str, Any]]:
  """Return a row for each comparison of a claim. The first row has the verdict of the claim.

  It is not decided if what it takes as given (`Claim.given`) does not hold.
  """
  k = len(claim.comparisons)
  rows: list[dict[str, Any]] = [
    {'claim': '', 'verdict': ''} | measured(each, experiment, records, k) for each in claim.comparisons
  ]
  given = claim.given is None or measured(claim.given, experiment, records)['verdict of the comparison'] == 'holds'
  of_claim = together([row['verdict of the comparison'] for row in rows]) if given else 'cannot tell'
  rows[0] |= {'claim': claim.statement, 'verdict': of_claim}
  return rows


def measured(each: Comparison, experiment: Experiment, records: Records, several: int = 1) -> dict[str, Any]:
  """Return the mean difference of a comparison with its interval, for each warm start, and its verdict.

  `several` is the number of comparisons of its claim. One of them below the threshold refutes the claim, so the error is divided
  by their number there (Bonferroni). That all are above needs no correction.

  A comparison is decided only if all seeds of the plan are there, and the seeds of each warm start have their mean on the same
  side of the threshold.
  """
  starts, found = len(experiment.task.warm), differences(each, records)
  of_start = [[np.mean(difference) for seed, difference in found.items() if seed % starts == i] for i in range(starts)]
  parts = [float(np.mean(part)) for part in of_start if part]
  scores, nothing = np.array(list(found.values())), Estimate(float('nan'), -np.inf, np.inf)
  one, wider = (interval(scores, level) if found else nothing for level in (LEVEL, 1 - (1 - LEVEL) / several))
  agree = len({part > each.above for part in parts}) == 1
  decided = len(found) == experiment.seeds and agree
  return {
    'comparison': compared(each),
    'above': each.above,
    'mean': one.mean,
    'low': one.low,
    'high': one.high,
    'seeds': len(found),
    'by warm start': parts,
    'verdict of the comparison': verdict(one, each.above, wider) if decided else 'cannot tell',
  }


def compared(each: Comparison) -> str:
  """Return the words of a comparison: `a - b`, with the measures if they are not the accuracy."""
  ours, theirs = each.measures
  if ours != theirs:
    return f'{each.arm} ({ours}) - {each.against} ({theirs})'
  return f'{each.arm} - {each.against}' + ('' if ours == ACCURACY else f' ({ours})')


def differences(each: Comparison, records: Records) -> dict[int, Float[np.ndarray, 'P']]:
  """Return the paired differences of a comparison by seed, for the seeds of which both arms have the measure."""
  sides = (each.arm, each.against)  # the scores of BEFORE are in the runs of the other arm
  ours, theirs = (records.get(other if side == BEFORE else side, {}) for side, other in zip(sides, reversed(sides)))
  found = {}
  for seed in sorted(ours.keys() & theirs.keys()):
    first, second = (np.array(values(of[seed], side, name)) for of, side, name in zip((ours, theirs), sides, each.measures))
    if not np.isnan([*first, *second]).any():
      found[seed] = first - second
  return found


def values(found: Mapping[str, Any], side: str, measure: str) -> list[float]:
  """Return what a comparison compares: a score for each problem, or one number (of SECONDS the logarithm); NaN if there is none.

  A run that does not reach a score has no time to that score. A run that a guard stopped may lack a series.
  """
  if measure == ACCURACY:
    return found['before' if side == BEFORE else 'scores']
  if measure.startswith(UNDER):
    return found['under'][measure.removeprefix(UNDER)]
  if measure.endswith((START, END)):
    curve = found['curves'].get(measure.removesuffix(START).removesuffix(END), [])
    part = -(-len(curve) // 5)
    several = [value for value in (curve[:part] if measure.endswith(START) else curve[-part:]) if value is not None]
    return [float(np.mean(several)) if several else np.nan]
  if measure.startswith(SECONDS):
    reached = np.array(found['accuracy']['mean'][1:]) >= float(measure.removeprefix(SECONDS))
    return [float(np.log(found['clock'][int(reached.argmax())])) if reached.any() else np.nan]
  return [found['measures'].get(measure, np.nan)]
