"""The pool against graders that misbehave in every way, and against its own sudden death."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from sprl.settings import SettingsError, Task
from sprl.tasks import graders
from sprl.tasks.grading_pool import GradingPool

# The completion says what the grader does.
WILD = """
import ctypes, os, re, signal, subprocess, sys, threading, time

hoard = []

def grade(prompt, completion, answer):
  what, _, value = completion.partition(' ')
  match what:
    case 'score':
      return eval(value)
    case 'pid':
      return float(os.getpid())
    case 'sleep':
      time.sleep(float(value))
    case 'backtrack':  # a hang that holds the interpreter's lock
      re.match(r'(a+)+$', 'a' * 64 + 'b')
    case 'ignore':  # no signal that Python handles ends this
      signal.signal(signal.SIGTERM, signal.SIG_IGN)
      time.sleep(60)
    case 'child':
      subprocess.Popen(['sleep', value])
      time.sleep(60)
    case 'exit':
      os._exit(int(value))
    case 'sys.exit':
      sys.exit(value)
    case 'segfault':
      ctypes.string_at(0)
    case 'allocate':
      bytearray(int(float(value)))
    case 'leak':
      while True:
        hoard.append(bytearray(10_000_000))
    case 'raise':
      raise ValueError(value)
    case 'unprintable':
      class Mute(Exception):
        def __str__(self): raise RuntimeError
      raise Mute
    case 'hangup':
      os.closerange(3, 4096)
    case 'later':  # dies when nobody asks
      threading.Timer(0.05, os._exit, [3]).start()
  return 1.0
