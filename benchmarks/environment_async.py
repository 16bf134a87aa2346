"""Environments that take their time: a barrier a turn, environment-level asynchrony, redundant environments.

    python benchmarks/environment_async.py --save     # results/environment_async.json and results/environment_async.png
    python benchmarks/environment_async.py --draw     # the picture again, from the saved result

FrozenLake, each of whose calls is delayed by N(10, 10) / 100 seconds (0 where negative): the latencies of ROLL Flash's figure in
hundredths. The policy is a small random network, so that environments are what is waited for, as they are there; its engine,
scheduler and workers are those of every run.

    barrier       all environments step, then all answers are generated, and so on
    asynchronous  every episode goes on as soon as its own environment has answered (sprl's scheduler)
    redundant     the same with one more group, and one more member in each: the first ones to end count
"""

import argparse
import itertools
import json
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import ROOT, paired_gains, report
from matplotlib.figure import Figure

from sprl.cache.layout import cache_layout
from sprl.config import DENSE, UNQUANTISED, Rollout, Sampling
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.rollout.episodes import Limits, Transcript
from sprl.rollout.prompts import ConversationSource
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.timeline import Timeline
from sprl.sampler.engine import Engine, EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.tasks.environment_pool import Call, environment_pool
from sprl.tasks.environments.frozen_lake import FrozenLake
from sprl.tasks.environments.latency import Before, delayed
from sprl.tasks.environments.protocol import turn_messages
from sprl.tasks.worker_pool import WorkerPool
from sprl.types import Request

GROUPS, N, TURNS, TURN_TOKENS = 16, 8, 20, 4
MEAN = STD = 0.1  # seconds: N(10, 10) in hundredths
SPARE = (GROUPS + 1) * (N + 1)
SAMPLING = Sampling(max_prompt=8, max_tokens=TURNS * (TURN_TOKENS + 4), chunk=4, prompt_buckets=(8,))
ARMS = ('barrier', 'asynchronous', 'redundant')
WANTED = 2.0


class Short:
  """A codec whose messages are four ids long whatever they say: the network is random, and is not what is timed."""

  def opening(self, messages: Any) -> list[int]:
    """Eight ids."""
    return [3 + sum(m['content'].encode()[i] for m in messages) % 250 for i in range(8)]

  def reply(self, messages: Any, answer: Any) -> list[int]:
    """Four ids."""
    return self.opening(messages)[:4]

  def text(self, ids: Any) -> str:
    """A direction."""
    return f'<answer>{("Left", "Down", "Right", "Up")[sum(ids) % 4]}</answer>'


SALTS = itertools.count()


def environment() -> Before:
  """A lake that does not end early. Each environment has delays of its own."""
  return delayed(FrozenLake(size=8, max_actions=TURNS, holes=0.0), MEAN, STD, next(SALTS))


def main():
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/environment_async.json')
  parser.add_argument('--draw', action='store_true', help='only draw what was saved')
  args = parser.parse_args()
  if args.draw:
    return draw()
  config = tiny('llama')
  served = sampler_weights(transformer.init_params(config, jax.random.key(0), scale=0.1), jnp.dtype('float32'))
  plan = cache_layout(config, DENSE, UNQUANTISED, 8, SAMPLING.max_tokens, 'float32')
  measured: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
  for i, seed in enumerate([100, *map(int, args.seeds.split(','))]):  # the first compiles, and does not count
    for arm in ARMS:
      engine = EngineConfig(config, SAMPLING, plan, SPARE, 8, seed, (), lambda ids: '')
      with environment_pool(environment, SPARE, 60.0) as workers:
        start = time.perf_counter()
        steps = (barrier if arm == 'barrier' else partial(scheduled, arm))(Engine(engine, served), workers, seed, start)
        seconds = time.perf_counter() - start
      if i:
        measured[arm].append({'seed': seed, 'seconds': seconds, 'turns': steps})
  rows = [row(arm, measured) for arm in ARMS]
  sizes = {'groups': GROUPS, 'group': N, 'turns': TURNS, 'latency': [MEAN, STD], 'wanted': WANTED}
  report('environment_async', rows, {**sizes, 'runs': measured}, args.save)
  if args.save:
    draw()


