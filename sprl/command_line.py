"""Shared by the commands: flags, exit statuses, and one-line errors in place of tracebacks for mistakes a user can correct."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import ConfigDict, config_flags

from sprl.config import Run, SettingsError, to_dict, unless_none
from sprl.config_reader import coerce, no_such_setting
from sprl.kernels import gpu_memory, ptxas

# Dictionaries whose keys are not settings of sprl: a data set, environment, judge or chat template has them, or the user chooses.
FREE = (
  'config.task.args', 'config.task.template_args', 'config.task.judge', 'config.task.columns', 'config.task.mixture',
  'config.eval.sets',
)  # fmt: skip


def start(main: Callable[[], int], prepare: Callable[[list[str]], None] = lambda argv: None) -> None:
  """Parse the flags, run `main` and exit with its status. `prepare(argv)` runs before parsing and may define flags.

  Other exit statuses, each with one line on standard error:

    2    a flag, setting, file or folder cannot be used
    3    no group of rollouts succeeds any more
    130  a second Ctrl-C; the first one only asks the run to stop
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # set before jax loads: hides XLA's warnings
  gpu_memory.reserve(os.environ)
  if ptxas.needed() and ptxas.find() is None:
    print(f'WARNING: {ptxas.described()}', file=sys.stderr)
  app.run(lambda _: reported(main), flags_parser=lambda argv: _parse(with_shipped_config(argv), prepare))


def settings_of_flags() -> frozenset[str]:
  """Return the keys of the settings that flags have set, such as `cache.budget`."""
  return frozenset(config_flags.get_override_values(flags.FLAGS['config']))


def use_model(config: Any, model: str) -> None:
  """Set `model.path` to the value of --model. Raises SettingsError if a flag sets it to something else."""
  if 'model.path' in settings_of_flags() and config.model.path != model:
    raise SettingsError(f'--config.model.path = {config.model.path!r}: expected --model = {model!r}, or the flag --model alone')
  config.model.path = model


def with_shipped_config(argv: list[str], package: Path = Path(__file__).parent) -> list[str]:
  """Return the arguments with a config of an installed sprl in place of a file that does not exist.

  `--config=configs/quickstart.py` thus works outside a checkout too: a wheel has the folder configs/ in its package.
  """
  found = list(argv)
  for i, argument in enumerate(argv):
    flag, equals, value = argument.partition('=') if argument.startswith('-') else ('', '', argument)
    given = flag.lstrip('-') == 'config' if equals else i > 0 and argv[i - 1].lstrip('-') == 'config'
    file, colon, variant = value.partition(':')
    if given and not Path(file).exists() and (package / file).is_file() and not Path(file).is_absolute():
      found[i] = f'{flag}{equals}{package / file}{colon}{variant}'
  return found


def reported(main: Callable[[], int]) -> int:
  """Call `main` and return the exit status that `start` documents."""
  absl_logging.set_verbosity(absl_logging.FATAL)  # orbax logs a traceback from each thread, and raises the error anyway
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
    _check_file(_config_file(argv))
    for name in _config_flags(argv):
      _check_name(name)
    prepare(argv)
    _, *others = rest = flags.FLAGS(argv)
    _check_given_once(argv)
    if others:
      raise SettingsError(f'{" ".join(others)}: expected flags only, such as --config.steps=5')
    return rest
  except flags.Error as error:
    message = str(error).strip()
    if 'Traceback' in message:  # from a config file that raised a ValueError; the last line is the error
      last = message.rpartition('\n')[2]
      message = last.removeprefix('sprl.config.SettingsError: ')
      if found := _of_wrong_value(error):
        message = found
      elif message == last and (file := _config_file(argv)) is not None:
        lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', str(error))
        message = _of_config_file(file, lines[-1] if lines else None, last)
    elif 'config=None' in message and (file := _config_file(argv)) is not None:
      message = _no_config(file, None)
    elif missing := re.match(r'flag --(\w+)=None: ', message):
      message = f'expected the flag --{missing[1]}' + (
        ', such as --config=configs/quickstart.py' if missing[1] == 'config' else ''
      )
    elif found := re.match(r'flag --(config(?:\.\w+)+)=', message):
      message = _of_wrong_type(found[1], argv) or message
    sys.exit(_refuse(message))
  except (SettingsError, OSError) as error:
    sys.exit(_refuse(error))
  except Exception as error:
    sys.exit(_refuse(_raised_by_config_file(argv, error)))


