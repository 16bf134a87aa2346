"""Reading: a config, or the config.json of a run, becomes a checked `Run`."""

import dataclasses
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sprl.config import UNIONS, Run, SettingsError, unless_none
from sprl.config_checks import validate
from sprl.foreign import split_reference
from sprl.presets import sources, with_arm, with_preset, with_task

if TYPE_CHECKING:
  from ml_collections import ConfigDict


def resolve(config: 'Mapping[str, Any] | ConfigDict', given: Collection[str] = ()) -> Run:
  """Return the checked settings of a config. A setting that the config lacks has its default.

  `given` are keys that the user has set, such as the flags of a command. An arm or preset refuses to change them. Other settings
  it changes if they have their default. Two things are changed without a warning: the arm `dense` drops the budget, and the
  packing follows the arm or the task.

  Raises SettingsError for an unknown key, a wrong type, a value out of range, or an impossible combination.
  """
  try:
    plain = dict(config) if isinstance(config, Mapping) else config.to_dict()  # a ConfigDict is no Mapping
  except AttributeError:
    name = type(config).__name__
    raise SettingsError(f'get_config() returned {name}: expected sprl.config.default_config() with changes') from None
  run = with_task(with_arm(with_preset(_build(Run, plain, 'config'), given), given))
  try:
    validate(run)
  except SettingsError as error:
    raise SettingsError(_with_source(str(error), run)) from None
  return run


def _with_source(message: str, run: Run) -> str:
  """Return a message about a setting, and which arm or preset sets it, if one does."""
  key = message.partition(' = ')[0].removeprefix('config.')
  source = sources(run).get(key)
  return message if source is None else f'{message}. {source} sets config.{key}'


def no_such_setting(where: str, key: str, has: Iterable[str]) -> str:
  """Return the error message for a key that the section `where` does not have. It names other sections that have the key."""
  sections = {name: hint for name, hint in typing.get_type_hints(Run).items() if dataclasses.is_dataclass(hint)}
  elsewhere = [f'config.{name}.{key}' for name, hint in sections.items() if key in typing.get_type_hints(hint)]
  found = f'; there is {", ".join(elsewhere)}' if elsewhere else ''
  return f'{where}.{key}: no such setting; {where} has {", ".join(sorted(has))}{found}'


def _build(cls: type, given: Mapping[str, Any], where: str) -> Any:
  hints = typing.get_type_hints(cls)
  unknown = sorted(set(given) - set(hints))
  if unknown:
    raise SettingsError(no_such_setting(where, unknown[0], hints))
  return cls(**{name: coerce(hints[name], value, f'{where}.{name}') for name, value in given.items()})


def coerce(hint: Any, value: Any, where: str) -> Any:
  """`value` as the type `hint`, where that loses nothing (an int for a float, a list for a tuple, NumPy's numbers).

  The text `None` is None where the hint allows it: the command line has no other way to write it. Raises SettingsError.
  """
  inner = unless_none(hint)
  if inner is not hint:
    return None if value in (None, 'None') else coerce(inner, value, where)
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in UNIONS and str in args:  # a name, or what a user's file defines
    (names,) = (typing.get_args(each) for each in args if each is not str)
    if value in names or (isinstance(value, str) and split_reference(value)):
      return value
    raise SettingsError(f'{where} = {value!r}: expected one of {", ".join(map(repr, names))}, or `file.py:NAME`')
  if origin in UNIONS:  # of a value and a dictionary
    return coerce(next(h for h in args if (typing.get_origin(h) is Mapping) == isinstance(value, Mapping)), value, where)
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise SettingsError(f'{where} = {value!r}: expected a section of settings')
    return _build(typing.cast(type, hint), value, where)
  if origin is Literal:
    if value not in args:
      raise SettingsError(f'{where} = {value!r}: expected one of {", ".join(map(repr, args))}')
    return value
  if origin is tuple:
    if isinstance(value, str) or not isinstance(value, list | tuple):
      raise SettingsError(f'{where} = {value!r}: expected a list of {_element(args[0])}')
    return tuple(coerce(args[0], v, f'{where}[{i}]') for i, v in enumerate(value))
  if origin is Mapping:
    if not isinstance(value, Mapping):
      raise SettingsError(f'{where} = {value!r}: expected a dictionary')
    if args[1] is Any:
      return _of_json(value, where)
    return {str(key): coerce(args[1], each, f'{where}.{key}') for key, each in value.items()}
  if isinstance(value, np.integer | np.floating):
    value = value.item()
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
    raise SettingsError(f'{where} = {value!r}: expected {hint.__name__}, got {type(value).__name__}')
  return value


def _of_json(value: Any, where: str) -> Any:
  """Return a value with numbers of Python in place of NumPy's. Raises SettingsError for what config.json cannot hold."""
  match value:
    case None | bool() | int() | float() | str():
      return value
    case np.generic():
      return _of_json(value.item(), where)
    case Mapping():
      return {key: _of_json(each, f'{where}.{key}') for key, each in value.items()}
    case list() | tuple():
      found = [_of_json(each, f'{where}[{i}]') for i, each in enumerate(value)]
      return found if isinstance(value, list) else tuple(found)
  raise SettingsError(f'{where} = {value!r}: expected a text, a number, a list or a dictionary, got {type(value).__name__}')


def _element(hint: Any) -> str:
  """Return a name for the elements of a list."""
  return ', '.join(map(repr, typing.get_args(hint))) if typing.get_origin(hint) is Literal else hint.__name__
