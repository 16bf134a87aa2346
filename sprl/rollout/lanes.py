"""Environments at work beside the run: many of them, in a few lanes, each of which makes one call at a time.

An environment lives in the lane that it was made in until it is released. A lane is an executor of one worker
(sprl.tasks.executors). A call that takes longer than its limit counts as hung: its lane is given up, and another takes its place.
"""

import concurrent.futures
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from sprl.rollout.scheduler import Failure
from sprl.tasks.environments.protocol import checked_reset, checked_step
from sprl.tasks.executors import Daemon, end, wait_for
from sprl.tasks.foreign import reason

MakeEnvironment = Callable[[int], Any]  # of a salt, by which copies of one episode differ in their delays


@dataclass(frozen=True)
class Call:
  """`method` (`reset` with a seed, `step` with a text) of the environment of that key, made at its first call."""

  key: tuple[int, int]  # (uid, attempt)
  method: str
  argument: Any


LOST = 'its environment was lost with another that hung beside it, or ended its process'


@dataclass
class _Lane:
  executor: Executor
  number: int
  keys: set[Hashable] = field(default_factory=set)  # of the environments that live here
  waiting: deque[tuple[int, Call]] = field(default_factory=deque)
  running: tuple[int, Call, Future, float] | None = None  # ticket, what for, its answer to be, when it is late


class Lanes:
  """Steps environments in `size` lanes, each call within `limit` seconds. For one thread, the scheduler's.

  `make(salt)` makes an environment; under processes it is pickled, once a call.
  """

  def __init__(
    self,
    make: MakeEnvironment,
    size: int,
    start: Callable[[], Executor] = Daemon,
    limit: float = 3600.0,
    now: Callable[[], float] = time.monotonic,
  ):
    self._make, self._start, self._limit, self._now = make, start, limit, now
    self._tickets = itertools.count()
    self._lanes = [_Lane(start(), next(_numbers)) for _ in range(size)]
    self._home: dict[Hashable, _Lane] = {}
    self._done: dict[int, Any] = {}
    self._unwanted: set[int] = set()  # of the calls under way

  def __enter__(self) -> 'Lanes':
    return self

  def __exit__(self, *_) -> None:
    for lane in self._lanes:
      self._give_up(lane)

  def submit(self, call: Call) -> int:
    """Queues a call in its environment's lane; what it returned, or a Failure, will be found under the ticket."""
    ticket = next(self._tickets)
    lane = self._home.get(call.key)
    if lane is None and call.method != 'reset':
      self._done[ticket] = Failure('error', LOST)
      return ticket
    if lane is None:
      lane = self._home[call.key] = self._free()
      lane.keys.add(call.key)
    lane.waiting.append((ticket, call))
    self._go_on(lane)
    return ticket

  def cancel(self, ticket: int) -> None:
    """Nobody waits for this result any more; a call under way ends by itself, or by its limit."""
    self._done.pop(ticket, None)
    for lane in self._lanes:
      lane.waiting = deque(entry for entry in lane.waiting if entry[0] != ticket)
      if lane.running is not None and lane.running[0] == ticket:
        self._unwanted.add(ticket)

  def release(self, key: tuple[int, int]) -> None:
    """An environment is not needed any more."""
    lane = self._home.pop(key, None)
    if lane is not None:
      lane.keys.discard(key)
      lane.waiting = deque(entry for entry in lane.waiting if entry[1].key != key)
      _let_go(lane, key)

  def poll(self, wanted: Collection[int]) -> dict[int, Any]:
    """Those of the wanted results that are there by now, each given out once."""
    for lane in list(self._lanes):
      self._look(lane)
    return {ticket: self._done.pop(ticket) for ticket in list(self._done) if ticket in wanted}

  def wait(self, seconds: float | None) -> None:
    """Until a call returns, or a limit, or so many seconds are over."""
    if not self._done:
      wait_for([lane.running[2:] for lane in self._lanes if lane.running], seconds, self._now())

  def _free(self) -> _Lane:
    """Where a new environment is to live: with the fewest others, and not behind a call that nobody waits for, which may hang."""

    def forsaken(lane: _Lane) -> bool:
      return lane.running is not None and lane.running[0] in self._unwanted

    lane = min(self._lanes, key=lambda lane: (forsaken(lane), len(lane.keys)))
    if lane.running and forsaken(lane) and not lane.keys:  # so are all lanes, and nobody loses by this one's end
      self._unwanted.remove(lane.running[0])
      lane.running = None
      self._replace(lane)
    return lane

  def _go_on(self, lane: _Lane) -> None:
    if lane.running is None and lane.waiting:
      ticket, call = lane.waiting.popleft()
      try:
        future = lane.executor.submit(_call, lane.number, self._make, call)
      except concurrent.futures.BrokenExecutor as error:  # it died idle
        self._done[ticket] = _failure(error)
        self._replace(lane)
      else:
        lane.running = ticket, call, future, self._now() + self._limit

  def _look(self, lane: _Lane) -> None:
    if lane.running is None:
      return
    ticket, call, future, late = lane.running
    if future.done():
      lane.running = None
      error = future.exception()
      self._done[ticket] = future.result() if error is None else _failure(error)
      if isinstance(error, concurrent.futures.BrokenExecutor):
        self._replace(lane)
    elif self._now() >= late:
      lane.running = None
      self._done[ticket] = Failure('hang', f'{call.method} took longer than config.environment.time_limit = {self._limit:g} s')
      self._replace(lane)
    if lane.running is None and ticket in self._unwanted:
      self._unwanted.remove(ticket)
      del self._done[ticket]
    self._go_on(lane)

  def _replace(self, lane: _Lane) -> None:
    """Another lane for one that hangs or is broken; environments that lived in it are lost, and what waits for them fails."""
    self._give_up(lane)
    for ticket, _ in lane.waiting:
      self._done[ticket] = Failure('error', LOST)
    lane.waiting = deque()
    lane.executor, lane.number = self._start(), next(_numbers)

  def _give_up(self, lane: _Lane) -> None:
    """Ends a lane; a thread closes its environments first, once it is through with what it does."""
    for key in lane.keys:
      self._home.pop(key, None)
      _let_go(lane, key)
    lane.keys = set()
    end(lane.executor)


def _let_go(lane: _Lane, key: Hashable) -> None:
  with contextlib.suppress(concurrent.futures.BrokenExecutor):  # a dead process took its environments with it
    lane.executor.submit(_forget, lane.number, key)


def _failure(error: BaseException) -> Failure:
  return Failure('error', reason(error))


# In a lane. Its environments are this module's, for a process has nothing else of its own; a lane's number tells threads apart,
# those of training from those of an evaluation too.
_numbers = itertools.count()
_environments: dict[tuple[int, Hashable], Any] = {}


def _call(lane: int, make: MakeEnvironment, call: Call) -> Any:
  where = lane, call.key
  if call.method == 'reset':
    _environments[where] = make(call.key[0])
    return checked_reset(_environments[where], call.argument)
  return checked_step(_environments[where], call.argument)


def _forget(lane: int, key: Hashable) -> None:
  env = _environments.pop((lane, key), None)
  if (close := getattr(env, 'close', None)) is not None:
    close()
