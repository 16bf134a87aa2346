"""The scores of arms of runs, with paired intervals.

An arm is compared with the first one, seed by seed and problem by problem, so that what both share cancels. A score is that of
the newest evaluation that all runs of the arm have.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from sprl.config import in_sections
from sprl.config_checks import names_of_problems, weighted
from sprl.io.arms import Arm, Recorded, by_seed
from sprl.io.metrics import series
from sprl.io.paired import interval_of_one_run, paired_interval

COSTS = {  # metric -> head of its column, form
  'time/tokens_per_second': ('tokens per second', '{:,.0f}'),
  'sparse/bytes_saving': ('KV cache saved', '{:.0%}'),
  'rollout_corr/k3_kl': ('mismatch (k3)', '{:.2g}'),
}

type ArmRow = dict[str, Any]  # the scores of an arm by name, as `score_rows` returns them


class Score(NamedTuple):
  """How an arm scores: means over seeds.

  The last four are NaN if no evaluation is in all its runs. An interval is NaN too if it is not known.
  """

  step: int  # of the newest evaluation that all runs have; without one, the fewest finished steps
  before: float = np.nan  # mean score of the first evaluation that all have
  mean: float = np.nan  # and of the newest one
  low: float = np.nan
  high: float = np.nan


class Difference(NamedTuple):
  """How much an arm scores above another one."""

  mean: float
  low: float
  high: float
  of: str  # what the interval covers, or why there is none


def score_rows(arms: Sequence[Arm]) -> list[ArmRow]:
  """Return how each arm scores, its difference from the first arm, and what its steps cost. What is not known is NaN."""
  rows: list[ArmRow] = []
  for arm in arms:
    scored, differs = score(arm), None if arm is arms[0] else difference(arm, arms[0])
    mean, low, high, covers = differs or (np.nan, np.nan, np.nan, '')
    rows.append({
      'arm': arm.name, 'runs': len(arm.runs), 'seeds': len(by_seed(arm)),
      'step': scored.step, 'before': scored.before, 'score': scored.mean, 'low': scored.low, 'high': scored.high,
      'difference': mean, 'difference_low': low, 'difference_high': high, 'covers': covers,
      'seconds': seconds_of_steps(arm), **{name: median(arm, name) for name in COSTS},
    })  # fmt: skip
  return rows


def seconds_of_steps(arm: Arm) -> float:
  """Return the seconds that the steps of a run took, without evaluations, as the mean over the runs."""
  return float(np.mean([60 * max(run.minutes.values()) for run in arm.runs]))


def score(arm: Arm) -> Score:
  """Return how an arm scores, with a 95 % interval: over seeds, or with one run over its problems.

  The interval of several runs with one seed is not known.
  """
  steps = set.intersection(*(set(run.evaluations) for run in arm.runs))
  if not steps:
    return Score(min(run.steps for run in arm.runs))
  seeds = by_seed(arm).values()
  first, of_seeds = (
    [np.mean([run.evaluations[step]['eval/avg@k'] for run in runs]) for runs in seeds] for step in (min(steps), max(steps))
  )
  before, after = float(np.mean(first)), float(np.mean(of_seeds))
  last, low, high = arm.runs[0].evaluations[max(steps)], np.nan, np.nan
  if len(of_seeds) > 1:
    _, low, high = paired_interval(np.array(of_seeds)[:, None])
  elif len(arm.runs) == 1:
    low, high = last.get('eval/low', np.nan), last.get('eval/high', np.nan)
  return Score(max(steps), before, after, low, high)


def difference(arm: Arm, other: Arm) -> Difference | None:
  """Return how much an arm scores above another one, for the seeds that both have; None if none of them is comparable.

  If only some are, the numbers are NaN, and `of` says so: often such runs ended early because they failed, and the
  others would look better without them. Several runs of a seed count as their mean. The newest evaluations may be
  of a later step than the score, if a run of another seed has ended early or goes on; `of` then names the step.
  """
  ours, theirs = by_seed(arm), by_seed(other)
  of_seeds, steps, both = [], set(), ours.keys() & theirs.keys()
  for seed in both:
    found = [comparable(*runs) for runs in product(ours[seed], theirs[seed])]
    scored = [each for each in found if each]
    if len(scored) == len(found):
      of_seeds.append(scored)
      steps.add(ours[seed][0].newest.get('step'))
  if 0 < len(of_seeds) < len(both):
    return Difference(np.nan, np.nan, np.nan, f'{len(of_seeds)} of {len(both)} seeds are comparable')
  problems = sorted(set.intersection(*(set(each) for scored in of_seeds for each in scored))) if of_seeds else []
  if not problems or len(steps) > 1:
    return None
  paired = np.array([[np.mean([each[number] for each in scored]) for number in problems] for scored in of_seeds])
  (step,) = steps
  later = '' if {score(each).step for each in (arm, other)} == {step} else f', after step {step}'
  if len(paired) == 1:
    return Difference(*interval_of_one_run(paired[0]), f'{len(problems)} problems{later}')
  return Difference(*paired_interval(paired), f'{len(problems)} problems, {len(paired)} seeds{later}')


def comparable(run: Recorded, other: Recorded) -> dict[int, float] | None:
  """Return the differences of the scores of two runs by the number of the problem; None if they cannot be paired.

  Their newest evaluations must be in checkpoints, after equally many steps, on the same problems, drawn and graded in the same
  way. The problems are the same if their settings are, and the questions and answers of the first ones, which a run records.
  """
  ours, theirs = run.newest, other.newest
  if not ours or not theirs or ours['step'] != theirs['step'] or _asked(run) != _asked(other):
    return None
  first, second = _by_problem(ours), _by_problem(theirs)
  both = [number for number in first if number in second]
  shown = [problems for n in both if None not in (problems := (first[n].problem, second[n].problem))]
  unnumbered = 'numbers' not in ours or 'numbers' not in theirs  # an older version
  if not both or (unnumbered and len(first) != len(second)) or any(one != two for one, two in shown):
    return None
  return {n: first[n].score - second[n].score for n in both}


class Scored(NamedTuple):
  """The score of a held-out problem."""

  score: float
  problem: tuple[Any, Any] | None  # what identifies it; None: no sample is recorded


def _by_problem(evaluation: Mapping[str, Any]) -> dict[int, Scored]:
  """Return the scores of an evaluation by the number of the problem. The first problems have samples."""
  scores = evaluation.get('scores', [])
  numbers, rows = evaluation.get('numbers', range(len(scores))), evaluation.get('samples', [])
  shown = [*map(_problem, rows), *[None] * len(scores)]
  return {number: Scored(score, problem) for number, score, problem in zip(numbers, scores, shown)}


def _asked(run: Recorded) -> dict[str, Any]:
  """Return what decides which problems an evaluation asks, how answers are drawn and what grades them.

  Of several rewards only the first counts in a score, without its weight.
  """
  keys = ('eval', *(f'task.{name}' for name in names_of_problems('rows')))
  apart = ('eval.every', 'task.grader', 'task.rewards')
  settings = {name: value for name, value in run.settings.items() if in_sections(name, keys) and name not in apart}
  rewards = json.loads(run.settings['task.rewards'])
  first = weighted(rewards[0])[0] if rewards else run.settings['task.grader']
  return settings | {'grader': first, 'source': run.inputs.get(f'source of {first}')}


def _problem(row: Mapping[str, Any]) -> tuple[Any, Any]:
  """Return what identifies the problem of a sample. The question is part of the prompt, which a chat template may change."""
  return row.get('answer'), None if row.get('answer') else row.get('prompt')


def median(arm: Arm, metric: str) -> float:
  """Return the mean over runs of the median of a metric; NaN if no run has it."""
  medians = [float(np.nanmedian(values)) for run in arm.runs if np.isfinite(values := series(run.records, metric)[1]).any()]
  return float(np.mean(medians)) if medians else np.nan
