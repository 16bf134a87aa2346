"""Ends this process, and names the cause, when another process of the run dies, fails or hangs.

A computation over several processes waits forever for a process that has died. Each process therefore runs a watchdog, a thread
that is connected to the watchdog of process 0, the hub:

1. Every BEAT seconds a watchdog reports the progress of its process: to the hub, or from the hub to all others.
2. A process that ends by itself announces its exit status. A connection that closes without this announcement means that the
   process died. The system closes it at once if the process is killed, and after SILENCE seconds if its machine or network fails.
3. If no process makes progress for `patience` seconds, the hub names the processes that hold up the others (stragglers.py).
4. The first cause found is the verdict. The hub passes it on. Each process prints it in one line and exits with status LOST. If
   the cause is a process with a status of FINAL, each exits with that status: launchers see that a restart would fail again.

JAX notices a lost process by its own heartbeat. It names the process by number inside a stack trace, and aborts with SIGABRT.
Here it is the second line of defence, a minute later than `patience`: it runs outside Python, so it also ends a process whose
Python threads are stuck. A process that is stopped by a signal ends when it is continued, or when the launcher kills it.
"""

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

from sprl.distributed.stragglers import MUTE, Member, Progress, Stragglers, whereabouts

LOST = 4  # exit status of a process that ends because of another
FINAL = (2, 3)  # exit statuses of wrong settings, and of a run that a guard stopped

# Seconds:
BEAT = 1.0  # between two reports
SILENCE = 60.0  # without an acknowledgement, after which the system closes a connection
GRACE = 3.0  # for a process to report its own error after another process ended with an error
LAST = 5.0  # for the others to exit before the hub does: JAX aborts them at once when process 0 ends


class Ended(NamedTuple):
  """The announcement that a process ends by itself."""

  status: int


class Verdict(NamedTuple):
  """The cause for which all processes end, the seconds that each has to report its own error, and the exit status."""

  cause: str
  grace: float
  status: int = LOST


@dataclass
class Judge:
  """Decides whether and why this process must end. It is given events and the time, and leaves messages in `outbox`."""

  me: Member
  peers: Sequence[Member]
  hub: bool
  patience: float = math.inf
  outbox: list[tuple[Member, Any]] = field(default_factory=list)
  verdict: str = ''
  status: int = LOST  # with which the verdict ends this process
  deadline: float = math.inf  # the time at which the verdict ends this process

  def __post_init__(self):
    self._stragglers = Stragglers(self.patience)

  def report(self, progress: Progress, now: float) -> None:
    """Record the progress of this process and send it to the peers."""
    self.me.progress, self.me.heard = progress, now
    self._send(progress)

  def leave(self, status: int) -> None:
    """Announce that this process ends by itself. From then on no verdict ends it."""
    self.me.over, self.deadline = True, math.inf
    self._send(Ended(status))

  def receive(self, peer: Member, message: Progress | Ended | Verdict, now: float) -> None:
    """Handle a message from another watchdog."""
    match message:
      case Progress():
        peer.progress, peer.heard = message, now
      case Ended(status):
        peer.over = True
        if status:
          final = status if status in FINAL else LOST
          self._decide(f'{peer.name} ended with status {status}', now, GRACE, peer, final)
      case Verdict(cause, grace, status):
        self._decide(cause, now, grace, peer, status)

  def close(self, peer: Member, cause: str, now: float) -> None:
    """Handle the end of a connection, for the reason `cause`."""
    announced, peer.over, peer.closed = peer.over, True, True
    if not announced:
      self._decide(f'{peer.name} {cause}', now)

  def look(self, now: float) -> None:
    """Look for processes that hang."""
    if self.hub:
      if found := self._stragglers.look([self.me, *self.peers], now):
        self._decide(found, now)
    else:
      [hub] = self.peers
      if not hub.over and now > hub.heard + self.patience + 2 * MUTE:  # later than the hub itself would decide
        self._decide(f'{hub.name} has not reported for {self.patience:g} s', now)

  def final_message(self, now: float) -> str:
    """Return the message with which this process must end now, or ''."""
    others_first = self.hub and now < self.deadline + LAST and not all(peer.closed for peer in self.peers)
    if now < self.deadline or others_first:
      return ''
    consequence = '' if self.me.name in self.verdict else f', so {self.me.name} ends'
    resumes = '; the same command resumes from the last checkpoint' if self.status == LOST else ''
    return f'error: {self.verdict}{consequence}{resumes}'

  def _decide(self, cause: str, now: float, grace: float = 0.0, source: Member | None = None, status: int = LOST) -> None:
    """Set the verdict, unless there is one, and pass it on. `source` knows it already."""
    if not self.verdict and not self.me.over:
      self.verdict, self.deadline, self.status = cause, now + grace, status
      self._send(Verdict(cause, grace, status), source)

  def _send(self, message: Any, all_but: Member | None = None) -> None:
    self.outbox += [(peer, message) for peer in self.peers if peer is not all_but]