"""

CALM = [('p', 'score 1.0', 'a', {}), ('p', 'score 0.25', 'a', {})]


def samples(*completions):
  return [('p', completion, 'a', {}) for completion in completions]


def spec(tmp_path, text=WILD):
  (tmp_path / 'mine.py').write_text(text)
  return graders.resolve(Task(grader=f'{tmp_path}/mine.py:grade'))


@pytest.fixture(scope='module')
def pool(tmp_path_factory):
  with GradingPool(spec(tmp_path_factory.mktemp('wild')), workers=2, timeout=2.0, memory_gb=0.25) as pool:
    yield pool


def test_grades_come_in_the_order_of_the_samples(pool):
  grades = pool.grade(samples(*(f'score {i}' for i in range(100))))
  assert [g.score for g in grades] == [float(i) for i in range(100)]
  assert {g.status for g in grades} == {'ok'}
  assert pool.grade([]) == []


@pytest.mark.parametrize(
  ('completion', 'status', 'reason'),
  [
    ('sleep 60', 'timeout', 'no answer in 2 s'),
    ('backtrack', 'timeout', 'no answer in 2 s'),
    ('ignore', 'timeout', 'no answer in 2 s'),
    ('exit 0', 'crash', 'exit status 0'),
    ('exit 5', 'crash', 'exit status 5'),
    ('segfault', 'crash', 'killed by SIGSEGV'),
    ('hangup', 'crash', ''),
    ('allocate 1e9', 'crash', 'out of memory'),
    ('leak', 'crash', 'out of memory'),
    ('raise no such thing', 'error', 'ValueError: no such thing'),
    ('sys.exit 0', 'error', 'SystemExit: 0'),
    ('unprintable', 'error', 'Mute'),
    ('score float("nan")', 'invalid', 'returned nan'),
    ('score float("-inf")', 'invalid', 'returned -inf'),
    ('score "1.0"', 'invalid', 'returned a str'),
    ('score None', 'invalid', 'returned a NoneType'),
    ('score 1j', 'invalid', 'returned a complex'),
    ('score [1.0]', 'invalid', 'returned a list'),
  ],
)
def test_a_wild_grader_costs_its_own_sample_only(pool, completion, status, reason):
  before = pool.counts[status]
  first, wild, last = pool.grade([CALM[0], *samples(completion), CALM[1]])
  assert (first.score, last.score) == (1.0, 0.25)
  assert (first.status, last.status) == ('ok', 'ok')
  assert (wild.score, wild.status) == (0.0, status)
  assert reason in wild.reason
  assert pool.counts[status] == before + 1
  assert [g.score for g in pool.grade(CALM)] == [1.0, 0.25]  # and the next batch is graded as ever


@pytest.mark.parametrize('score', ['True', 'False', '2', '__import__("numpy").float32(0.5)'])
def test_any_real_number_is_a_score(pool, score):
  (grade,) = pool.grade(samples(f'score {score}'))
  assert grade.status == 'ok'
  assert grade.score == float(eval(score))


def test_all_workers_lost_at_once_are_replaced(pool):
  grades = pool.grade(samples('exit 1', 'sleep 9', 'exit 1', 'segfault', 'score 0.5', 'exit 1', 'score 0.75'))
  assert [g.score for g in grades] == [0, 0, 0, 0, 0.5, 0, 0.75]


def test_a_worker_that_dies_between_two_batches_costs_no_sample(pool):
  pool.grade(samples('later', 'later'))
  time.sleep(0.5)
  assert [g.score for g in pool.grade(samples(*['score 1'] * 6))] == [1.0] * 6


def test_long_texts_pass_both_ways(pool):
  long = 'x' * 3_000_000
  (grade,) = pool.grade([(long, 'score 1', long, {'much': long})])
  assert grade.score == 1.0
  (grade,) = pool.grade(samples('raise ' + long))
  assert grade.status == 'error'
  assert len(grade.reason) == 500


def test_a_kill_takes_the_graders_children(pool):
  pool.grade(samples('child 4242'))
  assert not processes('sleep\x004242')


def test_workers_outlive_the_signals_that_are_the_runs_to_handle(pool):
  pids = {g.score for g in pool.grade(samples(*['pid'] * 20))}
  for pid in pids:
    os.kill(int(pid), signal.SIGINT)
    os.kill(int(pid), signal.SIGTERM)
  assert {g.score for g in pool.grade(samples(*['pid'] * 20))} <= pids


def test_a_batch_that_went_badly_is_one_warning(pool, caplog):
  with caplog.at_level(logging.WARNING):
    pool.grade(samples('raise a', 'raise a', 'score None', 'score 1'))
  (record,) = caplog.records
  assert '3 of 4 samples scored 0' in record.getMessage()
  assert 'most by error (ValueError: a)' in record.getMessage()
  caplog.clear()
  pool.grade(CALM)
  assert not caplog.records


def test_an_interrupted_batch_leaves_no_answer_for_the_next(pool):
  def interrupt(*_):
    raise KeyboardInterrupt

  before = signal.signal(signal.SIGALRM, interrupt)
  signal.setitimer(signal.ITIMER_REAL, 0.3)
  try:
    with pytest.raises(KeyboardInterrupt):
      pool.grade(samples('sleep 0.6', 'sleep 0.6'))
  finally:
    signal.signal(signal.SIGALRM, before)
  time.sleep(0.5)
  assert [g.score for g in pool.grade(CALM)] == [1.0, 0.25]


# --- several users ----------------------------------------------------------------------------------------------------


def collect(pool, tickets, seconds=30.0):
  """The grades of these tickets, once all are there."""
  found, end = {}, time.monotonic() + seconds
  while len(found) < len(tickets):
    assert time.monotonic() < end, f'no grades of {set(tickets) - found.keys()}'
    pool.wait(1.0)
    found |= pool.poll(tickets)
  return [found[ticket] for ticket in tickets]


def test_grades_go_to_those_who_want_them_and_once(pool):
  """Training and an evaluation share a pool: whoever waits collects for both."""
  training = [pool.submit(sample) for sample in samples(*(f'score {i}' for i in range(10)))]
  evaluation = [pool.submit(sample) for sample in samples(*(f'score {100 + i}' for i in range(10)))]
  assert len({*training, *evaluation}) == 20
  assert [g.score for g in collect(pool, evaluation)] == [100.0 + i for i in range(10)]
  assert pool.poll(evaluation) == {}
  assert [g.score for g in pool.grade(samples('score 7'))] == [7.0]
  assert [g.score for g in collect(pool, training)] == [float(i) for i in range(10)]
  assert pool.poll([*training, *evaluation]) == {}


def test_a_cancelled_sample_that_waits_is_never_graded(pool, tmp_path):
  before = pool.counts.total()
  slow = [pool.submit(sample) for sample in samples('sleep 0.3', 'sleep 0.3')]  # of two workers
  mark = tmp_path / 'graded'
  waits = pool.submit(samples(f'score open({str(mark)!r}, "w").write("x")')[0])
  pool.cancel(waits)
  last = pool.submit(samples('score 1')[0])
  assert [g.score for g in collect(pool, [*slow, last])] == [1.0, 1.0, 1.0]
  assert pool.poll([waits]) == {}
  assert not mark.exists()
  assert pool.counts.total() == before + 3


@pytest.mark.parametrize('completion', ['sleep 0.3', 'sleep 60', 'exit 5'])
def test_a_cancelled_samples_answer_is_dropped_however_it_ends(pool, completion):
  pool.grade(CALM * 2)  # until both workers are there
  before = pool.counts.copy()
  cancelled = pool.submit(samples(completion)[0])
  assert any(worker.sample == cancelled for worker in pool._workers)
  pool.cancel(cancelled)
  pool.cancel(cancelled)
  others = [pool.submit(sample) for sample in samples(*['sleep 0.1'] * 6)]
  assert [g.status for g in collect(pool, others)] == ['ok'] * 6
  deadline = time.monotonic() + 30
  while any(worker.sample == cancelled for worker in pool._workers):
    assert time.monotonic() < deadline
    pool.wait(1.0)
  assert pool.poll([cancelled]) == {}
  assert pool.counts - before == {'ok': 6}
  assert [g.score for g in pool.grade(CALM)] == [1.0, 0.25]


def test_a_grade_that_is_there_can_be_cancelled_still(pool):
  ticket = pool.submit(samples('score 0.5')[0])
  other = pool.submit(samples('score 0.75')[0])
  pool.wait(30.0)
  collect(pool, [other])
  while any(worker.sample == ticket for worker in pool._workers):
    pool.wait(1.0)
  pool.cancel(ticket)
  assert pool.poll([ticket]) == {}


def test_waiting_ends_with_an_answer_or_the_seconds(pool):
  pool.wait(None)  # for nothing: not at all
  slow = pool.submit(samples('sleep 1')[0])
  start = time.monotonic()
  pool.wait(0.1)
  assert time.monotonic() - start >= 0.1 - 1e-3
  assert pool.poll([slow]) == {}
  assert collect(pool, [slow])[0].score == 1.0


# --- starting and ending ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'reason'),
  [
    ('grade = 1\nraise RuntimeError("at import")', 'RuntimeError: at import'),
    ('import sys\ngrade = 1\nsys.exit("enough")', 'SystemExit: enough'),
    ('import os\ngrade = 1\nos._exit(4)', 'exit status 4'),
    ('grade = 1', 'TypeError: 1 is not a callable object'),
    ('def grade(completion): return 1.0', 'TypeError: too many positional arguments'),
    ('from no_such_package import grade', "ModuleNotFoundError: No module named 'no_such_package'"),
  ],
)
def test_a_grader_that_cannot_be_loaded_is_an_error_at_the_start(tmp_path, text, reason):
  with pytest.raises(SettingsError) as error, GradingPool(spec(tmp_path, text), 1, 1.0, 1.0):
    pytest.fail('entered')
  assert f"config.task.grader = '{tmp_path}/mine.py:grade': a grading process cannot start: " in str(error.value)
  assert reason in str(error.value)


def test_workers_that_can_no_longer_be_replaced_end_the_run_by_name(tmp_path):
  with GradingPool(spec(tmp_path), 1, 1.0, 1.0) as pool:
    (tmp_path / 'mine.py').write_text('raise RuntimeError("edited amid the run")')
    with pytest.raises(SettingsError, match='edited amid the run'):
      pool.grade(samples('exit 1', 'score 1'))


def test_leaving_ends_the_workers(tmp_path):
  with GradingPool(spec(tmp_path), 2, 1.0, 1.0) as pool:
    pids = [int(g.score) for g in pool.grade(samples(*['pid'] * 20))]
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)


def test_workers_import_no_jax_and_leave_the_accelerator_alone(tmp_path):
  text = (
    "import os, sys\ndef grade(p, c, a): return float('jax' in sys.modules) + 2 * float(os.environ['JAX_PLATFORMS'] == 'cpu')\n"
  )
  with GradingPool(spec(tmp_path, text), 1, 1.0, 1.0) as pool:
    assert pool.grade(CALM[:1])[0].score == 2.0


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='only Linux can have the kernel kill them')
@pytest.mark.parametrize('doing', ['score 1', 'sleep 60', 'backtrack', 'child 4243'])
def test_a_parent_killed_leaves_no_orphan(tmp_path, doing):
  """kill -9 of the run, whatever its workers are at, with all signals they might have been sent ignored."""
  mark = f'{tmp_path}/mine.py:grade'
  spec(tmp_path)
  program = f"""
