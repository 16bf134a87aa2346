"""What a run asks of the operating system: signals noted for the loop to see, and a work directory to itself."""

import ctypes
import fcntl
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sprl.settings import SettingsError


class Stop:
  """Whether the run has been asked to end: the signal's name, or ''."""

  received = ''


@contextmanager
def signals() -> Iterator[Stop]:
  """Notes SIGTERM and SIGINT for the loop to see between steps; a second one acts as it would have."""
  stop = Stop()

  def note(number, _):
    stop.received = signal.Signals(number).name
    signal.signal(number, previous[number])

  previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


@contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
  """Makes the work directory, if need be, and holds it. The system lets go of it when the process ends, however it ends.

  Raises SettingsError where another process holds it: two runs would delete each other's checkpoints.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / 'lock', 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise SettingsError(f'--workdir={workdir}: another process is running it; wait for it, or name another folder') from None
    yield


def return_free_memory() -> None:
  """Gives the system back what the allocator holds for later: after compilations, several hundred megabytes. glibc only."""
  if sys.platform == 'linux' and hasattr(libc := ctypes.CDLL(None), 'malloc_trim'):
    libc.malloc_trim(0)
