"""Who was busy when: spans of time on named tracks, as a trace file for Perfetto and as a picture."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sprl.io import files


@dataclass(frozen=True)
class Span:
  """What a track did from `start` to `end`, in seconds of the run's clock."""

  track: str
  name: str
  start: float
  end: float
  facts: dict[str, Any] = field(default_factory=dict)


class Timeline:
  """The spans of a run, the newest `limit` of them. Appending is safe from several threads."""

  def __init__(self, now: Callable[[], float], limit: int = 100_000):
    self.now, self._limit = now, limit
    self.spans: list[Span] = []

  def add(self, track: str, name: str, start: float, end: float, **facts: Any) -> None:
    """A span that is over."""
    self.spans.append(Span(track, name, start, end, facts))
    if len(self.spans) > 2 * self._limit:
      del self.spans[: -self._limit]

  @contextmanager
  def span(self, track: str, name: str, **facts: Any):
    """The time within."""
    start = self.now()
    try:
      yield
    finally:
      self.add(track, name, start, self.now(), **facts)

  def busy(self, track: str, start: float, end: float) -> float:
    """Seconds between `start` and `end` in which a track was busy; its spans do not overlap."""
    return sum(max(0.0, min(s.end, end) - max(s.start, start)) for s in self.spans if s.track == track)

  def overlap(self, one: str, other: str) -> float:
    """Seconds in which both tracks were busy."""
    return sum(self.busy(other, s.start, s.end) for s in self.spans if s.track == one)

  def write(self, path: Path) -> None:
    """A trace in Chrome's JSON form: open it at ui.perfetto.dev, or in chrome://tracing."""
    tracks = {track: i for i, track in enumerate(dict.fromkeys(s.track for s in self.spans))}
    names = [{'ph': 'M', 'pid': 0, 'tid': i, 'name': 'thread_name', 'args': {'name': track}} for track, i in tracks.items()]
    events = [
      {
        'ph': 'X',
        'pid': 0,
        'tid': tracks[s.track],
        'name': s.name,
        'ts': s.start * 1e6,
        'dur': (s.end - s.start) * 1e6,
        'args': s.facts,
      }
      for s in self.spans
    ]
    files.write_text(path, json.dumps({'traceEvents': [*names, *events], 'displayTimeUnit': 'ms'}))
