"""Problems: what a task asks the model.

The sources (dataset, gsm8k, jsonl, reasoning) yield rows: dicts of `id`, `prompt` or `messages`, `answer`, `row` with all
columns, and optionally `extra`. This file applies the settings that change every question (task.system, task.suffix, task.chat)
and joins the sources of a mixture.
"""

import itertools
import json
import logging
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, overload

from sprl.config import SettingsError, Task
from sprl.config_checks import named_below
from sprl.tasks import dataset, gsm8k, jsonl, reasoning
from sprl.tasks.tables import plain

SOURCES = {'dataset': dataset, 'gsm8k': gsm8k, 'jsonl': jsonl, 'reasoning_gym': reasoning}
log = logging.getLogger(__name__)


class Asked(NamedTuple):
  """What identifies a problem."""

  text: tuple[tuple[str, str], ...]  # the role and the text of each message, before task.system and task.suffix
  row: int | None  # hash of all columns, of which another set may show others; None: there are none


@dataclass(frozen=True)
class Problem:
  """One question and its answer."""

  id: str
  prompt: str  # the question with task.suffix: the text of the last message; without a chat, all that the model reads
  messages: tuple[Mapping[str, str], ...]  # {role, content} each, for the chat template; () under task.chat = False
  answer: str
  extra: Mapping[str, Any] = field(default_factory=dict)  # for the grader of the source
  row: Mapping[str, Any] = field(default_factory=dict)  # all columns of the source, as values that JSON can hold


def load(task: Task, split: Literal['train', 'test'], process: int = 0, processes: int = 1) -> 'Problems | Mixture':
  """Return the problems of one split. Over several processes, each reads the whole file and keeps the problems it holds.

  Raises SettingsError if they cannot be loaded; the message names the setting, or the file and line.
  """
  if task.kind != 'mixture':
    return _load(task, split, process, processes, 0)
  parts: dict[str, Problems] = {}
  for name, source in sorted(task.mixture.items()):  # config.json does not keep the order in which a config names them
    if source.splits[split == 'test']:
      first = sum(map(len, parts.values()))
      parts[name] = load_source(f'task.mixture.{name}', source.task(task, source.splits), split, process, processes, first)
  return Mixture(parts)


def load_source(
  key: str, task: Task, split: Literal['train', 'test'], process: int = 0, processes: int = 1, first: int = 0
) -> 'Problems':
  """Return the problems of one source, the entry `key` of the settings. `first` is the index of its first problem in a mixture.

  Raises SettingsError, which names the settings below `key`.
  """
  try:
    return _load(task, split, process, processes, first)
  except SettingsError as error:
    message = str(error)
    if key.startswith('eval.'):  # a held-out set has one split
      message = message.replace('config.task.splits has', f'config.{key}.split =')
    raise SettingsError(named_below(key, message)) from error


def _load(task: Task, split: Literal['train', 'test'], process: int, processes: int, first: int) -> 'Problems':
  rows = SOURCES[task.kind].rows(task, split if task.kind == 'reasoning_gym' else task.splits[split == 'test'])
  if isinstance(rows, Sequence):  # made on demand, from the settings alone
    return Problems(task, rows)
  share = Share(rows, process, processes, first)
  for name, count in (('question', share.without_question), ('answer', share.without_answer)):
    if 0 < count < len(share):
      log.warning('%d of %d problems of %s have an empty %s', count, len(share), task.path or task.name, name)
  return Problems(task, share, share.digest)


def digest(value: Any, before: int = 0) -> int:
  """Return the checksum of a value, continued from that of the values before it. What JSON cannot hold counts by its repr.

  The address of an object, which differs in each process, does not count.
  """
  text = re.sub(r' at 0x[0-9a-f]+>', '>', _as_text(value))
  return zlib.crc32(text.encode('utf-8', 'surrogatepass'), before)


def _as_text(value: Any) -> str:
  return json.dumps(value, sort_keys=True, default=repr)


def holder(index: int, processes: int) -> int:
  """Return the process that holds the problem at `index`."""
  return index % processes


class Share(Sequence[Mapping[str, Any]]):
  """The rows that one process holds. Its indices and its length are the indices and the length of the whole data set.

  `first` is the index of the first row among the problems of a mixture, which decides who holds it. `digest` is a checksum of the
  questions and answers of all rows.
  """

  def __init__(self, rows: Iterable[Mapping[str, Any]], process: int, processes: int, first: int = 0):
    self._process, self._processes = process, processes
    self._held: dict[int, Mapping[str, Any]] = {}
    self._count = self.digest = self.without_question = self.without_answer = 0
    for row in rows:
      self.without_question += not _messages(row)[-1]['content'].strip()
      self.without_answer += not row['answer']
      self.digest = digest([row.get('messages') or row['prompt'], row['answer']], self.digest)
      if holder(first + self._count, processes) == process:
        self._held[self._count] = row
      self._count += 1

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, index):
    return self._held[range(self._count)[index]]


