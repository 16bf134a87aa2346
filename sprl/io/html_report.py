"""The report of a run as one HTML file: curves, evaluations, mismatch, samples, timeline and warnings.

Python writes all text and tables; sprl/web/report.js draws the charts and the timeline from data in the page (html_page.py).
Everything that a model wrote is escaped.

Works for a run in progress, and for one without ledger, timeline or samples: the section says why it is empty.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from sprl.config import Run, SettingsError, to_dict
from sprl.config_reader import resolve
from sprl.guards.checks import CHECKS, History, tries
from sprl.guards.stop import Streaks, sentinels
from sprl.io import files
from sprl.io.config_file import read_config
from sprl.io.html_page import absent, date, headline, note, page, section_of_charts, table
from sprl.io.metrics import SHOWN, held_out_sets, read_metrics, read_samples, sample_steps, series
from sprl.io.metrics_reference import GROUPS, METRICS, documented
from sprl.io.progress import format_duration
from sprl.io.report_charts import (
  CURVES,
  MISMATCH,
  MOST_SPANS,
  PARTS,
  SPEED,
  Records,
  all_names,
  charts,
  curve,
  ledger_charts,
  memory,
  reward_chart,
  step_times,
  timeline_data,
)
from sprl.io.starts import read_starts
from sprl.io.trackers import flat

Row = Mapping[str, Any]  # a sample of a table
MOST_TABLES = 40  # of samples
_FIRST_PAIRS = 4  # held-out problems that are visible at first: those whose reward changed most
MOST_TEXT = 6_000  # characters of a prompt or completion
_BY_LAYER = re.compile(r'fp8/scale_\w+/\d+')  # dozens of curves that say little


def write_report(workdir: Path, out: Path | None = None) -> Path:
  """Write the report of the run in `workdir` to `out`, or to report.html there. Return the path of the file.

  Raises FileNotFoundError if the folder has no run, and SettingsError if it has logged nothing.
  """
  path = out or workdir / 'report.html'
  files.write_text(path, report_html(workdir))
  return path


def report_html(workdir: Path) -> str:
  """Return the page."""
  config, records = read_config(workdir), read_metrics(workdir)
  if not records:
    raise SettingsError(f'{workdir}: expected a run that has logged an evaluation or a step; metrics.jsonl is empty')
  name = workdir.absolute().name
  found: dict[str, Any] = {}  # id -> what report.js draws there
  sections = {
    'Curves': section_of_charts(found, 'curves', [reward_chart(records), *charts(records, CURVES)], _no_step(records)),
    'Evaluations': _evaluations(records),
    'Mismatch': _mismatch(found, records),
    'Samples': _samples(workdir),
    'Speed': section_of_charts(
      found, 'speed', [*step_times(records), *charts(records, SPEED), *memory(records)], _no_step(records)
    ),
    'Timeline': _timeline(found, workdir),
    'Warnings': _warnings(records, config),
    'Settings': _settings(config),
    'All metrics': _all_metrics(found, records),
  }
  return page(name, _header(name, workdir, config, records), sections, found, 'metrics.jsonl in the work directory')


# --- the header -------------------------------------------------------------------------------------------------------


def _header(name: str, workdir: Path, config: Mapping[str, Any], records: Records) -> str:
  (origin, starts), settings = _starts(workdir), flat(config)
  done, steps = max(record['step'] for record in records), int(settings.get('steps') or 0)
  state = f'finished after {done} steps' if done >= steps else f'{done} of {steps} steps'
  facts = [state, f'model {settings.get("model.path")}', f'task {settings.get("task.name") or settings.get("task.kind")}']
  if origin:
    facts.append(f'from step {origin.get("step")} of {Path(str(origin.get("workdir"))).name}')
  if starts:
    first, last = starts[0], starts[-1]
    version = f'sprl {last.get("sprl")}' + (f' at {last["commit"]}' if last.get('commit') else '')
    facts += [last.get('devices'), version, f'jax {last.get("jax")}']
    facts += [f'started {date(first["time"])}'] if 'time' in first else []
    facts += [f'started {len(starts)} times'] if len(starts) > 1 else []
  else:
    facts.append('version and devices are not recorded')
  cards = ''.join(
    f'<div class="card"><div class="value">{escape(value)}</div><div class="label">{escape(label)}</div></div>'
    for label, value in _figures(records)
  )
  return f'{headline(name, list(map(str, facts)))}<div class="cards">{cards}</div>'


def _starts(workdir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Return where the first weights come from ({}: the model itself), and the starts of the run; ({}, []) without starts.json."""
  try:
    content = read_starts(workdir)
  except (OSError, SettingsError):  # a damaged file is no reason to have no report
    return {}, []
  return content['from'] or {}, content['starts']


