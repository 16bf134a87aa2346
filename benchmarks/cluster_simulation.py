"""What do queue scheduling, bounded staleness and environment-level asynchrony gain on 16 to 1,024 workers?

    python benchmarks/cluster_simulation.py --save        # results/cluster_simulation.json and two pictures
    python benchmarks/cluster_simulation.py --draw        # redraw the pictures from the saved result

This is a simulation: the real scheduler (sprl/rollout/scheduler.py) runs under a virtual clock, with engines, environments and a
learner that only take time. Nothing was measured on a cluster. Every cost is a constant below, with its source. The result shows
the shape of the gains, beside Propositions 1 and 2 (benchmarks/theory.py) and published figures.

A worker generates one sample at a time, or trains, as in the propositions. One engine has a slot for each generating worker. A
GPU runs many samples at once, and each of them faster when few are left. So a worker resembles a slot of a GPU, and stragglers
cost more here.

    rlvr          64 x 8 samples per update with log-normal times; the longest is 20 times the median. The batch barrier is
                  synchronous; the 8 samples of a prompt hold their slots until the longest ends. The queue is synchronous; each
                  sample is a separate task. alpha = 1, 2, 4 train on beta* of the workers (Prop 2) and generate on the others.
                  The best split is alpha = 2 with the best of SHARES. Synchronous arms use all workers for both phases
    generation    rollouts of `rlvr` without training, against alpha, for two orders in which updates take groups (Prop 1)
    environments  rollouts of 32 x 8 conversations without training: a barrier per turn against environment-level asynchrony, for
                  several numbers of turns; then redundant groups and members, of which the first 32 x 8 to finish count. These
                  are other, shorter episodes
    agentic       32 x 8 conversations with training; each arm adds one change: a barrier per turn; environment-level asynchrony;
                  alpha = 1 on disjoint workers; redundancy. A second series has 1 % slow environments

Columns:

    train       workers that train
    time        time per update, in median responses; with environments, in seconds
    gain        speed-up over the barrier on the same draws; for redundancy alone, over 32 x 8
    over queue  speed-up over the synchronous queue
    bound       upper bound of the time by the propositions, for these draws
    floor       lower bound of the time for any scheduler within the window (Costs.asynchronous_at_least)
    published   speed-up of the nearest published experiment

The run prints DEVIATIONS, which explains the differences from the published figures.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from common import report
from matplotlib.axes import Axes
from pictures import BLACK, BLUE, GREY, ORANGE, PURPLE, TEAL, load, new_figure, save, style
from simulation import Clock, Episodes, SimulatedEngine, SimulatedWorkers
from theory import Costs

from sprl.config import Rollout
from sprl.rollout.episodes import Episode, Generate, Work, answered
from sprl.rollout.scheduler import Scheduler
from sprl.tasks.grader_pool import Grade
from sprl.types import NOTHING, Request, Trajectory

# --- costs: published or assumed -------------------------------------------------------------------------------------
#
# "The paper" is ROLL Flash (arXiv 2510.11345). "Notes" are third-party notes on it, which were not checked against the paper
# (docs/methods/async.md, Published numbers). "ROLL" is an example configuration of alibaba/ROLL.

PROMPTS, GROUP = 64, 8  # ROLL: RLVR with Qwen2.5-7B
SAMPLES = PROMPTS * GROUP
TAIL = 20  # longest response over the median (the paper, section 1)
SIGMA = np.log(TAIL) / 3.04  # log-normal, median 1; the largest of 512 normal numbers averages 3.04 standard deviations
MEAN = float(np.exp(SIGMA**2 / 2))
ROLLOUT_SHARE = 0.7  # of a step's work is rollout; with stragglers more than 70 % of its time (the paper, section 1)
TRAINING = MEAN * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE  # worker-seconds per sample, all passes
WORKERS = (16, 32, 64, 128, 256, 512, 1024)
ALPHAS = (1, 2, 4)
SHARES = (0.2, 0.3, 0.4, 0.5, 0.7)  # of workers that train; the best split is chosen among them
GENERATING = 256  # workers of the experiment without training (assumed)

ENVIRONMENTS, MEMBERS = 32, 8  # notes: the experiment with redundant environments
SPARE_GROUPS, SPARE_MEMBERS = 4, 1  # notes: 36 x 9 environments
REDUNDANT = {'order': 'completion', 'extra_prompts': SPARE_GROUPS, 'extra_members': SPARE_MEMBERS}
LATENCY, SPREAD = 10.0, 10.0  # seconds per environment step: N(10, 10), negative draws are 0 (notes)
REDUNDANT_SPREAD = 5.0  # N(10, 5) in the experiment with redundancy (notes)
TURNS = 10  # actions of every episode: the most that FrozenLake allows (ROLL)
TURNS_TRIED = (5, 10, 20, 40)
TURN_TOKENS = 64  # ROLL: FrozenLake
TURN_SECONDS, TURN_SIGMA = 2.0, 0.5  # generation time of an answer: log-normal with this median (assumed)
AGENT_WORKERS = 256  # slots, one per conversation of a batch (assumed)
AGENT_SHARES = (1 / 2, 2 / 3, 5 / 6)  # of workers that train; the best counts (assumed)
SLOW, SLOWER = 0.01, 10.0  # slow environments: 1 % of the episodes take ten times as long (assumed)
# Training time makes rollouts ROLLOUT_SHARE of the step with a barrier per turn. Graders, weight transfer and re-prefilling
# interrupted samples take no time (assumed). The last two favour running ahead.

TOKENS = 256  # of every response, fast or slow; an interruption falls between two tokens
UPDATES, WARM = 24, 6  # updates of a run; the first WARM fill the queue and do not count
AGENT_UPDATES, AGENT_WARM = 8, 2  # if rollouts run ahead
SYNCHRONOUS_UPDATES = 4  # synchronous updates are alike

RLVR_PUBLISHED = 2.24  # the paper's abstract, "up to"
# ALFWorld: 2.72 is from the paper's abstract. The other figures here are from the notes.
AGENTIC_PUBLISHED = {'environment-level': 1.58, 'alpha = 1': 2.27, 'alpha = 1, redundant': 2.72}
ENVIRONMENT_LEVEL_PUBLISHED, REDUNDANT_PUBLISHED = 2.46, 5.4

DEVIATIONS = (
  'The baseline of the published 2.24x is unknown. alpha = 2 with the best split gains 2.4 to 2.6 over the batch barrier at '
  'every size. Over the synchronous queue it gains 1.05 on 16 workers, and 2.0 to 2.5 on 128 and more.',
  'Times exceed Prop 2: alpha = 1 takes up to 1.4 times its bound. Under the window the age of a sample includes training; in '
  'Prop 2 it does not. On 256 and more workers no scheduler can meet the bound (`floor` exceeds it). On 16 to 64 workers the '
  'cause is rounding to whole workers.',
  'beta* is a poor split: so few workers train that training takes the whole bound. A larger share is better at every size, and '
  'on 16 workers beta* is slower than the synchronous queue.',
  'Weight transfer, re-prefilling interrupted samples and graders take no time here, so the real gain of running ahead is '
  'smaller. A GPU decodes faster when few samples are left, so real stragglers cost less and gains over a barrier are smaller.',
  'Environment-level asynchrony reaches the second-hand 2.46x only in episodes of about 40 turns; with 10 turns it gains 2.0. '
  'The turns, batch and generation times of the published experiment are unknown.',
  'With latencies of N(10, 5), redundancy gains a tenth, not the second-hand 5.4x: sums of normal numbers have no tail to cut. '
  'If one episode in a hundred is ten times as slow (assumed), it gains sixfold. The published gain needs such stragglers.',
  'Agentic alpha = 1 gains 2.6, more than the second-hand 2.27: sprl keeps alpha + 1 batches of environments open, ROLL a fixed '
  'number. Redundancy then adds nothing (second-hand: 1.20), because the learner is the bottleneck. With slow environments it '
  'gains threefold.',
)


# --- a cluster -------------------------------------------------------------------------------------------------------


class Cluster:
  """The scheduler over one engine with `slots` slots.

  `generation(request)` returns seconds. A `Work` call holds the seconds that it takes.
  """

  def __init__(
    self, rollout: Rollout, slots: int, generation: Callable[[Request], float], episode: Callable[[int, int], Episode]
  ):
    self.clock = Clock()
    self.workers = SimulatedWorkers(self.clock, lambda seconds: seconds, lambda seconds: Grade(0.0, 'ok'))
    engine = SimulatedEngine(self.clock, slots, generation)
    source = Episodes(lambda number, uid, attempt: episode(uid, attempt))
    self.scheduler = Scheduler([engine], self.workers, source, rollout, self.clock)

  def update(self, training: float) -> None:
    """Run one update: take a batch, then train for `training` seconds while rollouts continue within the window."""
    self.scheduler.batch()
    end = self.clock() + training
    self.clock.expect(end)  # wakes the scheduler when training ends, not only when a request ends
    while self.clock() < end and not self.scheduler.idle:
      self.scheduler.pump()
    self.clock.until(end)
    self.scheduler.sync([None])

  def timed(self, updates: int, warm: int, training: float = 0.0) -> float:
    """Return the seconds per update, without the first `warm`."""
    for _ in range(warm):
      self.update(training)
    start = self.clock()
    for _ in range(updates - warm):
      self.update(training)
    return (self.clock() - start) / (updates - warm)


# --- single answers --------------------------------------------------------------------------------------------------

LENGTHS = np.random.default_rng(0).lognormal(0, SIGMA, (UPDATES + max(ALPHAS) + 1, SAMPLES))  # all arms share them
COUNTED = LENGTHS[WARM:UPDATES]


def costs(workers: int, alpha: float = 0, training: float = TRAINING) -> Costs:
  """Return the propositions' inputs for these draws. Lmax is the longest time in alpha + 1 batches, averaged over windows."""
  queued = np.lib.stride_tricks.sliding_window_view(COUNTED.max(axis=1), int(alpha) + 1)
  return Costs(workers, SAMPLES, float(COUNTED.mean()), float(queued.max(axis=1).mean()), training)


