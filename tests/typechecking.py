"""Run-time checker of sprl's signatures in tests."""

import warnings

from beartype import beartype
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning


def checked(function):
  """Return `function` with beartype's checks. Constructors are not checked: JAX rebuilds dataclasses with placeholders."""
  if function.__name__ == '__init__':
    return function
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', BeartypeDecorHintPep585DeprecationWarning)  # the type parameter of flax's GraphDef
    return beartype(function)
