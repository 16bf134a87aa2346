"""The scheduler's metrics: what they count, and since when."""

import json

import numpy as np
import pytest
from scheduler_world import TOKENS, World
from simulation import Clock, Episodes, SimulatedEngine, SimulatedWorkers

from sprl.config import Rollout
from sprl.rollout.episodes import Generate, Work, answered
from sprl.rollout.scheduler import Scheduler
from sprl.tasks.grader_pool import Grade
from sprl.types import Trajectory

pytestmark = pytest.mark.usefixtures('unchecked')


def test_metrics_count_since_the_last_call():
  world = World(Rollout(prompts=4, group=2, equal_groups='replace'), capacity=16)
  world.scheduler.batch()
  (first, waits), counts = world.scheduler.metrics(), dict(world.scheduler.counts)
  assert first['async/filtered'] == counts['filtered'] > 0
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


def test_groups_that_start_again_after_a_resume_count_once():
  rollout = Rollout(prompts=4, group=2, async_ratio=2.0)
  first, resumed = World(rollout, capacity=24), World(rollout, capacity=24)
  first.scheduler.batch()
  started = first.scheduler.metrics()[0]['async/started']
  assert started == first.scheduler.counts['started'] > 4  # some of them are live
  resumed.scheduler.restore(json.loads(json.dumps(first.scheduler.state())))
  resumed.consumed = [(0, number, 0) for number in range(4)]
  resumed.scheduler.sync([None])
  live = len(resumed.scheduler._again)
  resumed.scheduler.batch()
  again = resumed.scheduler.metrics()[0]['async/started']
  assert live > 0
  assert again == resumed.scheduler.counts['started'] - started == resumed.scheduler.next - started


def test_a_resume_in_the_middle_of_a_batch_keeps_what_was_dropped():
  rollout = Rollout(prompts=4, group=2, equal_groups='replace')
  worlds = [World(rollout, capacity=2) for _ in range(3)]
  whole, first, resumed = worlds
  assert first.scheduler.batch(lambda: first.scheduler.counts['filtered']) is None  # a signal, just after the first dropped group
  resumed.scheduler.restore(json.loads(json.dumps(first.scheduler.state())))
  for world in (whole, resumed):
    world.scheduler.batch()
  found, expected = (world.scheduler.metrics()[0] for world in (resumed, whole))
  assert expected['async/dropped_prompts'] > 0
  assert expected['async/dropped_tokens'] > 0
  assert found == expected


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


# --- what is dropped -------------------------------------------------------------------------------------------------


def selected(rollout, lengths, rewards, grading=lambda uid: 0.0, episode=None):
  """Return the metrics of one batch. The answer of sequence `uid` has lengths[uid] tokens and draws one in a second."""
  clock = Clock()
  workers = SimulatedWorkers(clock, grading, lambda uid: Grade(rewards[uid], 'ok'))
  engine = SimulatedEngine(clock, len(lengths), lambda request: float(request.max_tokens))

  def answer(number, uid, attempt):
    return answered(np.array([7]), int(lengths[uid]), lambda completion: uid)

  scheduler = Scheduler([engine], workers, Episodes(episode or answer), rollout, clock, groups=rollout.prompts)
  assert scheduler.batch() is not None
  return scheduler.metrics()[0]


def test_stopped_members_are_counted_with_the_tokens_that_they_drew():
  """Members 0 and 1 complete the group after 4 seconds. Member 2 waits for its grade then, and member 3 draws."""
  rollout = Rollout(prompts=1, group=2, extra_members=2)
  found = selected(rollout, [2, 4, 3, 20], [1.0, 0.0, 1.0, 1.0], grading=lambda uid: 100.0 * (uid == 2))
  assert found['async/dropped_members'] == 2
  assert found['async/dropped_prompts'] == 0
  assert found['async/dropped_tokens'] == 3 + 4
  assert found['async/dropped_graded'] == 0
  assert found['async/length_consumed'] == 3
  assert found['async/length_started'] == (2 + 4 + 3 + 4) / 4
  assert found['async/dropped_length_bias'] == pytest.approx(3 / 3.25 - 1)
  assert 'async/dropped_reward_bias' not in found  # no reward of a dropped member is known


def test_rewards_of_dropped_members_count_where_they_are_known():
  """Group 1 completes after 4 seconds. Member 0 of group 0 is graded then, and member 1 draws."""
  rollout = Rollout(prompts=1, group=2, order='completion', extra_prompts=1)
  found = selected(rollout, [2, 10, 4, 4], [1.0, 1.0, 0.5, 0.0])
  assert found['async/surplus'] == found['async/dropped_prompts'] == 1
  assert found['async/dropped_members'] == 2
  assert found['async/dropped_tokens'] == 2 + 4
  assert found['async/dropped_graded'] == 1
  assert found['async/dropped_length_bias'] == pytest.approx(4 / 3.5 - 1)
  assert found['async/dropped_reward_bias'] == pytest.approx(0.25 - 0.5)


