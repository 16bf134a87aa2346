"""A user's class from a file, named `file.py:Class`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sprl.config import SettingsError
from sprl.foreign import reason, referenced


def load_class(reference: str, methods: tuple[str, ...], where: str) -> type:
  """Return the class that `file.py:Class` names, which must have `methods`.

  Raises SettingsError, which begins with the setting `where`, for a missing or failing file, a missing class or a missing method.
  """
  said, kind = f'{where} = {reference!r}', referenced(where, reference)
  if not isinstance(kind, type):
    raise SettingsError(f'{said}: expected a class; got {type(kind).__name__}')
  if missing := [method for method in methods if not callable(getattr(kind, method, None))]:
    raise SettingsError(f'{said}: {kind.__name__} has no method {missing[0]}; expected {", ".join(methods)}')
  return kind


def construct(kind: Callable[..., Any], args: Mapping[str, Any], where: str, methods: tuple[str, ...] = ()) -> Any:
  """Return `kind(**args)`.

  Raises SettingsError for wrong arguments and for any error of `kind`, which begins with `where`, and if the result lacks one of
  `methods`.
  """
  signature, name = inspect.signature(kind), getattr(kind, '__name__', repr(kind))
  try:
    signature.bind(**args)
  except TypeError as error:
    raise SettingsError(f'{where} = {dict(args)!r}: {name} takes {signature}: {error}') from None
  try:
    made = kind(**args)
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # a user's code may raise anything, and call sys.exit
    raise SettingsError(f'{where} = {dict(args)!r}: {name} failed ({reason(error)})') from error
  if missing := [method for method in methods if not callable(getattr(made, method, None))]:
    raise SettingsError(f'environment {type(made).__name__}: no method {missing[0]}; expected {", ".join(methods)}')
  return made
