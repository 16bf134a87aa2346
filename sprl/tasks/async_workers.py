"""Workers for services that wait, such as rewards that ask a server: many calls run at a time on one event loop.

    AsyncProcess    the event loop of a worker process (sprl/tasks/async_worker_process.py)
    AsyncThread     an event loop in a thread of this process, for Python callables; nothing can stop a call that blocks it

A worker of the pool is a `Lane`: one call at a time, and all lanes share a loop. A call that takes too long is cancelled and
costs only itself. A call that blocks the loop, or ends its process, costs the calls that run at that time.
"""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from sprl.foreign import attempt, reason
from sprl.tasks.worker_pool import WorkerDied
from sprl.tasks.workers import Child, DaemonThread

Service = Callable[[Any], Awaitable[Any]]
GRACE = 2.0  # seconds that a loop may take to cancel a call; then its process is killed


async def attempt_async(service: Service | None, call: Any) -> tuple[Any, str]:
  """Return (await service(call), ''), or (None, the reason) if it raises or is cancelled."""
  assert service is not None
  try:
    return await service(call), ''
  except asyncio.CancelledError:
    return None, 'cancelled'
  except BaseException as error:
    return None, reason(error)


class Loop(Protocol):
  """An event loop that runs a service."""

  ready: Future[str]  # why the service could not be built, or '' if it was

  def ask(self, call: Any) -> tuple[Future[tuple[Any, str]], Callable[[], Any]]:
    """Give the service a call. Returns its future, and a function that cancels it."""
    ...

  def died(self) -> str:
    """How the loop ended, or '' if it runs."""
    ...

  def end(self) -> None:
    """End the loop."""
    ...


class Lanes:
  """Starts lanes. Starts a new loop for them if there is none, or if it died."""

  def __init__(self, start_loop: Callable[[], Loop]):
    self._start_loop = start_loop
    self._loop: Loop | None = None
    self.open: set[Lane] = set()  # on the newest loop

  def __call__(self) -> 'Lane':
    """Start a lane."""
    if self._loop is None or not self.open or self._loop.died():
      self._loop, self.open = self._start_loop(), set()
    lane = Lane(self._loop, self)
    self.open.add(lane)
    return lane


class Lane:
  """A worker of a pool (sprl/tasks/worker_pool.py): one call at a time on a shared loop."""

  def __init__(self, loop: Loop, lanes: Lanes):
    self._loop, self._lanes = loop, lanes
    self._cancel: Callable[[], Any] = lambda: None
    self.ready = loop.ready

  def ask(self, call: Any) -> Future[tuple[Any, str]]:
    """Give the service a call."""
    future, self._cancel = self._loop.ask(call)
    return future

  def died(self) -> str:
    """Return how the loop ended, or '' if it runs."""
    return self._loop.died()

  def end(self) -> None:
    """Cancel the call under way. The last lane ends the loop."""
    self._cancel()
    self._lanes.open.discard(self)
    if not self._lanes.open:
      self._loop.end()


def async_starter(executor: str, load: Callable[[], Service], memory_gb: float | None = None) -> Callable[[], Loop]:
  """Return the function that starts a loop: in a thread for the executor 'threads', else in a process of this machine."""
  return partial(AsyncThread, load) if executor == 'threads' else partial(AsyncProcess, load, memory_gb)


def _after(seconds: float, act: Callable[[], None]) -> None:
  """Call `act` after this time in a thread that does not keep the process alive."""
  timer = threading.Timer(seconds, act)
  timer.daemon = True
  timer.start()


