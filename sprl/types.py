"""Types shared by rollouts and learner.

    Request       one completion to sample: a prompt, and the tokens that already follow it
    Completion    the tokens drawn for a request, with a record of each
    Trajectory    one sequence to train on: a prompt and its completion, or a conversation of several turns
    LogProbs      log-probs of the sampled tokens under up to four policies, on the learner's devices

The first three are ragged numpy arrays on the host. Token-in, token-out: training uses the token ids that the sampler read and
drew. Text is decoded for graders and people; it is never encoded again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Request:
  """One completion to sample.

  `given` follows the prompt: earlier turns of a conversation, or the tokens that an aborted request had drawn. A sampler that
  evicts reads these tokens as if it had drawn them, so that its cache is the same as after drawing.

  `keep` and `continues` save work and change no result: a turn of a conversation goes on from the cache of the turn before.
  """

  uid: int  # number of the sequence; (seed, uid, attempt, position) fixes the random number of each token
  group: int  # shared by the requests of one prompt
  prompt: Int[np.ndarray, ' P']
  max_tokens: int
  given: Int[np.ndarray, ' N'] = dataclasses.field(default_factory=lambda: NOTHING)
  resumed: int = 0  # the last `resumed` tokens of `given` belong to the completion
  attempt: int = 0
  keep: bool = False  # keep the KV cache of the sequence after its end, under the key (uid, attempt)
  continues: tuple[int, int] | None = None  # key of a kept cache; if it holds the first tokens, only the others are read

  @property
  def key(self) -> tuple[int, int]:
    """What names its kept cache."""
    return self.uid, self.attempt

  @property
  def start(self) -> int:
    """Number of tokens before the first one to draw."""
    return len(self.prompt) + len(self.given)


@dataclass(frozen=True, kw_only=True)
class Completion:
  """The tokens drawn for a request, and a record of each."""

  request: Request
  tokens: Int[np.ndarray, ' C']
  logp: Float[np.ndarray, ' C']  # under the distribution that the token was drawn from
  version: Int[np.ndarray, ' C']  # finished steps of the weights that sampled it
  attended: Int[np.ndarray, ' C']  # cache slots that the query which drew the token attended to, with that query's own
  finish: str  # stop, length, abort
  saturated: int = 0  # elements of the row's keys and values that FP8 clamped; of several caches: the most in one
  saturated_queries: int = 0  # elements of its queries that FP8 clamped, counted likewise
  evicted: Int[np.ndarray, 'L K T'] | None = None  # the first position that no longer saw the token, if recorded
  routes: Int[np.ndarray, 'T M k'] | None = None  # experts of each token in each of M MoE layers, if recorded; -1: not read
  support: Integer[np.ndarray, 'C W'] | None = None  # the tokens that filters kept (sprl/kernels/support.py), if recorded
  prefilled: tuple[int, int] | None = None  # shape of its prompt's prefill batch: prompts, padded length

  def rest(self) -> Request:
    """Return the request that continues an aborted completion."""
    request, n = self.request, len(self.tokens)
    return dataclasses.replace(
      request,
      max_tokens=request.max_tokens - n,
      given=np.concatenate([request.given, self.tokens]).astype(np.int32),
      resumed=request.resumed + n,
    )

  def then(self, later: 'Completion') -> 'Completion':
    """Join this aborted completion and its continuation into one answer to the first request.

    The continuation may read the earlier tokens with other weights. A token keeps the records of its first reading. Evictions
    cannot be joined, because one number per token cannot describe two caches; config.rollout.async_ratio = 0 avoids that.
    """
    assert later.evicted is None, 'the continuation of a request evicts other tokens than its first part'
    joined = {
      name: np.concatenate([getattr(self, name), getattr(later, name)]) for name in ('tokens', 'logp', 'version', 'attended')
    }
    return dataclasses.replace(
      later,
      request=self.request,
      saturated=max(self.saturated, later.saturated),
      saturated_queries=max(self.saturated_queries, later.saturated_queries),
      routes=joined_routes([self.routes, later.routes]),
      support=joined_supports([self, later]),
      prefilled=self.prefilled or later.prefilled,
      **joined,
    )


def joined_supports(completions: Sequence[Completion]) -> Integer[np.ndarray, 'C W'] | None:
  """Return the supports of the completions' tokens, one completion after the other; None if they record none."""
  recorded = [c.support for c in completions if c.support is not None]
  assert len(recorded) in (0, len(completions)), 'all completions of a sequence record supports, or none'
  return np.concatenate(recorded) if recorded else None


