"""Environments and graders on a local Ray cluster: actors answer, die, hang and are replaced."""

import os
import time

import lane_environment
import pytest

from sprl.rollout.lanes import Call, Lanes
from sprl.settings import Task
from sprl.tasks import graders
from sprl.tasks.executors import RayActor
from sprl.tasks.grading_lanes import GradingLanes
from sprl.tasks.grading_pool import Grade

pytestmark = pytest.mark.slow  # a cluster starts, and what dies is waited for

ray = pytest.importorskip('ray', reason="needs Ray: pip install 'sprl[ray]'")

PATIENCE = 60.0
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


def results(workers, *tickets):
  found, end = {}, time.monotonic() + PATIENCE
  while len(found) < len(tickets):
    assert time.monotonic() < end, f'nothing came of {set(tickets) - found.keys()}'
    workers.wait(0.1)
    found |= workers.poll(tickets)
  return [found[ticket] for ticket in tickets]


def call(lanes, *of_call):
  return results(lanes, lanes.submit(Call(*of_call)))[0]


@pytest.mark.slow
def test_environments_live_in_actors_which_are_replaced_when_they_die_or_hang():
  now, key = [0.0], (1, 0)
  with Lanes(lane_environment.Scripted, 1, RayActor, limit=30.0, now=lambda: now[0]) as lanes:
    assert call(lanes, key, 'reset', 4)[0] == '1: reset 4'
    assert call(lanes, key, 'step', 'x').observation == '1: x 4.1'
    failure = call(lanes, key, 'step', 'raise')
    assert (failure.kind, failure.reason.split(':')[0]) == ('error', 'EnvironmentFault')
    assert failure.reason.endswith('step raised ValueError: no such door')
    pid = int(call(lanes, key, 'step', 'pid').observation)
    assert pid != os.getpid()
    failure = call(lanes, key, 'step', 'die')
    assert (failure.kind, failure.reason.split(':')[0]) == ('error', 'BrokenExecutor')
    assert call(lanes, (1, 1), 'reset', 5)[0] == '1: reset 5'
    hung = lanes.submit(Call((1, 1), 'step', 'hang'))
    now[0] = 30.0
    assert results(lanes, hung)[0].kind == 'hang'
    assert call(lanes, (1, 2), 'reset', 6)[0] == '1: reset 6'


def test_graders_run_in_actors_which_are_replaced_when_they_die_or_hang(tmp_path):
  (tmp_path / 'grader.py').write_text(GRADER)
  spec = graders.resolve(Task(grader=f'{tmp_path / "grader.py"}:grade'))
  now = [0.0]
  with GradingLanes(spec, 1, 30.0, RayActor, lambda: now[0]) as lanes:
    died, graded = (lanes.submit(('', completion, 'yes', {})) for completion in ('die', 'yes'))
    first, second = results(lanes, died, graded)
    assert (first.score, first.status, first.reason.split(':')[0]) == (0.0, 'crash', 'BrokenExecutor')
    assert second == Grade(1.0, 'ok')
    hung = lanes.submit(('', 'hang', 'yes', {}))
    now[0] = 30.0
    assert results(lanes, hung) == [Grade(0.0, 'timeout', 'no answer in 30 s')]
    assert results(lanes, lanes.submit(('', 'no', 'yes', {}))) == [Grade(0.0, 'ok')]
