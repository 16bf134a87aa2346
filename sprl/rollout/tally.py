"""Statistics of a run's rollouts: counts since the run began, and metrics since they were last read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

import numpy as np

from sprl.rollout.groups import Member
from sprl.types import Trajectory

DROPPED = ('filtered', 'expired', 'surplus', 'failed')  # outcomes of a group that is dropped
EVENTS = ('started', 'errors', 'hung', 'aborted_tokens', 'resumed_tokens')


@dataclass(frozen=True)
class Sample:
  """A member of a group that was consumed or dropped."""

  tokens: int  # drawn tokens; for a stopped member a lower bound of its length
  reward: float | None  # None: it was not graded
  fate: Literal['trained', 'withheld', 'dropped']
  first: bool | None = None  # in a group whose members all finished: whether `rollout.members = 'first'` would have kept it


@dataclass
class _Recent:
  """Sums since the metrics were last read."""

  before: Counter[str] = field(default_factory=Counter)  # the counts at that time
  waited: float = 0.0  # seconds that the controller waited for a batch
  queued: list[float] = field(default_factory=list)  # seconds that each request waited for an engine
  samples: list[Sample] = field(default_factory=list)  # of the groups that were consumed or dropped


class Tally:
  """The counts of a run.

  `counts` has the groups by outcome (`consumed`, or one of DROPPED) and the EVENTS, since the run began.
  """

  def __init__(self):
    self.counts: Counter[str] = Counter()
    self.recent = _Recent()

  def state(self) -> dict[str, Any]:
    """Return the state for a checkpoint, as JSON."""
    samples = [list(astuple(sample)) for sample in self.recent.samples]
    return {'counts': dict(self.counts), 'before': dict(self.recent.before), 'samples': samples}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continue from a state. Times are not part of it."""
    self.counts = Counter(state['counts'])
    before, samples = state.get('before', state['counts']), state.get('samples', ())  # older checkpoints have neither
    self.recent = _Recent(Counter(before), samples=[Sample(*sample) for sample in samples])

  def ended(self, members: Sequence[Member], trajectories: Sequence[Trajectory]) -> None:
    """Record the members of a group that was consumed with these trajectories, or of a dropped group, which has none."""
    withheld = {t.uid: t.withheld for t in trajectories}
    kept = sum(not t.withheld for t in trajectories)
    chosen = kept < len(trajectories)  # whether a draw chose the members that train, so that the order of finishing did not
    for member in members:
      fate = 'dropped' if member.uid not in withheld else 'withheld' if withheld[member.uid] else 'trained'
      first = member.rank < kept if chosen and member.rank is not None else None
      reward = None if member.result is None or not member.result.reward_known else member.result.reward
      self.recent.samples.append(Sample(member.drawn, reward, fate, first))

  def metrics(self, live: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return metrics and times (seconds) since the last call. `live` is the number of groups in the window now."""
    recent, self.recent = self.recent, _Recent(self.counts.copy())
    since = self.counts - recent.before
    metrics = {
      **{f'async/{name}': float(since[name]) for name in (*DROPPED, *EVENTS)},
      'async/live': float(live),
      'async/dropped_prompts': float(sum(since[name] for name in DROPPED)),
      **selection(recent.samples),
    }
    return metrics, {'batch_wait': recent.waited, 'queue': _mean(recent.queued)}


def selection(samples: Sequence[Sample]) -> dict[str, float]:
  """Return `async/` metrics that compare the trained samples with all samples of the groups that were consumed or dropped.

  dropped_members, dropped_tokens    number of dropped samples, and the tokens that they drew
  dropped_graded                     number of dropped samples with a reward
  length_consumed, length_started    mean tokens of the trained samples, and of all samples that drew any
  dropped_length_bias                length_consumed / length_started - 1: an upper bound of the true value, because a stopped
                                     sample counts with the tokens that it drew
  dropped_reward_bias                mean reward of the trained samples, minus that of all graded samples
  first_length_bias                  in groups whose members all finished: mean tokens of the first to finish / mean of all - 1
  first_reward_bias                  there: mean reward of the first to finish, minus that of all

  Without a trained sample both biases of what was dropped are absent. dropped_reward_bias is also absent if samples were dropped
  and none of them was graded. The biases of the first are present with rollout.members = 'all' and extra members alone.
  """
  dropped = [s for s in samples if s.fate == 'dropped']
  trained = [s for s in samples if s.fate == 'trained']
  consumed, started = _mean([s.tokens for s in trained]), _mean([s.tokens for s in samples if s.tokens])
  graded = [s.reward for s in dropped if s.reward is not None]
  metrics = {
    'dropped_members': float(len(dropped)),
    'dropped_tokens': float(sum(s.tokens for s in dropped)),
    'dropped_graded': float(len(graded)),
    'length_consumed': consumed,
    'length_started': started,
  }
  if trained and started:
    metrics['dropped_length_bias'] = consumed / started - 1
  if trained and (graded or not dropped):
    every = [s.reward for s in samples if s.reward is not None]
    metrics['dropped_reward_bias'] = _mean([s.reward for s in trained if s.reward is not None]) - _mean(every)
  if finished := [s for s in samples if s.first is not None]:
    first = [s for s in finished if s.first]
    metrics['first_length_bias'] = _mean([s.tokens for s in first]) / max(_mean([s.tokens for s in finished]), 1.0) - 1
    first_reward = _mean([s.reward for s in first if s.reward is not None])
    metrics['first_reward_bias'] = first_reward - _mean([s.reward for s in finished if s.reward is not None])
  return {f'async/{name}': value for name, value in metrics.items()}


def _mean(values: Sequence[float | int]) -> float:
  return float(np.mean(values)) if len(values) else 0.0
