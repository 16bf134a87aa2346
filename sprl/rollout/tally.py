"""What happened in a run's rollouts: counts since it began, and metrics since they were read last."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

DROPPED = ('filtered', 'expired', 'surplus', 'failed')  # outcomes of a group that is dropped
EVENTS = ('started', 'errors', 'hung', 'aborted_tokens', 'resumed_tokens')


@dataclass
class _Recent:
  """Sums since the metrics were read last."""

  before: Counter[str] = field(default_factory=Counter)  # the counts at that time
  waited: float = 0.0  # seconds in which the controller waited for a batch
  queued: list[float] = field(default_factory=list)  # seconds that each request waited for an engine
  consumed: list[int] = field(default_factory=list)  # tokens of each trajectory that was handed over
  started: list[int] = field(default_factory=list)  # tokens of each that ended or was aborted


class Tally:
  """The counts of a run.

  `counts` has the groups by outcome (`consumed`, or one of DROPPED) and the EVENTS, since the run began.
  """

  def __init__(self, counts: Counter[str] | None = None):
    self.counts: Counter[str] = counts or Counter()
    self.recent = _Recent(self.counts.copy())

  def metrics(self, live: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return metrics and times (seconds) since the last call. `live` is the number of groups in the window now.

    `length_consumed` is below `length_started` if redundancy favours short answers.
    """
    recent, self.recent = self.recent, _Recent(self.counts.copy())
    metrics = {
      **{f'async/{name}': float(self.counts[name] - recent.before[name]) for name in (*DROPPED, *EVENTS)},
      'async/live': float(live),
      'async/length_consumed': _mean(recent.consumed),
      'async/length_started': _mean(recent.started),
    }
    return metrics, {'batch_wait': recent.waited, 'queue': _mean(recent.queued)}


def _mean(values: Sequence[float | int]) -> float:
  return float(np.mean(values)) if len(values) else 0.0
