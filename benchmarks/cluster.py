"""A simulated cluster for cluster_simulation.py: what things cost, random draws of work, and the scheduler over GPUs.

The real scheduler (sprl/rollout/scheduler.py) runs under a virtual clock, with engines, environments and a learner that only take
time. Every cost is a constant below, with its source: "the paper" is ROLL Flash (arXiv 2510.11345); "notes" are third-party notes
on it, which were not checked against the paper (docs/methods/async.md, Published numbers); "ROLL" is an example configuration of
alibaba/ROLL.

A GPU generates up to SLOTS sequences at once, or trains. Two models of its speed:

    batch    a decode step of n sequences takes FIXED + n x EACH: the weights are read once, each sequence adds its cache
    fixed    a decode step takes as long as that of a full GPU, whatever runs. A slot is then a worker of Propositions 1 and 2

Nothing else takes time: no prefill, graders, weight transfer, or reading an interrupted sequence again. That favours running
ahead.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from common import RESULTS
from jaxtyping import Float, Int
from simulation import Clock, Episodes, SimulatedEngine, SimulatedWorkers
from theory import Costs

from sprl.config import Rollout
from sprl.rollout.episodes import Episode, Generate, Work
from sprl.rollout.scheduler import Scheduler
from sprl.types import NOTHING, Trajectory

# --- GPUs ------------------------------------------------------------------------------------------------------------

MODEL = 'Qwen2.5-7B'  # ROLL: RLVR
SLOTS = 64  # sequences of a GPU (assumed)


def decode_step(rows: Sequence[Mapping[str, Any]], model: str) -> tuple[float, float]:
  """Return (fixed, each): a decode step of n sequences takes fixed + n x each seconds.

  `rows` are of results/gpu_static.json, which predicts steps of 64 and 256 sequences of 4,096 tokens on an H200, with dense
  bfloat16 weights and caches. The line goes through both. On an H200, the 256 sequences of
  Qwen2.5-7B took 2 % less time (docs/kernels.md).
  """
  few, many = (next(r['step ms'] for r in rows if r['case'] == f'{model} {n} dense bf16') / 1000 for n in (64, 256))
  each = (many - few) / (256 - 64)
  return few - 64 * each, each


FIXED, EACH = decode_step(json.loads((RESULTS / 'gpu_static.json').read_text(encoding='utf-8'))['rows'], MODEL)
FULL = FIXED + SLOTS * EACH  # seconds of a step of a full GPU
SPEEDS: dict[str, Callable[[int], float]] = {'batch': lambda running: FIXED + running * EACH, 'fixed': lambda running: FULL}

# --- single answers --------------------------------------------------------------------------------------------------

PROMPTS, GROUP = 64, 8  # ROLL: RLVR with Qwen2.5-7B
REPLICATED = {(32, 16): 1.30, (64, 16): 1.84}  # notes: prompts and samples of the experiments on replication, and their gains
SAMPLES = PROMPTS * GROUP
SPARE_PROMPTS = 16  # notes: the experiment with redundant prompts
MEDIAN = 1600  # tokens of a response (assumed); a running sequence then has about as many tokens as in gpu_static.json
TAIL = 20  # longest response over the median (the paper, section 1)
SIGMA = np.log(TAIL) / 3.04  # of the log-normal lengths; the largest of 512 normal numbers averages 3.04 standard deviations
MEAN = float(MEDIAN * np.exp(SIGMA**2 / 2))
TRAINING_SHARE = 0.3  # of a step's work; with stragglers rollouts take more than 70 % of its time (the paper, section 1)
TRAINING = MEAN * FULL / SLOTS * TRAINING_SHARE / (1 - TRAINING_SHARE)  # GPU-seconds per sample, all passes
ALPHAS = (1, 2)
COUNTED = 6  # updates of a run; alpha + 1 updates come in a burst, so alpha + 1 divides their number
SHARES = (0.25, 0.375, 0.5, 0.75)  # of the GPUs train, rounded to whole GPUs; the best counts (assumed)

# --- conversations ---------------------------------------------------------------------------------------------------

ENVIRONMENTS, MEMBERS = 32, 8  # notes: the experiment with redundant environments
REDUNDANT: dict[str, Any] = {'order': 'completion', 'extra_prompts': 4, 'extra_members': 1}  # notes: 36 x 9 environments
LATENCY, SPREAD = 10.0, 10.0  # seconds per environment step: N(10, 10), negative draws are 0 (notes)
REDUNDANT_SPREAD = 5.0  # N(10, 5) in the experiment with redundancy (notes)
TURNS = 10  # answers of every episode: the most that FrozenLake allows (ROLL)
TURNS_TRIED = (5, 10, 20, 40)  # (assumed)
TURN_TOKENS, TURN_SIGMA = 256, 0.5  # of an answer: log-normal with this median, 2 s on a full GPU (assumed)
SLOW, SLOWER = 0.01, 10.0  # slow environments: 1 % of the episodes take ten times as long (assumed)
AGENT_GPUS = 8  # (assumed)
AGENT_TRAINERS = (5, 6, 7)  # GPUs that train; the best counts (assumed)
AGENT_COUNTED, AGENT_WARM = 2, 2  # updates of a run that count, and those before them if rollouts run ahead


# --- the scheduler over GPUs -----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
  """What a run took and kept."""

  seconds: float  # per update
  dropped: float  # share of the started samples that were not trained on
  size: float  # mean size of the samples that were trained on: tokens, or seconds of environment steps


class Cluster:
  """The scheduler over GPUs that generate.

  `gpus` may be a fraction: one GPU then has fewer slots. `episode(number, member)` is the episode of a member of a group. The
  reward of its trajectory is its size (`Outcome.size`). A `Work` call holds the seconds that it takes.
  """

  def __init__(self, rollout: Rollout, gpus: float, speed: str, episode: Callable[[int, int], Episode]):
    self.clock, started = Clock(), rollout.group + rollout.extra_members
    self.sizes: list[float] = []
    slots = round(gpus * SLOTS)
    engines = [
      SimulatedEngine(self.clock, min(SLOTS, slots - first), lambda r: r.max_tokens + r.resumed, pace=SPEEDS[speed])
      for first in range(0, slots, SLOTS)
    ]
    workers = SimulatedWorkers(self.clock, lambda seconds: seconds, lambda seconds: None)
    source = Episodes(lambda number, uid, attempt: episode(number, uid % started))
    self.scheduler = Scheduler(engines, workers, source, rollout, self.clock)

  def update(self, training: float) -> None:
    """Run one update: take a batch, then train for `training` seconds while rollouts continue within the window."""
    self.sizes += [t.reward for group in self.scheduler.batch() or () for t in group.trajectories]
    end = self.clock() + training
    self.clock.expect(end)  # wakes the scheduler when training ends, not only when a request ends
    while self.clock() < end and not self.scheduler.idle:
      self.scheduler.pump()
    self.clock.until(end)
    self.scheduler.sync([None] * len(self.scheduler.engines))

  def run(self, updates: int, warm: int = 0, training: float = 0.0) -> Outcome:
    """Run `updates` updates after `warm` ones that do not count."""
    for _ in range(warm):
      self.update(training)
    start, self.sizes = self.clock(), []
    self.scheduler.metrics()
    for _ in range(updates):
      self.update(training)
    dropped = self.scheduler.metrics()[0]['async/dropped_members']
    return Outcome((self.clock() - start) / updates, dropped / (dropped + len(self.sizes)), float(np.mean(self.sizes)))


# --- single answers --------------------------------------------------------------------------------------------------


@cache
def lengths(draw: int, prompts: int = PROMPTS, group: int = GROUP) -> Int[np.ndarray, 'G M']:
  """Draw the tokens of all responses of a run, [group, member]: of the updates that count, and max(ALPHAS) + 1 on either side."""
  groups = (COUNTED + 2 * (max(ALPHAS) + 1)) * prompts
  return np.ceil(np.random.default_rng(draw).lognormal(np.log(MEDIAN), SIGMA, (groups, group))).astype(int)


def counted(draw: int) -> Int[np.ndarray, 'U N']:
  """Return the tokens of the responses of the updates that count, [update, sample]."""
  return lengths(draw).reshape(-1, SAMPLES)[max(ALPHAS) + 1 :][:COUNTED]


@cache
def answers(
  draw: int, speed: str, gpus: int, trainers: float = 0, alpha: int = 0, training: float = TRAINING, *, prompts: int = PROMPTS,
  group: int = GROUP, **settings: Any,
) -> Outcome:  # fmt: skip
  """Run updates with single answers.

  An update has `group` samples of each of `prompts` prompts. `trainers` of the GPUs train while the others generate; with 0 all
  generate, then all train. `training` are GPU-seconds of a sample. If rollouts run ahead, alpha + 1 updates fill the queue first.
  The same updates count in all runs.
  """
  warm = alpha + 1 if alpha else 0
  tokens = lengths(draw, prompts, group)[(max(ALPHAS) + 1 - warm) * prompts :]

  def episode(number: int, member: int) -> Episode:
    completion = yield Generate(NOTHING, NOTHING, int(tokens[number % len(tokens), member]))
    return Trajectory.of(completion, reward=float(len(completion.tokens)))

  rollout = Rollout(prompts=prompts, group=group, async_ratio=float(alpha), **settings)
  return Cluster(rollout, gpus - trainers, speed, episode).run(COUNTED, warm, prompts * group * training / (trainers or gpus))


def costs(draw: int, gpus: int, alpha: int, training: float = TRAINING) -> Costs:
  """Return the propositions' inputs for slots at the fixed speed. Lmax is the longest time in alpha + 1 batches, on average."""
  queued = np.lib.stride_tricks.sliding_window_view(counted(draw).max(axis=1), alpha + 1).max(axis=1)
  mean, longest = FULL * float(counted(draw).mean()), FULL * float(queued.mean())
  return Costs(gpus * SLOTS, SAMPLES, mean, longest, training * SLOTS)


