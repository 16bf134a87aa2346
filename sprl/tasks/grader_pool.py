"""Graders in pools of workers. An answer that breaks a reward costs only its own grade.

The reward of a sample is not known, and its status is counted, if a grader takes too long (`timeout`), ends its process or
reaches its memory limit (`crash`), raises (`error`), or returns anything but a finite number of float32 (`invalid`). The pool
kills graders from outside, because an alarm inside the worker does not interrupt C code that hangs. One of several rewards may
return None: it does not apply to the sample, and the others decide.

Each reward of a sample is a separate call of a worker. Rewards in files run in processes (or on Ray), Python callables in threads
of this process. Async rewards run many at a time on one event loop, which is in a process or, for Python callables, in a thread.
"""

import itertools
import logging
import math
import numbers
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from sprl.config_checks import reward_name
from sprl.foreign import LARGEST_REWARD, kind_of, reason
from sprl.tasks import graders
from sprl.tasks.async_workers import Lanes, async_starter
from sprl.tasks.graders import GraderSpec, Reward
from sprl.tasks.judge import COSTS, Judgement
from sprl.tasks.rewards import Sample, reads_answers
from sprl.tasks.worker_pool import Failure, WorkerPool, wait_for_any
from sprl.tasks.workers import starter

log = logging.getLogger(__name__)

REPORTED = 10  # kinds of failures that are logged
WORKERS, ASYNC_CALLS = 2, 64  # calls of rewards at the same time, unless task.workers is set; the second: of async ones

NOT_APPLICABLE = 'not applicable'  # what a reward that returned None says of a sample

Status = Literal['ok', 'timeout', 'crash', 'error', 'invalid']
Score = tuple[float, str, str, dict[str, float]]  # (score, status, reason, costs) of one reward of a sample


@dataclass(frozen=True)
class Grade:
  """The score of a sample, and how it came about."""

  score: float  # the weighted sum of the rewards
  status: Status  # ok, or the status of the first reward that failed
  reason: str = ''  # why the status is not ok
  parts: Mapping[str, float] = field(default_factory=dict)  # the score of each named reward that applies, without its weight
  failed: tuple[str, ...] = ()  # the named rewards that failed; their scores are 0
  costs: Mapping[str, float] = field(default_factory=dict)  # what grading used, such as judge/tokens
  reward_known: bool = True  # whether no reward with a weight failed


@dataclass(frozen=True)
class Group:
  """The samples of one prompt that count, for groupwise rewards."""

  samples: tuple[Sample, ...]


Asked = tuple[int, Sample | Group]  # a worker's call: the index of a reward, and what it grades


@dataclass(eq=False)
class _Call:
  """A sample or a group, and the calls of workers that grade it."""

  given: Sample | Group
  tickets: dict[int, tuple[WorkerPool, int]]  # of the rewards that are still to come, by their index
  answers: dict[int, Any] = field(default_factory=dict)  # by the index of the reward


