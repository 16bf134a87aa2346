"""What a rollout is asked for and what it hands over: host-side, numpy, ragged.

Token-in, token-out: the ids that the sampler consumed and produced are the ids that are trained on. Text is decoded for
graders and people, and never encoded again.

    Request       one completion to be sampled: a prompt, and what of the sequence is there already
    Completion    what became of it: the tokens drawn, and how each of them came about
    Trajectory    a whole sequence to train on: one completion after its prompt, or a conversation of several turns
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Request:
  """One completion to be sampled.

  `given` follows the prompt: earlier turns of a conversation, or what an aborted request had drawn. A sampler that evicts
  takes it in as if it had drawn it, step by step, so that its memory is what it would have been.
  """

  uid: int  # the sequence's own number: with the seed and the attempt, it fixes the random numbers it is sampled with
  group: int  # requests of one prompt share it
  prompt: Int[np.ndarray, ' P']
  max_tokens: int
  given: Int[np.ndarray, ' N'] = dataclasses.field(default_factory=lambda: NOTHING)
  resumed: int = 0  # the last tokens of `given` that belong to the completion asked for
  attempt: int = 0

  @property
  def start(self) -> int:
    """Tokens before the first that is to be drawn."""
    return len(self.prompt) + len(self.given)


@dataclass(frozen=True)
class Completion:
  """The tokens that a request drew, and a record of each."""

  request: Request
  tokens: Int[np.ndarray, ' C']
  logp: Float[np.ndarray, ' C']  # under the distribution that the token was really drawn from
  version: Int[np.ndarray, ' C']  # finished updates of the weights that sampled it
  kept: Int[np.ndarray, ' C']  # cache slots attended, the token's own included
  finish: str  # stop, length, abort
  saturated: int = 0  # numbers of the row's keys and values beyond FP8's range, if they were held in it
  evicted: Int[np.ndarray, 'L K T'] | None = None  # the first position that did not find the token any more, where recorded
  routes: Int[np.ndarray, 'T M k'] | None = None  # the experts that each token went through, in each of M layers, where recorded
  prefilled: tuple[int, int] | None = None  # shape of the batch in which its prompt was read: prompts, padded length

  def rest(self) -> Request:
    """What is left to ask of an aborted request: the same completion, from where it was."""
    request, n = self.request, len(self.tokens)
    return dataclasses.replace(
      request,
      max_tokens=request.max_tokens - n,
      given=np.concatenate([request.given, self.tokens]).astype(np.int32),
      resumed=request.resumed + n,
    )

  def then(self, later: 'Completion') -> 'Completion':
    """This one, aborted, and what came of its rest, as one answer to the first request."""
    joined = {name: np.concatenate([getattr(self, name), getattr(later, name)]) for name in ('tokens', 'logp', 'version', 'kept')}
    return dataclasses.replace(later, request=self.request, prefilled=self.prefilled or later.prefilled, **joined)


@dataclass(frozen=True)
class Trajectory:
  """What a request became: prompt and completion, and how each token of it came about.

  `mask` is 1 on the tokens that the model wrote. The per-token records are 0 (logp, kept) or -1 (version) elsewhere.
  """

  uid: int
  group: int
  tokens: Int[np.ndarray, ' T']
  mask: Bool[np.ndarray, ' T']
  sampler_logp: Float[np.ndarray, ' T']  # log-prob under the distribution that the token was really drawn from
  version: Int[np.ndarray, ' T']  # finished updates of the weights that sampled it
  kept: Int[np.ndarray, ' T']  # cache slots attended, the token's own included
  prompt_length: int
  finish: str  # stop, length, abort; turns: a conversation had all of its own
  reward: float = 0.0
  saturated: int = 0  # numbers of its keys and values beyond FP8's range, if they were held in it
  evicted: Int[np.ndarray, 'L K T'] | None = None  # the first position that did not find the token any more, where recorded
  routes: Int[np.ndarray, 'T M k'] | None = None  # the experts that each token went through, in each of M layers, where recorded
  prefilled: tuple[int, int] | None = None  # shape of the batch in which its prompt was first read: prompts, padded length
  start_version: int = 0  # finished updates when its group was started, which is what staleness is counted from
  status: str = 'ok'  # how it was graded (a Grade's status)
  rewards: tuple[float, ...] = ()  # of a conversation's turns, of which `reward` is the sum
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # what its environment says of it

  @classmethod
  def of(cls, completion: Completion, **changes: Any) -> 'Trajectory':
    """The sequence of one completion: prompt, what was given (the model wrote none of it), and the tokens drawn."""
    before, request = np.zeros(completion.request.start, np.int32), completion.request
    fields: dict[str, Any] = {
      'uid': request.uid,
      'group': request.group,
      'tokens': np.concatenate([request.prompt, request.given, completion.tokens]).astype(np.int32),
      'mask': np.concatenate([before > 0, np.ones(len(completion.tokens), bool)]),
      'sampler_logp': np.concatenate([before, completion.logp]).astype(np.float32),
      'version': np.concatenate([before - 1, completion.version]).astype(np.int32),
      'kept': np.concatenate([before, completion.kept]).astype(np.int32),
      'prompt_length': len(request.prompt),
      'finish': completion.finish,
      'saturated': completion.saturated,
      'evicted': completion.evicted,
      'routes': completion.routes,
      'prefilled': completion.prefilled,
    }
    return cls(**fields | changes)

  @property
  def completion(self) -> Int[np.ndarray, ' C']:
    """The ids after the prompt."""
    return self.tokens[self.prompt_length :]

  def per_token(self, values: Float[np.ndarray, ' C']) -> Float[np.ndarray, ' T']:
    """Values of the completion's tokens (what is behind them is padding) at their places; 0 where the model wrote nothing."""
    whole = np.concatenate([np.zeros(self.prompt_length, np.float32), values[: len(self.completion)]])
    return np.where(self.mask, whole, 0).astype(np.float32)
