"""The interfaces that the scheduler needs: engines, workers, and the source of its episodes.

The scheduler knows neither devices nor processes. Tests and simulations implement these interfaces without either.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from sprl.rollout.episodes import Comparison, Episode
from sprl.types import Completion, Request, Trajectory


@runtime_checkable
class EngineLike(Protocol):
  """Decodes requests in chunks. `sprl.sampler.engine.Engine` is one."""

  @property
  def capacity(self) -> int:
    """Requests that can run side by side."""
    ...

  @property
  def load(self) -> int:
    """Requests that wait or run."""
    ...

  def add(self, request: Request) -> None:
    """Queue a request."""
    ...

  def abort(self, uids: Collection[int] | None = None) -> list[Completion]:
    """End these requests (None: all of them) and return the tokens that they have. Allowed at any time."""
    ...

  def swap(self, weights: Any, version: int) -> None:
    """Replace the weights, between chunks."""
    ...

  def dispatch(self) -> None:
    """Start a chunk."""
    ...

  @property
  def ready(self) -> bool:
    """Whether the chunk under way is over."""
    ...

  def wait(self, seconds: float) -> None:
    """Wait until the chunk is over, at most `seconds`."""
    ...

  def collect(self) -> list[Completion]:
    """Wait until the chunk is over. Returns the requests that ended."""
    ...


@runtime_checkable
class WorkersLike(Protocol):
  """Grades answers or steps environments. `sprl.tasks.worker_pool.WorkerPool` is one."""

  def submit(self, call: Any) -> int:
    """Queue a call. Returns the ticket of its result."""
    ...

  def cancel(self, ticket: int) -> None:
    """Drop a call. Its result is ignored."""
    ...

  def poll(self, wanted: Collection[int]) -> Mapping[int, Any]:
    """Return the wanted results that are ready, by ticket. Each result is returned once. A result may be a Failure."""
    ...

  def wait(self, seconds: float | None) -> None:
    """Wait until a result may be ready, at most `seconds` (None: no limit)."""
    ...


@runtime_checkable
class EpisodeSource(Protocol):
  """Makes the episodes of a run."""

  def episode(self, number: int, uid: int, attempt: int, /) -> Episode:
    """Return the episode of one member of group `number`. A member that failed gets another attempt."""
    ...

  def comparison(self, number: int, trajectories: Sequence[Trajectory], /) -> Comparison | None:
    """Return the comparison of the members of a group that count, or None if each was graded alone."""
    ...
