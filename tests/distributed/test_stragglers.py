"""Stragglers: if no process makes progress, the report names the processes that hold up the others."""

import threading
import time
import weakref

import pytest
from garbage import Held, no_collections

from sprl.distributed.stragglers import MUTE, Member, Progress, Stragglers, whereabouts

WAITS, WORKS, COMPUTES = (True, False), (False, False), (False, True)  # waits for a broadcast, waits for the devices


def report(*states, patience=10.0, mute=()):
  """Return the report on processes 0, 1, ... that stay at `states` for `patience` seconds.

  A state is (number of broadcasts, WAITS or WORKS or COMPUTES). Processes in `mute` last reported at 100 - 2 * MUTE.
  """
  members = [Member(f'process {k}', Progress(n, *how, f'file:{k}')) for k, (n, how) in enumerate(states)]
  stragglers = Stragglers(patience)
  for now in (100.0, 100.0 + 0.9 * patience, 100.0 + patience):
    for k, member in enumerate(members):
      member.heard = 100.0 - 2 * MUTE if k in mute else now
    said = stragglers.look(members, now)
    assert said == '' or now == 100.0 + patience
  return said


def test_the_process_with_the_fewest_broadcasts_is_named():
  assert report((7, COMPUTES), (8, WAITS), (5, WORKS)) == 'process 2 at file:2 made no progress for 10 s'


def test_at_equal_broadcasts_the_process_off_its_devices_is_named():
  assert report((7, COMPUTES), (7, WORKS), (7, COMPUTES)).startswith('process 1 at file:1 made')


def test_processes_in_equal_states_are_named_together():
  places = [f'process {k} at file:{k} (waits for its devices)' for k in range(3)]
  assert report(*[(7, COMPUTES)] * 3) == f'{" and ".join(places)} made no progress for 10 s'


def test_a_mute_process_is_named_whatever_its_last_report():
  assert report((6, COMPUTES), (7, WAITS), (7, WAITS), mute=[2]).startswith('process 2 at file:2 made')


def test_processes_that_wait_for_a_broadcast_are_not_named():
  assert report((7, WAITS), (7, WAITS)) == ''


def test_a_process_that_has_ended_is_not_named():
  member = Member('process 1', Progress(3, *WORKS), 0.0, over=True)
  assert Stragglers(1.0).look([member], 100.0) == ''


def test_progress_of_any_process_restarts_the_clock():
  """Process 1 always waits for its devices. Process 0 makes progress and has not reached the same computation."""
  stragglers, slow = Stragglers(2.0), Member('process 1', Progress(100, *COMPUTES))
  for turn in range(20):
    now = 0.2 * turn
    slow.heard = now
    assert stragglers.look([Member('process 0', Progress(turn, *WORKS), now), slow], now) == ''


# --- whereabouts in the program --------------------------------------------------------------------------------------


# Two modules: a program and a library. `blocks` calls both its arguments; the second argument blocks outside Python.
PROGRAM, JAX = {'__name__': 'sprl.somewhere'}, {'__name__': 'jax.somewhere'}
exec('def blocks(started, wait): started(), wait()', JAX)
exec("""
def in_python(started, wait):
  started(), wait()

def on_devices(started, wait):
  blocks(started, wait)
""", PROGRAM | {'blocks': JAX['blocks']}, PROGRAM)  # fmt: skip
CASES = [('in_python', (False, 'sprl.somewhere:3')), ('on_devices', (True, 'sprl.somewhere:6'))]


def whereabouts_during(program):
  """Return `whereabouts()`, called by another thread while `program(started, wait)` blocks in `wait`."""
  reached, go_on, seen = threading.Lock(), threading.Lock(), []
  reached.acquire()
  go_on.acquire()

  def look():
    reached.acquire()
    seen.append(whereabouts())
    go_on.release()

  watcher = threading.Thread(target=look)
  watcher.start()
  program(reached.release, go_on.acquire)
  watcher.join()
  return seen[0]


@pytest.mark.parametrize(('name', 'expected'), CASES)
def test_whereabouts_is_the_line_that_calls_jax(name, expected):
  assert whereabouts_during(PROGRAM[name]) == expected


@pytest.mark.parametrize(('name', 'expected'), CASES)
def test_whereabouts_is_in_the_thread_that_the_program_joins(name, expected):
  def joins(started, wait):
    thread = threading.Thread(target=PROGRAM[name], args=(lambda: time.sleep(0.05) or started(), wait))
    thread.start()
    thread.join()

  assert whereabouts_during(joins) == expected


def test_looking_for_whereabouts_keeps_no_array_alive():
  """A frame in a reference cycle would keep its arrays, and modules that the compiler must not see, until Python collects it."""

  def program(started, wait):
    array = Held()
    kept.append(weakref.ref(array))
    started(), wait()

  kept = []
  with no_collections():
    whereabouts_during(program)
    assert kept[0]() is None
