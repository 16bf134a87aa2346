"""The comparison of several runs: scores with paired intervals, settings that differ, and curves, as one HTML file.

Runs that differ only in the seed form an arm: they have the same settings, rewards and rows. An arm is compared with the first
one, seed by seed and problem by problem, so that what both share cancels. A score is that of the newest evaluation that all runs
of the arm have.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import escape, glob
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from sprl.config import PLACES, Run, SettingsError, to_dict, within
from sprl.config_checks import GRADING_COSTS, REWARD_METRICS, names_of_problems, weighted
from sprl.foreign import split_reference
from sprl.io import files
from sprl.io.checkpoint import CheckpointError, read_record
from sprl.io.config_file import read_located
from sprl.io.html_page import duration, headline, note, page, section_of_charts, table
from sprl.io.metrics import held_out_sets, read_metrics, series
from sprl.io.paired import interval_of_one_run, paired_interval
from sprl.io.plots import running_mean
from sprl.io.report_charts import PARTS, Chart, Records, curve
from sprl.io.starts import read_starts
from sprl.io.trackers import flat

# Settings that do not change what a run learns, apart from the rounding of its numbers.
NOT_LEARNED = (
  'seed', 'export', 'log', 'checkpoint', 'ledger', 'patience', 'model.remat', 'packing.score_chunk', *PLACES, *GRADING_COSTS,
)  # fmt: skip
POINTS = 50  # of a curve that are means over separate steps
HEADS = ('arm', 'runs', 'step', 'before', 'score', '95 % interval', 'difference', 'its 95 % interval', 'it covers')
COSTS = {  # metric -> head of its column, form
  'time/tokens_per_second': ('tokens per second', '{:,.0f}'),
  'sparse/bytes_saving': ('KV cache saved', '{:.0%}'),
  'rollout_corr/k3_kl': ('mismatch (k3)', '{:.2g}'),
}


class Compared(NamedTuple):
  """A chart of one metric, with a curve for each arm."""

  title: str
  unit: str
  metric: str
  log: bool = False


CURVES = (
  Compared('Sampled reward', 'mean reward', 'reward/mean'),
  Compared('Completion length', 'tokens', 'completion/length_mean'),
  Compared('Entropy', 'nats per token', 'policy/entropy'),
  Compared('Gradient norm', 'before clipping', 'update/grad_norm'),
  Compared('Mismatch of sampler and learner', 'KL (k3), nats per token', 'rollout_corr/k3_kl', log=True),
  Compared('Effective sample size', 'share of the batch', 'rollout_corr/rollout_is_eff_sample_size'),
  Compared('Sequences vetoed', 'share', 'sparse/veto_fraction'),
  Compared('Mean lag of a token', 'steps', 'async/token_lag_mean'),
  Compared('Throughput of rollouts', 'tokens per second', 'time/tokens_per_second'),
  Compared('Wait for a batch', 'seconds', 'time/rollout'),
  Compared('Update', 'seconds', 'time/learn'),
  Compared('KV cache', 'bytes', 'sparse/cache_bytes'),
)
OWN = ('reward/', 'eval/reward/', 'env/', 'agent/')  # beginnings of the names of metrics that a user's functions report


@dataclass(frozen=True)
class Recorded:
  """A run as its work directory records it."""

  workdir: Path
  name: str  # the shortest end of its path that no other compared run has
  settings: dict[str, Any]  # with dotted names
  inputs: dict[str, str]  # checksums of a user's functions by name, and of the rows that Python gave
  records: Records

  @property
  def steps(self) -> int:
    """The finished steps."""
    return max(record['step'] for record in self.records)

  @cached_property
  def evaluations(self) -> dict[int, Mapping[str, Any]]:
    """The evaluations by step."""
    return {record['step']: record for record in self.records if 'eval/avg@k' in record}

  @cached_property
  def newest(self) -> dict[str, Any]:
    """The newest evaluation, with the score of each problem and some samples; {} if no checkpoint has it."""
    step, folder = max(self.evaluations, default=0), self.workdir / 'checkpoints'
    try:
      after = read_record(folder, step).extra.get('after') if step else None
    except CheckpointError:  # there is none, or it is damaged
      return {}
    return {'step': step, **after} if after else {}

  @cached_property
  def minutes(self) -> dict[int, float]:
    """The minutes from the first step to the end of each step, without those of evaluations."""
    taken = {r['step']: sum(r['time'].get(part, 0.0) for part in PARTS) / 60 for r in self.records if 'time' in r}
    return dict(zip(taken, np.cumsum(list(taken.values())).tolist())) | {0: 0.0}


class Arm(NamedTuple):
  """Runs that differ only in the seed."""

  name: str
  runs: list[Recorded]


class Score(NamedTuple):
  """How an arm scores. The last four are NaN if no evaluation is in all its runs; an interval is NaN too if it is not known."""

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
  of: str  # what the interval covers


def write_comparison(arms: Sequence[Arm], out: Path) -> Path:
  """Write the page that compares these arms to `out`. Return the path."""
  files.write_text(out, comparison_html(arms))
  return out


def matching(setting: str, name: str) -> list[Path]:
  """Return the folder of this name, or those that a name with `*` matches and that hold a run.

  Raises SettingsError, which begins with `setting`, if it matches none.
  """
  if '*' not in name:
    return [files.local_folder(setting, name)]
  pattern = escape(name).replace('[*]', '*')  # only `*` has a meaning
  found = [Path(path) for path in sorted(glob(pattern)) if (Path(path) / 'config.json').exists()]
  if not found:
    raise SettingsError(f'{setting} = {name!r}: expected a name that matches the folder of a run; it matches none')
  return found


def read_runs(workdirs: Sequence[Path], setting: str) -> list[Recorded]:
  """Return the runs in these work directories, in order. `setting` names them in messages.

  Raises FileNotFoundError for a folder without a run. Raises SettingsError for fewer than two runs, and for a run that has logged
  nothing.
  """
  folders = list(dict.fromkeys(workdir.resolve() for workdir in workdirs))
  if len(folders) < 2:
    raise SettingsError(f'{setting} = {", ".join(map(str, workdirs)) or "[]"}: expected at least two different runs to compare')
  found = []
  for folder, name in zip(folders, short_names(folders)):
    settings, records = flat(read_located(folder)), read_metrics(folder)
    if not records:
      raise SettingsError(f'{folder}: expected a run that has logged an evaluation or a step; metrics.jsonl is empty')
    found.append(Recorded(folder, name, {**flat(to_dict(Run())), **settings}, inputs_of(folder), records))
  return found


def inputs_of(workdir: Path) -> dict[str, str]:
  """Return the checksums that the last start of a run recorded: of a user's functions, and of rows that are in no file."""
  last = (read_starts(workdir)['starts'] or [{}])[-1]
  rows = {'rows': last['rows']} if last.get('rows') else {}
  files_of = {
    name: os.path.join(last.get('folder', ''), name) if split_reference(name) else name for name in last.get('graders', {})
  }
  return {f'source of {files_of[name]}': f'checksum {found}' for name, found in last.get('graders', {}).items()} | rows


