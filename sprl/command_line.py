"""Shared by the commands: flags, exit statuses, and one-line errors in place of tracebacks for mistakes a user can correct."""

import logging
import os
import sys
from collections.abc import Callable, Iterator

from absl import app, flags
from absl import logging as absl_logging

from sprl.config import Run, SettingsError, to_dict
from sprl.config_reader import no_such_setting

FREE = ('config.task.args', 'config.task.judge')  # their keys are defined by the data set, the environment or the judge


def start(main: Callable[[], int], prepare: Callable[[list[str]], None] = lambda argv: None) -> None:
  """Parse the flags, run `main` and exit with its status. `prepare(argv)` runs before parsing and may define flags.

  Other exit statuses, each with one line on standard error:

    2    a flag, setting, file or folder cannot be used
    3    no group of rollouts succeeds any more
    130  a second Ctrl-C; the first one only asks the run to stop
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # set before jax loads: hides XLA's warnings
  app.run(lambda _: reported(main), flags_parser=lambda argv: _parse(argv, prepare))


def reported(main: Callable[[], int]) -> int:
  """Call `main` and return the exit status that `start` documents."""
  absl_logging.set_verbosity(absl_logging.WARNING)
  logging.basicConfig(
    level=logging.WARNING, format='%(levelname)s: %(message)s', stream=sys.stderr, force=True
  )  # absl has installed a handler already
  logging.getLogger('sprl').setLevel(logging.INFO)
  try:
    return main()
  except KeyboardInterrupt:
    return 130
  except (SettingsError, OSError) as error:
    return _refuse(error)
  except Exception as error:
    if (status := _status(error)) is None:
      raise
    return _refuse(error, status)


def _status(error: Exception) -> int | None:
  """Return the exit status of an error that a user can correct, or None for a bug in sprl."""
  # Imported late: an error in the settings is reported before jax loads.
  from sprl.io.checkpoint import CheckpointError
  from sprl.io.huggingface import WeightsError
  from sprl.io.metrics import LogError
  from sprl.io.pretrained import PretrainedError
  from sprl.io.tokenizer import TokenizerError
  from sprl.models.config import ConfigError
  from sprl.rollout.scheduler import Stalled
  from sprl.tasks.environments.protocol import EnvironmentFault

  if isinstance(error, Stalled):
    return 3
  of_input = PretrainedError, ConfigError, WeightsError, TokenizerError, CheckpointError, LogError, EnvironmentFault
  return 2 if isinstance(error, of_input) else None


def _parse(argv: list[str], prepare: Callable[[list[str]], None]) -> list[str]:
  try:
    for name in _config_flags(argv):
      _check_name(name)
    prepare(argv)
    _, *others = rest = flags.FLAGS(argv)
    if others:
      raise SettingsError(f'{" ".join(others)}: expected flags only, such as --config.steps=5')
    return rest
  except flags.Error as error:
    message = str(error).strip()
    if 'Traceback' in message:  # from a config file that raised; the last line is the error
      message = message.rpartition('\n')[2].removeprefix('sprl.config.SettingsError: ')
    sys.exit(_refuse(message))
  except (SettingsError, OSError) as error:
    sys.exit(_refuse(error))
  except AttributeError as error:
    unknown = [name for name in _config_flags(argv) if name.rpartition('.')[0] in FREE]
    if not unknown:
      raise
    whole = unknown[0].rpartition('.')[0]
    sys.exit(_refuse(f'{", ".join(unknown)}: {error} is not set in the config; set all of --{whole}="{{...}}"'))


def _refuse(error: object, status: int = 2) -> int:
  print(f'error: {error}', file=sys.stderr)
  return status


# --- names of settings -----------------------------------------------------------------------------------------------


def _config_flags(argv: list[str]) -> Iterator[str]:
  """Yield `config.rollout.group` for an argument `--config.rollout.group=4`."""
  for argument in argv[1:]:
    name = argument.lstrip('-').partition('=')[0]
    if argument.startswith('-') and name.removeprefix('no').startswith('config.'):
      yield name


def _check_name(name: str) -> None:
  """Raise SettingsError for an unknown setting; ml_collections would print a traceback."""
  section, where = to_dict(Run()), 'config'
  for key in name.split('.')[1:]:
    if where in FREE:
      return
    if not isinstance(section, dict) or key not in section:
      if isinstance(section, dict):
        raise SettingsError(no_such_setting(where, key, section))
      raise SettingsError(f'{where}.{key}: no such setting; {where} is one value')
    section, where = section[key], f'{where}.{key}'
