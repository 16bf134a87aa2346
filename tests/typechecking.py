"""The run-time checker of sprl's signatures under test."""

from beartype import beartype


def checked(function):
  """beartype, but for constructors: JAX rebuilds dataclasses of arrays around whatever stands in for an array at the time."""
  return function if function.__name__ == '__init__' else beartype(function)
