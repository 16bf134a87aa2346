"""Calls of code that is not ours. Graders and environments may raise anything, also what is no Exception.

Such calls run in threads and in processes that get no Ctrl-C: a KeyboardInterrupt there comes from the code.
"""

from collections.abc import Callable
from typing import Any


def attempt(fn: Callable[..., Any] | None, *args: Any) -> tuple[Any, str]:
  """Return (fn(*args), ''), or (None, the reason) if it raises."""
  assert fn is not None
  try:
    return fn(*args), ''
  except BaseException as error:
    return None, reason(error)


def reason(error: BaseException) -> str:
  """Return the type and the message of an error, at most 500 characters, which UTF-8 can encode."""
  try:
    return f'{type(error).__name__}: {error}'[:500].encode(errors='replace').decode()
  except BaseException:  # the error's own __str__ fails
    return type(error).__name__
