"""The scheduler's metrics: what they count, and since when."""

import pytest
from scheduler_world import TOKENS, World

from sprl.config import Rollout

pytestmark = pytest.mark.usefixtures('unchecked')


def test_metrics_count_since_the_last_call():
  world = World(Rollout(prompts=4, group=2, equal_groups='replace'), capacity=16)
  world.scheduler.batch()
  (first, waits), counts = world.scheduler.metrics(), dict(world.scheduler.counts)
  assert first['async/filtered'] == counts.get('filtered', 0)
  assert first['async/length_consumed'] == TOKENS
  assert 0 < waits['batch_wait'] <= world.clock()
  world.scheduler.sync([None])
  world.scheduler.batch()
  second, _ = world.scheduler.metrics()
  assert first['async/filtered'] + second['async/filtered'] == world.scheduler.counts['filtered']


def test_metrics_after_a_resume_count_from_the_resume():
  rollout = Rollout(prompts=4, group=2)
  whole, first = (World(rollout, steps=4, capacity=16) for _ in range(2))
  for _ in range(2):
    for world in (whole, first):
      world.step()
      world.scheduler.metrics()
  resumed = World(rollout, steps=4, capacity=16)
  resumed.scheduler.restore(first.scheduler.state())
  resumed.consumed = list(first.consumed)
  for world in (whole, resumed):
    world.step()
  assert whole.scheduler.metrics()[0] == resumed.scheduler.metrics()[0]
  assert whole.scheduler.state() == resumed.scheduler.state()


def test_aborted_tokens_count_running_and_interrupted_requests():
  for quiet in (False, True):
    world = World(Rollout(prompts=2, group=1, order='completion', extra_prompts=2), capacity=4, chunk=0.1, grading=0.0)
    scheduler = world.scheduler
    while scheduler.window.ready() is None:
      scheduler.pump()
    drawing = [m for m in scheduler._dispatcher._members.values() if m.engine is not None]
    if quiet:
      scheduler.quiesce()
    scheduler.batch()
    metrics, _ = scheduler.metrics()
    assert len(drawing) > 0
    assert metrics['async/aborted_tokens'] > 0
    assert metrics['async/length_consumed'] == TOKENS
    assert 0 < metrics['async/length_started'] < TOKENS  # an aborted request counts with the tokens that it drew
