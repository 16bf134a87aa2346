"""Groups and their members: the live ones that the scheduler moves, and the finished ones that it hands over."""

from dataclasses import dataclass, field, replace

import numpy as np

from sprl.rollout.episodes import Comparison, Episode
from sprl.types import Completion, Request, Trajectory


@dataclass(frozen=True)
class Group:
  """A finished group."""

  number: int  # in the order of asking
  start_version: int  # version of the weights when it started
  trajectories: tuple[Trajectory, ...]  # of its members, in order; some may be withheld


@dataclass(eq=False)
class Member:
  """One sample of a live group, and what its episode waits for: a request or a ticket."""

  group: 'LiveGroup'
  uid: int
  episode: Episode
  attempt: int = 0
  request: Request | None = None  # that an engine is to complete
  partial: Completion | None = None  # tokens of the request that were drawn before it was interrupted
  engine: int | None = None  # that runs the request
  kept_on: int | None = None  # engine that keeps the cache of its last turn, or caches of other branches
  asked: float | None = None  # time of its newest request; None: it has made none yet
  ticket: int | None = None  # of a worker's call
  drawn: int = 0  # tokens that this attempt has drawn; updated when a request ends or is stopped
  lost: bool = False  # whether it failed too often
  result: Trajectory | None = None
  rank: int | None = None  # number of members of its group that finished before it

  def whole(self, completion: Completion) -> Completion:
    """Join a completion with the tokens that were drawn before the request was interrupted."""
    return completion if self.partial is None else self.partial.then(completion)


@dataclass(eq=False)
class LiveGroup:
  """A group that has started and is not consumed yet."""

  number: int
  start_version: int
  opened: float  # time of its start
  members: list[Member] = field(default_factory=list)
  engine: int | None = None  # that its members share
  comparison: Comparison | None = None  # of the members that count, once they have trajectories
  ticket: int | None = None  # of the worker's call that the comparison waits for

  def close(self) -> None:
    """Let go of the members. They refer to the group: only a garbage collection would free this cycle with all their tokens."""
    self.members = []

  @property
  def results(self) -> list[Trajectory]:
    """The trajectories of the members that are finished."""
    return [member.result for member in self.members if member.result is not None]

  def finished(self, train: int) -> Group:
    """Return the group with the trajectories of its finished members. All but `train` of them are withheld.

    The number of the group fixes the draw, so it does not depend on outcomes or on the order of finishing.
    """
    results = self.results
    taken = np.random.default_rng(self.number).permutation(len(results))[:train]
    return Group(self.number, self.start_version, tuple(replace(t, withheld=i not in taken) for i, t in enumerate(results)))
