"""A simulated cluster: engines and workers that only take time, on a virtual clock.

The scheduler is tested and studied with it. Time passes where a live run would wait: in `wait`, and when a chunk that is not over
is collected. Nothing is computed.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sprl.rollout.episodes import Comparison, Episode
from sprl.types import Completion, Request, Trajectory

SOON = 1e-9  # seconds within which times count as equal


@dataclass(frozen=True)
class Episodes:
  """A source of episodes from a function of (number, uid, attempt), and of comparisons from (number, trajectories)."""

  episode: Callable[[int, int, int], Episode]
  comparison: Callable[[int, Sequence[Trajectory]], Comparison | None] = lambda number, trajectories: None


class Clock:
  """A virtual clock, in seconds since the simulation began."""

  def __init__(self):
    self.time = 0.0
    self._events: list[float] = []

  def __call__(self) -> float:
    """Returns the time."""
    return self.time

  def until(self, time: float) -> None:
    """Moves the time forward to `time`. It never goes back."""
    self.time = max(self.time, time)

  def expect(self, time: float) -> None:
    """Announces an event."""
    heapq.heappush(self._events, time)

  def pass_on(self) -> None:
    """Moves the time forward to the next event."""
    if self._events:
      self.until(heapq.heappop(self._events))


@dataclass
class _Running:
  request: Request
  first: float  # decode steps that the engine had made when the request began
  last: float  # and when it ends
  version: int


@dataclass
class SimulatedEngine:
  """An engine that runs `capacity` requests side by side.

  A request takes `steps(request)` decode steps. A step draws a token for each of n running requests and takes `pace(n)` seconds:
  by default one, at any load.

  A chunk takes `chunk` seconds; with 0 it lasts until a request ends, or until a waiting request has room. Tokens come at a
  constant rate: an aborted request has its share of them, and its rest takes the rest of its steps.
  """

  clock: Clock
  capacity: int
  steps: Callable[[Request], float]
  chunk: float = 0.0
  pace: Callable[[int], float] = lambda running: 1.0
  version: int = 0
  _waiting: list[Request] = field(default_factory=list)
  _running: dict[int, _Running] = field(default_factory=dict)
  _made: float = 0.0  # decode steps until `_counted`
  _counted: float = 0.0
  _ends: float = 0.0  # time when the chunk ends

  @property
  def load(self) -> int:
    """Requests that wait or run."""
    return len(self._waiting) + len(self._running)

  def add(self, request: Request) -> None:
    """Queues a request."""
    self._waiting.append(request)

  def abort(self, uids: Collection[int] | None = None) -> list[Completion]:
    """Ends these requests (None: all of them) and returns the tokens that they have."""
    wanted = dict.fromkeys([*self._running, *(r.uid for r in self._waiting)] if uids is None else uids)
    self._count()
    aborted = [self._drawn(self._running.pop(uid), 'abort') for uid in wanted if uid in self._running]
    aborted += [_completion(r, 0, self.version, 'abort') for r in self._waiting if r.uid in wanted]
    self._waiting = [r for r in self._waiting if r.uid not in wanted]
    self._plan()
    return aborted

  def forget(self, uids: Collection[int] | None = None) -> None:
    """Does nothing: a simulated engine keeps no caches."""

  def swap(self, weights: Any, version: int) -> None:
    """Changes the version of the weights."""
    self.version = version

  def dispatch(self) -> None:
    """Starts waiting requests while there is room, and a chunk."""
    self._count()
    while self._waiting and len(self._running) < self.capacity:
      request = self._waiting.pop(0)
      left = self.steps(request) * request.max_tokens / (request.max_tokens + request.resumed)
      self._running[request.uid] = _Running(request, self._made, self._made + left, self.version)
    self._ends = self.clock() + self.chunk
    self._plan()

  @property
  def ready(self) -> bool:
    """Whether the chunk is over."""
    admits = not self.chunk and self._waiting and len(self._running) < self.capacity
    return bool(admits or self._ends <= self.clock() + SOON)

  def wait(self, seconds: float) -> None:
    """Moves the time forward to the next event in the cluster."""
    self.clock.pass_on()

  def collect(self) -> list[Completion]:
    """Moves the time forward to the end of the chunk. Returns the requests that ended."""
    if self.chunk:
      self.clock.until(self._ends)
    self._count()
    over = self._made + SOON / self._step
    return [self._drawn(self._running.pop(uid), 'stop') for uid in [u for u, r in self._running.items() if r.last <= over]]

  @property
  def _step(self) -> float:
    """Seconds of a decode step of the requests that run now."""
    return self.pace(len(self._running))

  def _count(self) -> None:
    """Counts the decode steps until now. Called before the load changes, and with it the length of a step."""
    if self._running:
      self._made += (self.clock() - self._counted) / self._step
    self._counted = self.clock()

  def _plan(self) -> None:
    """Announces the end of the chunk. Without a length of its own, it ends with the next request."""
    if not self.chunk and self._running:
      self._ends = self.clock() + (min(r.last for r in self._running.values()) - self._made) * self._step
    self.clock.expect(self._ends)

  def _drawn(self, running: _Running, finish: str) -> Completion:
    n = running.request.max_tokens
    if finish == 'abort':
      share = (min(self._made, running.last) - running.first) / max(running.last - running.first, 1e-12)
      n = min(n - 1, int(n * share))
    return _completion(running.request, n, running.version, finish)


def _completion(request: Request, n: int, version: int, finish: str) -> Completion:
  positions = request.start + np.arange(n, dtype=np.int32)
  tokens = (request.uid * 31 + positions) % 1000
  logp, versions = -np.ones(n, np.float32), np.full(n, version, np.int32)
  return Completion(
    request=request, tokens=tokens.astype(np.int32), logp=logp, version=versions, attended=positions, finish=finish
  )


class SimulatedWorkers:
  """Workers whose calls take `duration(call)` seconds and return `result(call)`. Any number of calls run side by side."""

  def __init__(self, clock: Clock, duration: Callable[[Any], float], result: Callable[[Any], Any]):
    self._clock, self._duration, self._result = clock, duration, result
    self._events: list[tuple[float, int, Any]] = []
    self._tickets = itertools.count()
    self._cancelled: set[int] = set()
    self._done: dict[int, Any] = {}

  def submit(self, call: Any) -> int:
    """Begins a call. Returns the ticket of its result."""
    ticket, ends = next(self._tickets), self._clock() + self._duration(call)
    heapq.heappush(self._events, (ends, ticket, call))
    self._clock.expect(ends)
    return ticket

  def cancel(self, ticket: int) -> None:
    """Drops a call."""
    self._cancelled.add(ticket)
    self._done.pop(ticket, None)

  def poll(self, wanted: Collection[int]) -> dict[int, Any]:
    """Returns the wanted results that are ready."""
    while self._events and self._events[0][0] <= self._clock() + SOON:
      _, ticket, call = heapq.heappop(self._events)
      if ticket not in self._cancelled:
        self._done[ticket] = self._result(call)
    return {ticket: self._done.pop(ticket) for ticket in list(self._done) if ticket in wanted}

  def wait(self, seconds: float | None) -> None:
    """Moves the time forward to the next result."""
    if self._events:
      self._clock.until(self._events[0][0])
