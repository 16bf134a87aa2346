"""Runs the cases of a fuzz target in a separate process, and reports the cases that fail.

A target is a module `fuzz_NAME` of this folder with

    SECONDS            time limit of one case
    prepare(folder)    context manager; yields the `world` that all cases share, such as files to mutate
    case(rng, world)   returns the input of a case; all its random choices come from `rng`
    check(world, case) runs sprl on the input and returns the outcome in a few words; raises if the outcome is wrong
    SHARE              optional: its share of the minutes of a campaign of several targets, relative to the others; 1 by default

The seed of the campaign and the number of a case fix the random numbers of the case. A case fails if `case` or `check` raises,
exceeds SECONDS, or ends the process. The campaign then continues with the next case. If the process hung or ended, it starts a
new one.
"""

import contextlib
import importlib
import json
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
TARGETS = ('settings', 'commands', 'weights', 'tokenizers', 'rows', 'templates', 'graders', 'environments', 'endpoint')
START_SECONDS = 120.0  # time limit for the imports of a target and for `prepare`
MEMORY = 8 << 30  # bytes of address space that the cases of a target may add after `prepare`
SHOWN = 1500  # characters of a traceback in the report; a case gets a third of that


@contextlib.contextmanager
def opened(name: str) -> Iterator[tuple[ModuleType, Any]]:
  """Yield a target, and the `world` that its cases share."""
  target = importlib.import_module(f'fuzz_{name}')
  with tempfile.TemporaryDirectory() as folder, target.prepare(Path(folder)) as world:
    yield target, world


def shares(names: Sequence[str]) -> list[float]:
  """Return the part of the time that each target gets. The parts sum to 1."""
  found = [getattr(importlib.import_module(f'fuzz_{name}'), 'SHARE', 1) for name in names]
  return [share / sum(found) for share in found]


def case_of(target: ModuleType, world: Any, seed: int, number: int) -> Any:
  """Return the input of case `number`."""
  return target.case(random.Random(f'{target.__name__} {seed} {number}'), world)


# --- the process that runs cases ---------------------------------------------------------------------------------------


def serve(name: str, seed: int, first: int, fd: int) -> None:
  """Run cases from number `first` on, without end. Write a line of JSON to the pipe `fd` after `prepare` and after each case."""
  with os.fdopen(fd, 'w', buffering=1) as out, opened(name) as (target, world):
    used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    out.write('{}\n')
    number = first
    while True:
      case, start = None, time.perf_counter()
      try:
        case = case_of(target, world, seed, number)
        line = {'outcome': target.check(world, case)}
      except BaseException as error:  # includes panics of Rust libraries
        line = {'kind': _kind(error), 'trace': traceback.format_exc()[-SHOWN:], 'case': repr(case)[: SHOWN // 3]}
      out.write(json.dumps({'number': number, 'seconds': time.perf_counter() - start, **line}) + '\n')
      number += 1


def _kind(error: BaseException) -> str:
  """Return a key that groups failures with one cause: the error and the innermost line in sprl, or else in tests/fuzz."""
  frames = traceback.extract_tb(error.__traceback__)
  ours = [f for f in frames if '/sprl/' in f.filename] or [f for f in frames if f.filename.startswith(str(HERE))]
  where = f'{Path(ours[-1].filename).name}:{ours[-1].lineno}' if ours else '?'
  return f'{type(error).__name__} at {where}: {" ".join(str(error).split())[:200]}'


# --- the campaign ------------------------------------------------------------------------------------------------------


@dataclass
class Campaign:
  """Runs the cases of one target from number `first` on, and counts the outcomes."""

  name: str
  seed: int
  first: int = 0
  outcomes: Counter = field(default_factory=Counter)
  failures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by `_kind`, or by how the process ended
  slowest: tuple[float, int] = (0.0, 0)  # seconds, number

  def run(self, seconds: float) -> int:
    """Run cases for `seconds`, at least one, and print a report. Returns the number of cases that failed."""
    limit = importlib.import_module(f'fuzz_{self.name}').SECONDS
    number, spent = self.first, 0.0
    while spent < seconds or number == self.first:
      with self._process(number) as (process, lines, log):
        if lines.next(START_SECONDS) is None:
          raise RuntimeError(f'the target {self.name} did not start:\n{_tail(log)}')
        begun = time.monotonic() - spent
        while spent < seconds or number == self.first:
          line = lines.next(limit)
          spent = time.monotonic() - begun
          if line is None:
            status = process.poll()
            how = f'hang: no outcome after {limit:g} s' if status is None else f'the process ended with status {status}'
            self._fail({'number': number, 'kind': how, 'trace': _tail(log), 'case': '(shown by --case)'})
            number += 1
            break
          number += 1
          if 'kind' in line:
            self._fail(line)
          else:
            self.outcomes[line['outcome']] += 1
          self.slowest = max(self.slowest, (line['seconds'], line['number']))
    return self._report(number - self.first, spent)

  @contextlib.contextmanager
  def _process(self, number: int):
    read, write = os.pipe()
    command = [sys.executable, str(HERE), self.name, f'--seed={self.seed}', f'--from={number}', f'--serve={write}']
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
      environment = {**os.environ, 'TMPDIR': folder}  # removed with the files that a killed process leaves there
      process = subprocess.Popen(
        command, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=log, process_group=0, env=environment
      )
      os.close(write)
      try:
        yield process, _Lines(read), log
      finally:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, 9)
        process.wait()
        os.close(read)

  def _fail(self, line: dict[str, Any]) -> None:
    self.failures.setdefault(line['kind'], []).append(line)

  def _report(self, count: int, seconds: float) -> int:
    failed = sum(map(len, self.failures.values()))
    rate = count / max(seconds, 1e-9)
    print(f'{self.name}: {count} cases in {seconds:.0f} s, {rate:.1f} a second, seed {self.seed}: {failed} failures', flush=True)
    for outcome, n in self.outcomes.most_common(12):
      print(f'  {n / count:6.1%}  {outcome}')
    print(f'  slowest: case {self.slowest[1]}, {self.slowest[0]:.2f} s')
    for kind, lines in sorted(self.failures.items(), key=lambda item: -len(item[1])):
      first = lines[0]
      print(f'\n  {len(lines)} x {kind}\n  to repeat: python tests/fuzz {self.name} --seed {self.seed} --case {first["number"]}')
      print(f'  case: {first["case"]}\n    ' + first['trace'].strip().replace('\n', '\n    '))
    return failed


class _Lines:
  """Lines of JSON from a pipe."""

  def __init__(self, fd: int):
    self._fd, self._data = fd, b''

  def next(self, seconds: float) -> dict[str, Any] | None:
    """Return the next line; None if none arrives within `seconds` or the pipe has closed."""
    until = time.monotonic() + seconds
    while b'\n' not in self._data:
      if not select.select([self._fd], [], [], max(0.0, until - time.monotonic()))[0]:
        return None
      if not (part := os.read(self._fd, 1 << 16)):
        return None
      self._data += part
    line, _, self._data = self._data.partition(b'\n')
    return json.loads(line)


def _tail(log: Any) -> str:
  log.seek(0)
  return log.read().decode(errors='replace')[-SHOWN:]
