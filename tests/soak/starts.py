"""One start of a run: its processes, their marks, and how they are killed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from marks import Marks
from variants import Variant

ROOT = Path(__file__).parents[2]
GLANCE = 0.005  # seconds between two looks


class Start:
  """A start of the run of `variant` in `workdir`. What it prints and its marks are in the folder `logs`.

  Programs compiled for one device are kept in `compiled`. Those for several are not: see sprl/distributed/process_group.py.
  """

  def __init__(self, variant: Variant, config: Path, workdir: Path, logs: Path, compiled: Path):
    logs.mkdir(parents=True)
    self._logs = logs
    self.processes: list[subprocess.Popen] = []
    self.marks: list[Marks] = []
    command = [sys.executable, str(Path(__file__).with_name('marked_main.py'))]
    command += [f'--config={config}', f'--workdir={workdir}', *variant.arguments]
    environment = {
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
      'JAX_COMPILATION_CACHE_DIR': str(compiled),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'PYTHONPATH': str(ROOT),
      'TF_CPP_MIN_LOG_LEVEL': '2',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={variant.devices}',
    }
    if variant.processes > 1:
      environment |= {'SPRL_COORDINATOR': f'localhost:{_free_port()}', 'SPRL_PROCESSES': str(variant.processes)}
    for k in range(variant.processes):
      own = {'SOAK_MARKS': str(logs / f'marks_{k}')} | ({'SPRL_PROCESS': str(k)} if variant.processes > 1 else {})
      with open(logs / f'out_{k}', 'w') as out, open(logs / f'err_{k}', 'w') as err:
        self.marks.append(Marks(logs / f'marks_{k}', time.monotonic()))
        self.processes.append(
          subprocess.Popen(command, cwd=ROOT, env={**environment, **own}, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        )

  @property
  def alive(self) -> bool:
    """Whether one of the processes runs."""
    return any(process.poll() is None for process in self.processes)

  def errors(self, k: int) -> str:
    """What process `k` wrote to standard error."""
    return (self._logs / f'err_{k}').read_text(errors='replace')

  def workers(self) -> list[int]:
    """The grading workers of all processes."""
    return [pid for process in self.processes for pid in _children(process.pid) if 'sprl.tasks' in _command(pid)]

  def kill(self, pids: Iterable[int]) -> None:
    for pid in pids:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def await_end(self, seconds: float) -> bool:
    """Wait until all processes have ended. Kill what is left after `seconds`, and return False."""
    until = time.monotonic() + seconds
    while self.alive and time.monotonic() < until:
      time.sleep(GLANCE)
    ended = not self.alive
    self.kill(process.pid for process in self.processes if process.poll() is None)
    for process in self.processes:
      process.wait()
    return ended


def await_gone(workers: Iterable[int], seconds: float) -> bool:
  """Wait until none of the workers runs. Return False after `seconds`."""
  until = time.monotonic() + seconds
  while left := [pid for pid in workers if 'sprl.tasks' in _command(pid)]:
    if time.monotonic() > until:
      return False
    workers = left
    time.sleep(GLANCE)
  return True


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(('', 0))
    return free.getsockname()[1]


def _children(pid: int) -> list[int]:
  """The processes whose parent is `pid`."""
  found = []
  for entry in Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError, ValueError):  # a process that has just ended
      after_name = (entry / 'stat').read_text().rpartition(')')[2].split()
      if int(after_name[1]) == pid:
        found.append(int(entry.name))
  return found


def _command(pid: int) -> str:
  """The command line of a process; '' if it has ended, also if nobody has waited for it."""
  with contextlib.suppress(OSError):
    return Path(f'/proc/{pid}/cmdline').read_text().replace('\0', ' ')
  return ''
