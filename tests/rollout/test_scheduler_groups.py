"""Which groups the scheduler trains on, and with which members: filters, failures, and redundant groups and members."""

import weakref

import numpy as np
import pytest
from garbage import no_collections
from scheduler_world import World
from simulation import Clock, Episodes, SimulatedEngine

from sprl.config import Rollout
from sprl.rollout.scheduler import Scheduler, Stalled
from sprl.tasks.grader_pool import Grade
from sprl.tasks.worker_pool import Failure

pytestmark = pytest.mark.usefixtures('unchecked')


def test_groups_of_equal_rewards_are_replaced_and_refunded():
  world = World(Rollout(prompts=4, group=2, equal_groups='replace'), capacity=16)
  for _ in range(5):
    for group in world.step():
      assert len({t.reward for t in group.trajectories}) == 2
  assert world.scheduler.window.refunded == world.scheduler.counts['filtered'] > 0


def test_equal_rewards_are_filtered_despite_rounding():
  assert np.std([0.1] * 6) > 0
  world = World(Rollout(prompts=1, group=6, equal_groups='replace'))
  assert world.scheduler._filtered([0.1] * 6)
  assert not world.scheduler._filtered([0.1] * 5 + [0.2])
  assert world.scheduler._filtered([0.1 + 0.2, 0.3])  # equal in float32, in which the learner compares them
  assert world.scheduler._filtered([])  # no reward is known


def test_a_grade_that_failed_makes_no_rewards_differ():
  world = World(Rollout(prompts=1, group=3, equal_groups='replace'), capacity=16)
  failed = Grade(0.0, 'timeout', 'too slow', reward_known=False)
  world.workers._result = lambda call: failed if call[0] % 3 == 0 else Grade(1.0 + (call[0] > 3) * (call[0] % 3), 'ok')
  (group,) = world.step()
  assert group.number == 1  # group 0 has the known rewards 1, 1
  assert [(t.reward, t.reward_known) for t in group.trajectories] == [(0.0, False), (2.0, True), (3.0, True)]


def test_a_filter_that_passes_nothing_ends_the_run():
  world = World(Rollout(prompts=2, group=2, equal_groups='replace'), capacity=16)
  world.workers._result = lambda call: Grade(1.0, 'ok')
  with pytest.raises(Stalled, match=r"\d+ groups in a row were .*config\.rollout\.equal_groups = 'replace'"):
    world.step()


def test_graders_that_always_fail_end_the_run_with_their_reason():
  world = World(Rollout(prompts=2, group=2), retries=1, capacity=16, fails=1.0)
  with pytest.raises(Stalled, match=r'\d+ groups in a row were given up .* because call [abc]'):
    world.step()


@pytest.mark.parametrize('sync', ['recompute', 'keep', 'drain'])
def test_graders_that_fail_during_an_update_end_the_run_after_it(sync):
  world = World(Rollout(prompts=2, group=2, async_ratio=2.0, sync=sync), retries=0, capacity=8, chunk=0.05)
  world.step()
  world.fails = 1.0
  while not world.scheduler._hopeless:  # the rollouts that go on during the update
    world.scheduler.pump()
  version = world.scheduler.window.version
  world.scheduler.sync([None])
  assert world.scheduler.window.version == version + 1
  rest = (world.step() for _ in range(10))  # the groups that are complete still train
  with pytest.raises(Stalled, match=r'\d+ groups in a row were given up .* because call [abc]'):
    list(rest)


def test_failed_members_are_retried_then_their_group_is_dropped(caplog):
  world = World(Rollout(prompts=4, group=2), retries=1, capacity=16, fails=0.4)
  for _ in range(6):
    for group in world.step():
      for t in group.trajectories:
        assert world.draw(3, t.uid, 0).random() >= 0.4 or world.draw(3, t.uid, 1).random() >= 0.4
  counts = world.scheduler.counts
  assert counts['errors'] > 0
  assert counts['hung'] > 0
  assert counts['failed'] == world.scheduler.window.refunded > 0
  assert sum('logged once' in r.getMessage() for r in caplog.records) == 3  # one line a reason


def evaluation(fails, different, groups=4):
  """Return the scheduler of an evaluation whose groups of `fails` have a failing environment."""
  world = World(Rollout(prompts=groups, group=1), retries=0, capacity=2)
  world.workers._result = lambda call: Failure('error', 'x') if call[0] in fails else Grade(1.0, 'ok')
  source, now = world.scheduler.source, world.clock
  return Scheduler(world.engines, world.workers, source, world.rollout, now, groups=groups, retries=0, different=different)


@pytest.mark.parametrize('equal_groups', ['train', 'replace'])
def test_groups_that_cannot_be_graded_end_the_run_with_the_reason(monkeypatch, equal_groups):
  monkeypatch.setattr('sprl.rollout.scheduler.FRUITLESS_BATCHES', 3)
  world = World(Rollout(prompts=2, group=2, equal_groups=equal_groups), capacity=16)
  world.workers._result = lambda call: Grade(float(call[0] % 2), 'ok')
  world.step()
  world.workers._result = lambda call: Grade(0.0, 'error', 'the key has expired', reward_known=False)
  steps = (world.step() for _ in range(5))
  with pytest.raises(Stalled, match='groups in a row were not graded; the last because the key has expired'):
    list(steps)
  assert world.scheduler.counts['consumed'] <= 2 * (1 + 4)


