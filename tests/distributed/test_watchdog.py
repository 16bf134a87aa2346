"""Watchdogs: if a process dies, fails or hangs, all others name it and end in time."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from sprl.distributed import watchdog
from sprl.distributed.stragglers import MUTE, Member, Progress
from sprl.distributed.watchdog import GRACE, LAST, LOST, SILENCE, Ended, Judge, Verdict, Watchdog, close_when_silent

ROOT = Path(__file__).parents[2]

# --- decisions, with given times -------------------------------------------------------------------------------------


def hub_of(others, patience=float('inf')):
  """Return the judge of process 0, the hub of `others` processes."""
  return Judge(Member('process 0'), [Member(f'process {k}') for k in range(1, others + 1)], True, patience)


def follower(patience=float('inf')):
  """Return the judge of process 1."""
  return Judge(Member('process 1'), [Member('process 0')], False, patience)


def messages(judge, kind):
  return [(peer.name, message) for peer, message in judge.outbox if isinstance(message, kind)]


def test_a_closed_connection_is_a_death_and_the_hub_ends_after_the_others():
  judge = hub_of(3)
  judge.close(judge.peers[1], 'died', 10.0)
  assert messages(judge, Verdict) == [(f'process {k}', Verdict('process 2 died', 0.0)) for k in (1, 2, 3)]
  assert judge.final_message(10.0) == ''  # processes 1 and 3 are still there
  judge.close(judge.peers[0], 'died', 10.1)
  judge.close(judge.peers[2], 'died', 10.2)
  assert judge.final_message(10.2).startswith('error: process 2 died, so process 0 ends; ')


def test_the_hub_waits_for_the_others_for_a_limited_time():
  judge = hub_of(2)
  judge.close(judge.peers[0], 'died', 10.0)
  assert judge.final_message(10.0 + 0.9 * LAST) == ''
  assert 'process 1 died' in judge.final_message(10.0 + LAST)


def test_a_follower_ends_at_once_when_the_hub_is_gone():
  judge = follower()
  judge.close(judge.peers[0], 'cannot be reached (Connection timed out)', 5.0)
  assert judge.final_message(5.0).startswith('error: process 0 cannot be reached (Connection timed out), so process 1 ends; ')


def test_an_error_leaves_the_others_time_to_report_their_own():
  hub, other = hub_of(2), follower()
  hub.receive(hub.peers[1], Ended(3), 10.0)
  [(name, verdict)] = messages(hub, Verdict)  # process 2 needs none
  assert name == 'process 1'
  other.receive(other.peers[0], verdict, 10.0)
  assert other.final_message(10.0 + 0.9 * GRACE) == ''
  assert other.final_message(10.0 + GRACE) == 'error: process 2 ended with status 3, so process 1 ends'


@pytest.mark.parametrize(('ended', 'status'), [(1, LOST), (2, 2), (3, 3), (-9, LOST), (143, LOST)])
def test_all_processes_have_the_status_of_an_error_that_a_restart_would_repeat(ended, status):
  hub, other = hub_of(2), follower()
  hub.receive(hub.peers[1], Ended(ended), 10.0)
  other.receive(other.peers[0], messages(hub, Verdict)[0][1], 10.0)
  assert hub.status == other.status == status
  assert ('resumes' in other.final_message(20.0)) == (status == LOST)


def test_a_process_that_announces_its_own_error_is_not_ended_by_a_verdict():
  judge = follower()
  judge.receive(judge.peers[0], Ended(2), 10.0)
  judge.leave(2)
  assert judge.final_message(100.0) == ''
  assert messages(judge, Ended) == [('process 0', Ended(2))]


def test_an_announced_end_is_not_reported():
  judge = hub_of(1)
  judge.receive(judge.peers[0], Ended(0), 10.0)
  judge.close(judge.peers[0], 'died', 11.0)
  assert judge.verdict == ''
  assert judge.final_message(100.0) == ''


def test_the_first_cause_is_the_verdict():
  judge = hub_of(2)
  judge.receive(judge.peers[1], Ended(3), 10.0)
  judge.close(judge.peers[0], 'died', 10.1)
  assert judge.verdict == 'process 2 ended with status 3'


def test_a_follower_names_a_hub_that_does_not_report():
  judge = follower(patience=20.0)
  judge.receive(judge.peers[0], Progress(1, False), 100.0)
  judge.look(120.0 + 2 * MUTE)
  assert judge.verdict == ''
  judge.look(120.1 + 2 * MUTE)
  assert judge.verdict == 'process 0 has not reported for 20 s'


def test_the_hub_tells_the_others_which_process_hangs():
  judge = hub_of(1, patience=2.0)
  for now in (0.0, 1.0, 2.0):
    judge.report(Progress(7, False, True, 'train:5'), now)
    judge.receive(judge.peers[0], Progress(5, False, False, 'files:3'), now)
    judge.look(now)
  assert messages(judge, Verdict) == [('process 1', Verdict('process 1 at files:3 made no progress for 2 s', 0.0))]


def test_the_system_is_told_to_close_a_silent_connection():
  with socket.create_server(('localhost', 0)) as server, socket.create_connection(server.getsockname()) as connection:
    close_when_silent(Connection(os.dup(connection.fileno())))
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENCE


# --- the thread ------------------------------------------------------------------------------------------------------


def connected_watchdogs():
  """Return (watchdog of process 0, watchdog of process 1, connection of process 1)."""
  ours, theirs = Pipe()
  hub = Watchdog('process 0', [(ours, 'process 1')], hub=True, progress=lambda: (1, False))
  return hub, Watchdog('process 1', [(theirs, 'process 0')], hub=False, progress=lambda: (1, False)), theirs


def disconnect(connection, *watchdogs):
  """Close a connection for both of its ends, and wait until their threads have ended."""
  with socket.socket(fileno=os.dup(connection.fileno())) as same:
    same.shutdown(socket.SHUT_RDWR)
  for each in watchdogs:
    each._thread.join(10)
    assert not each._thread.is_alive()


@pytest.fixture
def exits(monkeypatch):
  """The statuses given to `os._exit`, which here ends the thread of a watchdog only. BEAT and GRACE are a tenth of the usual."""
  statuses = []
  for name in ('BEAT', 'GRACE'):
    monkeypatch.setattr(watchdog, name, getattr(watchdog, name) / 10)

  def end(status):
    statuses.append(status)
    raise SystemExit

  monkeypatch.setattr(watchdog.os, '_exit', end)
  return statuses


def test_an_error_that_is_announced_ends_the_hub(exits, capfd):
  hub, other, connection = connected_watchdogs()
  other.leave(3)
  disconnect(connection, hub, other)
  assert exits == [3]
  assert 'error: process 1 ended with status 3, so process 0 ends' in capfd.readouterr().err


def test_processes_that_end_well_get_no_verdict(exits):
  hub, other, connection = connected_watchdogs()
  hub.await_verdict()
  other.leave(0)
  hub.leave(0)
  disconnect(connection, hub, other)
  assert exits == []


# --- processes -------------------------------------------------------------------------------------------------------


class Watched:
  """Three processes. Their watchdogs are connected to the watchdog of process 0."""

  def __init__(self, patience=60.0):
    pairs = {k: socket.socketpair() for k in (1, 2)}
    ends = {0: [(pairs[k][0], k) for k in pairs], **{k: [(pairs[k][1], 0)] for k in pairs}}
    self.processes = []
    for k, peers in ends.items():
      arguments = [str(k), 'hub' if k == 0 else '', str(patience), *(f'{peer.fileno()}:{other}' for peer, other in peers)]
      self.processes.append(
        subprocess.Popen(
          [sys.executable, str(ROOT / 'tests' / 'distributed' / 'watched.py'), *arguments],
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

  def tell(self, k, line):
    process = self.processes[k]
    assert process.stdin is not None
    process.stdin.write(f'{line}\n')
    process.stdin.flush()

  def results(self):
    """Wait until all processes end. Return (exit status, standard error) of each."""
    return [(process.wait(timeout=20), process.stderr.read() if process.stderr else '') for process in self.processes]


@pytest.mark.parametrize('gone', [0, 1])
def test_a_killed_process_is_named_by_the_others(gone):
  watched = Watched()
  watched.processes[gone].kill()
  results = watched.results()  # within 20 s
  for k, (status, err) in enumerate(results):
    assert status == (-signal.SIGKILL if k == gone else LOST)
    assert k == gone or err.startswith(f'error: SPRL_PROCESS={gone} died, so SPRL_PROCESS={k} ends; ')


def test_a_run_that_ends_well_prints_nothing():
  watched = Watched()
  for k in (2, 0, 1):
    watched.tell(k, 'end 0')
  assert watched.results() == [(0, '')] * 3


@pytest.mark.slow
def test_an_error_of_one_process_ends_the_others():
  watched = Watched()
  watched.tell(2, 'end 3')
  results = watched.results()
  assert [status for status, _ in results] == [3, 3, 3]
  assert results[2][1] == ''
  assert results[1][1].startswith('error: SPRL_PROCESS=2 ended with status 3, so SPRL_PROCESS=1 ends')


@pytest.mark.slow
def test_processes_that_find_the_same_error_keep_their_status():
  watched = Watched()
  for k in range(3):
    watched.tell(k, 'end 2')
  assert watched.results() == [(2, '')] * 3


@pytest.mark.slow
@pytest.mark.parametrize('stopped', [0, 2])
def test_a_stopped_process_is_named_by_the_others(stopped):
  """A stopped process sends no reports, but its connection stays open."""
  watched = Watched(patience=2.0)
  for k in range(3):
    watched.tell(k, 'waits 7')
  time.sleep(1.5)
  watched.processes[stopped].send_signal(signal.SIGSTOP)
  try:
    others = [watched.processes[k] for k in range(3) if k != stopped]
    assert [process.wait(timeout=30) for process in others] == [LOST] * 2
    assert all(re.search(rf'SPRL_PROCESS={stopped} .*(no progress|not reported) for 2 s', p.stderr.read()) for p in others)
  finally:
    watched.processes[stopped].send_signal(signal.SIGCONT)
  assert watched.processes[stopped].wait(timeout=20) == LOST
