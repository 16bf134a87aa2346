"""The three kinds of worker of a pool (sprl/tasks/worker_pool.py).

    thread       in this process; cannot be killed, so a call that hangs keeps its thread until this process ends
    process      a fresh interpreter on this machine; can be killed with all its child processes; its memory can be limited
    Ray actor    a process in the cluster that RAY_ADDRESS names; can be killed; sprl does not limit its memory

`starter` chooses the kind by the value of `config.task.executor`.
"""

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from sprl.config import SettingsError
from sprl.foreign import attempt, import_path
from sprl.tasks import lifeline
from sprl.tasks.worker_pool import Worker, WorkerDied
from sprl.tasks.worker_process import OUT_OF_MEMORY

Service = Callable[[Any], Any]
Load = Callable[[], Service]  # builds a worker's service, in the worker. Processes and Ray receive it as a pickle

OF_WORKERS = {  # variables of all processes that run code of tasks
  'JAX_PLATFORMS': 'cpu',  # the accelerators belong to the run
  'CUDA_VISIBLE_DEVICES': '',
  'OMP_NUM_THREADS': '1',
  'PYTHONUNBUFFERED': '1',  # a kill would lose the output in a buffer
}
MAX_REPLY = 1 << 26  # bytes of one answer from a process


def starter(executor: str, load: Load, memory_gb: float | None = None) -> Callable[[], Worker]:
  """Return the function that starts a worker of `executor`: 'threads', 'processes' or 'ray'.

  `memory_gb` (GiB) limits the address space that a process may add after its service is loaded. Threads and Ray ignore it.
  """
  kinds: dict[str, Callable[[], Worker]] = {
    'threads': partial(ThreadWorker, load),
    'processes': partial(ProcessWorker, load, memory_gb),
    'ray': partial(RayWorker, load),
  }
  return kinds[executor]


def cpus(executor: str) -> int:
  """Return the number of CPUs that the workers of an executor share."""
  return int(_joined().cluster_resources().get('CPU', 1)) if executor == 'ray' else os.cpu_count() or 1


# --- threads -------------------------------------------------------------------------------------------------------------


class DaemonThread:
  """A thread that calls functions one after the other. The process can exit while it runs."""

  def __init__(self):
    self._calls: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=self._work, daemon=True, name='worker').start()

  def submit[R](self, fn: Callable[..., R], *args: Any) -> Future[R]:
    """Queue a call of `fn`."""
    future: Future = Future()
    self._calls.put((future, fn, args))
    return future

  def end(self) -> None:
    """End the thread after the calls in its queue, without waiting for it."""
    self._calls.put(None)

  def _work(self) -> None:
    while (item := self._calls.get()) is not None:
      future, fn, args = item
      try:
        future.set_result(fn(*args))
      except BaseException as error:
        future.set_exception(error)
      del item, future, fn, args  # an error holds this frame; in a cycle both would keep the arrays of its callers alive


def with_time_limit[R](seconds: float, fn: Callable[..., R], *args: Any) -> R:
  """Return fn(*args), called in a thread. Raises TimeoutError after `seconds`; the thread keeps running."""
  thread = DaemonThread()
  future = thread.submit(fn, *args)
  thread.end()
  try:
    return future.result(seconds)
  finally:
    del future  # an error holds this frame; see `_work`


class ThreadWorker:
  """A worker in a thread. When it ends, it calls the method `close` of its service, if there is one."""

  def __init__(self, load: Load):
    self._thread, self._service = DaemonThread(), None
    self.ready = self._thread.submit(self._load, load)

  def ask(self, call: Any) -> Future[tuple[Any, str]]:
    """Give the service a call."""
    return self._thread.submit(lambda: attempt(self._service, call))

  def died(self) -> str:
    """Return '': a thread does not die."""
    return ''

  def end(self) -> None:
    """Close the service and end the thread, after the call that runs."""
    self._thread.submit(lambda: getattr(self._service, 'close', lambda: None)())
    self._thread.end()

  def _load(self, load: Load) -> str:
    self._service, why = attempt(load)
    return why


# --- processes -----------------------------------------------------------------------------------------------------------