class AsyncThread:
  """An event loop in a thread of this process. A call that blocks it cannot be ended: other calls then need another loop."""

  def __init__(self, load: Callable[[], Service]):
    self._service, why = attempt(load)
    self._blocked = ''
    self._open: set[Future[tuple[Any, str]]] = set()  # of the calls under way
    self.ready: Future[str] = Future()
    self.ready.set_result(why)
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._run, daemon=True, name='async worker').start()

  def _run(self) -> None:
    """Run the loop until `end`, cancel the calls that are left, and release the loop's resources."""
    self._loop.run_forever()
    if left := asyncio.all_tasks(self._loop):
      for task in left:
        task.cancel()
      self._loop.run_until_complete(asyncio.wait(left, timeout=GRACE))
    self._loop.close()

  def ask(self, call: Any) -> tuple[Future[tuple[Any, str]], Callable[[], Any]]:
    """Give the service a call."""
    future: Future[tuple[Any, str]] = Future()
    running = asyncio.run_coroutine_threadsafe(attempt_async(self._service, call), self._loop)
    self._open.add(future)

    def copy(ended: Future[tuple[Any, str]]) -> None:
      self._open.discard(future)
      if not future.done():
        future.set_result((None, 'cancelled') if ended.cancelled() else ended.result())

    running.add_done_callback(copy)
    return future, lambda: self._cancel(running)

  def died(self) -> str:
    """Return why no call can run (a call blocks the loop), or '' if it runs."""
    return self._blocked

  def end(self) -> None:
    """Stop the loop; if a call blocks it, as soon as this call returns."""
    with suppress(RuntimeError):  # the loop has ended
      self._loop.call_soon_threadsafe(self._loop.stop)

  def _cancel(self, running: Future[tuple[Any, str]]) -> None:
    """Cancel a call. If the loop does not turn within GRACE seconds, a call blocks it: all open calls fail."""
    if not running.cancel():  # the call has ended
      return
    turned = threading.Event()
    with suppress(RuntimeError):
      self._loop.call_soon_threadsafe(turned.set)

    def give_up_if_blocked() -> None:
      if not turned.is_set():
        self._blocked = 'a call blocks its event loop'
        self.end()  # as soon as the call returns
        for future in list(self._open):
          if not future.done():
            future.set_exception(WorkerDied(self._blocked))

    _after(GRACE, give_up_if_blocked)


class AsyncProcess:
  """An event loop in a worker process."""

  def __init__(self, load: Callable[[], Service], memory_gb: float | None = None):
    self._child = Child('sprl.tasks.async_worker_process')
    self._numbers = itertools.count()
    self._lock = threading.Lock()  # of `_pending` and `_over`
    self._pending: dict[int, Future[tuple[Any, str]]] = {}
    self._over = ''  # how the process ended
    self.ready: Future[str] = Future()
    self._sender, self._reader = DaemonThread(), DaemonThread()  # a process that is blocked may not read what it is sent
    self._reader.submit(self._read, (load, memory_gb))

  def ask(self, call: Any) -> tuple[Future[tuple[Any, str]], Callable[[], Any]]:
    """Give the service a call."""
    number, future = next(self._numbers), Future()
    with self._lock:
      if self._over:
        future.set_exception(WorkerDied(self._over))
      else:
        self._pending[number] = future
        self._sender.submit(self._send, number, call)
    return future, lambda: self._cancel(number)

  def died(self) -> str:
    """Return how the process ended, or '' if it runs."""
    return '' if self._child.process.poll() is None else self._child.last_words()

  def end(self) -> None:
    """Kill the process."""
    self._child.kill()

  def _cancel(self, number: int) -> None:
    with self._lock:
      if number not in self._pending:
        return

    def kill_if_blocked() -> None:
      with self._lock:
        blocked = number in self._pending
      if blocked:
        self._child.kill()

    _after(GRACE, kill_if_blocked)
    self._sender.submit(self._send, number, None)

  def _send(self, number: int, call: Any) -> None:
    try:
      self._child.send((number, call))
    except OSError:  # it died; the reader notices
      self._child.kill()
    except Exception as error:  # the call cannot be pickled
      if (future := self._taken(number)) is not None:
        future.set_exception(error)

  def _taken(self, number: int) -> Future[tuple[Any, str]] | None:
    with self._lock:
      return self._pending.pop(number, None)

  def _read(self, start: Any) -> None:
    """Hand replies to the futures of their calls until the process ends."""
    try:
      self._child.send(start)
      self.ready.set_result(str(self._child.receive()))
      while True:
        match self._child.receive():
          case [int() as number, answer, str() as why]:
            if (future := self._taken(number)) is not None:
              future.set_result((answer, why))
          case _:
            raise ValueError('malformed answer')
    except (OSError, EOFError, ValueError):
      self._child.kill()
    except Exception as error:  # the service cannot be pickled, or a reply is nested too deep
      self._child.kill()
      if not self.ready.done():
        self.ready.set_exception(error)
    with self._lock:
      self._over = self._child.last_words()
      lost, self._pending = list(self._pending.values()), {}
    for future in lost if self.ready.done() else [self.ready, *lost]:
      future.set_exception(WorkerDied(self._over))
    self._sender.submit(self._child.close)  # not here: the sender may be about to write to the connection
    self._sender.end()
    self._reader.end()
