"""Graders that crash, hang or leak, in worker processes with limits of time and memory."""

import os
import signal

import pytest
from pools import ManualClock, answers, processes, results, until

from sprl.config import SettingsError, Task
from sprl.foreign import kind_of
from sprl.tasks import graders
from sprl.tasks.grader_pool import REPORTED, Grade, _scores, grader_pool
from sprl.tasks.rewards import Sample

# The completion selects the behaviour of the grader.
WILD = """
import ctypes, multiprocessing, os, re, signal, subprocess, sys, threading, time

hoard = []

def half(x):
  return x / 2

def grade(prompt, completion, answer):
  what, _, value = completion.partition(' ')
  match what:
    case 'score':
      return eval(value)
    case 'pid':
      return float(os.getpid())
    case 'touch':
      open(value, 'w').close()
    case 'backtrack':  # a hang that holds the interpreter's lock
      open(value, 'w').close()
      re.match(r'(a+)+$', 'a' * 64 + 'b')
    case 'ignore':  # no signal that Python handles ends this
      signal.signal(signal.SIGTERM, signal.SIG_IGN)
      open(value, 'w').close()
      time.sleep(60)
    case 'child':
      subprocess.Popen(['sleep', '4242'])
      open(value, 'w').close()
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
    case 'base':
      class Base(BaseException):
        pass
      raise Base(value)
    case 'surrogate':
      raise ValueError('\\ud800')
    case 'fork':  # the child returns too
      os.fork()
    case 'processes':  # which find the function by the name of its module
      with multiprocessing.get_context('fork').Pool(1) as processes:
        return sum(processes.map(half, [float(value)]))
    case 'terminate':
      process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))
      process.start()
      process.terminate()
      process.join(5)
      return float(-process.exitcode)
    case 'later':  # dies when nobody asks
      threading.Timer(0.05, os._exit, [3]).start()
  return 1.0
"""

LIMIT = 10.0
NOW = ManualClock()
LATE = f'no answer in {LIMIT:g} s (config.task.time_limit)'


def sample(completion):
  return Sample('p', completion, 'a')


def grades(pool, *completions):
  return answers(pool, *map(sample, completions))


def spec(folder, text=WILD):
  (folder / 'mine.py').write_text(text)
  return graders.rewards(Task(grader=f'{folder}/mine.py:grade'))


@pytest.fixture(scope='module')
def pool(tmp_path_factory):
  with grader_pool(spec(tmp_path_factory.mktemp('wild')), 2, LIMIT, memory_gb=0.1, now=NOW) as pool:
    yield pool


def test_a_thousand_samples_start_no_new_process(pool):
  found = grades(pool, *(f'score {i}' for i in range(1000)))
  assert [g.score for g in found] == [float(i) for i in range(1000)]
  assert {g.status for g in found} == {'ok'}
  assert len({g.score for g in grades(pool, *['pid'] * 20)}) <= 2


def test_a_grader_that_forks_and_returns_twice_gives_every_sample_its_own_score(tmp_path):
  with grader_pool(spec(tmp_path), 1, LIMIT, memory_gb=0.1, now=NOW) as pool:
    assert [g.score for g in grades(pool, 'fork', *(f'score {i}' for i in range(20)))] == [1.0, *map(float, range(20))]


def test_a_grader_may_start_processes_and_end_them(tmp_path):
  with grader_pool(spec(tmp_path), 1, LIMIT, memory_gb=4.0, now=NOW) as pool:
    assert [g.score for g in grades(pool, 'processes 0.5', 'terminate')] == [0.25, signal.SIGTERM]


@pytest.mark.parametrize('number', ['bool_(True)', 'array(1.0)', 'float32(1)', 'int64(1)'])
def test_numbers_of_numpy_are_scores(pool, number):
  assert grades(pool, f'score __import__("numpy").{number}') == [Grade(1.0, 'ok')]


@pytest.mark.parametrize(
  ('completion', 'status', 'reason'),
  [
    ('raise no such thing', 'error', 'ValueError: no such thing'),
    ('sys.exit 0', 'error', 'SystemExit: 0'),
    ('unprintable', 'error', 'Mute'),
    ('base x', 'error', 'Base: x'),
    ('surrogate', 'error', 'ValueError: ?'),
    ('score float("nan")', 'invalid', 'returned nan'),
    ('score float("-inf")', 'invalid', 'returned -inf'),
    ('score 1e39', 'invalid', 'returned 1e+39, which float32 cannot hold'),
    ('score "1.0"', 'invalid', 'returned a str, expected a finite number'),
    ('score (1.0, 2.0)', 'invalid', 'returned a tuple, expected a finite number'),
    ('score __import__("numpy").array([0.5])', 'invalid', 'returned a ndarray of shape (1,), expected a finite number'),
    ('score None', 'invalid', 'returned a NoneType'),
    ('score 1j', 'invalid', 'returned a complex'),
    ('score [1.0]', 'invalid', 'returned a list'),
    ('exit 0', 'crash', 'exit status 0'),
    ('exit 5', 'crash', 'exit status 5'),
    ('segfault', 'crash', 'killed by SIGSEGV'),
    ('hangup', 'crash', ''),
    ('allocate 1e9', 'crash', 'out of memory'),
    ('leak', 'crash', 'out of memory'),
  ],
)
def test_a_grader_that_fails_costs_only_its_own_sample(pool, completion, status, reason):
  first, wild, last = grades(pool, 'score 1.0', completion, 'score 0.25')
  assert (first, last) == (Grade(1.0, 'ok'), Grade(0.25, 'ok'))
  assert (wild.score, wild.status) == (0.0, status)
  assert reason in wild.reason
  assert [g.score for g in grades(pool, 'score 1.0', 'score 0.25')] == [1.0, 0.25]


