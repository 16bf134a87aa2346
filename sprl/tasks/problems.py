"""Problems: what a task asks the model.

The sources (gsm8k, reasoning, jsonl) yield rows: dicts of `id`, `prompt` or `messages`, `answer`, and optionally `extra` and
`row`. This file applies the settings that change every question: task.system, task.suffix, task.chat.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from sprl.config import Task
from sprl.tasks import gsm8k, jsonl, reasoning


@dataclass(frozen=True)
class Problem:
  """One question and its answer."""

  id: str
  prompt: str  # the question with task.suffix: the text of the last message; without a chat, all that the model reads
  messages: tuple[Mapping[str, str], ...]  # {role, content} each, for the chat template; () under task.chat = False
  answer: str
  extra: Mapping[str, Any] = field(default_factory=dict)  # for the grader of the source
  row: Mapping[str, Any] = field(default_factory=dict)  # the row of the data set with all its columns, for rewards


def load(task: Task, split: Literal['train', 'test'], process: int = 0, processes: int = 1) -> 'Problems':
  """Return the problems of one split. Over several processes, each reads the whole file and keeps the problems it holds.

  Raises SettingsError if they cannot be loaded; the message names the setting, or the file and line.
  """
  source = {'gsm8k': gsm8k, 'reasoning_gym': reasoning, 'jsonl': jsonl}[task.kind]
  rows = source.rows(task, split)
  return Problems(task, rows if isinstance(rows, Sequence) else Share(rows, process, processes))


def holder(index: int, processes: int) -> int:
  """Return the process that holds the problem at `index`."""
  return index % processes


class Share(Sequence[Mapping[str, Any]]):
  """The rows that one process holds. Its indices and its length are the indices and the length of the whole data set."""

  def __init__(self, rows: Iterable[Mapping[str, Any]], process: int, processes: int):
    self._process, self._processes = process, processes
    self._held: dict[int, Mapping[str, Any]] = {}
    self._count = 0
    for row in rows:
      if holder(self._count, processes) == process:
        self._held[self._count] = row
      self._count += 1

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, index):
    return self._held[range(self._count)[index]]


class Problems(Sequence[Problem]):
  """The problems of a split, by index. Generated problems are created on demand. A slice gives a list.

  Raises KeyError for a problem that another process holds.
  """

  def __init__(self, task: Task, rows: Sequence[Mapping[str, Any]]):
    self._task, self._rows = task, rows

  def __len__(self) -> int:
    return len(self._rows)

  @overload
  def __getitem__(self, index: int) -> Problem: ...
  @overload
  def __getitem__(self, index: slice) -> list[Problem]: ...
  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    return pose(self._task, self._rows[index])


def pose(task: Task, row: Mapping[str, Any]) -> Problem:
  """Return the problem of a row: add task.suffix to the question, and task.system if there is no system message."""
  *before, last = row.get('messages') or [{'role': 'user', 'content': row['prompt']}]
  question = {'role': last['role'], 'content': last['content'] + task.suffix}
  messages = (*before, question)
  if task.system is not None and messages[0]['role'] != 'system':
    messages = ({'role': 'system', 'content': task.system}, *messages)
  shown = messages if task.chat else ()
  return Problem(row['id'], question['content'], shown, row['answer'], row.get('extra', {}), row.get('row', {}))
