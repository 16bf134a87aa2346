"""A problem as it is put to the model, and the sequence of all of a task's.

The sources (gsm8k, reasoning, jsonl) give rows, dicts of `id`, `prompt` or `messages`, `answer` and perhaps `extra`; what the
settings do to every question (task.system, task.suffix, task.chat) is done here, once for all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from sprl.settings import Task
from sprl.tasks import gsm8k, jsonl, reasoning


@dataclass(frozen=True)
class Problem:
  """One question and its answer."""

  id: str
  prompt: str  # the question with task.suffix: the last message's text, or all that the model reads where there is no chat
  messages: tuple[Mapping[str, str], ...]  # {role, content} each, for the chat template; () under task.chat = False
  answer: str
  extra: Mapping[str, Any] = field(default_factory=dict)  # what only the source's own grader understands


def load(task: Task, split: Literal['train', 'test'], process: int = 0, processes: int = 1) -> 'Problems':
  """The problems of one split: of several processes each looks through all of a file and keeps those that it is the `holder` of.

  Raises SettingsError where they cannot be had, naming the setting or the file and line.
  """
  source = {'gsm8k': gsm8k, 'reasoning_gym': reasoning, 'jsonl': jsonl}[task.kind]
  rows = source.rows(task, split)
  return Problems(task, rows if isinstance(rows, Sequence) else Share(rows, process, processes))


def holder(index: int, processes: int) -> int:
  """The process that has the problem of that index."""
  return index % processes


class Share(Sequence[Mapping[str, Any]]):
  """One process's part of some rows, by their indices among all of them; as many as there are in all."""

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
  """Problems by index; generated ones are made when asked for. A slice gives a list.

  Raises KeyError for one that another process holds.
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
  """The row's problem: task.suffix after its question, task.system before a conversation that has no system message."""
  *before, last = row.get('messages') or [{'role': 'user', 'content': row['prompt']}]
  question = {'role': last['role'], 'content': last['content'] + task.suffix}
  messages = (*before, question)
  if task.system is not None and messages[0]['role'] != 'system':
    messages = ({'role': 'system', 'content': task.system}, *messages)
  return Problem(row['id'], question['content'], messages if task.chat else (), row['answer'], row.get('extra', {}))