def short_names(folders: Sequence[Path]) -> list[str]:
  """Return the shortest end of each path that no other one has."""
  names = ['/'.join(folder.parts[-1:]) for folder in folders]
  for length in range(2, max(len(folder.parts) for folder in folders) + 1):
    count = Counter(names)
    names = [name if count[name] == 1 else '/'.join(folder.parts[-length:]) for name, folder in zip(names, folders)]
  return names


def arms_of(runs: Sequence[Recorded]) -> list[Arm]:
  """Return the arms, in the order of their first runs. An arm has the name of its run, or what the names of its runs share."""
  groups: dict[tuple[Any, ...], list[Recorded]] = {}
  for run in runs:
    groups.setdefault(tuple(sorted((name, repr(value)) for name, value in _learned(run).items())), []).append(run)
  shared = [group[0].name if len(group) == 1 else _common_start([run.name for run in group]) for group in groups.values()]
  made = []
  for name, group in zip(shared, groups.values()):
    others = {run.name for run in runs} - {run.name for run in group}
    made.append(Arm(name if name and shared.count(name) == 1 and name not in others else group[0].name, group))
  return made


def _common_start(names: Sequence[str]) -> str:
  """Return what all names begin with, without the digits of a seed, and then the separators, at its end."""
  start = ''.join(first for first, *_ in takewhile(lambda letters: len(set(letters)) == 1, zip(*names)))
  return start.rstrip('0123456789').rstrip('-_./ @')