def _refuse(error: object, status: int = 2) -> int:
  print(f'error: {error}', file=sys.stderr)
  return status


# --- config files that raise -----------------------------------------------------------------------------------------


def _raised_by_config_file(argv: list[str], error: Exception) -> str:
  """Return the message for an error in the file of --config, or in a flag for a key that it lacks. Raises other errors again."""
  file = _config_file(argv)
  if file is None:
    raise error
  if isinstance(error, SyntaxError):
    return _of_config_file(error.filename or file, error.lineno, f'SyntaxError: {error.msg}')
  frames = traceback.extract_tb(error.__traceback__)
  inside = [i for i, frame in enumerate(frames) if os.path.realpath(frame.filename) == os.path.realpath(file)]
  if inside:
    called = traceback.format_list(frames[inside[0] :])
    print(''.join(called), end='', file=sys.stderr)
    return _of_config_file(file, frames[inside[-1]].lineno, f'{type(error).__name__}: {error}')
  if found := re.search(r'(\w+) cannot be overridden', str(error)):  # in a flag; ml_collections raises it
    return f'{found[1]!r} cannot be a key of a dictionary of settings, because ml_collections uses it: expected another name'
  if isinstance(error, AttributeError) and error.name == 'get_config':
    return f'{file}: has no function get_config(); expected one that returns sprl.config.default_config() with changes'
  for frame, _ in traceback.walk_tb(error.__traceback__):  # ml_collections looks up the keys of the flags
    if frame.f_code.co_name == '_parse' and not isinstance(returned := frame.f_locals.get('config', ConfigDict()), ConfigDict):
      return _no_config(file, returned)
  missing = [name for name in _config_flags(argv) if _parent_in_free(name)]
  if isinstance(error, AttributeError | KeyError) and missing:  # ml_collections found no such key
    return f'{", ".join(missing)}: not set in the config; set all of --{_parent_in_free(missing[0])}="{{...}}"'
  raise error


def _no_config(file: str, returned: Any) -> str:
  name = None if returned is None else type(returned).__name__
  return f'get_config() of {file} returned {name}: expected sprl.config.default_config() with changes'


def _of_wrong_value(error: BaseException | None) -> str | None:
  """Return the message for a value that a ConfigDict refuses in the code of a config file; None for another error.

  The ConfigDict knows only the last part of the key. The whole config is a variable of a function that was running.
  """
  if error is None:
    return None
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  if not isinstance(error, TypeError) or not frames or frames[-1].f_code.co_name != '__setitem__':
    return _of_wrong_value(error.__context__)  # absl and ml_collections raise errors of their own after that of the code
  section, key, value = (frames[-1].f_locals.get(name) for name in ('self', 'key', 'value'))
  variables = [each for frame in frames for each in frame.f_locals.values() if isinstance(each, ConfigDict)]
  whole = [each for each in variables if set(each) == set(to_dict(Run()))]
  names = [f'{where}.{key}' for each in whole for where, found in _sections(each, 'config') if found is section]
  if not names or _parent_in_free(names[0]):
    return None
  hint = _hint(names[0])
  try:
    coerce(hint, value, names[0])
  except SettingsError as refused:
    return str(refused)
  return f'{names[0]} = {value!r}: expected {getattr(unless_none(hint), "__name__", hint)}, got {type(value).__name__}'


def _sections(section: ConfigDict, name: str) -> Iterator[tuple[str, ConfigDict]]:
  """Yield the name and the settings of a section, and those of the sections in it."""
  yield name, section
  for key, value in section.items():
    if isinstance(value, ConfigDict):
      yield from _sections(value, f'{name}.{key}')


