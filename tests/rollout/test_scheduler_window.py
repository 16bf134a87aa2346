"""The scheduler's window: the invariants I1 to I3 of sprl/rollout/window.py hold, no group is lost, nothing deadlocks."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import World

from sprl.config import Rollout
from sprl.rollout.scheduler import Stalled
from sprl.types import trained_on

pytestmark = pytest.mark.usefixtures('unchecked')

rollouts = st.builds(
  Rollout,
  prompts=st.sampled_from([1, 2, 4, 5, 10]),
  group=st.integers(1, 4),
  async_ratio=st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0, 1.1, 2.0, 4.0]),
  order=st.sampled_from(['start', 'deadline']),
  sync=st.sampled_from(['recompute', 'keep', 'drain']),
  extra_members=st.integers(0, 2),
  members=st.sampled_from(['first', 'all']),
  equal_groups=st.sampled_from(['train', 'replace']),
).filter(
  lambda r: (
    abs(r.async_ratio * r.prompts - round(r.async_ratio * r.prompts)) < 1e-9 and (r.group > 1 or r.equal_groups == 'train')
  )
)
redundant = st.builds(
  Rollout,
  prompts=st.sampled_from([1, 2, 5]),
  group=st.integers(1, 3),
  async_ratio=st.sampled_from([0.0, 1.0, 2.0]),
  order=st.just('completion'),
  sync=st.sampled_from(['recompute', 'keep', 'drain']),
  replicate_prompts=st.booleans(),
  extra_prompts=st.sampled_from([0, 1, 3]),
  extra_members=st.integers(0, 2),
  members=st.sampled_from(['first', 'all']),
  equal_groups=st.sampled_from(['train', 'replace']),
).filter(lambda r: (r.group > 1 or r.equal_groups == 'train') and (r.replicate_prompts or not r.async_ratio or r.group == 1))


@settings(max_examples=20)
@given(rollouts, st.integers(0, 1000), st.sampled_from([0.0, 0.2]), st.sampled_from([1, 2]), st.integers(1, 3))
def test_window_invariants_hold_and_no_group_expires(rollout, seed, fails, engines, turns):
  """I1, I2 and I3 under random durations, filters, aborts and failures."""
  world = World(rollout, seed=seed, fails=fails, engines=engines, turns=turns, capacity=6)
  for _ in range(6):
    groups = world.step()
    assert [g.number for g in groups] == sorted(g.number for g in groups)
    assert all(len(trained_on(g.trajectories)) == rollout.group for g in groups)
  assert max(world.ages) <= math.ceil(rollout.async_ratio)
  assert world.scheduler.counts['expired'] == world.scheduler.counts['surplus'] == 0
  numbers = [number for _, number, _ in world.consumed]
  assert len(set(numbers)) == len(numbers) == 6 * rollout.prompts
  if rollout.async_ratio % 1:
    for version in range(6):
      oldest = sum(v == version and v - s == math.ceil(rollout.async_ratio) for v, _, s in world.consumed)
      assert oldest <= round(rollout.prompts * (rollout.async_ratio % 1))


@settings(max_examples=25)
@given(redundant, st.integers(0, 1000), st.sampled_from([0.0, 0.2]), st.sampled_from([1, 2]), st.integers(1, 3))
def test_redundant_rollouts_stay_in_the_window(rollout, seed, fails, engines, turns):
  world = World(rollout, seed=seed, fails=fails, engines=engines, turns=turns, capacity=8)
  for _ in range(5):
    assert all(len(trained_on(g.trajectories)) == rollout.group for g in world.step())
  assert max(world.ages) <= rollout.async_ratio
  assert len({number for _, number, _ in world.consumed}) == 5 * rollout.prompts


@settings(max_examples=30)
@given(rollouts | redundant, st.integers(0, 1000), st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=4))
def test_a_killed_run_loses_no_group_and_repeats_none(rollout, seed, ends):
  """A kill or a signal ends the run after a random number of turns.

  After a kill the next run has the state saved after the last update. A signal saves the state within a batch. In the surviving
  history each group is trained on once, or counted as filtered, failed, expired or surplus.
  """
  steps = 5
  saved, history = None, []
  for kill, signalled in [*ends, (10**9, False)]:
    world = World(rollout, seed=seed, fails=0.1, steps=steps)
    world.consumed = list(history)
    if saved is not None:
      world.scheduler.restore(saved)
    budget, pump = [kill], world.scheduler.pump

    def counted(budget=budget, pump=pump):
      budget[0] -= 1
      if budget[0] < 0:
        raise KeyboardInterrupt
      pump()

    world.scheduler.pump = counted
    try:
      while world.scheduler.window.version < steps:
        world.step()
        saved, history = world.scheduler.state(), list(world.consumed)
    except KeyboardInterrupt:
      if signalled and len(world.consumed) == len(history):
        saved = world.scheduler.state()
      continue
    break
  numbers = [number for _, number, _ in history]
  assert len(numbers) == len(set(numbers)) == steps * rollout.prompts
  counts = world.scheduler.counts
  ever = set(range(world.scheduler.next))
  missing = ever - set(numbers) - set(world.scheduler.state()['live'])
  assert len(missing) == sum(counts[fate] for fate in ('filtered', 'failed', 'expired', 'surplus'))
  assert max(v - s for v, _, s in history) <= math.ceil(rollout.async_ratio)


@pytest.mark.parametrize('alpha', [0.0, 1.0, 2.0, 4.0])
@pytest.mark.parametrize('order', ['start', 'deadline'])
def test_the_oldest_group_reaches_the_window_and_no_more(alpha, order):
  world = World(Rollout(prompts=4, group=2, async_ratio=alpha, order=order), capacity=4, sigma=1.5)
  for _ in range(30):
    world.step(train=4.0)
  assert max(world.ages) == alpha
  assert world.scheduler.counts['expired'] == 0


def test_a_fractional_alpha_makes_whole_groups():
  """In floating point 0.3 of 10 prompts is 2.9999999999999982 groups, and 1.1 of 50 is 55.00000000000001."""
  for alpha, prompts in ((0.3, 10), (0.2, 5), (1.1, 10), (1.1, 50)):
    for order in ('start', 'deadline'):
      world = World(Rollout(prompts=prompts, group=1, async_ratio=alpha, order=order), capacity=16)
      oldest = []  # groups of each step that are as old as the window allows
      for version in range(5):
        world.step(train=4.0)
        oldest.append(sum(v == version and v - s == math.ceil(alpha) for v, _, s in world.consumed))
      assert max(oldest) == round(prompts * (alpha % 1))


def test_order_completion_must_drop_expired_groups(monkeypatch):
  """If the scheduler drops no groups, some become older than the window."""
  rollout = Rollout(prompts=4, group=1, async_ratio=1.0, order='completion', sync='keep')
  world = World(rollout, capacity=8, sigma=2.0)
  for _ in range(60):
    world.step(train=0.5)
  assert max(world.ages) <= 1
  assert world.scheduler.counts['expired'] > 0
  free = World(rollout, capacity=8, sigma=2.0)
  monkeypatch.setattr(free.scheduler.window, 'expired', list)
  for _ in range(60):
    free.step(train=0.5)
  assert max(free.ages) > 1


def test_missing_refunds_end_the_run(monkeypatch):
  world = World(Rollout(prompts=4, group=2, equal_groups='replace', async_ratio=1.0), capacity=16)
  window = world.scheduler.window
  monkeypatch.setattr(window, 'refund', lambda number: window.running.pop(number, None) or window.complete.pop(number))

  def train(steps=20):
    for _ in range(steps):
      world.scheduler.batch()
      world.scheduler.sync([None])

  with pytest.raises(Stalled, match='refunded 0'):
    train()


def test_no_more_groups_start_than_the_run_needs():
  world = World(Rollout(prompts=4, group=2, async_ratio=2.0), steps=5, capacity=64)
  for _ in range(5):
    world.step()
  assert world.scheduler.counts['started'] == 20
  assert world.scheduler.idle


def test_redundant_groups_end_with_the_last_batch():
  settings = Rollout(prompts=4, group=2, async_ratio=1.0, order='completion', extra_prompts=3)
  world = World(settings, steps=5, capacity=64)
  for _ in range(5):
    world.step()
  counts = world.scheduler.counts
  assert (counts['consumed'], counts['started'] - counts['surplus']) == (20, 20)
  assert world.scheduler.idle