def answers(slots: int, training: float, **settings: Any) -> float:
  """Return the time per update with single answers."""

  def generation(request: Request) -> float:
    return LENGTHS.flat[request.uid % LENGTHS.size]

  rollout = Rollout(prompts=PROMPTS, group=GROUP, **settings)
  cluster = Cluster(
    rollout, slots, generation, lambda uid, attempt: answered(np.zeros(1, np.int32), TOKENS, lambda completion: 0.0)
  )
  return cluster.timed(UPDATES, WARM, training)


def disjoint(workers: int, alpha: float, share: float) -> tuple[float, int]:
  """Return the time per update if round(share * workers) workers train while the others generate, and that number."""
  trainers = round(share * workers)
  return answers(workers - trainers, SAMPLES * TRAINING / trainers, async_ratio=float(alpha)), trainers


def rlvr(workers: int) -> list[dict[str, Any]]:
  """Return the rows of every arm for one number of workers."""
  together = SAMPLES * TRAINING / workers  # seconds of training on all workers
  synchronous = costs(workers).synchronous
  barrier, queue = answers(workers, together, replicate_prompts=False), answers(workers, together)
  rows = [
    line('rlvr', 'batch barrier', barrier, 1.0, workers, workers),
    line('rlvr', 'queue', queue, barrier / queue, workers, workers, bound=synchronous),
  ]

  def asynchronous_line(arm: str, alpha: float, time: float, trainers: int, bound: float | None) -> dict[str, Any]:
    floor = costs(workers).asynchronous_at_least(alpha, trainers)
    gains = {'over queue': queue / time, 'published': RLVR_PUBLISHED}
    return line('rlvr', arm, time, barrier / time, workers, trainers, bound=bound, floor=floor, **gains)

  for alpha in ALPHAS:
    limits = costs(workers, alpha)
    found = disjoint(workers, alpha, limits.training_share(alpha))
    rows.append(asynchronous_line(f'alpha = {alpha}', alpha, *found, limits.asynchronous(alpha)))
  best = min(disjoint(workers, 2, share) for share in SHARES)
  rows.append(asynchronous_line('alpha = 2, best split', 2, *best, None))
  return rows


