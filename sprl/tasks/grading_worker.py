"""One grading process: `python -m sprl.tasks.grading_worker CONNECTION LIFELINE`, file descriptors that its pool hands down.

It is told its grader and its memory, says that it is ready (or why it is not), then answers each sample with a score and a
status. The pool may kill it at any moment, and so does the kernel when the pool's process ends, however it ends.
"""

import json
import logging
import math
import numbers
import os
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from sprl.tasks import graders
from sprl.tasks.foreign import reason
from sprl.tasks.lifeline import hold

OUT_OF_MEMORY = 77  # exit status: a process that met its limit may hold leaks, so a fresh one takes its place


def main(connection: int, lifeline: int) -> None:
  """Grades what the connection brings until it closes."""
  hold(lifeline)
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