def limits() -> Limits:
  """Those of every arm."""
  return Limits(TURNS, TURN_TOKENS, 8, SAMPLING.max_tokens)


def barrier(slots: Engine, workers: WorkerPool, seed: int, start: float) -> list[float]:
  """All resets, then turns in lockstep. Returns when each environment's step was done, in seconds."""
  codec, done = Short(), []

  def everyone(calls: dict[int, Call]) -> dict[int, Any]:
    tickets = {workers.submit(call): i for i, call in calls.items()}
    found: dict[int, Any] = {}
    while len(found) < len(tickets):
      workers.wait(None)
      for ticket, result in workers.poll(tickets).items():
        found[tickets[ticket]] = result
        done.append(time.perf_counter() - start)
    return found

  live = {i: i // N + seed * GROUPS for i in range(GROUPS * N)}  # member -> seed of its episode
  observed = everyone({i: Call((i, 0), 'reset', 2 * group) for i, group in live.items()})
  texts = {i: Transcript(np.array(codec.opening(turn_messages(*observed[i])), np.int32)) for i in live}
  for turn in range(TURNS):
    for i, text in texts.items():
      slots.add(Request(i, i // N, text.prompt, TURN_TOKENS, text.given))
    while slots.load:
      slots.dispatch()
      for completion in slots.collect():
        texts[completion.request.uid].parts.append(completion)
    answers = {i: codec.text(text.parts[-1].tokens.tolist()) for i, text in texts.items()}  # pyright: ignore
    outcomes = everyone({i: Call((i, 0), 'step', answer) for i, answer in answers.items()})
    texts = {i: text for i, text in texts.items() if not outcomes[i].done}
    for i, text in texts.items():
      text.parts.append(np.array(codec.reply(turn_messages(outcomes[i].observation, outcomes[i].info), []), np.int32))
    if not texts or turn + 1 == TURNS:
      break
  return done


def scheduled(arm: str, slots: Engine, workers: WorkerPool, seed: int, start: float) -> list[float]:
  """One batch of the scheduler."""
  redundant = arm == 'redundant'
  settings = Rollout(
    prompts=GROUPS, group=N, order='completion' if redundant else 'start',
    extra_prompts=int(redundant), extra_members=int(redundant),
  )  # fmt: skip
  done: list[float] = []
  look = workers.poll

  def poll(wanted: Any) -> dict[int, Any]:
    found = look(wanted)
    done.extend([time.perf_counter() - start] * len(found))
    return found

  workers.poll = poll
  source = ConversationSource(
    lambda number: 2 * (number + seed * GROUPS), limits(), Short(), workers.release, sample=None, time_limit=60.0
  )
  Scheduler([slots], workers, source, settings, time.perf_counter, GROUPS, Timeline(time.perf_counter)).batch()
  return done


def row(arm: str, measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
  """A line of the table: means over seeds, and the range of the paired gains over the barrier."""
  results = measured[arm]
  return {
    'arm': arm,
    'seconds': float(np.mean([r['seconds'] for r in results])),
    'turns': float(np.mean([len(r['turns']) for r in results])),
    **paired_gains(measured, arm, 'barrier'),
  }


def draw() -> None:
  """results/environment_async.png: environment calls that are done, against time, an arm a colour, all seeds."""
  results = ROOT / 'benchmarks' / 'results'
  saved = json.loads((results / 'environment_async.json').read_text())
  figure = Figure(figsize=(8, 3.6), layout='constrained')
  axes = figure.subplots()
  for colour, line in zip(('#5c6470', '#2a6f97', '#e07a1f'), saved['rows']):
    for i, one in enumerate(saved['result']['runs'][line['arm']]):
      label = f'{line["arm"]}: {line["seconds"]:.1f} s' if i == 0 else None
      axes.plot(one['turns'], np.arange(1, len(one['turns']) + 1), color=colour, linewidth=1.3, label=label)
  axes.set_xlabel('seconds')
  axes.set_title('environment calls done', loc='left', fontsize=10)
  axes.legend(frameon=False)
  axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(results / 'environment_async.png', dpi=110)


if __name__ == '__main__':
  main()
