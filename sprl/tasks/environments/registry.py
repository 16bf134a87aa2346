"""Any environment by name: those that ship, those of other packages, and `file.py:Class`."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from sprl.settings import SettingsError, coerce
from sprl.tasks.environments import user_file
from sprl.tasks.environments.calculator import gsm8k
from sprl.tasks.environments.chat import chat
from sprl.tasks.environments.from_gem import gem
from sprl.tasks.environments.from_verifiers import verifiers
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
  'verifiers': verifiers,
  'chat': chat,
}
NAMES = tuple(_BUILDERS)


def make(name: str, args: Mapping[str, Any]) -> Environment:
  """An environment; each call makes one of its own, for one episode at a time.

  Raises SettingsError: unknown name or argument, a value that is refused, a package that is missing, a file or class that
  cannot be used.
  """
  if user_file.split_reference(name):
    kind = user_file.load_class(name, ('reset', 'step'), 'config.environment.name')
    return user_file.construct(kind, args, 'config.environment.args')
  if name not in _BUILDERS:
    raise SettingsError(f'config.environment.name = {name!r}: expected one of {", ".join(NAMES)}, or `file.py:Class`')
  builder = _BUILDERS[name]
  parameters = inspect.signature(builder).parameters
  for given in args:
    if given not in parameters:
      raise SettingsError(f'config.environment.args has {given!r}: {name} takes {", ".join(parameters)}')
  for parameter in parameters.values():
    if parameter.default is parameter.empty and parameter.name not in args:
      raise SettingsError(f'config.environment.args lacks {parameter.name!r}: {name} takes {", ".join(parameters)}')
  hints = typing.get_type_hints(builder.__init__ if isinstance(builder, type) else builder)
  args = {given: coerce(hints[given], value, f'config.environment.args.{given}') for given, value in args.items()}
  try:
    return builder(**args)
  except SettingsError:
    raise
  except ValueError as error:
    raise SettingsError(f'config.environment.args = {dict(args)!r}: refused by {name} ({error})') from error


def takes(name: str, argument: str) -> bool:
  """Whether `make` accepts the argument for this environment: `split`, for one, tells training from test problems.

  Raises SettingsError where the environment is a file's class that cannot be used.
  """
  if user_file.split_reference(name):
    kind = user_file.load_class(name, ('reset', 'step'), 'config.environment.name')
    return argument in inspect.signature(kind).parameters
  return name in _BUILDERS and argument in inspect.signature(_BUILDERS[name]).parameters
