"""Calls and files of code that is not ours. It may raise anything, also what is no Exception.

Such calls run in threads and in processes that get no Ctrl-C: a KeyboardInterrupt there comes from the code.
"""

import hashlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from sprl.config import SettingsError

LARGEST_REWARD = 3.4e38  # the learner reads rewards in float32
_FOLDERS = (Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ('stdlib', 'purelib', 'platlib')))
_LIBRARIES = ('<frozen ', *(f'{folder}{os.sep}' for folder in _FOLDERS))  # how the names of their files begin


def import_path() -> str:
  """Return the PYTHONPATH with which another process can import what this one can."""
  return os.pathsep.join(folder or os.getcwd() for folder in sys.path)


def attempt(fn: Callable[..., Any] | None, *args: Any) -> tuple[Any, str]:
  """Return (fn(*args), ''), or (None, the reason) if it raises."""
  assert fn is not None
  try:
    return fn(*args), ''
  except BaseException as error:
    return None, reason(error)


def kind_of(reason: str) -> str:
  """Return a reason without its numbers, except for lines of code. Of reasons of one kind, the first is logged."""
  return re.sub(r'\d++(?!, in )', '0', reason)


def reason(error: BaseException) -> str:
  """Return the type and the message of an error, and where a user's code raised it.

  At most 500 characters, which UTF-8 can encode.
  """
  try:
    place = _place(error)
    return (f'{type(error).__name__}: {error}'[: 500 - len(place)] + place).encode(errors='replace').decode()
  except BaseException:  # the error's own __str__ fails
    return type(error).__name__


def _place(error: BaseException) -> str:
  """Return ` (FILE:LINE, in FUNCTION)` of the last frame that is not in sprl or a library; '' without such a frame."""
  frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
  users = [(code, line) for code, line in frames if not code.co_filename.startswith(_LIBRARIES)]
  return ''.join(f' ({code.co_filename[-200:]}:{line}, in {code.co_name[-100:]})' for code, line in users[-1:])


_CHECKSUM = '__checksum_of_sprl__'  # of a user's file, in its module
_CHANGED = 'has changed since this program imported it: start Python again, or give the new code another file'


def checksum(source: bytes) -> str:
  """Return a checksum of a user's source."""
  return hashlib.sha256(source).hexdigest()[:16]


def expanded(path: str | os.PathLike[str]) -> Path:
  """Return a path in which `~` is the home folder. That of an unknown user stays; Path.expanduser raises RuntimeError for it."""
  return Path(os.path.expanduser(path))


def split_reference(text: str) -> tuple[str, str] | None:
  """Split `file.py:NAME` into (file, NAME). Return None if the text has another form."""
  file, _, name = text.rpartition(':')
  return (file, name) if file.endswith('.py') and name.isidentifier() else None


def referenced(setting: str, reference: str, known: Iterable[str] = ()) -> Any:
  """Return what a user's file defines under a name, given as `file.py:NAME`. `known` are other accepted texts, for the message.

  Raises SettingsError, which begins with the setting, for another form, a missing or failing file, and a missing name.
  """
  said = f'{setting} = {reference!r}'
  found = split_reference(reference)
  if found is None:
    raise SettingsError(f'{said}: expected {", ".join([*known, ""])}`file.py:NAME`')
  path, name = expanded(found[0]).absolute(), found[1]
  if not path.is_file():
    raise SettingsError(f'{said}: {path}: no such file')
  try:
    module = imported(path)
  except KeyboardInterrupt:
    raise
  except BaseException as error:
    raise SettingsError(f'{said}: {path} fails to import ({reason(error)})') from error
  if not hasattr(module, name):
    own = sorted(key for key, value in vars(module).items() if getattr(value, '__module__', '') == module.__name__)
    raise SettingsError(f'{said}: {path} has no {name}; it has {", ".join(own) or "no function and no class"}')
  return getattr(module, name)


def own_function(setting: str, reference: str, known: Iterable[str]) -> Callable[..., Any]:
  """Return the function that a user's file defines. Raises SettingsError as `referenced`, and if it is no function."""
  found = referenced(setting, reference, known)
  if not callable(found):
    raise SettingsError(f'{setting} = {reference!r}: expected a function; got {type(found).__name__}')
  return found


def imported(path: Path, source: bytes | None = None) -> ModuleType:
  """Return the module of a user's file, which runs once per process and may import its neighbours. Raises what it raises.

  `source` is its content when the run began, which runs though the file may have changed; None: as it is now. Raises ValueError
  if this process has imported another content.
  """
  path = path.absolute()
  name = _module_name(path)
  if name in sys.modules:
    if source is not None and checksum(source) != sys.modules[name].__dict__[_CHECKSUM]:
      raise ValueError(f'{path} {_CHANGED}')
    return sys.modules[name]
  if str(path.parent) not in sys.path:
    sys.path.append(str(path.parent))  # last, so that its neighbours shadow nothing
  source = path.read_bytes() if source is None else source
  module = ModuleType(name)
  module.__file__ = str(path)
  module.__dict__[_CHECKSUM], sys.modules[name] = checksum(source), module
  try:
    exec(compile(source, str(path), 'exec'), module.__dict__)
  except BaseException:
    del sys.modules[name]
    raise
  return module


def check_unchanged(setting: str, path: Path) -> None:
  """Raise SettingsError, which begins with the setting, if a user's file has changed since this process imported it."""
  module = sys.modules.get(_module_name(path.absolute()))
  if module is not None and checksum(path.read_bytes()) != module.__dict__[_CHECKSUM]:
    raise SettingsError(f'{setting}: {path} {_CHANGED}')


def _module_name(path: Path) -> str:
  # Dataclasses and pickle look the module up by its name, which therefore has no dot: that would name a package.
  return f'user_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}'
