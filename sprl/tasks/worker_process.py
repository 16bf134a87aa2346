"""The program of a worker process: `python -m sprl.tasks.worker_process CONNECTION LIFELINE`.

Both arguments are file descriptors that the pool hands down. The process

1. reads a function that builds its service, and a memory limit;
2. replies '' when the service is built, or the reason why it cannot be built;
3. answers each call with [answer, ''], or with [null, the reason] if the service raises.

The pool may kill the process at any time. The kernel kills it when the pool's process ends.
"""

import json
import logging
import os
import resource
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sprl.foreign import attempt, reason
from sprl.tasks.lifeline import hold

# Exit status of a process that reached its memory limit. Its service may have leaked memory, so the pool starts a new process.
OUT_OF_MEMORY = 77
_PROGRAM = os.getpid()


def main(connection: int, lifeline: int) -> None:
  """Answer calls until the connection closes."""
  hold(lifeline)
  pool = Connection(connection)
  if (service := loaded(pool)) is None:
    return
  while True:
    try:
      call = pool.recv()
    except EOFError:
      return
    send(pool, attempt(_ends_without_memory, service, call))


def loaded(pool: Connection) -> Callable[[Any], Any] | None:
  """Load the service that the pool names, tell the pool how that ended, and return it; None if it cannot be loaded."""
  try:
    load, memory_gb = pool.recv()
    service = load()
    if memory_gb is not None:
      limit_memory(memory_gb)
  except BaseException as error:  # a user's file may also call sys.exit
    send(pool, reason(error))
    return None
  send(pool, '')
  return service


def _ends_without_memory(service: Callable[[Any], Any], call: Any) -> Any:
  try:
    return service(call)
  except MemoryError:
    os._exit(OUT_OF_MEMORY)


def send(pool: Connection, message: Any) -> None:
  """Send a message as JSON, or (null, the reason why it cannot be JSON).

  Ends a child process that the service forked and that returned from it: its answer would be taken for that of the next call.
  """
  if os.getpid() != _PROGRAM:
    os._exit(0)
  text, why = attempt(json.dumps, message)
  pool.send_bytes((json.dumps((None, why)) if why else text).encode())


def limit_memory(memory_gb: float) -> None:
  """Limit the address space to the space in use now plus `memory_gb` GiB, and disable core files."""
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  statm = Path('/proc/self/statm')
  if not statm.exists():
    logging.warning('%s: worker processes have no memory limit', sys.platform)
    return
  used = int(statm.read_text().split()[0]) * resource.getpagesize()
  limit = used + int(memory_gb * 2**30)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == '__main__':
  main(*map(int, sys.argv[1:]))
