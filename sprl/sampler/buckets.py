"""The padded lengths that programs are compiled for."""

from collections.abc import Sequence


def bucket(sizes: Sequence[int], tokens: int) -> int:
  """Return the smallest of the ascending `sizes` that holds so many tokens. There must be one."""
  return next(size for size in sizes if size >= tokens)
