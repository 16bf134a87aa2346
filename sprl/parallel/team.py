"""The processes of a run as one: what one of them decides, all know.

All processes go through the same program, and so put the same work on the devices in the same order. What could make them differ
is what a program's arguments do not fix: which grader answered first, whether a chunk is over by now, a signal, a file. That is
decided by process 0, and the others are told; so is what one of them alone has read:

    batch = team.agree('batch', lambda: poll())                    process 0 calls it; everyone gets what it returned
    problem = team.agree('problem', lambda: problems[5], by=1)     process 1 does

It goes from process to process directly, past the devices, which may be at work; all of it through process 0. Nobody waits but
those who are told.
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
from typing import Any, NoReturn, cast

import numpy as np
from jax.experimental import multihost_utils

from sprl.parallel import watchman
from sprl.parallel.processes import Place, initialize, place
from sprl.settings import SettingsError

_UNASKED = 0  # the number of what is said before anyone asks: a request to stop


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

  def agree[T](self, about: str, decide: Callable[[], T], by: int = 0) -> T:
    """What `decide` returns in process `by`, where alone it is called; it must be possible to pickle.

    Raises Apart where processes do not agree even what there is to decide.
    """
    if self.processes == 1:
      return decide()
    self._agreed += 1
    if self.process == by:
      value = decide()
      self._tell((self._agreed, about, value), self.others)
      return value
    teller = by if self.leads else 0
    heard = number, said, value = self._heard(teller)
    if (number, said) != (self._agreed, about):
      raise Apart(
        f'SPRL_PROCESS={self.process} asks about {about!r} ({self._agreed}), SPRL_PROCESS={teller} about {said!r} ({number})'
      )
    if self.leads:
      self._tell(heard, [other for k, other in enumerate(self.others, 1) if k != by])
    return value

  def each[T](self, about: str, say: Callable[[], T]) -> list[T]:
    """What `say` returns in each process, in their order."""
    return [self.agree(about, say, by=process) for process in range(self.processes)]

  def unless_refused[T](self, about: str, work: Callable[[], T], refusals: tuple[type[Exception], ...]) -> T:
    """What `work`, which agrees on nothing, returns here. Where it raises one of the `refusals` in one process, that is raised
    there, and in those in which it does not SettingsError, with what was said."""
    try:
      found, refused = work(), None
    except refusals as error:
      found, refused = None, error
    reasons = self.each(about, lambda: None if refused is None else str(refused))
    if refused is not None:
      raise refused
    for process, reason in enumerate(reasons):
      if reason is not None:
        raise SettingsError(f'SPRL_PROCESS={process}: {reason}')
    return cast(T, found)

  def stopped(self, here: str) -> str:
    """Why all are to stop, or '': `here` is what this process was asked."""
    if here and not self.leads and not self._asked:
      self._asked = here
      self._tell((_UNASKED, 'stop', here), self.others)

    def asked() -> str:
      for other in self.others:
        while other.poll():  # nobody says anything else before this is decided
          self._asked = self._with_others(other.recv)[2]
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
    self.each('here', lambda: None)
    self.agree('all', lambda: None)

  def progress(self) -> tuple[int, bool]:
    """How much it has agreed on so far, and whether it waits for another's word."""
    return self._agreed, self._waits

  def _tell(self, what: tuple[int, str, Any], others: Sequence[Connection]) -> None:
    told = pickle.dumps(what)
    for other in others:
      self._with_others(lambda other=other: other.send_bytes(told))

  def _heard(self, process: int) -> tuple[int, str, Any]:
    """What that process says when it is asked, waited for; that it was told to stop is kept until that is asked."""
    other = self.others[process - 1] if self.leads else self.others[0]
    self._waits = True
    try:
      while (heard := self._with_others(other.recv))[0] == _UNASKED:
        self._asked = heard[2]
      return heard
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
