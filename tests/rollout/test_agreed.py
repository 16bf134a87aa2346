"""Schedulers of several processes do the same, whatever the first one's clock, engines and workers do."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from teams import together

from sprl.rollout.agreed import AgreedEngine, AgreedProblems, AgreedSource, AgreedWorkers
from sprl.rollout.episodes import answered
from sprl.rollout.scheduler import Failure, Scheduler
from sprl.rollout.sources import prompts
from sprl.settings import Rollout, Task
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.problems import Problems, Share
from sprl.tasks.prompts import PromptStream
from sprl.trajectory import Completion


class ChunkEngine:
  """A request takes 1 to 4 chunks, by its uid; a chunk is over when `over` says so, and everything asked of it is noted."""

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

  def swap(self, served, version):
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
    return Completion(request, ints, np.zeros(n, np.float32), np.full(n, self.version, np.int32), ints, finish)


class Graders:
  """Answers come when it pleases them; every seventh sample fails once."""

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
    uid, attempt = call
    return Failure('error', 'at first') if uid % 7 == 3 and attempt == 0 else SimpleNamespace(score=uid % 2, status='ok')

  def wait(self, seconds):
    time.sleep(0)


def NEVER():
  """Nobody but the first process may look whether a chunk is over."""
  raise AssertionError('asked')


def controller(seed):
  """A process's part of four steps that run ahead; everything that its engines were asked, and what each update took."""

  def program(team):
    rng = np.random.default_rng(seed)
    engines = [ChunkEngine((lambda: rng.random() < 0.3) if team.leads else NEVER) for _ in range(2)]
    workers = AgreedWorkers(Graders(rng) if team.leads else None, team)
    rows = ({'id': str(i), 'prompt': f'{i}?', 'answer': ''} for i in range(7))
    stream = PromptStream(AgreedProblems(Problems(Task(), Share(rows, team.process, team.processes)), team), seed)

    def source(number):
      assert stream.at(number).id == str(stream.index(number))
      return lambda uid, attempt: answered(np.array([number]), 8, lambda completion: (uid, attempt))

    settings = Rollout(prompts=3, group=2, async_ratio=1.0, extra_members=1)
    agreed = [AgreedEngine(engine, team) for engine in engines]
    scheduler = Scheduler(agreed, workers, source, settings, time.perf_counter, groups=12)
    taken = []
    for _ in range(4):
      groups = scheduler.batch()
      assert groups is not None
      taken.append([(g.number, g.start_version, [(t.uid, t.reward) for t in g.trajectories]) for g in groups])
      scheduler.sync([None, None])
    return taken, [engine.log for engine in engines], dict(scheduler.counts)

  return program


@pytest.mark.parametrize('seed', range(3))
def test_all_processes_do_what_the_first_one_finds(seed):
  first, *others = together(*[controller(seed)] * 3)
  assert not isinstance(first, Exception), first
  taken, logs, counts = first
  assert [number for groups in taken for number, *_ in groups] == list(range(12))
  assert counts['errors'] > 0
  assert all(len(log) > 10 for log in logs)
  assert others == [first, first]


def test_what_it_finds_is_not_the_same_each_time():
  (one,), (other,) = together(controller(0)), together(controller(1))
  assert one[1] != other[1]


def test_a_problem_is_told_by_the_process_that_holds_it():
  """One that fetches from its rows alone; and what it tells is whole."""
  fetched = []

  class Noted(Share):
    def __getitem__(self, index):
      fetched.append((index, index % 3))
      return super().__getitem__(index)

  def program(team):
    rows = ({'id': str(i), 'prompt': f'{i}?', 'answer': str(i), 'extra': {'solution': f'{team.process}'}} for i in range(8))
    problems = AgreedProblems(Problems(Task(), Noted(rows, team.process, team.processes)), team)
    return [(p.id, p.answer, p.extra['solution']) for p in (problems[i] for i in (5, 0, 7, 5))]

  told = [('5', '5', '2'), ('0', '0', '0'), ('7', '7', '1'), ('5', '5', '2')]
  assert together(program, program, program) == [told] * 3
  assert fetched == [(5, 2), (0, 0), (7, 1), (5, 2)]


def test_what_an_environment_says_first_process_0_tells():
  """Also that it fails, and where nothing else is to be had all fail."""

  class Environments:
    def __init__(self, process):
      self.process = process

    def prompt(self, number):
      if self.process or number == 3 or number > 5:
        raise EnvironmentFault('no lake today')
      return np.array([number])

  def first(team, number):
    return [ids.tolist() for ids in prompts(AgreedSource(Environments(team.process), team), number, 2)]

  assert together(*[lambda team: first(team, 2)] * 2) == [[[2], [4]]] * 2
  assert [str(fault) for fault in together(*[lambda team: first(team, 6)] * 2)] == ['no lake today'] * 2
