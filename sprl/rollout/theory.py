"""What queue scheduling and bounded staleness can gain: Propositions 1 and 2 of ROLL Flash (async_rollouts 8).

Both follow from one bound: tasks given to whichever worker is free end after at most their work divided by the workers, plus
the longest task. They are upper bounds of a time an update; a ratio of two of them estimates a speed-up and bounds none.

Prop 2 takes the pace of training and that of generation to be independent. Under the per-sample window (I3 in rollout.window)
they are not: training is part of a sample's age. `asynchronous_at_least`, derived here, can exceed Prop 2's upper bound.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
  """What an update takes, all times in one unit."""

  workers: int  # K: each generates one sample at a time, or trains
  samples: int  # N, an update's
  mean: float  # mu: of the samples' generation times
  longest: float  # Lmax: the longest of those that are queued together
  training: float = 0.0  # E mu_t: of one worker, for all passes over one sample

  def generation(self, alpha: float = 0.0) -> float:
    """Prop 1: the most that an update's generation takes, all workers generating, (alpha + 1) N samples in the queue."""
    return self.samples / self.workers * self.mean + self.longest / (alpha + 1)

  @property
  def synchronous(self) -> float:
    """Prop 2: the most that an update takes where all workers generate, then all train."""
    return self.generation() + self.samples / self.workers * self.training

  def asynchronous(self, alpha: float) -> float:
    """Prop 2, alpha >= 1: the most that an update takes with `training_share(alpha)` of the workers training."""
    return self.samples / self.workers * (self.mean + self.training) + self.longest / (alpha + 1)

  def training_share(self, alpha: float) -> float:
    """beta*: the share of training workers whose time for an update is the bound itself; generation's is then no longer."""
    trained = self.samples * self.training
    return trained / (self.samples * self.mean + self.workers * self.longest / (alpha + 1) + trained)

  @property
  def most(self) -> float:
    """The ratio of the synchronous bound to the asynchronous one as alpha grows; without training, Prop 1's."""
    return 1 + self.workers * self.longest / (self.samples * (self.mean + self.training))

  def asynchronous_at_least(self, alpha: float, training_workers: int) -> float:
    """The least that an update takes under the window, where nothing is discarded and `longest` is one update's longest.

    A sample that is started under version s is trained on by the update of version s + alpha at the latest. So alpha + 1 updates
    take at least its generation and one update's training: (Lmax + T_train) / (alpha + 1) each.
    """
    return (self.longest + self.samples * self.training / training_workers) / (alpha + 1)
