"""The schedulers of several processes take the same decisions for any clock, engines and workers of process 0."""

import time

import numpy as np
import pytest
from simulation import Episodes
from teams import together

from sprl.config import Rollout, Task
from sprl.distributed.team import ALONE
from sprl.rollout.broadcast import BroadcastEngine, BroadcastProblems, BroadcastSource, BroadcastWorkers, across
from sprl.rollout.episodes import answered, compared
from sprl.rollout.prompts import prompts
from sprl.rollout.scheduler import Scheduler
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.grader_pool import Grade
from sprl.tasks.problems import Problems, Share
from sprl.tasks.prompts import PromptStream
from sprl.tasks.worker_pool import Failure
from sprl.types import Completion


class ChunkEngine:
  """An engine that records its calls. A request takes 1 to 4 chunks, by its uid. A chunk is over when `over()` is true."""

  def __init__(self, over, capacity=4):
    self.over, self.capacity, self.log = over, capacity, []
    self.waiting, self.running, self.version = [], {}, 0

  @property
  def load(self):
    return len(self.waiting) + len(self.running)

  def add(self, request):
    self.log.append(('add', request.uid, request.attempt))
    self.waiting.append(request)

  def abort(self, uids=None):
    gone = [r for r in [*self.waiting, *(r for r, _ in self.running.values())] if uids is None or r.uid in uids]
    self.log.append(('abort', [r.uid for r in gone]))
    self.waiting = [r for r in self.waiting if r not in gone]
    self.running = {uid: entry for uid, entry in self.running.items() if entry[0] not in gone}
    return [self.drawn(r, 0, 'abort') for r in gone]

  def forget(self, uids=None):
    self.log.append(('forget', uids))

  def swap(self, weights, version):
    self.version = version

  def dispatch(self):
    while self.waiting and len(self.running) < self.capacity:
      request = self.waiting.pop(0)
      self.running[request.uid] = request, 1 + request.uid % 4
    self.log.append(('dispatch', sorted(self.running)))

  @property
  def ready(self):
    return self.over()

  def wait(self, seconds):
    assert self.over is not NEVER

  def collect(self):
    self.running = {uid: (request, left - 1) for uid, (request, left) in self.running.items()}
    ended = [request for request, left in self.running.values() if left == 0]
    self.running = {uid: entry for uid, entry in self.running.items() if entry[1] > 0}
    self.log.append(('ended', [request.uid for request in ended]))
    return [self.drawn(request, 3, 'stop') for request in ended]

  def drawn(self, request, n, finish):
    ints = np.full(n, request.uid % 7, np.int32)
    logp, version = np.zeros(n, np.float32), np.full(n, self.version, np.int32)
    return Completion(request=request, tokens=ints, logp=logp, version=version, attended=ints, finish=finish)


class Graders:
  """Workers that answer at random times. Every seventh sample fails once."""

  def __init__(self, rng):
    self.rng, self.open, self.next = rng, {}, 100

  def submit(self, call):
    self.next += 3
    self.open[self.next] = call
    return self.next

  def cancel(self, ticket):
    self.open.pop(ticket)

  def poll(self, wanted):
    done = [ticket for ticket in self.rng.permutation(list(self.open)) if ticket in wanted and self.rng.random() < 0.3]
    return {int(ticket): self.grade(self.open.pop(ticket)) for ticket in done}

  def grade(self, call):
    if isinstance(call, list):  # of a group
      return [Grade(10.0 * (uid == max(call)), 'ok') for uid in call]
    uid, attempt = call
    return Failure('error', 'at first') if uid % 7 == 3 and attempt == 0 else Grade(uid % 2, 'ok')

  def wait(self, seconds):
    time.sleep(0)


def NEVER():
  """Raise an error: only process 0 may ask whether a chunk is over."""
  raise AssertionError('asked')