# --- conversations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversations:
  """Tokens of each answer and seconds of each environment step, [group, member, turn]."""

  tokens: Int[np.ndarray, 'G M T']
  latency: Float[np.ndarray, 'G M T']

  @classmethod
  def draw(cls, draw: int, turns: int = TURNS, spread: float = SPREAD, slow: float = 0.0) -> 'Conversations':
    """Draw the episodes of a run. A share `slow` of them is SLOWER times as slow."""
    rng = np.random.default_rng(draw)
    shape = 4 * AGENT_COUNTED * ENVIRONMENTS, MEMBERS + REDUNDANT['extra_members'], turns
    latency = np.maximum(0, rng.normal(LATENCY, spread, shape))
    tokens = np.ceil(rng.lognormal(np.log(TURN_TOKENS), TURN_SIGMA, shape)).astype(int)
    return cls(tokens, latency * np.where(rng.random((*shape[:2], 1)) < slow, SLOWER, 1))

  @property
  def seconds(self) -> float:
    """Mean seconds of the environment steps of an episode."""
    return float(self.latency.sum(axis=2).mean())

  def after(self, groups: int) -> 'Conversations':
    """Return the episodes without those of the first groups."""
    return Conversations(self.tokens[groups:], self.latency[groups:])

  def turn(self, turn: int) -> 'Conversations':
    """Return episodes of one turn of each conversation."""
    return Conversations(self.tokens[..., turn : turn + 1], self.latency[..., turn : turn + 1])

  def episode(self, number: int, member: int) -> Episode:
    """Yield the answers and environment steps of one episode; return its trajectory."""
    given, place = NOTHING, (number % len(self.tokens), member)
    for tokens, seconds in zip(self.tokens[place], self.latency[place]):
      completion = yield Generate(NOTHING, given, int(tokens))
      yield Work(seconds)
      given = np.concatenate([given, completion.tokens])
    return Trajectory.of(completion, reward=float(self.latency[place].sum()))

  def run(self, trainers: int = 0, training: float = 0.0, **settings: Any) -> Outcome:
    """Run updates in which each conversation goes on by itself, with `training` GPU-seconds per update.

    If `trainers` GPUs train, rollouts run one update ahead. With 0 all GPUs generate, then all train. Such a run begins with the
    episodes that count in the other one. Where episodes are dropped, later ones take their places, so these are not the same.
    """
    warm = AGENT_WARM if trainers else 0
    rollout = Rollout(prompts=ENVIRONMENTS, group=MEMBERS, async_ratio=1.0 if trainers else 0.0, **settings)
    own = self if trainers else self.after(AGENT_WARM * ENVIRONMENTS)
    cluster = Cluster(rollout, AGENT_GPUS - trainers, 'batch', own.episode)
    return cluster.run(AGENT_COUNTED, warm, training / (trainers or AGENT_GPUS))

  def barrier_a_turn(self) -> float:
    """Return the seconds of an update's rollouts if every turn is a separate batch."""
    return sum(self.turn(t).run().seconds for t in range(self.latency.shape[2]))
