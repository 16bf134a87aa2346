"""Episodes: what one member of a group goes through, from its prompt to its reward.

An episode is a generator. It yields what it waits for, and is resumed with the result:

    yield Generate(prompt, given, ...)           ->  a Completion
    yield Work(call)                             ->  the result of the call, from a worker
    return Trajectory

Groupwise rewards see all answers of a group. A comparison (`compared`) is a generator of the same form. It begins when all
members that count have their trajectories.

An episode knows neither engines nor clocks nor other members. The scheduler keeps many of them going. A single graded answer
(`answered`) and a conversation with an environment (`conversation`) differ in this file only.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from sprl.tasks.environments.protocol import Outcome, episode_metrics, turn_messages
from sprl.tasks.grader_pool import Grade
from sprl.types import NOTHING, Completion, Trajectory, joined_routes, joined_supports

TURNS_CUT = 'completion/turns_cut'  # metric of an episode: see `cut_off`


@dataclass(frozen=True)
class Generate:
  """Asks for a completion of `prompt` followed by `given`.

  With `keep` the engine keeps the cache of the sequence. The next Generate of the episode then goes on from it.
  """

  prompt: Int[np.ndarray, ' P']
  given: Int[np.ndarray, ' N']
  max_tokens: int
  keep: bool = False
  branch: int = 0  # sequences of one episode draw other random numbers


@dataclass(frozen=True)
class Work:
  """Asks the workers for the result of a call: a grade, or an environment's reset or step."""

  call: Any


Episode = Generator[Generate | Work, Any, Trajectory]
Comparison = Generator[Work, Any, Sequence[Trajectory]]  # of the members of a group that count, by their trajectories


def answered(prompt: Int[np.ndarray, ' P'], max_tokens: int, grading: Callable[[Completion], Any]) -> Episode:
  """The episode of one graded answer. `grading` returns the workers' call that grades a completion."""
  completion = yield Generate(prompt, NOTHING, max_tokens)
  return Trajectory.of(completion, **graded((yield Work(grading(completion)))))


def check_prompt(prompt: Int[np.ndarray, ' P'], most: int, what: str) -> None:
  """Raise EpisodeError if a prompt has no token, or more than `most`. `what` names the prompt in the message."""
  if not len(prompt):
    raise EpisodeError(f'{what} is empty: expected at least one token')
  if len(prompt) > most:
    raise EpisodeError(f'config.sampling.max_prompt = {most}: expected at least {len(prompt)}, the tokens of {what}')


def compared(trajectories: Sequence[Trajectory], call: Any, names: Sequence[str]) -> Comparison:
  """Add the grades of groupwise rewards. `call` grades all members at once; `names` are the names of all rewards, in order."""
  grades = yield Work(call)
  return [replace(t, **graded(grade, t, names)) for t, grade in zip(trajectories, grades, strict=True)]


def graded(grade: Grade, before: Trajectory | None = None, names: Sequence[str] = ()) -> dict[str, Any]:
  """Return the fields of a trajectory that a Grade changes. An earlier grade of the trajectory `before` is added to it."""
  if before is None:
    fields = {'parts': grade.parts, 'failed': grade.failed, 'costs': grade.costs, 'reward_known': grade.reward_known}
    return {'reward': float(grade.score), 'status': grade.status, 'reason': grade.reason, **fields}
  parts = {**before.parts, **grade.parts}
  return {
    'reward': before.reward + float(grade.score),
    'status': grade.status if before.status == 'ok' else before.status,
    'reason': before.reason or grade.reason,
    'parts': {name: parts[name] for name in names if name in parts},
    'failed': (*before.failed, *grade.failed),
    'costs': Counter(before.costs) + Counter(grade.costs),
    'reward_known': before.reward_known and grade.reward_known,
  }