def _learned(run: Recorded) -> dict[str, Any]:
  """Return what two runs of an arm share: their inputs, and all settings but NOT_LEARNED, which has the seed."""
  return run.inputs | {f'config.{name}': value for name, value in run.settings.items() if not within(name, NOT_LEARNED)}


# --- scores -----------------------------------------------------------------------------------------------------------


def score_table(arms: Sequence[Arm]) -> list[list[str]]:
  """Return a row of texts for the heads, and one for each arm: its scores, its difference from the first arm, and its costs."""
  costs = {name: cost for name, cost in COSTS.items() if any(_measured(arm, name) is not None for arm in arms)}
  rows = [[*HEADS, 'time of steps', *(head for head, _ in costs.values())]]
  for arm in arms:
    scored, differs = score(arm), None if arm is arms[0] else difference(arm, arms[0])
    means = [f'{mean:.3f}' if np.isfinite(mean) else '' for mean in (scored.before, scored.mean)]
    of_score = [str(scored.step), *means, bounds(scored.low, scored.high) if means[1] else '']
    of_difference = ['', '', ''] if differs is None else [f'{differs.mean:+.3f}', bounds(differs.low, differs.high), differs.of]
    measured = [_measured(arm, name) for name in costs]
    rows.append([
      arm.name, str(len(arm.runs)), *of_score, *of_difference, duration(seconds_of_steps(arm)),
      *('' if value is None else unsigned_zero(form.format(value)) for value, (_, form) in zip(measured, costs.values())),
    ])  # fmt: skip
  return rows


