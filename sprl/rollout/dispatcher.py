"""Queue scheduling of requests: which request runs on which engine, and when an engine starts its next chunk.

Requests wait in one queue, the oldest group's first. A request goes to the engine of its group if that engine has a free row: the
engine then prefills the prompt once. A later turn goes to the engine that keeps its cache, if that has a free row. Otherwise a
request goes to the least-loaded engine. With `replicate` off a group is one task: it
holds a row for each member until its last member ends.
"""

import heapq
from collections.abc import Callable, Collection, Sequence

from sprl.rollout.groups import LiveGroup, Member
from sprl.rollout.interfaces import EngineLike
from sprl.rollout.timeline import Timeline
from sprl.types import Completion


class Dispatcher:
  """The requests of one run that wait for an engine or run on one.

  Args:
    engines: the engines.
    replicate: whether each member of a group is a separate task.
    now: the clock, in seconds.
    timeline: where chunks are recorded.
  """

  def __init__(
    self,
    engines: Sequence[EngineLike],
    replicate: bool,
    now: Callable[[], float],
    timeline: Timeline,
  ):
    self.engines, self._replicate, self._now, self._timeline = engines, replicate, now, timeline
    self._members: dict[int, Member] = {}  # by uid
    self._queue: list[tuple[int, int]] = []  # heap of (group, uid), with entries of members that do not wait any more
    self._held = [0] * len(engines)  # rows held by groups that are one task
    self._chunks: dict[int, tuple[float, int]] = {}  # engine -> start time and load of the chunk under way

  # --- members -----------------------------------------------------------------------------------------------------------

  def ask(self, member: Member) -> None:
    """Queue the request of a member."""
    self._members[member.uid] = member
    member.asked, member.engine = self._now(), None
    heapq.heappush(self._queue, (member.group.number, member.uid))

  def match(self, completion: Completion) -> Member | None:
    """Return the member that waits for this completion. None: its group or attempt is gone, and the completion is late."""
    member = self._members.get(completion.request.uid)
    current = member is not None and member.request is not None and member.request.attempt == completion.request.attempt
    return member if current else None

  def done(self, member: Member) -> None:
    """Remove a member whose request is completed."""
    self._members.pop(member.uid, None)
    if member.request is not None and member.request.keep:
      member.kept_on = member.engine  # without `keep` it stays: other branches of the episode may have caches there
    member.request = member.partial = member.engine = None

  def stop(self, member: Member) -> int:
    """End the request of a member, if it has one. Returns the number of tokens drawn for it."""
    drawn = 0 if member.partial is None else len(member.partial.tokens)
    if member.engine is not None:
      drawn += sum(len(completion.tokens) for completion in self.engines[member.engine].abort([member.uid]))
    before = member.kept_on  # of the turn before; a request that has not begun has not taken its cache
    self.done(member)
    self.forget(member)
    if before is not None:
      self.engines[before].forget([member.uid])
    return drawn

  def forget(self, member: Member) -> None:
    """Drop the cache that an engine keeps of a member."""
    if member.kept_on is not None:
      self.engines[member.kept_on].forget([member.uid])
      member.kept_on = None

  def let_go(self, group: LiveGroup) -> None:
    """Free the rows that a group holds."""
    if group.engine is not None and not self._replicate:
      self._held[group.engine] -= len(group.members)
    group.engine = None

  def _waiting(self, uid: int) -> Member | None:
    """The member with this uid, if it waits for an engine."""
    member = self._members.get(uid)
    return None if member is None or member.engine is not None else member

  # --- from the queue to the engines ---------------------------------------------------------------------------------------

  def send(self) -> list[float]:
    """Give requests to engines while there is room. Returns the seconds that each of them waited."""
    waited, left = [], []
    while self._queue:
      entry = heapq.heappop(self._queue)
      if (member := self._waiting(entry[1])) is None or member.request is None or member.asked is None:
        continue
      if (engine := self._engine_for(member)) is None:
        left.append(entry)
        if not self.room:
          break
        continue
      if engine != member.kept_on:
        self.forget(member)
      member.engine = engine
      self.engines[engine].add(member.request)
      waited.append(self._now() - member.asked)
    for entry in left:
      heapq.heappush(self._queue, entry)
    return waited

  @property
  def room(self) -> int:
    """Requests that the engines could take now."""
    return sum(max(0, self._room(i)) for i in range(len(self.engines)))

  @property
  def queued(self) -> bool:
    """Whether the queue has entries, also of members that do not wait any more."""
    return bool(self._queue)

  @property
  def waiting(self) -> bool:
    """Whether a request waits for an engine."""
    return any(self._waiting(uid) for _, uid in self._queue)

  @property
  def load(self) -> int:
    """Requests that wait or run on the engines."""
    return sum(engine.load for engine in self.engines)

  def _room(self, engine: int) -> int:
    return self.engines[engine].capacity - (self.engines[engine].load if self._replicate else self._held[engine])

  def _engine_for(self, member: Member) -> int | None:
    """The engine for the request of a member; None if there is no room."""
    group = member.group
    if member.kept_on is not None and self._replicate and self._room(member.kept_on) > 0:
      return member.kept_on
    if group.engine is not None and (not self._replicate or self._room(group.engine) > 0):
      return group.engine
    needed = 1 if self._replicate else len(group.members)
    engine = max(range(len(self.engines)), key=self._room)
    if self._room(engine) < needed:
      return None
    group.engine = engine
    if not self._replicate:
      self._held[engine] += needed
    return engine

  # --- chunks --------------------------------------------------------------------------------------------------------------

  def start_chunks(self) -> None:
    """Start a chunk on every engine that has requests and no chunk under way."""
    for i, engine in enumerate(self.engines):
      if i not in self._chunks and engine.load:
        self._chunks[i] = self._now(), engine.load
        engine.dispatch()

  @property
  def busy(self) -> list[int]:
    """Engines with a chunk under way."""
    return list(self._chunks)

  def collect(self, engines: Collection[int], version: int) -> list[Completion]:
    """Wait for the chunks of these engines. Returns the completions; `version` of the weights is for the timeline."""
    completions = []
    for i in engines:
      completions += self.engines[i].collect()
      start, load = self._chunks.pop(i)
      self._timeline.add(f'engine {i}', 'chunk', start, self._now(), load=load, version=version)
    return completions
