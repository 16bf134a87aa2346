"""Lanes: each environment in its own, one call at a time; what raises, hangs or dies costs no more than its lane.

Threads are held at events and barriers, and the limit of a call is told by a clock of the test's own: nothing here depends on
how fast a machine is. The waits in seconds are how long a broken lane may keep a test.
"""

import gc
import os
import threading
import time
import weakref
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import lane_environment
import pytest
from lane_environment import Scripted

from sprl.rollout.lanes import LOST, Call, Lanes
from sprl.rollout.scheduler import Failure, WorkersLike
from sprl.tasks.executors import EXECUTORS, Daemon

PATIENCE = 30.0
A, B, C = (1, 0), (2, 0), (3, 0)


def results(lanes, *tickets):
  """What was returned under the tickets, once all of it is there."""
  found, end = {}, time.monotonic() + PATIENCE
  while len(found) < len(tickets):
    assert time.monotonic() < end, f'nothing came of {set(tickets) - found.keys()}'
    lanes.wait(0.1)
    found |= lanes.poll(tickets)
  return [found[ticket] for ticket in tickets]


def call(lanes, *of_call):
  return results(lanes, lanes.submit(Call(*of_call)))[0]


@pytest.fixture
def gate():
  """Holds calls that hang, until it is opened or the test is over."""
  lane_environment.ENTERED.clear()
  lane_environment.GATE.clear()
  yield lane_environment.GATE
  lane_environment.GATE.set()


class Hand:
  """A clock that a test turns."""

  def __init__(self):
    self.time = 0.0

  def __call__(self):
    return self.time


class Recorded(Scripted):
  """Writes down its calls, the threads they are made in, and how many are under way."""

  def __init__(self, salt, log):
    super().__init__(salt)
    self.log = log

  def reset(self, seed):
    self.log.append((self.salt, 'reset', threading.get_ident()))
    return super().reset(seed)

  def step(self, action):
    self.log.append((self.salt, action, threading.get_ident()))
    return super().step(action)

  def close(self):
    self.log.append((self.salt, 'close', threading.get_ident()))
    if self.salt == 13:
      raise OSError('a close that fails')


def recorded(lanes_of, **settings):
  log: list[tuple[int, str, int]] = []
  return Lanes(lambda salt: Recorded(salt, log), lanes_of, **settings), log


# --- whose call is made where, and when ------------------------------------------------------------------------------


def test_lanes_are_workers():
  with Lanes(Scripted, 1) as lanes:
    assert isinstance(lanes, WorkersLike)


def test_calls_are_made_in_their_environments_lane_in_the_order_they_came():
  lanes, log = recorded(2)
  with lanes:
    keys = [(uid, 0) for uid in range(4)]
    tickets = [lanes.submit(Call(key, 'reset', 10 + key[0])) for key in keys]
    tickets += [lanes.submit(Call(key, 'step', f's{i}')) for i in range(5) for key in keys]
    found = results(lanes, *tickets)
  assert [observation for observation, _ in found[:4]] == [f'{uid}: reset {10 + uid}' for uid in range(4)]
  assert [o.observation for o in found[4:]] == [f'{uid}: s{i} {10 + uid}.{i + 1}' for i in range(5) for uid in range(4)]
  assert [o.reward for o in found[4:]] == [float(i + 1) for i in range(5) for _ in range(4)]
  threads = {uid: {thread for salt, what, thread in log if salt == uid and what != 'close'} for uid in range(4)}
  assert all(len(of) == 1 for of in threads.values())
  assert len(set.union(*threads.values())) == 2
  assert threads[0] == threads[2] != threads[1] == threads[3]  # a new one goes where the fewest live
  for thread in set.union(*threads.values()):
    made = [(what, salt) for salt, what, at in log if at == thread and what != 'close']
    submitted = [(what, key[0]) for what in ('reset', *(f's{i}' for i in range(5))) for key in keys]
    assert made == [each for each in submitted if each in made]


