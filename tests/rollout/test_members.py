"""Which members of a group train with `rollout.extra_members`, and what that does to the expected update.

The policy is a coin with one weight: a member draws arm a (short) with probability p, or arm b (long). The tests enumerate all
outcomes of the members of a group. Scheduler, advantages and packing are those of a run; the expected updates are known formulas.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scheduler_world import World
from simulation import Clock, Episodes, SimulatedEngine, SimulatedWorkers

from sprl.config import Advantage, Packing, Rollout, Run, Sampling
from sprl.learner.batch import shape
from sprl.learner.learner import minibatches
from sprl.rollout.episodes import answered
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.staleness import staleness
from sprl.tasks.grader_pool import Grade
from sprl.tasks.worker_pool import Failure

pytestmark = pytest.mark.usefixtures('unchecked')

TRAINED, MEMBERS = 3, 4  # G members train, of n
SECONDS = {'a': 1.0, 'b': 10.0}
REWARD = {'a': 1.0, 'b': 0.25}
GAIN = REWARD['a'] - REWARD['b']
POLICIES = [0.2, 0.5, 0.9]


def group_of(arms, members='first', group=TRAINED):
  """Return the trajectories of one group whose members draw these arms, as the scheduler hands them over."""
  clock = Clock()
  rollout = Rollout(prompts=1, group=group, extra_members=len(arms) - group, members=members)
  workers = SimulatedWorkers(clock, lambda uid: 0.0, lambda uid: Grade(REWARD[arms[uid]], 'ok'))
  engine = SimulatedEngine(clock, len(arms), lambda request: SECONDS[arms[request.uid]])
  episodes = Episodes(lambda number, uid, attempt: answered(np.array([7]), 4, lambda completion: uid))
  ((found,),) = [Scheduler([engine], workers, episodes, rollout, clock, groups=1).batch()]
  return found.trajectories


def update(trajectories, arms, p):
  """Return the derivative of the log-probs by the policy's logit, weighted by advantages, summed over the trained members."""
  rows = sum(not t.withheld for t in trajectories)
  rollout = Rollout(prompts=1, group=rows)
  run = Run(rollout=rollout, advantage=Advantage('dr_grpo'), packing=Packing(row_tokens=16))
  ((batch, _),) = minibatches(trajectories, run, shape(Sampling(max_prompt=4, max_tokens=4), rollout, run.packing, 1))
  assert batch.mask.shape[0] == rows
  derivative = {'a': 1 - p, 'b': -p}
  trained = [t.uid for t in trajectories if not t.withheld]
  return sum(A * derivative[arms[uid]] for A, uid, row in zip(batch.advantage, trained, batch.mask, strict=True) if row.any())


def expected(update_of, p, members=MEMBERS):
  """Return the mean of `update_of(arms)` over all outcomes of the members."""
  return sum(
    np.prod([p if arm == 'a' else 1 - p for arm in arms]) * update_of(''.join(arms)) for arms in product('ab', repeat=members)
  )


def exact(n, p):
  """The expected sum of n Dr. GRPO terms: (n - 1) covariances of the reward and the derivative."""
  return (n - 1) * p * (1 - p) * GAIN


def late_withheld(arms):
  """Return the trajectories of all members, with the tokens of the last to end withheld."""
  late = sorted(range(MEMBERS), key=lambda uid: SECONDS[arms[uid]])[TRAINED:]
  return [replace(t, withheld=t.uid in late) for t in group_of(arms, 'all')]


@pytest.mark.parametrize('p', POLICIES)
def test_without_extra_members_the_update_is_unbiased(p):
  for n in (TRAINED, MEMBERS):
    found = expected(lambda arms, n=n: update(group_of(arms, group=n), arms, p), p, n)
    assert found == pytest.approx(exact(n, p), rel=1e-6)


@pytest.mark.parametrize('p', POLICIES)
def test_the_first_members_to_end_give_a_biased_update(p):
  """Of K short answers, k = min(K, G) are kept. Their sum of terms is gain k (G - k) / G, whose mean is not that of G members."""

  def formula(arms):
    k = min(arms.count('a'), TRAINED)
    return GAIN * k * (TRAINED - k) / TRAINED

  found = expected(lambda arms: update(group_of(arms, 'first'), arms, p), p)
  assert found == pytest.approx(expected(formula, p), rel=1e-6)
  assert abs(found / exact(TRAINED, p) - 1) > 0.05


