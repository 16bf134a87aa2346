"""Grading wherever an executor is: the pool of sprl.tasks.grading_pool on a Ray cluster's CPUs, say, with the same marks.

Each executor grades one sample at a time. One that takes too long, or breaks, is given up and another takes its place. What a
sample may hold in memory is the cluster's affair.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass
from functools import cache

from sprl.settings import SettingsError
from sprl.tasks import graders, grading_worker
from sprl.tasks.executors import end, wait_for
from sprl.tasks.foreign import reason
from sprl.tasks.graders import GraderSpec
from sprl.tasks.grading_pool import START_SECONDS, Grade, Sample


@dataclass
class _Lane:
  executor: Executor
  loaded: bool  # else its first sample waits for the grader to be loaded, too
  running: tuple[int, Future, float] | None = None  # ticket, its answer to be, when it is late


class GradingLanes:
  """A context within which samples are graded, `workers` at a time, each within `timeout` seconds. For one thread.

  Entering raises SettingsError where the grader cannot be loaded there.
  """

  def __init__(
    self,
    spec: GraderSpec,
    workers: int,
    timeout: float,
    start: Callable[[], Executor],
    now: Callable[[], float] = time.monotonic,
  ):
    self.counts: Counter[str] = Counter()  # samples graded so far, by status
    self._spec, self._size, self._timeout, self._start, self._now = spec, workers, timeout, start, now
    self._lanes: list[_Lane] = []
    self._queue: deque[tuple[int, Sample]] = deque()
    self._grades: dict[int, Grade] = {}
    self._unwanted: set[int] = set()  # of those under way
    self._next = 0

  def __enter__(self) -> 'GradingLanes':
    self._lanes = [_Lane(self._start(), True) for _ in range(self._size)]
    for ready in [lane.executor.submit(_ready, self._spec) for lane in self._lanes]:
      try:
        ready.result(START_SECONDS)
      except Exception as error:
        self.__exit__()
        raise SettingsError(
          f'config.task.grader = {self._spec.label!r}: a grading executor cannot start: {reason(error)}'
        ) from error
    return self

  def __exit__(self, *_) -> None:
    while self._lanes:
      end(self._lanes.pop().executor)

  def submit(self, sample: Sample) -> int:
    """Queues a sample to be graded; its grade will be found under the ticket."""
    ticket, self._next = self._next, self._next + 1
    self._queue.append((ticket, sample))
    self._give()
    return ticket

  def cancel(self, ticket: int) -> None:
    """Nobody waits for this grade any more."""
    self._grades.pop(ticket, None)
    self._queue = deque(entry for entry in self._queue if entry[0] != ticket)
    if any(lane.running and lane.running[0] == ticket for lane in self._lanes):
      self._unwanted.add(ticket)

  def poll(self, wanted: Collection[int]) -> dict[int, Grade]:
    """Those of the wanted grades that are there by now, each given out once."""
    for lane in self._lanes:
      self._look(lane)
    self._give()
    return {ticket: self._grades.pop(ticket) for ticket in list(self._grades) if ticket in wanted}

  def wait(self, seconds: float | None) -> None:
    """Until an answer is there, or one is late, or so many seconds are over."""
    if not self._grades:
      wait_for([lane.running[1:] for lane in self._lanes if lane.running], seconds, self._now())

  def _give(self) -> None:
    for lane in self._lanes:
      if lane.running is None and self._queue:
        ticket, sample = self._queue.popleft()
        limit = self._timeout + (0 if lane.loaded else START_SECONDS)
        try:
          lane.running = ticket, lane.executor.submit(_grade, self._spec, sample), self._now() + limit
        except BrokenExecutor:  # it died idle, which is no sample's fault
          self._queue.appendleft((ticket, sample))
          self._replace(lane)

  def _look(self, lane: _Lane) -> None:
    if lane.running is None:
      return
    ticket, future, late = lane.running
    if future.done():
      error = future.exception()
      grade = Grade(*future.result()) if error is None else Grade(0.0, 'crash', reason(error))
    elif self._now() >= late:
      error, grade = None, Grade(0.0, 'timeout', f'no answer in {self._timeout:g} s')
    else:
      return
    lane.running, lane.loaded = None, True
    if error is not None or grade.status == 'timeout':
      self._replace(lane)
    if ticket in self._unwanted:
      self._unwanted.remove(ticket)
    else:
      self._grades[ticket] = grade
      self.counts[grade.status] += 1

  def _replace(self, lane: _Lane) -> None:
    end(lane.executor)
    lane.executor, lane.loaded = self._start(), False


# In an executor.
@cache
def _loaded(label: str, kind: str, name: str, path: str, args: str) -> graders.Grader:
  return graders.load(GraderSpec(label, kind, name, path, json.loads(args)))


def _load(spec: GraderSpec) -> graders.Grader:
  return _loaded(spec.label, spec.kind, spec.name, spec.path, json.dumps(dict(spec.args)))


def _ready(spec: GraderSpec) -> None:
  """Loads the grader, and returns nothing of it: it need not be fit to travel."""
  _load(spec)


def _grade(spec: GraderSpec, sample: Sample) -> tuple[float, str, str]:
  return grading_worker.mark(_load(spec), sample)
