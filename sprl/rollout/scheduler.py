"""The scheduler: groups started as credits allow, their requests kept moving, finished groups handed to the learner.

    suspend -> sync -> resume -> batch -> train          the controller's loop (async_rollouts 1, 5)

`batch` and `pump` are the whole of it: one turn lets groups in, gives requests to the least-loaded engine, starts a chunk on
every engine whose last is over, and resumes the episodes whose completion, mark or environment step has come. Nothing waits for
the slowest of anything.

The scheduler knows neither devices nor processes nor time: engines, workers and clock are arguments, so that the same code runs
live, in tests and under simulation. It is for one thread, the controller's; others only compute.
"""

import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sprl.io.tokenizer import TokenizerError
from sprl.rollout.episodes import Episode, EpisodeError, Generate, Work
from sprl.rollout.timeline import Timeline
from sprl.rollout.window import Window
from sprl.settings import Rollout
from sprl.trajectory import Completion, Request, Trajectory

log = logging.getLogger(__name__)

GLANCE = 0.01  # seconds after which it looks up from an engine that it waits for, to the others and the workers
MOST_TOLD = 20  # reasons of failures that are logged
IN_VAIN = 50  # batches' worth of groups that come to nothing, with none between that does not
LOST = ('filtered', 'expired', 'surplus', 'failed')  # why a group is dropped, and its credit refunded


@runtime_checkable
class EngineLike(Protocol):
  """What the scheduler asks of an engine (sampler.slots.Slots)."""

  @property
  def capacity(self) -> int:
    """Requests that can run side by side."""
    ...

  @property
  def load(self) -> int:
    """Requests that wait or run."""
    ...

  def add(self, request: Request) -> None:
    """Queues a request."""
    ...

  def abort(self, uids: Collection[int] | None = None) -> list[Completion]:
    """Ends these requests (None: all) where they are, at any time."""
    ...

  def swap(self, served: Any, version: int) -> None:
    """Other weights from now on, between chunks."""
    ...

  def dispatch(self) -> None:
    """Starts a chunk."""
    ...

  @property
  def ready(self) -> bool:
    """Whether it is over."""
    ...

  def wait(self, seconds: float) -> None:
    """Until it is, or so many seconds are."""
    ...

  def collect(self) -> list[Completion]:
    """Waits for it, and returns the requests that ended."""
    ...


@dataclass(frozen=True)
class Failure:
  """Why a worker has no result: `kind` is `error` or `hang`."""

  kind: str
  reason: str


@runtime_checkable
class WorkersLike(Protocol):
  """What it asks of those who grade answers (tasks.grading_pool) and step environments (rollout.lanes)."""

  def submit(self, call: Any) -> int:
    """Begins a call; returns the ticket of its result."""
    ...

  def cancel(self, ticket: int) -> None:
    """Nobody waits for this result any more."""
    ...

  def poll(self, wanted: Collection[int]) -> Mapping[int, Any]:
    """Those of the wanted results that are there, each given out once."""
    ...

  def wait(self, seconds: float | None) -> None:
    """Until there may be one, or so many seconds are over."""
    ...


class Stalled(RuntimeError):
  """No batch will ever be ready: nothing runs and nothing may start, or all groups fail or are filtered out."""


@dataclass
class _Member:
  group: '_Group'
  uid: int
  episode: Episode
  attempt: int = 0
  request: Request | None = None  # what it waits for of an engine
  partial: Completion | None = None  # what aborted requests have drawn of that
  ticket: int | None = None  # what it waits for of the workers
  engine: int | None = None
  asked: float | None = None  # when; None: it has not got so far yet
  lost: bool = False  # has failed too often
  result: Trajectory | None = None

  def drawn(self, completion: Completion) -> Completion:
    """All that it has drawn with the newest completion, the last of its request's."""
    return completion if self.partial is None else self.partial.then(completion)


@dataclass
class _Group:
  number: int
  start_version: int
  opened: float
  members: list[_Member] = field(default_factory=list)
  engine: int | None = None  # of all its members, where they share one

  @property
  def results(self) -> list[Trajectory]:
    return [m.result for m in self.members if m.result is not None]