def _figures(records: Records) -> Iterator[tuple[str, str]]:
  """Yield the main figures of the run as (label, value)."""
  _, reward = series(records, 'reward/mean')
  if len(reward):
    yield 'sampled reward, first → last 5 steps', f'{reward[:5].mean():.2f} → {reward[-5:].mean():.2f}'
  for name, label in held_out_sets(records).items():
    _, score = series(records, name)
    yield f'{label}, first → last', f'{score[0]:.2f} → {score[-1]:.2f}'
  seconds = sum(sum(r['time'].get(part, 0.0) for part in PARTS) for r in records if 'time' in r)
  if seconds:
    yield 'in steps', format_duration(seconds)
  for name, label, form in (
    ('time/tokens_per_second', 'tokens per second of rollout, median', '{:,.0f}'),
    ('sparse/agreement_mean', 'agreement of sampler and learner', '{:.3f}'),
    ('rollout_corr/rollout_is_eff_sample_size', 'effective sample size', '{:.2f}'),
    ('sparse/bytes_saving', 'less KV cache than dense', '{:.0%}'),
  ):
    _, values = series(records, name)
    if np.isfinite(values).any():
      yield label, form.format(float(np.nanmedian(values)) + 0.0)


# --- charts -----------------------------------------------------------------------------------------------------------


def _no_step(records: Records) -> str:
  return 'No step is finished yet.' if not any(r.get('kind') == 'train' for r in records) else 'Nothing was logged.'


# --- evaluations, mismatch --------------------------------------------------------------------------------------------


def _evaluations(records: Records) -> str:
  rows = []
  for record in records:
    if record.get('kind') == 'eval':
      for name, label in held_out_sets([record]).items():
        stem = name.removesuffix('avg@k')
        low, high = record.get(f'{stem}low'), record.get(f'{stem}high')
        interval = f'{low:.3f} to {high:.3f}' if low is not None and high is not None else ''
        others = {key.removeprefix(stem): value for key, value in record.items() if key.startswith(stem)}
        passes = ', '.join(f'{key} {value:.3f}' for key, value in others.items() if key.startswith('pass@'))
        rows.append([
          str(record['step']), label, f'{record[name]:.3f}', interval, passes,
          *(f'{others[key]:{form}}' if key in others else '' for key, form in _EVALUATED.items()),
        ])  # fmt: skip
  if not rows:
    return absent('No evaluation is logged.')
  heads = ['step', 'set', 'score', '95 % interval', 'pass', 'problems', 'mean length', 'cut at the limit', 'not graded']
  return table(heads, rows)


_EVALUATED = {'problems': '.0f', 'length_mean': '.1f', 'truncated': '.1%', 'ungraded': '.0f'}


def _mismatch(found: dict[str, Any], records: Records) -> str:
  text = section_of_charts(found, 'mismatch', charts(records, MISMATCH), _no_step(records))
  ledgers = [record for record in records if record.get('kind') == 'ledger']
  if not ledgers:
    off = 'The ledger splits this mismatch by its causes. This run has logged none: set config.ledger.every.'
    return text + '<h3>By cause</h3>' + absent(off)
  made = ledger_charts(ledgers)
  explained = (
    'Each token\'s mismatch is split into parts that sum to it. The bars show the mean size of each part, so their sum is at '
    'least the mean size of the whole (points). <b>reproduction</b> should be rounding error only.'
  )  # fmt: skip
  return text + f'<h3>By cause</h3><p class="note">{explained}</p>' + section_of_charts(found, 'ledger', made, '')


# --- samples ----------------------------------------------------------------------------------------------------------