def test_a_member_that_had_no_row_is_not_in_the_lengths():
  rollout = Rollout(prompts=1, group=1, extra_members=1)
  clock = Clock()
  workers = SimulatedWorkers(clock, lambda uid: 0.0, lambda uid: Grade(1.0, 'ok'))
  engine = SimulatedEngine(clock, 1, lambda request: 5.0)
  episodes = Episodes(lambda number, uid, attempt: answered(np.array([7]), 6, lambda completion: uid))
  scheduler = Scheduler([engine], workers, episodes, rollout, clock, groups=1)
  scheduler.batch()
  found, _ = scheduler.metrics()
  assert (found['async/dropped_members'], found['async/dropped_tokens']) == (1, 0)
  assert found['async/length_started'] == 6
  assert found['async/dropped_length_bias'] == 0


def test_without_redundancy_nothing_is_dropped():
  found = selected(Rollout(prompts=2, group=2), [2, 10, 4, 4], [1.0, 1.0, 0.5, 0.0])
  dropped = {name: value for name, value in found.items() if name.startswith('async/dropped_')}
  assert len(dropped) == 6
  assert not any(dropped.values())


def test_withheld_members_are_not_dropped():
  found = selected(Rollout(prompts=1, group=2, extra_members=2, members='all'), [2, 4, 8, 16], [1.0, 0.0, 0.0, 0.0])
  taken = np.random.default_rng(0).permutation(4)[:2]
  assert found['async/dropped_members'] == found['async/dropped_tokens'] == 0
  assert found['async/length_consumed'] == np.mean(np.array([2, 4, 8, 16])[taken])
  assert found['async/length_started'] == 7.5
  assert found['async/dropped_reward_bias'] == pytest.approx(np.mean(np.array([1.0, 0, 0, 0])[taken]) - 0.25)


def test_the_turns_of_a_stopped_conversation_count():
  """Each sequence has two turns. Those of sequence 0 take 2 seconds each, those of sequence 1 take 3."""

  def talk(number, uid, attempt):
    for turn in range(2):
      given = np.full(turn, 7, np.int32)
      completion = yield Generate(np.array([7]), given, 2 + uid)
      yield Work(uid)
    return Trajectory.of(completion, reward=1.0)

  found = selected(Rollout(prompts=1, group=1, extra_members=1), [0, 0], [1.0, 1.0], episode=talk)
  assert found['async/dropped_tokens'] == 3 + 1


def test_the_reported_length_bias_is_an_upper_bound_of_the_true_one():
  rng = np.random.default_rng(0)
  right = rng.random((64, 9)) < 0.5
  lengths = np.maximum(rng.lognormal(3 + (~right) * 0.7, 0.5), 1).astype(int)  # wrong answers are longer
  found = selected(Rollout(prompts=64, group=8, extra_members=1), lengths.ravel(), right.ravel().astype(float))
  true = np.sort(lengths)[:, :8].mean() / lengths.mean() - 1
  assert true < found['async/dropped_length_bias'] < 0
  assert found['async/dropped_members'] == 64


def test_members_that_all_finish_show_what_keeping_the_first_would_have_done():
  rng = np.random.default_rng(0)
  right = rng.random((64, 9)) < 0.5
  lengths = np.maximum(rng.lognormal(3 + (~right) * 0.7, 0.5), 1).astype(int) * 9 + np.arange(9)  # all of a group differ
  rollout = Rollout(prompts=64, group=8, extra_members=1, members='all')
  found = selected(rollout, lengths.ravel(), right.ravel().astype(float))
  first = np.argsort(lengths, axis=1)[:, :8]
  kept = np.take_along_axis(lengths, first, 1), np.take_along_axis(right, first, 1)
  assert found['async/first_length_bias'] == pytest.approx(kept[0].mean() / lengths.mean() - 1)
  assert found['async/first_reward_bias'] == pytest.approx(kept[1].mean() - right.mean())
  assert found['async/first_length_bias'] < -0.05
  assert found['async/first_reward_bias'] > 0.02
  assert not {'async/first_length_bias', 'async/first_reward_bias'} & set(
    selected(Rollout(prompts=64, group=8, extra_members=1), lengths.ravel(), right.ravel().astype(float))
  )
