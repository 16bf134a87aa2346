"""starts.json of a work directory: where the first weights of its run come from, and each start of the run."""

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sprl.config import SettingsError
from sprl.io import files

_STARTS = 'starts.json'


@dataclass(frozen=True)
class Origin:
  """A checkpoint of another run, whose weights a new run starts from."""

  workdir: Path  # absolute
  step: int
  best: bool = False  # whether it was asked for as the best one

  def __str__(self) -> str:
    return f'{self.workdir}:{self.step}'


@dataclass(frozen=True)
class Start:
  """What a caller says of a start of a run."""

  source: str | None = (
    None  # RUN, RUN:STEP or RUN:best, the run whose weights a new run starts from; None: the model's own weights
  )
  command: str | None = None  # that starts it; None: a Python program


PLAIN = Start()


def parse_source(text: str) -> tuple[Path, int | Literal['best'] | None]:
  """Return folder and step of `RUN:STEP` or `RUN:best`; the step is None for `RUN`. An existing folder is read as one.

  Raises SettingsError if the text names no folder.
  """
  folder = files.local_folder('--from', text)
  name, colon, step = text.rpartition(':')
  if folder.is_dir() or not (colon and name and (step.isdecimal() or step == 'best')):
    return folder.absolute(), None
  return files.local_folder('--from', name).absolute(), 'best' if step == 'best' else int(step)


def read_starts(workdir: str | os.PathLike) -> dict[str, Any]:
  """Return the content of starts.json: `from`, which is None or a folder and a step, `began`, and the list `starts`.

  A run of an older version has no such file: its list is empty. Raises SettingsError if the file is damaged.
  """
  path = Path(workdir) / _STARTS
  if not path.exists():
    return {'from': None, 'began': None, 'starts': []}
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
    return {'from': content['from'], 'began': content.get('began'), 'starts': list(content['starts'])}
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise SettingsError(f'{path}: damaged ({error!r}); expected the starts that a run has written') from None


def recorded_origin(workdir: str | os.PathLike) -> Origin | None:
  """Return where the first weights of the run in a work directory come from; None: from the model of its settings."""
  found = read_starts(workdir)['from']
  return None if found is None else Origin(Path(found['workdir']), int(found['step']), found.get('best', False))


def began(workdir: str | os.PathLike) -> str:
  """Return the local time of the first start of a run, in ISO 8601: the present time if there was none, or an older version's."""
  return read_starts(workdir)['began'] or datetime.datetime.now().isoformat(timespec='seconds')


def last_folder(workdir: str | os.PathLike) -> str:
  """Return the folder in which the last start of a run was made; '' if it is unknown."""
  return next((start.get('folder', '') for start in read_starts(workdir)['starts'][-1:]), '')


def add_start(workdir: str | os.PathLike, origin: Origin | None, time: str, facts: Mapping[str, Any]) -> None:
  """Append a start of the run to starts.json. `time` is that of `began`. `facts` are the step, the command and others."""
  source = (
    None if origin is None else {'workdir': str(origin.workdir), 'step': origin.step} | ({'best': True} if origin.best else {})
  )
  _write(workdir, {'from': source, 'began': time, 'starts': [*read_starts(workdir)['starts'], dict(facts)]})


def correct_start(workdir: str | os.PathLike, step: int) -> None:
  """Replace the step of the last start: it began at another checkpoint than the newest one."""
  content = read_starts(workdir)
  *earlier, last = content['starts']
  _write(workdir, {**content, 'starts': [*earlier, {**last, 'step': step}]})


def _write(workdir: str | os.PathLike, content: Mapping[str, Any]) -> None:
  files.write_text(Path(workdir) / _STARTS, json.dumps(content, indent=2) + '\n')
