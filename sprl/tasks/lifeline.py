"""What makes a worker process the run's own: it ends when the run does, however that ends, and leaves signals to it."""

import contextlib
import fcntl
import multiprocessing
import os
import select
import signal


def hold(lifeline: int) -> None:
  """For a process that leads its group: the kernel kills it and its children when the other end of the pipe closes, also amid a
  hang in C, also if the parent is killed. SIGINT and SIGTERM pass by, for the parent decides.

  It is Linux that can send SIGKILL so; elsewhere a worker that hangs outlives a killed parent.
  """
  for number in signal.SIGINT, signal.SIGTERM:
    signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not handed to children
  if hasattr(fcntl, 'F_SETSIG'):
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
  if select.select([lifeline], [], [], 0)[0]:  # it closed before anyone listened
    kill(os.getpid())


def begin() -> None:
  """`hold`, at the start of a process that multiprocessing has spawned: its pipe to the parent is there already."""
  os.setpgrp()  # a kill takes what it has started, and a Ctrl-C is the run's alone
  parent = multiprocessing.parent_process()
  assert parent is not None
  hold(parent.sentinel)


def kill(leader: int) -> None:
  """Ends a process and all that it has started, where there are any left."""
  with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing left to kill, as Linux and as macOS say it
    os.killpg(leader, signal.SIGKILL)
