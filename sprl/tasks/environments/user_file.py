"""A user's class from a file, named `file.py:Class`."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sprl.config import SettingsError
from sprl.tasks.foreign import imported, reason


def split_reference(text: str) -> tuple[str, str] | None:
  """Split `file.py:Class` into (file, class). Return None if the text has another form."""
  file, _, name = text.rpartition(':')
  return (file, name) if file.endswith('.py') and name.isidentifier() else None


def load_class(reference: str, methods: tuple[str, ...], where: str) -> type:
  """Return the class that `file.py:Class` names, which must have `methods`.

  Raises SettingsError, which begins with the setting `where`, for a missing or failing file, a missing class or a missing method.
  """
  found = split_reference(reference)
  said = f'{where} = {reference!r}'
  if found is None:
    raise SettingsError(f'{said}: expected `file.py:Class`')
  path, name = Path(found[0]).expanduser().absolute(), found[1]
  if not path.is_file():
    raise SettingsError(f'{said}: {path}: no such file')
  try:
    module = imported(path)
  except KeyboardInterrupt:
    raise
  except BaseException as error:
    raise SettingsError(f'{said}: {path} fails to import ({reason(error)})') from error
  kind = getattr(module, name, None)
  if not isinstance(kind, type):
    classes = sorted(key for key, value in vars(module).items() if isinstance(value, type))
    raise SettingsError(f'{said}: {path} has no class {name}; it has {", ".join(classes) or "none"}')
  if missing := [method for method in methods if not callable(getattr(kind, method, None))]:
    raise SettingsError(f'{said}: {name} has no method {missing[0]}; expected {", ".join(methods)}')
  return kind


def construct(kind: Callable[..., Any], args: Mapping[str, Any], where: str) -> Any:
  """Return `kind(**args)`. Raises SettingsError, which begins with `where`, for wrong arguments and for any error of `kind`."""
  signature, name = inspect.signature(kind), getattr(kind, '__name__', repr(kind))
  try:
    signature.bind(**args)
  except TypeError as error:
    raise SettingsError(f'{where} = {dict(args)!r}: {name} takes {signature}: {error}') from None
  try:
    return kind(**args)
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # a user's code may raise anything, and call sys.exit
    raise SettingsError(f'{where} = {dict(args)!r}: {name} failed ({reason(error)})') from error
