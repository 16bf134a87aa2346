"""Environments by name: shipped ones, those of other packages, and `file.py:Class`."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from sprl.config import SettingsError
from sprl.config_reader import coerce
from sprl.foreign import split_reference
from sprl.tasks.environments import user_file
from sprl.tasks.environments.calculator import gsm8k
from sprl.tasks.environments.chat import chat
from sprl.tasks.environments.from_gem import gem
from sprl.tasks.environments.frozen_lake import FrozenLake
from sprl.tasks.environments.guess_number import GuessNumber
from sprl.tasks.environments.protocol import Environment
from sprl.tasks.environments.single_turn import reasoning_gym
from sprl.tasks.environments.sokoban import Sokoban

_BUILDERS: dict[str, Callable[..., Environment]] = {
  'frozen_lake': FrozenLake,
  'sokoban': Sokoban,
  'guess_number': GuessNumber,
  'calculator': gsm8k,
  'reasoning_gym': reasoning_gym,
  'gem': gem,
  'chat': chat,
}
NAMES = tuple(_BUILDERS)


def make(name: str, args: Mapping[str, Any]) -> Environment:
  """Make a new environment.

  Raises SettingsError for an unknown name or argument, a refused value, a missing package, and an unusable file or class.
  """
  if split_reference(name):
    kind = user_file.load_class(name, ('reset', 'step'), 'config.task.name')
    return user_file.construct(kind, args, 'config.task.args')
  if name not in _BUILDERS:
    raise SettingsError(f'config.task.name = {name!r}: expected one of {", ".join(NAMES)}, or `file.py:Class`')
  builder = _BUILDERS[name]
  parameters = inspect.signature(builder).parameters
  for given in args:
    if given not in parameters:
      raise SettingsError(f'config.task.args has {given!r}: {name} takes {", ".join(parameters)}')
  for parameter in parameters.values():
    if parameter.default is parameter.empty and parameter.name not in args:
      raise SettingsError(f'config.task.args lacks {parameter.name!r}: {name} takes {", ".join(parameters)}')
  hints = typing.get_type_hints(builder.__init__ if isinstance(builder, type) else builder)
  args = {given: coerce(hints[given], value, f'config.task.args.{given}') for given, value in args.items()}
  try:
    return builder(**args)
  except SettingsError:
    raise
  except ValueError as error:
    raise SettingsError(f'config.task.args = {dict(args)!r}: refused by {name} ({error})') from error


def takes(name: str, argument: str) -> bool:
  """Whether the environment accepts the argument; `split`, for example, distinguishes training from test problems.

  Raises SettingsError if the environment is a class in a file that cannot be used.
  """
  if split_reference(name):
    kind = user_file.load_class(name, ('reset', 'step'), 'config.task.name')
    return argument in inspect.signature(kind).parameters
  return name in _BUILDERS and argument in inspect.signature(_BUILDERS[name]).parameters
