"""What queue scheduling and bounded staleness can gain: Propositions 1 and 2 of ROLL Flash (async_rollouts 8).

Both follow from one bound: tasks given to whichever worker is free end after at most their work divided by the workers, plus
the longest task. They are upper bounds of a time an update; a ratio of two of them estimates a speed-up and bounds none.
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
    """Prop 2, alpha >= 1: the most that an update takes where `training_share(alpha)` of the workers train and the others generate."""
    return self.samples / self.workers * (self.mean + self.training) + self.longest / (alpha + 1)

  def training_share(self, alpha: float) -> float:
    """beta*: the share of training workers whose time for an update is the bound itself; generation's is then no longer."""
    trained = self.samples * self.training
    return trained / (self.samples * self.mean + self.workers * self.longest / (alpha + 1) + trained)

  @property
  def most(self) -> float:
    """The ratio of the synchronous bound to the asynchronous one as alpha grows; without training, Prop 1's."""
    return 1 + self.workers * self.longest / (self.samples * (self.mean + self.training))
