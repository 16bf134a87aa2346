"""A pool of workers that answer calls. Graders and environments run in one.

A worker is a thread, a process or a Ray actor (sprl/tasks/workers.py). It builds one service when it starts and hands each call
to it, one call at a time. A service runs code that is not ours: it may raise, hang, or end its process. Each costs one call:

    the service raises        Failure('error')      the worker continues
    the call takes too long   Failure('timeout')    the worker is killed and replaced
    the process ends          Failure('crash')      the worker is replaced

With affinity, calls that share a key go to the same worker, in order. So a service can keep state between calls, such as an
environment between its steps. A call may have a pause: no worker gets it before that time is over.
"""

import concurrent.futures
import itertools
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from sprl.config import SettingsError
from sprl.foreign import reason

START_SECONDS = 120.0  # time for a worker to import and build its service
LAST_SECONDS = 60.0  # most time for the last call of a key, if its worker holds no other key
FAREWELL_SECONDS = 10.0  # most time for the calls under way and the farewells, when a pool ends
LOSSES = 3  # times that each worker may fail to start or die idle while no call is answered
PAUSES = (0.0, 1.0, 10.0)  # seconds before the first, the second and each later attempt at an episode


def pause_before(attempt: int) -> float:
  """Return how long an attempt at an episode waits, in seconds. A server that was away is then there again, perhaps."""
  return PAUSES[min(attempt, len(PAUSES) - 1)]


@dataclass(frozen=True)
class Failure:
  """The reason why a call has no answer."""

  kind: Literal['error', 'timeout', 'crash']
  reason: str


class WorkerDied(RuntimeError):
  """A worker ended during a call; the message is how."""


@runtime_checkable
class Worker(Protocol):
  """One worker. It builds its service, then answers one call at a time."""

  ready: Future[str]  # why the service could not be built, or '' if it was

  def ask(self, call: Any) -> Future[tuple[Any, str]]:
    """Give the service a call.

    The future holds (answer, ''), or (None, reason) if the service raises. It raises WorkerDied or another error if the worker
    dies.
    """
    ...

  def died(self) -> str:
    """How an idle worker ended, or '' if it lives."""
    ...

  def end(self) -> None:
    """Kill the worker. A thread cannot be killed: it ends after its call."""
    ...


@dataclass(eq=False)
class _Slot:
  """The place of one worker. A replacement worker takes over its keys and waiting calls."""

  worker: Worker
  future: Future | None  # of the worker's start or of its call; None: the worker is idle
  deadline: float  # of the start or the call
  ticket: int | None = None  # of the call under way
  cancelled: bool = False  # whether the result of the call under way is ignored
  keys: set[Hashable] = field(default_factory=set)
  waiting: dict[int, Any] = field(default_factory=dict)  # calls of these keys by ticket, in order


