"""The scheduler on a virtual clock: the window's invariants hold, no group is lost, nothing deadlocks.

Durations, failures, filters and aborts are drawn at random. Engines and workers only take time (benchmarks/simulation.py). The
checks count groups as the scheduler hands them over; they do not rely on its own counters alone.
"""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Clock, Episodes, SimulatedEngine, SimulatedWorkers

from sprl.config import Rollout
from sprl.rollout.episodes import Generate, Work, answered
from sprl.rollout.scheduler import RETRIES, Scheduler, Stalled
from sprl.tasks.worker_pool import Failure
from sprl.types import NOTHING, Trajectory

TOKENS = 100

pytestmark = pytest.mark.usefixtures('unchecked')


class World:
  """A scheduler in a simulated cluster, and a record of the groups that it handed over.

  Durations are log-normal by (uid, attempt), rewards random by uid, and a share of the gradings fails or hangs.
  """

  def __init__(
    self,
    rollout,
    capacity=8,
    engines=1,
    seed=0,
    fails=0.0,
    steps=None,
    chunk=0.0,
    sigma=1.0,
    turns=1,
    grading=0.5,
    retries=RETRIES,
  ):
    self.clock, self.rollout, self.turns = Clock(), rollout, turns
    self.draw = lambda *key: np.random.default_rng([seed, *map(int, key)])
    self.fails, self.attempts = fails, Counter()
    self.workers = SimulatedWorkers(self.clock, lambda call: grading * self.draw(1, call[0], call[1]).random(), self.result)
    self.engines = [
      SimulatedEngine(
        self.clock,
        capacity,
        lambda r: self.draw(2, r.uid, r.attempt).lognormal(0, sigma),
        chunk or (engines > 1) * 0.25,
      )
      for _ in range(engines)
    ]
    groups = None if steps is None else steps * rollout.prompts
    self.scheduler = Scheduler(self.engines, self.workers, Episodes(self.episode), rollout, self.clock, groups, retries=retries)
    self.consumed: list[tuple[int, int, int]] = []  # (version at the update, number, version at the start)

  def result(self, call):
    uid, attempt = call
    if self.draw(3, uid, attempt).random() < self.fails:
      return Failure('timeout' if uid % 2 else 'error', f'call {uid % 3}')
    return SimpleNamespace(score=float(self.draw(4, uid).integers(0, 2)), status='ok')

  def episode(self, number, uid, attempt):
    if self.turns == 1:
      return answered(np.array([number % 97]), TOKENS, lambda c: (c.request.uid, c.request.attempt))
    return self.talk(number)

  def talk(self, number):
    given, reward = NOTHING, 0.0
    for _ in range(self.turns):
      completion = yield Generate(np.array([number % 97]), given, TOKENS)
      reward += (yield Work((completion.request.uid, completion.request.attempt))).score / self.turns
      given = np.concatenate([given, completion.tokens, [7]]).astype(np.int32)
    return Trajectory.of(completion, reward=reward)

  def check(self):
    """Checks I1 and I2, and that every group is accounted for."""
    w, r = self.scheduler.window, self.rollout
    ahead = round(r.async_ratio * r.prompts)
    assert w.started - w.refunded <= (w.version + 1) * r.prompts + ahead + r.extra_prompts
    assert w.live <= r.prompts + ahead + r.extra_prompts
    assert len(w.running) + len(w.complete) + w.consumed + w.refunded == w.started
    assert sum(e.load for e in self.engines) <= sum(e.capacity for e in self.engines)
    assert w.consumed == len(self.consumed)
    counts = self.scheduler.counts
    fates = sum(counts[fate] for fate in ('consumed', 'filtered', 'failed', 'expired', 'surplus'))
    assert counts['started'] == fates + len(self.scheduler._groups)

  def step(self, train=1.0):
    """Takes one step of the controller: batch, train while rollouts continue, sync."""
    w = self.scheduler.window
    while w.ready() is None:
      self.scheduler.pump()
      self.check()
    groups = self.scheduler.batch()
    self.consumed += [(w.version, g.number, g.start_version) for g in groups]
    self.check()
    end = self.clock() + train
    while self.clock() < end and not self.scheduler.idle:
      self.scheduler.pump()
      self.check()
    self.clock.until(end)
    self.scheduler.sync([None] * len(self.engines))
    self.check()
    return groups

  @property
  def ages(self):
    return [version - started for version, _, started in self.consumed]


rollouts = st.builds(
  Rollout,
  prompts=st.sampled_from([1, 2, 4, 5, 10]),
  group=st.integers(1, 4),
  async_ratio=st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0, 1.1, 2.0, 4.0]),
  order=st.sampled_from(['start', 'deadline']),
  sync=st.sampled_from(['recompute', 'keep', 'drain']),
  extra_members=st.integers(0, 2),
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
  equal_groups=st.sampled_from(['train', 'replace']),
).filter(lambda r: (r.group > 1 or r.equal_groups == 'train') and (r.replicate_prompts or not r.async_ratio or r.group == 1))


