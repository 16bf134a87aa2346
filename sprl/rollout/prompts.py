"""The sources of a run's episodes: problems that are answered once, or an environment's conversations.

Groups are numbered in the order of asking. A group's number and `config.seed` fix its problem, or its environment's seed. So all
members of a group have the same problem, also if the group starts again after a resume.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from sprl.io.tokenizer import Tokenizer, TokenizerError
from sprl.rollout.collect import encode
from sprl.rollout.episodes import Codec, Comparison, Episode, Limits, answered, check_prompt, compared, conversation
from sprl.tasks.environment_pool import Call
from sprl.tasks.environments.protocol import Environment, EnvironmentFault, checked_reset, name_of, turn_messages
from sprl.tasks.grader_pool import Group
from sprl.tasks.graders import Reward
from sprl.tasks.problems import Problem
from sprl.tasks.rewards import Sample
from sprl.tasks.workers import with_time_limit
from sprl.types import Trajectory

OPEN = 256  # groups whose problem and prompt are kept
TRIES = 4  # groups tried for each prompt that is looked for
LONGEST_ORDER = 2**22  # an order takes 8 bytes a group
FIRST = 2**29  # first groups to choose from: seeds of environments then stay below 2^31


@runtime_checkable
class Source(Protocol):
  """Makes the episodes of groups by number, and tells their prompts and answers."""

  def episode(self, number: int, uid: int, attempt: int) -> Episode:
    """Return the episode of one member of a group."""
    ...

  def comparison(self, number: int, trajectories: Sequence[Trajectory]) -> Comparison | None:
    """Return the comparison of the members of a group that count, or None if each was graded alone."""
    ...

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """Return the ids that the group's episodes begin with."""
    ...

  def answer(self, number: int) -> str:
    """Return the right answer, for people to compare with; '' if there is none."""
    ...


class ProblemSource:
  """Problems that are answered once and graded. The workers come from `sprl.tasks.grader_pool`.

  `problem(number)` returns the problem of a group. `max_prompt` and `max_tokens` are the tokens of the longest prompt and answer.
  `rewards` are those of the workers.
  """

  def __init__(
    self,
    problem: Callable[[int], Problem],
    tokenizer: Tokenizer,
    rewards: Sequence[Reward] = (),
    *,
    max_prompt: int,
    max_tokens: int,
  ):
    self._tokenizer, self._max_prompt, self._max_tokens = tokenizer, max_prompt, max_tokens
    self._names = [reward.name for reward in rewards]
    self._groupwise = any(reward.grader.groupwise for reward in rewards)

    @lru_cache(OPEN)  # the members of a group have the same prompt, and another process may have to send the problem
    def opened(number: int) -> tuple[Problem, Int[np.ndarray, ' P']]:
      found = problem(number)
      return found, encode(found, tokenizer)

    self._opened = opened

  def episode(self, number: int, uid: int, attempt: int) -> Episode:
    """One answer and its grade. The members of a group differ in their random numbers only.

    The episode raises EpisodeError if the prompt is empty or too long, and TokenizerError if the chat template refuses it: only
    the first problems are checked before a run starts.
    """
    problem, prompt = self._opened(number)
    check_prompt(prompt, self._max_prompt, f'the prompt of {problem.id}')
    return (yield from answered(prompt, self._max_tokens, lambda c: self._sample(problem, c.tokens, c.finish)))

  def comparison(self, number: int, trajectories: Sequence[Trajectory]) -> Comparison | None:
    """The call of the groupwise rewards; None if there are none."""
    if not self._groupwise:
      return None
    problem, _ = self._opened(number)
    samples = tuple(self._sample(problem, t.completion, t.finish) for t in trajectories)
    return compared(trajectories, Group(samples), self._names)

  def _sample(self, problem: Problem, tokens: Int[np.ndarray, ' C'], finish: str) -> Sample:
    ids = tokens.tolist()
    text = self._tokenizer.decode(ids, skip_special=True)
    return Sample(problem.prompt, text, problem.answer, problem.row, problem.messages, tuple(ids), finish, problem.extra)

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """The ids of the problem."""
    return self._opened(number)[1]

  def answer(self, number: int) -> str:
    """The answer of the problem."""
    return self._opened(number)[0].answer


