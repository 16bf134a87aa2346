"""The timeline of a run: which part was busy when, as spans on named tracks. Written as a trace file for Perfetto."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sprl.io import files


@dataclass(frozen=True, slots=True)
class Span:
  """One activity of a track, from `start` to `end` in seconds of the run's clock."""

  track: str
  name: str
  start: float
  end: float
  facts: dict[str, Any] = field(default_factory=dict)


class Timeline:
  """The newest spans of a run, between `limit` and twice as many. Several threads may add spans.

  `now` is the clock, in seconds.
  """

  def __init__(self, now: Callable[[], float], limit: int = 100_000):
    self.now, self._limit = now, limit
    self.spans: list[Span] = []

  def add(self, track: str, name: str, start: float, end: float, **facts: Any) -> None:
    """Add a span that is over."""
    self.spans.append(Span(track, name, start, end, facts))
    if len(self.spans) > 2 * self._limit:
      del self.spans[: -self._limit]

  @contextmanager
  def span(self, track: str, name: str, **facts: Any):
    """Add the time inside a `with` block as a span, also if the block raises."""
    start = self.now()
    try:
      yield
    finally:
      self.add(track, name, start, self.now(), **facts)

  def busy(self, track: str, start: float, end: float) -> float:
    """Seconds between `start` and `end` in which a track was busy. Its spans must not overlap."""
    return sum((max(0.0, min(s.end, end) - max(s.start, start)) for s in self._since(start) if s.track == track), 0.0)

  def idle(self, tracks: Sequence[str], start: float, end: float) -> float:
    """Share of the time from `start` to `end` in which a track was not busy; the mean over `tracks`."""
    return 1 - sum(self.busy(track, start, end) for track in tracks) / (len(tracks) * (end - start))

  def _since(self, start: float) -> Iterator[Span]:
    """The spans that end after `start`. Spans are added in the order in which they end."""
    return itertools.takewhile(lambda span: span.end > start, reversed(self.spans))

  def write(self, path: Path) -> None:
    """Write a trace in Chrome's JSON format, for ui.perfetto.dev or chrome://tracing.

    Viewers drop a span that overlaps another of its row unless one contains the other. So a track gets as many rows as it needs.
    """
    spans = list(self.spans)
    rows, order = _rows(spans), list(dict.fromkeys(s.track for s in spans))
    ids = {row: i for i, row in enumerate(sorted(set(rows), key=lambda row: (order.index(row[0]), row[1])))}
    names = [
      {'ph': 'M', 'pid': 0, 'tid': i, 'name': 'thread_name', 'args': {'name': f'{track} ({row + 1})' if row else track}}
      for (track, row), i in ids.items()
    ]
    events = [
      {'ph': 'X', 'pid': 0, 'tid': ids[row], 'name': s.name, 'ts': start / 1e3, 'dur': (end - start) / 1e3, 'args': s.facts}
      for s, row in zip(spans, rows)
      for start, end in [(round(s.start * 1e9), round(s.end * 1e9))]  # rounded once: equal times stay equal, adjacent spans too
    ]
    files.write_text(path, json.dumps({'traceEvents': [*names, *events], 'displayTimeUnit': 'ms'}))


def _rows(spans: Sequence[Span]) -> list[tuple[str, int]]:
  """(track, row) of each span: the first row in which it contains, or lies inside, every span that it overlaps."""
  rows: dict[int, tuple[str, int]] = {}
  tracks: dict[str, list[list[float]]] = {}  # track -> row -> ends of the spans that are open, the innermost last

  def fits(ends: list[float], span: Span) -> bool:
    while ends and ends[-1] <= span.start:
      ends.pop()
    return not ends or span.end <= ends[-1]

  for i in sorted(range(len(spans)), key=lambda i: (spans[i].start, -spans[i].end)):
    track = tracks.setdefault(spans[i].track, [])
    row = next((row for row, ends in enumerate(track) if fits(ends, spans[i])), len(track))
    if row == len(track):
      track.append([])
    track[row].append(spans[i].end)
    rows[i] = spans[i].track, row
  return [rows[i] for i in range(len(spans))]
