"""Problems and a grader as an environment of one turn."""

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sprl.config import SettingsError, Task
from sprl.tasks import graders, reasoning
from sprl.tasks.environments.turns import Turns
from sprl.tasks.problems import Problem, Problems
from sprl.tasks.rewards import Grader, Sample


class SingleTurn:
  """Asks problem number `seed` modulo their count; the reward is `grade(sample)`.

  The grader runs in the caller's thread without a time limit. Use the grading pool for a grader that may hang.
  """

  def __init__(self, name: str, problems: Sequence[Problem], grade: Grader):
    if not len(problems):
      raise ValueError('no problems to ask')
    self.name, self._problems, self._grade = name, problems, grade
    self._turns = Turns(1)

  def __len__(self) -> int:
    return len(self._problems)

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """The question; `info['problem']` has its id, and `messages` the conversation around it where it has one."""
    self._problem = self._problems[seed % len(self._problems)]
    self._turns.begin()
    info: dict[str, Any] = {'problem': self._problem.id}
    if len(self._problem.messages) > 1:
      info['messages'] = [dict(message) for message in self._problem.messages]
    return self._problem.prompt, info

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Grade the answer; the episode ends."""
    self._turns.take()
    p = self._problem
    reward = float(self._grade(Sample(p.prompt, action, p.answer, p.row, p.messages, extra=p.extra)))
    self._turns.end(terminated=True)
    return '', reward, True, False, {'metrics': {'success': float(reward >= 1)}, 'metrics_agg_mode': {'success': 'last'}}


def reasoning_gym(
  dataset: str,
  args: Mapping[str, Any] | None = None,
  split: Literal['train', 'test'] = 'train',
  size: int = reasoning.SIZE,
  held_out: int = reasoning.HELD_OUT,
  seed: int = 0,
) -> SingleTurn:
  """Return a reasoning-gym data set as an environment, with its scorer.

  `size`, `held_out` and `seed` are as in tasks/reasoning.py.

  Raises SettingsError for an unknown data set, refused arguments, and too few distinct questions.
  """
  for name, value in (('size', size), ('held_out', held_out)):
    if value < 1:
      raise SettingsError(f'config.task.args.{name} = {value}: expected a number of at least 1')
  try:
    with _ONE_SEARCH:
      found = _problems(dataset, json.dumps(dict(args or {}), sort_keys=True), split, size, held_out, seed)
  except SettingsError as error:
    of_args = str(error).replace('config.task.args', 'config.task.args.args')
    raise SettingsError(of_args.replace('config.task.name', 'config.task.args.dataset')) from error
  return SingleTurn(f'reasoning_gym {dataset}', found, graders.load(graders.resolve(_task(dataset, args or {}))))


_ONE_SEARCH = threading.Lock()  # threads that need the same problems wait for one that finds them


@functools.cache  # shared by all environments of a process: the held-out problems of some data sets take half a minute to find
def _problems(dataset: str, args: str, split: Literal['train', 'test'], size: int, held_out: int, seed: int) -> Problems:
  task = _task(dataset, json.loads(args))
  return Problems(task, reasoning.rows(task, split, size, held_out, seed))


def _task(dataset: str, args: Mapping[str, Any]) -> Task:
  return Task(kind='reasoning_gym', name=dataset, args=args)
