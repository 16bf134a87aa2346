"""What one member of a group goes through, from its prompt to its reward: a generator that says what it waits for.

    yield Generate(prompt, given, max_tokens)    ->  a Completion
    yield Work(call)                             ->  what the call returned, from a worker
    return Trajectory

It knows neither engines nor clocks nor other members. The scheduler keeps as many of them going as it likes and resumes each
when what it waits for is there; a single answer that is graded and a conversation with an environment differ in here only.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from sprl.tasks.environments.protocol import Outcome, episode_metrics, turn_messages
from sprl.trajectory import NOTHING, Completion, Trajectory


@dataclass(frozen=True)
class Generate:
  """A completion is wanted of `prompt` with `given` behind it."""

  prompt: Int[np.ndarray, ' P']
  given: Int[np.ndarray, ' N']
  max_tokens: int


@dataclass(frozen=True)
class Work:
  """Something that takes time and is not the engine's: a grader's mark, an environment's step."""

  call: Any  # for the workers to know what to do with


Episode = Generator[Generate | Work, Any, Trajectory]


def answered(prompt: Int[np.ndarray, ' P'], max_tokens: int, grading: Callable[[Completion], Any]) -> Episode:
  """One completion and its mark. `grading` is what the workers are to be asked."""
  completion = yield Generate(prompt, NOTHING, max_tokens)
  grade = yield Work(grading(completion))
  return Trajectory.of(completion, reward=float(grade.score), status=grade.status)


@runtime_checkable
class Codec(Protocol):
  """Messages to ids and ids to text, for a conversation of which earlier turns are never encoded again."""

  def opening(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
    """The ids up to where the first answer begins."""
    ...

  def reply(self, messages: Sequence[Mapping[str, str]], answer: Sequence[int]) -> Sequence[int]:
    """The ids between an answer and the next: what of the end of its turn it did not write itself, then the messages."""
    ...

  def text(self, ids: Sequence[int]) -> str:
    """What an answer says."""
    ...


@dataclass(frozen=True)
class Limits:
  """How long a conversation may be."""

  turns: int
  turn_tokens: int
  max_prompt: int
  max_tokens: int  # behind the prompt, all turns and observations together


@dataclass
class Transcript:
  """A conversation as ids: what the model wrote, and what it was told, in the order in which an engine takes it in."""

  prompt: Int[np.ndarray, ' P']
  parts: list[Completion | Int[np.ndarray, ' N']] = field(default_factory=list)

  @property
  def given(self) -> Int[np.ndarray, ' N']:
    """All ids behind the prompt."""
    return np.concatenate([NOTHING, *(p.tokens if isinstance(p, Completion) else p for p in self.parts)]).astype(np.int32)

  def trajectory(self, **changes: Any) -> Trajectory:
    """The sequence to train on; what follows the last answer is left out, for nobody learns from it."""
    parts = list(self.parts)
    while not isinstance(parts[-1], Completion):
      parts.pop()

    def laid(name: str, elsewhere: int) -> np.ndarray:
      of_parts = [getattr(p, name) if isinstance(p, Completion) else np.full(len(p), elsewhere) for p in parts]
      return np.concatenate([np.full(len(self.prompt), elsewhere), *of_parts])

    fields = {
      'mask': laid('version', -1) >= 0,
      'version': laid('version', -1).astype(np.int32),
      'sampler_logp': laid('logp', 0).astype(np.float32),
      'kept': laid('kept', 0).astype(np.int32),
      'prefilled': next(p.prefilled for p in parts if isinstance(p, Completion)),
    }
    return Trajectory.of(parts[-1], **fields, **changes)


def conversation(
  seed: int, limits: Limits, codec: Codec, call: Callable[[str, Any], Any], release: Callable[[], None]
) -> Episode:
  """Turns with an environment until it ends, or a limit does; the reward is the sum of its steps'.

  `call(method, argument)` is what the workers are to be asked: `reset` with a seed returns (observation, info), `step` with a
  text an Outcome. `release` is called in the end, however it comes. An environment that still waits for an answer when turns or
  tokens run out is not asked again.

  Raises EpisodeError where not even a first answer fits.
  """
  try:
    observation, info = yield Work(call('reset', seed))
    transcript = Transcript(np.array(codec.opening(turn_messages(observation, info)), np.int32))
    if len(transcript.prompt) > limits.max_prompt:
      raise EpisodeError(
        f'the first observation makes {len(transcript.prompt)} tokens; config.sampling.max_prompt = {limits.max_prompt}'
      )
    outcomes: list[Outcome] = []
    finish = 'turns'
    for _ in range(limits.turns):
      given = transcript.given
      room = min(limits.turn_tokens, limits.max_tokens - len(given))
      if room <= 0:
        finish = 'length'
        break
      completion: Completion = yield Generate(transcript.prompt, given, room)
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
      metrics=episode_metrics([outcome.info for outcome in outcomes]),
    )
  finally:
    release()


class EpisodeError(RuntimeError):
  """An episode that cannot go on, and would not if it were tried again in the same way."""
