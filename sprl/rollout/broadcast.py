"""Runs over several processes: wrappers that make every process see the same engines, workers and problems.

Every process runs the same scheduler and must take the same decisions. One process takes each decision that depends on time or on
the state of one process, and sends it to the others:

    engine     all processes have it, because each holds its devices' part; process 0 decides whether a chunk is over
    workers    only process 0 has them, and sends their results
    problems   each process holds a share, and sends a problem when the scheduler needs it
    prompts    of environments: only process 0 has environments

With one process there are no wrappers (`across`).
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from sprl.distributed.team import Team
from sprl.io.tokenizer import TokenizerError
from sprl.rollout.episodes import Comparison, Episode
from sprl.rollout.interfaces import EngineLike, WorkersLike
from sprl.rollout.prompts import Source
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.problems import Problem, holder
from sprl.types import Completion, Request, Trajectory


def across(team: Team, wrapper: Callable[[Any, Team], Any], inner: Any) -> Any:
  """Return `inner`, wrapped if the run has several processes."""
  return inner if team.processes == 1 else wrapper(inner, team)


class BroadcastEngine:
  """An engine over several processes. All processes see the end of a chunk at the same turn of the scheduler."""

  def __init__(self, inner: EngineLike, team: Team):
    self.inner, self._team = inner, team

  @property
  def capacity(self) -> int:
    """Requests that can run side by side."""
    return self.inner.capacity

  @property
  def load(self) -> int:
    """Requests that wait or run."""
    return self.inner.load

  def add(self, request: Request) -> None:
    """Queue a request."""
    self.inner.add(request)

  def abort(self, uids: Collection[int] | None = None) -> list[Completion]:
    """End these requests (None: all of them) and return the tokens that they have."""
    return self.inner.abort(uids)

  def forget(self, uids: Collection[int] | None = None) -> None:
    """Drop the caches that are kept of these sequences (None: of all)."""
    self.inner.forget(uids)

  def swap(self, weights: Any, version: int) -> None:
    """Replace the weights."""
    self.inner.swap(weights, version)

  def dispatch(self) -> None:
    """Start a chunk."""
    self.inner.dispatch()

  def collect(self) -> list[Completion]:
    """Wait until the chunk is over. Returns the requests that ended."""
    return self.inner.collect()

  @property
  def ready(self) -> bool:
    """Whether the chunk is over in process 0."""
    return self._team.broadcast('ready', lambda: self.inner.ready)

  def wait(self, seconds: float) -> None:
    """Wait in process 0. The others wait for its next message."""
    if self._team.leads:
      self.inner.wait(seconds)


class BroadcastWorkers:
  """The workers of process 0. Elsewhere `inner` is None. Tickets are numbered here, so that they are the same everywhere."""

  def __init__(self, inner: WorkersLike | None, team: Team):
    self._inner, self._team = inner, team
    self._tickets = itertools.count()
    self._theirs: dict[int, int] = {}  # our ticket -> the inner workers'

  def submit(self, call: Any) -> int:
    """Queue a call in process 0. Returns the ticket of its result."""
    ticket = next(self._tickets)
    if self._inner is not None:
      self._theirs[ticket] = self._inner.submit(call)
    return ticket

  def cancel(self, ticket: int) -> None:
    """Drop a call."""
    if self._inner is not None and ticket in self._theirs:
      self._inner.cancel(self._theirs.pop(ticket))

  def poll(self, wanted: Collection[int]) -> Mapping[int, Any]:
    """Return the wanted results that are ready in process 0."""
    return self._team.broadcast('poll', lambda: self._poll(wanted))

  def _poll(self, wanted: Collection[int]) -> dict[int, Any]:
    assert self._inner is not None, 'process 0 has the workers'
    ours = {self._theirs[ticket]: ticket for ticket in wanted if ticket in self._theirs}
    results = {ours[theirs]: result for theirs, result in self._inner.poll(ours.keys()).items()}
    for ticket in results:
      del self._theirs[ticket]
    return results

  def wait(self, seconds: float | None) -> None:
    """Wait in process 0. The others wait for its next message."""
    if self._inner is not None:
      self._inner.wait(seconds)


@dataclass(frozen=True)
class BroadcastProblems(Sequence[Problem]):
  """Problems of which every process holds a share (sprl/tasks/problems.py). All processes must ask for one at the same time."""

  inner: Sequence[Problem]
  team: Team

  def __len__(self) -> int:
    return len(self.inner)

  def __getitem__(self, index):
    return self.team.broadcast('problem', lambda: self.inner[index], by=holder(index, self.team.processes))


@dataclass(frozen=True)
class BroadcastSource:
  """A source whose prompts come from the environments of process 0. All processes must ask for one at the same time."""

  inner: Source
  team: Team

  def episode(self, number: int, uid: int, attempt: int) -> Episode:
    """Return the episode of one member of a group."""
    return self.inner.episode(number, uid, attempt)

  def comparison(self, number: int, trajectories: Sequence[Trajectory]) -> Comparison | None:
    """Return the comparison of the members of a group."""
    return self.inner.comparison(number, trajectories)

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """Return the ids that the group's episodes begin with. Raises EnvironmentFault and TokenizerError in all processes."""
    first = self.team.broadcast('prompt', lambda: self._first(number))
    try:
      if isinstance(first, Exception):
        raise first
      return first
    finally:
      del first  # its traceback holds this frame: a cycle would keep the arrays of all callers alive

  def _first(self, number: int) -> Int[np.ndarray, ' P'] | EnvironmentFault | TokenizerError:
    try:
      return self.inner.prompt(number)
    except (EnvironmentFault, TokenizerError) as fault:
      return fault

  def answer(self, number: int) -> str:
    """Return the right answer."""
    return self.inner.answer(number)