@dataclass(frozen=True)
class Group:
  """A finished group: its members' trajectories by index, and the version it was started under."""

  number: int
  start_version: int
  trajectories: tuple[Trajectory, ...]


class Scheduler:
  """Keeps engines and workers busy with episodes, within the window.

  `source(number)` opens the group of that number: a function of a member's uid and attempt that makes its episode.
  `now` is the clock, in seconds. `groups` is how many the run will consume in all: no more than it needs are started. `version`
  is that of the engines' weights, `first` the number of the first group of all.

  Raises Stalled from `pump` where nothing can ever happen again.
  """

  def __init__(
    self,
    engines: Sequence[EngineLike],
    workers: WorkersLike,
    source: Callable[[int], Callable[[int, int], Episode]],
    settings: Rollout,
    now: Callable[[], float],
    groups: int | None = None,
    timeline: Timeline | None = None,
    version: int = 0,
    first: int = 0,
  ):
    self.engines, self.workers, self.settings, self.now = engines, workers, settings, now
    self.window = Window(settings.prompts, settings.async_ratio, settings.order, settings.extra_prompts)
    self.timeline = timeline or Timeline(now)
    self.counts: Counter[str] = Counter()  # since the run began: groups by fate, aborted and resumed tokens, failures
    self.window.restore({'version': version, 'consumed': version * settings.prompts}, 0)
    self.next = first + self.window.consumed  # number of the next group that was never started
    self._source, self._needed = source, groups
    self._again: list[int] = []  # numbers to be started again after a resume, first
    self._groups: dict[int, _Group] = {}
    self._by_uid: dict[int, _Member] = {}
    self._tickets: dict[int, _Member] = {}
    self._pending: list[tuple[int, int]] = []  # (group, uid) that wait for an engine: the oldest group's go first
    self._held = [0] * len(engines)  # slots that belong to groups which are one task each
    self._chunks: dict[int, tuple[float, int]] = {}  # engine to when the chunk under way was started, and its load then
    self._suspended = False
    self._lately = _Lately()
    self._told: set[str] = set()
    self._in_a_row = 0  # groups that came to nothing

  # --- the controller's calls ------------------------------------------------------------------------------------------

  def batch(self, stopped: Callable[[], Any] = lambda: False) -> list[Group] | None:
    """The groups of the next update, by number; keeps everything going until they are there, or None where `stopped` says so."""
    start = self.now()
    while (numbers := self.window.ready()) is None:
      if stopped():
        return None
      self.pump()
    self._lately.waited += self.now() - start
    groups = [self._groups.pop(number) for number in numbers]
    self.window.consume(numbers)
    for number in self.window.surplus():
      self._drop(number, 'surplus')
    self.counts['consumed'] += len(groups)
    finished = [Group(g.number, g.start_version, tuple(g.results)) for g in groups]
    self._lately.consumed += [int(t.mask.sum()) for g in finished for t in g.trajectories]
    return finished

  def sync(self, served: Sequence[Any]) -> None:
    """New weights, an engine each, after an update: gc -> quiesce -> swap -> resume (async_rollouts 5)."""
    with self.timeline.span('controller', 'sync'):
      for number in self.window.expired():
        self._drop(number, 'expired')
      self.quiesce()
      self.window.advance()
      for engine, weights in zip(self.engines, served, strict=True):
        engine.swap(weights, self.window.version)

  def quiesce(self) -> None:
    """Leaves nothing on the engines that new weights may not find there: after the chunks under way, `recompute` takes off what
    runs, to be asked again with what it has drawn; `drain` waits for it, and gives the engines nothing new meanwhile; `keep` lets
    it be."""
    self._collect(list(self._chunks))
    match self.settings.sync:
      case 'recompute':
        for engine in self.engines:
          for completion in engine.abort():
            self._interrupted(completion)
      case 'drain':
        self._suspended = True
        while any(engine.load for engine in self.engines):
          self.pump()
        self._suspended = False

  def pump(self, patience: float = 1.0) -> None:
    """One turn: start, dispatch, chunks that are over, results. Where nothing moves it waits a little for an engine, or, where
    none has work, `patience` seconds at most for the workers."""
    moved = 0
    while step := self._dispatch() + self._start():  # what waits comes before what is new
      moved += step
    for i, engine in enumerate(self.engines):
      if i not in self._chunks and engine.load:
        self._chunks[i] = self.now(), engine.load
        engine.dispatch()
    busy = list(self._chunks)
    if busy and not moved and not any(self.engines[i].ready for i in busy):
      self.engines[busy[0]].wait(GLANCE)
    moved += self._collect([i for i in busy if self.engines[i].ready]) + self._results()
    if moved or busy:
      return
    if not self._tickets:
      raise Stalled(self._report())
    self.workers.wait(patience)  # not for ever: a call may be late by now

  @property
  def idle(self) -> bool:
    """Whether a turn could do nothing: no engine has work, no worker either, and nothing may start."""
    asked = any(self._waiting(uid) for _, uid in self._pending)
    return not (self._tickets or asked or self._may_start() or any(engine.load for engine in self.engines))

  def state(self) -> dict[str, Any]:
    """For a checkpoint, as JSON takes it. Groups that live are asked again after a resume: none is lost, none trained twice."""
    live = sorted({*self._groups, *self._again})
    counts = self.counts - Counter(started=len(self._groups))  # which will count again as they are asked again
    return {**self.window.state(), 'next': self.next, 'live': live, 'counts': dict(counts)}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues from `state`, before the first turn."""
    self.window.restore(dict(state), len(state['live']))
    self.next, self._again, self.counts = state['next'], sorted(state['live']), Counter(state['counts'])
    self._lately = _Lately(self.counts.copy())

  def metrics(self) -> tuple[dict[str, float], dict[str, float]]:
    """What happened since the last call, and where the window stands: counts and means, and apart from them seconds."""
    lately, self._lately = self._lately, _Lately(self.counts.copy())

    def mean(values: Sequence[float | int]) -> float:
      return float(np.mean(values)) if len(values) else 0.0

    return {
      **{f'async/{name}': float(self.counts[name] - lately.counts[name]) for name in (*LOST, *_COUNTED)},
      'async/live': float(self.window.live),
      'async/length_consumed': mean(lately.consumed),
      'async/length_started': mean(lately.started),  # longer than those consumed: what is trained on is biased to short ones
    }, {'batch_wait': lately.waited, 'queue': mean(lately.queued)}

  # --- a turn's parts --------------------------------------------------------------------------------------------------

  def _may_start(self) -> bool:
    beyond = self._needed is not None and self.window.started - self.window.refunded >= self._needed + self.window.extra
    return not self._suspended and not beyond and self.window.may_start()

  def _start(self) -> int:
    """Groups are started when an engine could take them, not before: their age counts from here."""
    started = 0
    opening = sum(member.asked is None for member in self._tickets.values())  # whose environments are about to say the first word
    while not self._pending and sum(max(0, self._room(i)) for i in range(len(self.engines))) > opening and self._may_start():
      number = self._again.pop(0) if self._again else self.next
      self.next = max(self.next, number + 1)
      entry = self.window.start(number)
      make, size = self._source(number), self.settings.group + self.settings.extra_members
      group = self._groups[number] = _Group(number, entry.start_version, self.now())
      group.members = [_Member(group, uid, make(uid, 0)) for uid in range(number * size, (number + 1) * size)]
      self.counts['started'] += 1
      started += 1
      for member in group.members:
        if number in self._groups:  # and was not given up meanwhile
          self._advance(member, None)
          opening += member.ticket is not None
    return started

  def _room(self, engine: int) -> int:
    most = min(self.settings.max_running or math.inf, self.engines[engine].capacity)
    return int(most) - (self.engines[engine].load if self.settings.replicate_prompts else self._held[engine])

  def _dispatch(self) -> int:
    """Requests to engines, the oldest groups' first."""
    left, sent = [], 0
    while self._pending and not self._suspended:
      number, uid = heapq.heappop(self._pending)
      if (member := self._waiting(uid)) is None or member.request is None:
        continue
      if (engine := self._engine_for(member)) is None:
        left.append((number, uid))
        if not any(self._room(i) > 0 for i in range(len(self.engines))):
          break
        continue
      member.engine = engine
      self.engines[engine].add(member.request)
      self._lately.queued.append(self.now() - (member.asked or 0.0))
      sent += 1
    for entry in left:
      heapq.heappush(self._pending, entry)
    return sent

  def _engine_for(self, member: _Member) -> int | None:
    """The engine of the group, where its members are one task or had better share one; else the least-loaded with room."""
    group, settings = member.group, self.settings
    if group.engine is not None and (not settings.replicate_prompts or self._room(group.engine) > 0):
      return group.engine
    needed = 1 if settings.replicate_prompts else len(group.members)
    room, engine = max((self._room(i), -i) for i in range(len(self.engines)))
    if room < needed:
      return None
    if settings.replica_routing == 'affinity' or not settings.replicate_prompts:
      group.engine = -engine
    if not settings.replicate_prompts:
      self._held[-engine] += needed
    return -engine

  def _collect(self, engines: Sequence[int]) -> int:
    """What ended on these engines, whose chunks are over or waited for; resumes the episodes that asked for it."""
    completions = []
    for i in engines:
      completions += self.engines[i].collect()
      start, load = self._chunks.pop(i)
      self.timeline.add(f'engine {i}', 'chunk', start, self.now(), load=load, version=self.window.version)
    for completion in completions:
      self._completed(completion)
    return len(completions)

  def _results(self) -> int:
    """Resumes the episodes whose work is done."""
    moved = 0
    for ticket, result in self.workers.poll(self._tickets).items():
      member = self._tickets.pop(ticket, None)
      if member is None:
        continue  # of a group that went a moment ago
      member.ticket = None
      moved += 1
      if isinstance(result, Failure):
        self._failed(member, result.kind, result.reason)
      else:
        self._advance(member, result)
    return moved

  # --- one member ------------------------------------------------------------------------------------------------------

  def _advance(self, member: _Member, value: Any) -> None:
    """Runs an episode up to what it waits for next."""
    try:
      wanted = member.episode.send(value)
    except StopIteration as end:
      self._ended(member, end.value)
      return
    except (EpisodeError, TokenizerError) as error:  # a chat template may refuse what an environment says
      self._failed(member, 'error', str(error))
      return
    if isinstance(wanted, Generate):
      member.request = Request(
        member.uid, member.group.number, wanted.prompt, wanted.max_tokens, wanted.given, attempt=member.attempt
      )
      self._queue(member)
    else:
      assert isinstance(wanted, Work)
      member.ticket = self.workers.submit(wanted.call)
      self._tickets[member.ticket] = member

  def _queue(self, member: _Member) -> None:
    self._by_uid[member.uid], member.asked, member.engine = member, self.now(), None
    heapq.heappush(self._pending, (member.group.number, member.uid))

  def _waiting(self, uid: int) -> _Member | None:
    """The member, if it waits for an engine; others may be among those pending that were stopped."""
    member = self._by_uid.get(uid)
    return None if member is None or member.request is None or member.engine is not None else member

  def _completed(self, completion: Completion) -> None:
    member = self._by_uid.get(completion.request.uid)
    if member is None or member.attempt != completion.request.attempt or member.request is None:
      return  # late, of a group or an attempt that is gone
    self._by_uid.pop(member.uid)
    whole = member.drawn(completion)
    member.request = member.partial = member.engine = None
    self._advance(member, whole)

  def _interrupted(self, completion: Completion) -> None:
    """An aborted request is asked again, with what it has drawn behind its prompt."""
    member = self._by_uid.get(completion.request.uid)
    if member is None or member.request is None:
      return
    member.partial, member.request = member.drawn(completion), completion.rest()
    self.counts['resumed_tokens'] += len(completion.tokens)
    self._queue(member)

  def _ended(self, member: _Member, trajectory: Trajectory) -> None:
    """A member has its reward; with the last one wanted, its group is complete."""
    group, wanted = member.group, self.settings.group
    member.result = replace(trajectory, uid=member.uid, group=group.number, start_version=group.start_version)
    self._lately.started.append(int(trajectory.mask.sum()))
    if len(group.results) < wanted:
      return
    for late in group.members:
      if late.result is None:
        self._stop(late)
    self._let_go(group)
    if self._dull([t.reward for t in group.results]):
      self._drop(group.number, 'filtered')
      self._in_vain(
        f'filtered out (config.rollout.query_filter = {self.settings.query_filter!r}): too easy, too hard, too much alike'
      )
    else:
      self._in_a_row = 0
      self.window.finish(group.number)
      self.timeline.add('groups', f'group {group.number}', group.opened, self.now(), version=group.start_version)

  def _dull(self, rewards: Sequence[float]) -> bool:
    """Whether a group is filtered out: it teaches too little (async_rollouts 3)."""
    s = self.settings
    match s.query_filter:
      case 'std':
        return max(rewards) == min(rewards) or float(np.std(rewards)) <= s.filter_std  # equal ones may have a rounding's
      case 'mean':
        return not s.filter_low < float(np.mean(rewards)) < s.filter_high
    return False

  def _failed(self, member: _Member, kind: str, reason: str) -> None:
    """Another attempt in its place, with other random numbers; after too many, the member is lost. A group of which too few are
    left is given up and refunded."""
    self.counts['hung' if kind == 'hang' else 'errors'] += 1
    self.timeline.add('failures', kind, self.now(), self.now(), group=member.group.number, reason=reason)
    if reason not in self._told and len(self._told) < MOST_TOLD:
      log.warning('a member of group %d, attempt %d: %s (said once)', member.group.number, member.attempt, reason)
      self._told.add(reason)
    self._stop(member)
    if member.attempt >= self.settings.retries:
      member.lost = True
      if sum(not each.lost for each in member.group.members) >= self.settings.group:
        return  # the others are enough
      self._drop(member.group.number, 'failed')
      self._in_vain(f'given up or filtered out; the last because {reason}')
      return
    member.attempt += 1
    member.episode = self._source(member.group.number)(member.uid, member.attempt)
    self._advance(member, None)

  def _in_vain(self, why: str) -> None:
    """Raises Stalled where so many groups have come to nothing that none may ever do."""
    self._in_a_row += 1
    if self._in_a_row > IN_VAIN * self.settings.prompts:
      raise Stalled(f'{self._in_a_row} groups in a row were {why}')

  def _stop(self, member: _Member) -> None:
    """Ends what a member waits for; what still comes of it is ignored."""
    if member.ticket is not None:
      self._tickets.pop(member.ticket, None)
      self.workers.cancel(member.ticket)
    drawn = 0 if member.partial is None else len(member.partial.tokens)
    if member.engine is not None:
      drawn += sum(len(completion.tokens) for completion in self.engines[member.engine].abort([member.uid]))
    if drawn:
      self.counts['aborted_tokens'] += drawn
      self._lately.started.append(drawn)
    self._by_uid.pop(member.uid, None)
    member.episode.close()
    member.ticket = member.engine = member.request = member.partial = None

  # --- groups ----------------------------------------------------------------------------------------------------------

  def _drop(self, number: int, fate: str) -> None:
    """A group that will not be trained on: its requests end, its credit comes back."""
    group = self._groups.pop(number)
    for member in group.members:
      if member.result is None:
        self._stop(member)
    self._let_go(group)
    self.window.refund(number)
    self.counts[fate] += 1

  def _let_go(self, group: _Group) -> None:
    """The slots that were held for a group which is one task."""
    if group.engine is not None and not self.settings.replicate_prompts:
      self._held[group.engine] -= len(group.members)
    group.engine = None

  def _report(self) -> str:
    w = self.window
    return (
      f'no rollout runs and none may start, and the batch of version {w.version} is not there: started {w.started}, refunded '
      f'{w.refunded}, consumed {w.consumed}, running {len(w.running)}, complete {len(w.complete)}, '
      f'{dict(self.counts)}'
    )


_COUNTED = ('started', 'errors', 'hung', 'aborted_tokens', 'resumed_tokens')


@dataclass
class _Lately:
  """What metrics are made of, since they were made last."""

  counts: Counter[str] = field(default_factory=Counter)
  waited: float = 0.0
  queued: list[float] = field(default_factory=list)
  consumed: list[int] = field(default_factory=list)
  started: list[int] = field(default_factory=list)  # tokens of what ended, and of what was aborted, which would be longer
