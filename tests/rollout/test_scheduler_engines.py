"""How the scheduler uses engines: which engine takes a request, what a sync and a stop do to it, and what waits for what."""

import numpy as np
import pytest
from scheduler_world import TOKENS, World
from simulation import Episodes

from sprl.config import Rollout
from sprl.rollout.episodes import Generate, Work
from sprl.tasks.grader_pool import Grade
from sprl.tasks.worker_pool import Failure
from sprl.types import NOTHING, Trajectory

pytestmark = pytest.mark.usefixtures('unchecked')


def test_interrupted_requests_become_one_trajectory():
  """With `recompute` each sync aborts the running requests. Each token of the trajectory has the version that drew it."""
  world = World(Rollout(prompts=2, group=2, async_ratio=2.0), capacity=4, sigma=0.8, chunk=0.1)
  mixed = 0
  for _ in range(12):
    for group in world.step(train=0.3):
      for t in group.trajectories:
        written = t.version[t.mask]
        assert len(written) == TOKENS
        np.testing.assert_array_equal(t.tokens[1:], (t.uid * 31 + np.arange(1, TOKENS + 1)) % 1000)
        assert np.all(np.diff(written) >= 0)
        assert written[0] >= t.start_version
        mixed += written[0] != written[-1]
  assert mixed > 0
  assert world.scheduler.counts['resumed_tokens'] > 0


def test_a_signal_ends_a_drain():
  """Requests that the engines have left are aborted, and queued again with the tokens that they have drawn."""
  world = World(Rollout(prompts=2, group=2, async_ratio=2.0, sync='drain'), capacity=12, sigma=2.0, chunk=0.01)
  world.scheduler.batch()
  assert world.scheduler._dispatcher.load > 0
  begun = world.clock()
  world.scheduler.quiesce(lambda: world.clock() > begun + 0.1)
  assert world.clock() < begun + 0.2
  assert world.scheduler._dispatcher.load == 0
  assert world.scheduler.counts['aborted_tokens'] == 0  # none is lost
  assert world.scheduler._dispatcher.waiting
  assert len(world.scheduler.batch()) == 2


def test_drain_waits_for_running_requests_and_keep_does_not():
  for sync in ('drain', 'keep'):
    world = World(Rollout(prompts=2, group=2, async_ratio=2.0, sync=sync), capacity=4, chunk=0.1)
    (engine,), running = world.engines, []
    engine.swap = lambda *new, engine=engine, swap=engine.swap, running=running: (running.append(engine.load), swap(*new))
    for _ in range(8):
      world.step(train=0.2)
    assert world.scheduler.counts['resumed_tokens'] == 0
    assert len(running) == 8
    assert (max(running) > 0) == (sync == 'keep')


def test_members_of_a_group_go_to_one_engine():
  world = World(Rollout(prompts=4, group=4), capacity=8, engines=2)
  homes: dict[int, set[int]] = {}
  for i, engine in enumerate(world.engines):
    add = engine.add
    engine.add = lambda r, i=i, add=add: (homes.setdefault(r.group, set()).add(i), add(r))
  world.step()
  assert {len(home) for home in homes.values()} == {1}
  assert set.union(*homes.values()) == {0, 1}


def test_a_group_does_not_wait_for_its_engine_while_another_has_free_rows():
  """8 groups of 8 on 2 x 4 rows take as long as list scheduling of single members on 8 rows."""
  world = World(Rollout(prompts=8, group=8), capacity=4, engines=2, sigma=1.5, grading=0.0, chunk=0.05)
  world.step(train=0.0)
  free = [0.0] * 8
  for uid in range(64):
    free[free.index(min(free))] += world.draw(2, uid, 0).lognormal(0, 1.5) + 0.025  # the host sees the end half a chunk later
  assert world.clock() == pytest.approx(max(free), rel=0.1)


def test_a_group_without_replication_holds_its_rows():
  """Without prompt replication four samples occupy four rows until the longest ends."""
  times = {}
  for replicate in (True, False):
    world = World(Rollout(prompts=8, group=4, replicate_prompts=replicate), capacity=8, sigma=1.5, grading=0.0)
    world.step(train=0.0)
    times[replicate] = world.clock()
    durations = np.array([[world.draw(2, g * 4 + k, 0).lognormal(0, 1.5) for k in range(4)] for g in range(8)])
    if not replicate:  # two times four rows; a group takes as long as its longest member
      free = [0.0, 0.0]
      for longest in durations.max(axis=1):
        free[free.index(min(free))] += longest
      assert times[replicate] == pytest.approx(max(free))
    else:  # eight rows; list scheduling in order
      free = [0.0] * 8
      for each in durations.ravel():
        free[free.index(min(free))] += each
      assert times[replicate] == pytest.approx(max(free))
  assert times[True] < times[False]


