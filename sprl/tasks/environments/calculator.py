"""Word problems with a calculator: the model may ask for `<calc>3*(4+5)</calc>` and reads the value in the next turn.

The episode ends with a final answer, `<answer>42</answer>` or `#### 42`, also where calculations stand before it. It is worth
1 if its number is the answer's. A turn with neither costs `invalid_penalty`.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from sprl.settings import Task
from sprl.tasks import graders, problems
from sprl.tasks.environments.arithmetic import CalculationError, calculate
from sprl.tasks.environments.turns import Turns
from sprl.tasks.problems import Problem

MAX_CALCULATIONS = 8  # answered in one turn
_CALC = re.compile(r'<calc>(.*?)</calc>', re.DOTALL)
_AGGREGATION = {'success': 'last', 'valid_action': 'mean', 'calculations': 'mean', 'failed_calculations': 'mean'}

_RULES = (
  'You may use a calculator: write an expression such as <calc>3*(4+5)</calc> and stop; its value is told to you in the next '
  'turn. Give the final number as <answer>42</answer>.'
)


class Calculator:
  """Asks problem `seed` modulo their number, of `problems` whose answers are numbers.

  Raises ValueError where there is no problem.
  """

  name = 'calculator'

  def __init__(self, problems: Sequence[Problem], max_actions: int = 5, invalid_penalty: float = 0.0):
    if not len(problems):
      raise ValueError('no problems to ask')
    self._problems, self._penalty = problems, invalid_penalty
    self._turns = Turns(max_actions)

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """The question; `info['problem']` has its id, and `messages` the conversation around it where it has one."""
    self._problem = self._problems[seed % len(self._problems)]
    self._turns.begin()
    info: dict[str, Any] = {'problem': self._problem.id}
    observation = f'{self._problem.prompt}\n\n{_RULES}'
    if len(self._problem.messages) > 1:
      info['messages'] = [*map(dict, self._problem.messages[:-1]), {'role': 'user', 'content': observation}]
    return observation, info

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Grades a final answer, or calculates. Raises ValueError where the problem's answer is no number."""
    self._turns.take()
    final, asked, failed, reward = _final(action), _CALC.findall(action)[:MAX_CALCULATIONS], 0, 0.0
    if final is not None:
      reward = graders.numeric('', final, self._problem.answer)
      text = ''
    elif asked:
      lines = [_answered(expression) for expression in asked]
      text = '\n'.join(line for line, _ in lines)
      failed = sum(not worked for _, worked in lines)
    else:
      text, reward = f'There is neither a calculation nor an answer in this. {_RULES}', self._penalty
    terminated = final is not None
    truncated = self._turns.end(terminated)
    metrics = {
      'success': terminated and reward == 1,
      'valid_action': terminated or bool(asked),
      'calculations': 0 if terminated else len(asked),
      'failed_calculations': failed,
    }
    info = {'metrics': {k: float(v) for k, v in metrics.items()}, 'metrics_agg_mode': dict(_AGGREGATION)}
    return text, float(reward), terminated, truncated, info

  def sample_random_action(self, rng: np.random.Generator | None = None) -> str:
    """A calculation or, half the time, an answer."""
    rng = rng or np.random.default_rng()
    a, b = rng.integers(100, size=2)
    return f'<answer>{a}</answer>' if rng.random() < 0.5 else f'<calc>{a}*{b}</calc>'


def gsm8k(
  path: str = '', split: Literal['train', 'test'] = 'train', max_actions: int = 5, invalid_penalty: float = 0.0
) -> Calculator:
  """The environment over GSM8K; `path` and `split` (train, test) as config.task.path has them. Raises SettingsError."""
  return Calculator(_gsm8k(path, split), max_actions, invalid_penalty)


@functools.cache  # every environment of a run asks the same ones
def _gsm8k(path: str, split: Literal['train', 'test']) -> Sequence[Problem]:
  return problems.load(Task(kind='gsm8k', path=path), split)


def _final(action: str) -> str | None:
  """The text of the final answer: the last tag's, else the rest of the line after the last `####`."""
  tagged = graders.last_tagged(action)
  if tagged is not None:
    return tagged
  _, mark, after = action.rpartition('####')
  return after.strip().partition('\n')[0] if mark else None


def _answered(expression: str) -> tuple[str, bool]:
  """What the calculator says to an expression, and whether it had a value."""
  plain = ' '.join(expression.split())
  try:
    return f'{plain} = {calculate(expression)}', True
  except CalculationError as error:
    return f'{plain:.60}: error: {error}', False
