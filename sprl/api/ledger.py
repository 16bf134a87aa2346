"""The ledger in a notebook: the mismatch of sampler and learner by its causes, as numbers, table and figure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from sprl.api.figures import ledger_figure
from sprl.ledger import PARTS, scalars


@dataclass(frozen=True)
class Ledger:
  """The mismatch of N tokens in nats: `gap` = log pi_learner - log pi_sampler, and its parts (docs: The mismatch ledger).

  The parts sum to the gap, token by token.
  """

  entries: Mapping[str, Float[np.ndarray, ' N']]

  @property
  def causes(self) -> dict[str, float]:
    """The mean absolute value of the gap and of each part that is not 0, in nats per token."""
    means = {name: float(np.mean(np.abs(self.entries[name]))) for name in ('gap', *PARTS)}
    return {name: mean for name, mean in means.items() if mean or name == 'gap'}

  def scalars(self) -> dict[str, float]:
    """Return the `ledger/` metrics: mean, mean absolute value and its 99th percentile of each entry."""
    return scalars(self.entries)

  def plot(self) -> Figure:
    """Return a bar for each cause, and the distribution of the gap over the tokens."""
    return ledger_figure(self.entries, self.causes)

  def __repr__(self) -> str:
    lines = [f'  {name:14s} {mean:.5f}' for name, mean in self.causes.items()]
    return '\n'.join([f'Ledger of {len(self.entries["gap"])} tokens, mean |nats|:', *lines])
