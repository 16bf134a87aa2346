"""The logs of a run: metrics.jsonl and tables of samples; trackers get the same.

    metrics.jsonl              {"completion/length_mean": 7.5, ..., "kind": "train", "step": 12, "time": {"rollout": 1.9, ...}}
    samples/step_000010.md     a few completions, to be read by people; step_000010.jsonl holds the same rows
    tensorboard/, wandb/, ...  what trackers write (sprl/io/trackers.py)

metrics.jsonl has one line per step, with sorted keys. Floats have the shortest form that reads back to the same bits. Times are
under `time`. The rest of a line depends only on config and seed, so the lines of a resumed run equal those of an uninterrupted
one. JSON has no NaN or infinity: they are written as the strings 'NaN', 'Infinity' and '-Infinity', as in protobuf's JSON, and
`read_metrics` turns them back into floats.

A line is on disk when the call that writes it returns. Log a step before saving its checkpoint: a resume at step s drops the
lines after s and then finds every line up to s.
"""

import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Int

from sprl.io import files
from sprl.io.tables import samples_markdown
from sprl.io.trackers import Tracker, flat, switched_off

_log = logging.getLogger(__name__)

NOTHING: Mapping[str, Any] = MappingProxyType({})
_METRICS, _SAMPLES = 'metrics.jsonl', 'samples'
SHOWN = 16  # rows of a table of samples that people see; the file for programs has all
_STATISTICS = ('mean', 'abs', 'p99')  # of an entry of the ledger
_NOT_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


class LogError(ValueError):
  """A log is damaged. The message names the file and the line."""