@pytest.mark.parametrize(
  ('fails', 'different', 'asked'),
  [
    ([], 4, [0, 1, 2, 3]),
    ([2], None, [0, 1, 3, 4]),  # no group is the same as another
    ([2], 5, [0, 1, 3, 4]),
    ([2], 4, [0, 1, 3]),
    ([0, 2], 5, [1, 3, 4]),
    ([0, 1, 3], 4, [2]),
  ],
)
def test_a_failed_group_is_replaced_by_a_different_one_or_not_at_all(fails, different, asked):
  assert [group.number for group in evaluation(fails, different).batch()] == asked


def test_an_evaluation_whose_groups_all_fail_ends_with_the_reason():
  with pytest.raises(Stalled, match=r'4 groups in a row were given up .* because x'):
    evaluation(range(4), 4).batch()


def test_a_group_with_too_few_members_is_dropped():
  world = World(Rollout(prompts=1, group=2, extra_members=1), retries=0, capacity=3)
  world.workers._result = lambda call: Failure('error', 'x') if call[0] in (1, 2) else Grade(1.0, 'ok')
  (group,) = world.step()
  assert group.number == 1
  assert world.scheduler.counts['failed'] == 1


@pytest.mark.parametrize('alpha', [0.0, 1.0])
def test_redundant_groups_are_dropped_after_a_batch(alpha):
  rollout = Rollout(prompts=4, group=2, async_ratio=alpha, order='completion', extra_prompts=3)
  world = World(rollout, capacity=32, sigma=1.5)
  for _ in range(10):
    world.step()
    assert world.scheduler.window.live <= 4 * alpha + 4  # without the surplus; the next version's groups may have started
  counts = world.scheduler.counts
  assert counts['surplus'] > 0
  assert counts['consumed'] == 40
  assert max(world.ages) <= alpha


def test_redundant_members_leave_out_the_slowest():
  world = World(Rollout(prompts=4, group=3, extra_members=2), capacity=40, sigma=1.5, grading=0.0)
  for group in world.step():
    durations = {uid: world.draw(2, uid, 0).lognormal(0, 1.5) for uid in range(group.number * 5, group.number * 5 + 5)}
    assert {t.uid for t in group.trajectories} == set(sorted(durations, key=lambda uid: durations[uid])[:3])
    assert [t.uid for t in group.trajectories] == sorted(t.uid for t in group.trajectories)


def test_the_failure_of_a_redundant_member_costs_nothing():
  world = World(Rollout(prompts=2, group=2, extra_members=1), retries=0, capacity=6)
  world.workers._result = lambda call: Failure('error', 'spare') if call[0] % 3 == 2 else Grade(1.0, 'ok')
  world.workers._duration = lambda call: 0.0 if call[0] % 3 == 2 else 5.0  # it fails before the others are done
  for group in world.step():
    assert [t.uid % 3 for t in group.trajectories] == [0, 1]
  assert world.scheduler.counts['failed'] == 0
  assert world.scheduler.counts['errors'] == 2


def test_late_results_of_dropped_groups_are_ignored():
  """Late results are completions of dropped groups, and of an attempt that was given up."""
  world = World(Rollout(prompts=2, group=2, async_ratio=1.0), capacity=8)
  scheduler = world.scheduler
  scheduler.pump()
  (uid, member), *_ = scheduler._dispatcher._members.items()
  late = SimulatedEngine(Clock(), 1, lambda r: 1.0, chunk=1.0)
  late.add(member.request)
  late.dispatch()
  completion = late.collect()[0]
  scheduler._failed(member, Failure('error', 'the first attempt'))
  scheduler._completed(completion)
  assert (member.attempt, member.result) == (1, None)
  assert scheduler._dispatcher._members[uid] is member  # still waits for its second attempt
  scheduler._drop(member.group.number, 'expired')
  scheduler._completed(completion)
  world.check()
  assert uid not in scheduler._dispatcher._members


def test_dropped_groups_between_groups_that_count_do_not_end_the_run(monkeypatch):
  """Only groups that are dropped one after the other show that no batch will ever be ready."""
  monkeypatch.setattr('sprl.rollout.scheduler.FRUITLESS_BATCHES', 1)
  world = World(Rollout(prompts=1, group=2, equal_groups='replace'), capacity=2)
  world.workers._result = lambda call: Grade(float(call[0] % 4 == 3), 'ok')  # rewards of even groups: 0, 0; of odd ones: 0, 1
  assert [group.number for _ in range(5) for group in world.step()] == [1, 3, 5, 7, 9]
  assert world.scheduler.counts['filtered'] == 5


def test_groups_that_were_returned_or_dropped_are_freed_at_once():
  world = World(Rollout(prompts=4, group=2, equal_groups='replace'), capacity=16)
  kept = []

  def episode(*key):
    trajectory = yield from world.episode(*key)
    kept.append(weakref.ref(trajectory.tokens))
    return trajectory

  world.scheduler.source = Episodes(episode)
  with no_collections():
    for _ in range(3):
      world.step()
    world.scheduler.batch()
    held = sum(len(group.results) for group in world.scheduler._groups.values())
    assert world.scheduler.counts['filtered'] > 0
    assert len(kept) > held
    assert sum(tokens() is not None for tokens in kept) == held
