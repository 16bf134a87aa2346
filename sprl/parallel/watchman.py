"""The watchman of one process of a run: ends it when another of them has gone, or stands still, and says which.

    python -m sprl.parallel.watchman '{"name": ..., "parent": ..., "lifeline": ..., "peers": {...}, "hub": ..., ...}'

A process that waits for another's part of a computation waits for ever when that one has died, or is ended by a library that
cannot say whom it missed. So each has a watchman beside it: a small process of its own, which no computation holds up and no
crash ends. Those of the others are joined to the hub's, the watchman of process 0; what becomes of one they all hear.

    lifeline   to the watched process: {"ended": status}, its own last word; closed without one: it died. Every BEAT seconds,
               how far it is: {"far": n, "waits": ..., "devices": ..., "where": ...}
    peers      to other watchmen, a line every BEAT seconds; closed, or silent for too long: it is gone

The hub's knows how far all are. Those that wait for no word of another, and share a computation with one that hangs, soon stand
still as it does; but it is the one that does not even say how far it is, or else the one furthest behind, and of several those
that do not themselves wait for their devices. When these are the same, and no further, for `patience` seconds, they are named.

Whatever comes first is the verdict: it is passed on, told to people in one line, and ends the watched process. One that has
ended with an error of its own may be followed by others that met the same: they have GRACE seconds to say so themselves.
Standard library only, so that it is there in a moment.
"""

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

BEAT = 1.0  # seconds between two signs of life
SILENCE = 60.0  # without one, after which a process counts as gone: its machine, or the network to it
GRACE = 3.0  # for a process to end by itself
LAST = 5.0  # and to end when it is told to, before it is killed
DUMB = 5.0  # without a word on how far it is, after which a process counts as stopped, should anybody hang
LOST = 4  # exit status of a process that ends because another has gone
DEVICES = 'jax', 'jaxlib', 'sprl.parallel.rules'  # where a process waits for its devices, and compiles


# --- in the process that is watched ----------------------------------------------------------------------------------


def beside(
  name: str,
  peers: Sequence[tuple[Connection, str]],
  hub: bool,
  progress: Callable[[], tuple[int, bool]],
  silence: float = SILENCE,
  patience: float = math.inf,
) -> socket.socket:
  """Starts the watchman of this process, which will end with status LOST when it says so. Returns the lifeline.

  `name` is how people know the process; `peers` are connections to other watchmen, and how people know theirs. `progress` says
  how far the process is, by a number that all count alike, and whether it waits for another's word.
  """
  ours, theirs = socket.socketpair()
  told: dict[str, Any] = {'name': name, 'parent': os.getpid(), 'lifeline': theirs.fileno(), 'hub': hub, 'silence': silence}
  told['peers'] = {connection.fileno(): whose for connection, whose in peers}
  told['patience'] = patience
  with theirs:
    subprocess.Popen(
      [sys.executable, '-P', '-m', 'sprl.parallel.watchman', json.dumps(told)],
      pass_fds=[theirs.fileno(), *told['peers']],
      stdin=subprocess.DEVNULL,
      process_group=0,  # a Ctrl-C is the run's alone
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )

  def obey() -> None:
    if not ours.recv(1):
      os.write(2, f'error: the watchman of {name} is gone, and so ends the process\n'.encode())
    os._exit(LOST)

  def report() -> None:
    with contextlib.suppress(OSError):
      while True:
        far, waits = progress()
        devices, where = _whereabouts()
        ours.sendall(json.dumps({'far': far, 'waits': waits, 'devices': devices, 'where': where}).encode() + b'\n')
        time.sleep(BEAT)

  for task in (obey, report):
    threading.Thread(target=task, daemon=True, name=f'watchman, {task.__name__}').start()
  return ours


def _whereabouts() -> tuple[bool, str]:
  """Whether the program is in one of DEVICES, and the line of it that called that."""
  innermost = frame = _at_work()
  while frame and frame.f_back and f'{_module(frame)}.'.startswith(tuple(f'{package}.' for package in DEVICES)):
    frame = frame.f_back
  return innermost is not frame, f'{_module(frame)}:{frame.f_lineno}' if frame else ''