class GraderPool:
  """Grades samples by all rewards that apply. A context manager; for use by one thread.

  The result of a Sample is a Grade by the rewards that grade samples one by one; the result of a Group is a list of Grades by the
  groupwise rewards.

  Args:
    rewards: the rewards.
    pools: the workers of each reward. One pool may serve several rewards: its calls are (index of the reward, what to grade).
  """

  def __init__(self, rewards: Sequence[Reward], pools: Sequence[WorkerPool]):
    self._rewards, self._pools = rewards, pools
    self._distinct = list(dict.fromkeys(pools))
    self._calls: dict[int, _Call] = {}
    self._owners: dict[tuple[WorkerPool, int], tuple[int, int]] = {}  # a worker's call -> (our ticket, index of the reward)
    self._tickets = itertools.count()
    self._reported: set[str] = set()  # kinds of failures
    self._at_once = False  # whether a call needs no worker, and nobody has polled since

  def __enter__(self) -> 'GraderPool':
    with ExitStack() as stack:
      for pool in self._distinct:
        stack.enter_context(pool)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *_) -> None:
    self._stack.close()

  def submit(self, call: Sample | Group) -> int:
    """Queue a sample or a group. Returns the ticket of its result."""
    ticket = next(self._tickets)
    self._calls[ticket] = _Call(call, {})
    source = _source(call)
    for index, reward in enumerate(self._rewards):
      if reward.grader.groupwise == isinstance(call, Group) and reward.source in (None, source):
        pool = self._pools[index]
        at = pool, pool.submit((index, call))
        self._calls[ticket].tickets[index], self._owners[at] = at, (ticket, index)
    self._at_once |= not self._calls[ticket].tickets
    return ticket

  def cancel(self, ticket: int) -> None:
    """Drop a call. Its result is ignored."""
    if (call := self._calls.pop(ticket, None)) is not None:
      for pool, theirs in call.tickets.values():
        del self._owners[pool, theirs]
        pool.cancel(theirs)

  def poll(self, wanted: Collection[int]) -> dict[int, Any]:
    """Return the wanted results that are ready, by ticket. Each result is returned once."""
    self._at_once = False
    for pool in self._distinct:
      theirs = {ticket for owner, ticket in self._owners if owner is pool}
      for number, answer in pool.poll(theirs).items():
        ticket, index = self._owners.pop((pool, number))
        call = self._calls[ticket]
        call.answers[index] = answer
        del call.tickets[index]
    ready = [ticket for ticket, call in self._calls.items() if not call.tickets and ticket in wanted]
    return {ticket: self._result(self._calls.pop(ticket)) for ticket in ready}

  def wait(self, seconds: float | None) -> None:
    """Wait until a result may be ready, a call exceeds its limit, or `seconds` are over (None: no limit)."""
    if not self._at_once:
      wait_for_any(self._distinct, seconds)

  def _result(self, call: _Call) -> Grade | list[Grade]:
    count = len(call.given.samples) if isinstance(call.given, Group) else 1
    scores = {index: _scores(answer, count) for index, answer in sorted(call.answers.items())}
    grades = [self._grade({index: of_samples[i] for index, of_samples in scores.items()}) for i in range(count)]
    for grade in grades:
      self._report(grade)
    return grades if isinstance(call.given, Group) else grades[0]

  def _report(self, grade: Grade) -> None:
    """Warn of a failure, once for each kind."""
    if grade.status != 'ok' and kind_of(grade.reason) not in self._reported and len(self._reported) < REPORTED:
      self._reported.add(kind_of(grade.reason))
      only = f'{reward_name(self._rewards[0].grader.label)}: ' if len(self._rewards) == 1 else ''  # else the reason names it
      log.warning('grading failed (%s): %s%s (logged once)', grade.status, only, grade.reason)

  def _grade(self, scores: Mapping[int, Score]) -> Grade:
    """The grade of a sample from its scores by the index of their rewards."""
    found = [(self._rewards[index], *score) for index, score in scores.items()]
    weighted = [status for reward, _, status, *_ in found if reward.weight]
    if weighted and all(status == NOT_APPLICABLE for status in weighted):  # then nothing decides
      nothing: Score = 0.0, 'invalid', 'returned a NoneType, expected a finite number', {}
      found = [(each[0], *nothing) if each[2] == NOT_APPLICABLE else each for each in found]
    found = [each for each in found if each[2] != NOT_APPLICABLE]
    failures = [(status, reward.name, why) for reward, _, status, why, _ in found if status != 'ok']
    status, name, why = failures[0] if failures else ('ok', '', '')
    used = sorted({name for *_, costs in found for name in costs})
    known = all(status == 'ok' or not reward.weight for reward, _, status, *_ in found)
    total = sum((reward.weight * score for reward, score, *_ in found), start=0.0)
    if abs(total) > LARGEST_REWARD:
      known, total, status, name = False, 0.0, 'invalid', ''
      why = f'the weighted rewards add up to {total:g}, which float32 cannot hold'
    return Grade(
      total,
      status,  # pyright: ignore[reportArgumentType]
      f'{name}: {why}' if name else why,
      {reward.name: score for reward, score, *_ in found if reward.name},
      tuple(reward.name for reward, _, status, *_ in found if reward.name and status != 'ok'),
      {name: sum(costs.get(name, 0.0) for *_, costs in found) for name in used},
      known,
    )


def _source(call: Sample | Group) -> str:
  """Return the source of a problem: the samples of a group have the same problem."""
  sample = call.samples[0] if isinstance(call, Group) else call
  return sample.extra.get('grader', '')


def grader_pool(
  rewards: Sequence[Reward],
  workers: int | None,
  timeout: float | None,
  memory_gb: float,
  executor: str = 'processes',
  now: Callable[[], float] = time.monotonic,
  columns: Collection[str] = ('answer',),
) -> GraderPool:
  """Return the pool that grades samples.

  Args:
    rewards: the rewards.
    workers: calls of rewards that run at the same time. None: WORKERS, and ASYNC_CALLS of async rewards.
    timeout: seconds that each reward of a sample may take. None: graders.SECONDS, and graders.ASYNC_SECONDS of async rewards.
    memory_gb: GiB of address space that a grading process may add after its graders are loaded.
    executor: processes, or ray, where sprl does not limit memory. Python callables run in threads in any case.
    now: the clock, in seconds.
    columns: the columns that rows have, which rewards may ask for; `answer` is one unless no row has an answer.
  """
  for reward in rewards if 'answer' not in columns else ():
    if reads_answers(reward.grader.function):
      log.warning('%s: no row has an `answer`; the function gets an empty text for it', reward.setting)

  def place(spec: GraderSpec) -> tuple[str, bool]:
    return 'threads' if spec.kind == 'function' else executor, spec.asynchronous

  def pool(executor: str, asynchronous: bool) -> WorkerPool:
    specs = {i: r.grader for i, r in enumerate(rewards) if place(r.grader) == (executor, asynchronous)}
    if asynchronous:
      start = Lanes(async_starter(executor, partial(load_async_service, specs, tuple(columns)), memory_gb))
    else:
      start = starter(executor, partial(load_service, specs, tuple(columns)), memory_gb)
    return WorkerPool(
      start,
      workers or (ASYNC_CALLS if asynchronous else WORKERS),
      limit=timeout or graders.time_limit(asynchronous),
      limit_setting='config.task.time_limit',
      blame='; '.join(dict.fromkeys(r.setting for r in rewards if place(r.grader) == (executor, asynchronous))),
      now=now,
    )

  places = [place(reward.grader) for reward in rewards]
  pools = {each: pool(*each) for each in dict.fromkeys(places)}
  return GraderPool(rewards, [pools[each] for each in places])