def _samples(workdir: Path) -> str:
  blocks = []
  before, after = held_out_samples(workdir)
  if before:
    pairs = partners(before, after)
    pairs.sort(key=lambda pair: -abs(pair[1]['reward'] - pair[0]['reward']) if pair[1] else 0.0)
    shown, others = (''.join(_pair(old, new) for old, new in some) for some in (pairs[:_FIRST_PAIRS], pairs[_FIRST_PAIRS:]))
    if others:
      shown += f'<details class="more"><summary>{len(pairs) - _FIRST_PAIRS} more</summary>{others}</details>'
    when = 'before training and at the newest evaluation in a checkpoint' if after else 'before training'
    blocks.append(f'<details open><summary>Held-out problems, {when}</summary>{shown}</details>')
  steps = sample_steps(workdir)
  if len(steps) > MOST_TABLES:
    picked = np.unique(np.linspace(0, len(steps) - 1, MOST_TABLES).round().astype(int))
    blocks.append(note(f'{MOST_TABLES} of {len(steps)} tables are shown; samples/ holds all.'))
    steps = [steps[i] for i in picked]
  for step in reversed(steps):
    rows = read_samples(workdir, step)[:SHOWN]
    rewards = ' '.join(_badge(row.get('reward')) for row in rows)
    cards = ''.join(f'<article>{_prompt(row)}{_completion(row)}</article>' for row in rows)
    blocks.append(f'<details class="step"><summary>Step {step} {rewards}</summary>{cards}</details>')
  if not steps:
    blocks.append(absent('No table of samples is written: config.log.samples_every is None, or no such step is reached yet.'))
  return ''.join(blocks)


