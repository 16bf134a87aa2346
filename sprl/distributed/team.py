"""The processes of a run as a team: a decision that one process takes reaches all of them.

All processes run the same program and put the same work on their devices in the same order. Some facts do not follow from the
settings: which grader answered first, whether a chunk has ended, a signal, a file. Process 0 decides them and tells the others.
A fact that only one process knows is broadcast in the same way:

    batch = team.broadcast('batch', lambda: poll())                    process 0 calls poll(); all processes get its result
    problem = team.broadcast('problem', lambda: problems[5], by=1)     process 1 reads the problem

Messages go over sockets, not over the devices, which may be busy. All of them pass through process 0. A process waits when it
receives, and when it sends a message for which the socket has no room.
"""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

from sprl.config import SettingsError
from sprl.distributed.watchdog import Watchdog

_STOP = 0  # in place of a broadcast's number: a request to stop, which is sent unasked


class OutOfStep(RuntimeError):
  """Two processes reached different broadcasts. This is a bug in the program."""


@dataclass
class Team:
  """The processes of a run, as one of them sees them. The default is a process that is alone."""

  process: int = 0
  processes: int = 1
  connections: Sequence[Connection] = ()  # in process 0: to processes 1, 2, ...; in another process: to process 0
  watchdog: Watchdog | None = None
  _broadcasts: int = 0  # begun so far
  _waiting: bool = False  # for a message of another process
  _stop: str = ''  # the request to stop that was sent or received

  @property
  def leads(self) -> bool:
    """Whether this is process 0, which decides and which alone writes to the work directory."""
    return self.process == 0

  def broadcast[T](self, about: str, decide: Callable[[], T], by: int = 0) -> T:
    """Call `decide` in process `by` only, and return its result in every process. The result must be picklable.

    Every process must make the same calls in the same order; `about` names the subject, to check that. Raises OutOfStep if
    another process is at another call.
    """
    if self.processes == 1:
      return decide()
    self._broadcasts += 1
    if self.process == by:
      value = decide()
      self._send((self._broadcasts, about, value), self.connections)
      return value
    sender = by if self.leads else 0
    number, subject, value = self._receive(sender)
    if (number, subject) != (self._broadcasts, about):
      raise OutOfStep(
        f'SPRL_PROCESS={self.process} is at {about!r} (broadcast {self._broadcasts}), '
        f'SPRL_PROCESS={sender} at {subject!r} (broadcast {number})'
      )
    if self.leads:
      self._send((number, subject, value), [c for k, c in enumerate(self.connections, 1) if k != by])
    return value

  def gather[T](self, about: str, say: Callable[[], T]) -> list[T]:
    """Call `say` in every process and return the results, in the order of the processes."""
    return [self.broadcast(about, say, by=process) for process in range(self.processes)]

  def fail_together[T](self, about: str, work: Callable[[], T], errors: tuple[type[Exception], ...]) -> T:
    """Call `work` in every process and return its local result; if it raises in one process, every process raises.

    `work` must not broadcast. A process in which `work` succeeds raises SettingsError with the message of the process that
    failed. Only `errors` are handled.
    """
    try:
      result, failure = work(), None
    except errors as error:
      result, failure = None, error
    messages = self.gather(about, lambda: None if failure is None else str(failure))
    try:
      if failure is not None:
        raise failure
    finally:
      del failure  # its traceback holds this frame: a cycle would keep the arrays of all callers alive
    for process, message in enumerate(messages):
      if message is not None:
        raise SettingsError(f'SPRL_PROCESS={process}: {message}')
    return cast(T, result)

  def stopped(self, here: str) -> str:
    """Return the reason why all processes must stop, or ''. `here` is the request that this process received, or ''."""
    if here and not self.leads and not self._stop:
      self._stop = here
      self._send((_STOP, 'stop', here), self.connections)

    def reason() -> str:
      for connection in self.connections:
        while connection.poll():  # before this decision, processes send only requests to stop
          self._stop = self._guarded(connection.recv)[2]
      return here or self._stop

    return self.broadcast('stop', reason)

  def barrier(self) -> None:
    """Wait until all processes have called it."""
    self.gather('arrived', lambda: None)
    self.broadcast('all arrived', lambda: None)

  def leave(self, status: int) -> int:
    """End the membership and return the exit status. Status 0 waits for the others; another status ends them (`fail`)."""
    if self.watchdog is None:
      return status
    if status:
      self.fail(status)
    self.barrier()
    self.watchdog.leave(0)
    return status

  def fail(self, status: int) -> NoReturn:
    """End this process at once, which ends the others. JAX's exit handlers would wait for the others, so they do not run."""
    if self.watchdog is not None:
      self.watchdog.leave(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

  def await_verdict(self) -> None:
    """Give the watchdog time to end this process, if another process has died."""
    if self.watchdog is not None:
      self.watchdog.await_verdict()

  def progress(self) -> tuple[int, bool]:
    """Return the number of broadcasts begun, and whether the process waits for the result of one."""
    return self._broadcasts, self._waiting

  def _send(self, message: tuple[int, str, Any], connections: Sequence[Connection]) -> None:
    data = pickle.dumps(message)
    for connection in connections:
      self._guarded(lambda connection=connection: connection.send_bytes(data))

  def _receive(self, process: int) -> tuple[int, str, Any]:
    """Wait for the next broadcast of `process`. A request to stop that comes before it is kept for `stopped`."""
    connection = self.connections[process - 1] if self.leads else self.connections[0]
    self._waiting = True
    try:
      while (message := self._guarded(connection.recv))[0] == _STOP:
        self._stop = message[2]
      return message
    finally:
      self._waiting = False

  def _guarded[T](self, transfer: Callable[[], T]) -> T:
    """Send or receive. A broken connection means that a process has ended: the watchdog names it and ends this process."""
    try:
      return transfer()
    except (EOFError, OSError):
      self.await_verdict()
      raise


ALONE = Team()
