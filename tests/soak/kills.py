"""Kills runs at random moments, starts them again until they are complete, and checks what they promise.

1. A variant runs once without interruption. Its marks tell which phases there are and how long each takes.
2. A run of the variant is started, and a moment is drawn: a phase, which of its next occurrences, and a delay. Then the kill
   comes. Every phase is as likely as every other, however short it is, so that late and brief ones are reached. Some kills come
   at any time instead.
3. The same command starts the run again, until a start ends before its moment comes, or MOST kills have come.
4. The complete run is compared with its promises (promises.py).
"""

import itertools
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import promises
from marks import START, Marks
from starts import GLANCE, Start, await_gone
from variants import GROUPS, MEMBERS, Variant

from sprl.distributed.watchdog import LOST

MOST = 12  # kills of one run, those of workers not counted
HANGS = 1200.0  # seconds after which a start counts as one that hangs
SOON = 60.0  # seconds within which the others end when one of several processes is killed, and workers when their run is
AT_ANY_TIME = 0.2  # share of the kills at a time that no phase decides
OF_WORKERS = 0.25  # a worker is killed within so much of the time of an uninterrupted run
NEXT = 3  # a kill comes in one of so many next occurrences of a phase of each step
AFTER_THE_END = 3  # kills of a run whose steps are all done
REFUSED = 'a worker cannot start: killed by SIGKILL'  # how a run ends whose worker was killed before the first step
EVERY_STEP = {'rollout', 'score', 'update', 'sync', 'log', 'save', 'commit', 'seal'}
OF_STEPS = EVERY_STEP | {'compile', 'evaluate', 'ledger'}  # do not come when all steps are done


@dataclass
class Tally:
  """What happened to the runs of a variant."""

  kills: Counter[str] = field(default_factory=Counter)  # by kind
  phases: Counter[str] = field(default_factory=Counter)  # kills by the phase in which they came
  starts: int = 0
  runs: int = 0  # complete and checked
  violations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Moment:
  """So many `seconds` after a phase of process `process` has begun `nth` times."""

  process: int
  phase: str
  nth: int
  seconds: float

  def has_come(self, start: Start) -> bool:
    times = start.marks[self.process].read().times[self.phase]
    return len(times) >= self.nth and time.monotonic() >= times[self.nth - 1] + self.seconds


@dataclass
class Draws:
  """Draws kinds and moments of kills, from the time that each phase of an uninterrupted run takes."""

  rng: random.Random
  variant: Variant
  seconds: Mapping[str, float]
  total: float  # seconds of the whole uninterrupted run

  def kind(self) -> str:
    kinds = self.variant.kinds
    return self.rng.choices(list(kinds), list(kinds.values()))[0]

  def moment(self, start: Start, kind: str, left: int) -> Moment:
    """Return a moment that can come in a start with so many steps `left`."""
    process = self.rng.randrange(self.variant.processes)
    since = time.monotonic() - start.marks[process].times[START][0]
    if kind == 'worker':  # often: the run goes on
      return Moment(process, START, 1, since + self.total * OF_WORKERS * self.rng.random())
    if self.rng.random() < AT_ANY_TIME and kind != 'process':
      return Moment(process, START, 1, since + self.total * self.rng.random())
    # Before the processes have found each other, JAX waits minutes for one that is missing: the launcher must end the others.
    excluded = {START} if kind == 'process' else set()
    phase = self.rng.choice(sorted(self.seconds.keys() - excluded - (set() if left else OF_STEPS)))
    begun = start.marks[process].read().begins[phase] if phase != START else 0
    nth = begun + self.rng.randint(1, min(NEXT, left) if phase in EVERY_STEP else 1)
    return Moment(process, phase, nth, self.seconds[phase] * self.rng.random())


