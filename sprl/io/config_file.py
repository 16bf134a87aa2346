"""config.json: the settings of the run in a work directory. A run cannot be resumed with other settings."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sprl.config import SettingsError
from sprl.foreign import expanded
from sprl.io import files
from sprl.io.starts import last_folder

_CONFIG = 'config.json'


def write_config(
  workdir: str | os.PathLike,
  config: Mapping[str, Any],
  may_change: Sequence[str] | None = (),
  defaults: Mapping[str, Any] | None = None,
) -> list[str]:
  """Write config.json and return its differences from the previous one, each as `key: old -> new`.

  The work directory is created if it does not exist. The arguments and errors are those of `check_config`.
  """
  differences = check_config(workdir, config, may_change, defaults)
  path = Path(workdir) / _CONFIG
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_text(path, json.dumps(config, indent=2, sort_keys=True) + '\n')
  return differences


def check_config(
  workdir: str | os.PathLike,
  config: Mapping[str, Any],
  may_change: Sequence[str] | None = (),
  defaults: Mapping[str, Any] | None = None,
) -> list[str]:
  """Return the differences of these settings from config.json, each as `key: old -> new`. Writes nothing.

  Args:
    workdir: the work directory, which need not exist.
    config: the settings, nested.
    may_change: keys or sections that may differ in a resumed run, such as `steps` or `log`; None: all.
    defaults: the previous value of settings that the previous config.json lacks because they are newer.

  Raises SettingsError, which names them, if other settings differ, or if config.json is not that of a run, but of a model.
  """
  old = read_located(workdir) if (Path(workdir) / _CONFIG).exists() else None
  if old is not None and ('model_type' in old or not old.keys() & config.keys()):
    raise SettingsError(f'--workdir={workdir}: its config.json is not that of a run; expected a folder without one, or a run')
  differences = [] if old is None else config_differences(old, located(config), defaults or {})
  allowed = tuple(f'{key}{end}' for key in may_change or () for end in (':', '.'))
  refused = [] if may_change is None else [difference for difference in differences if not difference.startswith(allowed)]
  if refused:
    raise SettingsError(
      f'{workdir} holds a run with other settings. Expected the same, or a new --workdir; --from={workdir} begins a new run from '
      'the weights of this one:\n  ' + '\n  '.join(f'config.{difference}' for difference in refused)
    )
  return differences


def read_config(workdir: str | os.PathLike, flag: str = '--workdir') -> dict[str, Any]:
  """Read the settings of the run in a work directory. `flag` names it in messages.

  Raises FileNotFoundError if the folder has no config.json, and SettingsError if that file is damaged or `workdir` an address.
  """
  path = files.local_folder(flag, workdir) / _CONFIG
  if not path.exists():
    raise FileNotFoundError(f'{flag}={workdir}: {path}: no such file; expected a work directory that sprl.main has written')
  try:
    config = json.loads(path.read_text(encoding='utf-8'))
  except (ValueError, RecursionError) as error:
    raise SettingsError(f'{path}: not JSON ({error}); expected the settings that a run has written') from None
  if not isinstance(config, dict):
    raise SettingsError(f'{path}: not a JSON object; expected the settings that a run has written')
  return _renamed(config)


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
  """Return settings that an older version wrote under their present names."""
  log = config.get('log')
  if not isinstance(log, dict) or 'tensorboard' not in log:
    return config
  others = {name: value for name, value in log.items() if name != 'tensorboard'}
  return {**config, 'log': {'trackers': ['tensorboard'] if log['tensorboard'] else [], **others}}


def read_located(workdir: str | os.PathLike) -> dict[str, Any]:
  """Read the settings of a run, with absolute paths: of files below the folder of its last start, else below this one."""
  return located(read_config(workdir), last_folder(workdir))


def located(config: Mapping[str, Any], start: str = '') -> dict[str, Any]:
  """Return settings in which names of local files and folders are absolute: those that exist below `start`, or here."""

  def place(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) and key not in ('args', 'template_args', 'columns', 'judge'):  # these have keys of their own
      return {name: place(name, each) for name, each in value.items()}
    if key == 'rewards':
      return [place('grader', each) for each in value]
    if key not in ('path', 'grader', 'name', 'method', 'variant', 'estimator') or not isinstance(value, str):
      return value
    if key == 'path' and value.startswith('random:'):
      from sprl.io.random_model import NAMED  # imported here, because it loads jax

      folder = value.removeprefix('random:')
      return value if folder in NAMED else f'random:{place(key, folder)}'
    name, mark, function = (value, '', '') if key == 'path' else value.rpartition('.py:')
    file = expanded(name + mark.rstrip(':'))
    places = [Path(base, file) for base in (start, '') if (mark or key == 'path') and Path(base, file).exists()]
    return os.path.abspath(places[0]) + mark[-1:] + function if places else value

  return {key: place(key, value) for key, value in config.items()}


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
  """Return a line such as `task.name: 'chain_sum' -> 'gcd'` for each setting that differs, sorted by key.

  Tuples equal lists, as in JSON. A setting that only `new` has is compared with its value in `defaults`.
  """
  after = _leaves(new)
  before = {key: value for key, value in _leaves(defaults).items() if key in after} | _leaves(old)
  return [
    f'{key}: {before.get(key, "(not set)")} -> {after.get(key, "(not set)")}'
    for key in sorted(before.keys() | after.keys())
    if before.get(key) != after.get(key)
  ]


def _leaves(config: Mapping[str, Any], prefix: str = '') -> dict[str, str]:
  """Map each dotted key to the repr of its value, which distinguishes 1, 1.0, True and '1'."""
  leaves: dict[str, str] = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      leaves |= _leaves(value, f'{prefix}{key}.')
    else:
      leaves[f'{prefix}{key}'] = repr(json.loads(json.dumps(value)))
  return leaves
