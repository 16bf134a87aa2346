"""Problems and a grader as an environment of one turn: the question, the answer, its worth."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sprl.settings import Task
from sprl.tasks import graders, problems
from sprl.tasks.environments.turns import Turns
from sprl.tasks.graders import Grader
from sprl.tasks.problems import Problem


class SingleTurn:
  """Asks problem `seed` modulo their number, and gives what `grade(prompt, completion, answer, extra)` says of the answer.

  The grader runs in the caller's thread without a time limit: one that may hang belongs into the grading pool instead.
  """

  def __init__(self, name: str, problems: Sequence[Problem], grade: Grader):
    if not len(problems):
      raise ValueError('no problems to ask')
    self.name, self._problems, self._grade = name, problems, grade
    self._turns = Turns(1)

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """The question; `info['problem']` has its id, and `messages` the conversation around it where it has one."""
    self._problem = self._problems[seed % len(self._problems)]
    self._turns.begin()
    info: dict[str, Any] = {'problem': self._problem.id}
    if len(self._problem.messages) > 1:
      info['messages'] = [dict(message) for message in self._problem.messages]
    return self._problem.prompt, info

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Grades the answer, which ends the episode."""
    self._turns.take()
    reward = float(self._grade(self._problem.prompt, action, self._problem.answer, self._problem.extra))
    self._turns.end(terminated=True)
    return '', reward, True, False, {'metrics': {'success': float(reward >= 1)}, 'metrics_agg_mode': {'success': 'last'}}


def reasoning_gym(
  dataset: str,
  args: Mapping[str, Any] | None = None,
  split: Literal['train', 'test'] = 'train',
  size: int = 100_000,
  held_out: int = 128,
  seed: int = 0,
) -> SingleTurn:
  """A reasoning-gym data set as an environment, with its own scorer; the arguments are those of config.task of that kind.

  Raises SettingsError: no such data set, arguments it refuses, too few distinct questions.
  """
  task = Task(kind='reasoning_gym', name=dataset, args=args or {}, size=size, held_out=held_out, seed=seed)
  found = problems.load(task, split)
  return SingleTurn(f'reasoning_gym {dataset}', found, graders.load(graders.resolve(task)))
