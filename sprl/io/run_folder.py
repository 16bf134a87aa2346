"""The lock of a work directory: one process at a time may write to it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sprl.config import SettingsError


@contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
  """Create the work directory if needed, and lock it. The system releases the lock when the process ends, however it ends.

  Raises SettingsError if another process holds the lock: two runs would delete each other's checkpoints.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / 'lock', 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise SettingsError(f'--workdir={workdir}: in use by another process; wait for its end or use another folder') from None
    yield