def test_lanes_go_on_side_by_side():
  """Eight calls that wait for one another, twice."""
  barrier = threading.Barrier(8)

  class Meeting(Scripted):
    def step(self, action):
      barrier.wait(PATIENCE)
      return super().step(action)

  with Lanes(Meeting, 8) as lanes:
    for uid in range(8):
      call(lanes, (uid, 0), 'reset', 0)
    for _ in range(2):
      found = results(lanes, *(lanes.submit(Call((uid, 0), 'step', 'met')) for uid in range(8)))
      assert not any(isinstance(outcome, Failure) for outcome in found), found


def test_a_lane_makes_one_call_at_a_time(gate):
  with Lanes(Scripted, 1) as lanes:
    results(lanes, lanes.submit(Call(A, 'reset', 0)), lanes.submit(Call(B, 'reset', 0)))
    hung, other = lanes.submit(Call(A, 'step', 'hang')), lanes.submit(Call(B, 'step', 'go'))
    assert lane_environment.ENTERED.wait(PATIENCE)
    lanes.wait(0.05)
    assert lanes.poll([hung, other]) == {}
    gate.set()
    assert [o.observation for o in results(lanes, hung, other)] == ['1: hang 0.1', '2: go 0.1']


# --- an environment's life -------------------------------------------------------------------------------------------


def test_an_environment_lives_from_reset_to_release_and_is_closed_in_its_lane():
  lanes, log = recorded(1)
  with lanes:
    call(lanes, A, 'reset', 5)
    call(lanes, A, 'step', 'x')
    lanes.release(A)
    lanes.release(A)  # twice is once
    lanes.release(C)  # never lived
    assert isinstance(call(lanes, A, 'step', 'gone'), Failure)
    assert call(lanes, A, 'reset', 6)[0] == '1: reset 6'
    assert call(lanes, A, 'step', 'y').observation == '1: y 6.1'  # another one, whose steps are counted anew
  assert [(salt, what) for salt, what, _ in log[:5]] == [(1, 'reset'), (1, 'x'), (1, 'close'), (1, 'reset'), (1, 'y')]
  assert len({thread for *_, thread in log}) == 1


def test_a_released_environment_is_forgotten():
  made = []

  def make(salt):
    env = Scripted(salt)
    made.append(weakref.ref(env))
    return env

  with Lanes(make, 1) as lanes:
    call(lanes, A, 'reset', 0)
    gc.collect()
    assert made[0]() is not None
    lanes.release(A)
    call(lanes, B, 'reset', 0)  # so that it is released by now
    gc.collect()
    assert made[0]() is None


def test_a_close_that_raises_costs_nothing():
  lanes, log = recorded(1)
  with lanes:
    call(lanes, (13, 0), 'reset', 0)
    lanes.release((13, 0))
    assert call(lanes, A, 'reset', 0)[0] == '1: reset 0'
  assert (13, 'close') in [entry[:2] for entry in log]


def test_leaving_closes_what_still_lives():
  closed = threading.Barrier(3)

  class Closing(Scripted):
    def close(self):
      closed.wait(PATIENCE)

  with Lanes(Closing, 2) as lanes:
    results(lanes, lanes.submit(Call(A, 'reset', 0)), lanes.submit(Call(B, 'reset', 0)))
  closed.wait(PATIENCE)


def test_a_new_environment_does_not_wait_behind_a_call_that_nobody_waits_for(gate):
  with Lanes(Scripted, 2) as lanes:
    call(lanes, A, 'reset', 0)
    for key in (A, B, C):  # the third finds both lanes hung, and takes the place of one
      call(lanes, key, 'reset', 0)
      lane_environment.ENTERED.clear()
      hung = lanes.submit(Call(key, 'step', 'hang'))
      assert lane_environment.ENTERED.wait(PATIENCE)
      lanes.cancel(hung)
      lanes.release(key)
    assert call(lanes, (4, 0), 'reset', 7)[0] == '4: reset 7'
    assert call(lanes, (4, 0), 'step', 'x').observation == '4: x 7.1'