def test_a_failure_is_logged_once_whatever_its_numbers(tmp_path, caplog):
  with grader_pool(spec(tmp_path), 2, LIMIT, memory_gb=0.1) as pool:
    grades(pool, 'raise one', 'raise one', 'raise two')
    grades(pool, 'raise one')
    grades(pool, 'raise row 17')
    grades(pool, *(f'raise row {i}' for i in range(20)))
    grades(pool, *(f'raise {letter}' for letter in 'abcdefghijklmnopqrst'))
  said = [record.getMessage() for record in caplog.records if 'grading failed' in record.getMessage()]
  place = f'({tmp_path}/mine.py:{1 + WILD[: WILD.index("raise ValueError(value)")].count("\n")}, in grade)'
  text = 'grading failed (error): grade: ValueError: '
  assert said[:3] == [f'{text}{what} {place} (logged once)' for what in ('one', 'two', 'row 17')]
  assert not any('row' in line for line in said[3:])
  assert len(said) == REPORTED


def test_failures_at_different_lines_are_of_different_kinds():
  one, other = (f'ValueError: row {row} of 9 (rewards.py:{line}, in grade)' for row, line in ((3, 12), (14, 120)))
  assert kind_of(one) == 'ValueError: row 0 of 0 (rewards.py:12, in grade)'
  assert kind_of(one) != kind_of(other) == kind_of(other.replace('14', '5'))


@pytest.mark.parametrize('what', ['backtrack', 'ignore', 'child'])
def test_a_grader_that_hangs_is_killed_with_its_children(pool, tmp_path, what):
  begun = tmp_path / 'begun'
  ticket = pool.submit(sample(f'{what} {begun}'))
  until(lambda: pool.wait(0.01) or begun.exists())
  assert grades(pool, 'score 0.25', 'score 0.5') == [Grade(0.25, 'ok'), Grade(0.5, 'ok')]  # by the other worker
  NOW.time += LIMIT
  assert results(pool, ticket) == [Grade(0.0, 'timeout', LATE, reward_known=False)]
  until(lambda: not processes('sleep\x004242'), 'a child of the grader lives on')


@pytest.mark.parametrize('score', ['True', 'False', '2', '__import__("numpy").float32(0.5)'])
def test_any_real_number_is_a_score(pool, score):
  assert grades(pool, f'score {score}') == [Grade(float(eval(score)), 'ok')]


def test_all_workers_lost_at_once_are_replaced(pool):
  found = grades(pool, 'exit 1', 'exit 1', 'segfault', 'score 0.5', 'exit 1', 'score 0.75')
  assert [g.score for g in found] == [0, 0, 0, 0.5, 0, 0.75]


def test_a_worker_that_dies_between_two_samples_costs_none(pool):
  dying = {slot.worker for slot in pool._distinct[0]._slots}
  grades(pool, 'later', 'later')
  until(lambda: any(worker.died() for worker in dying))
  assert [g.score for g in grades(pool, *['score 1'] * 6)] == [1.0] * 6


def test_long_texts_pass_both_ways(pool):
  long = 'x' * 3_000_000
  (grade,) = answers(pool, Sample(long, 'score 1', long, {'much': long}))
  assert grade == Grade(1.0, 'ok')
  (grade,) = grades(pool, 'raise ' + long)
  assert (grade.status, len(grade.reason)) == ('error', 500)


def test_a_cancelled_sample_that_crashes_is_forgotten(pool):
  cancelled = pool.submit(sample('exit 5'))
  pool.cancel(cancelled)
  assert [g.status for g in grades(pool, *['score 1'] * 6)] == ['ok'] * 6
  (workers,) = pool._distinct
  until(lambda: pool.wait(0.01) or not any(slot.cancelled for slot in workers._slots))
  assert pool.poll([cancelled]) == {}


FORGED = [
  None, 1.0, {}, [], [None], [['1', 'ok', '', {}]], [[1.0, 'fine', '', {}]], [[1.0, 'ok', '']], [[float('inf'), 'ok', '', {}]],
  [[1.0, 'timeout', '', {}]], [[1.0, 'ok', '', {}]] * 2,
]  # fmt: skip


