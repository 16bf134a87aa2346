"""A scheduler in a simulated cluster, for the tests of the scheduler.

Durations, failures, filters and aborts are random. Engines and workers only take time (benchmarks/simulation.py). The checks
count the groups that the scheduler returns, and do not rely on its own counters alone.
"""

from collections import Counter

import numpy as np
from simulation import Clock, Episodes, SimulatedEngine, SimulatedWorkers

from sprl.rollout.episodes import Generate, Work, answered
from sprl.rollout.scheduler import RETRIES, Scheduler
from sprl.tasks.grader_pool import Grade
from sprl.tasks.worker_pool import Failure
from sprl.types import NOTHING, Trajectory

TOKENS = 100


class World:
  """A scheduler in a simulated cluster, and a record of the groups that it returned.

  Durations are log-normal by (uid, attempt). Rewards are random by uid. A share of the gradings fails or hangs.
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
      return Failure('timeout' if uid % 2 else 'error', f'call {"abc"[uid % 3]}')
    return Grade(float(self.draw(4, uid).integers(0, 2)), 'ok')

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
    """Assert I1 and I2, and that every group is accounted for."""
    w, r = self.scheduler.window, self.rollout
    ahead = round(r.async_ratio * r.prompts)
    assert w.started - w.refunded <= (w.version + 1) * r.prompts + ahead + r.extra_prompts
    assert w.live <= r.prompts + ahead + r.extra_prompts
    assert len(w.running) + len(w.complete) + w.consumed + w.refunded == w.started
    assert sum(e.load for e in self.engines) <= sum(e.capacity for e in self.engines)
    assert w.consumed == len(self.consumed)
    counts = self.scheduler.counts
    fates = sum(counts[fate] for fate in ('consumed', 'filtered', 'failed', 'expired', 'surplus'))
    assert counts['started'] == fates + len({*self.scheduler._groups, *self.scheduler._again})

  def step(self, train=1.0):
    """Run one step of the controller: batch, training while rollouts continue, sync. Return the groups of the batch."""
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
