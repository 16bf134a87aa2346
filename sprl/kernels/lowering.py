"""Trace and lower a GPU kernel once for all layers of a program."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


def lowered_once(*static: str) -> Callable[[Callable], Any]:
  """Return a decorator for the call of a kernel. `static` names its arguments that are not arrays.

  Pallas takes up to half a second to lower a kernel, for every call of a program. The calls of one jitted function with equal
  shapes share a lowering. XLA inlines the function, so the compiled program is the same.
  """
  return partial(jax.jit, static_argnames=static)