def four_steps(seed, members='first'):
  """Return a program of four steps. It returns (groups of each update, calls of the engines, counts of the scheduler)."""

  def program(team):
    rng = np.random.default_rng(seed)
    engines = [ChunkEngine((lambda: rng.random() < 0.3) if team.leads else NEVER) for _ in range(2)]
    workers = BroadcastWorkers(Graders(rng) if team.leads else None, team)
    rows = ({'id': str(i), 'prompt': f'{i}?', 'answer': ''} for i in range(7))
    stream = PromptStream(BroadcastProblems(Problems(Task(), Share(rows, team.process, team.processes)), team), seed)

    def episode(number, uid, attempt):
      assert stream.at(number).id == str(stream.index(number))
      return answered(np.array([number]), 8, lambda completion: (uid, attempt))

    def comparison(number, trajectories):
      return compared(trajectories, [t.uid for t in trajectories], [])

    settings = Rollout(prompts=3, group=2, async_ratio=1.0, extra_members=1, members=members)
    wrapped = [BroadcastEngine(engine, team) for engine in engines]
    scheduler = Scheduler(wrapped, workers, Episodes(episode, comparison), settings, time.perf_counter, groups=12)
    taken = []
    for _ in range(4):
      groups = scheduler.batch()
      assert groups is not None
      taken.append([(g.number, g.start_version, [(t.uid, t.reward, t.withheld) for t in g.trajectories]) for g in groups])
      scheduler.sync([None, None])
    return taken, [engine.log for engine in engines], dict(scheduler.counts)

  return program


@pytest.mark.parametrize('members', ['first', 'all'])
def test_all_processes_take_the_same_decisions(members):
  first, *others = together(*[four_steps(0, members)] * 3)
  assert not isinstance(first, Exception), first
  taken, logs, counts = first
  assert [number for groups in taken for number, *_ in groups] == list(range(12))
  assert counts['errors'] > 0
  for _, _, members_of in (group for groups in taken for group in groups):
    uids = [uid for uid, *_ in members_of]
    assert [reward for _, reward, _ in members_of] == [uid % 2 + 10 * (uid == max(uids)) for uid in uids]
  assert all(len(log) > 10 for log in logs)
  assert others == [first, first]
  (other,) = together(four_steps(1, members))
  assert other[1] != first[1]  # another seed leads to other decisions


def test_one_process_has_no_wrapper():
  problems = [object()]
  assert across(ALONE, BroadcastProblems, problems) is problems


def test_a_problem_comes_from_the_process_that_holds_it():
  fetched = []

  class RecordingShare(Share):
    def __getitem__(self, index):
      fetched.append((index, index % 3))
      return super().__getitem__(index)

  def program(team):
    rows = ({'id': str(i), 'prompt': f'{i}?', 'answer': str(i), 'extra': {'solution': f'{team.process}'}} for i in range(8))
    problems = BroadcastProblems(Problems(Task(), RecordingShare(rows, team.process, team.processes)), team)
    return [(p.id, p.answer, p.extra['solution']) for p in (problems[i] for i in (5, 0, 7, 5))]

  told = [('5', '5', '2'), ('0', '0', '0'), ('7', '7', '1'), ('5', '5', '2')]
  assert together(program, program, program) == [told] * 3
  assert fetched == [(5, 2), (0, 0), (7, 1), (5, 2)]


def test_first_observations_and_their_faults_come_from_process_0():
  class Environments:
    def __init__(self, process):
      self.process = process

    def prompt(self, number):
      if self.process or number == 3 or number > 5:
        raise EnvironmentFault('no lake today')
      return np.array([number])

  def first(team, number):
    return [ids.tolist() for ids in prompts(BroadcastSource(Environments(team.process), team), number, 2)]

  assert together(*[lambda team: first(team, 2)] * 2) == [[[2], [4]]] * 2
  assert [str(fault) for fault in together(*[lambda team: first(team, 6)] * 2)] == ['no lake today'] * 2
