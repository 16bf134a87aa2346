"""Settings as keyword arguments: the sections of sprl.config.Run, as mappings or with dotted keys."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from sprl.config import Run, SettingsError
from sprl.config_reader import resolve

Settings = dict[str, Any]  # nested: {'cache': {'budget': 48}}


def merged(*given: Mapping[str, Any]) -> Settings:
  """Return nested settings. Of two values for one setting the later one counts.

  `{'cache.budget': 48}` and `{'cache': {'budget': 48}}` are the same. `resolve` checks names and values.

  Raises SettingsError for a section that is not a mapping, and for a key that is not text.
  """
  found: Settings = {}
  for settings in given:
    _merge(found, Run, settings)
  return found


def resolved(settings: Settings) -> Run:
  """Return the checked settings of a run. An arm or preset refuses to change one of `settings`. Raises SettingsError."""
  return resolve(settings, frozenset(_keys(settings)))


def _keys(section: Mapping[Any, Any], prefix: str = '') -> Iterator[str]:
  for name, value in section.items():
    if isinstance(value, Mapping):
      yield from _keys(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}'


def _merge(into: Settings, section: type, given: Mapping[str, Any], where: str = 'config') -> None:
  hints = typing.get_type_hints(section)
  for key, value in given.items():
    if not isinstance(key, str):
      raise SettingsError(f'{where}: found the key {key!r}; expected names of settings')
    name, _, rest = key.partition('.')
    inner, value = hints.get(name), value.to_dict() if isinstance(value, ConfigDict) else value
    if not dataclasses.is_dataclass(inner):
      into[key] = value
      continue
    if not rest and not isinstance(value, Mapping):
      raise SettingsError(f'{where}.{name} = {value!r:.200}: expected a mapping of settings')
    _merge(into.setdefault(name, {}), typing.cast(type, inner), {rest: value} if rest else value, f'{where}.{name}')


def refuse(given: Mapping[str, Any], sections: tuple[str, ...], where: str) -> None:
  """Raise SettingsError if nested settings have a value in one of `sections`. `where` names the call that takes them."""
  for section in sections:
    if section in given:
      raise SettingsError(f'config.{section} = {given[section]!r}: expected this section in {where}')
