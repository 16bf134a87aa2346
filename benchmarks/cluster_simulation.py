"""What do queue scheduling, bounded staleness and environment-level asynchrony gain on 16 to 1,024 workers?

    python benchmarks/cluster_simulation.py --save        # results/cluster_simulation.json and .png
    python benchmarks/cluster_simulation.py --draw        # the picture again, from the saved result

A simulation: the real scheduler (sprl/rollout/scheduler.py) under a virtual clock, with engines, environments and a learner that
only take time. Nothing here was measured on a cluster; every cost is a constant below, with where it comes from. What can be
read from it is the shape of the gains, beside Propositions 1 and 2 (sprl/rollout/theory.py) and the published figures.

A worker generates one sample at a time or trains, as in the propositions: one engine has a slot for each. A GPU runs many samples
at once, and faster when few are left; so a worker is nearer to a slot of a GPU than to a GPU, and stragglers cost more here.

    rlvr          64 x 8 samples an update, log-normal times whose longest is 20 times the median. The batch barrier is synchronous
                  and keeps a prompt's 8 samples together until the longest ends; the queue is synchronous, each sample a task of
                  its own; alpha = 1, 2, 4 train on beta* of the workers (Prop 2) and generate on the others. The best split is
                  alpha = 2 with the best of a few shares. Synchronous arms use all workers for both, in turns
    generation    the same without training, against alpha, for two orders in which updates take groups (Prop 1)
    environments  rollouts alone of 32 x 8 conversations with environments: a barrier a turn against environment-level asynchrony,
                  for several numbers of turns; then redundant groups and members, of which the first 32 x 8 count
    agentic       the same with training, step by step: a barrier a turn; environment-level asynchrony; alpha = 1 on disjoint
                  workers; redundancy on top

`bound` is the propositions' for the draws that were made; `published` what the spec's section 14 has for the nearest experiment.
Where the figures differ from the paper's, and why, is in `DEVIATIONS`, which goes into the result.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import ROOT, report
from matplotlib.figure import Figure

from sprl.rollout.episodes import Episode, Generate, Work, answered
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.simulation import Clock, SimulatedEngine, SimulatedWorkers
from sprl.rollout.theory import Costs
from sprl.settings import Rollout
from sprl.trajectory import NOTHING, Completion, Request, Trajectory

# --- costs: every one of them published, or assumed ------------------------------------------------------------------

PROMPTS, GROUP = 64, 8  # ROLL's example of RLVR, Qwen2.5-7B (spec 9)
SAMPLES = PROMPTS * GROUP
TAIL = 20  # the longest response over the median (spec 1, the paper's)
SIGMA = np.log(TAIL) / 3.04  # of log-normal times with median 1, the unit of RLVR: the longest of 512 is 3.04 deviations out (exact
#                              for the expected largest of 512 normal numbers to two digits), so that TAIL is of one batch
MEAN = float(np.exp(SIGMA**2 / 2))
ROLLOUT_SHARE = 0.7  # rollout takes more than 70 % of a step (spec 1): 70 % of the work, and stragglers make it more
TRAINING = MEAN * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE  # worker-seconds a sample, all passes
WORKERS = (16, 32, 64, 128, 256, 512, 1024)
ALPHAS = (1, 2, 4)
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35)  # of workers that train, tried for the best split
GENERATING = 256  # workers of the experiment without training (assumed)

ENVIRONMENTS, MEMBERS = 32, 8  # second-hand, of the experiment with redundant environments (spec 14)
SPARE_GROUPS, SPARE_MEMBERS = 4, 1  # 36 x 9 of them, likewise
LATENCY, SPREAD = 10.0, 10.0  # seconds an environment's step takes: N(10, 10), 0 where negative (spec 14, second-hand)
REDUNDANT_SPREAD = 5.0  # N(10, 5) where redundancy was measured (spec 14, second-hand)
TURNS = 10  # actions an episode, all of which it takes: FrozenLake's most (spec 6)
TURNS_TRIED = (5, 10, 20, 40)
TURN_TOKENS = 64  # spec 9
TURN_SECONDS, TURN_SIGMA = 2.0, 0.5  # an answer's generation: log-normal with this median (assumed)
AGENT_WORKERS = 256  # slots, one for each of a batch's conversations (assumed)
AGENT_SHARES = (1 / 2, 2 / 3, 3 / 4, 5 / 6)  # of workers that train; 2/3 are the 16 of 24 GPUs of ROLL's RLVR example (spec 9)
SLOW, SLOWER = 0.01, 10.0  # the variant with slow environments: 1 % of the episodes take ten times as long (assumed)
# Training takes what makes rollouts ROLLOUT_SHARE of the step that has a barrier a turn. Graders take no time (assumed), and
# neither does handing over weights, nor taking in again what an update interrupted (assumed; both favour running ahead).

TOKENS = 256  # of a response, whatever it takes: what an interruption rounds to
UPDATES, WARM = 24, 6  # updates of a run, of which the first fill the queue and are not counted
AGENT_UPDATES, AGENT_WARM = 8, 2

RLVR_PUBLISHED, AGENTIC_PUBLISHED = 2.24, 2.72
ENVIRONMENT_LEVEL_PUBLISHED, REDUNDANT_PUBLISHED = 2.46, 5.4  # second-hand, as are all that follow
AGENTIC_STEPS_PUBLISHED = {  # ALFWorld, SWE
  'environment-level': (1.58, 1.23),
  'alpha = 1': (2.27, 1.68),
  'alpha = 1, redundant': (2.72, 1.81),
}

DEVIATIONS: tuple[str, ...] = ()


# --- a cluster -------------------------------------------------------------------------------------------------------


class Cluster:
  """The scheduler over so many generating slots.

  `generation(request)` and `latency(call)` are seconds; `episode(number)` makes a member of a group.
  """

  def __init__(
    self,
    rollout: Rollout,
    slots: int,
    generation: Callable[[Request], float],
    latency: Callable[[Any], float],
    episode: Callable[[int], Episode],
  ):
    self.clock = Clock()
    self.workers = SimulatedWorkers(self.clock, latency, lambda call: SimpleNamespace(score=0.0, status='ok'))
    self.engine = SimulatedEngine(self.clock, slots, generation, self.workers)
    self.scheduler = Scheduler([self.engine], self.workers, lambda number: lambda: episode(number), rollout, self.clock)

  def update(self, training: float) -> None:
    """An update of the controller: rollouts go on while the learner is busy, as far as the window lets them."""
    self.scheduler.batch()
    end = self.clock() + training
    alarm = self.workers.submit(Alarm(training))  # the engine looks up when training ends, not only when a request does
    while self.clock() < end and not self.scheduler.idle:
      self.scheduler.pump()
    self.workers.cancel(alarm)
    self.clock.until(end)
    self.scheduler.sync(None)

  def timed(self, updates: int, warm: int, training: float = 0.0) -> float:
    """Seconds an update, after the first `warm`."""
    for _ in range(warm):
      self.update(training)
    start = self.clock()
    for _ in range(updates - warm):
      self.update(training)
    return (self.clock() - start) / (updates - warm)
