"""Groupwise rewards: the members that count are compared once, after they have ended and before their group counts."""

from dataclasses import replace

import numpy as np
import pytest
from scheduler_world import World
from simulation import Clock, Episodes, SimulatedEngine

from sprl.config import Rollout, Task
from sprl.io.tokenizer import Tokenizer, write_tiny
from sprl.rollout.episodes import compared
from sprl.rollout.prompts import OffsetSource, ProblemSource
from sprl.rollout.scheduler import Scheduler
from sprl.tasks import graders
from sprl.tasks.grader_pool import Grade, grader_pool
from sprl.tasks.problems import Problem

pytestmark = pytest.mark.usefixtures('unchecked')


class Comparing(World):
  """A world whose groups are compared: the best sample of a group is the one with the largest uid. It records the calls."""

  def __init__(self, rollout, comparing=0.0, **others):
    super().__init__(rollout, **others)
    self.compared, single = [], self.workers
    duration, result = single._duration, single._result
    single._duration = lambda call: comparing if isinstance(call, list) else duration(call)
    single._result = lambda call: self.best(call) if isinstance(call, list) else result(call)

    def comparison(number, trajectories):
      return compared(trajectories, [t.uid for t in trajectories], ['alone', 'best'])

    self.scheduler.source = Episodes(self.episode, comparison)

  def best(self, uids):
    self.compared.append(uids)
    return [Grade(10.0 * (uid == max(uids)), 'ok', parts={'best': float(uid == max(uids))}) for uid in uids]

  def alone(self, uid):
    return float(self.draw(4, uid).integers(0, 2))

  def check_rewards(self, groups):
    """Assert that each trajectory has its own reward, and that of the comparison with the others of its group."""
    for group in groups:
      uids = [t.uid for t in group.trajectories]
      assert uids in self.compared
      assert [t.reward for t in group.trajectories] == [self.alone(uid) + 10.0 * (uid == max(uids)) for uid in uids]


SCHEDULES = {
  'one at a time': {},
  'whole groups': {'replicate_prompts': False},
  'redundant members': {'extra_members': 2},
  'all members count': {'extra_members': 2, 'members': 'all'},
  'ahead': {'async_ratio': 1.0},
  'ahead, the oldest replaced': {'async_ratio': 2.0, 'order': 'completion', 'extra_prompts': 2},
  'ahead, kept caches': {'async_ratio': 1.0, 'sync': 'keep'},
  'drained': {'async_ratio': 1.0, 'sync': 'drain'},
}