def test_what_waits_for_a_released_environment_is_not_called_any_more(gate):
  lanes, log = recorded(1)
  with lanes:
    results(lanes, lanes.submit(Call(A, 'reset', 0)), lanes.submit(Call(B, 'reset', 0)))
    hung = lanes.submit(Call(A, 'step', 'hang'))
    waits = lanes.submit(Call(B, 'step', 'never'))
    lanes.release(B)
    gate.set()
    assert results(lanes, hung)[0].reward == 1.0
    call(lanes, A, 'step', 'after')
    assert lanes.poll([waits]) == {}
  assert [(salt, what) for salt, what, _ in log[2:5]] == [(1, 'hang'), (2, 'close'), (1, 'after')]


def test_environments_of_two_lanes_of_one_number_are_not_mistaken_for_each_other():
  """Training and an evaluation have lanes of their own, whose sequences may be called the same."""
  with Lanes(Scripted, 1) as one, Lanes(Scripted, 1) as other:
    call(one, A, 'reset', 5)
    call(other, A, 'reset', 6)
    assert call(one, A, 'step', 'x').observation == '1: x 5.1'
    other.release(A)
    call(other, B, 'reset', 0)  # so that it is released by now
    assert call(one, A, 'step', 'x').observation == '1: x 5.2'


# --- results ---------------------------------------------------------------------------------------------------------


def test_results_are_given_out_once_and_to_those_who_want_them():
  with Lanes(Scripted, 2) as lanes:
    first, second = lanes.submit(Call(A, 'reset', 0)), lanes.submit(Call(B, 'reset', 0))
    assert results(lanes, second) == [('2: reset 0', {})]
    assert lanes.poll([second, 999]) == {}
    assert results(lanes, first) == [('1: reset 0', {})]
    assert lanes.poll([first, second]) == {}


def test_a_cancelled_call_that_waits_is_never_made(gate):
  lanes, log = recorded(1)
  with lanes:
    call(lanes, A, 'reset', 0)
    hung, waits, last = (lanes.submit(Call(A, 'step', what)) for what in ('hang', 'never', 'last'))
    lanes.cancel(waits)
    gate.set()
    assert [o.observation for o in results(lanes, hung, last)] == ['1: hang 0.1', '1: last 0.2']
    assert lanes.poll([waits]) == {}
  assert 'never' not in [what for _, what, _ in log]


@pytest.mark.parametrize('when', ['before it returned', 'before it was asked for', 'after it was found'])
def test_a_cancelled_calls_result_is_dropped_and_keeps_nobody_from_waiting(gate, when):
  with Lanes(Scripted, 2) as lanes:
    results(lanes, lanes.submit(Call(A, 'reset', 0)), lanes.submit(Call(B, 'reset', 0)))
    ticket = lanes.submit(Call(A, 'step', 'hang'))
    assert lane_environment.ENTERED.wait(PATIENCE)
    if when == 'before it returned':
      lanes.cancel(ticket)
    gate.set()
    if when == 'before it was asked for':
      lanes.wait(PATIENCE)
      lanes.cancel(ticket)
    call(lanes, A, 'step', 'next')  # of the same lane, so that the other's result was found by now
    if when == 'after it was found':
      lanes.cancel(ticket)
    assert lanes.poll([ticket]) == {}
    gate.clear()
    lanes.submit(Call(B, 'step', 'hang'))
    start = time.monotonic()
    lanes.wait(0.1)
    assert time.monotonic() - start >= 0.1 - 1e-3


