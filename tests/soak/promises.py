"""Checks of a run that was killed and resumed. Each check returns its violations as sentences, or an empty list if it passes."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from sprl.io.metrics import read_metrics


def record_of(workdir: Path, step: int) -> dict[str, Any]:
  return json.loads((workdir / 'checkpoints' / f'step_{step:06d}' / 'record.json').read_text())['record']


def committed(workdir: Path) -> int:
  """Return the step of the newest committed checkpoint; 0 if there is none."""
  return max((int(path.name[5:]) for path in (workdir / 'checkpoints').glob('step_*')), default=0)


def differences(workdir: Path, expected: Path) -> list[str]:
  """Compare two complete runs: metrics without times, tables of samples, export, and every bit of the last checkpoint."""
  found = [f'the last checkpoint is of step {committed(workdir)}, expected {committed(expected)}']
  if committed(workdir) == committed(expected):
    found = _state(workdir, expected, committed(expected))
  ours, theirs = (
    [{k: v for k, v in line.items() if k != 'time'} for line in read_metrics(folder)] for folder in (workdir, expected)
  )
  if len(ours) != len(theirs):
    found.append(f'metrics.jsonl has {len(ours)} lines, expected {len(theirs)}')
  for number, (line, other) in enumerate(zip(ours, theirs), 1):
    if names := sorted(k for k in line.keys() | other.keys() if repr(line.get(k)) != repr(other.get(k))):
      found.append(f'line {number} of metrics.jsonl differs in {", ".join(names)}')
  for part in ('samples', 'export'):
    found += _files(workdir / part, expected / part)
  return found


def _state(workdir: Path, expected: Path, step: int) -> list[str]:
  found = []
  ours, theirs = record_of(workdir, step), record_of(expected, step)
  found += [f'record.json differs in {k}' for k in ('arrays', 'extra', 'score') if ours[k] != theirs[k]]
  if ours['arrays'] == theirs['arrays']:
    first, second = (_arrays(folder / 'checkpoints' / f'step_{step:06d}', theirs) for folder in (workdir, expected))
    found += [f'the array {k} differs' for k in theirs['arrays'] if first[k] != second[k]]
  return found


def _arrays(checkpoint: Path, record: Mapping[str, Any]) -> dict[str, bytes]:
  wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in record['arrays']}
  with ocp.PyTreeCheckpointer() as reader:
    arrays = reader.restore(checkpoint / 'arrays', restore_args=wanted)
  return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def _files(folder: Path, expected: Path) -> list[str]:
  """Compare the files of two folders, except the model card, which lists each start of its run."""
  ours, theirs = ({p.name: p.read_bytes() for p in f.glob('*') if p.name != 'README.md'} for f in (folder, expected))
  return [f'{folder.name}/{name} differs' for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]


def lost_or_repeated(starts: Sequence[Sequence[tuple[int, list]]], steps: int, groups: int, members: int) -> list[str]:
  """Check that the steps trained on every sample of every group exactly once.

  Args:
    starts: one sequence per start of the run, in order: (step, [(group, sample), ...]) for each step given to the learner. If
      a kill loses a step, a later start gives it again: the last one counts.
    steps: the number of steps of the run.
    groups: the number of groups per step.
    members: the number of samples per group.
  """
  given = {step: [tuple(uid) for uid in uids] for start in starts for step, uids in start}
  if sorted(given) != list(range(1, steps + 1)):
    return [f'the learner got steps {sorted(given)}, expected 1 to {steps}']
  counts = Counter(uid for uids in given.values() for uid in uids)
  wanted = {(group, group * members + k) for group in range(steps * groups) for k in range(members)}
  found = [f'sample {uid} of (group, sample) trained {n} times' for uid, n in sorted(counts.items()) if n > 1]
  if lost := sorted(wanted - counts.keys()):
    found.append(f'lost: {len(lost)} samples of (group, sample), the first {lost[0]}')
  if foreign := sorted(counts.keys() - wanted):
    found.append(f'{len(foreign)} samples that the run does not have, the first {foreign[0]}')
  return found


def unaccounted(workdir: Path, steps: int, groups: int) -> list[str]:
  """Check that each step is logged once, the last step is saved, and the scheduler has consumed every group."""
  found = []
  logged = [line['step'] for line in read_metrics(workdir) if line['kind'] == 'train']
  if logged != list(range(1, steps + 1)):
    found.append(f'metrics.jsonl has the steps {logged}, expected 1 to {steps}')
  if committed(workdir) != steps:
    return [*found, f'the last checkpoint is of step {committed(workdir)}, expected {steps}']
  state = record_of(workdir, steps)['extra']['scheduler']
  expected = {'version': steps, 'consumed': steps * groups, 'next': steps * groups, 'live': []}
  return [*found, *(f'scheduler: {k} = {state[k]}, expected {v}' for k, v in expected.items() if state[k] != v)]


def no_export(workdir: Path) -> list[str]:
  """Check that the run has a complete export. Only a run that is repeatable has another one to compare it with."""
  missing = [name for name in ('config.json', 'model.safetensors', 'README.md') if not (workdir / 'export' / name).is_file()]
  return [f'export/{name} is missing' for name in missing]


def lost_grades(workdir: Path) -> int:
  """Return the number of samples of steps and evaluations that lost their grade because a worker died."""
  return round(sum(line.get('grading/crash', 0) + line.get('eval/ungraded', 0) for line in read_metrics(workdir)))


def wrong_grades(workdir: Path, samples: int, killed: int) -> list[str]:
  """Check that every sample of a step has an outcome, and that at most `killed` samples lost their grade."""
  found = []
  for line in read_metrics(workdir):
    if line['kind'] == 'train' and line['grading/ok'] + line['grading/crash'] != samples:
      found.append(f'step {line["step"]}: {line["grading/ok"]:g} grades and {line["grading/crash"]:g} crashes of {samples}')
  if (lost := lost_grades(workdir)) > killed:
    found.append(f'{lost} samples lost their grade, but only {killed} workers were killed')
  return found