@runtime_checkable
class Codec(Protocol):
  """Turns messages into token ids and ids into text. In a conversation, earlier turns are never encoded again."""

  def opening(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
    """The ids before the first answer."""
    ...

  def reply(self, messages: Sequence[Mapping[str, str]], answer: Sequence[int]) -> Sequence[int]:
    """The ids between an answer and the next: the end of the answer's turn, unless the answer has it, then the messages."""
    ...

  def text(self, ids: Sequence[int]) -> str:
    """The text of an answer."""
    ...


@dataclass(frozen=True)
class Limits:
  """How long a conversation may be."""

  turns: int  # answers
  turn_tokens: int  # tokens of one answer
  max_prompt: int  # tokens of the first observation
  max_tokens: int  # tokens after the prompt: all answers and observations together


@dataclass
class Transcript:
  """A conversation as token ids: completions of the model and ids of observations, in the order in which an engine reads them."""

  prompt: Int[np.ndarray, ' P']
  parts: list[Completion | Int[np.ndarray, ' N']] = field(default_factory=list)

  @property
  def given(self) -> Int[np.ndarray, ' N']:
    """The ids after the prompt."""
    return np.concatenate([NOTHING, *(p.tokens if isinstance(p, Completion) else p for p in self.parts)]).astype(np.int32)

  @property
  def answers(self) -> list[Completion]:
    """The completions, in order."""
    return [part for part in self.parts if isinstance(part, Completion)]

  def trajectory(self, **changes: Any) -> Trajectory:
    """The sequence to train on. Ids after the last answer are left out, because no token of the model follows them.

    A turn without a kept cache reads the history again. A token keeps the experts of its first reading.
    """
    parts = list(self.parts)
    while not isinstance(parts[-1], Completion):
      parts.pop()
    answers = self.answers

    def per_token(name: str, elsewhere: int) -> np.ndarray:
      of_parts = [getattr(p, name) if isinstance(p, Completion) else np.full(len(p), elsewhere) for p in parts]
      return np.concatenate([np.full(len(self.prompt), elsewhere), *of_parts])

    version = per_token('version', -1).astype(np.int32)
    fields = {
      'mask': version >= 0,
      'version': version,
      'sampler_logp': per_token('logp', 0).astype(np.float32),
      'attended': per_token('attended', 0).astype(np.int32),
      'saturated': max(answer.saturated for answer in answers),
      'saturated_queries': max(answer.saturated_queries for answer in answers),
      'routes': joined_routes([answer.routes for answer in answers]),
      'support': joined_supports(answers),
      'prefilled': answers[0].prefilled,
    }
    return Trajectory.of(parts[-1], **fields, **changes)


def conversation(
  seed: int, limits: Limits, codec: Codec, call: Callable[[Any, Any], Any], release: Callable[[], None]
) -> Episode:
  """The episode of a conversation with an environment. It lasts until the environment ends it or a limit is reached.

  The reward is the sum of the steps' rewards. If turns or tokens run out, the last observation gets no answer.

  Args:
    seed: the argument of the environment's reset.
    limits: how long the conversation may be.
    codec: turns messages into ids and back.
    call: call(method, argument) returns the workers' call. `reset` results in (observation, info), `step` in an Outcome.
    release: called once at the end, also if the episode is closed early or raises.

  Raises:
    EpisodeError: the first observation is empty, or longer than `limits.max_prompt`.
  """
  try:
    observation, info = yield Work(call('reset', seed))
    transcript = Transcript(np.array(codec.opening(turn_messages(observation, info)), np.int32))
    check_prompt(transcript.prompt, limits.max_prompt, 'the first observation')
    outcomes: list[Outcome] = []
    finish = 'turns'
    for turn in range(1, limits.turns + 1):
      given = transcript.given
      room = min(limits.turn_tokens, limits.max_tokens - len(given))
      if room <= 0:
        finish = 'length'
        break
      completion: Completion = yield Generate(transcript.prompt, given, room, keep=turn < limits.turns)
      transcript.parts.append(completion)
      answer = completion.tokens.tolist()
      outcomes.append((yield Work(call('step', codec.text(answer)))))
      if outcomes[-1].done:
        finish = 'stop'
        break
      reply = codec.reply(turn_messages(outcomes[-1].observation, outcomes[-1].info), answer)
      transcript.parts.append(np.array(reply, np.int32))
    rewards = tuple(outcome.reward for outcome in outcomes)
    return transcript.trajectory(
      reward=float(sum(rewards)),
      rewards=rewards,
      finish=finish,
      metrics={
        **episode_metrics([outcome.info for outcome in outcomes]),
        TURNS_CUT: cut_off(transcript.answers, limits.turn_tokens),
      },
    )
  finally:
    release()


def cut_off(answers: Sequence[Completion], turn_tokens: int) -> float:
  """Return the share of the answers of an episode that end at the token limit of a turn."""
  return float(np.mean([answer.finish == 'length' and len(answer.tokens) == turn_tokens for answer in answers]))


class EpisodeError(RuntimeError):
  """An episode that cannot continue. Another attempt starts from the beginning."""