@settings(max_examples=20, deadline=None)
@given(rollouts, st.integers(0, 1000), st.sampled_from([0.0, 0.2]), st.sampled_from([1, 2]), st.integers(1, 3))
def test_window_invariants_hold_and_no_group_expires(rollout, seed, fails, engines, turns):
  """I1, I2 and I3 under random durations, filters, aborts and failures."""
  world = World(rollout, seed=seed, fails=fails, engines=engines, turns=turns, capacity=6)
  for _ in range(6):
    groups = world.step()
    assert [g.number for g in groups] == sorted(g.number for g in groups)
    assert all(len(g.trajectories) == rollout.group for g in groups)
  assert max(world.ages) <= math.ceil(rollout.async_ratio)
  assert world.scheduler.counts['expired'] == world.scheduler.counts['surplus'] == 0
  numbers = [number for _, number, _ in world.consumed]
  assert len(set(numbers)) == len(numbers) == 6 * rollout.prompts
  if rollout.async_ratio % 1:
    for version in range(6):
      oldest = sum(v == version and v - s == math.ceil(rollout.async_ratio) for v, _, s in world.consumed)
      assert oldest <= round(rollout.prompts * (rollout.async_ratio % 1))


@pytest.mark.parametrize('alpha', [0.0, 1.0, 2.0, 4.0])
@pytest.mark.parametrize('order', ['start', 'deadline'])
def test_the_oldest_group_reaches_the_window_and_no_more(alpha, order):
  world = World(Rollout(prompts=4, group=2, async_ratio=alpha, order=order), capacity=4, sigma=1.5)
  for _ in range(30):
    world.step(train=4.0)
  assert max(world.ages) == alpha
  assert world.scheduler.counts['expired'] == 0


def test_order_completion_must_drop_expired_groups(monkeypatch):
  """Without the drops its groups become older than the window."""
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


def test_groups_of_equal_rewards_are_replaced_and_refunded():
  world = World(Rollout(prompts=4, group=2, equal_groups='replace'), capacity=16)
  for _ in range(5):
    for group in world.step():
      assert len({t.reward for t in group.trajectories}) == 2
  assert world.scheduler.window.refunded == world.scheduler.counts['filtered'] > 0


def test_a_filter_that_passes_nothing_ends_the_run():
  world = World(Rollout(prompts=2, group=2, equal_groups='replace'), capacity=16)
  world.workers._result = lambda call: SimpleNamespace(score=1.0, status='ok')
  with pytest.raises(Stalled, match=r"\d+ groups in a row were .*config\.rollout\.equal_groups = 'replace'"):
    world.step()


def test_graders_that_always_fail_end_the_run_with_their_reason():
  world = World(Rollout(prompts=2, group=2), retries=1, capacity=16, fails=1.0)
  with pytest.raises(Stalled, match=r'\d+ groups in a row were given up .* because call \d'):
    world.step()


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


def test_interrupted_requests_become_one_trajectory():
  """Under recompute each sync aborts what runs. Each token of the trajectory has the version that drew it."""
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


def test_no_more_groups_start_than_the_run_needs():
  world = World(Rollout(prompts=4, group=2, async_ratio=2.0), steps=5, capacity=64)
  for _ in range(5):
    world.step()
  assert world.scheduler.counts['started'] == 20
  assert world.scheduler.idle


@settings(max_examples=25, deadline=None)
@given(redundant, st.integers(0, 1000), st.sampled_from([0.0, 0.2]), st.sampled_from([1, 2]), st.integers(1, 3))
def test_redundant_rollouts_stay_in_the_window(rollout, seed, fails, engines, turns):
  world = World(rollout, seed=seed, fails=fails, engines=engines, turns=turns, capacity=8)
  for _ in range(5):
    assert all(len(g.trajectories) == rollout.group for g in world.step())
  assert max(world.ages) <= rollout.async_ratio
  assert len({number for _, number, _ in world.consumed}) == 5 * rollout.prompts


