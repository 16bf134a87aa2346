"""Calls of code that is not ours. Graders and environments may raise anything."""

from collections.abc import Callable
from typing import Any


def attempt(fn: Callable[..., Any] | None, *args: Any) -> tuple[Any, str]:
  """Return (fn(*args), ''), or (None, the reason) if it raises. SystemExit counts as an error: user code may call sys.exit."""
  assert fn is not None
  try:
    return fn(*args), ''
  except (Exception, SystemExit) as error:
    return None, reason(error)


def reason(error: BaseException) -> str:
  """Return the type and the message of an error, at most 500 characters."""
  try:
    return f'{type(error).__name__}: {error}'[:500]
  except Exception:  # the error's own __str__ fails
    return type(error).__name__
