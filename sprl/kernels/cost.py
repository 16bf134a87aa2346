"""What an operation must do at the least: the yardstick that its kernel is measured by."""

from typing import NamedTuple


class Cost(NamedTuple):
  """What one call must do at the least."""

  bytes: int  # moved between device memory and chip, each input read once and each output written once
  flops: int
