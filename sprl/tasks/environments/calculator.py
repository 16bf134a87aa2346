"""Word problems with a calculator: the model may write `<calc>3*(4+5)</calc>` and reads the value in the next turn.

The episode ends with a final answer, `<answer>42</answer>` or `#### 42`, even after calculations in the same turn. The reward is
1 if its number is the answer's. A turn with neither gets `invalid_penalty`.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from sprl.config import SettingsError, Task
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
  """Asks problem number `seed` modulo their count. Answers of `problems` must be numbers.

  Raises ValueError if there is no problem.
  """

  name = 'calculator'

  def __init__(self, problems: Sequence[Problem], max_actions: int = 5, invalid_penalty: float = 0.0):
    if not len(problems):
      raise ValueError('no problems to ask')
    self._problems, self._penalty = problems, invalid_penalty
    self._turns = Turns(max_actions)

  def __len__(self) -> int:
    return len(self._problems)

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """Ask the question. `info['problem']` holds its id, `info['messages']` its conversation if it has one."""
    self._problem = self._problems[seed % len(self._problems)]
    self._turns.begin()
    info: dict[str, Any] = {'problem': self._problem.id}
    observation = f'{self._problem.prompt}\n\n{_RULES}'
    if len(self._problem.messages) > 1:
      info['messages'] = [*map(dict, self._problem.messages[:-1]), {'role': 'user', 'content': observation}]
    return observation, info

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Grade a final answer, or calculate. Raises ValueError if the answer of the problem is not a number."""
    self._turns.take()
    final, asked, failed, reward = _final(action), _CALC.findall(action)[:MAX_CALCULATIONS], 0, 0.0
    if final is not None:
      reward = graders.numeric('', f'<answer>{final}</answer>', self._problem.answer)
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
    """Return a calculation or, half of the time, an answer."""
    rng = rng or np.random.default_rng()
    a, b = rng.integers(100, size=2)
    return f'<answer>{a}</answer>' if rng.random() < 0.5 else f'<calc>{a}*{b}</calc>'


def gsm8k(
  path: str | None = None, split: Literal['train', 'test'] = 'train', max_actions: int = 5, invalid_penalty: float = 0.0
) -> Calculator:
  """Return the environment over GSM8K; `path` is as config.task.path. Raises SettingsError."""
  return Calculator(_gsm8k(path, split), max_actions, invalid_penalty)


@functools.cache  # shared by all environments of a process
def _gsm8k(path: str | None, split: Literal['train', 'test']) -> Sequence[Problem]:
  try:
    return problems.load(Task(kind='gsm8k', path=path), split)
  except SettingsError as error:
    raise SettingsError(str(error).replace('config.task.path', 'config.task.args.path')) from error


def _final(action: str) -> str | None:
  """Return the final answer: the content of the last tag, else the rest of the line after the last `####`."""
  tagged = graders.last_tagged(action)
  return graders.marked(action) if tagged is None else tagged


def _answered(expression: str) -> tuple[str, bool]:
  """Return the calculator's reply to an expression, and whether the expression has a value."""
  plain = ' '.join(expression.split())
  try:
    return f'{plain} = {calculate(expression)}', True
  except CalculationError as error:
    return f'{plain:.60}: error: {error}', False