@pytest.mark.parametrize('answer', FORGED)
def test_a_forged_grade_scores_nothing(answer):
  assert _scores(answer, 1) == [(0.0, 'crash', 'malformed answer', {})]


def test_a_forged_failure_scores_0_and_forged_costs_are_left_out():
  assert _scores([[5.0, 'error', 'why', {'judge/tokens': 3, 'reward/mean': 9, 'judge/cost': 'x'}]], 1) == [
    (0.0, 'error', 'why', {'judge/tokens': 3.0})
  ]


# --- starting and ending -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'reason'),
  [
    ('grade = 1\nraise RuntimeError("at import")', 'RuntimeError: at import ({file}:2, in <module>)'),
    ('import sys\ngrade = 1\nsys.exit("enough")', 'SystemExit: enough'),
    ('import os\ngrade = 1\nos._exit(4)', 'exit status 4'),
    ('grade = 1', 'TypeError: 1 is not a callable object'),
    ('def grade(completion, colour): return 1.0', "TypeError: the function wants 'colour'; a reward may take answer, completion"),
    ('from no_such_package import grade', "ModuleNotFoundError: No module named 'no_such_package'"),
  ],
)
def test_a_grader_that_cannot_be_loaded_is_an_error_at_the_start(tmp_path, text, reason):
  executor = 'processes' if 'exit' in text else 'threads'  # in a thread `os._exit` would end this process
  with pytest.raises(SettingsError) as error, grader_pool(spec(tmp_path, text), 1, 1.0, 1.0, executor):
    pytest.fail('entered')
  assert f"config.task.grader = '{tmp_path}/mine.py:grade': a worker cannot start: " in str(error.value)
  assert reason.format(file=tmp_path / 'mine.py') in str(error.value)


def test_the_reason_of_a_long_message_keeps_file_line_and_function_within_its_limit(tmp_path):
  text = 'def told(n):\n  raise ValueError("x" * n)\n\ndef grade(prompt, completion, answer):\n  return told(int(completion))'
  with grader_pool(spec(tmp_path, text), 1, LIMIT, memory_gb=4.0) as pool:
    (grade,) = grades(pool, '1000')
  assert len(grade.reason) == 500
  assert grade.reason.endswith(f'xx ({tmp_path}/mine.py:2, in told)')


def test_graders_that_no_longer_load_end_the_run_by_name(tmp_path):
  (tmp_path / 'neighbour.py').write_text('')
  with grader_pool(spec(tmp_path, f'import neighbour\n{WILD}'), 1, 1.0, 1.0) as pool:
    (tmp_path / 'neighbour.py').write_text('raise RuntimeError("edited amid the run")')
    with pytest.raises(SettingsError, match='edited amid the run'):
      grades(pool, 'exit 1', 'score 1')


def test_workers_that_start_later_have_the_file_of_the_beginning(tmp_path):
  with grader_pool(spec(tmp_path), 1, 1.0, 1.0) as pool:
    (tmp_path / 'mine.py').write_text('def grade(completion):\n  return 0.25')
    assert [grade.score for grade in grades(pool, 'score 1', 'exit 1', 'score 2')] == [1.0, 0.0, 2.0]


def test_threads_refuse_a_file_that_this_process_imported_with_another_content(tmp_path):
  with grader_pool(spec(tmp_path), 1, 1.0, 1.0, 'threads') as pool:
    assert grades(pool, 'score 1')[0].score == 1.0
  with pytest.raises(SettingsError, match=r'mine\.py has changed since this program imported it'):
    grader_pool(spec(tmp_path, f'{WILD}\n'), 1, 1.0, 1.0, 'threads').__enter__()


def test_a_graders_file_knows_where_it_is(tmp_path):
  text = 'from pathlib import Path\n\ndef grade(completion):\n  return float((Path(__file__).parent / "words.txt").read_text())'
  (tmp_path / 'words.txt').write_text('3')
  with grader_pool(spec(tmp_path, text), 1, LIMIT, 1.0) as pool:
    assert grades(pool, 'x') == [Grade(3.0, 'ok')]


def test_leaving_the_pool_ends_its_processes(tmp_path):
  with grader_pool(spec(tmp_path), 1, 1.0, 1.0) as pool:
    pid = int(grades(pool, 'pid')[0].score)
    os.kill(pid, 0)

  def gone():
    try:
      os.kill(pid, 0)
    except ProcessLookupError:
      return True
    return False

  until(gone)


def test_a_shipped_grader_is_loaded_by_its_name():
  with grader_pool(graders.rewards(Task(grader='exact')), 1, 10.0, 4.0, 'threads') as pool:
    assert answers(pool, Sample('p', ' 7 ', '7'), Sample('p', '8', '7')) == [Grade(1.0, 'ok'), Grade(0.0, 'ok')]
