"""Buckets: the few lengths that programs are compiled for, and the padding of token ids to them."""

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Int

from sprl.config import Sampling

SMALLEST = 32  # tokens


def prompt_buckets(sampling: Sampling) -> tuple[int, ...]:
  """Return the padded prompt lengths that prefill is compiled for, ascending. The last is the longest prompt allowed."""
  return sampling.prompt_buckets or doubling(SMALLEST, sampling.max_prompt)


def doubling(first: int, last: int) -> tuple[int, ...]:
  """Return first, 2 * first, 4 * first and so on below `last`, then `last`."""
  sizes = [first]
  while sizes[-1] < last:
    sizes.append(sizes[-1] * 2)
  return (*sizes[:-1], last) if sizes[-1] > last else tuple(sizes)


def bucket(sizes: Sequence[int], tokens: int) -> int:
  """Return the smallest of the ascending `sizes` that is at least `tokens`. Raises StopIteration if there is none."""
  return next(size for size in sizes if size >= tokens)


def padded(
  rows: Collection[Int[np.ndarray, ' _']], count: int, width: int
) -> tuple[Int[np.ndarray, 'count width'], Int[np.ndarray, ' count']]:
  """Return the rows padded on the right to [count, width], and their lengths. Missing rows have length 0."""
  tokens, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)], lengths[i] = row, len(row)
  return tokens, lengths
