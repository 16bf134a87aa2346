"""Data, rewards and environments as a caller of `fit` gives them, turned into settings and `Inputs` of a run."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sprl.api.settings import Settings, merged
from sprl.config import SettingsError
from sprl.foreign import expanded
from sprl.rollout.setup import Inputs
from sprl.tasks.environment_pool import Kind
from sprl.tasks.in_memory import Row

Data = Iterable[Row] | str | Path | None
One = Callable[..., Any] | str  # a reward: a function, or the name of a grader
Reward = One | Sequence[One] | Mapping[One, float] | None


def inputs_of(
  data: Data,
  reward: Reward = None,
  *,
  test: Iterable[Row] | None = None,
  environment: Kind | None = None,
  kind: str | None = None,
) -> tuple[Settings, Inputs]:
  """Return the settings that the arguments stand for, and the Python objects among them.

  Args:
    data: rows; a folder of train.jsonl and test.jsonl; another data set by path or hub name (docs: Data); None: what the settings
      name, or the environment.
    reward: a function, or the name of a grader; several: a list of these, or a dictionary with the weight of each. None: the
      grader of the settings.
    test: held-out rows.
    environment: a class, or a function that makes an environment.
    kind: `task.kind` of data in files; None: that of the files.

  Raises SettingsError for arguments that contradict each other, and for rows that are not a list.
  """
  given: Settings = {'task': {}}
  task, train = given['task'], None
  if environment is not None:
    if data is not None or test is not None or reward is not None:
      raise SettingsError('environment: expected no rows and no reward beside it: an environment has its own')
    if not _has_signature(environment):
      said = 'expected a class with reset and step, or a function that makes one'
      raise SettingsError(f'environment = {environment!r}: {said}')
    task |= {'kind': 'environment', 'name': getattr(environment, '__name__', repr(environment))}
  elif isinstance(data, str | Path):
    found = 'jsonl' if (expanded(data) / 'train.jsonl').is_file() else 'dataset'
    task |= {'kind': kind or found, 'path': str(data)}
  elif data is not None:
    train, task['kind'] = listed('data', data), 'rows'
  if test is not None and train is None:
    raise SettingsError('test: expected None, because the training data are not rows in memory')
  of_rewards, functions = rewards_of(reward)
  task |= of_rewards
  return merged(given), Inputs(train, None if test is None else listed('test', test), functions, environment)


def _has_signature(function: Any) -> bool:
  try:
    inspect.signature(function)
  except (TypeError, ValueError):  # no function, or a builtin type
    return False
  return True


def listed(name: str, given: Any, items: str = 'rows, each a dictionary') -> list[Any]:
  """Return the items of an iterable. Raises SettingsError, which begins with the name of the argument, for anything else."""
  if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
    raise SettingsError(f'{name} = {given!r:.200}: expected a list of {items}')
  return list(given)


def rewards_of(reward: Reward) -> tuple[Settings, dict[str, Callable[..., Any]]]:
  """Return the settings of the task that stand for rewards, and the functions by name.

  Raises SettingsError for something that is no reward, for none, and for two functions with one name.
  """
  functions: dict[str, Callable[..., Any]] = {}

  def grader(one: Any) -> str:
    if isinstance(one, str):
      return one
    if not callable(one):
      raise SettingsError(f'reward = {one!r:.200}: expected a function, or the name of a grader')
    if not _has_signature(one):
      raise SettingsError(f'reward = {one!r:.200}: expected a function of Python, whose arguments have names')
    name = getattr(one, '__name__', type(one).__name__)
    name = name if name.isidentifier() else 'reward'  # a lambda
    if functions.setdefault(name, one) is not one:
      raise SettingsError(f'reward: expected functions of different names; two are called {name!r}')
    return f'python:{name}'

  if reward is None:
    return {}, functions
  if isinstance(reward, Mapping | Sequence) and not reward:
    raise SettingsError(f'reward = {reward!r}: expected a function, the name of a grader, or at least one of these')
  if isinstance(reward, Mapping):
    for one, weight in reward.items():
      if (
        not (callable(one) or isinstance(one, str)) or isinstance(weight, bool) or not isinstance(weight, int | float | np.number)
      ):
        raise SettingsError(f'reward = {reward!r:.200}: expected {{function: weight}}, each weight a number')
    return {
      'grader': 'auto',
      'rewards': tuple(
        f'{grader(one)}={weight.item() if isinstance(weight, np.generic) else weight!r}' for one, weight in reward.items()
      ),
    }, functions
  if isinstance(reward, Sequence) and not isinstance(reward, str):
    return {'grader': 'auto', 'rewards': tuple(map(grader, reward))}, functions
  return {'grader': grader(reward), 'rewards': ()}, functions
