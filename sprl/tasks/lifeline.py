"""Ties a worker process to the run: it ends when the run ends, however that happens."""

import contextlib
import fcntl
import os
import select
import signal

DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def hold(lifeline: int) -> None:
  """Let the kernel kill this process, and those it starts, when the other end of a pipe closes.

  For the leader of a process group. The kernel sends SIGKILL to the group even if a call hangs in C and even if the parent was
  killed by SIGKILL itself. SIGINT and SIGTERM are ignored, because the parent handles them.

  Only Linux can send SIGKILL this way. Elsewhere a worker that hangs outlives a parent that was killed.
  """
  for number in DEFAULTS:
    signal.signal(number, _ignore)  # a program that this process executes would inherit SIG_IGN
  # Forks do not ignore them: Process.terminate() sends SIGTERM. A signal that comes at once waits until the fork is ready.
  os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_heed)
  if hasattr(fcntl, 'F_SETSIG'):
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
  if select.select([lifeline], [], [], 0)[0]:  # the pipe closed before the signal was set up
    kill(os.getpid())


def _ignore(*_) -> None:
  pass


def _hold_back() -> None:
  signal.pthread_sigmask(signal.SIG_BLOCK, DEFAULTS)


def _let_through() -> None:
  signal.pthread_sigmask(signal.SIG_UNBLOCK, DEFAULTS)


def _heed() -> None:
  for number, default in DEFAULTS.items():
    if signal.getsignal(number) is _ignore:
      signal.signal(number, default)
  _let_through()


def kill(leader: int) -> None:
  """Kill a process group, if any of its processes is left."""
  with contextlib.suppress(ProcessLookupError, PermissionError):  # Linux and macOS raise one each if no process is left
    os.killpg(leader, signal.SIGKILL)
