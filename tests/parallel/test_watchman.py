"""Watchmen: whoever goes, or stands still, is named by all others, which end in time."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sprl.parallel.watchman import LOST

ROOT = Path(__file__).parents[2]


class Watched:
  """Three processes and their watchmen, joined to that of process 0."""

  def __init__(self, silence=60.0, patience=60.0):
    pairs = {k: socket.socketpair() for k in (1, 2)}
    ends = {0: [(pairs[k][0], k) for k in pairs], **{k: [(pairs[k][1], 0)] for k in pairs}}
    self.processes = []
    for k, peers in ends.items():
      told = [str(k), 'hub' if k == 0 else '', str(silence), str(patience)]
      told += [f'{peer.fileno()}:{other}' for peer, other in peers]
      self.processes.append(
        subprocess.Popen(
          [sys.executable, str(ROOT / 'tests' / 'parallel' / 'watched.py'), *told],
          env={'PATH': os.environ['PATH'], 'PYTHONPATH': str(ROOT)},
          pass_fds=[peer.fileno() for peer, _ in peers],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
        )
      )
    for pair in pairs.values():
      for end in pair:
        end.close()
    for process in self.processes:
      assert process.stdout is not None
      assert process.stdout.readline() == 'ready\n'

  def tell(self, k, *words):
    process = self.processes[k]
    assert process.stdin is not None
    for word in words:
      process.stdin.write(f'{word}\n')
    process.stdin.flush()

  def results(self):
    """(exit status, standard error) of each, when they and their watchmen have ended."""
    return [(process.wait(timeout=20), process.stderr.read() if process.stderr else '') for process in self.processes]


@pytest.mark.parametrize('gone', [0, 1])
def test_one_that_is_killed_is_named_by_the_others(gone):
  watched, start = Watched(), time.monotonic()
  watched.processes[gone].kill()
  results = watched.results()
  assert time.monotonic() - start < 8
  for k, (status, said) in enumerate(results):
    assert status == (-signal.SIGKILL if k == gone else LOST)
    ends = '' if k == gone else f', and so ends SPRL_PROCESS={k}'
    assert said == f'error: SPRL_PROCESS={gone} died{ends}; the same command goes on from the last checkpoint\n'


def test_those_that_its_end_ends_are_not_taken_for_its_cause():
  """As jax does where process 0 is gone, faster than a watchman can speak."""
  watched = Watched()
  for process in watched.processes:
    process.kill()
  for k, (_, said) in enumerate(watched.results()):
    assert said.startswith('error: SPRL_PROCESS=0 died' + ('' if k == 0 else f', and so ends SPRL_PROCESS={k};'))


def test_an_error_of_one_is_the_end_of_the_others():
  watched = Watched()
  watched.tell(2, 'end 3')
  results = watched.results()
  assert [status for status, _ in results] == [LOST, LOST, 3]
  assert results[2][1] == ''
  assert results[1][1].startswith('error: SPRL_PROCESS=2 ended with status 3, and so ends SPRL_PROCESS=1;')


def test_what_all_find_each_says_itself():
  watched = Watched()
  for k in range(3):
    watched.tell(k, 'end 2')
  assert watched.results() == [(2, '')] * 3


def test_the_end_of_a_run_is_nobodys_fault():
  watched = Watched()
  for k in (2, 0, 1):
    watched.tell(k, 'end 0')
  assert watched.results() == [(0, '')] * 3


@pytest.mark.slow
def test_one_whose_machine_is_silent_is_named_too():
  """Here its watchman is stopped, whose connection stays open."""
  watched = Watched(silence=3.0)
  children = Path(f'/proc/{watched.processes[1].pid}/task/{watched.processes[1].pid}/children')
  if not children.exists():
    pytest.skip('the kernel does not say whose children are whose')
  [watchman] = map(int, children.read_text().split())
  os.kill(watchman, signal.SIGSTOP)
  try:
    status, said = watched.processes[2].wait(timeout=20), watched.processes[2].stderr
    assert status == LOST
    assert said is not None
    assert 'SPRL_PROCESS=1 has not been heard of for 3 s, and so ends SPRL_PROCESS=2;' in said.read()
    assert watched.processes[0].wait(timeout=20) == LOST
  finally:
    os.kill(watchman, signal.SIGCONT)
  assert watched.processes[1].wait(timeout=20) == LOST


# --- that stand still ------------------------------------------------------------------------------------------------

PLACE = r'at [\w.]+:\d+'


def said_of(watched, k):
  """What is said by process k of a run that ends because somebody has not moved."""
  results = watched.results()
  assert [status for status, _ in results] == [LOST] * 3
  return results[k][1]


def test_one_that_stands_still_is_named_and_not_those_further_on():
  """The first waits for a computation that the last has not begun; the other for the first's word."""
  watched = Watched(patience=2.0)
  watched.tell(0, 'far 7', 'devices')
  watched.tell(1, 'waits 8')
  watched.tell(2, 'far 5')
  assert re.fullmatch(
    rf'error: SPRL_PROCESS=2 \({PLACE}\) has not moved for 2 s, and so ends SPRL_PROCESS=1; the same .* checkpoint\n',
    said_of(watched, 1),
  )