class WorkerPool:
  """`size` workers, and the calls that wait for one. A context manager; for use by one thread.

  Entering waits until every worker has started.

  Args:
    start: starts a worker.
    size: the number of workers.
    limit: seconds that a call may take, from when a worker begins it.
    limit_setting: the setting that holds `limit`, for messages.
    blame: the setting and value that decide which service is built, for messages.
    key: affinity: returns the key of a call. None: any idle worker takes the oldest call.
    farewell: a call that every worker gets before it ends with the pool. None: none.
    pause: returns the seconds for which a call waits before a worker may get it.
    read: turns an answer, or a Failure, into the result that `poll` returns.
    now: the clock, in seconds.

  Raises:
    SettingsError: on entering, if a worker fails to start; later, if workers fail repeatedly while no call is answered.
  """

  def __init__(
    self,
    start: Callable[[], Worker],
    size: int,
    *,
    limit: float,
    limit_setting: str,
    blame: str,
    key: Callable[[Any], Hashable] | None = None,
    farewell: Any = None,
    pause: Callable[[Any], float] = lambda call: 0.0,
    read: Callable[[Any], Any] = lambda answer: answer,
    now: Callable[[], float] = time.monotonic,
  ):
    self._start, self._size, self._limit, self._limit_setting, self._blame = start, size, limit, limit_setting, blame
    self._key, self._farewell, self._pause, self._read, self._now = key, farewell, pause, read, now
    self._slots: list[_Slot] = []
    self._homes: dict[Hashable, _Slot] = {}  # by key
    self._pausing: dict[int, tuple[float, Any]] = {}  # (end of the pause, call) by ticket
    self._alarm: Future = Future()  # never done: the pauses wait for their time only
    self._waiting: dict[int, Any] = {}  # calls without affinity by ticket, in order
    self._results: dict[int, Any] = {}
    self._last: set[int] = set()  # tickets of the last calls of released keys
    self._fresh = False  # whether there are results that arrived after the last poll
    self._losses = 0
    self._tickets = itertools.count()

  def __enter__(self) -> 'WorkerPool':
    try:
      for _ in range(self._size):
        worker = self._start()
        self._slots.append(_Slot(worker, worker.ready, self._now() + START_SECONDS))
      until = time.monotonic() + START_SECONDS
      for slot in self._slots:
        concurrent.futures.wait([slot.worker.ready], until - time.monotonic())
        if why := _failed_start(slot.worker):
          raise self._cannot_start(why)
        slot.future = None
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_) -> None:
    if self._farewell is not None:
      said = [slot.worker.ask(self._farewell) for slot in self._slots if slot.worker.ready.done()]
      concurrent.futures.wait(said, FAREWELL_SECONDS)
    while self._slots:
      self._slots.pop().worker.end()

  # --- the scheduler's four calls ----------------------------------------------------------------------------------------

  def submit(self, call: Any) -> int:
    """Queue a call. Returns the ticket of its result."""
    ticket = next(self._tickets)
    self._pausing[ticket] = self._now() + self._pause(call), call
    self._hand_out()
    return ticket

  def cancel(self, ticket: int) -> None:
    """Drop a call that waits, or its result. A call under way continues up to its limit, and its result is ignored."""
    self._results.pop(ticket, None)
    self._pausing.pop(ticket, None)
    self._waiting.pop(ticket, None)
    for slot in self._slots:
      slot.waiting.pop(ticket, None)
      slot.cancelled |= slot.ticket == ticket

  def poll(self, wanted: Collection[int]) -> dict[int, Any]:
    """Return the wanted results that are ready, by ticket. Each result is returned once."""
    self._collect()
    self._fresh = False
    return {ticket: self._read(self._results.pop(ticket)) for ticket in list(self._results) if ticket in wanted}

  def wait(self, seconds: float | None) -> None:
    """Wait until a result may be ready, a call exceeds its limit, or `seconds` are over (None: no limit)."""
    wait_for_any([self], seconds)

  @property
  def pending(self) -> list[tuple[Future, float]]:
    """The starts and calls under way, each with the seconds until its limit, and the pauses, each until its end."""
    now = self._now()
    times = [(slot.future, slot.deadline) for slot in self._slots if slot.future is not None]
    times += [(self._alarm, end) for end, _ in self._pausing.values()]
    return [(future, max(0.0, end - now)) for future, end in times]

  # --- affinity ----------------------------------------------------------------------------------------------------------

  def release(self, last: Any) -> None:
    """Make a last call for its key, ignore the result, and remove the key. Drops the calls of the key that wait."""
    assert self._key is not None, 'the pool has no affinity'
    key = self._key(last)
    self._pausing = {ticket: each for ticket, each in self._pausing.items() if self._key(each[1]) != key}
    if (slot := self._homes.pop(key, None)) is None:
      return
    slot.keys.discard(key)
    slot.waiting = {ticket: call for ticket, call in slot.waiting.items() if self._key(call) != key}
    ticket = next(self._tickets)
    self._last.add(ticket)
    slot.waiting[ticket] = last
    self._hand_out()

  def _home(self, key: Hashable) -> _Slot:
    """The slot of a key. A new key goes where the fewest keys are, and not behind a cancelled call, which may hang.

    Among slots with equally many keys, it avoids those that make a last call, which may hang too. Most last calls are short, so
    it does not go to a slot with more keys.
    """
    if key not in self._homes:
      slot = min(self._slots, key=lambda slot: (slot.cancelled, len(slot.keys), slot.ticket in self._last))
      if slot.cancelled and not slot.keys:  # all workers are in cancelled calls, and no key loses its state with this one
        self._replace(slot)
      slot.keys.add(key)
      self._homes[key] = slot
    return self._homes[key]

  # --- calls to workers and back -------------------------------------------------------------------------------------------

  def _hand_out(self) -> None:
    """End the pauses that are over, and give each idle worker the oldest call that waits for it."""
    for ticket, (end, call) in list(self._pausing.items()):
      if self._now() >= end:
        del self._pausing[ticket]
        (self._waiting if self._key is None else self._home(self._key(call)).waiting)[ticket] = call
    for slot in self._slots:
      queue = slot.waiting or self._waiting
      if slot.future is not None or not queue:
        continue
      if why := slot.worker.died():  # no call is to blame
        self._lose(slot, f'a worker died idle: {why}')
        continue
      slot.ticket = next(iter(queue))
      # If this last call hangs, no key loses its state with the worker. New keys must not wait for it up to the limit.
      limit = min(self._limit, LAST_SECONDS) if slot.ticket in self._last and not slot.keys else self._limit
      slot.future, slot.deadline = slot.worker.ask(queue.pop(slot.ticket)), self._now() + limit

  def _collect(self) -> None:
    """Take the results of calls that ended or exceeded their limit, and hand out the next calls."""
    for slot in self._slots:
      if slot.future is None or not (slot.future.done() or self._now() >= slot.deadline):
        continue
      if slot.ticket is not None:
        self._finish(slot)
      elif why := _failed_start(slot.worker):
        self._lose(slot, why)
      else:
        slot.future = None
    self._hand_out()

  def _finish(self, slot: _Slot) -> None:
    """Keep the result of a call, and the worker if it is still fit."""
    assert slot.future is not None
    assert slot.ticket is not None
    ticket, cancelled = slot.ticket, slot.cancelled
    result = self._result(slot.future)
    if isinstance(result, Failure) and result.kind != 'error':
      self._replace(slot)
    else:
      self._losses = 0
      slot.future, slot.ticket, slot.cancelled = None, None, False
    if ticket in self._last:
      self._last.remove(ticket)
    elif not cancelled:
      self._results[ticket] = result
      self._fresh = True

  def _result(self, call: Future[tuple[Any, str]]) -> Any:
    if not call.done():
      return Failure('timeout', f'no answer in {self._limit:g} s ({self._limit_setting})')
    if (error := call.exception()) is not None:
      return Failure('crash', str(error) if isinstance(error, WorkerDied) else reason(error))
    answer, why = call.result()
    return Failure('error', why) if why else answer

  def _lose(self, slot: _Slot, why: str) -> None:
    """Replace a worker that failed without a call. Raises SettingsError after LOSSES such failures per worker."""
    self._losses += 1
    if self._losses >= LOSSES * self._size:
      raise self._cannot_start(why)
    self._replace(slot)

  def _replace(self, slot: _Slot) -> None:
    slot.worker.end()
    slot.worker = self._start()
    slot.future, slot.deadline = slot.worker.ready, self._now() + START_SECONDS
    slot.ticket, slot.cancelled = None, False

  def _cannot_start(self, why: str) -> SettingsError:
    return SettingsError(f'{self._blame}: a worker cannot start: {why}')


def wait_for_any(pools: Sequence[WorkerPool], seconds: float | None) -> None:
  """Wait until one of the pools may have a result, a call exceeds its limit, or `seconds` are over (None: no limit)."""
  pending = [each for pool in pools for each in pool.pending]
  if pending and not any(pool._fresh for pool in pools):
    left = min(left for _, left in pending)
    timeout = left if seconds is None else min(seconds, left)
    concurrent.futures.wait([future for future, _ in pending], timeout, concurrent.futures.FIRST_COMPLETED)
  for pool in pools:
    pool._collect()


def _failed_start(worker: Worker) -> str:
  """Why a worker did not start, or '' if it did."""
  if not worker.ready.done():
    return f'not ready after {START_SECONDS:g} s'
  error = worker.ready.exception()
  if error is None:
    return worker.ready.result()
  return str(error) if isinstance(error, WorkerDied) else reason(error)
