"""The comparison of several runs: scores with paired intervals, settings that differ, and curves, as one HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from sprl.config_checks import REWARD_METRICS
from sprl.io import files
from sprl.io.arm_scores import COSTS, ArmRow
from sprl.io.arms import Arm, learned
from sprl.io.html_page import headline, note, page, section_of_charts, table
from sprl.io.metrics import held_out_sets, series
from sprl.io.plots import running_mean
from sprl.io.progress import format_duration
from sprl.io.report_charts import Chart, curve

POINTS = 50  # of a curve that are means over separate steps
HEADS = (
  'arm', 'runs', 'step', 'before', 'score', '95 % interval', 'difference', 'its 95 % interval', 'it covers', 'time of steps',
)  # fmt: skip


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
  Compared('Effective sample size of the ratios', 'share of the tokens', 'sparse/ess'),
  Compared('Sequences vetoed', 'share', 'sparse/veto_fraction'),
  Compared('Mean lag of a token', 'steps', 'async/token_lag_mean'),
  Compared('Throughput of rollouts', 'tokens per second', 'time/tokens_per_second'),
  Compared('Wait for a batch', 'seconds', 'time/rollout'),
  Compared('Update', 'seconds', 'time/learn'),
  Compared('KV cache', 'bytes', 'sparse/cache_bytes'),
)
OWN = ('reward/', 'eval/reward/', 'env/', 'agent/')  # beginnings of the names of metrics that a user's functions report


def write_comparison(arms: Sequence[Arm], rows: Sequence[ArmRow], out: Path) -> Path:
  """Write the page that compares these arms to `out`. `rows` are their scores (`score_rows`). Return the path."""
  files.write_text(out, comparison_html(arms, rows))
  return out


# --- scores -----------------------------------------------------------------------------------------------------------


def score_table(rows: Sequence[ArmRow]) -> list[list[str]]:
  """Return a row of texts for the heads, and one for each arm. `rows` are those of `score_rows`."""
  costs = {name: cost for name, cost in COSTS.items() if any(np.isfinite(row[name]) for row in rows)}
  shown = [[*HEADS, *(head for head, _ in costs.values())]]
  for row in rows:
    of_score = bounds(row['low'], row['high']) if np.isfinite(row['score']) else ''
    of_difference = bounds(row['difference_low'], row['difference_high']) if np.isfinite(row['difference']) else ''
    shown.append([
      row['arm'], str(row['runs']), str(row['step']), number(row['before'], '{:.3f}'), number(row['score'], '{:.3f}'), of_score,
      number(row['difference'], '{:+.3f}'), of_difference, row['covers'], format_duration(row['seconds']),
      *(number(row[name], form) for name, (_, form) in costs.items()),
    ])  # fmt: skip
  return shown


def score_text(rows: Sequence[ArmRow]) -> str:
  """Return the table of scores as aligned text."""
  shown = score_table(rows)
  widths = [max(map(len, column)) for column in zip(*shown)]
  return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in shown)


def number(value: float, form: str) -> str:
  """Return a number as text: '' for NaN, and no minus sign before one that is rounded to 0."""
  text = form.format(value) if np.isfinite(value) else ''
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


def comparison_html(arms: Sequence[Arm], rows: Sequence[ArmRow]) -> str:
  """Return the page. `rows` are the scores of the arms (`score_rows`)."""
  runs = [run for arm in arms for run in arm.runs]
  heads, *shown = score_table(rows)
  found: dict[str, Any] = {}  # id -> what report.js draws there
  window = max(1, max(run.steps for run in runs) // POINTS)
  of_scores = note(
    'A score is that of the newest evaluation that all runs of an arm have. Its interval covers other problems; for an arm with '
    'several seeds it covers other seeds. A difference is that from the first arm, for the same seeds and problems. Its interval '
    'covers other problems and, with two seeds or more, other seeds. It is empty where the newest evaluations cannot be paired: '
    'after other numbers of steps, of other problems, with other settings of evaluation, or not in a checkpoint. One seed that '
    'cannot be paired, for example because its run stopped early, empties the difference.'
  )
  of_arms_ = note('An arm of several runs is drawn as their mean, between their least and largest values.')
  smoothed = note(f'A point is the mean over {window} steps.') if window > 1 else ''
  sections = {
    'Scores': table(heads, shown) + of_scores,
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
  of_arms_ = [learned(arm.runs[0]) for arm in arms]
  names = sorted({name for settings in of_arms_ for name in settings})
  rows = [[name, *(str(settings.get(name, 'not set')) for settings in of_arms_)] for name in names]
  different = [row for row in rows if len(set(row[1:])) > 1]
  if not different:
    return note('The arms have equal settings, except for the seed.')
  return table(['setting', *(arm.name for arm in arms)], different) + note('All others are equal in all arms.')