@dataclass(frozen=True)
class ConversationSource:
  """Conversations with environments. The workers come from `sprl.tasks.environment_pool`."""

  seed: Callable[[int], int]  # of a group's environments, by the group's number
  limits: Limits
  codec: Codec
  release: Callable[[Call], None]  # makes the last call of an environment (WorkerPool.release)
  sample: Environment | None  # an environment outside the pool, to read first observations; None: this process has none
  time_limit: float  # seconds that a reset of `sample` may take
  different: int | None = None  # rows of the environment that the groups of this split ask; None: it does not tell

  def episode(self, number: int, uid: int, attempt: int) -> Episode:
    """A conversation with a new environment of the group's seed."""
    call = partial(Call, (uid, attempt))
    return conversation(self.seed(number), self.limits, self.codec, call, lambda: self.release(call('close')))

  def comparison(self, number: int, trajectories: Sequence[Trajectory]) -> Comparison | None:
    """Return None: an environment rewards each conversation alone."""
    return None

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """The ids of the first observation. Raises EnvironmentFault."""
    assert self.sample is not None, 'process 0 has the environments'
    seed = self.seed(number)
    try:
      first = with_time_limit(self.time_limit, checked_reset, self.sample, seed)
    except TimeoutError:
      limit = f'config.task.time_limit = {self.time_limit:g} s'
      raise EnvironmentFault(f'environment {name_of(self.sample)}: reset({seed}) took longer than {limit}') from None
    return np.array(self.codec.opening(turn_messages(*first)), np.int32)

  def answer(self, number: int) -> str:
    """Return '': an environment has no right answer."""
    return ''


@dataclass(frozen=True)
class OffsetSource:
  """A source whose numbers begin with `first`, so that its uids differ from those of another source."""

  inner: Source
  first: int

  def episode(self, number: int, uid: int, attempt: int) -> Episode:
    """The episode of group `number - first`."""
    return self.inner.episode(number - self.first, uid, attempt)

  def comparison(self, number: int, trajectories: Sequence[Trajectory]) -> Comparison | None:
    """The comparison of group `number - first`."""
    return self.inner.comparison(number - self.first, trajectories)

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """The prompt of group `number - first`."""
    return self.inner.prompt(number - self.first)

  def answer(self, number: int) -> str:
    """The answer of group `number - first`."""
    return self.inner.answer(number - self.first)


def seeds(number: int, held_out: bool, split: bool, rows: int | None = None) -> int:
  """Return the seed of a group's environments. No two groups of the same split share a seed.

  With `split` the environment itself tells training from test problems. Otherwise training has even seeds and held-out episodes
  have odd ones. If seed s asks for row s % `rows`, they then ask different rows. An odd number would mix them: its last row is
  left out.
  """
  if split:
    return number
  seed = 2 * number + held_out
  if rows is None or rows % 2 == 0 or rows == 1:
    return seed
  rounds, row = divmod(seed, rows - 1)
  return rounds * rows + row


def different(rows: int, split: bool) -> int:
  """Return how many of an environment's rows the groups of a split ask."""
  return rows if split else max(rows // 2, 1)


def shuffled(number: int, seed: int, count: int | None) -> int:
  """Return the index of the row, or of the seed, that training group `number` uses. `seed` is `config.seed`.

  If there are `count` different rows, each epoch of `count` groups has a new order. If `count` is None, 0 or above
  LONGEST_ORDER, the indices ascend from a first one that `seed` decides.
  """
  if not count or count > LONGEST_ORDER:
    return int(np.random.default_rng(seed).integers(FIRST)) + number
  place = number % count
  return number - place + int(_order(seed, number // count, count)[place])


@lru_cache(maxsize=2)  # every member of a group asks; an epoch's first groups may start before the last of the epoch before
def _order(seed: int, epoch: int, count: int) -> Int[np.ndarray, ' n']:
  """Return the order of `count` groups in an epoch."""
  return np.random.default_rng([seed, epoch]).permutation(count)


def prompts(source: Source, first: int, count: int, different: int | None = None) -> Sequence[Int[np.ndarray, ' _']]:
  """Return the prompts of up to `count` groups from number `first` on.

  Groups whose environment fails, or whose messages the chat template refuses, are left out. Raises EnvironmentFault or
  TokenizerError if that is so for all of the TRIES * count groups, or for those below `different` if the source has no more.
  """
  found: list[Int[np.ndarray, ' _']] = []
  last = first + TRIES * count - 1
  if different is not None:
    last = min(last, different - 1)
  for number in range(first, last + 1):
    try:
      found.append(source.prompt(number))
    except (EnvironmentFault, TokenizerError):
      # Not kept in a variable: it holds this frame, and such a cycle would keep the arrays of all callers alive.
      if number == last and not found:
        raise
    if len(found) == count:
      break
  return found