class Watchdog:
  """The thread that watches the run for this process.

  Args:
    name: the name of this process in messages.
    peers: connection and name of each watchdog that this one is connected to. Process 0 is connected to all others, they to it.
    hub: whether this is process 0.
    progress: returns the number of broadcasts that this process has begun, and whether it waits for one.
    patience: seconds without progress after which the run ends.
  """

  def __init__(
    self,
    name: str,
    peers: Sequence[tuple[Connection, str]],
    *,
    hub: bool,
    progress: Callable[[], tuple[int, bool]],
    patience: float = math.inf,
  ):
    members = [Member(peer) for _, peer in peers]
    self._connections = {peer: connection for peer, (connection, _) in zip(members, peers)}
    self._judge = Judge(Member(name), members, hub, patience)
    self._progress = progress
    self._decided = threading.Event()
    self._lock = threading.Lock()  # between the thread and the program, which calls `leave`
    self._thread = threading.Thread(target=self._watch, daemon=True, name='watchdog')
    self._thread.start()

  def leave(self, status: int) -> None:
    """Announce that this process ends with `status`. After an error, the hub waits until the others have ended, too."""
    with self._lock:
      self._judge.leave(status)
      self._deliver()
    if status and self._judge.hub:
      self._thread.join(GRACE + LAST)

  def await_verdict(self) -> None:
    """Wait until a verdict ends this process. Returns if none arrives within 2 * BEAT."""
    if self._decided.wait(2 * BEAT):
      self._thread.join(GRACE + 2 * LAST)

  def _watch(self) -> None:
    judge, reported = self._judge, -math.inf
    while (peers := {self._connections[p]: p for p in judge.peers if not p.closed}) or judge.deadline < math.inf:
      due = min(reported + BEAT, judge.deadline) - time.monotonic()
      ready = wait(list(peers), timeout=max(0.01, due))
      now = time.monotonic()
      with self._lock:
        for connection in ready:
          self._receive(cast(Connection, connection), peers[cast(Connection, connection)], now)
        if now >= reported + BEAT:
          reported = now
          judge.report(Progress(*self._progress(), *whereabouts()), now)
        judge.look(now)
        self._deliver()
        if judge.verdict:
          self._decided.set()
        if message := judge.final_message(now):
          os.write(2, f'{message}\n'.encode())
          os._exit(judge.status)

  def _receive(self, connection: Connection, peer: Member, now: float) -> None:
    try:
      self._judge.receive(peer, connection.recv(), now)
    except (EOFError, ConnectionResetError):
      self._judge.close(peer, 'died', now)
    except OSError as error:
      self._judge.close(peer, f'cannot be reached ({error.strerror})', now)

  def _deliver(self) -> None:
    """Send the outbox. A peer that does not read gets nothing, because a full buffer would block this thread."""
    for peer, message in self._judge.outbox:
      connection = self._connections[peer]
      with suppress(OSError):
        if not peer.closed and select.select([], [connection], [], 0)[1]:
          connection.send(message)
    self._judge.outbox.clear()


def close_when_silent(connection: Connection) -> None:
  """Make the system close a TCP connection when nothing was acknowledged for SILENCE seconds (Linux only)."""
  if hasattr(socket, 'TCP_USER_TIMEOUT'):
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
      same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENCE))
