"""What a rollout is asked for and what it hands over: host-side, numpy, ragged.

Token-in, token-out: the ids that the sampler consumed and produced are the ids that are trained on. Text is decoded for
graders and people, and never encoded again.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class Request:
  """One completion to be sampled."""

  uid: int  # the request's own number: with the seed, it fixes the random numbers it is sampled with
  group: int  # requests of one prompt share it
  prompt: Int[np.ndarray, ' P']
  max_tokens: int


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
  finish: str  # stop, length, abort
  reward: float = 0.0
  saturated: int = 0  # numbers of its keys and values beyond FP8's range, if they were held in it
  evicted: Int[np.ndarray, 'L K T'] | None = None  # the first position that did not find the token any more, where recorded

  @property
  def completion(self) -> Int[np.ndarray, ' C']:
    """The ids after the prompt."""
    return self.tokens[self.prompt_length :]

  def per_token(self, values: Float[np.ndarray, ' C']) -> Float[np.ndarray, ' T']:
    """Values of the completion's tokens (what is behind them is padding) at their places; 0 where the model wrote nothing."""
    whole = np.concatenate([np.zeros(self.prompt_length, np.float32), values[: len(self.completion)]])
    return np.where(self.mask, whole, 0).astype(np.float32)
