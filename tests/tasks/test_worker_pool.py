"""The worker pool: tickets, limits, replacement and affinity, with threads that wait for events and a manual clock."""

import threading
import time
from concurrent.futures import Future
from functools import partial

import pytest
from pools import PATIENCE, InlineWorker, ManualClock, answers, results, until

from sprl.config import SettingsError
from sprl.rollout.interfaces import WorkersLike
from sprl.tasks.worker_pool import LAST_SECONDS, LOSSES, START_SECONDS, Failure, WorkerDied, WorkerPool
from sprl.tasks.workers import ThreadWorker


def pool_of(start, size, **settings):
  defaults = {'limit': 100.0, 'limit_setting': 'config.limit', 'blame': "config.service = 'it'"}
  return WorkerPool(start, size, **defaults | settings)


def threads(service, size, **settings):
  """Return a pool of threads that call `service`."""
  return pool_of(partial(ThreadWorker, lambda: service), size, **settings)


class Gated:
  """A service that records its calls. The calls in `held` wait until the gate opens."""

  def __init__(self, *held):
    self.held, self.calls = held, []
    self.entered, self.gate = threading.Event(), threading.Event()

  def __call__(self, call):
    self.calls.append((call, threading.get_ident()))
    if call in self.held:
      self.entered.set()
      assert self.gate.wait(PATIENCE)
    return call


@pytest.fixture
def gated():
  services = []

  def make(*held):
    services.append(Gated(*held))
    return services[-1]

  yield make
  for service in services:
    service.gate.set()


# --- tickets -----------------------------------------------------------------------------------------------------------


def test_a_pool_has_the_interface_of_workers():
  assert isinstance(threads(str, 1), WorkersLike)


def test_answers_have_the_tickets_of_their_calls():
  with threads(lambda call: call**2, 3) as pool:
    assert answers(pool, *range(50)) == [i**2 for i in range(50)]


def test_workers_answer_in_parallel():
  barrier = threading.Barrier(8)  # eight calls that wait for one another, twice
  with threads(lambda call: barrier.wait(PATIENCE) >= 0, 8) as pool:
    assert answers(pool, *range(16)) == [True] * 16


def test_one_worker_answers_one_call_at_a_time_in_order(gated):
  service = gated('a')
  with threads(service, 1) as pool:
    first, second = pool.submit('a'), pool.submit('b')
    assert service.entered.wait(PATIENCE)
    pool.wait(0.02)
    assert pool.poll([first, second]) == {}
    assert len(service.calls) == 1
    service.gate.set()
    assert results(pool, first, second) == ['a', 'b']


def test_a_result_is_returned_once_and_to_its_owner():
  """Training and evaluation share a pool of graders. Each collects the results of both while it waits."""
  with threads(str, 2) as pool:
    training, evaluation = ([pool.submit(i) for i in range(k, k + 10)] for k in (0, 100))
    assert results(pool, *evaluation) == [str(i) for i in range(100, 110)]
    assert pool.poll([*evaluation, 999]) == {}
    assert results(pool, *training) == [str(i) for i in range(10)]
    assert pool.poll([*training, *evaluation]) == {}


def test_a_result_that_another_caller_left_does_not_end_a_wait(gated):
  service = gated('held')
  with threads(service, 2) as pool:
    other = pool.submit('other')
    mine = pool.submit('held')
    while len(pool._results) < 1:
      pool.wait(0.05)
    assert pool.poll([mine]) == {}
    start = time.monotonic()
    pool.wait(0.05)
    assert time.monotonic() - start >= 0.05 - 1e-3
    assert pool.poll([other]) == {other: 'other'}


def test_an_exception_of_the_service_costs_one_call():
  def service(call):
    if call == 'exit':
      raise SystemExit(call)
    return 1 // call

  with threads(service, 1) as pool:
    first, second, last = answers(pool, 0, 'exit', 1)
    line = service.__code__.co_firstlineno
    assert first == Failure('error', f'ZeroDivisionError: integer division or modulo by zero ({__file__}:{line + 3}, in service)')
    assert second == Failure('error', f'SystemExit: exit ({__file__}:{line + 2}, in service)')
    assert last == 1