@pytest.mark.parametrize('comparing', [0.0, 3.0])
@pytest.mark.parametrize('schedule', SCHEDULES)
def test_the_members_that_count_are_compared(schedule, comparing):
  rollout = Rollout(prompts=3, group=4, **SCHEDULES[schedule])
  world = Comparing(rollout, comparing, capacity=18, steps=4)
  for _ in range(4):
    groups = world.step()
    assert [len(g.trajectories) for g in groups] == [6 if rollout.members == 'all' else 4] * 3
    world.check_rewards(groups)
  consumed = {number for _, number, _ in world.consumed}
  assert sum(uids[0] // (4 + rollout.extra_members) in consumed for uids in world.compared) == len(consumed)


def test_members_that_failed_for_good_are_not_compared():
  world = Comparing(Rollout(prompts=3, group=2, extra_members=2, members='all'), fails=0.4, steps=3, retries=0, capacity=12)
  sizes = set()
  for _ in range(3):
    groups = world.step()
    world.check_rewards(groups)
    sizes |= {len(g.trajectories) for g in groups}
  assert min(sizes) < 4


def test_the_filter_sees_the_rewards_after_the_comparison():
  """All members have the same reward of their own, so without the comparison every group would be replaced."""
  world = Comparing(Rollout(prompts=2, group=3, equal_groups='replace'), steps=2)
  world.alone = lambda uid: 1.0
  inner = world.workers._result
  world.workers._result = lambda call: inner(call) if isinstance(call, list) else Grade(1.0, 'ok')
  world.check_rewards(world.step())
  assert world.scheduler.counts['filtered'] == 0


def test_a_group_that_is_dropped_while_it_is_compared_leaves_no_call():
  world = Comparing(Rollout(prompts=1, group=2), comparing=50.0, steps=1, grading=0.0)
  while not any(isinstance(call, list) for _, _, call in world.workers._events):
    world.scheduler.pump()
  assert not world.scheduler.idle
  world.scheduler._drop(0, 'expired')
  assert world.scheduler._tickets == {}
  groups = world.step()
  assert [g.number for g in groups] == [1]
  world.check_rewards(groups)


def test_groups_under_comparison_start_again_after_a_resume():
  rollout = Rollout(prompts=1, group=2)
  world = Comparing(rollout, comparing=50.0, steps=1, grading=0.0)
  while not any(isinstance(call, list) for _, _, call in world.workers._events):
    world.scheduler.pump()
  resumed = Comparing(rollout, comparing=50.0, steps=1, grading=0.0)
  resumed.scheduler.restore(world.scheduler.state())
  groups = resumed.step()
  assert [g.number for g in groups] == [0]
  resumed.check_rewards(groups)


# --- problems --------------------------------------------------------------------------------------------------------


def test_a_groupwise_function_ranks_the_answers_to_one_problem(tmp_path):
  """The reward of a member is its own, plus the share of the other members of its group with smaller first tokens."""
  write_tiny(tmp_path)
  tokenizer, groups = Tokenizer.load(tmp_path), []

  def rank(prompts, completions, tokens, level, finish):
    groups.append((prompts, completions, tokens, level, finish))
    return [sum(other[0] < own[0] for other in tokens) / (len(tokens) - 1) for own in tokens]

  rewards = graders.rewards(
    Task(rewards=('python:rank=2', 'python:even')), {'rank': rank, 'even': lambda tokens: tokens[0] % 2 == 0}
  )
  source = ProblemSource(
    lambda n: Problem(str(n), f'question {n}', (), str(n), row={'level': n}), tokenizer, rewards, max_prompt=40, max_tokens=6
  )
  clock = Clock()
  engine = SimulatedEngine(clock, 8, lambda request: 1.0 + request.uid % 3)
  with grader_pool(rewards, 2, 30.0, 4.0, columns=('level',)) as pool:
    scheduler = Scheduler([engine], pool, OffsetSource(source, 5), Rollout(prompts=2, group=4), clock, 2, first=5)
    found = scheduler.batch()
  assert sorted(prompts[0] for prompts, *_ in groups) == ['question 0', 'question 1']
  assert {tuple(level) for *_, level, _ in groups} == {(0,) * 4, (1,) * 4}
  for group in found:
    first = [int(t.completion[0]) for t in group.trajectories]
    ranks = [sum(other < own for other in first) / 3 for own in first]
    assert [t.parts for t in group.trajectories] == [{'rank': r, 'even': float(own % 2 == 0)} for r, own in zip(ranks, first)]
    assert [t.reward for t in group.trajectories] == pytest.approx([2 * r + (own % 2 == 0) for r, own in zip(ranks, first)])
    assert [t.score for t in group.trajectories] == ranks
    (texts,) = [completions for prompts, completions, *_ in groups if prompts[0] == f'question {group.number - 5}']
    assert texts == [tokenizer.decode(t.completion.tolist(), skip_special=True) for t in group.trajectories]


def test_grades_of_a_comparison_are_added():
  grades = [Grade(2.0, 'ok', parts={'b': 1.0}), Grade(0.0, 'timeout', parts={'b': 0.0}, failed=('b',), reward_known=False)]
  world = World(Rollout(prompts=1, group=2), steps=1)
  ((group,),) = [world.step()]
  before = [replace(t, reward=0.5, parts={'c': 0.5}, status='ok', failed=()) for t in group.trajectories]
  before[0] = replace(before[0], status='error', failed=('c',))  # a reward without a weight: the sample trains
  comparison = compared(before, 'the call', ['a', 'b', 'c'])
  assert comparison.send(None).call == 'the call'
  with pytest.raises(StopIteration) as end:
    comparison.send(grades)
  first, second = end.value.value
  assert (first.reward, list(first.parts.items()), first.status, first.failed) == (2.5, [('b', 1.0), ('c', 0.5)], 'error', ('c',))
  assert (second.reward, second.status, second.failed) == (0.5, 'timeout', ('b',))
  assert (first.reward_known, second.reward_known) == (True, False)
  np.testing.assert_array_equal(first.tokens, before[0].tokens)
