"""Problems that reasoning-gym generates (Stojanovski et al. 2025, arXiv 2505.24760): any of its data sets, by name and arguments.

Held out really means held out. A question belongs to the test split iff a hash of its text says so, one in four; training never
asks such a question, whatever its index or seed. Another seed alone would not do: one-digit sums of two terms have only 200
questions (46 of them held out), so that every seed soon generates them all.
"""

import difflib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sprl.settings import SettingsError, Task

_ONE_IN = 4  # questions of which one is held out
_MAX_TRIES = 200  # seeds tried for one training problem: (1/4)^200 that all are held out, unless there is nothing else
_SCANNED = 20  # problems generated at most for each held-out one that is asked for


def rows(task: Task, split: str) -> Iterable[dict[str, Any]]:
  """The problems of a split, each {id, prompt, answer, extra}; `extra` holds the generator's entry, which its scorer wants.

  train: task.size problems, generated when asked for, by index. test: up to task.held_out distinct questions, fewer where the
  generator has fewer (it stops looking after 20 generated problems for each).

  Raises SettingsError: unknown task.name (with close ones), task.args or task.size it refuses, too few distinct problems.
  """
  return _Train(task) if split == 'train' else _test(task)


def generator(name: str, args: Mapping[str, Any], seed: int, size: int) -> Any:
  """reasoning-gym's data set of that name. Raises SettingsError naming task.name, task.args or task.size."""
  from reasoning_gym.composite import DatasetSpec  # a second to import, and only this kind of task wants it
  from reasoning_gym.factory import DATASETS, create_dataset

  if name not in DATASETS:
    close = difflib.get_close_matches(name, DATASETS, n=5) or sorted(DATASETS)
    raise SettingsError(f'config.task.name = {name!r}: reasoning-gym has no such data set; expected {", ".join(close)}')
  accepted = DATASETS[name][1].__dataclass_fields__.keys() - {'seed', 'size'}
  if unknown := sorted(args.keys() - accepted):
    raise SettingsError(f'config.task.args has {unknown[0]!r}: {name} takes {", ".join(sorted(accepted)) or "none"}')
  try:
    if name == 'composite':  # a mixture: its parts are given as dicts of name, weight, config
      parts = [DatasetSpec(**part) for part in args['datasets']]
      return create_dataset(name, seed=seed, size=size, datasets=parts)
    return create_dataset(name, seed=seed, size=size, **args)
  except Exception as error:  # asserts, type errors, whatever its checks and its set-up trip over
    raise SettingsError(
      f'config.task.args = {dict(args)!r} with config.task.size = {size}: refused by {name} ({type(error).__name__}: {error})'
    ) from error


def is_held_out(question: str) -> bool:
  """Whether a question is of the test split: a property of its text, the same on every machine and in every version."""
  return int.from_bytes(_digest(question)[:8]) % _ONE_IN == 0


def _digest(question: str) -> bytes:
  return hashlib.sha256(question.encode()).digest()


class _Train(Sequence):
  """Problem i is generated under the first of the seeds s, s + size, s + 2 size ... that does not make it a held-out one.

  Many data sets draw problem i from seed + i: steps of `size` keep the replacements apart from one another.
  """

  def __init__(self, task: Task):
    self._task = task
    self._under_try = functools.cache(lambda k: generator(task.name, task.args, task.seed + k * task.size, task.size))
    self[0]  # what cannot be generated fails now

  def __len__(self) -> int:
    return self._task.size

  def __getitem__(self, index: int) -> dict[str, Any]:
    if not 0 <= index < len(self):
      raise IndexError(f'problem {index} of {len(self)}')
    for k in range(_MAX_TRIES):
      entry = self._under_try(k)[index]
      if not is_held_out(entry['question']):
        return _row(f'{self._task.name}/train/{index}', entry)
    raise SettingsError(f'config.task.name = {self._task.name!r}, args {self._task.args!r}: all its questions are held out')


def _test(task: Task) -> Iterator[dict[str, Any]]:
  found: set[bytes] = set()
  for entry in _entries(task, task.held_out * _SCANNED):
    question = entry['question']
    if is_held_out(question) and _digest(question) not in found:
      yield _row(f'{task.name}/test/{len(found)}', entry)
      found.add(_digest(question))
    if len(found) == task.held_out:
      break
  if not found:
    raise SettingsError(f'config.task.name = {task.name!r}, args {task.args!r}: too few distinct questions to hold any out')


def _entries(task: Task, count: int) -> Iterator[dict[str, Any]]:
  """`count` problems, whoever may ask them; not more at a time than task.size, which some generators bound."""
  size = min(count, task.size)
  for start in range(0, count, size):
    source = generator(task.name, task.args, task.seed + start, size)
    yield from (source[i] for i in range(size))


def _row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
  answer = entry['answer']  # None where many answers are right, and only the scorer can tell
  return {'id': name, 'prompt': entry['question'], 'answer': '' if answer is None else str(answer), 'extra': {'entry': entry}}