def _at_work() -> FrameType | None:
  """Where the main thread is; while it waits for what a thread of a pool returns, as for the learner's, where that thread is."""
  threads = sys._current_frames()
  main = threads.get(threading.main_thread().ident or 0)
  if awaited := _subject(main, 'concurrent.futures._base', 'result'):
    for thread in threads.values():
      if getattr(_subject(thread, 'concurrent.futures.thread', 'run'), 'future', None) is awaited:
        return thread
  return main


def _subject(frame: FrameType | None, module: str, method: str) -> Any:
  """Whose method of that name is under way; None where none is."""
  while frame and (_module(frame), frame.f_code.co_name) != (module, method):
    frame = frame.f_back
  return frame and frame.f_locals.get('self')


def _module(frame: FrameType) -> str:
  return frame.f_globals.get('__name__', '?')


def last_word(lifeline: socket.socket, status: int) -> None:
  """Tells the watchman that the process ends by itself, with this exit status."""
  with contextlib.suppress(OSError):
    lifeline.sendall(json.dumps({'ended': status}).encode() + b'\n')


# --- in the watchman -------------------------------------------------------------------------------------------------


@dataclass
class _Line:
  """A connection, by lines of JSON."""

  socket: socket.socket
  name: str
  heard: float
  rest: bytes = b''
  over: bool = False  # closed
  complete: bool = False  # that it closes will be no news
  far: int = -1  # as it said last; -1: it has not
  waits: bool = False  # for another's word
  devices: bool = False  # for what they compute
  where: str = ''
  said: float = math.inf  # that, last

  def moves(self, far: int, waits: bool, devices: bool, where: str) -> None:
    """It says how far it is."""
    self.far, self.waits, self.devices, self.where, self.said = far, waits, devices, where, time.monotonic()

  def read(self) -> list[dict[str, Any]]:
    """The messages that are there."""
    try:
      found = self.socket.recv(1 << 16)
    except OSError:
      found = b''
    self.over = not found
    *lines, self.rest = (self.rest + found).split(b'\n')
    return [json.loads(line) for line in lines]

  def tell(self, **message: Any) -> None:
    """Says it, where somebody is left to hear."""
    with contextlib.suppress(OSError):
      self.socket.sendall(json.dumps(message).encode() + b'\n')