@settings(max_examples=30, deadline=None)
@given(rollouts | redundant, st.integers(0, 1000), st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=4))
def test_a_killed_run_loses_no_group_and_repeats_none(rollout, seed, ends):
  """A run ends after a random number of turns, by a kill or by a signal.

  After a kill the next run knows the state saved after the last update; a signal saves within a batch. In the surviving history
  each group was trained on once or has another fate.
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


def test_late_results_of_dropped_groups_are_ignored():
  """Completions of dropped groups, and of an attempt that was given up."""
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
  assert scheduler._dispatcher._members[uid] is member  # still waits, for the second
  scheduler._drop(member.group.number, 'expired')
  scheduler._completed(completion)
  world.check()
  assert uid not in scheduler._dispatcher._members


def test_losing_a_redundant_member_costs_nothing():
  world = World(Rollout(prompts=2, group=2, extra_members=1), retries=0, capacity=6)
  world.workers._result = lambda call: Failure('error', 'spare') if call[0] % 3 == 2 else SimpleNamespace(score=1.0, status='ok')
  world.workers._duration = lambda call: 0.0 if call[0] % 3 == 2 else 5.0  # it fails before the others are through
  for group in world.step():
    assert [t.uid % 3 for t in group.trajectories] == [0, 1]
  assert world.scheduler.counts['failed'] == 0
  assert world.scheduler.counts['errors'] == 2


def test_a_group_with_too_few_members_is_dropped():
  world = World(Rollout(prompts=1, group=2, extra_members=1), retries=0, capacity=3)
  world.workers._result = lambda call: Failure('error', 'x') if call[0] in (1, 2) else SimpleNamespace(score=1.0, status='ok')
  (group,) = world.step()
  assert group.number == 1
  assert world.scheduler.counts['failed'] == 1


def test_no_more_environments_begin_than_engines_have_room_for():
  """A group's age counts from its start, so no group starts whose first request would have to wait long."""

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
    engine.duration, engine.chunk = (lambda r, seconds=seconds: seconds), seconds
  assert len(world.scheduler.batch()) == 20
  assert world.clock() == pytest.approx(10.0, abs=0.6)  # meanwhile the other engine completes the other 19


def test_requests_may_be_stopped_within_a_chunk():
  """A group is complete with a member on one engine while its redundant member is in a chunk of the other."""
  world = World(Rollout(prompts=1, group=1, extra_members=1), capacity=1, engines=2)
  for engine, seconds in zip(world.engines, (10.0, 0.5)):
    engine.duration, engine.chunk = (lambda r, seconds=seconds: seconds), seconds
  (group,) = world.scheduler.batch()
  assert [t.uid for t in group.trajectories] == [1]
  assert world.clock() < 2.0
  assert world.engines[0].load == 0
  assert world.scheduler.counts['aborted_tokens'] > 0


def test_engines_continue_while_graders_are_slow():
  """The next group's requests run while grades are awaited."""
  world = World(Rollout(prompts=1, group=1, async_ratio=1.0), capacity=1, grading=50.0)
  for _ in range(5):
    world.step(train=0.0)
  generated = sum(world.draw(2, uid, 0).lognormal(0, 1.0) for uid in range(5))
  marking = [50.0 * world.draw(1, uid, 0).random() for uid in range(5)]
  assert world.clock() < sum(marking) + generated


def test_a_fractional_alpha_makes_whole_groups():
  """In floating point 0.3 of 10 prompts is 2.9999999999999982 groups, and 1.1 of 50 is 55.00000000000001."""
  for alpha, prompts in ((0.3, 10), (0.2, 5), (1.1, 10), (1.1, 50)):
    for order in ('start', 'deadline'):
      world = World(Rollout(prompts=prompts, group=1, async_ratio=alpha, order=order), capacity=16)
      for version in range(5):
        world.step(train=4.0)
        oldest = sum(v == version and v - s == math.ceil(alpha) for v, _, s in world.consumed)
        assert oldest <= round(prompts * (alpha % 1))


def test_a_group_does_not_wait_for_its_engine_while_another_has_room():
  """8 groups of 8 on 2 x 4 rows take as long as list scheduling on 8 rows, which knows no groups."""
  world = World(Rollout(prompts=8, group=8), capacity=4, engines=2, sigma=1.5, grading=0.0, chunk=0.05)
  world.step(train=0.0)
  free = [0.0] * 8
  for uid in range(64):
    free[free.index(min(free))] += world.draw(2, uid, 0).lognormal(0, 1.5) + 0.025  # half a chunk until it is seen to end
  assert world.clock() == pytest.approx(max(free), rel=0.1)


def test_equal_rewards_are_filtered_despite_rounding():
  assert np.std([0.1] * 6) > 0
  world = World(Rollout(prompts=1, group=6, equal_groups='replace'))
  assert world.scheduler._filtered([0.1] * 6)
  assert not world.scheduler._filtered([0.1] * 5 + [0.2])


def test_batch_returns_early_when_stopped():
  world = World(Rollout(prompts=4, group=2), capacity=2)
  turns = iter([False, False, True])
  assert world.scheduler.batch(lambda: next(turns)) is None
  assert set(world.scheduler.state()['live']) == set(world.scheduler._groups)


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
    assert 0 < metrics['async/length_started'] < TOKENS  # aborted requests count as far as they came


def test_stopped_requests_in_the_queue_are_no_work():
  """Redundant members that never reached an engine leave nothing to do: another turn would raise Stalled."""
  world = World(Rollout(prompts=1, group=1, extra_members=2), capacity=1, grading=0.0)
  for _ in range(3):
    world.scheduler.batch()
    assert world.scheduler._dispatcher.queued
    assert world.scheduler.idle
    world.scheduler.sync([None])
    assert not world.scheduler.idle
