"""Kills runs at random moments, starts them again until they are complete, and checks that they keep their promises.

1. A variant runs once without interruption. Its marks tell which phases there are and how long each takes.
2. A run of the variant starts. The campaign draws the moment of a kill: a phase, one of its next occurrences, and a delay. All
   phases are equally likely, so that kills also reach short and late phases. Some kills come at a random time instead.
3. The same command starts the run again, until a start ends before its moment, or until MOST kills have come.
4. The complete run is checked (promises.py).
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import promises
from marks import START, Marks
from starts import HELPERS, Start
from variants import GROUPS, MEMBERS, Variant

from sprl.distributed.watchdog import LOST

MOST = 12  # kills of one run; kills of helpers do not count
HANGS = 1200.0  # seconds after which a start counts as hung
SOON = 60.0  # seconds in which the other processes must end after a kill of one, and helpers after the end of their run
AT_ANY_TIME = 0.2  # share of the kills that come at a random time, not in a drawn phase
OF_WORKERS = 0.25  # a worker is killed within this share of the time of an uninterrupted run
STARTS = 0.2  # seconds in which a renderer starts; after a kill the next request waits for this, and a kill can meet the request
NEXT = 3  # a kill comes in one of this many next occurrences of a phase of each step
AFTER_THE_END = 3  # most kills of a run whose steps are all done
REFUSED = 'a worker cannot start: killed by SIGKILL'  # message of a run whose worker was killed before the first step
EVERY_STEP = {'rollout', 'score', 'update', 'sync', 'log', 'save', 'commit', 'seal'}
OF_STEPS = EVERY_STEP | {'compile', 'evaluate', 'ledger'}  # phases that do not occur when all steps are done


@dataclass
class Tally:
  """Counts of the runs of a variant, their kills and their violations."""

  kills: Counter[str] = field(default_factory=Counter)  # by kind
  phases: Counter[str] = field(default_factory=Counter)  # kills, by the phase in which they came
  starts: int = 0
  runs: int = 0  # complete and checked
  violations: list[str] = field(default_factory=list)

  def add(self, other: 'Tally') -> None:
    """Add the counts of `other`."""
    self.kills += other.kills
    self.phases += other.phases
    self.starts += other.starts
    self.runs += other.runs
    self.violations += other.violations


@dataclass(frozen=True)
class Moment:
  """The moment `seconds` after the `nth` begin of a phase in process `process`."""

  process: int
  phase: str
  nth: int
  seconds: float

  def has_come(self, start: Start) -> bool:
    times = start.marks[self.process].read().times[self.phase]
    return len(times) >= self.nth and time.monotonic() >= times[self.nth - 1] + self.seconds


@dataclass
class Draws:
  """Draws the kinds and moments of kills. `seconds` has the time of each phase in an uninterrupted run."""

  rng: random.Random
  variant: Variant
  seconds: Mapping[str, float]
  total: float  # seconds of the whole uninterrupted run

  def kind(self) -> str:
    kinds = self.variant.kinds
    return self.rng.choices(list(kinds), list(kinds.values()))[0]

  def moment(self, start: Start, kind: str, left: int) -> Moment:
    """Return a moment that can come in a start that has `left` steps to do."""
    process = self.rng.randrange(self.variant.processes)
    since = time.monotonic() - start.marks[process].times[START][0]
    if kind == 'renderer':
      # After the begin of the next request: a request loses its renderer at most once, because it is repeated only once.
      return Moment(process, 'template', start.marks[process].read().begins['template'] + 1, STARTS * self.rng.random())
    if kind == 'worker':  # early, so that a start has several: the run continues after each
      return Moment(process, START, 1, since + self.total * OF_WORKERS * self.rng.random())
    if self.rng.random() < AT_ANY_TIME and kind != 'process':
      return Moment(process, START, 1, since + self.total * self.rng.random())
    # Not in START: until all processes are connected, JAX waits minutes for a missing one, and the launcher must end the others.
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
    folder: the folder for all files. A later campaign with the same code reuses its uninterrupted run.
    compiled: the folder for compiled programs.
    seed: the seed of the draws.
    say: a function that prints a line.
    stop: is set to end the campaign early. `advance` then kills its run and raises Stopped.
  """

  def __init__(
    self,
    variant: Variant,
    config: Path,
    folder: Path,
    compiled: Path,
    seed: int,
    say: Callable[[str], None],
    stop: threading.Event,
  ):
    self.variant, self.tally, self.spent = variant, Tally(), 0.0
    self._config, self._folder, self._compiled, self._say, self._stop = config, folder / variant.name, compiled, say, stop
    self._rng = random.Random(f'{seed} {variant.name}')
    self._draws: Draws | None = None
    self._run = Tally()  # of the run in progress; added to `tally` when the run is complete and checked

  def advance(self, deadline: float) -> None:
    """Do the uninterrupted run if there is none yet, else a run with kills. No kill comes after `deadline`."""
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
    return Start(self.variant, self._config, workdir, logs, self._compiled, self._stop)

  def _uninterrupted(self) -> Draws:
    workdir, logs = self._expected, self._folder / 'uninterrupted_logs'
    if not (logs / 'complete').exists():
      shutil.rmtree(self._folder, ignore_errors=True)
      with self._start(workdir, logs) as start:
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
    self._run, after_the_end = Tally(), 0
    while True:
      least = promises.committed(workdir)
      after_the_end += least == self.variant.steps
      may = deadline if len(starts) < MOST and after_the_end <= AFTER_THE_END else 0.0
      with self._start(workdir, folder / f'start_{len(starts)}') as start:
        self._run.starts += 1
        found += self._until_killed(start, draws, workdir, may)
      starts.append(start)
      resumed = start.marks[0].read().noted('resumed')
      if resumed and resumed[0] < least:
        found.append(f'start {len(starts)} resumed after step {resumed[0]}, but step {least} was committed')
      if found or not any(process.returncode for process in start.processes):
        break
    if not found:
      found = self._broken_promises(workdir, starts)
      self._run.runs += 1
    if found:
      self._run.violations = [f'{self.variant.name}, {folder.name}: {each}' for each in found]
      self._say('\n'.join(['VIOLATION', *self._run.violations]))
    else:
      shutil.rmtree(folder)
    self.tally.add(self._run)
    self._say(f'{self.variant.name}: run {number} was started {len(starts)} times; kills so far: {dict(self.tally.kills)}')

  def _until_killed(self, start: Start, draws: Draws, workdir: Path, deadline: float) -> list[str]:
    """Make the drawn kills until the start has ended. Returns the violations."""
    limit = time.monotonic() + HANGS
    kind, moment, wanted, worker_killed = '', None, deadline > time.monotonic(), False
    while start.alive:
      if time.monotonic() > limit:
        start.await_end(0)
        return [f'the start hangs: no end after {HANGS:g} s']
      if any(process.poll() for process in start.processes):
        break  # a process has failed
      if wanted and moment is None:
        kind = draws.kind()
        moment = draws.moment(start, kind, self.variant.steps - promises.committed(workdir))
      if moment is not None and moment.has_come(start):
        if kind in HELPERS:
          worker_killed |= self._kill_helper(start, kind, moment, draws.rng) and kind == 'worker'
        elif self._killed(start, kind, moment):
          return self._left_behind(start, kind, moment, workdir)
        moment, wanted = None, deadline > time.monotonic()
      start.glance()
    if not start.await_end(SOON):
      return ['one process ended and another did not']
    refused = [worker_killed and REFUSED in start.errors(k) for k in range(len(start.processes))]
    found = [
      f'process {k} ended with status {process.returncode}: {start.errors(k)[-1500:]}'
      for k, process in enumerate(start.processes)
      if process.returncode and not (refused[k] or (any(refused) and process.returncode == LOST))
    ]
    return found + self._helpers_left(start)

  def _killed(self, start: Start, kind: str, moment: Moment) -> bool:
    """Kill the run, or one of its processes. Returns False if the process of the moment had already ended."""
    process = start.processes[moment.process]
    if process.poll() is not None:
      return False
    if kind == 'process':
      process.kill()
    else:
      start.kill(helpers=kind == 'run')
    if process.wait() != -signal.SIGKILL:
      return False  # it ended by itself just before
    self._count(kind, start, moment)
    return True

  def _left_behind(self, start: Start, kind: str, moment: Moment, workdir: Path) -> list[str]:
    """Wait for the processes that must end because of a kill. Returns the violations."""
    if not start.await_end(SOON):
      return [f'a process still runs {SOON:g} s after process {moment.process} was killed']
    if (found := self._helpers_left(start)) or kind != 'process':
      return found
    others = [k for k in range(len(start.processes)) if k != moment.process]
    # When all steps are saved, the others may have ended, or may wait for all to end. JAX aborts this wait if one is missing.
    allowed = (0, LOST, -signal.SIGABRT) if promises.committed(workdir) == self.variant.steps else (LOST,)
    wrong = [k for k in others if start.processes[k].returncode not in allowed]
    return [
      f'process {k} ended with status {start.processes[k].returncode} after another was killed: {start.errors(k)[-1500:]}'
      for k in wrong
    ]

  def _helpers_left(self, start: Start) -> list[str]:
    """Wait for the end of the helpers of a start that has ended. Returns the violations."""
    return [f'still runs {SOON:g} s after its run has ended: {command}' for command in start.left_behind(SOON)]

  def _kill_helper(self, start: Start, kind: str, moment: Moment, rng: random.Random) -> bool:
    """Kill a helper. Returns False if there is none."""
    helpers = start.helpers(kind)
    if helpers:
      with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(helpers), signal.SIGKILL)
      self._count(kind, start, moment)
    return bool(helpers)

  def _count(self, kind: str, start: Start, moment: Moment) -> None:
    self._run.kills[kind] += 1
    self._run.phases[start.marks[moment.process].read().phase] += 1

  def _broken_promises(self, workdir: Path, starts: list[Start]) -> list[str]:
    """Check a complete run. Returns the violations."""
    variant, workers = self.variant, self._run.kills['worker']
    found = promises.unaccounted(workdir, variant.steps, GROUPS)
    given = [list(zip(s.marks[0].noted('step'), s.marks[0].noted('uids'), strict=True)) for s in starts]
    found += promises.lost_or_repeated(given, variant.steps, GROUPS, MEMBERS)
    found += promises.wrong_grades(workdir, GROUPS * MEMBERS, workers)
    if variant.exports:
      found += promises.no_export(workdir)
    if variant.repeatable and not (workers and promises.lost_grades(workdir)):  # a lost grade changes the weights
      found += promises.differences(workdir, self._expected)
    return found
