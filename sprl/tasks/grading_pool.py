"""Grading in processes that may be killed: no answer, however wild, costs more than its own mark.

Workers are fresh interpreters, not forks (the run holds threads and an accelerator) and not multiprocessing's spawned ones
(those import the run's main module, and jax with it). Each grades one sample at a time. The pool watches the clock and kills
(an alarm within the worker would wait for the C code that hangs) and starts another in its place.

A sample scores 0, and is counted, when its grader takes too long (`timeout`), ends its process or meets its memory limit
(`crash`), raises (`error`), or returns what is no finite number (`invalid`).
"""

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from sprl.settings import SettingsError
from sprl.tasks.graders import GraderSpec
from sprl.tasks.grading_worker import OUT_OF_MEMORY
from sprl.tasks.lifeline import kill

START_SECONDS = 120.0  # to import a grader and what it needs
_LOST = 3  # how often each worker may fail to start, or die idle, with no answer between


@dataclass(frozen=True)
class Grade:
  """A sample's mark, and how it came about."""

  score: float
  status: Literal['ok', 'timeout', 'crash', 'error', 'invalid']
  reason: str = ''  # why it is not ok


Sample = tuple[str, str, str, Mapping[str, Any]]  # prompt, completion, answer, a Problem's extra


class GradingPool:
  """A context within which samples are graded.

  `timeout`: seconds a sample may take. `memory_gb`: address space a worker may add to what it holds once its grader is loaded.
  `counts`: samples graded so far, by status. For one thread.

  Entering raises SettingsError where the grader cannot be loaded.
  """

  def __init__(self, spec: GraderSpec, workers: int, timeout: float, memory_gb: float):
    self.counts: Counter[str] = Counter()
    self._spec, self._size, self._timeout, self._memory_gb = spec, workers, timeout, memory_gb
    self._workers: list[_Worker] = []
    self._queue: dict[int, Sample] = {}  # by ticket, in the order they came
    self._grades: dict[int, Grade] = {}  # that nobody has asked for yet
    self._unwanted: set[int] = set()  # that nobody will ask for
    self._next = 0
    self._lost = 0

  def __enter__(self) -> 'GradingPool':
    try:
      self._workers.extend(self._start() for _ in range(self._size))
      for worker in self._workers:
        wait([worker.connection], worker.seconds_left())
        if failure := worker.started():
          raise SettingsError(failure)
    except BaseException:
      self.close()
      raise
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Ends the workers."""
    while self._workers:
      self._workers.pop().kill()

  def grade(self, samples: Sequence[Sample]) -> list[Grade]:
    """The grades of (prompt, completion, answer, a Problem's extra), in their order; waits for all of them.

    Raises SettingsError if workers that replace others fail to start again and again.
    """
    tickets = [self.submit(sample) for sample in samples]
    grades: dict[int, Grade] = {}
    try:
      while len(grades) < len(tickets):
        self.wait(None)
        grades |= self.poll(tickets)
    finally:
      for ticket in tickets:  # an interrupt came between: what is left is not for the next caller
        self.cancel(ticket)
    _warn(self._spec, list(grades.values()))
    return [grades[ticket] for ticket in tickets]

  def submit(self, sample: Sample) -> int:
    """Queues a sample to be graded; its grade will be found under the ticket."""
    ticket, self._next = self._next, self._next + 1
    self._queue[ticket] = sample
    self._give()
    return ticket

  def cancel(self, ticket: int) -> None:
    """Nobody waits for this grade any more."""
    self._queue.pop(ticket, None)
    self._grades.pop(ticket, None)
    if any(worker.sample == ticket for worker in self._workers):
      self._unwanted.add(ticket)

  def poll(self, wanted: Collection[int]) -> dict[int, Grade]:
    """Those of the wanted grades that are there by now, each given out once."""
    self.wait(0.0)
    return {ticket: self._grades.pop(ticket) for ticket in list(self._grades) if ticket in wanted}

  def wait(self, seconds: float | None) -> None:
    """Until a worker has something to say, or is late, or so many seconds are over. Keeps idle workers busy.

    Raises SettingsError as `grade` does.
    """
    self._give()
    busy = [worker for worker in self._workers if not worker.idle]
    if not busy:
      return
    left = min(worker.seconds_left() for worker in busy)
    answered = wait([worker.connection for worker in busy], left if seconds is None else min(seconds, left))
    for worker in busy:
      if worker.connection in answered or worker.seconds_left() == 0:
        self._collect(worker)

  def _give(self) -> None:
    """Samples to idle workers, in the order they came."""
    for worker in list(self._workers):
      if worker.idle and self._queue and self._lives(worker):
        ticket = next(iter(self._queue))
        worker.give(ticket, self._queue.pop(ticket))

  def _lives(self, worker: '_Worker') -> bool:
    """Whether an idle or starting worker is of use; one that is not is replaced, and is no sample's fault."""
    failure = worker.died() if worker.idle else worker.started()
    if failure:
      self._lost += 1
      if self._lost >= _LOST * self._size:
        raise SettingsError(failure)
      self._replace(worker)
    return not failure

  def _collect(self, worker: '_Worker') -> None:
    """Takes what a worker has to say, or says it for one that is dead or late."""
    if worker.sample is None:
      self._lives(worker)
      return
    ticket = worker.sample
    grade = worker.answer()
    if ticket in self._unwanted:
      self._unwanted.remove(ticket)
    else:
      self._grades[ticket] = grade
      self.counts[grade.status] += 1
    if grade.status in ('timeout', 'crash'):
      self._replace(worker)
    else:
      self._lost = 0

  def _start(self) -> '_Worker':
    return _Worker(self._spec, self._timeout, self._memory_gb)

  def _replace(self, worker: '_Worker') -> None:
    worker.kill()
    self._workers[self._workers.index(worker)] = self._start()


class _Worker:
  """A grading process and what it is doing: starting up, idle, or grading `sample`."""

  def __init__(self, spec: GraderSpec, timeout: float, memory_gb: float):
    self.idle = False
    self.sample: int | None = None  # its ticket
    self._spec, self._timeout = spec, timeout
    ours, theirs = socket.socketpair()
    # A worker that neither reads nor finishes what it says must not hold the pool: reads and writes have a limit, too.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
      ours.setsockopt(socket.SOL_SOCKET, option, struct.pack('ll', int(timeout) + 1, 0))
    lifeline, self._lifeline = os.pipe()
    with theirs:
      descriptors = theirs.fileno(), lifeline
      self._process = subprocess.Popen(
        [sys.executable, '-P', '-m', 'sprl.tasks.grading_worker', *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,  # a kill takes what the grader has started, and a Ctrl-C is the run's alone
        env={
          **os.environ,
          'PYTHONPATH': os.pathsep.join(path or os.getcwd() for path in sys.path),
          'JAX_PLATFORMS': 'cpu',  # a grader that uses these leaves the accelerator to the run
          'CUDA_VISIBLE_DEVICES': '',
          'OMP_NUM_THREADS': '1',
        },
      )
    os.close(lifeline)
    self.connection = Connection(ours.detach())
    self._deadline = time.monotonic() + START_SECONDS
    self._send((spec, memory_gb))

  def seconds_left(self) -> float:
    return max(0.0, self._deadline - time.monotonic())

  def started(self) -> str:
    """Takes the word that the worker is ready; else says why it is not."""
    reply = self._receive()
    reason = reply.reason if isinstance(reply, Grade) else reply
    self.idle = not reason
    return reason and f'config.task.grader = {self._spec.label!r}: a grading process cannot start: {reason}'

  def died(self) -> str:
    """Why a worker is gone that was left idle; '' if it is not: then it has nothing to say."""
    if not self.connection.poll():
      return ''
    return f'config.task.grader = {self._spec.label!r}: a grading process died idle: {_last_words(self.kill())}'

  def give(self, ticket: int, sample: Sample) -> None:
    self.idle, self.sample, self._deadline = False, ticket, time.monotonic() + self._timeout
    self._send(sample)

  def answer(self) -> Grade:
    reply = self._receive()
    self.idle, self.sample = True, None
    return reply if isinstance(reply, Grade) else Grade(*reply)

  def kill(self) -> int:
    """Ends the process and all that it has started. Returns the exit status, its own if it had one before."""
    if self._process.returncode is None:
      self.connection.close()
      os.close(self._lifeline)
      kill(self._process.pid)
    return self._process.wait()

  def _send(self, message: tuple) -> None:
    with contextlib.suppress(OSError):  # dead or deaf: the end of the connection, or the deadline, tells
      self.connection.send(message)

  def _receive(self) -> Any:
    """What the worker says, or the grade of one that is late or dead."""
    if not self.connection.poll():
      return Grade(0.0, 'timeout', f'no answer in {self._timeout if self.sample is not None else START_SECONDS:g} s')
    try:
      return json.loads(self.connection.recv_bytes(1 << 16))
    except (EOFError, OSError, ValueError):
      return Grade(0.0, 'crash', _last_words(self.kill()))


def _last_words(status: int) -> str:
  if status == OUT_OF_MEMORY:
    return 'out of memory'
  return f'killed by {signal.Signals(-status).name}' if status < 0 else f'exit status {status}'


def _warn(spec: GraderSpec, grades: Sequence[Grade]) -> None:
  """One line on a batch in which not all was well."""
  bad = Counter((grade.status, grade.reason) for grade in grades if grade.status != 'ok')
  if bad:
    (status, reason), _ = bad.most_common(1)[0]
    logging.warning(
      'grader %s: %d of %d samples scored 0 for want of a grade, most by %s (%s)',
      spec.label,
      bad.total(),
      len(grades),
      status,
      reason,
    )
