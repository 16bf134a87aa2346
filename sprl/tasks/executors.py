"""Where graders and environments are called: executors of one worker each, which may be given up when a call hangs.

A thread, a process of this machine, or an actor of a Ray cluster; any other `concurrent.futures.Executor` of one worker would do.
"""

import concurrent.futures
import multiprocessing
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from sprl.settings import SettingsError
from sprl.tasks import lifeline


class Daemon(Executor):
  """An executor of one thread that does not keep the process from ending: a call that hangs is left behind."""

  def __init__(self):
    self._calls: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=self._work, daemon=True, name='environment').start()

  def submit(self, fn, /, *args, **kwargs):
    """As executors do."""
    future: Future = Future()
    self._calls.put((future, fn, args, kwargs))
    return future

  def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
    """Ends after what was submitted; never waits."""
    self._calls.put(None)

  def _work(self) -> None:
    while (item := self._calls.get()) is not None:
      future, fn, args, kwargs = item
      try:
        future.set_result(fn(*args, **kwargs))
      except BaseException as error:
        future.set_exception(error)


def process() -> Executor:
  """An executor of one fresh process, which can be killed, and ends with this one."""
  return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), lifeline.begin)


class RayActor(Executor):
  """An executor of one actor of a Ray cluster, somewhere: a process that does one call at a time, and can be killed.

  The cluster is the one that RAY_ADDRESS names; without it, one that is started on this machine and ends with the process. An
  actor takes a CPU to be placed, and none to live, so that many that wait for something share one. Raises SettingsError where
  Ray is not installed.
  """

  def __init__(self):
    ray = _joined()
    self._lost = ray.exceptions.RayActorError
    self._actor = ray.remote(max_restarts=0)(_Called).remote()

  def submit(self, fn, /, *args, **kwargs):
    """As executors do; what fn raises comes back as it was raised, and BrokenExecutor where the actor is lost."""
    answered: Future = Future()

    def answer(reply: Future) -> None:
      error = reply.exception()
      if isinstance(error, self._lost):
        answered.set_exception(BrokenExecutor(f'the Ray actor was lost: {error}'))
      elif error is not None:
        answered.set_exception(error)
      else:
        result, raised = reply.result()
        answered.set_result(result) if raised is None else answered.set_exception(raised)

    self._actor.call.remote(fn, args, kwargs).future().add_done_callback(answer)
    return answered

  def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
    """Kills the actor, whatever it does."""
    _joined().kill(self._actor)


class _Called:
  """What an actor is."""

  def call(self, fn, args, kwargs) -> tuple[Any, BaseException | None]:
    try:
      return fn(*args, **kwargs), None
    except Exception as error:
      return None, error


def _joined() -> Any:
  """The ray module, connected to its cluster."""
  try:
    import ray
  except ImportError:
    raise SettingsError(
      "config.environment.executor or config.task.grader_executor = 'ray': expected Ray to be installed: pip install 'sprl[ray]'"
    ) from None
  if not ray.is_initialized():
    variables = {'JAX_PLATFORMS': 'cpu'}  # accelerators are the run's
    if 'RAY_ADDRESS' not in os.environ:  # this machine, where what can be imported here can be imported there
      variables['PYTHONPATH'] = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False, runtime_env={'env_vars': variables})
  return ray


def within(seconds: float, fn: Callable[..., Any], *args: Any) -> Any:
  """fn(*args), in a thread that is left behind where it takes longer. Raises TimeoutError then."""
  executor = Daemon()
  future = executor.submit(fn, *args)
  executor.shutdown()
  return future.result(seconds)


def wait_for(running: Sequence[tuple[Future, float]], seconds: float | None, now: float) -> None:
  """Until one of the calls under way, (answer, when it is late) each, returns or is late, or so many seconds are over."""
  if running:
    left = max(0.0, min(late for _, late in running) - now)
    answers = [answer for answer, _ in running]
    concurrent.futures.wait(answers, left if seconds is None else min(seconds, left), concurrent.futures.FIRST_COMPLETED)


def end(executor: Executor) -> None:
  """Kills an executor's processes and what they have started; its threads are left to themselves."""
  processes = dict(getattr(executor, '_processes', None) or {}).values()
  executor.shutdown(wait=False)
  for each in processes:
    if each.exitcode is None:  # else its number may be another's by now
      lifeline.kill(each.pid)
    each.kill()  # also one that does not lead a group yet


def cpus(executor: str) -> int:
  """The CPUs that executors of a kind may use."""
  return int(_joined().cluster_resources().get('CPU', 1)) if executor == 'ray' else os.cpu_count() or 1


EXECUTORS: dict[str, Callable[[], Executor]] = {'threads': Daemon, 'processes': process, 'ray': RayActor}
