"""Async rewards: many calls at a time, and calls that fail, hang or block."""

import asyncio
import os
import signal
import threading
import time

import pytest
from pools import PATIENCE, answers, until

from sprl.config import SettingsError, Task
from sprl.tasks import async_workers, graders
from sprl.tasks.grader_pool import Grade, Group, grader_pool
from sprl.tasks.rewards import Sample
from sprl.tasks.worker_pool import WorkerDied

WILD = """
import asyncio, os, signal, sys, time

running = most = 0

async def grade(completion):
  global running, most
  what, _, value = completion.partition(' ')
  match what:
    case 'sleep':
      running += 1
      most = max(most, running)
      await asyncio.sleep(float(value))
      running -= 1
    case 'most': return most
    case 'pid': return os.getpid()
    case 'raise': raise ValueError(value)
    case 'exit': sys.exit(3)
    case 'interrupt': raise KeyboardInterrupt
    case 'fork': os.fork()  # the child returns too
    case 'die': os._exit(3)
    case 'block': time.sleep(float(value))
    case 'stop': os.kill(os.getpid(), signal.SIGSTOP)
    case 'nan': return float('nan')
  return 1.0

async def rank(completions):
  await asyncio.sleep(0)
  return [float(len(each)) for each in completions]
"""


def rewards(folder, name='grade'):
  (folder / 'wild.py').write_text(WILD)
  return graders.rewards(Task(grader=f'{folder}/wild.py:{name}'))


def samples(*texts):
  return [Sample('p', text, '') for text in texts]


def test_64_samples_with_a_second_of_latency_take_about_a_second(tmp_path):
  with grader_pool(rewards(tmp_path), None, None, 4.0) as pool:
    start = time.monotonic()
    assert {g.score for g in answers(pool, *samples(*['sleep 1'] * 64))} == {1.0}
    assert time.monotonic() - start < 5  # one after the other they would take 64 seconds
    assert answers(pool, *samples('most')) == [Grade(64.0, 'ok')]


def test_task_workers_limits_the_calls_at_a_time(tmp_path):
  with grader_pool(rewards(tmp_path), 3, None, 4.0) as pool:
    answers(pool, *samples(*['sleep 0.02'] * 12))
    assert answers(pool, *samples('most')) == [Grade(3.0, 'ok')]


def test_a_call_that_fails_costs_only_itself(tmp_path):
  with grader_pool(rewards(tmp_path), None, 1.0, 4.0) as pool:
    found = answers(pool, *samples('sleep 0.1', 'raise no', 'exit', 'interrupt', 'nan', 'sleep 60', 'sleep 0.2'))
    assert [(g.score, g.status) for g in found] == [
      (1.0, 'ok'), (0.0, 'error'), (0.0, 'error'), (0.0, 'error'), (0.0, 'invalid'), (0.0, 'timeout'), (1.0, 'ok')
    ]  # fmt: skip
    assert 'ValueError: no' in found[1].reason
    assert answers(pool, *samples('fine')) == [Grade(1.0, 'ok')]


def test_the_child_of_a_call_that_forks_answers_nothing(tmp_path):
  with grader_pool(rewards(tmp_path), 4, 30.0, 4.0) as pool:
    assert answers(pool, *samples('fork', 'sleep 0.05', 'nan', 'fine')) == [
      Grade(1.0, 'ok'), Grade(1.0, 'ok'), Grade(0.0, 'invalid', 'returned nan, expected a finite number', reward_known=False),
      Grade(1.0, 'ok')
    ]  # fmt: skip
    (first,), (second,) = answers(pool, *samples('pid')), answers(pool, *samples('pid'))
    assert first == second


def test_a_process_that_ends_is_replaced(tmp_path):
  with grader_pool(rewards(tmp_path), 4, 30.0, 4.0) as pool:
    (first,) = answers(pool, *samples('pid'))
    died = answers(pool, *samples('sleep 60', 'die'))
    assert [(g.status, g.reason) for g in died] == [('crash', 'exit status 3')] * 2
    (second,) = answers(pool, *samples('pid'))
    assert first.score != second.score


def test_a_process_that_ends_leaves_no_thread(tmp_path):
  with grader_pool(rewards(tmp_path), 2, 30.0, 4.0) as pool:
    counts = []
    for _ in range(4):
      assert [g.status for g in answers(pool, *samples('die'))] == ['crash']
      assert [g.status for g in answers(pool, *samples('fine'))] == ['ok']
      counts.append(sum(thread.name == 'worker' for thread in threading.enumerate()))
    until(lambda: sum(thread.name == 'worker' for thread in threading.enumerate()) <= counts[0])


def test_a_call_that_blocks_the_loop_is_killed(tmp_path, monkeypatch):
  monkeypatch.setattr(async_workers, 'GRACE', 0.1)
  with grader_pool(rewards(tmp_path), 2, 0.5, 4.0) as pool:
    (first,) = answers(pool, *samples('pid'))
    assert [g.status for g in answers(pool, *samples('block 600'))] == ['timeout']
    until(lambda: answers(pool, *samples('pid'))[0].score not in (0.0, first.score))
    assert answers(pool, *samples('fine', 'fine')) == [Grade(1.0, 'ok')] * 2


def test_a_process_that_no_longer_reads_is_killed(tmp_path, monkeypatch):
  monkeypatch.setattr(async_workers, 'GRACE', 0.1)
  large = 'x' * (1 << 20)  # more than the connection holds
  with grader_pool(rewards(tmp_path), 4, 0.5, 4.0) as pool:
    (process,) = answers(pool, *samples('pid'))
    rescue = threading.Timer(PATIENCE, os.kill, (int(process.score), signal.SIGKILL))  # so that the test fails if it would hang
    rescue.start()
    found = answers(pool, *samples('stop', large, large, large))
    rescue.cancel()
    assert found[0].status == 'timeout'
    assert {g.status for g in found} <= {'timeout', 'crash'}
    until(lambda: answers(pool, *samples(large))[0].status == 'ok')