def generation_alone() -> list[dict[str, Any]]:
  """Return the rows without training, for each alpha and two orders (Prop 1)."""
  barrier = answers(GENERATING, 0.0)
  rows = [line('generation', 'alpha = 0', barrier, 1.0, GENERATING, 0, bound=costs(GENERATING).generation())]
  for alpha in ALPHAS:
    for order in ('start', 'deadline'):
      time = answers(GENERATING, 0.0, async_ratio=float(alpha), order=order)
      bound = costs(GENERATING, alpha).generation(alpha)
      rows.append(line('generation', f'alpha = {alpha}, {order}', time, barrier / time, GENERATING, 0, bound=bound))
  return rows


def line(
  experiment: str, arm: str, time: float, gain: float, workers: int, trainers: int, **more: float | None
) -> dict[str, Any]:
  """Return a row of the table; `time` is per update."""
  known = {'experiment': experiment, 'workers': workers, 'arm': arm, 'train': trainers, 'time': time, 'gain': gain}
  return known | dict.fromkeys(('over queue', 'bound', 'floor', 'published')) | more


# --- conversations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversations:
  """Seconds of each answer and of each environment step, [episode, turn]."""

  generation: np.ndarray
  latency: np.ndarray

  @classmethod
  def draw(cls, turns: int, spread: float, slow: float = 0.0) -> 'Conversations':
    """Draw the episodes of 2 x AGENT_UPDATES updates. A share `slow` of them is SLOWER times as slow."""
    rng, shape = np.random.default_rng(1), (2 * AGENT_UPDATES * ENVIRONMENTS * MEMBERS, turns)
    latency = np.maximum(0, rng.normal(LATENCY, spread, shape)) * np.where(rng.random((shape[0], 1)) < slow, SLOWER, 1)
    return cls(rng.lognormal(np.log(TURN_SECONDS), TURN_SIGMA, shape), latency)

  def a_turn_each(self) -> 'Conversations':
    """Return the turns as episodes of one turn, in the order in which a barrier per turn runs them."""

    def by_turn(seconds: np.ndarray) -> np.ndarray:
      return seconds.reshape(-1, ENVIRONMENTS * MEMBERS, seconds.shape[1]).transpose(0, 2, 1).reshape(-1, 1)

    return Conversations(by_turn(self.generation), by_turn(self.latency))

  def episode(self, uid: int, attempt: int) -> Episode:
    """Yield the answers and environment steps of one episode; return its trajectory."""
    given = NOTHING
    for seconds in self.latency.T:
      completion = yield Generate(np.zeros(1, np.int32), given, TURN_TOKENS)
      yield Work(seconds[completion.request.uid % len(seconds)])
      given = np.concatenate([given, completion.tokens])
    return Trajectory.of(completion)

  def seconds(self, request: Request) -> float:
    """Return the seconds of the answer that a request asks for."""
    turn = (len(request.given) - request.resumed) // TURN_TOKENS
    return self.generation[request.uid % len(self.generation), turn]

  def timed(self, slots: int = AGENT_WORKERS, training: float = 0.0, **settings: Any) -> float:
    """Return the seconds per update with environment-level asynchrony."""
    rollout = Rollout(prompts=ENVIRONMENTS, group=MEMBERS, **settings)
    plan = (AGENT_UPDATES, AGENT_WARM) if rollout.async_ratio else (SYNCHRONOUS_UPDATES, 0)
    return Cluster(rollout, slots, self.seconds, self.episode).timed(*plan, training)

  def split(self, together: float, **settings: Any) -> tuple[float, int]:
    """Return the best time over AGENT_SHARES at alpha = 1, and its trainers. All workers would train for `together` seconds."""
    tried = []
    for trainers in (round(share * AGENT_WORKERS) for share in AGENT_SHARES):
      training = together * AGENT_WORKERS / trainers
      tried.append((self.timed(AGENT_WORKERS - trainers, training, async_ratio=1.0, **settings), trainers))
    return min(tried)

  def barrier_a_turn(self) -> float:
    """Return the seconds of an update's rollouts if every turn is a separate batch, which ends with its slowest conversation."""
    turns, rollout = self.latency.shape[1], Rollout(prompts=ENVIRONMENTS, group=MEMBERS)
    each = self.a_turn_each()
    return turns * Cluster(rollout, AGENT_WORKERS, each.seconds, each.episode).timed(turns * SYNCHRONOUS_UPDATES, 0)


