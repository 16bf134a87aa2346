"""Worker processes: their end, signals, and faults that cost one call."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from garbage import Held, no_collections
from pools import alive, processes, until

from sprl.config import SettingsError
from sprl.tasks.worker_pool import WorkerDied
from sprl.tasks.workers import ProcessWorker, RayWorker, starter, with_time_limit

PROGRAM = """
import threading
from functools import partial
from sprl.tasks.worker_pool import WorkerPool
from sprl.tasks.workers import starter
from test_workers import behaviour


with WorkerPool(starter('processes', behaviour), 3, limit=100.0, limit_setting='', blame='') as pool:
  print(*(slot.worker._process.pid for slot in pool._slots), flush=True)
  for call in ('backtrack', 'child MARK'):
    pool.submit(call)
  print('submitted', flush=True)
  threading.Event().wait(60)
"""
MARK = f'{4000 + os.getpid()}.5'  # seconds of a `sleep` that only this process's tests start


def behaviour():
  """Return a service whose calls select its behaviour."""
  return do


def do(call):
  import re

  what, _, value = call.partition(' ')
  match what:
    case 'pid':
      return os.getpid()
    case 'backtrack':  # a hang that holds the interpreter's lock
      re.match(r'(a+)+$', 'a' * 64 + 'b')
    case 'child':
      subprocess.Popen(['sleep', value])
      time.sleep(60)
    case 'started':
      return subprocess.Popen(['sleep', value]).pid
    case 'print':
      print(value)
    case 'file':
      return tempfile.mkstemp()[1]
    case 'environment':
      return ['jax' in sys.modules, *(os.environ[name] for name in ('JAX_PLATFORMS', 'CUDA_VISIBLE_DEVICES'))]
    case 'object':
      return object()
    case 'write':  # into the connection, around the worker's program
      os.write(int(sys.argv[1]), len(value).to_bytes(4, 'big') + value.encode())
  return call


@pytest.fixture(scope='module')
def worker():
  worker = ProcessWorker(behaviour)
  assert worker.ready.result(60) == ''
  yield worker
  worker.end()


def test_temporary_files_of_a_worker_are_deleted_when_it_is_killed():
  worker = ProcessWorker(behaviour)
  file = Path(worker.ask('file').result(60)[0])
  assert file.exists()
  assert file.parent != Path(tempfile.gettempdir())
  worker.end()
  until(lambda: not file.parent.exists())


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='only the Linux kernel ends workers with their parent')
def test_no_worker_outlives_a_run_that_is_killed():
  """SIGKILL ends the run while one worker is idle, one hangs in C, and one has a child process."""
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
  parent = subprocess.Popen(
    [sys.executable, '-c', PROGRAM.replace('MARK', MARK)], stdout=subprocess.PIPE, text=True, env=environment
  )
  assert parent.stdout
  pids = [int(pid) for pid in parent.stdout.readline().split()]
  assert len(pids) == 3
  assert parent.stdout.readline() == 'submitted\n'
  until(lambda: processes(f'sleep\x00{MARK}'))
  assert all(alive(pid) for pid in pids)
  parent.kill()
  parent.wait()
  until(lambda: not any(alive(pid) for pid in pids) and not processes(f'sleep\x00{MARK}'), 'workers outlive the run')


def test_a_worker_ignores_signals_until_the_pool_ends_it():
  worker = ProcessWorker(behaviour)
  pid, _ = worker.ask('pid').result(60)
  assert os.getpgid(pid) == pid  # Ctrl-C in the terminal does not reach it
  for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(pid, number)
  assert worker.ask('pid').result(60) == (pid, '')
  child, _ = worker.ask('started 300').result(60)
  worker.end()
  until(lambda: not alive(pid) and not alive(child))


def test_a_worker_imports_no_jax_and_leaves_the_accelerator_alone(worker):
  assert worker.ask('environment').result(60) == ([False, 'cpu', ''], '')


def test_what_a_worker_prints_is_not_lost_when_it_is_killed(capfd, monkeypatch):
  monkeypatch.delenv('PYTHONUNBUFFERED', raising=False)
  worker = ProcessWorker(behaviour)
  worker.ask('print hello').result(60)
  worker.end()
  assert capfd.readouterr().out == 'hello\n'


def test_an_answer_that_is_not_plain_data_costs_one_call(worker):
  answer, why = worker.ask('object').result(60)
  assert answer is None
  assert 'not JSON serializable' in why
  assert worker.ask('calm').result(60) == ('calm', '')


@pytest.mark.parametrize('reply', ['[1', '[1, 2]', '[' * 100_000], ids=['no JSON', 'no reason', 'too deep'])
def test_a_forged_answer_costs_one_call(reply):
  worker = ProcessWorker(behaviour)
  with pytest.raises((WorkerDied, RecursionError)):
    worker.ask(f'write {reply}').result(60)
  worker.end()


def test_a_call_may_have_a_time_limit():
  assert with_time_limit(60.0, divmod, 7, 2) == (3, 1)
  with pytest.raises(ZeroDivisionError):
    with_time_limit(60.0, divmod, 7, 0)
  with pytest.raises(TimeoutError):
    with_time_limit(0.01, time.sleep, 1.0)


def test_a_call_with_a_time_limit_that_fails_keeps_no_array_of_its_callers_alive():
  def caller():
    array = Held()
    kept.append(weakref.ref(array))
    with suppress(ZeroDivisionError):
      with_time_limit(60.0, divmod, 7, 0)

  kept = []
  with no_collections():
    caller()
    assert kept[0]() is None


def test_a_missing_ray_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with pytest.raises(SettingsError, match=r"executor = 'ray'.*make install EXTRAS=ray"):
    starter('ray', partial(json.loads, '1'))()
  with pytest.raises(SettingsError, match='ray'):
    RayWorker(behaviour)
