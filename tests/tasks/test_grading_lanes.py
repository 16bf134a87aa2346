"""Graders in executors: the marks of the process pool, and what is late or broken replaced."""

import sys
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future

import pytest

from sprl.settings import SettingsError, Task
from sprl.tasks import graders
from sprl.tasks.executors import Daemon, RayActor
from sprl.tasks.grading_lanes import GradingLanes
from sprl.tasks.grading_pool import START_SECONDS, Grade

# The completion says what the grader does.
WILD = """
def grade(prompt, completion, answer):
  match completion:
    case 'raise':
      raise ValueError('no mark')
    case 'text':
      return 'good'
    case 'hang':
      import threading
      threading.Event().wait(30)
  return float(completion == answer)
"""


@pytest.fixture
def spec(tmp_path):
  (tmp_path / 'wild.py').write_text(WILD)
  return graders.resolve(Task(grader=f'{tmp_path / "wild.py"}:grade'))


def sample(completion, answer='yes'):
  return 'question', completion, answer, {}


def grades(lanes, *completions):
  tickets, found = [lanes.submit(sample(c)) for c in completions], {}
  end = time.monotonic() + 30
  while len(found) < len(tickets):
    assert time.monotonic() < end
    lanes.wait(0.1)
    found |= lanes.poll(tickets)
  return [found[ticket] for ticket in tickets]


class Immediately(Executor):
  """Computes at once; `broken` says which submission finds it dead."""

  def __init__(self, broken=-1):
    self.left = broken

  def submit(self, fn, /, *args, **kwargs):
    self.left -= 1
    if self.left == -1:
      raise BrokenExecutor('gone')
    future: Future = Future()
    future.set_result(fn(*args, **kwargs))
    return future

  def shutdown(self, wait=True, *, cancel_futures=False):
    pass


def test_marks_are_those_of_the_pool(spec):
  with GradingLanes(spec, 2, 5.0, Daemon) as lanes:
    found = grades(lanes, 'yes', 'no', 'raise', 'text')
    assert found == [
      Grade(1.0, 'ok'), Grade(0.0, 'ok'), Grade(0.0, 'error', 'ValueError: no mark'), Grade(0.0, 'invalid', 'returned a str'),
    ]  # fmt: skip
    assert lanes.counts == {'ok': 2, 'error': 1, 'invalid': 1}


def test_a_sample_that_takes_too_long_costs_its_mark_and_its_executor(spec):
  made, now = [], [0.0]
  with GradingLanes(spec, 1, 5.0, lambda: made.append(Daemon()) or made[-1], lambda: now[0]) as lanes:
    hung, waits = lanes.submit(sample('hang')), lanes.submit(sample('yes'))
    lanes.wait(0.01)
    assert lanes.poll([hung, waits]) == {}
    now[0] = 5.0
    assert lanes.poll([hung]) == {hung: Grade(0.0, 'timeout', 'no answer in 5 s')}
    assert len(made) == 2
    now[0] = 5.0 + START_SECONDS  # the new executor loads the grader first, which is not on the sample's clock
    lanes.wait(10.0)
    assert lanes.poll([waits]) == {waits: Grade(1.0, 'ok')}


def test_an_executor_that_dies_idle_costs_no_sample_its_mark(spec):
  made = []
  with GradingLanes(spec, 1, 5.0, lambda: made.append(Immediately(2 if not made else -1)) or made[-1]) as lanes:
    assert grades(lanes, 'yes', 'yes') == [Grade(1.0, 'ok')] * 2
    assert len(made) == 2


def test_a_cancelled_sample_is_neither_handed_out_nor_counted(spec):
  gate = threading.Event()

  class Held(Immediately):
    def submit(self, fn, /, *args, **kwargs):
      future: Future = Future()
      threading.Thread(target=lambda: (gate.wait(30), future.set_result(fn(*args)))).start()
      return future

  executors = iter([Held(), Immediately()])
  gate.set()
  with GradingLanes(spec, 1, 30.0, lambda: next(executors)) as lanes:
    gate.clear()
    running, queued, last = (lanes.submit(sample('yes')) for _ in range(3))
    lanes.cancel(running)
    lanes.cancel(queued)
    gate.set()
    found = {}
    while last not in found:
      lanes.wait(0.1)
      found |= lanes.poll([running, queued, last])
    assert found == {last: Grade(1.0, 'ok')}
    assert lanes.counts == {'ok': 1}


def test_a_grader_that_does_not_load_is_refused_by_name(tmp_path):
  (tmp_path / 'broken.py').write_text('def grade(prompt, completion, answer): ...\nraise RuntimeError("no such model")')
  spec = graders.resolve(Task(grader=f'{tmp_path / "broken.py"}:grade'))
  with pytest.raises(SettingsError, match=r'broken\.py:grade.*cannot start: RuntimeError: no such model'):
    GradingLanes(spec, 1, 5.0, Daemon).__enter__()


def test_ray_that_is_not_installed_is_said_so(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with pytest.raises(SettingsError, match=r"grader_executor = 'ray': expected Ray to be installed"):
    RayActor()
