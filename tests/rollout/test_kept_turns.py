"""The scheduler and kept caches: turns go to the engine that has their cache, and caches are dropped when they are of no use."""

from collections import Counter

import numpy as np
import pytest
from scheduler_world import World
from simulation import SimulatedEngine

from sprl.config import Rollout
from sprl.rollout.episodes import Generate, Work
from sprl.types import NOTHING, Trajectory

pytestmark = pytest.mark.usefixtures('unchecked')

TURNS = 3


class KeepingEngine(SimulatedEngine):
  """A simulated engine that knows which caches it would keep, and counts the turns that find theirs."""

  def begin(self):
    self.held, self.turns = set(), Counter()
    return self

  def add(self, request):
    if request.continues is not None:
      self.turns['hit' if request.continues in self.held else 'miss'] += 1
      self.held.discard(request.continues)
    super().add(request)

  def collect(self):
    ended = super().collect()
    self.held |= {c.request.key for c in ended if c.request.keep}
    return ended

  def forget(self, uids=None):
    self.held = {key for key in self.held if uids is not None and key[0] not in uids}


def world_of(rollout, **settings):
  """Return a world of conversations whose engines keep caches."""
  world = World(rollout, turns=TURNS, **settings)
  world.engines[:] = [KeepingEngine(world.clock, e.capacity, e.steps, e.chunk).begin() for e in world.engines]

  def talk(number):
    given, reward = NOTHING, 0.0
    for turn in range(1, TURNS + 1):
      completion = yield Generate(np.array([number % 97]), given, 30, keep=turn < TURNS)
      reward += (yield Work((completion.request.uid, completion.request.attempt))).score / TURNS
      given = np.concatenate([given, completion.tokens, [7]]).astype(np.int32)
    return Trajectory.of(completion, reward=reward)

  world.talk = talk
  return world


def turns(world):
  return sum((engine.turns for engine in world.engines), Counter())


def test_every_later_turn_goes_to_the_engine_with_its_cache():
  world = world_of(Rollout(prompts=4, group=3), capacity=12, engines=2, chunk=0.1)
  for _ in range(3):
    world.step()
  assert turns(world) == {'hit': 3 * 12 * (TURNS - 1)}
  assert all(engine.turns for engine in world.engines)


def test_a_turn_goes_to_another_engine_if_its_own_has_no_row():
  """Its cache is dropped there, so no engine keeps a cache that no request will find."""
  world = world_of(Rollout(prompts=8, group=4), capacity=3, engines=2, chunk=0.1)
  world.step()
  found = turns(world)
  assert found['hit'] > found['miss'] > 0
  assert found.total() == 32 * (TURNS - 1)
  assert not any(engine.held for engine in world.engines)


@pytest.mark.parametrize('seed', range(6))
def test_no_cache_is_kept_of_a_member_that_is_stopped_while_its_turn_is_queued(seed):
  rollout = Rollout(prompts=4, group=2, extra_members=2, extra_prompts=1, order='completion', async_ratio=1.0, sync='keep')
  world = world_of(rollout, capacity=3, engines=2, chunk=0.1, seed=seed)
  for _ in range(4):
    world.step()
    alive = {member.uid for group in world.scheduler._groups.values() for member in group.members if member.result is None}
    assert {uid for engine in world.engines for uid, _ in engine.held} <= alive


@pytest.mark.parametrize('fails', [0.0, 0.3])
def test_no_cache_is_kept_of_an_episode_that_ended(fails):
  """Episodes end with their last turn, are stopped because others of their group finished, or fail and start again."""
  world = world_of(Rollout(prompts=3, group=3, extra_members=1), capacity=6, chunk=0.1, fails=fails)
  for _ in range(4):
    world.step()
    assert not world.scheduler._groups
    assert not any(engine.held for engine in world.engines)
  assert (world.scheduler.counts['errors'] > 0) == (fails > 0)


def test_no_cache_is_kept_of_another_branch_of_an_episode_that_ended():
  world = world_of(Rollout(prompts=2, group=2, sync='keep'), capacity=4, chunk=0.1)

  def talk(number):
    for branch, keep in ((0, True), (1, False)):  # the limit of turns ends the episode on its second branch
      completion = yield Generate(np.array([number % 97]), NOTHING, 30, keep=keep, branch=branch)
    return Trajectory.of(completion, reward=1.0)

  world.talk = talk
  world.step()
  assert not any(engine.held for engine in world.engines)


@pytest.mark.parametrize('sync', ['recompute', 'drain', 'keep'])
def test_new_weights_drop_kept_caches_unless_caches_are_kept(sync):
  world = world_of(Rollout(prompts=2, group=2, async_ratio=2.0, sync=sync), capacity=4, chunk=0.1, grading=2.0)
  held = Counter()
  for engine in world.engines:
    engine.swap = lambda *new, engine=engine, swap=engine.swap: (held.update(swap=1, kept=len(engine.held)), swap(*new))
  for _ in range(8):
    world.step(train=0.2)
  assert held['swap'] == 8
  assert (held['kept'] > 0) == (sync == 'keep')
  assert (turns(world)['miss'] > 0) == (sync != 'keep')
