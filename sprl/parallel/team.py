"""The processes of a run as one: what one of them decides, all know.

All processes go through the same program, and so put the same work on the devices in the same order. What could make them differ
is what a program's arguments do not fix: which grader answered first, whether a chunk is over by now, a signal, a file. That is
decided by process 0, and the others are told:

    batch = team.agree('batch', lambda: poll())       process 0 calls it; everyone gets what it returned

It goes from process to process directly, past the devices, which may be at work. Nobody waits but those who are told.
"""

import contextlib
import math
import os
import pickle
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn

import numpy as np
from jax.experimental import multihost_utils

from sprl.parallel import watchman
from sprl.parallel.processes import Place, initialize, place


class Apart(RuntimeError):
  """Processes that should do the same do not: an error of the program."""


@dataclass
class Team:
  """The processes of a run, as one of them sees them; alone unless told otherwise."""

  process: int = 0
  processes: int = 1
  others: Sequence[Connection] = ()  # those that follow; of one that follows, the one that leads
  lifeline: socket.socket | None = None  # to the watchman
  _agreed: int = 0
  _waits: bool = False  # for another's word
  _asked: str = ''  # to stop: what was passed on, or heard of

  @property
  def leads(self) -> bool:
    """Whether this process decides, and writes the run's folder."""
    return self.process == 0

  def agree[T](self, about: str, decide: Callable[[], T]) -> T:
    """What `decide` returns in process 0, where alone it is called; it must be possible to pickle.

    Raises Apart where processes do not agree even what there is to decide.
    """
    if self.processes == 1:
      return decide()
    self._agreed += 1
    if self.leads:
      value = decide()
      told = pickle.dumps((self._agreed, about, value))
      for other in self.others:
        self._with_others(lambda other=other: other.send_bytes(told))
      return value
    number, said, value = self._heard(self.others[0])
    if (number, said) != (self._agreed, about):
      raise Apart(f'SPRL_PROCESS={self.process} asks about {about!r} ({self._agreed}), SPRL_PROCESS=0 about {said!r} ({number})')
    return value

  def stopped(self, here: str) -> str:
    """Why all are to stop, or '': `here` is what this process was asked."""
    if here and not self.leads and not self._asked:
      self._asked = here
      self._with_others(lambda: self.others[0].send(here))

    def asked() -> str:
      for other in self.others:
        while other.poll():
          self._asked = self._with_others(other.recv)
      return here or self._asked

    return self.agree('stop', asked)

  def leave(self, status: int) -> int:
    """The end of this process, with that exit status: of a good one all wait for each other; another is the others' end, too."""
    if self.lifeline is None:
      return status
    if status:
      self.fail(status)
    self.meet()
    watchman.last_word(self.lifeline, 0)
    return status

  def meet(self) -> None:
    """Waits until all have come here."""
    if self.leads:
      for other in self.others:
        while self._heard(other) != 'here':
          pass  # it was asked to stop when there was nothing left to be stopped
    else:
      self._with_others(lambda: self.others[0].send('here'))
    self.agree('here', lambda: None)

  def progress(self) -> tuple[int, bool]:
    """How much it has agreed on so far, and whether it waits for another's word."""
    return self._agreed, self._waits

  def _heard(self, other: Connection) -> Any:
    """What the other says, waited for."""
    self._waits = True
    try:
      return self._with_others(other.recv)
    finally:
      self._waits = False

  def _with_others[T](self, say_or_hear: Callable[[], T]) -> T:
    """A connection that ends is another's end, of which the watchman knows more."""
    try:
      return say_or_hear()
    except (EOFError, OSError):
      time.sleep(10 * watchman.LAST)
      raise

  def fail(self, status: int) -> NoReturn:
    """Ends this process, and thereby the others. Not by the farewells of jax, which would wait for them; but process 0, without
    which jax ends them at once, gives them the time to say what they have found themselves."""
    if self.lifeline is not None:
      watchman.last_word(self.lifeline, status)
    until = time.monotonic() + watchman.GRACE + watchman.LAST
    for other in self.others if self.leads else ():
      with contextlib.suppress(EOFError, OSError):
        while other.poll(max(0.0, until - time.monotonic())):
          other.recv()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


ALONE = Team()


@contextmanager
def joined(
  environment: Mapping[str, str] = os.environ, silence: float = watchman.SILENCE, patience: float = math.inf
) -> Iterator[Team]:
  """The team that the environment says (sprl/parallel/processes.py), with a watchman beside each of its processes.

  While it lasts, a process whose connection breaks, or that is silent for so many seconds, is the end of all others: with status
  watchman.LOST, and a line on standard error that names it. So is one that agrees on nothing more for `patience` seconds, though
  nobody keeps it waiting, and its own end. So is one that raises. Raises SettingsError as `place`.
  """
  here = place(environment)
  if initialize(environment) == 1 or here is None:
    yield ALONE
    return
  team = _meet(here, silence, patience)
  try:
    yield team
  except Exception:
    time.sleep(watchman.LAST)  # if it is another's end that caused it, the watchman ends this one meanwhile, and says so
    traceback.print_exc()
    team.fail(1)


def _meet(here: Place, silence: float, patience: float) -> Team:
  """Connections between process 0 and each other process, one for them and one for their watchmen."""
  host, me = here.coordinator.rpartition(':')[0], _name(here.process, socket.gethostname())
  if here.process == 0:
    key = secrets.token_bytes(32)
    with Listener(('', 0), backlog=2 * here.processes, authkey=key) as listener:
      _told(key, int(listener.address[1]))
      found = {}
      while len(found) < 2 * (here.processes - 1):
        with contextlib.suppress(AuthenticationError, EOFError, OSError):  # of somebody else's
          connection = listener.accept()
          process, purpose, where = connection.recv()
          found[process, purpose] = connection, _name(process, where)
    others = [found[k, 'team'][0] for k in range(1, here.processes)]
    peers = [found[k, 'watch'] for k in range(1, here.processes)]
  else:
    key, port = _told(bytes(32), 0)
    team, watch = (_connected((host, port), key, here.process, purpose) for purpose in ('team', 'watch'))
    others, peers = [team], [(watch, _name(0, host))]
  met = Team(here.process, here.processes, others)
  met.lifeline = watchman.beside(me, peers, met.leads, met.progress, silence, patience)
  for connection, _ in peers:
    connection.close()
  return met


def _told(key: bytes, port: int) -> tuple[bytes, int]:
  """What process 0 says, over the devices this once."""
  numbers = np.array([*key, port >> 8, port & 255], np.int32)
  *numbers, high, low = multihost_utils.broadcast_one_to_all(numbers).tolist()
  return bytes(numbers), high << 8 | low


def _connected(address: tuple[str, int], key: bytes, process: int, purpose: str) -> Connection:
  connection = Client(address, authkey=key)
  connection.send((process, purpose, socket.gethostname()))
  return connection


def _name(process: int, host: str) -> str:
  return f'SPRL_PROCESS={process} ({host})'
