"""Engines and workers of a run over several processes: what the scheduler asks of them is answered once, for all.

Every process has the engine, for each holds its devices' part of it and all start its programs. Whether a chunk is over, which
depends on when one asks, process 0 says. Workers (graders, environments) are process 0's alone: what they return, all are told.
Problems are dealt to the processes: each is told by the one that holds it.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from sprl.parallel.team import Team
from sprl.rollout.scheduler import EngineLike, WorkersLike
from sprl.rollout.sources import MakeEpisode, Source
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.problems import Problem, holder
from sprl.trajectory import Completion, Request


class AgreedEngine:
  """An engine of which all processes see the same at the same turn."""

  def __init__(self, inner: EngineLike, team: Team):
    self.inner, self._team = inner, team

  @property
  def capacity(self) -> int:
    """As the inner."""
    return self.inner.capacity

  @property
  def load(self) -> int:
    """As the inner."""
    return self.inner.load

  def add(self, request: Request) -> None:
    """As the inner."""
    self.inner.add(request)

  def abort(self, uids: Collection[int] | None = None) -> list[Completion]:
    """As the inner."""
    return self.inner.abort(uids)

  def swap(self, served: Any, version: int) -> None:
    """As the inner."""
    self.inner.swap(served, version)

  def dispatch(self) -> None:
    """As the inner."""
    self.inner.dispatch()

  def collect(self) -> list[Completion]:
    """As the inner."""
    return self.inner.collect()

  @property
  def ready(self) -> bool:
    """Whether it is in process 0; elsewhere it is about to be."""
    return self._team.agree('ready', lambda: self.inner.ready)

  def wait(self, seconds: float) -> None:
    """Process 0's affair: the others wait for what it says next."""
    if self._team.leads:
      self.inner.wait(seconds)


class AgreedWorkers:
  """Workers of process 0; elsewhere `inner` is None. Tickets are numbered here, and so the same everywhere."""

  def __init__(self, inner: WorkersLike | None, team: Team):
    self._inner, self._team = inner, team
    self._tickets = itertools.count()
    self._theirs: dict[int, int] = {}  # by our ticket, the inner's

  def submit(self, call: Any) -> int:
    """As the inner."""
    ticket = next(self._tickets)
    if self._inner is not None:
      self._theirs[ticket] = self._inner.submit(call)
    return ticket

  def cancel(self, ticket: int) -> None:
    """As the inner."""
    if self._inner is not None and ticket in self._theirs:
      self._inner.cancel(self._theirs.pop(ticket))

  def poll(self, wanted: Collection[int]) -> Mapping[int, Any]:
    """What process 0's have by now."""
    return self._team.agree('poll', lambda: self._poll(wanted))

  def _poll(self, wanted: Collection[int]) -> dict[int, Any]:
    assert self._inner is not None, 'process 0 has the workers'
    ours = {self._theirs[ticket]: ticket for ticket in wanted if ticket in self._theirs}
    results = {ours[theirs]: result for theirs, result in self._inner.poll(ours.keys()).items()}
    for ticket in results:
      del self._theirs[ticket]
    return results

  def wait(self, seconds: float | None) -> None:
    """Process 0's affair."""
    if self._inner is not None:
      self._inner.wait(seconds)


@dataclass(frozen=True)
class AgreedProblems(Sequence[Problem]):
  """Problems of which every process holds its share (tasks/problems.py); all must ask for one at once."""

  inner: Sequence[Problem]
  team: Team

  def __len__(self) -> int:
    return len(self.inner)

  def __getitem__(self, index):
    return self.team.agree('problem', lambda: self.inner[index], by=holder(index, self.team.processes))


@dataclass(frozen=True)
class AgreedSource:
  """A source of which process 0 says what its groups begin with, as its environment has it; all must ask at once."""

  inner: Source
  team: Team

  def __call__(self, number: int) -> MakeEpisode:
    """As the inner."""
    return self.inner(number)

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """As the inner of process 0. Raises EnvironmentFault."""
    first = self.team.agree('prompt', lambda: self._first(number))
    if isinstance(first, EnvironmentFault):
      raise first
    return first

  def _first(self, number: int) -> Int[np.ndarray, ' P'] | EnvironmentFault:
    try:
      return self.inner.prompt(number)
    except EnvironmentFault as fault:
      return fault

  def answer(self, number: int) -> str:
    """As the inner."""
    return self.inner.answer(number)