def test_the_read_function_of_the_pool_converts_results():
  with threads(lambda call: 1 // call, 1, read=lambda answer: ('read', answer)) as pool:
    (kind, failure), one = answers(pool, 0, 1)
  assert (kind, failure.kind, one) == ('read', 'error', ('read', 1))


# --- cancelled calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('key', [None, lambda call: 'same'], ids=['no affinity', 'affinity'])
def test_a_cancelled_call_that_waits_is_never_made(gated, key):
  service = gated('a')
  with threads(service, 1, key=key) as pool:
    first, waits, last = (pool.submit(call) for call in 'abc')
    pool.cancel(waits)
    service.gate.set()
    assert results(pool, first, last) == ['a', 'c']
    assert pool.poll([waits]) == {}
  assert 'b' not in [call for call, _ in service.calls]


@pytest.mark.parametrize('when', ['while it ran', 'before it was collected', 'after it was collected'])
def test_the_result_of_a_cancelled_call_is_dropped(gated, when):
  service = gated('a')
  with threads(service, 1) as pool:
    ticket = pool.submit('a')
    assert service.entered.wait(PATIENCE)
    if when == 'while it ran':
      pool.cancel(ticket)
      pool.cancel(ticket)
    service.gate.set()
    if when == 'before it was collected':
      while len(pool._slots) and not pool._slots[0].future.done():
        time.sleep(0.001)
      pool.cancel(ticket)
    assert answers(pool, 'next') == ['next']  # the same worker answers, so the pool has collected the other result
    if when == 'after it was collected':
      pool.cancel(ticket)
    assert pool.poll([ticket]) == {}


# --- time ----------------------------------------------------------------------------------------------------------------


def test_wait_returns_after_a_result_a_limit_or_the_seconds(gated):
  service, now = gated('held'), ManualClock()

  def waited(seconds):
    start = time.monotonic()
    pool.wait(seconds)
    return time.monotonic() - start

  with threads(service, 2, now=now) as pool:
    assert waited(None) < PATIENCE  # no call is running
    held = pool.submit('held')
    assert waited(0.05) >= 0.05 - 1e-3
    assert pool.poll([held]) == {}
    other = pool.submit('other')
    assert waited(PATIENCE) < PATIENCE
    assert waited(PATIENCE) < PATIENCE  # a result is ready
    assert pool.poll([other]) == {other: 'other'}
    now.time = 100.0
    assert waited(None) < PATIENCE
    assert pool.poll([held]) == {held: Failure('timeout', 'no answer in 100 s (config.limit)')}


def test_a_wait_ends_with_the_pause_of_a_call_and_others_go_first(gated):
  service = gated()
  with threads(service, 1, pause=lambda call: 0.2 * (call == 'later')) as pool:
    start = time.monotonic()
    assert answers(pool, 'later', 'now') == ['later', 'now']
    assert 0.2 <= time.monotonic() - start < PATIENCE
  assert [call for call, _ in service.calls] == ['now', 'later']


def test_the_limit_counts_from_the_beginning_of_a_call():
  now, gates = ManualClock(), {'a': threading.Event(), 'b': threading.Event()}
  with threads(lambda call: gates[call].wait(PATIENCE), 1, limit=5.0, now=now) as pool:
    first, second = pool.submit('a'), pool.submit('b')
    now.time = 4.0
    gates['a'].set()
    assert results(pool, first) == [True]
    now.time = 8.9
    assert pool.poll([second]) == {}
    now.time = 9.0
    assert pool.poll([second])[second].kind == 'timeout'
    gates['b'].set()


def test_a_call_beyond_its_limit_costs_its_worker(gated):
  services, now = iter([gated('held'), gated()]), ManualClock()
  with pool_of(partial(ThreadWorker, lambda: next(services)), 1, now=now) as pool:
    held, waits = pool.submit('held'), pool.submit('next')
    now.time = 99.0
    assert pool.poll([held, waits]) == {}
    now.time = 100.0
    assert results(pool, held, waits) == [Failure('timeout', 'no answer in 100 s (config.limit)'), 'next']


# --- workers that die or cannot start --------------------------------------------------------------------------------------


class Dying(InlineWorker):
  """A worker that dies in a call of 'die'."""

  def ask(self, call):
    if call != 'die':
      return super().ask(call)
    future: Future = Future()
    future.set_exception(WorkerDied('exit status 3'))
    return future


def test_a_worker_that_dies_in_a_call_is_replaced():
  made = []
  with pool_of(lambda: made.append(Dying(lambda: str)) or made[-1], 1) as pool:
    assert answers(pool, 'die', 1) == [Failure('crash', 'exit status 3'), '1']
  assert [worker.ended for worker in made] == [True, True]


def test_a_worker_that_dies_idle_costs_no_call():
  made = []
  with pool_of(lambda: made.append(InlineWorker(lambda: str)) or made[-1], 1) as pool:
    assert answers(pool, 1) == ['1']
    made[0].gone = 'exit status 3'
    assert answers(pool, 2) == ['2']
  assert len(made) == 2


def test_a_service_that_cannot_be_built_is_refused_by_its_setting():
  made = []
  pool = pool_of(lambda: made.append(InlineWorker(partial(int, 'no number'))) or made[-1], 2)
  with pytest.raises(SettingsError, match=r"config.service = 'it': a worker cannot start: ValueError: .*no number"), pool:
    pytest.fail('entered')
  assert all(worker.ended for worker in made)


def test_workers_that_fail_repeatedly_end_the_run_by_name():
  made = []

  def start():
    load = (lambda: str) if not made else partial(int, 'edited amid the run')
    made.append(Dying(load))
    return made[-1]

  with pool_of(start, 1) as pool:
    lost = pool.submit('die')
    pool.submit(1)
    with pytest.raises(SettingsError, match=r'config.service.*edited amid the run'):
      results(pool, lost, 99)
  assert len(made) == 1 + LOSSES


def test_the_start_of_a_replacement_does_not_count_in_a_calls_limit():
  now, started = ManualClock(), threading.Event()
  loads = iter([lambda: str, lambda: started.wait(PATIENCE) and str])

  class Dies(ThreadWorker):
    def ask(self, call):
      return Dying(lambda: str).ask(call) if call == 'die' else super().ask(call)

  with pool_of(lambda: Dies(next(loads)), 1, limit=5.0, now=now) as pool:
    died, waits = pool.submit('die'), pool.submit(1)
    assert results(pool, died) == [Failure('crash', 'exit status 3')]
    now.time = START_SECONDS - 1
    assert pool.poll([waits]) == {}
    started.set()
    assert results(pool, waits) == ['1']


# --- affinity --------------------------------------------------------------------------------------------------------------


def first(call):
  return call[0]


def test_calls_of_a_key_go_to_one_worker_in_order(gated):
  service = gated()
  with threads(service, 2, key=first) as pool:
    calls = [f'{key}{i}' for i in range(5) for key in 'abcd']
    assert answers(pool, *calls) == calls
  workers = {key: {thread for call, thread in service.calls if call[0] == key} for key in 'abcd'}
  assert all(len(of) == 1 for of in workers.values())
  assert workers['a'] == workers['c'] != workers['b'] == workers['d']  # a new key goes where the fewest are
  for thread in set.union(*workers.values()):
    made = [call for call, at in service.calls if at == thread]
    assert made == [call for call in calls if call in made]


def test_a_new_key_does_not_wait_behind_a_cancelled_call(gated):
  service = gated('a1', 'b1', 'c1')
  with threads(service, 2, key=first) as pool:
    for key in 'abc':  # the third finds both workers in cancelled calls, and one of them is replaced
      service.entered.clear()
      held = pool.submit(f'{key}1')
      until(lambda: pool.wait(0.01) or service.entered.is_set())
      pool.cancel(held)
      pool.release(f'{key}-')
    assert answers(pool, 'd1', 'd2') == ['d1', 'd2']


def test_a_new_key_does_not_wait_behind_a_last_call(gated):
  service = gated('a-')
  with threads(service, 2, key=first) as pool:
    assert answers(pool, 'a1') == ['a1']
    pool.release('a-')
    assert service.entered.wait(PATIENCE)
    assert answers(pool, 'b1', 'b2') == ['b1', 'b2']


@pytest.mark.parametrize(('before', 'limit'), [('a1', LAST_SECONDS), ('a1 b1', 100.0)], ids=['no other key', 'another key'])
def test_a_last_call_that_hangs_costs_a_worker_without_keys_after_a_minute(gated, before, limit):
  services, now = iter([gated('a-'), gated()]), ManualClock()
  with pool_of(partial(ThreadWorker, lambda: next(services)), 1, key=first, now=now) as pool:
    answers(pool, *before.split())
    pool.release('a-')
    waits = pool.submit('b2')
    now.time = limit - 1
    assert pool.poll([waits]) == {}
    now.time = limit
    assert results(pool, waits) == ['b2']
    assert not pool._last


def test_a_released_key_makes_one_last_call(gated):
  service = gated('a1')
  with threads(service, 1, key=first) as pool:
    held, waits = pool.submit('a1'), pool.submit('b1')
    pool.submit('b2')
    pool.release('b-')
    pool.release('b-')  # the pool has already forgotten it
    pool.release('c-')  # the pool never had it
    service.gate.set()
    assert results(pool, held) == ['a1']
    assert answers(pool, 'a2') == ['a2']
    assert pool.poll([waits]) == {}
    assert len(pool._results) == len(pool._last) == 0
  assert [call for call, _ in service.calls] == ['a1', 'b-', 'a2']


def test_a_replacement_takes_over_keys_and_waiting_calls(gated):
  services, now = iter([gated('a1'), gated(), gated()]), ManualClock()
  with pool_of(partial(ThreadWorker, lambda: next(services)), 1, key=first, now=now) as pool:
    held, waits = pool.submit('a1'), pool.submit('b1')
    pool.wait(0.0)
    now.time = 100.0
    failure, answer = results(pool, held, waits)
    assert (failure.kind, answer) == ('timeout', 'b1')
    assert answers(pool, 'a2') == ['a2']
