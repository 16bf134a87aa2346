"""Runs as their work directories record them, in arms.

Runs that differ only in the seed form an arm: they have the same settings, rewards and rows.
"""

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

from sprl.config import PLACES, Run, SettingsError, in_sections, to_dict
from sprl.config_checks import GRADING_COSTS
from sprl.foreign import split_reference
from sprl.io import files
from sprl.io.checkpoint import CheckpointError, read_record
from sprl.io.config_file import read_located
from sprl.io.metrics import read_metrics
from sprl.io.report_charts import PARTS, Records
from sprl.io.starts import read_starts, recorded_origin
from sprl.io.trackers import flat

# Settings that do not change what a run learns, apart from the rounding of its numbers.
NOT_LEARNED = (
  'seed', 'export', 'log', 'checkpoint', 'ledger', 'patience', 'model.remat', 'packing.score_chunk', *PLACES, *GRADING_COSTS,
)  # fmt: skip


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


def matching(setting: str, name: str) -> list[Path]:
  """Return the folder of this name, or those that a name with `*` matches and that hold a run.

  Raises SettingsError, which begins with `setting`, if it matches none.
  """
  if '*' not in name:
    return [files.local_folder(setting, name)]
  pattern = escape(os.path.expanduser(name)).replace('[*]', '*')  # only `*` has a meaning
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
  """Return what the starts of a run recorded beside its settings.

  These are the run that its first weights come from, and checksums of a user's functions and of rows that are in no file. The
  digits at the end of that run's name count as a seed: `sft-0` and `sft-1` give the same.
  """
  last, origin = (read_starts(workdir)['starts'] or [{}])[-1], recorded_origin(workdir)
  others = {'rows': last['rows']} if last.get('rows') else {}
  if origin is not None:
    others['weights'] = f'{str(origin.workdir).rstrip("0123456789")}:{"best" if origin.best else origin.step}'
  folder = last.get('folder', '')
  files_of = {
    name: os.path.abspath(os.path.join(folder, os.path.expanduser(name))) if split_reference(name) else name
    for name in last.get('graders', {})
  }
  return {f'source of {files_of[name]}': f'checksum {found}' for name, found in last.get('graders', {}).items()} | others


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
    groups.setdefault(tuple(sorted((name, repr(value)) for name, value in learned(run).items())), []).append(run)
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


def learned(run: Recorded) -> dict[str, Any]:
  """Return what two runs of an arm share: their inputs, and all settings but NOT_LEARNED, which has the seed."""
  return run.inputs | {f'config.{name}': value for name, value in run.settings.items() if not in_sections(name, NOT_LEARNED)}


def by_seed(arm: Arm) -> dict[Any, list[Recorded]]:
  """Return the runs of an arm by seed."""
  found: dict[Any, list[Recorded]] = {}
  for run in arm.runs:
    found.setdefault(run.settings['seed'], []).append(run)
  return found