# --- in a worker -----------------------------------------------------------------------------------------------------


def load_service(specs: Mapping[int, GraderSpec], columns: Collection[str]) -> Callable[[Asked], list[Score]]:
  """Return the service of a grading worker. Raises any error of a user's file."""
  loaded = _load(specs, columns)

  def answer(asked: Asked) -> list[Score]:
    index, given = asked
    return _checked(loaded[index](_what(given)), given)

  return answer


def load_async_service(specs: Mapping[int, GraderSpec], columns: Collection[str]) -> Callable[[Asked], Awaitable[list[Score]]]:
  """Return the service of an async grading worker. Raises any error of a user's file."""
  loaded = _load(specs, columns)

  async def answer(asked: Asked) -> list[Score]:
    index, given = asked
    return _checked(await loaded[index](_what(given)), given)

  return answer


def _load(specs: Mapping[int, GraderSpec], columns: Collection[str]) -> dict[int, Callable[[Any], Any]]:
  logging.getLogger('math_verify').setLevel(logging.ERROR)  # it warns at every call that its own time limit is off
  loaded = {}
  for index, spec in specs.items():
    try:
      loaded[index] = graders.load(spec, columns)
    except BaseException as error:
      if len(specs) == 1:
        raise
      raise RuntimeError(f'{spec.label}: {reason(error)}') from error
  return loaded


def _what(given: Sample | Group) -> Sample | tuple[Sample, ...]:
  return given.samples if isinstance(given, Group) else given


def _checked(returned: Any, given: Sample | Group) -> list[Score]:
  """The scores of a sample, or of the samples of a group, that a reward returned."""
  if isinstance(given, Sample):
    return [_score_of(returned)]
  try:
    found = list(returned)
  except TypeError:
    return [(0.0, 'invalid', f'returned a {type(returned).__name__}, expected a list of numbers', {})] * len(given.samples)
  if len(found) != len(given.samples):
    return [(0.0, 'invalid', f'returned {len(found)} scores of {len(given.samples)} samples', {})] * len(given.samples)
  return [_score_of(each) for each in found]


def _score_of(returned: Any) -> Score:
  if isinstance(returned, Judgement):
    return returned.score, returned.status, returned.reason, dict(returned.costs)
  if returned is None:
    return 0.0, NOT_APPLICABLE, '', {}
  if getattr(returned, 'ndim', None) == 0:  # a number of numpy, jax or torch
    returned = returned.item()
  if not isinstance(returned, numbers.Real):
    shape = getattr(returned, 'shape', None)
    of_shape = f' of shape {shape}' if isinstance(shape, tuple) else ''
    return 0.0, 'invalid', f'returned a {type(returned).__name__}{of_shape}, expected a finite number', {}
  if not math.isfinite(returned):
    return 0.0, 'invalid', f'returned {returned!r:.100}, expected a finite number', {}
  if abs(float(returned)) > LARGEST_REWARD:
    return 0.0, 'invalid', f'returned {returned!r:.100}, which float32 cannot hold', {}
  return float(returned), 'ok', '', {}


# --- from a worker ---------------------------------------------------------------------------------------------------


def _scores(answer: Any, count: int) -> list[Score]:
  """The scores that a worker answered, one per sample. Its process may run code of a model, which can forge an answer."""
  if isinstance(answer, Failure):
    return [(0.0, answer.kind, answer.reason, {})] * count
  scores = [_score(each) for each in answer] if isinstance(answer, list) else []
  return scores if len(scores) == count else [_MALFORMED] * count


_MALFORMED: Score = 0.0, 'crash', 'malformed answer', {}


def _score(answer: Any) -> Score:
  match answer:
    case (int() | float() as score, 'ok' | 'invalid' | 'error' | 'not applicable' as status, str() as why, dict() as costs) if (
      abs(score) <= LARGEST_REWARD
    ):
      known = {name: float(used) for name, used in costs.items() if name in COSTS and isinstance(used, int | float)}
      return score if status == 'ok' else 0.0, status, why, known
  return _MALFORMED