@dataclass(frozen=True)
class Trajectory:
  """One sequence of a step: prompt and completion, with a record of each token.

  `mask` is True on tokens that the model wrote. Elsewhere the records are 0 (`sampler_logp`, `attended`) or -1 (`version`).
  """

  uid: int
  group: int
  tokens: Int[np.ndarray, ' T']
  mask: Bool[np.ndarray, ' T']
  sampler_logp: Float[np.ndarray, ' T']  # under the distribution that the token was drawn from
  version: Int[np.ndarray, ' T']  # finished steps of the weights that sampled it
  attended: Int[np.ndarray, ' T']  # cache slots that the query which drew the token attended to, with that query's own
  prompt_length: int
  finish: str  # stop, length, abort; turns: a conversation reached its limit of turns
  reward: float = 0.0
  saturated: int = 0  # elements of its keys and values that FP8 clamped; of several caches: the most in one
  saturated_queries: int = 0  # elements of its queries that FP8 clamped, counted likewise
  evicted: Int[np.ndarray, 'L K T'] | None = None  # the first position that no longer saw the token, if recorded
  routes: Int[np.ndarray, 'T M k'] | None = None  # experts of each token in each of M MoE layers, if recorded
  support: Integer[np.ndarray, 'C W'] | None = None  # of each of the C tokens of the mask, as in Completion
  prefilled: tuple[int, int] | None = None  # shape of its prompt's first prefill batch: prompts, padded length
  start_version: int = 0  # finished steps when its group started; staleness counts from here
  status: str = 'ok'  # how it was graded (a Grade's status)
  reason: str = ''  # why the status is not ok
  reward_known: bool = True  # whether all rewards with a weight were graded; if not, it enters no advantage and does not train
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # score by each of several named rewards, without weights
  failed: tuple[str, ...] = ()  # the named rewards whose graders failed; their scores are 0
  costs: Mapping[str, float] = dataclasses.field(default_factory=dict)  # what its grading used, such as judge/tokens
  rewards: tuple[float, ...] = ()  # of the turns of a conversation; `reward` is their sum
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # reported by its environment
  withheld: bool = False  # its reward counts in the advantages of its group; its tokens are not trained on
  branches: tuple['Trajectory', ...] = ()  # further sequences of the same episode, which share its reward

  @classmethod
  def of(cls, completion: Completion, **changes: Any) -> 'Trajectory':
    """Return the trajectory of one completion: prompt, given tokens (outside the mask), and the tokens drawn."""
    before, request = np.zeros(completion.request.start, np.int32), completion.request
    fields: dict[str, Any] = {
      'uid': request.uid,
      'group': request.group,
      'tokens': np.concatenate([request.prompt, request.given, completion.tokens]).astype(np.int32),
      'mask': np.concatenate([before > 0, np.ones(len(completion.tokens), bool)]),
      'sampler_logp': np.concatenate([before, completion.logp]).astype(np.float32),
      'version': np.concatenate([before - 1, completion.version]).astype(np.int32),
      'attended': np.concatenate([before, completion.attended]).astype(np.int32),
      'prompt_length': len(request.prompt),
      'finish': completion.finish,
      'saturated': completion.saturated,
      'saturated_queries': completion.saturated_queries,
      'evicted': completion.evicted,
      'routes': completion.routes,
      'support': completion.support,
      'prefilled': completion.prefilled,
    }
    return cls(**fields | changes)

  @property
  def score(self) -> float:
    """The score that evaluations count: of the first of several named rewards, else the reward."""
    return next(iter(self.parts.values()), self.reward)

  @property
  def completion(self) -> Int[np.ndarray, ' C']:
    """The token ids after the prompt."""
    return self.tokens[self.prompt_length :]

  def per_token(self, values: Float[np.ndarray, ' C']) -> Float[np.ndarray, ' T']:
    """Place values of the completion's tokens (padded at the end) in the sequence; 0 outside the mask."""
    whole = np.concatenate([np.zeros(self.prompt_length, np.float32), values[: len(self.completion)]])
    return np.where(self.mask, whole, 0).astype(np.float32)


def joined_routes(readings: Sequence[Int[np.ndarray, '_ M k'] | None]) -> Int[np.ndarray, 'T M k'] | None:
  """Return the experts of each token at its first reading. `readings` are in order, and each begins with the prompt.

  Returns None if no reading recorded experts.
  """
  recorded = [routes for routes in readings if routes is not None]
  if not recorded:
    return None
  joined = recorded[0]
  for routes in recorded[1:]:
    known = np.pad(joined, [(0, len(routes) - len(joined)), (0, 0), (0, 0)], constant_values=-1)
    joined = np.where(known >= 0, known, routes)
  return joined


def sequences(trajectory: Trajectory) -> list[Trajectory]:
  """Return the sequences of an episode: the trajectory, and its branches with the uid, group, reward and start of the episode."""
  shared = {name: getattr(trajectory, name) for name in ('uid', 'group', 'reward', 'start_version', 'withheld')}
  return [trajectory, *(dataclasses.replace(branch, **shared) for branch in trajectory.branches)]


def sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
  """Return the number of tokens that the sampler drew for these episodes."""
  return sum(int(sequence.mask.sum()) for trajectory in trajectories for sequence in sequences(trajectory))


def trained_on(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
  """Return the trajectories whose tokens an update trains on."""
  return [t for t in trajectories if not t.withheld]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LogProbs:
  """Log-probs of the sampled tokens under up to four policies, as in docs/methods/losses.md, Notation.

  Rows are sequences, columns are tokens of the completion. Fields are keyword-only: no two can be swapped by position. Values
  where the model wrote nothing are undefined. All are at the sampling temperature.
  """

  sampler: Float[Array, 'B T']  # the policy that drew the token: sparse, FP8, perhaps older weights
  old: Float[Array, 'B T'] | None = None  # the learner before this step's updates; dense, except in learner_mask
  current: Float[Array, 'B T'] | None = None  # the learner with the weights being trained; the only one with a gradient
  ref: Float[Array, 'B T'] | None = None  # the frozen reference model