def test_a_sample_that_cannot_be_sent_costs_only_itself(tmp_path):
  with grader_pool(rewards(tmp_path), 2, 30.0, 4.0) as pool:
    found = answers(pool, Sample('p', 'fine', '', {'key': lambda: None}), *samples('sleep 0.1'))
    assert [g.status for g in found] == ['crash', 'ok']


def test_a_cancelled_call_leaves_the_others(tmp_path):
  with grader_pool(rewards(tmp_path), 2, 30.0, 4.0) as pool:
    pool.cancel(pool.submit(samples('sleep 60')[0]))
    assert answers(pool, *samples('fine', 'fine')) == [Grade(1.0, 'ok')] * 2


def test_a_call_that_is_cancelled_before_it_begins_leaves_the_others(tmp_path, monkeypatch):
  """While another call blocks the loop, a call and its cancellation arrive together."""
  monkeypatch.setattr(async_workers, 'GRACE', 1.5)
  with grader_pool(rewards(tmp_path), 4, 30.0, 4.0) as pool:
    before = answers(pool, *samples('pid'))
    pool.submit(samples('block 0.5')[0])
    pool.cancel(pool.submit(samples('sleep 60')[0]))
    time.sleep(2.0)
    assert answers(pool, *samples('pid')) == before


def test_an_async_groupwise_reward(tmp_path):
  with grader_pool(rewards(tmp_path, 'rank'), None, 30.0, 4.0) as pool:
    assert answers(pool, Group(tuple(samples('a', 'bb')))) == [[Grade(1.0, 'ok'), Grade(2.0, 'ok')]]


def test_a_python_callable_that_blocks_its_loop_leaves_a_new_loop_to_later_calls(monkeypatch):
  monkeypatch.setattr(async_workers, 'GRACE', 0.1)
  gate, loops = threading.Event(), set()

  async def judge(completion):
    loops.add(threading.get_ident())
    if completion == 'block':
      gate.wait(PATIENCE)
    return 1.0

  with grader_pool(graders.rewards(Task(grader='python:judge'), {'judge': judge}), 3, 0.5, 4.0) as pool:
    found = answers(pool, *samples('block', *['fine'] * 5))  # three at a time; those that reach the blocked loop are lost
    assert found[0].status == 'timeout'
    assert {g.status for g in found} <= {'timeout', 'crash', 'ok'}
    until(lambda: answers(pool, *samples('fine')) == [Grade(1.0, 'ok')])
    assert answers(pool, *samples(*['fine'] * 8)) == [Grade(1.0, 'ok')] * 8
    assert len(loops) == 2
    gate.set()


def test_calls_on_a_blocked_loop_end_when_it_is_given_up(monkeypatch):
  monkeypatch.setattr(async_workers, 'GRACE', 0.1)
  entered, gate = threading.Event(), threading.Event()

  async def judge(completion):
    if completion == 'block':
      entered.set()
      gate.wait(PATIENCE)
    return 1.0

  loop = async_workers.AsyncThread(lambda: judge)
  _, cancel = loop.ask('block')
  assert entered.wait(PATIENCE)
  other, _ = loop.ask('fine')
  cancel()
  with pytest.raises(WorkerDied, match='blocks its event loop'):
    other.result(PATIENCE)
  assert loop.died()
  gate.set()
  until(loop._loop.is_closed)


def test_an_async_python_callable_runs_on_a_loop_in_this_process():
  places = []

  async def grade(completion):
    places.append(threading.current_thread())
    await asyncio.sleep(60 if completion == 'slow' else 0.5)
    return 1.0

  found = graders.rewards(Task(grader='python:grade'), {'grade': grade})
  with grader_pool(found, None, 2.0, 4.0) as pool:
    start = time.monotonic()
    assert [g.status for g in answers(pool, *samples('slow', *['x'] * 32))] == ['timeout'] + ['ok'] * 32
    assert time.monotonic() - start < 10
  assert len(set(places)) == 1
  assert places[0] is not threading.current_thread()


def test_the_loop_in_this_process_is_closed_at_the_end_also_with_a_call_under_way(monkeypatch):
  loops, make, began = [], asyncio.new_event_loop, threading.Event()
  monkeypatch.setattr(asyncio, 'new_event_loop', lambda: loops.append(make()) or loops[-1])

  async def grade(completion):
    began.set()
    await asyncio.sleep(10 * PATIENCE)

  with grader_pool(graders.rewards(Task(grader='python:grade'), {'grade': grade}), None, None, 4.0) as pool:
    pool.submit(samples('x')[0])
    assert began.wait(PATIENCE)
  until(lambda: loops[0].is_closed())
  assert len(loops) == 1


@pytest.mark.parametrize(
  ('text', 'why'), [('raise RuntimeError("x")', 'RuntimeError: x'), ('import os\nos._exit(4)', 'exit status 4')]
)
def test_an_async_reward_that_cannot_be_loaded_is_named(tmp_path, text, why):
  (tmp_path / 'mine.py').write_text(f'async def grade(completion): return 1.0\n{text}')
  with pytest.raises(SettingsError, match=f'a worker cannot start: {why}'):
    grader_pool(graders.rewards(Task(grader=f'{tmp_path}/mine.py:grade')), 2, 1.0, 4.0).__enter__()