def environments() -> list[dict[str, Any]]:
  """Return the rows of rollouts without training."""
  rows = []
  for turns in TURNS_TRIED:
    draws = Conversations.draw(turns, SPREAD)
    barrier, free = draws.barrier_a_turn(), draws.timed()
    rows.append(line('environments', f'barrier a turn, {turns} turns', barrier, 1.0, AGENT_WORKERS, 0))
    arm = f'environment-level, {turns} turns'
    rows.append(line('environments', arm, free, barrier / free, AGENT_WORKERS, 0, published=ENVIRONMENT_LEVEL_PUBLISHED))
  for slow, name in ((0.0, ''), (SLOW, f', {SLOW:.0%} slow')):
    draws = Conversations.draw(TURNS, REDUNDANT_SPREAD, slow)
    exact = draws.timed()
    rows.append(line('environments', f'32 x 8{name}', exact, 1.0, AGENT_WORKERS, 0))
    for groups, members in ((SPARE_GROUPS, 0), (0, SPARE_MEMBERS), (SPARE_GROUPS, SPARE_MEMBERS)):
      time = draws.timed(order='completion', extra_prompts=groups, extra_members=members)
      arm = f'{ENVIRONMENTS + groups} x {MEMBERS + members}{name}'
      published = REDUNDANT_PUBLISHED if groups and members else None
      rows.append(line('environments', arm, time, exact / time, AGENT_WORKERS, 0, published=published))
  return rows