class RunLog:
  """The writer of one run's metrics and samples.

  Args:
    workdir: the work directory.
    resume_step: the step of the checkpoint from which the run continues. Later lines and tables are dropped, as is an incomplete
      last line. None: the run begins again. A log of an earlier start is then renamed, and its tables are dropped.
    trackers: open trackers, which get the same. One that raises is logged once, and is then only closed. `close` closes all.

  `evaluated` are the steps whose evaluations the log has.
  """

  def __init__(self, workdir: str | os.PathLike, resume_step: int | None, trackers: Sequence[Tracker] = ()):
    self._workdir = Path(workdir)
    (self._workdir / _SAMPLES).mkdir(parents=True, exist_ok=True)
    last = -1 if resume_step is None else resume_step
    path = self._workdir / _METRICS
    found = _lines(path)
    if any(not isinstance(record.get('step'), int) or 'kind' not in record for _, record in found):
      raise LogError(f'{path}: not the log of a run; expected a --workdir without one')
    if resume_step is None and any(record['kind'] == 'train' for _, record in found):
      old = _unused(path.with_name(f'metrics_until_{max(record["step"] for _, record in found)}.jsonl'))
      files.rename(path, old)
      _log.warning('%s: there is no checkpoint of these steps, so the run begins again; their log is now %s', path, old.name)
    kept = [(line, record) for line, record in found if record['step'] <= last]
    if (lost := last - sum(record['kind'] == 'train' for _, record in kept)) > 0:
      _log.warning('%s: damaged; the lines of %d of %d steps are missing. The weights are not affected', path, lost, last)
    files.write_text(path, ''.join(line + '\n' for line, _ in kept))
    for table in (self._workdir / _SAMPLES).iterdir():
      if (step := files.step_of(table)) is not None and step > last:
        table.unlink()
    self.evaluated = {record['step'] for _, record in kept if record['kind'] == 'eval'}
    self._file = open(path, 'a', encoding='utf-8', newline='\n')  # noqa: SIM115
    self._trackers, self._failed = list(trackers), list[Tracker]()

  def settings(self, settings: Mapping[str, Any]) -> None:
    """Give the settings of the run, nested, to the trackers. config.json holds them already."""
    self._track(lambda tracker: tracker.settings(flat(settings)))

  def write(
    self, step: int, scalars: Mapping[str, Any], times: Mapping[str, Any], numbers: Mapping[str, Int[np.ndarray, '...']] = NOTHING
  ) -> None:
    """Log one training step.

    Args:
      step: the step's number.
      scalars: name -> number of Python, numpy or jax.
      times: name of a part -> seconds.
      numbers: name -> natural numbers. The line holds their counts as NAME_counts: how many are 0, how many are 1, ...
    """
    counts = {f'{name}_counts': np.bincount(n).tolist() for name, n in numbers.items()}
    self._append({**_plain(scalars), **counts, 'kind': 'train', 'step': step, 'time': _plain(times)})
    self._track_scalars(step, {**scalars, **{f'time/{name}': value for name, value in times.items()}})
    self._track_histograms(step, numbers)

  def evaluation(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Log an evaluation of the weights after `step` updates."""
    self.evaluated.add(step)
    self._append({**_plain(scalars), 'kind': 'eval', 'step': step})
    self._track_scalars(step, scalars)

  def ledger(self, step: int, scalars: Mapping[str, Any], counts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Log the causes of the mismatch between sampler and learner.

    `scalars` are named `ledger/ENTRY_STATISTIC`. A line holds them and the `counts`. Trackers get them also as a table, and the
    `values` of each entry as histograms.
    """
    self._append({**_plain(scalars), 'kind': 'ledger', 'step': step, **counts})
    self._track_scalars(step, scalars)
    self._track_histograms(step, {f'ledger/{name}': x for name, x in values.items()})
    rows = [
      {'entry': name}
      | {stat: float(scalars[f'ledger/{name}_{stat}']) for stat in _STATISTICS if f'ledger/{name}_{stat}' in scalars}
      for name in values
    ]
    self._track(lambda tracker: tracker.table(step, 'ledger', rows))

  def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table of completions. A row has a prompt, a completion, and other facts such as answer, reward and finish.

    The Markdown file and the trackers have the first SHOWN rows.
    """
    stem = self._workdir / _SAMPLES / files.step_name(step)
    plain = [_plain(row) for row in rows]
    files.write_text(stem.with_suffix('.jsonl'), ''.join(json.dumps(row) + '\n' for row in plain))
    files.write_text(stem.with_suffix('.md'), f'# Samples of step {step}\n\n{samples_markdown(plain[:SHOWN])}')
    self._track(lambda tracker: tracker.table(step, 'samples', plain[:SHOWN]))

  def close(self, failed: bool = False) -> None:
    """Close the files and the trackers, also if the disk is full. `failed`: the run ended with an error."""
    try:
      with files.naming(self._workdir / _METRICS):
        self._file.close()
    finally:
      for tracker in self._failed:
        with suppress(Exception):  # its first error is logged
          tracker.close(failed)
      self._track(lambda tracker: tracker.close(failed))
      self._trackers, self._failed = [], []

  def _append(self, line: dict[str, Any]) -> None:
    with files.naming(self._workdir / _METRICS):
      self._file.write(json.dumps(line, sort_keys=True, allow_nan=False) + '\n')
      self._file.flush()
      os.fsync(self._file.fileno())

  def _track_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    numbers = {name: float(value) for name, value in scalars.items()}
    self._track(lambda tracker: tracker.scalars(step, numbers))

  def _track_histograms(self, step: int, values: Mapping[str, Any]) -> None:
    if values:
      self._track(lambda tracker: tracker.histograms(step, values))

  def _track(self, call: Callable[[Tracker], None]) -> None:
    """Call each tracker. One that raises is logged, and dropped."""
    for tracker in list(self._trackers):
      try:
        call(tracker)
      except Exception as error:  # a network that is down, a disk that is full: no reason to lose the run
        switched_off(type(tracker).__name__, error)
        self._trackers.remove(tracker)
        self._failed.append(tracker)


# --- reading back ----------------------------------------------------------------------------------------------------


def mean_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Return the mean of each metric over dicts with equal keys; {} for no dicts."""
  return {name: float(np.mean([m[name] for m in metrics])) for name in (metrics[0] if metrics else ())}


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Return the lines of metrics.jsonl as dicts, in order. An incomplete last line is left out."""
  return [_floats(record) for _, record in _lines(Path(workdir) / _METRICS)]


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
  """Return steps [N] and values [N] of the records that have `name`. Entries under `time` are named `time/rollout`."""
  group, _, rest = name.partition('/')
  pairs = [(r['step'], r.get('time', {}).get(rest) if group == 'time' else r.get(name)) for r in records]
  found = [(step, value) for step, value in pairs if value is not None]
  return np.array([step for step, _ in found], int), np.array([value for _, value in found], float)


def bounds(records: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
  """Return the bounds (low [N], high [N]) of the interval of a score, such as `eval/avg@k`; NaN where an evaluation has none."""
  stem = name.removesuffix('avg@k')
  found = [[r.get(f'{stem}{end}', np.nan) for r in records if name in r] for end in ('low', 'high')]
  low, high = (np.array(values, float) for values in found)
  return low, high


def held_out_sets(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
  """Return the metric of the score of each held-out set, and a label: `eval/avg@k`, or `eval/SET/avg@k` of others."""
  found = {name for record in records for name in record if name.endswith('avg@k')}
  ordered = sorted(found, key=lambda name: (name.count('/'), name))
  return {name: ' '.join(['held out', *name.split('/')[1:-1]]) for name in ordered}


def sample_steps(workdir: str | os.PathLike) -> list[int]:
  """Return the steps that have a table of samples."""
  found = (files.step_of(path) for path in (Path(workdir) / _SAMPLES).glob('*.jsonl'))
  return sorted(step for step in found if step is not None)


def read_samples(workdir: str | os.PathLike, step: int) -> list[dict[str, Any]]:
  """Return the rows of the table of a step."""
  return [row for _, row in _lines(Path(workdir) / _SAMPLES / f'{files.step_name(step)}.jsonl')]


def _unused(path: Path) -> Path:
  """Return the path, or if it exists the first of NAME_2, NAME_3, ... that does not."""
  names = itertools.chain([path], (path.with_stem(f'{path.stem}_{i}') for i in itertools.count(2)))
  return next(name for name in names if not name.exists())


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
  """Return each complete line and its content. Raises LogError if a line is not a JSON object."""
  text = path.read_text(encoding='utf-8', errors='replace') if path.exists() else ''
  whole = text.split('\n')[:-1]  # text after the last newline is incomplete, or empty
  parsed = []
  for number, line in enumerate(whole, 1):
    try:
      record = json.loads(line)
    except (ValueError, RecursionError):
      record = None
    if not isinstance(record, dict):
      raise LogError(f'{path}, line {number}: not a JSON object: {line[:80]!r}; delete the line, which only this log needs')
    parsed.append((line, record))
  return parsed


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
  return {name: _plain_value(value) for name, value in mapping.items()}


def _plain_value(value: Any) -> Any:
  """Return a number of Python, numpy or jax in its form for JSON; anything else unchanged."""
  if value is None or isinstance(value, str | bool | list | dict):
    return value
  value = value if isinstance(value, int | float) else np.asarray(value).item()
  if isinstance(value, float) and not math.isfinite(value):
    return 'NaN' if math.isnan(value) else 'Infinity' if value > 0 else '-Infinity'
  return value


def _floats(record: dict[str, Any]) -> dict[str, Any]:
  """Return a record in which non-finite numbers are floats again."""
  return {
    name: _floats(value) if isinstance(value, dict) else _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    for name, value in record.items()
  }
