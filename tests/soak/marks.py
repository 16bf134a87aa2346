"""Reads the marks of a run (marked_main.py): which phases are open, how often each began, and how long each takes."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

START = 'start'  # the phase before the first mark; `main` is open whenever no other is


class Marks:
  """The marks of one process, read as they are written. `begun` is the time at which the process was started."""

  def __init__(self, path: Path, begun: float):
    self._path, self._position, self._rest = path, 0, b''
    self.lines: list[dict[str, Any]] = []
    self.begins: Counter[str] = Counter({START: 1})
    self.times: dict[str, list[float]] = defaultdict(list, {START: [begun]})  # of each begin
    self._open: list[tuple[str, int]] = []  # (phase, thread), the newest last

  def read(self) -> 'Marks':
    """Read what was written since the last call."""
    if self._path.exists():
      with open(self._path, 'rb') as file:
        file.seek(self._position)
        new = file.read()
      self._position += len(new)
      *lines, self._rest = (self._rest + new).split(b'\n')
      for line in map(json.loads, lines):
        self._take(line)
    return self

  def _take(self, line: dict[str, Any]) -> None:
    self.lines.append(line)
    if phase := line.get('begin'):
      self.begins[phase] += 1
      self.times[phase].append(line['time'])
      self._open.append((phase, line['thread']))
    elif phase := line.get('end'):
      at = max(i for i, each in enumerate(self._open) if each == (phase, line['thread']))
      del self._open[at]

  @property
  def phase(self) -> str:
    """The innermost open phase; of several threads, the one that began last."""
    return self._open[-1][0] if self._open else START

  def noted(self, name: str) -> list[Any]:
    """The values of the marks that have an entry `name`, in order."""
    return [line[name] for line in self.lines if name in line]

  def seconds(self) -> dict[str, float]:
    """The median time of each phase. That of the start ends with the first mark."""
    taken, open_since = defaultdict(list), defaultdict(list)
    taken[START] = [self.lines[0]['time'] - self.times[START][0]]
    for line in self.lines:
      if phase := line.get('begin'):
        open_since[phase, line['thread']].append(line['time'])
      elif phase := line.get('end'):
        taken[phase].append(line['time'] - open_since[phase, line['thread']].pop())
    return {phase: median(values) for phase, values in taken.items()}
