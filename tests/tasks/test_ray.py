"""Environments and graders on a local Ray cluster: actors answer, die, hang and are replaced."""

import os

import pytest
from pools import ManualClock, answers, results
from scripted import Scripted

from sprl.config import Task
from sprl.tasks import graders
from sprl.tasks.environment_pool import Call, environment_pool
from sprl.tasks.grader_pool import Grade, grader_pool
from sprl.tasks.rewards import Sample
from sprl.tasks.workers import cpus

pytestmark = pytest.mark.slow  # starts a Ray cluster

ray = pytest.importorskip('ray', reason='Ray is not installed: make install EXTRAS=ray')

GRADER = """
import os, time

def grade(prompt, completion, answer):
  if completion == 'die':
    os._exit(3)
  if completion == 'hang':
    time.sleep(60)
  return float(completion == answer)
"""


@pytest.fixture(scope='module', autouse=True)
def cluster():
  yield
  ray.shutdown()


def test_environments_live_in_actors_that_are_replaced():
  now, key = ManualClock(), (1, 0)

  def call(*of_call):
    return answers(pool, Call(*of_call))[0]

  with environment_pool(Scripted, 1, 30.0, 'ray', now) as pool:
    assert call(key, 'reset', 4)[0] == 'reset 4'
    assert call(key, 'step', 'x').observation == 'x 4.1'
    failure = call(key, 'step', 'raise')
    assert (failure.kind, failure.reason.split(':')[0]) == ('error', 'EnvironmentFault')
    assert 'step raised ValueError: no such door (' in failure.reason
    assert int(call(key, 'step', 'pid').observation) != os.getpid()
    assert call(key, 'step', 'die').kind == 'crash'
    assert call((2, 0), 'reset', 5)[0] == 'reset 5'
    hung = pool.submit(Call((2, 0), 'step', 'hang'))
    now.time = 30.0
    assert results(pool, hung)[0].kind == 'timeout'
    assert call((3, 0), 'reset', 6)[0] == 'reset 6'
  assert cpus('ray') >= 1


def test_graders_run_in_actors_that_are_replaced(tmp_path):
  (tmp_path / 'grader.py').write_text(GRADER)
  spec, now = graders.rewards(Task(grader=f'{tmp_path / "grader.py"}:grade')), ManualClock()
  with grader_pool(spec, 1, 30.0, 4.0, 'ray', now) as pool:
    first, second = answers(pool, Sample('', 'die', 'yes'), Sample('', 'yes', 'yes'))
    assert (first.score, first.status) == (0.0, 'crash')
    assert second == Grade(1.0, 'ok')
    hung = pool.submit(Sample('', 'hang', 'yes'))
    now.time = 30.0
    assert results(pool, hung)[0].status == 'timeout'
    assert answers(pool, Sample('', 'no', 'yes')) == [Grade(0.0, 'ok')]
