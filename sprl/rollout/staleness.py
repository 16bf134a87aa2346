"""Metrics of the age of a step's data: of groups since their start, of tokens since they were drawn."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sprl.rollout.groups import Group
from sprl.types import Trajectory, sequences, trained_on


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
  """Return the ages of groups and tokens in the step that changes weights of this `version`."""
  ages = [version - group.start_version for group in groups]
  lag = lags([t for group in groups for t in group.trajectories], version)
  return {
    'async/age_mean': float(np.mean(ages)),
    'async/age_max': float(max(ages)),
    'async/token_lag_mean': float(lag.mean()),
    'async/token_lag_max': float(lag.max()),
    'async/stale_tokens': float(np.mean(lag > 0)),
  }


def lags(trajectories: Sequence[Trajectory], version: int) -> Int[np.ndarray, ' N']:
  """Return the lag of each of the N trained tokens: `version` minus the version of the weights that drew it.

  Tokens of withheld trajectories are left out.
  """
  return np.concatenate([version - s.version[s.mask] for t in trained_on(trajectories) for s in sequences(t)])
