"""The scheduler: starts groups as the window allows, keeps their episodes moving, hands finished groups to the learner.

    batch -> train -> sync -> batch -> ...               the controller's loop (docs/methods/async.md, Queue scheduling)

`batch` repeats `pump` until a batch is ready. One `pump` is one turn:

1. give waiting requests to engines, and start groups while the window and the engines have room;
2. start a chunk on every engine whose last chunk is over;
3. collect finished chunks and the results of workers, and resume the episodes that waited for them.

A group is finished when enough members have ended and, with groupwise rewards, workers have compared them.

Samples, graders and environments do not wait for one another; a batch waits until its groups are complete. Engines, workers and
the clock are arguments, so the same code runs live, in tests and in a simulation. For use by one thread.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sprl.config import Rollout
from sprl.foreign import kind_of
from sprl.io.tokenizer import TokenizerError
from sprl.objective.advantages import equal_rewards
from sprl.rollout.dispatcher import Dispatcher
from sprl.rollout.episodes import EpisodeError, Generate, Work
from sprl.rollout.groups import Group, LiveGroup, Member
from sprl.rollout.interfaces import EngineLike, EpisodeSource, WorkersLike
from sprl.rollout.tally import Tally
from sprl.rollout.timeline import Timeline
from sprl.rollout.window import Window
from sprl.tasks.worker_pool import Failure
from sprl.types import Completion, Request, Trajectory

log = logging.getLogger(__name__)

GLANCE = 0.01  # seconds to wait for one engine before the others and the workers are looked at
RETRIES = 2  # further attempts at a member whose environment or agent failed, before it is lost
WARNINGS = 20  # kinds of failures that are logged
FRUITLESS_BATCHES = 50  # if more groups in a row than this many batches hold fail, are filtered out or ungraded, the run stops


class Stalled(RuntimeError):
  """No batch will ever be ready: nothing runs and nothing may start, or all groups fail or are filtered out."""


class Scheduler:
  """Keeps engines and workers busy with episodes, within the window.

  Args:
    engines: decode the requests of the episodes.
    workers: answer the calls of the episodes.
    source: makes the episodes.
    settings: the window, the order, the filter, and how rollouts are interrupted at a sync.
    now: the clock, in seconds.
    groups: groups that the run will consume; no more than it needs are started. None: no limit.
    timeline: where spans are recorded. None: a timeline of the scheduler's own.
    version: the version of the engines' weights (finished steps).
    first: the number of the first group of the run.
    retries: further attempts at a member whose environment or agent failed.
    different: groups that may be asked. If too many of them are dropped, a batch is smaller. None: no limit.

  Raises:
    Stalled: from `batch` and `pump`, if no batch can ever be ready.
  """

  def __init__(
    self,
    engines: Sequence[EngineLike],
    workers: WorkersLike,
    source: EpisodeSource,
    settings: Rollout,
    now: Callable[[], float],
    groups: int | None = None,
    timeline: Timeline | None = None,
    version: int = 0,
    first: int = 0,
    retries: int = RETRIES,
    different: int | None = None,
  ):
    self.engines, self.workers, self.source, self.settings, self.now = engines, workers, source, settings, now
    self.retries = retries
    self.timeline = timeline or Timeline(now)
    self.window = Window(settings.prompts, settings.async_ratio, settings.order, settings.extra_prompts)
    self.window.restore({'version': version, 'consumed': version * settings.prompts}, 0)
    self.next = first + self.window.consumed  # number of the next group that never started
    self._dispatcher = Dispatcher(engines, settings.replicate_prompts, now, self.timeline)
    self._tally = Tally()
    self._needed, self._different = groups, different
    self._again: list[int] = []  # numbers of groups to start again after a resume
    self._groups: dict[int, LiveGroup] = {}
    self._tickets: dict[int, Member | LiveGroup] = {}  # members, and comparisons of groups, that wait for a worker
    self._draining = False  # whether nothing new goes to the engines
    self._warned: set[str] = set()
    self._fruitless, self._why_fruitless = 0, ''  # groups dropped in a row, and what happened to them

  # --- the controller's calls ----------------------------------------------------------------------------------------------

  def batch(self, stopped: Callable[[], Any] = lambda: False) -> list[Group] | None:
    """Return the groups of the next step, in the order of their numbers.

    Pumps until the groups are complete. Returns None only if `stopped()` is true before that. Raises Stalled if the groups can
    never be complete.
    """
    start = self.now()
    while not (numbers := self.window.ready()):
      if stopped():
        return None
      if self._hopeless:
        raise Stalled(self._report())
      self.pump()
    self._tally.recent.waited += self.now() - start
    groups = [self._groups.pop(number) for number in numbers]
    self.window.consume(numbers)
    for number in list(self._groups) if self._over else self.window.surplus():
      self._drop(number, 'surplus')
    self.counts['consumed'] += len(groups)
    finished = [group.finished(self.settings.group) for group in groups]
    for live, group in zip(groups, finished):
      self._tally.ended(live.members, group.trajectories)
      live.close()
    return finished

  def sync(self, weights: Sequence[Any], stopped: Callable[[], Any] = lambda: False) -> None:
    """Give new weights to each engine after an update (docs/methods/async.md, Weight synchronisation).

    `weights` has one entry per engine. `stopped` is that of `quiesce`.
    """
    with self.timeline.span('controller', 'sync'):
      for number in self.window.expired():
        self._drop(number, 'expired')
      self.quiesce(stopped)
      self.window.advance()
      for engine, its_weights in zip(self.engines, weights, strict=True):
        engine.swap(its_weights, self.window.version)

  def quiesce(self, stopped: Callable[[], Any] = lambda: False) -> None:
    """Wait for the chunks under way and prepare the engines for new weights, by `rollout.sync`.

    recompute   aborts the running requests and queues each of them again, with the tokens that it has drawn
    drain       waits until all requests of the engines have ended, queued ones too; no other one goes to them meanwhile. Once
                `stopped` is true, the rest is aborted as with recompute
    keep        leaves requests and caches as they are

    Except with keep, the caches that are kept between the turns of conversations are dropped.
    """
    self._collect(self._dispatcher.busy)
    if self.settings.sync == 'drain':
      self._draining = True
      while self._dispatcher.load and not stopped():
        self.pump()
      self._draining = False
    if self.settings.sync != 'keep':
      for engine in self.engines:
        for completion in engine.abort():  # with drain none, unless `stopped` ended it
          self._interrupted(completion)
        engine.forget()

  def pump(self, patience: float = 1.0) -> None:
    """Take one turn.

    If nothing moves, waits for an engine. If no engine has work, waits at most `patience` seconds for the workers.

    Raises Stalled if nothing runs and nothing may start.
    """
    moved = 0
    while step := self._send() + self._start():  # waiting requests go before new groups
      moved += step
    self._dispatcher.start_chunks()
    busy = self._dispatcher.busy
    if busy and not moved and not any(self.engines[i].ready for i in busy):
      self.engines[busy[0]].wait(GLANCE)
    moved += self._collect([i for i in busy if self.engines[i].ready]) + self._results()
    if moved or busy:
      return
    if not self._tickets:
      raise Stalled(self._report())
    self.workers.wait(patience)  # bounded: a call may exceed its time limit during the wait

  @property
  def idle(self) -> bool:
    """Whether a turn would do nothing: engines and workers have no work, and no group may start."""
    return not (self._tickets or self._dispatcher.waiting or self._may_start() or self._dispatcher.load)

  @property
  def counts(self) -> Counter[str]:
    """Groups by outcome, failures and tokens, since the run began."""
    return self._tally.counts

  def metrics(self) -> tuple[dict[str, float], dict[str, float]]:
    """Return metrics and times (seconds) since the last call."""
    return self._tally.metrics(self.window.live)

  def state(self) -> dict[str, Any]:
    """Return the state for a checkpoint, as JSON. Live groups start again after a resume: none is lost or trained on twice."""
    live = sorted({*self._groups, *self._again})
    return {**self.window.state(), 'next': self.next, 'live': live, **self._tally.state()}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continue from a state, before the first turn."""
    self.window.restore(dict(state), len(state['live']))
    self.next, self._again = state['next'], sorted(state['live'])
    self._tally.restore(state)

  # --- the parts of a turn ---------------------------------------------------------------------------------------------------

  def _send(self) -> int:
    waited = [] if self._draining else self._dispatcher.send()
    self._tally.recent.queued += waited
    return len(waited)

  def _start(self) -> int:
    """Start groups while an engine could take them, not earlier: their age counts from here. Returns how many."""
    started = 0
    if not self._may_start():
      return started
    waiting = self._tickets.values()
    opening = sum(isinstance(each, Member) and each.asked is None for each in waiting)  # their first requests come soon
    while not self._dispatcher.queued and self._dispatcher.room > opening and self._may_start():
      known = bool(self._again)
      number = self._again.pop(0) if known else self.next
      self.next = max(self.next, number + 1)
      group = self._groups[number] = LiveGroup(number, self.window.start(number).start_version, self.now())
      size = self.settings.group + self.settings.extra_members
      uids = range(number * size, (number + 1) * size)
      group.members = [Member(group, uid, self.source.episode(number, uid, 0)) for uid in uids]
      self.counts['started'] += not known  # it counted when it first started
      started += 1
      for member in group.members:
        if number in self._groups:  # a failure of another member may have dropped the group
          self._advance(member, None)
          opening += member.ticket is not None
    return started

  @property
  def _over(self) -> bool:
    """Whether the run has all the groups that it needs."""
    return self._needed is not None and self.window.consumed >= self._needed

  def _may_start(self) -> bool:
    extra = self.window.extra if self.window.gathering and not self._over else 0
    enough = self._needed is not None and self.window.started - self.window.refunded >= self._needed + extra
    return not self._draining and not self._hopeless and not enough and self.window.may_start()

  def _collect(self, engines: Sequence[int]) -> int:
    """Resume the episodes whose completions these engines have. Returns how many requests ended."""
    completions = self._dispatcher.collect(engines, self.window.version)
    for completion in completions:
      self._completed(completion)
    return len(completions)

  def _results(self) -> int:
    """Resume the episodes whose calls are answered. Returns how many."""
    moved = 0
    for ticket, result in self.workers.poll(self._tickets).items():
      waiter = self._tickets.pop(ticket, None)
      if waiter is None:
        continue  # a result before this one dropped its group
      waiter.ticket = None
      moved += 1
      if isinstance(waiter, LiveGroup):
        self._compare(waiter, result)
      elif isinstance(result, Failure):
        self._failed(waiter, result)
      else:
        self._advance(waiter, result)
    return moved

  # --- one member --------------------------------------------------------------------------------------------------------------

  def _advance(self, member: Member, value: Any) -> None:
    """Run an episode up to the next thing that it waits for."""
    try:
      wanted = member.episode.send(value)
    except StopIteration as end:
      self._ended(member, end.value)
      return
    except (EpisodeError, TokenizerError) as error:  # a chat template may refuse an environment's messages
      self._failed(member, Failure('error', str(error)))
      return
    match wanted:
      case Generate():
        number = member.group.number
        attempt = member.attempt + wanted.branch * (self.retries + 1)
        request = Request(member.uid, number, wanted.prompt, wanted.max_tokens, wanted.given, attempt=attempt)
        continues = None if member.kept_on is None else request.key
        member.request = replace(request, keep=wanted.keep, continues=continues)
        self._dispatcher.ask(member)
      case Work():
        member.ticket = self.workers.submit(wanted.call)
        self._tickets[member.ticket] = member

  def _completed(self, completion: Completion) -> None:
    if (member := self._dispatcher.match(completion)) is not None:
      whole = member.whole(completion)
      member.drawn += len(whole.tokens)
      self._dispatcher.done(member)
      self._advance(member, whole)

  def _interrupted(self, completion: Completion) -> None:
    """Ask for the rest of an aborted request."""
    if (member := self._dispatcher.match(completion)) is not None:
      member.partial, member.request = member.whole(completion), completion.rest()
      self.counts['resumed_tokens'] += len(completion.tokens)
      self._dispatcher.ask(member)

  def _ended(self, member: Member, trajectory: Trajectory) -> None:
    """Keep the trajectory of a member."""
    group = member.group
    member.rank = len(group.results)
    self._dispatcher.forget(member)
    member.result = replace(trajectory, uid=member.uid, group=group.number, start_version=group.start_version)
    self._finish(group)

  def _finish(self, group: LiveGroup) -> None:
    """Finish a group if it is complete (docs/methods/async.md, Redundancy)."""
    if not self._complete(group):
      return
    self._stop_all(group)
    group.comparison = self.source.comparison(group.number, group.results)
    if group.comparison is None:
      self._settle(group)
    else:
      self._compare(group, None)

  def _compare(self, group: LiveGroup, value: Any) -> None:
    """Run the comparison of a group up to the next call that it waits for, or to its end."""
    assert group.comparison is not None
    try:
      wanted = group.comparison.send(value)
    except StopIteration as end:
      for member, trajectory in zip([m for m in group.members if m.result is not None], end.value, strict=True):
        member.result = trajectory
      self._settle(group)
      return
    group.ticket = self.workers.submit(wanted.call)
    self._tickets[group.ticket] = group

  def _settle(self, group: LiveGroup) -> None:
    """Count a graded group, or drop it if the filter rejects its rewards. A group without any known reward is fruitless too."""
    known = [t.reward for t in group.results if t.reward_known]
    filtered = self._filtered(known)
    if known and not filtered:
      self._fruitless = 0
    else:
      why = next((t.reason for t in group.results if not t.reward_known), '')
      equal = "replaced, because their rewards are equal (config.rollout.equal_groups = 'replace')"
      self._fruitless, self._why_fruitless = self._fruitless + 1, equal if known else f'not graded; the last because {why}'
    if filtered:
      self._drop(group.number, 'filtered')
      return
    self.window.finish(group.number)
    self.timeline.add('groups', f'group {group.number}', group.opened, self.now(), version=group.start_version)

  def _complete(self, group: LiveGroup) -> bool:
    """Whether `rollout.group` members have a trajectory; with `rollout.members = 'all'`, whether all have that are not lost."""
    if self.settings.members == 'all':
      return all(member.lost or member.result is not None for member in group.members)
    return len(group.results) >= self.settings.group

  def _filtered(self, rewards: Sequence[float]) -> bool:
    """Whether a group with these known rewards is replaced (docs/methods/async.md, Filters and failures)."""
    return self.settings.equal_groups == 'replace' and equal_rewards(rewards)

  def _failed(self, member: Member, failure: Failure) -> None:
    """Start another attempt with other random numbers.

    After `retries` further attempts the member is lost. A group with fewer than `rollout.group` members left is dropped.
    """
    number, why = member.group.number, failure.reason
    self.counts['hung' if failure.kind == 'timeout' else 'errors'] += 1
    self.timeline.add('failures', failure.kind, self.now(), self.now(), group=number, reason=why)
    if kind_of(why) not in self._warned and len(self._warned) < WARNINGS:
      log.warning('group %d, attempt %d of a member: %s (logged once)', number, member.attempt, why)
      self._warned.add(kind_of(why))
    self._stop(member)
    if member.attempt < self.retries:
      member.attempt, member.drawn = member.attempt + 1, 0
      member.episode = self.source.episode(number, member.uid, member.attempt)
      self._advance(member, None)
      return
    member.lost = True
    if sum(not each.lost for each in member.group.members) < self.settings.group:
      self._drop(number, 'failed')
      self._fruitless, self._why_fruitless = self._fruitless + 1, f'given up or filtered out; the last because {why}'
    else:
      self._finish(member.group)  # the others may have waited for this member

  def _stop(self, member: Member) -> None:
    """End the episode of a member, and its pending request or call. Results that arrive later are ignored."""
    if member.ticket is not None:
      self._tickets.pop(member.ticket, None)
      self.workers.cancel(member.ticket)
      member.ticket = None
    drawn = self._dispatcher.stop(member)
    member.drawn += drawn
    self.counts['aborted_tokens'] += drawn
    member.episode.close()

  # --- one group ---------------------------------------------------------------------------------------------------------------

  def _stop_all(self, group: LiveGroup) -> None:
    """Stop the members of a group that are not finished, and free its rows."""
    for member in group.members:
      if member.result is None:
        self._stop(member)
    self._dispatcher.let_go(group)

  def _drop(self, number: int, outcome: str) -> None:
    """Drop a group: end its requests and refund its credit."""
    group = self._groups.pop(number)
    self._stop_all(group)
    if group.ticket is not None:
      self._tickets.pop(group.ticket, None)
      self.workers.cancel(group.ticket)
    self._tally.ended(group.members, ())
    group.close()
    self.window.refund(number)
    if self._different is not None:
      self.window.prompts = min(self.window.prompts, self._different - self.window.refunded)
    self.counts[outcome] += 1

  @property
  def _hopeless(self) -> bool:
    """Whether too many groups in a row were fruitless (FRUITLESS_BATCHES), or no group is left to ask.

    Nothing more starts then. `batch` raises, but an update under way ends first.
    """
    return self._fruitless > FRUITLESS_BATCHES * self.settings.prompts or not self.window.prompts

  def _report(self) -> str:
    if self._hopeless:
      return f'{self._fruitless} groups in a row were {self._why_fruitless}'
    w = self.window
    return (
      f'no rollout runs and none may start, but the batch of version {w.version} is not complete: started {w.started}, refunded '
      f'{w.refunded}, consumed {w.consumed}, running {len(w.running)}, complete {len(w.complete)}, {dict(self.counts)}'
    )
