"""Run-time checker of sprl's signatures in tests."""

from beartype import beartype


def checked(function):
  """Return `function` with beartype's checks. Constructors are not checked: JAX rebuilds dataclasses with placeholders."""
  return function if function.__name__ == '__init__' else beartype(function)