@dataclass
class Watchman:
  """Watches `parent` for the peers, and the peers for it; `name` is how people know the process."""

  name: str
  parent: int
  lifeline: _Line
  peers: list[_Line]
  hub: bool
  silence: float
  patience: float
  verdict: str = ''
  said: bool = False  # the parent, its last word
  settled: bool = False  # nothing is left to be done about the verdict
  act: float = math.inf  # when it is
  doubt: float = math.inf  # when a parent that is gone without a word counts as the first to go
  behind: tuple[list[str], Any] = field(default_factory=lambda: ([], None))  # who, of all, and how far
  since: float = 0.0  # that is so

  def watch(self) -> None:
    """Until there is nobody left to watch."""
    beat = 0.0
    while not (self.lifeline.over and (self.settled or (self.said and all(p.over or p.complete for p in self.peers)))):
      lines = [line for line in (self.lifeline, *self.peers) if not line.over]
      patience = min(BEAT, self.act - time.monotonic(), self.doubt - time.monotonic())
      ready, _, _ = select.select([line.socket for line in lines], [], [], max(0.0, patience))
      for line in lines:
        if line.socket in ready:
          self._hear(line)
      now = time.monotonic()
      if now >= beat + BEAT:
        beat = now
        for peer in self.peers:
          peer.tell(beat=True)
      for peer in self.peers:
        if not (peer.over or peer.complete) and now > peer.heard + self.silence:
          self._decide(f'{peer.name} has not been heard of for {self.silence:g} s')
      if self.hub and (still := self._standing_still(now)):
        self._decide(still)
      if not self.lifeline.over and os.getppid() != self.parent:  # what it has started may hold on to the lifeline
        self.lifeline.over = True
        self._parent_gone()
      if now >= self.doubt:
        self._decide(f'{self.name} died')
      if now >= self.act:
        self._settle()

  def _hear(self, line: _Line) -> None:
    line.heard = time.monotonic()
    for message in line.read():
      if 'far' in message:
        line.moves(**message)
        for peer in self.peers if line is self.lifeline and not self.hub else ():
          peer.tell(**message)
      elif 'ended' in message:
        self.said = line.complete = True
        if message['ended']:
          self._decide(f'{self.name} ended with status {message["ended"]}', GRACE)
        for peer in self.peers:
          peer.tell(complete=True)
      elif 'verdict' in message:
        self._decide(message['verdict'], message['grace'], line)
      elif 'complete' in message:
        line.complete = True
    if line.over and line is self.lifeline:
      self._parent_gone()
    elif line.over and not line.complete:
      self._decide(f'{line.name} is gone', heard_from=line)

  def _standing_still(self, now: float) -> str:
    """Who hangs, and where; '' where nobody does."""

    def rank(line: _Line) -> tuple[bool, int, bool]:
      speaks = now < line.said + DUMB
      return speaks, line.far, line.devices and speaks

    known = [line for line in (self.lifeline, *self.peers) if line.far >= 0 and not (line.over or line.complete)]
    works = [line for line in known if not line.waits or not rank(line)[0]]
    least = min(map(rank, works), default=None)
    found = [line for line in works if rank(line) == least]
    behind = [line.name for line in found], least
    if behind != self.behind:
      self.behind, self.since = behind, now
    if not found or now < self.since + self.patience:
      return ''
    places = (f'{line.name} (at {line.where}{", waiting for devices" if line.devices else ""})' for line in found)
    return f'{" and ".join(places)} {"has" if len(found) == 1 else "have"} not moved for {self.patience:g} s'

  def _parent_gone(self) -> None:
    """Of several that go at once, all but the first may have been ended by its going: the hub's is told of first."""
    if not self.said:
      self.doubt = time.monotonic() + (0.0 if self.hub else BEAT)

  def _decide(self, verdict: str, grace: float = 0.0, heard_from: _Line | None = None) -> None:
    """The first verdict counts."""
    if self.verdict:
      return
    self.verdict, self.doubt = verdict, math.inf
    for peer in self.peers:
      if peer is not heard_from:
        peer.tell(verdict=verdict, grace=grace)
    # The hub's process serves the others as long as they are there: it goes last.
    self.act = time.monotonic() + (0.0 if self.said or self.lifeline.over else grace + self.hub)

  def _settle(self) -> None:
    """Has the parent end itself, or ends it."""
    self.act, self.settled = math.inf, True
    if self.said:
      return
    consequence = '' if self.verdict.startswith(self.name) else f', and so ends {self.name}'
    with contextlib.suppress(OSError):
      os.write(2, f'error: {self.verdict}{consequence}; the same command goes on from the last checkpoint\n'.encode())
    if self.lifeline.over:
      return
    self.lifeline.tell(end=True)
    if not select.select([self.lifeline.socket], [], [], LAST)[0]:
      with contextlib.suppress(ProcessLookupError):
        os.kill(self.parent, signal.SIGKILL)


def main(told: Mapping[str, Any]) -> None:
  """Watches until the end."""
  for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run: it may take long to save
    signal.signal(number, signal.SIG_IGN)
  now = time.monotonic()
  peers = [_Line(socket.socket(fileno=int(fd)), name, now) for fd, name in told['peers'].items()]
  for peer in peers:
    peer.socket.settimeout(BEAT)  # one that does not read must not hold up the others
  lifeline = _Line(socket.socket(fileno=told['lifeline']), told['name'], now)
  Watchman(told['name'], told['parent'], lifeline, peers, told['hub'], told['silence'], told['patience']).watch()


if __name__ == '__main__':
  main(json.loads(sys.argv[1]))