@pytest.mark.slow
def test_of_those_that_are_equally_far_it_is_the_one_that_waits_for_no_device():
  watched = Watched(patience=2.0)
  for k in (0, 2):
    watched.tell(k, 'far 7', 'devices')
  watched.tell(1, 'far 7')
  said = said_of(watched, 1)
  assert re.match(rf'error: SPRL_PROCESS=1 \({PLACE}\) has not moved for 2 s; the same', said)


def test_of_those_that_wait_for_a_thread_it_is_the_one_whose_thread_waits_for_no_device():
  """As for the learner, while rollouts on other devices wait for it."""
  watched = Watched(patience=2.0)
  for k in (0, 2):
    watched.tell(k, 'far 7', 'devices', 'beside')
  watched.tell(1, 'far 7', 'beside')
  line = (ROOT / 'tests' / 'parallel' / 'watched.py').read_text().splitlines().index('  return learns()') + 1
  assert said_of(watched, 1).startswith(f'error: SPRL_PROCESS=1 (at __main__:{line}) has not moved for 2 s; the same')


@pytest.mark.slow
def test_those_that_cannot_be_told_apart_are_named_together():
  watched = Watched(patience=2.0)
  for k in range(3):
    watched.tell(k, 'far 7', 'devices')
  named = ' and '.join(rf'SPRL_PROCESS={k} \({PLACE}, waiting for devices\)' for k in range(3))
  assert re.match(f'error: {named} have not moved for 2 s', said_of(watched, 0))


def test_long_waits_for_one_that_moves_are_nobodys_fault():
  """Longer than the patience, while the first goes on, and the second waits for a computation."""
  watched = Watched(patience=2.0)
  watched.tell(1, 'far 100', 'devices')
  watched.tell(2, 'waits 100')
  for far in range(20):
    watched.tell(0, f'far {far}')
    time.sleep(0.2)
  for k in range(3):
    watched.tell(k, 'end 0')
  assert watched.results() == [(0, '')] * 3


@pytest.mark.slow
def test_one_that_is_stopped_is_named_whatever_it_said_last():
  """As the second, it waited for the first's word; the first, that it begins its part of a computation."""
  watched = Watched(patience=6.0)
  watched.tell(0, 'far 6', 'devices')
  for k in (1, 2):
    watched.tell(k, 'waits 7')
  time.sleep(1.5)
  watched.processes[2].send_signal(signal.SIGSTOP)
  results = watched.results()
  assert [status for status, _ in results] == [LOST, LOST, -signal.SIGKILL]
  assert results[1][1].startswith('error: SPRL_PROCESS=2 (at ')