def score_text(arms: Sequence[Arm]) -> str:
  """Return the table of scores as aligned text."""
  rows = score_table(arms)
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def score_rows(arms: Sequence[Arm]) -> list[dict[str, Any]]:
  """Return the numbers of the table of scores as one dictionary for each arm, for a data frame. What is not known is NaN."""
  rows = []
  for arm in arms:
    scored, differs = score(arm), None if arm is arms[0] else difference(arm, arms[0])
    mean, low, high, covers = differs or (np.nan, np.nan, np.nan, '')
    costs = {name: _measured(arm, name) for name in COSTS}
    rows.append({
      'arm': arm.name, 'runs': len(arm.runs), 'seeds': len(_by_seed(arm)),
      'step': scored.step, 'before': scored.before, 'score': scored.mean, 'low': scored.low, 'high': scored.high,
      'difference': mean, 'difference_low': low, 'difference_high': high, 'covers': covers,
      'seconds': seconds_of_steps(arm), **{name: np.nan if value is None else value for name, value in costs.items()},
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
  found = [run.evaluations for run in arm.runs]
  before, after = (float(np.mean([each[step]['eval/avg@k'] for each in found])) for step in (min(steps), max(steps)))
  of_seeds = [np.mean([run.evaluations[max(steps)]['eval/avg@k'] for run in runs]) for runs in _by_seed(arm).values()]
  last, low, high = found[0][max(steps)], np.nan, np.nan
  if len(of_seeds) > 1:
    _, low, high = paired_interval(np.array(of_seeds)[:, None])
  elif len(arm.runs) == 1:
    low, high = last.get('eval/low', np.nan), last.get('eval/high', np.nan)
  return Score(max(steps), before, after, low, high)


def difference(arm: Arm, other: Arm) -> Difference | None:
  """Return how much an arm scores above another one, for the seeds that both have; None if no two runs are comparable.

  Several runs of a seed count as their mean.
  """
  ours, theirs = _by_seed(arm), _by_seed(other)
  of_seeds, steps = [], set()
  for seed in ours.keys() & theirs.keys():
    found = [comparable(*runs) for runs in zip(ours[seed], theirs[seed])]
    if scored := [each for each in found if each]:
      of_seeds.append(scored)
      steps.add(ours[seed][0].newest.get('step'))
  problems = sorted(set.intersection(*(set(each) for scored in of_seeds for each in scored))) if of_seeds else []
  if not problems or len(steps) > 1:
    return None
  paired = np.array([[np.mean([each[number] for each in scored]) for number in problems] for scored in of_seeds])
  if len(paired) == 1:
    return Difference(*interval_of_one_run(paired[0]), f'{len(problems)} problems')
  return Difference(*paired_interval(paired), f'{len(problems)} problems, {len(paired)} seeds')


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
  settings = {name: value for name, value in run.settings.items() if within(name, keys) and name not in apart}
  rewards = json.loads(run.settings['task.rewards'])
  first = weighted(rewards[0])[0] if rewards else run.settings['task.grader']
  return settings | {'grader': first, 'source': run.inputs.get(f'source of {first}')}


def _problem(row: Mapping[str, Any]) -> tuple[Any, Any]:
  """Return what identifies the problem of a sample. The question is part of the prompt, which a chat template may change."""
  return row.get('answer'), None if row.get('answer') else row.get('prompt')


def _by_seed(arm: Arm) -> dict[Any, list[Recorded]]:
  """Return the runs of an arm by seed."""
  found: dict[Any, list[Recorded]] = {}
  for run in arm.runs:
    found.setdefault(run.settings['seed'], []).append(run)
  return found


def _measured(arm: Arm, metric: str) -> float | None:
  """Return the mean over runs of the median of a metric; None if no run has it."""
  medians = [float(np.nanmedian(values)) for run in arm.runs if np.isfinite(values := series(run.records, metric)[1]).any()]
  return float(np.mean(medians)) + 0.0 if medians else None


def unsigned_zero(text: str) -> str:
  """Return a number as text, without the sign if it is rounded to 0."""
  return text if set('123456789') & set(text) else text.removeprefix('-')


def bounds(low: float, high: float) -> str:
  """Return the bounds of an interval as text. Equal scores have no variance to go by."""
  return f'{low:.3f} to {high:.3f}' if np.isfinite([low, high]).all() and low < high else 'unknown'


# --- curves -----------------------------------------------------------------------------------------------------------


def score_charts(arms: Sequence[Arm]) -> list[Chart]:
  """Return the charts of the scores of each held-out set: over the steps, and over the minutes that the steps took."""
  sets = held_out_sets([record for arm in arms for run in arm.runs for record in run.records])
  made: list[Chart] = []
  for metric, label in sets.items():
    title = f'{label[0].upper()}{label[1:]}'
    made.append({'title': title, 'unit': 'mean reward', 'series': of_arms(arms, metric)})
    by_time = [by_minutes(arm, metric, color=i) for i, arm in enumerate(arms)]
    made.append(
      {'title': f'{title}, by time', 'unit': 'mean reward', 'across': 'minutes', 'series': [c for c in by_time if c['x']]}
    )
  return made


def curve_charts(arms: Sequence[Arm], window: int) -> list[Chart]:
  """Return the charts of CURVES and of the users' own metrics, without those that are 0 in all runs.

  A point is the mean over `window` steps.
  """
  known = {f'reward/{name}' for name in REWARD_METRICS}
  logged = {name for arm in arms for run in arm.runs for record in run.records for name in record}
  own = [Compared(name, 'mean', name) for name in sorted(logged - known) if name.startswith(OWN)]
  made = [(each, of_arms(arms, each.metric, 1 if each.metric.startswith('eval/') else window)) for each in (*CURVES, *own)]
  return [
    {'title': each.title, 'unit': each.unit, 'series': curves, 'log': each.log}
    for each, curves in made
    if any(any(drawn['y']) for drawn in curves)
  ]


def of_arms(arms: Sequence[Arm], metric: str, window: int = 1) -> list[Chart]:
  """Return a curve of a metric for each arm that has it: the mean over its runs, with their least and largest values.

  A value is the mean over a step and the `window` - 1 steps before it.
  """
  made = []
  for i, arm in enumerate(arms):
    steps, values = shared(arm, metric)
    if len(steps):
      values = np.stack([running_mean(each, window) for each in values])
      several = {'low': values.min(axis=0), 'high': values.max(axis=0)} if len(values) > 1 else {}
      made.append(curve(arm.name, steps, values.mean(axis=0), i, 'line', **several))
  return [each for each in made if each['x']]


def shared(arm: Arm, metric: str) -> tuple[np.ndarray, Float[np.ndarray, 'R N']]:
  """Return the steps [N] at which all runs of an arm that have a metric have it, and its values by run."""
  found = [dict(zip(steps.tolist(), values)) for run in arm.runs for steps, values in [series(run.records, metric)] if len(steps)]
  steps = sorted(set.intersection(*(set(each) for each in found))) if found else []
  return np.array(steps, int), np.array([[each[step] for step in steps] for each in found], float).reshape(len(found), len(steps))


def by_minutes(arm: Arm, metric: str, color: int) -> Chart:
  """Return the curve of a metric of an arm over the minutes that its steps took, means over its runs."""
  steps, values = shared(arm, metric)
  clocks = [run.minutes for run in arm.runs]
  timed = np.array([all(step in clock for clock in clocks) for step in steps.tolist()], bool)
  minutes = np.array([np.mean([clock[step] for clock in clocks]) for step in steps[timed].tolist()], float)
  return curve(arm.name, minutes.round(3), values[:, timed].mean(axis=0) if len(values) else minutes, color=color)


# --- the page ---------------------------------------------------------------------------------------------------------


def comparison_html(arms: Sequence[Arm]) -> str:
  """Return the page."""
  runs = [run for arm in arms for run in arm.runs]
  heads, *rows = score_table(arms)
  found: dict[str, Any] = {}  # id -> what report.js draws there
  window = max(1, max(run.steps for run in runs) // POINTS)
  of_scores = note(
    'A score is that of the newest evaluation that all runs of an arm have. Its interval covers other problems; for an arm with '
    'several seeds it covers other seeds. A difference is that from the first arm, for the same seeds and problems. Its interval '
    'covers other problems and, with two seeds or more, other seeds. It is empty where the newest evaluations cannot be paired: '
    'after other numbers of steps, of other problems, with other settings of evaluation, or not in a checkpoint.'
  )
  of_arms_ = note('An arm of several runs is drawn as their mean, between their least and largest values.')
  smoothed = note(f'A point is the mean over {window} steps.') if window > 1 else ''
  sections = {
    'Scores': table(heads, rows) + of_scores,
    'Settings': differing_settings(arms),
    'Held-out scores': of_arms_ + section_of_charts(found, 'scores', score_charts(arms), 'No evaluation is logged.'),
    'Curves': smoothed + section_of_charts(found, 'curves', curve_charts(arms, window), 'No step is finished yet.'),
    'Runs': table(
      ['run', 'arm', 'seed', 'steps', 'work directory'],
      [[r.name, arm.name, str(r.settings['seed']), str(r.steps), str(r.workdir)] for arm in arms for r in arm.runs],
    ),
  }
  title, facts = f'Comparison of {len(runs)} runs', [arm.name for arm in arms]
  return page(title, headline(title, facts), sections, found, 'metrics.jsonl in each work directory')


def differing_settings(arms: Sequence[Arm]) -> str:
  """Return a table of the settings and inputs in which arms differ."""
  of_arms_ = [_learned(arm.runs[0]) for arm in arms]
  names = sorted({name for settings in of_arms_ for name in settings})
  rows = [[name, *(str(settings.get(name, 'not set')) for settings in of_arms_)] for name in names]
  different = [row for row in rows if len(set(row[1:])) > 1]
  if not different:
    return note('The arms have equal settings, except for the seed.')
  return table(['setting', *(arm.name for arm in arms)], different) + note('All others are equal in all arms.')