def _parent_in_free(name: str) -> str | None:
  """Return the dictionary of FREE to which a flag's key belongs, or None."""
  return next((free for free in FREE if name.startswith(f'{free}.')), None)


def _of_config_file(file: str, line: object, cause: str) -> str:
  where = f'{file}, line {line}' if line else file
  return f'{where}: {cause}. The code of the config file raised this, not sprl'


def _config_file(argv: list[str]) -> str | None:
  """Return the file of --config=FILE:ARGUMENT; None without the flag."""
  for argument, after in zip(argv[1:], [*argv[2:], '']):
    name, equals, value = argument.partition('=')
    if argument.startswith('-') and name.lstrip('-') == 'config':
      return (value if equals else after).partition(':')[0]
  return None


def _check_file(file: str | None) -> None:
  """Raise SettingsError if the file of --config does not exist. The message of ml_collections has four lines."""
  if file is not None and not Path(file).is_file():
    package = Path(__file__).parent
    shipped = sorted(f'configs/{path.name}' for folder in (package, package.parent) for path in folder.glob('configs/*.py'))
    raise SettingsError(f'--config={file}: no such file; expected a file with get_config(), or one of {", ".join(shipped)}')


def _check_given_once(argv: list[str]) -> None:
  """Raise SettingsError for a flag that is given twice, of which absl uses the last. A setting, `--config.KEY`, may be repeated.

  Scripts append flags that replace settings of their own.
  """
  given: dict[str, str] = {}
  for argument in argv[1:]:
    name = argument.lstrip('-').partition('=')[0]
    name = name if name in flags.FLAGS else name.removeprefix('no')
    if not argument.startswith('-') or name not in flags.FLAGS or name == 'flagfile' or name.startswith('config.'):
      continue
    if first := given.get(name):
      raise SettingsError(f'{first} {argument}: expected the flag --{name} once')
    given[name] = argument


# --- names and types of settings -----------------------------------------------------------------------------------------------


def _config_flags(argv: list[str]) -> Iterator[str]:
  """Yield `config.rollout.group` for an argument `--config.rollout.group=4`."""
  for argument in argv[1:]:
    name = argument.lstrip('-').partition('=')[0]
    if argument.startswith('-') and name.removeprefix('no').startswith('config.'):
      yield name


def _check_name(name: str) -> None:
  """Raise SettingsError for an unknown setting, of which ml_collections prints a traceback, and for a section as a whole."""
  section, where = to_dict(Run()), 'config'
  for key in name.split('.')[1:]:
    if where in FREE:
      return
    if not isinstance(section, dict) or key not in section:
      if isinstance(section, dict):
        raise SettingsError(no_such_setting(where, key, section))
      raise SettingsError(f'{where}.{key}: no such setting; {where} is one value')
    section, where = section[key], f'{where}.{key}'
  if isinstance(section, dict) and where not in FREE:  # a dictionary would reset the settings that it does not name
    raise SettingsError(f'{where}: expected flags of its settings, such as --{where}.{next(iter(section))}')


def _of_wrong_type(name: str, argv: list[str]) -> str | None:
  """Return the message for a flag, `config.rollout.group`, whose value cannot be read; None if the value has no known type."""
  values = [value for argument in argv[1:] for flag, _, value in [argument.lstrip('-').partition('=')] if flag == name]
  if not values or _parent_in_free(name):
    return None
  if name in FREE:
    return f"{name} = {values[-1]!r}: expected a dictionary in the syntax of Python, such as {{'key': 1}}"
  expected = {int: 'a whole number', float: 'a number', bool: 'True or False'}.get(unless_none(_hint(name)))
  return expected and f'{name} = {values[-1]!r}: expected {expected}'


def _hint(name: str) -> Any:
  """Return the type of a setting, `config.rollout.group`."""
  hint: Any = Run
  for key in name.split('.')[1:]:
    hint = get_type_hints(hint)[key]
  return hint
