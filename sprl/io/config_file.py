"""config.json: the settings that a work directory's run was started with, and a guard against resuming it with others."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sprl.io import files
from sprl.settings import SettingsError

_CONFIG = 'config.json'


def write_config(
  workdir: str | os.PathLike, config: Mapping[str, Any], may_change: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> list[str]:
  """Writes config.json, and returns how it differs from the one that was there (`key: old -> new`).

  `may_change` names keys, or sections of them, that a resumed run may be given anew (`steps`, `log`). A setting younger than the
  folder's run counts as its value in `defaults`.

  Raises SettingsError, naming them, when other keys differ from the run that is already in the folder.
  """
  path = Path(workdir) / _CONFIG
  differences = config_differences(read_config(workdir), config, defaults or {}) if path.exists() else []
  allowed = tuple(f'{key}{end}' for key in may_change for end in (':', '.'))
  if refused := [difference for difference in differences if not difference.startswith(allowed)]:
    raise SettingsError(
      f'{workdir} holds a run with other settings; give these back or use another folder:\n  ' + '\n  '.join(refused)
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_text(path, json.dumps(config, indent=2, sort_keys=True) + '\n')
  return differences


def read_config(workdir: str | os.PathLike) -> dict[str, Any]:
  """The settings a run was started with.

  Raises FileNotFoundError where the folder is no run's, SettingsError where the file is not as a run writes it.
  """
  path = Path(workdir) / _CONFIG
  if not path.exists():
    raise FileNotFoundError(f'{path}: no such file; a work directory that sprl.main has written holds one')
  try:
    config = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise SettingsError(f'{path}: not JSON ({error}); a run writes its settings there') from None
  if not isinstance(config, dict):
    raise SettingsError(f'{path}: not a JSON object; a run writes its settings there')
  return config


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
  """`task.name: 'chain_sum' -> 'gcd'` for each setting that differs, in order of key; tuples equal lists, as in JSON.

  Where `old` lacks a setting that `new` has, it stood at its default.
  """
  after = _leaves(new)
  before = {key: value for key, value in _leaves(defaults).items() if key in after} | _leaves(old)
  return [
    f'{key}: {before.get(key, "(not set)")} -> {after.get(key, "(not set)")}'
    for key in sorted(before.keys() | after.keys())
    if before.get(key) != after.get(key)
  ]


def _leaves(config: Mapping[str, Any], prefix: str = '') -> dict[str, str]:
  """Dotted key -> the value's repr (so that 1, 1.0, True and '1' are told apart)."""
  leaves: dict[str, str] = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      leaves |= _leaves(value, f'{prefix}{key}.')
    else:
      leaves[f'{prefix}{key}'] = repr(json.loads(json.dumps(value)))
  return leaves