class Campaign:
  """The runs of one variant, one after the other, in a folder.

  Args:
    variant: the variant.
    config: the config file of the tiny run.
    folder: where everything is written. A later campaign with the same code takes the uninterrupted run from it.
    compiled: where compiled programs are kept.
    seed: of the draws.
    say: prints a line.
  """

  def __init__(self, variant: Variant, config: Path, folder: Path, compiled: Path, seed: int, say: Callable[[str], None]):
    self.variant, self.tally, self.spent = variant, Tally(), 0.0
    self._config, self._folder, self._compiled, self._say = config, folder / variant.name, compiled, say
    self._rng = random.Random(f'{seed} {variant.name}')
    self._draws: Draws | None = None
    self._workers: list[int] = []  # of the start that was killed last

  def advance(self, deadline: float) -> None:
    """Do the uninterrupted run if there is none yet, else a run that is killed. No kill comes after `deadline`."""
    began = time.monotonic()
    if self._draws is None:
      self._draws = self._uninterrupted()
    else:
      self._killed_run(self._draws, deadline)
    self.spent += time.monotonic() - began

  @property
  def _expected(self) -> Path:
    return self._folder / 'uninterrupted'

  def _start(self, workdir: Path, logs: Path) -> Start:
    return Start(self.variant, self._config, workdir, logs, self._compiled)

  def _uninterrupted(self) -> Draws:
    workdir, logs = self._expected, self._folder / 'uninterrupted_logs'
    if not (logs / 'complete').exists():
      shutil.rmtree(self._folder, ignore_errors=True)
      start = self._start(workdir, logs)
      ended = start.await_end(HANGS)
      if not ended or any(process.returncode for process in start.processes):
        raise SystemExit(f'{self.variant.name}: the uninterrupted run failed: {start.errors(0)[-2000:]}')
      total = time.monotonic() - start.marks[0].times[START][0]
      (logs / 'complete').write_text(f'{start.marks[0].times[START][0]} {total}')
      self._say(f'{self.variant.name}: the uninterrupted run took {total:.0f} s')
    begun, total = map(float, (logs / 'complete').read_text().split())
    return Draws(self._rng, self.variant, Marks(logs / 'marks_0', begun).read().seconds(), total)

  def _killed_run(self, draws: Draws, deadline: float) -> None:
    number = next(n for n in itertools.count(1) if not (self._folder / f'run_{n}').exists())
    folder = self._folder / f'run_{number}'
    workdir, starts, found = folder / 'workdir', [], []
    before, after_the_end = self.tally.kills.copy(), 0
    while True:
      start = self._start(workdir, folder / f'start_{len(starts)}')
      self.tally.starts += 1
      least = promises.committed(workdir)
      after_the_end += least == self.variant.steps
      may = deadline if len(starts) < MOST and after_the_end <= AFTER_THE_END else 0.0
      found += self._until_killed(start, draws, workdir, may)
      starts.append(start)
      resumed = start.marks[0].read().noted('resumed')
      if resumed and resumed[0] < least:
        found.append(f'start {len(starts)} resumed after step {resumed[0]}, but step {least} was committed')
      if found or not any(process.returncode for process in start.processes):
        break
    if not found:
      found = self._broken_promises(workdir, starts, self.tally.kills - before)
      self.tally.runs += 1
    if found:
      self.tally.violations += [f'{self.variant.name}, {folder.name}: {each}' for each in found]
      self._say('\n'.join(['VIOLATION', *self.tally.violations[-len(found) :]]))
    else:
      shutil.rmtree(folder)
    self._say(f'{self.variant.name}: run {number} was started {len(starts)} times; kills so far: {dict(self.tally.kills)}')

  def _until_killed(self, start: Start, draws: Draws, workdir: Path, deadline: float) -> list[str]:
    """Kill what the draws say, until the start has ended. Returns the violations."""
    limit = time.monotonic() + HANGS
    kind, moment, wanted, worker_killed = '', None, deadline > time.monotonic(), False
    while start.alive:
      if time.monotonic() > limit:
        start.await_end(0)
        return [f'no end after {HANGS:g} s']
      if any(process.poll() for process in start.processes):
        break  # one has failed
      if wanted and moment is None:
        kind = draws.kind()
        moment = draws.moment(start, kind, self.variant.steps - promises.committed(workdir))
      if moment is not None and moment.has_come(start):
        if kind == 'worker':
          worker_killed |= self._kill_worker(start, moment, draws.rng)
        elif self._killed(start, kind, moment):
          return self._left_behind(start, kind, moment, workdir)
        moment, wanted = None, deadline > time.monotonic()
      time.sleep(GLANCE)
    if not start.await_end(SOON):
      return ['one process ended and another did not']
    return [
      f'process {k} ended with status {process.returncode}: {start.errors(k)[-1500:]}'
      for k, process in enumerate(start.processes)
      if process.returncode and not (worker_killed and REFUSED in start.errors(k))
    ]

  def _killed(self, start: Start, kind: str, moment: Moment) -> bool:
    """Kill the run, or one of its processes. Returns False if that had ended already."""
    self._workers, processes = start.workers(), [process.pid for process in start.processes]
    doomed = {'run': [*processes, *self._workers], 'main': processes, 'process': [processes[moment.process]]}[kind]
    if start.processes[moment.process].poll() is not None:
      return False
    start.kill(doomed)
    if start.processes[moment.process].wait() != -signal.SIGKILL:
      return False  # it ended by itself just before
    self._count(kind, start, moment)
    return True

  def _left_behind(self, start: Start, kind: str, moment: Moment, workdir: Path) -> list[str]:
    """Wait for the processes that must end because of a kill. Returns the violations."""
    if not start.await_end(SOON):
      return [f'a process runs {SOON:g} s after process {moment.process} was killed']
    if not await_gone(self._workers, SOON):
      return [f'a worker runs {SOON:g} s after its run was killed']
    if kind != 'process':
      return []
    others = [k for k in range(len(start.processes)) if k != moment.process]
    # With all steps saved, the others may be through, or wait for the end of all, which JAX aborts if one is missing.
    allowed = (0, LOST, -signal.SIGABRT) if promises.committed(workdir) == self.variant.steps else (LOST,)
    wrong = [k for k in others if start.processes[k].returncode not in allowed]
    return [
      f'process {k} ended with status {start.processes[k].returncode} after another was killed: {start.errors(k)[-1500:]}'
      for k in wrong
    ]

  def _kill_worker(self, start: Start, moment: Moment, rng: random.Random) -> bool:
    """Kill a worker. Returns False if there is none."""
    workers = start.workers()
    if workers:
      start.kill([rng.choice(workers)])
      self._count('worker', start, moment)
    return bool(workers)

  def _count(self, kind: str, start: Start, moment: Moment) -> None:
    self.tally.kills[kind] += 1
    self.tally.phases[start.marks[moment.process].read().phase] += 1

  def _broken_promises(self, workdir: Path, starts: list[Start], kills: Counter[str]) -> list[str]:
    """Check a complete run that had these kills."""
    variant = self.variant
    found = promises.unaccounted(workdir, variant.steps, GROUPS)
    given = [list(zip(s.marks[0].noted('step'), s.marks[0].noted('uids'), strict=True)) for s in starts]
    found += promises.lost_or_repeated(given, variant.steps, GROUPS, MEMBERS)
    if kills['worker']:
      found += promises.wrong_grades(workdir, GROUPS * MEMBERS, kills['worker'])
    elif variant.repeatable:
      found += promises.differences(workdir, self._expected)
    return found
