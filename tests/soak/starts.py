"""One start of a run: its processes, their marks, and how they are killed.

Helpers are the processes that a run starts: grading workers, and the renderer of chat templates (sprl/io/templates.py). All
processes of a start inherit the variable SOAK_MARKS, which identifies them, also when their parent has ended.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from marks import Marks
from variants import Variant

ROOT = Path(__file__).parents[2]
GLANCE = 0.005  # seconds between two looks
HELPERS = {'worker': 'sprl.tasks', 'renderer': 'template_process.py'}  # kind of a helper -> part of its command line


class Stopped(Exception):
  """The soak ends early."""


class Start:
  """A start of the run of `variant` in `workdir`. A context manager, which kills the processes that are left.

  Args:
    variant: the variant.
    config: the config file of the tiny run.
    workdir: the folder of the run.
    logs: a new folder for the marks and the output of the processes.
    compiled: the folder for programs compiled for one device. Programs for several devices are not kept: see
      sprl/distributed/process_group.py.
    stop: is set when the soak ends early.
  """

  def __init__(self, variant: Variant, config: Path, workdir: Path, logs: Path, compiled: Path, stop: threading.Event):
    logs.mkdir(parents=True)
    self._logs, self._stop = logs, stop
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
        group = self.processes[0].pid if self.processes else 0  # all processes are in the group of the first
        streams = {'stdin': subprocess.DEVNULL, 'stdout': out, 'stderr': err}
        process = subprocess.Popen(command, cwd=ROOT, env={**environment, **own}, process_group=group, **streams)
        self.processes.append(process)

  def __enter__(self) -> 'Start':
    return self

  def __exit__(self, *_) -> None:
    self.kill(helpers=True)
    for process in self.processes:
      process.wait()

  @property
  def alive(self) -> bool:
    """Whether one of the processes runs."""
    return any(process.poll() is None for process in self.processes)

  def errors(self, k: int) -> str:
    """What process `k` wrote to standard error."""
    return (self._logs / f'err_{k}').read_text(errors='replace')

  def helpers(self, kind: str) -> list[int]:
    """The process ids of the helpers of one kind, a key of HELPERS."""
    return [pid for pid, command in self.running().items() if HELPERS[kind] in command]

  def running(self) -> dict[int, str]:
    """The command line of each process of this start that runs, by process id. Processes that a helper starts are included."""
    return {pid: _read(pid, 'cmdline') for pid in processes_with('SOAK_MARKS', f'{self._logs}/marks_')}

  def kill(self, helpers: bool) -> None:
    """Kill all processes of the run at once, and then the helpers.

    The processes of the run are one process group. Each helper leads a group of its own, which has the processes that it starts.
    """
    groups = set()
    if helpers:
      for pid in self.running():
        with contextlib.suppress(ProcessLookupError):
          groups.add(os.getpgid(pid))
    group = self.processes[0].pid
    if self.alive:  # else another group could have its number
      os.killpg(group, signal.SIGKILL)
    for each in groups - {group}:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(each, signal.SIGKILL)

  def glance(self) -> None:
    """Wait for GLANCE seconds. Raises Stopped if the soak ends early."""
    if self._stop.wait(GLANCE):
      raise Stopped

  def await_end(self, seconds: float) -> bool:
    """Wait until all processes have ended. Kill what is left after `seconds`, and return False."""
    until = time.monotonic() + seconds
    while self.alive and time.monotonic() < until:
      self.glance()
    ended = not self.alive
    if not ended:
      self.kill(helpers=True)
    for process in self.processes:
      process.wait()
    return ended

  def left_behind(self, seconds: float) -> list[str]:
    """Wait until no helper runs. Return the command lines of those that run after `seconds`."""
    until = time.monotonic() + seconds
    while left := self.running():
      if time.monotonic() > until:
        return list(left.values())
      self.glance()
    return []


def processes_with(variable: str, beginning: str) -> list[int]:
  """Return the processes that run with an environment variable whose value begins so. A process that has ended has none."""
  entry = f'\0{variable}={beginning}'
  return [int(path.name) for path in Path('/proc').glob('[0-9]*') if entry in '\0' + _read(int(path.name), 'environ')]


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(('', 0))
    return free.getsockname()[1]


def _read(pid: int, name: str) -> str:
  """The text of a file of /proc/PID, with spaces for zeros in a command line; '' if the process has ended."""
  with contextlib.suppress(OSError):
    text = Path(f'/proc/{pid}/{name}').read_text(errors='replace')
    return text.replace('\0', ' ').strip() if name == 'cmdline' else text
  return ''
