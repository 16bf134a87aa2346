"""Processes that step environments: they end with the run, however it ends, and signals are the run's to handle."""

import os
import signal
import subprocess
import sys
import time

import pytest

from sprl.tasks.executors import end, process

PROGRAM = """
import os, threading, time
from sprl.tasks.executors import process


if __name__ == '__main__':
  executor = process()
  print(executor.submit(os.getpid).result(), flush=True)
  executor.submit(time.sleep, {seconds})
  threading.Event().wait(60)
"""


def gone(pid: int, seconds: float = 20.0) -> bool:
  """Whether a process ends within so many seconds."""
  late = time.monotonic() + seconds
  while time.monotonic() < late:
    try:
      os.kill(pid, 0)
    except ProcessLookupError:
      return True
    time.sleep(0.02)
  return False


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='only Linux can have the kernel kill them')
@pytest.mark.parametrize('seconds', [0, 300], ids=['idle', 'in a call'])
def test_a_run_killed_leaves_no_environment_process(tmp_path, seconds):
  (tmp_path / 'parent.py').write_text(PROGRAM.format(seconds=seconds))
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
  parent = subprocess.Popen([sys.executable, tmp_path / 'parent.py'], stdout=subprocess.PIPE, text=True, env=environment)
  assert parent.stdout
  worker = int(parent.stdout.readline())
  parent.kill()
  parent.wait()
  assert gone(worker)


def test_signals_pass_a_process_by_until_its_executor_is_ended():
  executor = process()
  worker = executor.submit(os.getpid).result()
  assert os.getpgid(worker) == worker  # a Ctrl-C in the terminal does not reach it
  for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(worker, number)
  assert executor.submit(os.getpid).result() == worker
  child = executor.submit(_started).result()
  end(executor)
  assert gone(worker)
  assert gone(child)


def _started() -> int:
  return subprocess.Popen(['sleep', '300']).pid
