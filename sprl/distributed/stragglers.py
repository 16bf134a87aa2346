"""Finds the processes that hold up the others, and the place in the program where they stand.

Processes of a run wait for each other in two ways: for the result of a broadcast (team.py), and inside a computation that their
devices share. When one process hangs, soon all of them stand still. The one that hangs is

1. a process that does not even report any more; else
2. a process that has begun the fewest broadcasts and does not wait for the result of one; and among several of those
3. a process that does not wait for its devices, because these may wait for another process's part of a computation.
"""

import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

MUTE = 5.0  # seconds without a report, after which a process counts as one that does not report any more

_PROGRAM = ('sprl', '__main__')
_DEVICE_CODE = ('jax', 'jaxlib', 'sprl.sharding')  # packages in which a program waits for its devices, or compiles
_JOIN = ('threading', 'join')


class Progress(NamedTuple):
  """A report: how far a process is."""

  broadcasts: int  # begun so far; every process counts the same ones
  waits: bool  # for the result of a broadcast
  on_devices: bool = False  # whether it waits for its devices, or compiles
  place: str = ''  # module:line of the program


@dataclass(eq=False)
class Member:
  """A process of the run, as a watchdog knows it."""

  name: str
  progress: Progress | None = None  # the last report
  heard: float = math.inf  # the time of that report
  over: bool = False  # it announced its end, or its connection is closed
  closed: bool = False  # its connection is closed

  def mute(self, now: float) -> bool:
    """Whether the last report is more than MUTE seconds old. `now` is the time in seconds, on the clock of `heard`."""
    return now > self.heard + MUTE


class Stragglers:
  """Names the processes that hold up the run, once nothing has changed for `patience` seconds."""

  def __init__(self, patience: float):
    self._patience = patience
    self._suspects: Any = None  # names, and how far they are
    self._since = 0.0  # the time since when they are suspected

  def look(self, members: Sequence[Member], now: float) -> str:
    """Return a sentence that names the stragglers and their places, or '' while the run makes progress. `now` is in seconds."""

    def rank(member: Member) -> tuple[bool, int, bool]:
      assert member.progress is not None
      mute = member.mute(now)
      return not mute, member.progress.broadcasts, member.progress.on_devices and not mute

    known = [m for m in members if m.progress and not m.over]
    ranked = [(rank(m), m) for m in known if m.mute(now) or not (m.progress and m.progress.waits)]
    lowest = min((r for r, _ in ranked), default=None)
    found = [m for r, m in ranked if r == lowest]
    suspects = [m.name for m in found], lowest
    if suspects != self._suspects:
      self._suspects, self._since = suspects, now
    if not found or now < self._since + self._patience:
      return ''
    places = [f'{m.name} at {m.progress.place}{" (waits for its devices)" * m.progress.on_devices}' for m in found if m.progress]
    return f'{" and ".join(places)} made no progress for {self._patience:g} s'


def whereabouts() -> tuple[bool, str]:
  """Return whether the program waits for its devices (or compiles), and the module:line of the program that waits.

  The program is the main thread, or the thread that the main thread joins: rollouts may run in one while the learner works.
  Another thread must call this.
  """
  threads = sys._current_frames()
  del threads[threading.get_ident()]  # its locals hold `threads`: a cycle, which keeps the arrays of all frames alive
  frame = threads[threading.main_thread().ident or 0]
  if joined := next((f.f_locals['self'] for f, _ in walk_stack(frame) if (_module(f), f.f_code.co_name) == _JOIN), None):
    frame = threads.get(joined.ident, frame)
  frames = [f for f, _ in walk_stack(frame)]  # innermost first
  own = next((f for f in frames if _within(f, _PROGRAM) and not _within(f, _DEVICE_CODE)), frames[0])
  return any(_within(f, _DEVICE_CODE) for f in frames[: frames.index(own)]), f'{_module(own)}:{own.f_lineno}'


def _within(frame: FrameType, packages: Sequence[str]) -> bool:
  return any(f'{_module(frame)}.'.startswith(f'{package}.') for package in packages)


def _module(frame: FrameType) -> str:
  return frame.f_globals.get('__name__', '?')
