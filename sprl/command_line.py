"""What the commands share: flags in, an exit status out, and one line instead of a traceback for what a user can put right."""

import logging
import os
import sys
from collections.abc import Callable, Iterator

from absl import app, flags
from absl import logging as absl_logging

from sprl.settings import Run, SettingsError, no_such_setting, to_dict

FREE = 'config.task.args', 'config.environment.args'  # settings whose keys only the data set, or the environment, knows


def start(main: Callable[[], int], prepare: Callable[[list[str]], None] = lambda argv: None) -> None:
  """Parses the flags, `prepare` first (it may define more), and exits with what `main` returns, or

  2  for a flag, setting, file or folder that cannot be used: one line on standard error says which, and what would be;
  3    where no group of rollouts comes to anything any more: the same line;
  130  for a second Ctrl-C: a run only notes the first.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # before jax loads: XLA's own warnings are not about the run
  app.run(lambda _: reported(main), flags_parser=lambda argv: _parse(argv, prepare))


def reported(main: Callable[[], int]) -> int:
  """Calls `main`; the exit status of `start`."""
  absl_logging.set_verbosity(absl_logging.WARNING)
  logging.basicConfig(
    level=logging.WARNING, format='%(levelname)s: %(message)s', stream=sys.stderr, force=True
  )  # absl's is there
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
  """The exit status after an error that a user can put right; None: it is ours."""
  # Imported when needed: a wrong setting is answered without waiting for jax to load.
  from sprl.io.checkpoint import CheckpointError
  from sprl.io.huggingface import WeightsError
  from sprl.io.pretrained import PretrainedError
  from sprl.io.tokenizer import TokenizerError
  from sprl.models.config import ConfigError
  from sprl.rollout.scheduler import Stalled
  from sprl.tasks.environments.protocol import EnvironmentFault

  if isinstance(error, Stalled):
    return 3
  of_input = PretrainedError, ConfigError, WeightsError, TokenizerError, CheckpointError, EnvironmentFault
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
    if 'Traceback' in message:  # of an error in a config file; its last line says which
      message = message.rpartition('\n')[2].removeprefix('sprl.settings.SettingsError: ')
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
  """`config.rollout.group` of each argument `--config.rollout.group=4`."""
  for argument in argv[1:]:
    name = argument.lstrip('-').partition('=')[0]
    if argument.startswith('-') and name.removeprefix('no').startswith('config.'):
      yield name


def _check_name(name: str) -> None:
  """Raises SettingsError where there is no such setting: ml_collections would say so in a traceback."""
  section, where = to_dict(Run()), 'config'
  for key in name.split('.')[1:]:
    if where in FREE:
      return
    if not isinstance(section, dict) or key not in section:
      if isinstance(section, dict):
        raise SettingsError(no_such_setting(where, key, section))
      raise SettingsError(f'{where}.{key}: no such setting; {where} is one value')
    section, where = section[key], f'{where}.{key}'
