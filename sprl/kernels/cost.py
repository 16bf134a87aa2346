"""The least work of an operation, against which the time of its kernel is compared."""

from typing import NamedTuple


class Cost(NamedTuple):
  """The least work of one call."""

  bytes: int  # between device memory and chip: each input read once, each output written once
  flops: int