def held_out_samples(workdir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Return samples of held-out problems before training and later, from the newest readable checkpoint."""
  folders = [path for path in (workdir / 'checkpoints').glob('step_*') if files.step_of(path) is not None]
  for folder in sorted(folders, reverse=True):
    try:
      extra = json.loads((folder / 'record.json').read_text(encoding='utf-8'))['record']['extra']
      before, after = (_all_samples(extra.get(name) or {}) for name in ('before', 'after'))
      if before:
        return before, after
    except (OSError, ValueError, KeyError):  # deleted meanwhile, or damaged
      continue
  return [], []


def partners(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row | None]]:
  """Return each sample before training with one of the same set and prompt later; None if there is none.

  A resumed run may have evaluated other problems, sets or numbers of samples than it did before training.
  """

  def numbered(rows: Sequence[Row]) -> Iterator[tuple[Any, ...]]:
    seen: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
      key = row.get('set'), row['prompt']
      yield *key, seen[key]
      seen[key] += 1

  later = dict(zip(numbered(after), after))
  return [(old, later.get(key)) for key, old in zip(numbered(before), before)]


def _all_samples(result: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Return the samples of an evaluation, those of other held-out sets (config.eval.sets) last."""
  others = [{**row, 'set': name} for name, found in result.get('sets', {}).items() for row in found['samples']]
  return [*result.get('samples', []), *others]


def _pair(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> str:
  columns = _completion(old, 'before') + (_completion(new, 'after') if new else '')
  return f'<article>{_prompt(old)}<div class="pair">{columns}</div></article>'


def _prompt(row: Mapping[str, Any]) -> str:
  answer = f'<span class="answer">answer {escape(_cut(str(row["answer"])))}</span>' if row.get('answer') is not None else ''
  return (
    f'<div class="prompt"><span class="kind">prompt</span>{answer}<pre>{escape(_cut(str(row.get("prompt", ""))))}</pre></div>'
  )


def _completion(row: Mapping[str, Any], when: str = 'completion') -> str:
  others = [f'{name} {value}' for name, value in row.items() if name not in ('prompt', 'completion', 'answer', 'reward')]
  facts = f'<span class="kind">{when}</span>{_badge(row.get("reward"))}<span class="fact">{escape(" · ".join(others))}</span>'
  return f'<div class="completion">{facts}<pre>{escape(_cut(str(row.get("completion", ""))))}</pre></div>'


def _badge(reward: Any) -> str:
  if not isinstance(reward, int | float):
    return ''
  look = 'good' if reward >= 1 else 'bad' if reward <= 0 else 'middle'
  return f'<span class="badge {look}">{reward:.3g}</span>'


def _cut(text: str) -> str:
  return text if len(text) <= MOST_TEXT else f'{text[:MOST_TEXT]} ... ({len(text) - MOST_TEXT} more characters)'


# --- timeline ---------------------------------------------------------------------------------------------------------


def _timeline(found: dict[str, Any], workdir: Path) -> str:
  path = workdir / 'trace.json'
  if not path.exists():
    return absent('trace.json is not written yet; a run writes it with each checkpoint.')
  try:
    data = timeline_data(json.loads(path.read_text(encoding='utf-8'))['traceEvents'])
  except (ValueError, KeyError) as error:
    return absent(f'trace.json cannot be read ({error}).')
  if not data['spans']:
    return absent('trace.json has no spans yet.')
  found['timeline'] = data
  notes = ['Drag to zoom, double-click for the whole. Bars that are too narrow are left out until you zoom in.']
  if earlier := sorted(workdir.glob('trace_until_*.json')):
    notes.append(f'The timeline begins at the last resume; {", ".join(escape(p.name) for p in earlier)} hold the time before it.')
  if data['dropped']:
    notes.append(f'The newest {MOST_SPANS:,} spans are shown; trace.json has {data["dropped"]:,} earlier ones.')
  buttons = ''.join(
    f'<button type="button" data-zoom="{how}">{label}</button>'
    for how, label in (('in', 'zoom in'), ('out', 'zoom out'), ('left', '←'), ('right', '→'), ('all', 'whole'))
  )
  return f'<p class="note">{" ".join(notes)}</p><div class="buttons">{buttons}</div><div id="gantt"></div>'


# --- warnings, settings, all metrics ----------------------------------------------------------------------------------


def _warnings(records: Records, config: Mapping[str, Any]) -> str:
  trained = [record for record in records if record.get('kind') == 'train']
  if not trained:
    return absent(_no_step(records))
  run = _run(config)
  stops, streaks = [], Streaks()
  for record in trained:
    streaks = streaks.after(record)
    reasons = sentinels(record, run, streaks)
    stops += [f'<p class="stop">Step {record["step"]}: {escape(reason)}</p>' for reason in reasons]
  history, outside = History(), {check: {} for check in CHECKS}  # check -> step -> value
  for record in trained:
    history = history.after(record)
    for check, found in outside.items():
      if (value := check.outside(history, run)) is not None:
        found[record['step']] = value
  rows = []
  for check, found in outside.items():
    if found:
      low, high = check.healthy
      step, value = max(found.items(), key=lambda item: max(low - item[1], item[1] - high))
      wanted = (
        f'{low:g} to {high:g}'.replace('-inf to inf', 'finite').replace('-inf to', 'at most').replace(' to inf', ' or more')
      )
      worst, advice = f'{value:.4g} (step {step})', f'{check.meaning} {tries(check.advice, run)}'
      rows.append(
        [check.symptom, check.statistic.text.format(check.metric), wanted, str(len(found)), str(min(found)), worst, advice]
      )
  text = ''.join(stops)
  if rows:
    text += table(['symptom', 'number', 'healthy', 'steps outside', 'first', 'worst', 'what it means'], rows)
  return text or f'<p class="fine">None of {len(CHECKS)} checks found a fault.</p>'


def _run(config: Mapping[str, Any]) -> Run:
  """Return the settings of the run; the defaults if they are of another version of sprl."""
  try:
    return resolve(config)
  except SettingsError:
    return Run()


def _settings(config: Mapping[str, Any]) -> str:
  defaults = flat(to_dict(Run()))
  rows = [
    [f'config.{name}', _value(value), _value(defaults[name]) if name in defaults else '']
    for name, value in flat(config).items()
    if name not in defaults or defaults[name] != value
  ]
  return table(['setting', 'value', 'default'], rows) + note('All others have their defaults.')


def _value(value: Any) -> str:
  return value if isinstance(value, str) and value else repr(value)


def _all_metrics(found: dict[str, Any], records: Records) -> str:
  groups: dict[str, list[str]] = {prefix: [] for prefix in GROUPS}
  hidden = 0
  for name in all_names(records):
    if _BY_LAYER.fullmatch(name):
      hidden += 1
    else:
      groups.setdefault(name.partition('/')[0], []).append(name)
  blocks = []
  for prefix, members in groups.items():
    made = []
    for name in members:
      drawn, about = curve(name, *series(records, name), color=0), METRICS.get(documented(name) or '', '')
      if drawn['x']:
        made.append({'title': name, 'unit': '', 'series': [drawn], 'small': True, 'about': about})
    if made:
      text = section_of_charts(found, f'all-{prefix}', made, '')
      blocks.append(
        f'<details class="all"><summary>{escape(prefix)} <span class="fact">{len(made)}</span></summary>{text}</details>'
      )
  if hidden:
    blocks.append(note(f'{hidden} scales of layers are left out; metrics.jsonl has them.'))
  return ''.join(blocks)