def test_waiting_ends_with_a_result_or_a_limit_or_the_seconds(gate):
  now = Hand()

  def waited(seconds):
    start = time.monotonic()
    lanes.wait(seconds)
    return time.monotonic() - start

  with Lanes(Scripted, 2, limit=1000.0, now=now) as lanes:
    assert waited(None) < PATIENCE  # for nothing: not at all
    call(lanes, A, 'reset', 0)
    hung = lanes.submit(Call(A, 'step', 'hang'))
    assert waited(0.1) >= 0.1 - 1e-3
    assert lanes.poll([hung]) == {}
    reset = lanes.submit(Call(B, 'reset', 0))
    assert waited(PATIENCE) < PATIENCE  # the first that ends
    assert reset in lanes.poll([reset])
    lost = lanes.submit(Call(C, 'step', 'x'))
    assert waited(PATIENCE) < PATIENCE  # there is one already
    assert lost in lanes.poll([lost])
    now.time = 1000.0
    assert waited(None) < PATIENCE
    assert lanes.poll([hung])[hung].kind == 'hang'


# --- environments that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('action', 'reason'),
  [
    ('raise', 'EnvironmentFault: environment Scripted: step raised ValueError: no such door'),
    ('number', 'EnvironmentFault: environment Scripted: step: observation is a int, 7: expected text that UTF-8 can encode'),
    ('nan', 'EnvironmentFault: environment Scripted: step: reward is nan: expected a finite number'),
  ],
)
def test_a_fault_is_a_failure_that_names_it_and_its_lane_goes_on(action, reason):
  with Lanes(Scripted, 1) as lanes:
    results(lanes, lanes.submit(Call(A, 'reset', 0)), lanes.submit(Call(B, 'reset', 0)))
    assert call(lanes, A, 'step', action) == Failure('error', reason)
    assert call(lanes, B, 'step', 'x').observation == '2: x 0.1'
    assert call(lanes, A, 'step', 'y').observation == '1: y 0.2'


def test_an_environment_that_cannot_be_made_is_a_failure():
  def make(salt):
    raise FileNotFoundError('no map')

  with Lanes(make, 1) as lanes:
    assert call(lanes, A, 'reset', 0) == Failure('error', 'FileNotFoundError: no map')


def test_a_step_without_a_reset_is_a_failure():
  with Lanes(Scripted, 1) as lanes:
    assert call(lanes, A, 'step', 'x') == Failure('error', LOST)


def test_a_call_beyond_its_limit_hangs_and_its_lane_is_replaced(gate):
  now, started = Hand(), []
  lanes, log = recorded(2, start=lambda: started.append(Daemon()) or started[-1], limit=5.0, now=now)
  with lanes:
    results(lanes, *(lanes.submit(Call(key, 'reset', 0)) for key in (A, B, C)))  # A and C live in the first lane
    hung, waits = lanes.submit(Call(A, 'step', 'hang')), lanes.submit(Call(C, 'step', 'never'))
    assert lane_environment.ENTERED.wait(PATIENCE)
    now.time = 4.9
    assert lanes.poll([hung, waits]) == {}
    now.time = 5.0
    assert lanes.poll([hung, waits]) == {
      hung: Failure('hang', 'step took longer than config.environment.time_limit = 5 s'),
      waits: Failure('error', LOST),
    }
    assert len(started) == 3
    assert call(lanes, C, 'step', 'x') == Failure('error', LOST)
    assert call(lanes, B, 'step', 'x').observation == '2: x 0.1'  # of the other lane
    for key in (A, C):
      lanes.release(key)  # as their episodes do, though they are gone
    again = (C[0], 1)
    assert call(lanes, again, 'reset', 9)[0] == '3: reset 9'
    assert call(lanes, again, 'step', 'x').observation == '3: x 9.1'
    threads = {(salt, what): thread for salt, what, thread in log}
    assert threads[3, 'x'] not in {threads[1, 'hang'], threads[2, 'x']}
    closed = threading.Event()
    gate.set()  # the hung call returns after all: nobody hears of it, and what lived there is closed
    started[0].submit(closed.set)
    assert not closed.wait(0.05)  # that lane takes nothing more
    assert lanes.poll([hung, waits]) == {}
  deadline = time.monotonic() + PATIENCE
  while {entry[:2] for entry in log if entry[1] == 'close'} < {(1, 'close'), (2, 'close'), (3, 'close')}:
    assert time.monotonic() < deadline, log
    time.sleep(0.01)
  assert ('never',) not in {(what,) for _, what, _ in log}