class Problems(Sequence[Problem]):
  """The problems of a split, by index. Generated problems are created on demand. A slice gives a list.

  `digest` is a checksum of them all; 0: the settings decide them. Raises KeyError for a problem that another process holds.
  """

  def __init__(self, task: Task, rows: Sequence[Mapping[str, Any]], digest: int = 0):
    self._task, self._rows, self.digest = task, rows, digest

  def __len__(self) -> int:
    return len(self._rows)

  def asked(self, indices: Iterable[int] | None = None) -> Iterator[Asked]:
    """Yield what these problems ask; None: all problems. Problems that are generated on demand have none."""
    for i in (range(len(self)) if indices is None else indices) if self.digest else ():
      row = self._rows[i]
      columns = row.get('row')
      yield Asked(tuple((m['role'], m['content']) for m in _messages(row)), hash(_as_text(columns)) if columns else None)

  @overload
  def __getitem__(self, index: int) -> Problem: ...
  @overload
  def __getitem__(self, index: slice) -> list[Problem]: ...
  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    return pose(self._task, self._rows[index])


class Mixture(Sequence[Problem]):
  """The problems of several sources, one source after another. A slice gives a list.

  The id of a problem begins with the name of its source, and its `extra` names the grader of the source.
  """

  def __init__(self, parts: Mapping[str, Problems]):
    self.parts = parts
    self.digest = digest([part.digest for part in parts.values()])
    self.starts = dict(zip(parts, itertools.accumulate(map(len, parts.values()), initial=0)))  # index of each source's first

  def __len__(self) -> int:
    return sum(map(len, self.parts.values()))

  @overload
  def __getitem__(self, index: int) -> Problem: ...
  @overload
  def __getitem__(self, index: slice) -> list[Problem]: ...
  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    name, i = self._place(range(len(self))[index])
    return named(self.parts[name][i], name)

  def _place(self, index: int) -> tuple[str, int]:
    """Return the source of a problem, and its index there."""
    name = list(self.parts)[bisect_right(list(self.starts.values()), index) - 1]
    return name, index - self.starts[name]

  def asked(self, indices: Iterable[int] | None = None) -> Iterator[Asked]:
    """Return what these problems ask; None: all problems. Problems that are generated on demand have none."""
    if indices is None:
      return itertools.chain.from_iterable(part.asked() for part in self.parts.values())
    places = map(self._place, indices)
    return itertools.chain.from_iterable(self.parts[name].asked([i]) for name, i in places)

  def in_turn(self, count: int) -> list[int]:
    """Return the indices of up to `count` problems: one of each source in turn, as long as a source has more."""
    places = sorted((i, start) for name, start in self.starts.items() for i in range(min(count, len(self.parts[name]))))
    return [start + i for i, start in places[:count]]


def shared(trained: 'Problems | Mixture', held_out: 'Problems | Mixture', order: Sequence[int]) -> int:
  """Return how many of the held-out problems with the indices `order` have the text or the row of one that is trained on."""
  trained_on = list(trained.asked())
  texts, rows = {each.text for each in trained_on}, {each.row for each in trained_on} - {None}
  return sum(each.text in texts or each.row in rows for each in held_out.asked(order))


def named(problem: Problem, grader: str) -> Problem:
  """Return the problem with the name of its grader in front of its id, and in `extra` for `graders.of_sources`."""
  return replace(problem, id=f'{grader}/{problem.id}', extra={**problem.extra, 'grader': grader})


def pose(task: Task, row: Mapping[str, Any]) -> Problem:
  """Return the problem of a row: add task.suffix to the question, and task.system if there is no system message."""
  *before, last = _messages(row)
  question = {'role': last['role'], 'content': last['content'] + task.suffix}
  messages = (*before, question)
  if task.system is not None and messages[0]['role'] != 'system':
    messages = ({'role': 'system', 'content': task.system}, *messages)
  extra, columns = row.get('extra', {}), plain(row.get('row', {}))
  return Problem(row['id'], question['content'], messages if task.chat else (), row['answer'], extra, columns)


def _messages(row: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
  """Return the messages of a row; a prompt is one of the user."""
  return row.get('messages') or [{'role': 'user', 'content': row['prompt']}]