def agentic() -> list[dict[str, Any]]:
  """Return the rows with training; each arm adds one change. The second series has some slow environments."""
  rows, together = [], 0.0
  for slow, name in ((0.0, ''), (SLOW, f', {SLOW:.0%} slow')):
    draws = Conversations.draw(TURNS, SPREAD, slow)
    rollouts = draws.barrier_a_turn()
    together = together or rollouts * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE  # slow environments do not change it
    barrier = rollouts + together

    found = {
      'barrier a turn': (barrier, AGENT_WORKERS),
      'environment-level': (draws.timed(training=together), AGENT_WORKERS),
      'alpha = 1': draws.split(together),
      'alpha = 1, redundant': draws.split(together, **REDUNDANT),
    }
    for arm, (time, trainers) in found.items():
      published = AGENTIC_PUBLISHED.get(arm)
      rows.append(line('agentic', arm + name, time, barrier / time, AGENT_WORKERS, trainers, published=published))
  return rows


def main():
  """Print a report; save and draw it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/cluster_simulation.json and two pictures')
  parser.add_argument('--draw', action='store_true', help='draw the saved result and exit')
  args = parser.parse_args()
  if args.draw:
    return draw()
  start, rows = perf_counter(), []
  for part in (generation_alone, environments, agentic, *(partial(rlvr, workers) for workers in WORKERS)):
    rows += part()
    print(f'{perf_counter() - start:.0f} s: {rows[-1]["experiment"]}, {rows[-1]["workers"]} workers', file=sys.stderr)
  longest = LENGTHS.max(axis=1) / np.median(LENGTHS)
  result = {
    'simulated': True,
    'longest of a batch over the median': float(longest.mean()),
    'training of a sample over its generation': TRAINING / MEAN,
    'deviations': list(DEVIATIONS),
  }
  report('cluster_simulation', rows, result, args.save)
  if args.save:
    draw()


# --- pictures --------------------------------------------------------------------------------------------------------

LINES = {  # arm of `rlvr` -> colour, line style, meaning
  'queue': (BLACK, '-', 'queue, synchronous'),
  'alpha = 1': (PURPLE, '-', 'alpha = 1, beta* trains'),
  'alpha = 2': (TEAL, '-', 'alpha = 2, beta* trains'),
  'alpha = 4': (BLUE, '-', 'alpha = 4, beta* trains'),
  'alpha = 2, best split': (ORANGE, '--', 'alpha = 2, best share trains'),
}
CHANGES = {  # panel -> its title; arms of its bars -> their labels
  'turns': (
    'Rollouts: no barrier after each turn, by the turns of an episode',
    {f'{n} turns': f'{n} turns' for n in TURNS_TRIED},
  ),
  'spare': (
    'Rollouts: spare episodes, the first 32 x 8 count (N(10, 5) s; gain over 32 x 8)',
    {'36 x 8': '4 more groups', '32 x 9': '1 more member each', '36 x 9': 'both'},
  ),
  'agentic': (
    f'Rollouts and training, {TURNS} turns; each bar adds a change',
    {'environment-level': 'no barrier after a turn', 'alpha = 1': '+ alpha = 1', 'alpha = 1, redundant': '+ spare episodes'},
  ),
}


def draw() -> None:
  """Draw results/cluster_simulation.png (single answers) and results/cluster_simulation_environments.png."""
  rows = load('cluster_simulation')['rows']
  parts = {name: [row for row in rows if row['experiment'] == name] for name in ('rlvr', 'generation', 'environments', 'agentic')}

  figure = new_figure(
    f'Simulated, not measured: gains on {min(WORKERS)} to {max(WORKERS):,} workers over a batch barrier',
    f"sprl's scheduler on a virtual clock; {PROMPTS} x {GROUP} responses per update, the longest about {TAIL} times the median; "
    'one draw',
    6.6,
  )
  panels = figure.subplot_mosaic([['gains', 'gains'], ['bounds', 'generation']], height_ratios=[1.1, 1])
  draw_gains(panels['gains'], parts['rlvr'])
  draw_bounds(panels['bounds'], parts['rlvr'])
  draw_generation(panels['generation'], parts['generation'])
  save(figure, 'cluster_simulation')

  figure = new_figure(
    'Simulated, not measured: gains with environments over a barrier after each turn',
    f"sprl's scheduler on a virtual clock; {ENVIRONMENTS} x {MEMBERS} conversations on {AGENT_WORKERS} workers; "
    f'environment steps of N({LATENCY:g}, {SPREAD:g}) s; one draw',
    6.2,
  )
  turns = [row | {'arm': row['arm'].split(', ')[-1]} for row in parts['environments'] if 'environment-level' in row['arm']]
  for axes, part in zip(figure.subplots(3, 1, sharex=True, height_ratios=[1, 1.1, 1.1]), CHANGES):
    draw_changes(axes, *CHANGES[part], {'turns': turns, 'spare': parts['environments'], 'agentic': parts['agentic']}[part])
  axes.set_xlabel('times as fast', fontsize=9)
  legend = {'loc': 'outside lower center', 'ncols': 3, 'frameon': False, 'fontsize': 8.5}
  figure.legend(*figure.axes[-1].get_legend_handles_labels(), **legend)
  save(figure, 'cluster_simulation_environments')


def column(rows: list[dict[str, Any]], arm: str, name: str) -> np.ndarray:
  """Return a column of the rows of an arm, one value for each number of workers."""
  return np.array([row[name] for row in rows if row['arm'] == arm], float)


def by_workers(axes: Axes, title: str, ylabel: str) -> None:
  """Give the axes a title, labels, and an x axis of workers."""
  style(axes, title, 'workers (log scale)', ylabel)
  axes.set_xscale('log')
  axes.set_xticks(WORKERS, [f'{workers:,}' for workers in WORKERS])
  axes.minorticks_off()


def draw_gains(axes: Axes, rows: list[dict[str, Any]]) -> None:
  """Draw the speed-up over the batch barrier against workers."""
  by_workers(
    axes,
    'Speed of rollouts and training (beta*: share of workers that Proposition 2 gives to training)',
    'times as fast as the barrier',
  )
  for arm, (colour, dashes, meaning) in LINES.items():
    axes.plot(WORKERS, column(rows, arm, 'gain'), dashes, marker='o', color=colour, label=meaning, markersize=4.5)
  axes.axhline(RLVR_PUBLISHED, color=GREY, linestyle=':', label=f'published: up to {RLVR_PUBLISHED}')
  axes.set_ylim(0, 2.9)
  axes.legend(frameon=False, fontsize=8.5, loc='lower left', ncols=3)


def draw_bounds(axes: Axes, rows: list[dict[str, Any]]) -> None:
  """Draw the time of an update as a fraction of the upper bound of Prop 2, and the least that the window allows."""
  by_workers(axes, 'Time / bound of Proposition 2 (colours as above)', 'fraction of the bound')
  for arm, (colour, dashes, _) in LINES.items():
    if not np.isnan(bound := column(rows, arm, 'bound')).any():
      axes.plot(WORKERS, column(rows, arm, 'time') / bound, dashes, marker='o', color=colour, markersize=4.5)
  floor = column(rows, 'alpha = 1', 'floor') / column(rows, 'alpha = 1', 'bound')
  axes.plot(WORKERS, floor, ':', color=LINES['alpha = 1'][0], label='least possible, alpha = 1')
  axes.axhline(1, color=GREY, linewidth=0.9)
  axes.set_ylim(0, 1.6)
  axes.legend(frameon=False, fontsize=8.5, loc='lower right')


def draw_generation(axes: Axes, rows: list[dict[str, Any]]) -> None:
  """Draw the time of generation without training against alpha, with the bound of Prop 1."""
  style(axes, f'Generation without training, {GENERATING} workers', 'alpha: updates ahead', 'time per update (median responses)')
  alphas = (0, *ALPHAS)
  bounds = [costs(GENERATING, alpha).generation(alpha) for alpha in alphas]
  axes.plot(alphas, bounds, color=GREY, linewidth=1, label='bound of Proposition 1')
  for order, mark, colour in (('start', 'o-', BLUE), ('deadline', 's-', ORANGE)):
    times = [row['time'] for row in rows if row['arm'].endswith((order, '= 0'))]
    axes.plot(alphas, times, mark, color=colour, markersize=4.5, label=f'order {order}')
  axes.axhline(SAMPLES / GENERATING * COUNTED.mean(), color=GREY, linestyle=':', label='all workers always busy')
  axes.set(ylim=(0, None), xticks=alphas)
  axes.legend(frameon=False, fontsize=8.5)


def draw_changes(axes: Axes, title: str, labels: dict[str, str], rows: list[dict[str, Any]]) -> None:
  """Draw a bar for the gain of each arm in `labels`, another with some slow environments, and the published gain."""
  style(axes, title, grid='x')
  slow = f', {SLOW:.0%} slow'
  gains = {row['arm']: row['gain'] for row in rows}
  published = {row['arm']: row['published'] for row in rows}
  looks = {
    '': (BLUE, 'latencies as stated above'),
    slow: (ORANGE, f'{100 * SLOW:.0f} % of the episodes {SLOWER:g} times as slow'),
  }
  suffixes = [suffix for suffix in looks if all(arm + suffix in gains for arm in labels)]
  height = 0.7 / len(suffixes)
  for i, suffix in enumerate(suffixes):
    colour, meaning = looks[suffix]
    places = np.arange(len(labels)) + (i - (len(suffixes) - 1) / 2) * height
    values = [gains[arm + suffix] for arm in labels]
    axes.barh(places, values, 0.9 * height, color=colour, alpha=0.85, label=meaning)
    for place, value in zip(places, values):
      axes.text(0.07, place, f'{value:.1f}', va='center', fontsize=8.5, fontweight='bold', color='white')
  known = [(published[arm], i) for i, arm in enumerate(labels) if published[arm] is not None]
  axes.plot(*zip(*known), 'D', color=BLACK, markersize=6, markeredgecolor='white', label='published (most figures second-hand)')
  axes.set_yticks(range(len(labels)), labels.values(), fontsize=9)
  axes.set_xlim(0, 7.2)
  axes.invert_yaxis()


if __name__ == '__main__':
  main()
