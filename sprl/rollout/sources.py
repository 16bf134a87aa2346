"""What the groups of a run are asked: problems, each answered once, or an environment's episodes.

A group's number is its place in the order of asking; it fixes the problem, or the seed of the environment, so that the members of
a group, and a group that is asked again after a resume, are about the same thing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from sprl.io.tokenizer import Tokenizer
from sprl.rollout.collect import encode
from sprl.rollout.episodes import Codec, Episode, Limits, answered, conversation
from sprl.rollout.lanes import Call
from sprl.tasks.environments.protocol import Environment, EnvironmentFault, checked_reset, name_of, turn_messages
from sprl.tasks.executors import within
from sprl.tasks.grading_pool import Sample
from sprl.tasks.problems import Problem
from sprl.trajectory import Completion

MakeEpisode = Callable[[int, int], Episode]  # of a member's uid and its attempt
MANY = 4  # times as many groups are tried as are looked for


@runtime_checkable
class Source(Protocol):
  """The groups by their numbers."""

  def __call__(self, number: int) -> MakeEpisode:
    """What each member of the group goes through."""
    ...

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """The ids that the group begins with."""
    ...

  def answer(self, number: int) -> str:
    """What would be right, for people to compare with; '' where nobody can say."""
    ...


@dataclass(frozen=True)
class Problems:
  """Single answers to problems, marked by a grader: the workers are a GradingPool."""

  problem: Callable[[int], Problem]
  tokenizer: Tokenizer
  max_tokens: int

  def __call__(self, number: int) -> MakeEpisode:
    """One answer and its mark."""
    problem = self.problem(number)
    prompt = encode(problem, self.tokenizer)

    def grading(completion: Completion) -> Sample:
      text = self.tokenizer.decode(completion.tokens.tolist(), skip_special=True)
      return problem.prompt, text, problem.answer, problem.extra

    return lambda uid, attempt: answered(prompt, self.max_tokens, grading)

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """The problem as the model is asked."""
    return encode(self.problem(number), self.tokenizer)

  def answer(self, number: int) -> str:
    """The problem's."""
    return self.problem(number).answer


@dataclass(frozen=True)
class Conversations:
  """Episodes with an environment: the workers are Lanes, whose environment of a member is `release`d when it is over.

  `seed(number)` is that of a group's episodes; `sample` is an environment to look at, apart from those in the lanes (None where
  nobody asks what a group begins with), and `time_limit` the seconds that one of its calls may take.
  """

  seed: Callable[[int], int]
  limits: Limits
  codec: Codec
  release: Callable[[tuple[int, int]], None]
  sample: Environment | None
  time_limit: float

  def __call__(self, number: int) -> MakeEpisode:
    """Turns with the environment of the group's seed."""
    return partial(self._episode, self.seed(number))

  def _episode(self, seed: int, uid: int, attempt: int) -> Episode:
    key = uid, attempt

    def call(method: str, argument: Any) -> Call:
      return Call(key, method, argument)

    return conversation(seed, self.limits, self.codec, call, lambda: self.release(key))

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """The first observation. Raises EnvironmentFault."""
    assert self.sample is not None, 'process 0 has the environments'
    seed = self.seed(number)
    try:
      first = within(self.time_limit, checked_reset, self.sample, seed)
    except TimeoutError:
      limit = f'config.environment.time_limit = {self.time_limit:g} s'
      raise EnvironmentFault(f'environment {name_of(self.sample)}: reset({seed}) took longer than {limit}') from None
    return np.array(self.codec.opening(turn_messages(*first)), np.int32)

  def answer(self, number: int) -> str:
    """Nobody can say."""
    return ''


@dataclass(frozen=True)
class Apart:
  """A source whose numbers begin with `first`, so that its sequences' uids are none of another's."""

  inner: Source
  first: int

  def __call__(self, number: int) -> MakeEpisode:
    """As the inner."""
    return self.inner(number - self.first)

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """As the inner."""
    return self.inner.prompt(number - self.first)

  def answer(self, number: int) -> str:
    """As the inner."""
    return self.inner.answer(number - self.first)


def seeds(base: int, number: int, held_out: bool, split: bool) -> int:
  """The seed of a group's episodes, which no two groups of a run share. Unless the environment tells training from test problems
  itself (`split`), training has the even ones and what is held out the odd ones.
  """
  return base + number if split else 2 * (base + number) + held_out


def prompts(source: Source, first: int, count: int) -> Sequence[Int[np.ndarray, ' _']]:
  """What `count` groups from `first` on begin with; those whose environment fails are passed over, as in rollouts.

  Raises EnvironmentFault where that leaves none of many.
  """
  found: list[Int[np.ndarray, ' _']] = []
  fault: EnvironmentFault | None = None
  for number in range(first, first + MANY * count):
    try:
      found.append(source.prompt(number))
    except EnvironmentFault as error:
      fault = error
    if len(found) == count:
      break
  if fault is not None and not found:
    raise fault
  return found