import threading
from sprl.settings import Task
from sprl.tasks import graders
from sprl.tasks.grading_pool import GradingPool
with GradingPool(graders.resolve(Task(grader={mark!r})), 2, 100.0, 1.0) as pool:
  pids = [g.score for g in pool.grade([('p', 'pid', 'a', {{}})] * 20)]
  print(*{{int(pid) for pid in pids}}, flush=True)
  pool.grade([('p', {doing!r}, 'a', {{}})] * 2)
  print('done', flush=True)
  threading.Event().wait(60)
"""
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
  parent = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, text=True, env=environment)
  assert parent.stdout
  pids = [int(pid) for pid in parent.stdout.readline().split()]
  assert pids
  if doing == 'score 1':
    assert parent.stdout.readline() == 'done\n'
  else:
    time.sleep(0.5)  # until the workers are at it
  assert all(alive(pid) for pid in pids)
  parent.kill()
  parent.wait()
  deadline = time.monotonic() + 5
  while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not any(alive(pid) for pid in pids)
  assert not processes('sleep\x004243')


def test_a_thousand_gradings_take_no_new_processes():
  numbers = [('How many?', f'That makes {i} + 1 = {i + 1} in all.\n#### {i + 1}', str(i + 1), {}) for i in range(1000)]
  with GradingPool(graders.resolve(Task()), 2, 10.0, 4.0) as pool:
    start = time.monotonic()
    grades = pool.grade(numbers)
    seconds = time.monotonic() - start
  assert sum(g.score for g in grades) == 1000
  assert seconds < 10  # half a second on two cores; a process for each sample would take minutes


def alive(pid):
  """Whether a process runs; one that has ended and waits for its parent does not."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def processes(command):
  """The ids of running processes whose command line begins so (arguments separated by NUL)."""
  found = []
  for pid in filter(str.isdigit, os.listdir('/proc') if os.path.isdir('/proc') else []):
    try:
      with open(f'/proc/{pid}/cmdline') as file:
        if file.read().startswith(command) and alive(pid):
          found.append(int(pid))
    except OSError:
      continue
  return found