def test_the_limit_counts_from_when_a_call_begins_not_from_when_it_is_queued():
  now, gates = Hand(), {1: threading.Event(), 2: threading.Event()}

  class Held(Scripted):
    def step(self, action):
      gates[self.salt].wait(PATIENCE)
      return super().step(action)

  with Lanes(Held, 1, limit=5.0, now=now) as lanes:
    results(lanes, lanes.submit(Call(A, 'reset', 0)), lanes.submit(Call(B, 'reset', 0)))
    first, second = lanes.submit(Call(A, 'step', 'x')), lanes.submit(Call(B, 'step', 'x'))
    now.time = 4.0
    gates[1].set()
    assert results(lanes, first)[0].reward == 1.0
    now.time = 8.9
    assert lanes.poll([second]) == {}
    now.time = 9.0
    assert lanes.poll([second])[second].kind == 'hang'
    gates[2].set()


# --- executors -------------------------------------------------------------------------------------------------------


def test_any_executor_of_one_worker_is_a_lane():
  with Lanes(Scripted, 2, start=lambda: ThreadPoolExecutor(1)) as lanes:
    for key in (A, B):
      call(lanes, key, 'reset', key[0])
    assert [call(lanes, key, 'step', 'x').observation for key in (A, B, A)] == ['1: x 1.1', '2: x 2.1', '1: x 1.2']
    lanes.release(A)
    assert isinstance(call(lanes, A, 'step', 'x'), Failure)


class Brittle(Executor):
  """Computes at once, until it is broken, as a pool is whose process was killed while it was idle."""

  broken = False

  def submit(self, fn, /, *args, **kwargs):
    if self.broken:
      raise BrokenProcessPool('a child process terminated abruptly')
    future: Future = Future()
    future.set_result(fn(*args, **kwargs))
    return future

  def shutdown(self, wait=True, *, cancel_futures=False):
    pass


def test_an_executor_that_broke_idle_is_replaced():
  made = []
  with Lanes(Scripted, 1, start=lambda: made.append(Brittle()) or made[-1]) as lanes:
    for key in (A, B):
      call(lanes, key, 'reset', 0)
    made[0].broken = True
    lanes.release(A)
    assert call(lanes, B, 'step', 'x') == Failure('error', 'BrokenProcessPool: a child process terminated abruptly')
    assert len(made) == 2
    assert call(lanes, B, 'step', 'x') == Failure('error', LOST)
    assert call(lanes, B, 'reset', 3)[0] == '2: reset 3'


def test_a_process_that_ends_or_hangs_is_a_failure_and_its_lane_recovers():
  now = Hand()
  with Lanes(Scripted, 1, start=EXECUTORS['processes'], limit=5.0, now=now) as lanes:
    assert results(lanes, lanes.submit(Call(A, 'reset', 4)), lanes.submit(Call(B, 'reset', 5)))[1][0] == '2: reset 5'
    first = int(call(lanes, A, 'step', 'pid').observation)
    assert first != os.getpid()
    died, waits = lanes.submit(Call(A, 'step', 'die')), lanes.submit(Call(B, 'step', 'x'))
    failure, lost = results(lanes, died, waits)
    assert (failure.kind, failure.reason.split(':')[0]) == ('error', 'BrokenProcessPool')
    assert lost == Failure('error', LOST)
    again = (A[0], 1)
    assert call(lanes, again, 'reset', 6)[0] == '1: reset 6'
    second = int(call(lanes, again, 'step', 'pid').observation)
    assert second != first
    hung = lanes.submit(Call(again, 'step', 'hang'))
    now.time = 5.0
    assert results(lanes, hung)[0].kind == 'hang'
    deadline = time.monotonic() + PATIENCE
    while alive(second):
      assert time.monotonic() < deadline, 'the process of a hung call goes on'
      time.sleep(0.01)


def alive(pid):
  """Whether a child runs; one that was killed is gone once its executor has taken note."""
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True