class Child:
  """A fresh interpreter that runs the program of a worker, and the connection to it.

  A fork would copy the run's threads and its hold on the accelerator; a spawned process of multiprocessing would import the run's
  main module, and jax with it.

  Messages to the program are pickles, its replies JSON. The process may run code that a model wrote, and a reply in the form of a
  pickle could then run code here.

  The process has a folder of its own for temporary files (TMPDIR). It is deleted when the process
  has ended, unless the run was killed too.
  """

  def __init__(self, program: str):
    self._folder = tempfile.TemporaryDirectory(prefix='sprl-worker-', ignore_cleanup_errors=True)
    own = {'TMPDIR': self._folder.name}
    ours, theirs = socket.socketpair()
    held, self._lifeline = os.pipe()
    with theirs:
      descriptors = theirs.fileno(), held
      self.process = subprocess.Popen(
        [sys.executable, '-P', '-m', program, *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,  # so a kill also ends its child processes, and Ctrl-C in the terminal does not end it
        env={**os.environ, 'PYTHONPATH': import_path(), **OF_WORKERS, **own},
      )
    os.close(held)
    self._connection = Connection(ours.detach())
    self._ended = threading.Lock()

  def send(self, message: Any) -> None:
    """Send a message. Raises OSError if the process has ended."""
    self._connection.send_bytes(pickle.dumps(message))

  def receive(self) -> Any:
    """Wait for a reply. Raises OSError, EOFError or ValueError if the process dies or sends something else."""
    return json.loads(self._connection.recv_bytes(MAX_REPLY))

  def close(self) -> None:
    """Wait for the end of a killed process, close the connection, and delete its temporary files."""
    self.process.wait()
    self._connection.close()
    self._folder.cleanup()

  def kill(self) -> None:
    """Kill the process and its child processes."""
    with self._ended:
      if self._lifeline >= 0:
        lifeline.kill(self.process.pid)  # even if it has ended: its child processes may still run
        os.close(self._lifeline)
        self._lifeline = -1
        # A process that left the group may hold the other end open. Shut down this end, because the thread may wait in a read.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
          ours.shutdown(socket.SHUT_RDWR)

  def last_words(self) -> str:
    """Wait for the end of the process. Returns how it ended."""
    status = self.process.wait()
    if status == OUT_OF_MEMORY:
      return 'out of memory'
    return f'killed by {signal.Signals(-status).name}' if status < 0 else f'exit status {status}'


class ProcessWorker:
  """A worker in a separate process (sprl/tasks/worker_process.py).

  Each worker has a thread here that talks to its process, so a process that neither reads nor writes delays no other worker.
  """

  def __init__(self, load: Load, memory_gb: float | None = None):
    self._child = Child('sprl.tasks.worker_process')
    self._process = self._child.process
    self._thread = DaemonThread()
    self.ready: Future[str] = self._thread.submit(self._exchange, (load, memory_gb))

  def ask(self, call: Any) -> Future[tuple[Any, str]]:
    """Give the service a call."""
    return self._thread.submit(self._answer, call)

  def died(self) -> str:
    """Return how the process ended, or '' if it runs."""
    return '' if self._process.poll() is None else self._child.last_words()

  def end(self) -> None:
    """Kill the process and its child processes."""
    self._child.kill()
    self._thread.submit(self._child.close)
    self._thread.end()

  def _answer(self, call: Any) -> tuple[Any, str]:
    match self._exchange(call):
      case [answer, str() as why]:
        return answer, why
    raise WorkerDied('malformed answer')

  def _exchange(self, message: Any) -> Any:
    """Send a message and return the reply. Raises WorkerDied."""
    try:
      self._child.send(message)
      return self._child.receive()
    except (OSError, EOFError, ValueError):  # the process died, closed the connection, or sent something else
      self._child.kill()
      raise WorkerDied(self._child.last_words()) from None


# --- Ray -----------------------------------------------------------------------------------------------------------------


class RayWorker:
  """A worker in an actor of a Ray cluster.

  The cluster is the one that RAY_ADDRESS names. Without RAY_ADDRESS a cluster starts on this machine and ends with this process.
  Ray reserves a CPU for an actor while it starts, and none afterwards, so many actors that wait can share a CPU.

  Raises SettingsError if Ray is not installed.
  """

  def __init__(self, load: Load):
    self._actor = _joined().remote(max_restarts=0)(_Actor).remote()
    self.ready: Future[str] = self._actor.load.remote(load).future()

  def ask(self, call: Any) -> Future[tuple[Any, str]]:
    """Give the service a call."""
    return self._actor.ask.remote(call).future()

  def died(self) -> str:
    """Return '': Ray reports the death of an actor at its next call."""
    return ''

  def end(self) -> None:
    """Kill the actor."""
    _joined().kill(self._actor)


class _Actor:
  """The part of a RayWorker that runs in the actor."""

  def load(self, load: Load) -> str:
    self._service, why = attempt(load)
    return why

  def ask(self, call: Any) -> tuple[Any, str]:
    return attempt(self._service, call)


def _joined() -> Any:
  """Return the module `ray`, connected to its cluster."""
  try:
    import ray
  except ImportError:
    raise SettingsError("config.task.executor = 'ray': expected Ray to be installed: make install EXTRAS=ray") from None
  if not ray.is_initialized():
    variables = {'JAX_PLATFORMS': 'cpu'}  # the accelerators belong to the run
    if 'RAY_ADDRESS' not in os.environ:  # on this machine, actors can import all that this process can
      variables['PYTHONPATH'] = import_path()
    ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False, runtime_env={'env_vars': variables})
  return ray
