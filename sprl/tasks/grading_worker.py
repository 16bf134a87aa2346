"""One grading process: `python -m sprl.tasks.grading_worker CONNECTION LIFELINE`, file descriptors that its pool hands down.

It is told its grader and its memory, says that it is ready (or why it is not), then answers each sample with a score and a
status. The pool may kill it at any moment, and so does the kernel when the pool's process ends, however it ends.
"""

import fcntl
import json
import logging
import math
import numbers
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from sprl.tasks import graders
from sprl.tasks.foreign import reason

OUT_OF_MEMORY = 77  # exit status: a process that met its limit may hold leaks, so a fresh one takes its place


def main(connection: int, lifeline: int) -> None:
  """Grades what the connection brings until it closes."""
  _die_with_parent(lifeline)
  for number in (
    signal.SIGINT,
    signal.SIGTERM,
  ):  # the pool's process decides; a handler, unlike SIG_IGN, is not handed to children
    signal.signal(number, lambda *_: None)
  pool = Connection(connection)
  spec, memory_gb = pool.recv()
  logging.getLogger('math_verify').setLevel(logging.ERROR)  # it warns that its own time limit is off
  try:
    grade = graders.load(spec)
    _limit(memory_gb)
  except BaseException as error:  # a user's file may also sys.exit
    _send(pool, reason(error))
    return
  _send(pool, '')
  while True:
    try:
      sample = pool.recv()
    except EOFError:
      return
    _send(pool, mark(grade, sample))


def mark(grade: graders.Grader, sample: tuple) -> tuple[float, str, str]:
  """(score, status, reason) of a (prompt, completion, answer, extra)."""
  try:
    score = grade(*sample)
  except MemoryError:
    os._exit(OUT_OF_MEMORY)
  except (Exception, SystemExit) as error:
    return 0.0, 'error', reason(error)
  if not isinstance(score, numbers.Real) or not math.isfinite(score):
    return 0.0, 'invalid', f'returned {score!r:.100}' if isinstance(score, numbers.Real) else f'returned a {type(score).__name__}'
  return float(score), 'ok', ''


def _send(pool: Connection, message: object) -> None:
  pool.send_bytes(json.dumps(message).encode())


def _die_with_parent(lifeline: int) -> None:
  """Has the kernel kill this process and its children when the other end of the pipe closes: also amid a hang in C, also if the
  parent is killed. It is Linux that can send SIGKILL so; elsewhere a grader that hangs outlives a killed parent.
  """
  if hasattr(fcntl, 'F_SETSIG'):
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _limit(memory_gb: float) -> None:
  """Bounds the address space to what is in use now and `memory_gb` more; no core files."""
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  statm = Path('/proc/self/statm')
  if not statm.exists():
    logging.warning('grading: no memory limit on %s', sys.platform)
    return
  used = int(statm.read_text().split()[0]) * resource.getpagesize()
  limit = used + int(memory_gb * 2**30)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == '__main__':
  main(*map(int, sys.argv[1:]))