@pytest.mark.parametrize('p', POLICIES)
def test_withholding_the_tokens_of_late_members_gives_a_biased_update(p):
  """All n rewards count, and k = min(K, G) short answers are trained on."""

  def formula(arms):
    K = arms.count('a')
    k = min(K, TRAINED)
    return GAIN * (k * (MEMBERS - K) * (1 - p) + (TRAINED - k) * K * p) / MEMBERS

  found = expected(lambda arms: update(late_withheld(arms), arms, p), p)
  assert found == pytest.approx(expected(formula, p), rel=1e-6)
  assert abs(found / (TRAINED / MEMBERS * exact(MEMBERS, p)) - 1) > 0.05


@pytest.mark.parametrize('p', POLICIES)
def test_all_members_with_a_drawn_part_withheld_give_an_unbiased_update(p):
  found = expected(lambda arms: update(group_of(arms, 'all'), arms, p), p)
  full = expected(lambda arms: update(group_of(arms, group=MEMBERS), arms, p), p)
  assert found == pytest.approx(TRAINED / MEMBERS * full, rel=1e-6)
  assert full == pytest.approx(exact(MEMBERS, p), rel=1e-6)


# --- the scheduler ---------------------------------------------------------------------------------------------------


def test_all_members_end_and_the_withheld_ones_do_not_depend_on_durations():
  drawn = []
  for sigma in (0.1, 1.5):
    world = World(Rollout(prompts=8, group=3, extra_members=2, members='all'), capacity=40, sigma=sigma)
    groups = world.step()
    assert [t.uid for g in groups for t in g.trajectories] == list(range(40))
    assert all(sum(t.withheld for t in g.trajectories) == 2 for g in groups)
    assert world.scheduler.counts['aborted_tokens'] == 0
    drawn.append([[t.uid % 5 for t in g.trajectories if t.withheld] for g in groups])
  assert drawn[0] == drawn[1]
  assert len({tuple(uids) for uids in drawn[0]}) > 2  # the draw differs by group


def test_a_lost_member_is_not_waited_for():
  """The last member fails for good: before the others end, and after them."""
  for seconds in (0.0, 50.0):
    world = World(Rollout(prompts=2, group=2, extra_members=2, members='all'), retries=0, capacity=8)
    world.workers._duration = lambda call, seconds=seconds: seconds if call[0] % 4 == 3 else 5.0
    result = world.workers._result
    world.workers._result = lambda call, result=result: Failure('error', 'x') if call[0] % 4 == 3 else result(call)
    for group in world.step():
      assert [t.uid % 4 for t in group.trajectories] == [0, 1, 2]
      assert sum(t.withheld for t in group.trajectories) == 1
    assert world.scheduler.counts['failed'] == 0


def test_the_rewards_of_all_members_decide_whether_a_group_is_replaced():
  world = World(Rollout(prompts=4, group=2, extra_members=1, members='all', equal_groups='replace'), capacity=24)
  groups = [group for _ in range(4) for group in world.step()]
  assert all(len({t.reward for t in g.trajectories}) == 2 for g in groups)
  assert any(len({t.reward for t in g.trajectories if not t.withheld}) == 1 for g in groups)


def test_withheld_tokens_have_no_age():
  """The correction must act on stale tokens, so tokens that are not trained on must not count as stale."""
  ((group,),) = [World(Rollout(prompts=1, group=1, extra_members=1, members='all')).step()]
  older = replace(group, trajectories=tuple(replace(t, version=t.version + (not t.withheld)) for t in group.trajectories))
  found = staleness([older], 1)
  assert (found['async/stale_tokens'], found['async/token_lag_max']) == (0, 0)
  assert staleness([group], 1)['async/stale_tokens'] == 1


def test_a_resumed_run_withholds_the_same_members():
  rollout = Rollout(prompts=3, group=2, extra_members=2, async_ratio=1.0, members='all')
  whole, first = (World(rollout, steps=5, capacity=16, engines=2, turns=2) for _ in range(2))

  def withheld(groups):
    return {g.number: [t.uid for t in g.trajectories if t.withheld] for g in groups}

  expected = {}
  for _ in range(5):
    expected |= withheld(whole.step())
  found = {}
  for _ in range(2):
    found |= withheld(first.step())
  resumed = World(rollout, steps=5, capacity=16, engines=2, turns=2)
  resumed.scheduler.restore(first.scheduler.state())
  resumed.consumed = list(first.consumed)
  for _ in range(3):
    found |= withheld(resumed.step())
  assert found == expected
  assert sorted(found) == list(range(15))
