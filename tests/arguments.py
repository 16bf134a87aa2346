"""Argument types for argparse, for the programs in tests/."""

import argparse
import contextlib
import math


def minutes(text: str) -> float:
  """Return a number of minutes. Raises ArgumentTypeError if it is not finite and above 0."""
  with contextlib.suppress(ValueError):
    if 0 < (found := float(text)) < math.inf:
      return found
  raise argparse.ArgumentTypeError(f'found {text!r}; expected a finite number of minutes above 0')
