"""What a run logs: metrics.jsonl, sample tables that people can read, and tensorboardX events.

    metrics.jsonl              {"completion/length_mean": 7.5, ..., "kind": "train", "step": 12, "time": {"rollout": 1.9, ...}}
    samples/step_000010.md     a few completions as people read them; the same rows in step_000010.jsonl
    tensorboard/               events of the same scalars

One line a step, keys sorted, floats in their shortest form that reads back to the same bits. What a clock measured is under
`time`; the rest of a line depends only on config and seed, so a resumed run's lines equal an uninterrupted one's. JSON knows
no NaN or infinity: they are the strings 'NaN', 'Infinity' and '-Infinity' (as in protobuf's JSON), and `read_metrics` gives
floats back.

A line is on disk when the call that writes it returns; events follow within a second. Log a step before saving its checkpoint:
then a resume at step s, which drops what was logged after s, finds every line up to s.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Int

from sprl.io import files

NOTHING: Mapping[str, Any] = MappingProxyType({})
_METRICS, _SAMPLES, _EVENTS = 'metrics.jsonl', 'samples', 'tensorboard'
_NOT_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


class LogError(ValueError):
  """A log that is not as a run writes it; the message names file and line."""


class RunLog:
  """The writer of one run's metrics and samples.

  `resume_step` is the step of the checkpoint that the run continues from: later lines, tables and events are dropped, and so is
  a line that a kill tore. None starts over and drops them all.
  """

  def __init__(self, workdir: str | os.PathLike, resume_step: int | None, tensorboard: bool):
    self._workdir = Path(workdir)
    (self._workdir / _SAMPLES).mkdir(parents=True, exist_ok=True)
    last = -1 if resume_step is None else resume_step
    path = self._workdir / _METRICS
    files.write_text(path, ''.join(line + '\n' for line, record in _lines(path) if record['step'] <= last))
    for table in (self._workdir / _SAMPLES).iterdir():
      if (step := files.step_of(table)) is not None and step > last:
        table.unlink()
    self._file = open(path, 'a', encoding='utf-8', newline='\n')  # noqa: SIM115
    self._events = _event_writer(self._workdir / _EVENTS, last + 1) if tensorboard else None

  def write(
    self, step: int, scalars: Mapping[str, Any], times: Mapping[str, Any], numbers: Mapping[str, Int[np.ndarray, '...']] = NOTHING
  ) -> None:
    """Logs one training step: what was measured (numbers, numpy's and jax's too), and how many seconds its parts took.

    Of `numbers`, natural ones, a line holds how many there are of each as NAME_counts: those of 0 first.
    """
    counts = {f'{name}_counts': np.bincount(n).tolist() for name, n in numbers.items()}
    self._append({**_plain(scalars), **counts, 'kind': 'train', 'step': step, 'time': _plain(times)})
    self._event(step, {**scalars, **{f'time/{name}': value for name, value in times.items()}})
    self._histograms(step, numbers)

  def evaluation(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Logs an evaluation of the weights after `step` updates."""
    self._append({**_plain(scalars), 'kind': 'eval', 'step': step})
    self._event(step, scalars)

  def ledger(self, step: int, scalars: Mapping[str, Any], counts: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Logs what the gap between sampler and learner is made of: a line with scalars and counts, and the values as events."""
    self._append({**_plain(scalars), 'kind': 'ledger', 'step': step, **counts})
    self._event(step, scalars)
    self._histograms(step, {f'ledger/{name}': x for name, x in values.items()})

  def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a table of completions: rows of prompt, completion, and whatever else is known (answer, reward, finish, ...)."""
    stem = self._workdir / _SAMPLES / files.step_name(step)
    plain = [_plain(row) for row in rows]
    files.write_text(stem.with_suffix('.jsonl'), ''.join(json.dumps(row) + '\n' for row in plain))
    files.write_text(stem.with_suffix('.md'), f'# Samples of step {step}\n\n{samples_markdown(plain)}')

  def close(self) -> None:
    """Ends the files."""
    self._file.close()
    if self._events is not None:
      self._events.close()

  def _append(self, line: dict[str, Any]) -> None:
    self._file.write(json.dumps(line, sort_keys=True, allow_nan=False) + '\n')
    self._file.flush()
    os.fsync(self._file.fileno())

  def _event(self, step: int, scalars: Mapping[str, Any]) -> None:
    if self._events is not None:
      for name, value in scalars.items():
        self._events.add_scalar(name, float(value), step)

  def _histograms(self, step: int, values: Mapping[str, Any]) -> None:
    if self._events is not None:
      for name, x in values.items():
        self._events.add_histogram(name, x, step)


def _event_writer(folder: Path, first_step: int):
  from tensorboardX import SummaryWriter  # slow to import, and only some runs want it

  # Files are named by the second: the suffix keeps a resume within it from overwriting the events before.
  return SummaryWriter(str(folder), purge_step=first_step, flush_secs=1, filename_suffix=f'.from_{first_step}')


# --- reading back ----------------------------------------------------------------------------------------------------


def mean_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """The mean of each metric over several that have the same; of none, nothing."""
  return {name: float(np.mean([m[name] for m in metrics])) for name in (metrics[0] if metrics else ())}


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl as dicts, in order; of a run that is being written, those that are whole."""
  return [_floats(record) for _, record in _lines(Path(workdir) / _METRICS)]


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
  """Steps [N] and values [N] of the records that hold `name`; of a `time` entry, name it `time/rollout`."""
  group, _, rest = name.partition('/')
  pairs = [(r['step'], r.get('time', {}).get(rest) if group == 'time' else r.get(name)) for r in records]
  found = [(step, value) for step, value in pairs if value is not None]
  return np.array([step for step, _ in found], int), np.array([value for _, value in found], float)


def sample_steps(workdir: str | os.PathLike) -> list[int]:
  """The steps that have a table of samples."""
  found = (files.step_of(path) for path in (Path(workdir) / _SAMPLES).glob('*.jsonl'))
  return sorted(step for step in found if step is not None)


def read_samples(workdir: str | os.PathLike, step: int) -> list[dict[str, Any]]:
  """The rows of one step's table."""
  return [row for _, row in _lines(Path(workdir) / _SAMPLES / f'{files.step_name(step)}.jsonl')]


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
  """Every line and what it holds, but for a last one that a kill tore. Raises LogError, naming any other that is no JSON."""
  text = path.read_text(encoding='utf-8', errors='replace') if path.exists() else ''
  whole = text.split('\n')[:-1]  # what follows the last newline is torn, or nothing
  parsed = []
  for number, line in enumerate(whole, 1):
    try:
      parsed.append((line, json.loads(line)))
    except ValueError as error:
      raise LogError(
        f'{path}, line {number}: not JSON: {line[:80]!r}; nothing but this log needs the line, which may be deleted'
      ) from error
  return parsed


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
  return {name: _plain_value(value) for name, value in mapping.items()}


def _plain_value(value: Any) -> Any:
  """A number (numpy's and jax's too) as JSON holds it; anything else unchanged."""
  if value is None or isinstance(value, str | bool | list | dict):
    return value
  value = value if isinstance(value, int | float) else np.asarray(value).item()
  if isinstance(value, float) and not math.isfinite(value):
    return 'NaN' if math.isnan(value) else 'Infinity' if value > 0 else '-Infinity'
  return value


def _floats(record: dict[str, Any]) -> dict[str, Any]:
  """A record with its times, whose non-finite numbers are floats again."""
  return {
    name: _floats(value) if isinstance(value, dict) else _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    for name, value in record.items()
  }


# --- samples as people read them -------------------------------------------------------------------------------------


def samples_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
  """Rows of prompt, completion and facts, one block each: `### 1 · reward 1.0 · finish stop`, then the two texts."""
  blocks = []
  for number, row in enumerate(rows, 1):
    facts = [f'{name} {value}' for name, value in row.items() if name not in ('prompt', 'completion', 'answer')]
    blocks.append(f'### {" · ".join([str(number), *facts])}\n')
    blocks.append(f'Prompt\n\n{_fenced(row["prompt"])}\n')
    blocks.append(f'Completion\n\n{_fenced(row["completion"])}\n')
    if 'answer' in row:
      blocks.append(f'Answer\n\n{_fenced(str(row["answer"]))}\n')
  return '\n'.join(blocks)


def _fenced(text: str) -> str:
  """A code block whose fence is longer than any run of backticks in `text`."""
  fence = '`' * max([3, *(len(run) + 1 for run in re.findall('`+', text))])
  return f'{fence}text\n{text}\n{fence}'