def test_no_more_environments_start_than_the_engines_have_rows_for():
  """A group's age counts from its start. So a group does not start if its first request has to wait long."""

  def episode(number, uid, attempt):
    yield Work((uid, attempt))  # the first observation
    completion = yield Generate(np.array([1]), NOTHING, TOKENS)
    return Trajectory.of(completion, reward=1.0)

  world = World(Rollout(prompts=8, group=4, async_ratio=2.0), capacity=8)
  world.scheduler.source = Episodes(episode)
  world.scheduler.pump()
  assert world.scheduler.counts['started'] == 2
  assert len(world.scheduler.batch()) == 8


def test_a_slow_engine_does_not_delay_the_others():
  """An engine may be in a long chunk, such as a prefill."""
  world = World(Rollout(prompts=20, group=1, async_ratio=0.0), capacity=1, engines=2)
  for engine, seconds in zip(world.engines, (10.0, 0.5)):
    engine.steps, engine.chunk = (lambda r, seconds=seconds: seconds), seconds
  assert len(world.scheduler.batch()) == 20
  assert world.clock() == pytest.approx(10.0, abs=0.6)  # meanwhile the other engine completes the other 19


def test_engines_continue_while_graders_are_slow():
  """The next group's requests run while grades are awaited."""
  world = World(Rollout(prompts=1, group=1, async_ratio=1.0), capacity=1, grading=50.0)
  for _ in range(5):
    world.step(train=0.0)
  generated = sum(world.draw(2, uid, 0).lognormal(0, 1.0) for uid in range(5))
  marking = [50.0 * world.draw(1, uid, 0).random() for uid in range(5)]
  assert world.clock() < sum(marking) + generated


def test_requests_may_be_stopped_within_a_chunk():
  """A group is complete with a member on one engine while its redundant member is in a chunk of the other."""
  world = World(Rollout(prompts=1, group=1, extra_members=1), capacity=1, engines=2)
  for engine, seconds in zip(world.engines, (10.0, 0.5)):
    engine.steps, engine.chunk = (lambda r, seconds=seconds: seconds), seconds
  (group,) = world.scheduler.batch()
  assert [t.uid for t in group.trajectories] == [1]
  assert world.clock() < 2.0
  assert world.engines[0].load == 0
  assert world.scheduler.counts['aborted_tokens'] > 0


def test_stopped_requests_in_the_queue_count_as_no_work():
  """Redundant members that never reached an engine leave nothing to do: another turn would raise Stalled."""
  world = World(Rollout(prompts=1, group=1, extra_members=2), capacity=1, grading=0.0)
  for _ in range(3):
    world.scheduler.batch()
    assert world.scheduler._dispatcher.queued
    assert world.scheduler.idle
    world.scheduler.sync([None])
    assert not world.scheduler.idle


def test_batch_returns_early_when_stopped():
  world = World(Rollout(prompts=4, group=2), capacity=2)
  turns = iter([False, False, True])
  assert world.scheduler.batch(lambda: next(turns)) is None
  assert set(world.scheduler.state()['live']) == set(world.scheduler._groups)


def test_no_two_requests_of_a_member_draw_with_the_same_random_numbers():
  """(uid, attempt) of a request is the key of its random numbers: every branch of every attempt has its own."""
  world, asked = World(Rollout(prompts=1, group=1), retries=2), []

  def branching(number, uid, attempt):
    for branch in range(3):
      completion = yield Generate(np.array([7]), NOTHING, TOKENS, branch=branch)
      asked.append((completion.request.uid, completion.request.attempt))
    return Trajectory.of(completion, reward=(yield Work((uid, attempt))).score)

  world.scheduler.source = Episodes(branching)
  world.workers._result = lambda call: Failure('error', 'x') if call[1] < 2 else Grade(1.0, 'ok')
  world.step()
  assert len(set(asked)) == len(asked) == 9  # three branches of three attempts
