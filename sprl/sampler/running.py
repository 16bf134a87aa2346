"""What an engine knows of the requests that run, of the chunks of steps in the devices' queue, and of its own work."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from sprl.types import Request


@dataclass
class Row:
  """A running request and the tokens that the host has seen of it."""

  request: Request
  first: int  # version of the weights that draw its first token; after a swap, later tokens come from newer ones
  tokens: list[int] = field(default_factory=list)
  logp: list[float] = field(default_factory=list)
  version: list[int] = field(default_factory=list)
  attended: list[int] = field(default_factory=list)
  support: list[np.ndarray] = field(default_factory=list)  # [W] of each token, if recorded
  saturated: int = 0
  saturated_queries: int = 0
  prefilled: tuple[int, int] | None = None  # shape of the prefill batch of its prompt
  aborted: bool = False  # during a chunk: the row becomes free after it, and its tokens are dropped

  def record(self, news: Mapping[str, np.ndarray], i: int, version: int) -> int:
    """Append what row i drew in a chunk with the weights of `version`. Returns the number of new tokens."""
    before = len(self.tokens)
    new = int(news['count'][i]) - before
    self.tokens += news['tokens'][i, :new].tolist()
    self.logp += news['logp'][i, :new].tolist()
    self.attended += news['attended'][i, :new].tolist()
    self.version += [version if before or k else self.first for k in range(new)]
    self.saturated, self.saturated_queries = int(news['saturated'][i]), int(news['saturated_queries'][i])
    if 'support' in news:
      self.support += list(news['support'][i, :new].copy())  # a copy: a view would keep all rows of the chunk alive
    return new


@dataclass
class Chunk:
  """A chunk of decode steps in the devices' queue."""

  news: dict[str, jax.Array]  # what `decode.news_since` returns after it
  rows: list[Row | None]  # the requests of the rows when it was started
  version: int  # of its weights
  launched: float  # when it was started
  over: float | None = None  # when it was found to be over

  @property
  def ready(self) -> bool:
    """Whether it is over."""
    if self.over is None and all(x.is_ready() for x in self.news.values()):  # pyright: ignore[reportAttributeAccessIssue]
      self.over = time.perf_counter()
    return self.over is not None


@dataclass
class Usage:
  """Counts and times of an engine since its `usage` was last replaced."""

  chunks: int = 0
  steps: int = 0  # decode steps; a step of all rows counts once
  tokens: int = 0  # drawn in decode steps
  first: int = 0  # drawn from the logits of a prefill
  prefills: int = 0
  read: int = 0  # tokens of prompts and given tokens that were read
  prefix_hits: int = 0  # requests that went on from a kept cache
  prefix_misses: int = 0  # requests whose kept cache was gone, or held other tokens
  prefix_tokens: int = 0  # tokens of kept caches that were not read again
  waited: float = 0.0  # seconds in which the devices had a chunk to work on
  busy: float = 0.0  # seconds with work to do, until the end of the last `collect`

  def metrics(self, rows: int) -> dict[str, float]:
    """Return the share of row-steps that drew a token, and counts of chunks, prefills, and tokens read and not read again."""
    return {
      'engine/occupancy': self.tokens / max(self.steps * rows, 1),
      'engine/chunks': float(self.chunks),
      'engine/prefills': float(self.prefills),
      'engine/read_tokens': float(self.read),
      'engine/prefix_hits': float(self.prefix_hits),
      'engine/prefix_misses': float(self.prefix_misses),
      'engine/prefix_tokens': float(self.prefix_tokens),
    }

  @property
  def host_overhead(self) -> float:
    """Share of the time in which the devices waited for the host. A lower bound: a chunk counts until the host sees its end."""
    return 1 - self.waited / self.busy if self.busy else 0.0
