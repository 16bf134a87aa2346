"""Problems from rows that the caller holds in memory: dictionaries with the keys of a line of sprl/tasks/jsonl.py.

{"prompt": "What is 2 + 3?", "answer": "5", "level": 1}
{"prompt": [{"role": "user", "content": "2 + 3?"}]}          (a conversation; `messages` is the same)

`answer` is optional, because a reward may read other columns. Rewards get the row as JSON can hold it (`tables.plain`).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from sprl.config import SettingsError, Task
from sprl.tasks import jsonl
from sprl.tasks.problems import Problems, digest
from sprl.tasks.tables import check_text, plain

Row = Mapping[str, Any]

HELD_OUT = 0.1  # share of the rows that are held out where the caller names none


def load(task: Task, rows: Iterable[Any], name: str = 'rows') -> Problems:
  """Return the problems of rows. Raises SettingsError as `checked` does."""
  found = checked(rows, task.chat, name)
  return Problems(task, found, reduce(lambda before, row: digest(plain(row['row']), before), found, 0))


def checked(rows: Iterable[Any], chat: bool, name: str = 'rows') -> list[dict[str, Any]]:
  """Return the rows as problems: {id, prompt or messages, answer, row}. `row` is the row as given.

  `chat` is task.chat. Raises SettingsError, which begins with NAME[index], for a row without a usable prompt or answer, and if
  there are no rows.
  """
  found = [_checked(f'{name}[{i}]', row, chat) for i, row in enumerate(rows)]
  if not found:
    raise SettingsError(f'{name} = []: expected at least one row')
  return found


def _checked(where: str, row: Any, chat: bool) -> dict[str, Any]:
  if not isinstance(row, Mapping):
    raise SettingsError(f'{where} = {row!r:.200}: expected a dictionary with `prompt` or `messages`')
  line = dict(row)
  try:
    check_text(plain(line))
  except ValueError as error:
    raise SettingsError(f'{where}: no text in UTF-8: {error}') from error
  if isinstance(line.get('prompt'), list):
    line['messages'] = line.pop('prompt')
  return {**jsonl.problem(where, line, chat, default=''), 'row': dict(row)}


def split(rows: Sequence[Row], most: int) -> tuple[Sequence[Row], Sequence[Row]]:
  """Return (training rows, held-out rows): the last HELD_OUT of the rows are held out, at least one and at most `most`.

  Raises SettingsError for fewer than two rows.
  """
  if len(rows) < 2:
    raise SettingsError(f'rows: {len(rows)} given; expected at least 2, of which the last is held out, or held-out rows as test=')
  held_out = min(max(int(len(rows) * HELD_OUT), 1), most)
  return rows[:-held_out], rows[-held_out:]
