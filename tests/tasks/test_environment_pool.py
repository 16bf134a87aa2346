"""Environments in workers: creation, faults, closing, and results through threads and processes."""

import gc
import os
import threading
import weakref
from functools import partial

import pytest
import scripted
from pools import PATIENCE, ManualClock, alive, answers, results, until
from scripted import Lasting, Scripted

from sprl.tasks.environment_pool import Call, _result, environment_pool
from sprl.tasks.environments.protocol import Outcome
from sprl.tasks.worker_pool import Failure

A, B, C = (1, 0), (2, 0), (3, 0)
LOST = Failure('error', 'EnvironmentLost: another environment in its worker hung or ended the process')


@pytest.fixture
def gate():
  """The gate of hanging calls. It opens when the test sets it, or at the end of the test."""
  scripted.ENTERED.clear()
  scripted.GATE.clear()
  yield scripted.GATE
  scripted.GATE.set()


class Recording(Scripted):
  """An environment that records its calls as (seed, call, thread)."""

  def __init__(self, log):
    super().__init__()
    self.log = log

  def reset(self, seed):
    self.log.append((seed, 'reset', threading.get_ident()))
    return super().reset(seed)

  def step(self, action):
    self.log.append((self.seed, action, threading.get_ident()))
    return super().step(action)

  def close(self):
    self.log.append((self.seed, 'close', threading.get_ident()))
    if self.seed == 13:
      raise OSError('a close that fails')


def recording_pool(workers, time_limit=3600.0, **settings):
  log: list[tuple[int, str, int]] = []
  return environment_pool(lambda: Recording(log), workers, time_limit, **settings), log


def call(pool, *of_call):
  return answers(pool, Call(*of_call))[0]


def test_threads_and_processes_return_results_of_the_protocol():
  for executor in ('threads', 'processes'):
    with environment_pool(Scripted, 1, 3600.0, executor) as pool:
      first, step = answers(pool, Call(A, 'reset', 5), Call(A, 'step', 'x'))
    assert first == ('reset 5', {'metrics': {'valid': 1.0}})  # without fields that the protocol does not have
    assert step == Outcome('x 5.1', 1.0, False, False, {})


def test_an_environment_lives_from_reset_to_close_in_one_worker():
  pool, log = recording_pool(2)
  with pool:
    call(pool, A, 'reset', 5)
    call(pool, B, 'reset', 6)
    assert call(pool, A, 'step', 'x').observation == 'x 5.1'
    pool.release(Call(A, 'close'))
    assert call(pool, A, 'step', 'gone') == LOST
    assert call(pool, A, 'reset', 7)[0] == 'reset 7'
    assert call(pool, A, 'step', 'y').observation == 'y 7.1'  # a new environment
  assert [entry[:2] for entry in log if entry[0] == 5] == [(5, 'reset'), (5, 'x'), (5, 'close')]
  threads = {seed: {thread for of, _, thread in log if of == seed} for seed in (5, 6, 7)}
  assert threads[5] == threads[7] != threads[6]
  assert len(threads[5]) == 1


def test_a_closed_environment_is_forgotten():
  made = []

  def make():
    env = Scripted()
    made.append(weakref.ref(env))
    return env

  with environment_pool(make, 1, 3600.0) as pool:
    call(pool, A, 'reset', 0)
    gc.collect()
    assert made[0]() is not None
    pool.release(Call(A, 'close'))
    call(pool, B, 'reset', 0)  # by then the first is closed
    gc.collect()
    assert made[0]() is None


def test_leaving_the_pool_closes_every_environment():
  pool, log = recording_pool(2)
  with pool:
    for uid, seed in enumerate((13, 14, 15)):  # 13 raises in `close`; the others close
      call(pool, (uid, 0), 'reset', seed)
  assert {seed for seed, what, _ in log if what == 'close'} == {13, 14, 15}


@pytest.mark.parametrize('executor', ['threads', 'processes'])
def test_leaving_the_pool_waits_until_the_environments_are_closed(executor, tmp_path):
  """That of an episode that is over, and those of episodes under way."""
  with environment_pool(partial(Lasting, tmp_path), 2, 3600.0, executor) as pool:
    for key in (A, B, C):
      call(pool, key, 'reset', key[0])
    pool.release(Call(A, 'close'))
    assert len(list(tmp_path.iterdir())) >= 2
  assert not list(tmp_path.iterdir())


def test_pools_with_the_same_keys_do_not_share_environments():
  """Training and evaluation have separate pools, whose keys may be equal."""
  with environment_pool(Scripted, 1, 3600.0) as one, environment_pool(Scripted, 1, 3600.0) as other:
    call(one, A, 'reset', 5)
    call(other, A, 'reset', 6)
    assert call(one, A, 'step', 'x').observation == 'x 5.1'
    other.release(Call(A, 'close'))
    call(other, B, 'reset', 0)
    assert call(one, A, 'step', 'x').observation == 'x 5.2'


