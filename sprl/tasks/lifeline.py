"""Ties a worker process to the run: it ends when the run ends, however that happens."""

import contextlib
import fcntl
import os
import select
import signal


def hold(lifeline: int) -> None:
  """Let the kernel kill this process, and those it starts, when the other end of a pipe closes.

  For the leader of a process group. The kernel sends SIGKILL to the group even if a call hangs in C and even if the parent was
  killed by SIGKILL itself. SIGINT and SIGTERM are ignored, because the parent handles them.

  Only Linux can send SIGKILL this way. Elsewhere a worker that hangs outlives a parent that was killed.
  """
  for number in signal.SIGINT, signal.SIGTERM:
    signal.signal(number, lambda *_: None)  # child processes would inherit SIG_IGN; they do not inherit a handler
  if hasattr(fcntl, 'F_SETSIG'):
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
  if select.select([lifeline], [], [], 0)[0]:  # the pipe closed before the signal was set up
    kill(os.getpid())


def kill(leader: int) -> None:
  """Kill a process group, if any of its processes is left."""
  with contextlib.suppress(ProcessLookupError, PermissionError):  # Linux and macOS raise one each if no process is left
    os.killpg(leader, signal.SIGKILL)
