"""Bounds of the time an update: Propositions 1 and 2 of ROLL Flash (arXiv 2510.11345; docs/methods/async.md, Theory).

Both follow from one bound of list scheduling: tasks that go to whichever worker is free end after at most their total work
divided by the workers, plus the longest task. They are upper bounds of a time. A ratio of two of them estimates a speed-up and
bounds none.

Prop 2 takes training and generation to be independent. Under the per-sample window (I3 in sprl/rollout/window.py) they are not,
because a sample's age includes training. So `asynchronous_at_least`, derived here, can exceed Prop 2's upper bound.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
  """The costs of an update, with all times in one unit."""

  workers: int  # K; each generates one sample at a time, or trains
  samples: int  # N, samples an update
  mean: float  # mu, mean generation time of a sample
  longest: float  # Lmax, longest generation time among the samples that are queued together
  training: float = 0.0  # E mu_t, time of one worker for all passes over one sample

  def generation(self, alpha: float = 0.0) -> float:
    """Upper bound of the generation of an update, if all workers generate and (alpha + 1) N samples are queued (eq. 7)."""
    return self.samples / self.workers * self.mean + self.longest / (alpha + 1)

  @property
  def synchronous(self) -> float:
    """Upper bound of an update for which all workers generate, then all train (eq. 8)."""
    return self.generation() + self.samples / self.workers * self.training

  def asynchronous(self, alpha: float) -> float:
    """Upper bound of an update if `training_share(alpha)` of the workers train, for alpha >= 1 (eq. 9)."""
    return self.samples / self.workers * (self.mean + self.training) + self.longest / (alpha + 1)

  def training_share(self, alpha: float) -> float:
    """beta*, the share of workers for training whose time for an update equals the bound; generation takes no longer (eq. 10)."""
    trained = self.samples * self.training
    return trained / (self.samples * self.mean + self.workers * self.longest / (alpha + 1) + trained)

  @property
  def most(self) -> float:
    """Limit of the synchronous over the asynchronous bound as alpha grows; without training, the limit of Prop 1 (eq. 11)."""
    return 1 + self.workers * self.longest / (self.samples * (self.mean + self.training))

  def asynchronous_at_least(self, alpha: float, training_workers: int) -> float:
    """Lower bound of an update under the window (eq. 12), if nothing is discarded; `longest` is of the samples of one update.

    A sample that starts under version s is trained on by the update of version s + alpha at the latest. So alpha + 1 updates take
    at least its generation and the training of one update: (Lmax + T_train) / (alpha + 1) each.
    """
    return (self.longest + self.samples * self.training / training_workers) / (alpha + 1)
