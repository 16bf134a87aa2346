"""Errors of code that is not ours: graders and environments may raise anything."""


def reason(error: BaseException) -> str:
  """What is reported of an error: its kind and its words, at most 500 characters."""
  try:
    return f'{type(error).__name__}: {error}'[:500]
  except Exception:  # an error that cannot even be printed
    return type(error).__name__