@pytest.mark.parametrize(
  ('action', 'reason'),
  [
    ('raise', 'step raised ValueError: no such door'),
    ('number', 'step: observation is a int, 7: expected text'),
    ('nan', 'step: reward is nan: expected a finite number'),
  ],
)
def test_a_fault_names_the_environment_and_costs_one_call(action, reason):
  with environment_pool(Scripted, 1, 3600.0) as pool:
    answers(pool, Call(A, 'reset', 0), Call(B, 'reset', 0))
    failure = call(pool, A, 'step', action)
    assert failure.kind == 'error'
    assert f'EnvironmentFault: environment Scripted: {reason}' in failure.reason
    assert call(pool, B, 'step', 'x').observation == 'x 0.1'
    assert call(pool, A, 'step', 'y').observation == 'y 0.2'


@pytest.mark.parametrize('executor', ['threads', 'processes'])
def test_an_error_that_is_no_exception_costs_one_call(executor):
  with environment_pool(Scripted, 1, 3600.0, executor) as pool:
    answers(pool, Call(A, 'reset', 0), Call(B, 'reset', 0))
    for action, reason in (('cancel', 'step raised CancelledError'), ('interrupt', 'KeyboardInterrupt')):
      failure = call(pool, A, 'step', action)
      assert failure.kind == 'error'
      assert reason in failure.reason
    assert call(pool, B, 'step', 'x').observation == 'x 0.1'


@pytest.mark.parametrize('answer', [None, 'text', ['text'], ['text', []], ['text', '1', True, True, {}], ['text', 1.0, 1, 0, {}]])
def test_a_forged_answer_is_a_failure(answer):
  assert _result(answer) == Failure('crash', 'malformed answer')


def test_an_environment_that_cannot_be_made_is_a_failure():
  def make():
    raise FileNotFoundError('no map')

  with environment_pool(make, 1, 3600.0) as pool:
    place = f'({__file__}:{make.__code__.co_firstlineno + 1}, in make)'
    assert call(pool, A, 'reset', 0) == Failure('error', f'FileNotFoundError: no map {place}')


def test_a_hang_costs_the_environments_of_its_worker(gate):
  now = ManualClock()
  pool, log = recording_pool(2, time_limit=5.0, now=now)
  with pool:
    answers(pool, *(Call(key, 'reset', seed) for key, seed in ((A, 1), (B, 2), (C, 3))))  # A and C share a worker
    hung, waits = pool.submit(Call(A, 'step', 'hang')), pool.submit(Call(C, 'step', 'never'))
    assert scripted.ENTERED.wait(PATIENCE)
    now.time = 5.0
    limit = 'no answer in 5 s (config.task.time_limit)'
    assert results(pool, hung, waits) == [Failure('timeout', limit), LOST]
    assert call(pool, C, 'step', 'x') == LOST
    assert call(pool, B, 'step', 'x').observation == 'x 2.1'
    for key in (A, C):
      pool.release(Call(key, 'close'))  # their episodes release them, although the environments are gone
    assert call(pool, (4, 0), 'reset', 9)[0] == 'reset 9'
    assert call(pool, (4, 0), 'step', 'x').observation == 'x 9.1'
    gate.set()  # the call returns: its result is dropped, and its worker closes its environments
    until(lambda: {(1, 'close'), (3, 'close')} <= {entry[:2] for entry in log}, log)
    assert pool.poll([hung, waits]) == {}
  assert 'never' not in {what for _, what, _ in log}


def test_an_attempt_after_a_failure_begins_after_a_pause():
  now = ManualClock()
  pool, log = recording_pool(4, now=now)
  with pool:
    tickets = [pool.submit(Call((1, attempt), 'reset', attempt)) for attempt in range(4)]
    assert results(pool, tickets[0])[0][0] == 'reset 0'
    now.time = 0.99
    assert pool.poll(tickets) == {}
    now.time = 1.0
    assert results(pool, tickets[1])[0][0] == 'reset 1'
    now.time = 9.99
    assert pool.poll(tickets) == {}
    pool.cancel(tickets[2])
    now.time = 10.0
    assert results(pool, tickets[3])[0][0] == 'reset 3'
    assert call(pool, (1, 3), 'step', 'x').observation == 'x 3.1'  # at once
  assert 2 not in {seed for seed, _, _ in log}


def test_a_process_that_ends_or_hangs_costs_its_environments():
  now = ManualClock()
  with environment_pool(Scripted, 1, 5.0, 'processes', now) as pool:
    answers(pool, Call(A, 'reset', 4), Call(B, 'reset', 5))
    first = int(call(pool, A, 'step', 'pid').observation)
    assert first != os.getpid()
    died, lost = answers(pool, Call(A, 'step', 'die'), Call(B, 'step', 'x'))
    assert died == Failure('crash', 'exit status 3')
    assert lost == LOST
    call(pool, A, 'reset', 6)
    second = int(call(pool, A, 'step', 'pid').observation)
    hung = pool.submit(Call(A, 'step', 'hang'))
    now.time = 5.0
    assert results(pool, hung)[0].kind == 'timeout'
    until(lambda: not alive(second), 'the process of a call that hangs lives on')
