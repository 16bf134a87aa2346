"""How much faster are rollouts with slow environments if no barrier ends each turn? And with redundant environments?

    python benchmarks/environment_async.py --save     # results/environment_async.json and results/environment_async.png
    python benchmarks/environment_async.py --draw     # redraw the figure from the saved result

The environment is FrozenLake. Each call is delayed by N(10, 10) / 100 seconds (negative draws are 0): a hundredth of the
latencies of ROLL Flash (arXiv 2510.11345). The policy is a small random network, so environments dominate the time, as in that
experiment. Engine, scheduler and workers are those of a training run.

    barrier       all environments step, then all answers are generated, in turns
    asynchronous  each episode continues as soon as its own environment has answered (sprl's scheduler)
    redundant     asynchronous, with one more group and one more member per group; the first to finish count, so that these are
                  other episodes than those of the other arms
"""

import argparse
import itertools
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import paired_gains, report
from pictures import BLACK, BLUE, ORANGE, draw_seeds, load, machine_label, new_figure, save, style

from sprl.cache.layout import cache_layout
from sprl.config import DENSE, UNQUANTISED, Rollout, Sampling
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.rollout.episodes import Limits, Transcript
from sprl.rollout.prompts import ConversationSource
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.timeline import Timeline
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.tasks.environment_pool import Call, environment_pool
from sprl.tasks.environments.frozen_lake import FrozenLake
from sprl.tasks.environments.latency import Before, delayed
from sprl.tasks.environments.protocol import turn_messages
from sprl.tasks.worker_pool import WorkerPool
from sprl.types import Request

GROUPS, N, TURNS, TURN_TOKENS = 16, 8, 20, 4
MEAN = STD = 0.1  # seconds: N(10, 10) in hundredths
MOST_EPISODES = (GROUPS + 1) * (N + 1)  # of the arm `redundant`; the rows and workers of every arm
SAMPLING = Sampling(max_prompt=8, max_tokens=TURNS * (TURN_TOKENS + 4), chunk=4, prompt_buckets=(8,))
ARMS = ('barrier', 'asynchronous', 'redundant')
LINES = {  # arm -> colour, meaning
  'barrier': (BLACK, 'a barrier after each turn'),
  'asynchronous': (BLUE, 'each episode continues by itself'),
  'redundant': (ORANGE, '+ spare episodes; the first to finish count'),
}


class FixedLengthCodec:
  """A codec with a fixed number of ids for any text. The network is random and its time is not of interest."""

  def opening(self, messages: Any) -> list[int]:
    """Return eight ids."""
    text = ''.join(m['content'] for m in messages).encode()
    return [3 + text[i % len(text)] % 250 for i in range(8)]

  def reply(self, messages: Any, answer: Any) -> list[int]:
    """Return four ids."""
    return self.opening(messages)[:4]

  def text(self, ids: Any) -> str:
    """Return a direction as the answer."""
    return f'<answer>{("Left", "Down", "Right", "Up")[sum(ids) % 4]}</answer>'


SALTS = itertools.count()


def environment() -> Before:
  """Return a lake without holes: an episode ends early only at the goal. Each environment draws different delays, in all arms."""
  return delayed(FrozenLake(size=8, max_actions=TURNS, holes=0.0), MEAN, STD, next(SALTS))


def main():
  """Print a report; save and draw it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/environment_async.json')
  parser.add_argument('--draw', action='store_true', help='draw the saved result and exit')
  args = parser.parse_args()
  if args.draw:
    return draw()
  config = tiny('llama')
  weights = sampler_weights(transformer.init_params(config, jax.random.key(0), scale=0.1), jnp.dtype('float32'))
  layout = cache_layout(config, DENSE, UNQUANTISED, 8, SAMPLING.max_tokens, 'float32')
  measured: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
  for i, seed in enumerate([100, *map(int, args.seeds.split(','))]):  # the first seed compiles and does not count
    for arm in ARMS:
      engine = EngineConfig(config, SAMPLING, layout, MOST_EPISODES, 8, seed, (), lambda ids: '')
      with environment_pool(environment, MOST_EPISODES, 60.0) as workers:
        start = time.perf_counter()
        ended = (barrier if arm == 'barrier' else partial(scheduled, arm))(Engine(engine, weights), workers, seed, start)
        seconds = time.perf_counter() - start
      if i:
        measured[arm].append({'seed': seed, 'seconds': seconds, 'call_ends': ended})
  rows = [row(arm, measured) for arm in ARMS]
  sizes = {'groups': GROUPS, 'group': N, 'turns': TURNS, 'latency': [MEAN, STD]}
  report('environment_async', rows, {**sizes, 'runs': measured}, args.save)
  if args.save:
    draw()


def barrier(engine: Engine, workers: WorkerPool, seed: int, start: float) -> list[float]:
  """Run all resets, then turns in lockstep. Return the seconds at which environment calls ended."""
  codec, done = FixedLengthCodec(), []

  def call_all(calls: dict[int, Call]) -> dict[int, Any]:
    tickets = {workers.submit(call): i for i, call in calls.items()}
    found: dict[int, Any] = {}
    while len(found) < len(tickets):
      workers.wait(None)
      for ticket, result in workers.poll(tickets).items():
        found[tickets[ticket]] = result
        done.append(time.perf_counter() - start)
    return found

  live = {i: i // N + seed * GROUPS for i in range(GROUPS * N)}  # member -> group; its seed is 2 * group
  observed = call_all({i: Call((i, 0), 'reset', 2 * group) for i, group in live.items()})
  texts = {i: Transcript(np.array(codec.opening(turn_messages(*observed[i])), np.int32)) for i in live}
  while texts:
    for i, text in texts.items():
      engine.add(Request(i, i // N, text.prompt, TURN_TOKENS, text.given))
    while engine.load:
      engine.dispatch()
      for completion in engine.collect():
        texts[completion.request.uid].parts.append(completion)
    answers = {i: codec.text(text.parts[-1].tokens.tolist()) for i, text in texts.items()}  # pyright: ignore
    outcomes = call_all({i: Call((i, 0), 'step', answer) for i, answer in answers.items()})
    texts = {i: text for i, text in texts.items() if not outcomes[i].done}
    for i, text in texts.items():
      text.parts.append(np.array(codec.reply(turn_messages(outcomes[i].observation, outcomes[i].info), []), np.int32))
  return done


def scheduled(arm: str, engine: Engine, workers: WorkerPool, seed: int, start: float) -> list[float]:
  """Run one batch of the scheduler. Return the seconds at which environment calls ended."""
  redundant = arm == 'redundant'
  settings = Rollout(
    prompts=GROUPS, group=N, order='completion' if redundant else 'start',
    extra_prompts=int(redundant), extra_members=int(redundant),
  )  # fmt: skip
  done: list[float] = []
  original_poll = workers.poll

  def poll(wanted: Any) -> dict[int, Any]:
    found = original_poll(wanted)
    done.extend([time.perf_counter() - start] * len(found))
    return found

  workers.poll = poll
  limits = Limits(TURNS, TURN_TOKENS, 8, SAMPLING.max_tokens)
  source = ConversationSource(
    lambda number: 2 * (number + seed * GROUPS), limits, FixedLengthCodec(), workers.release, sample=None, time_limit=60.0
  )
  Scheduler([engine], workers, source, settings, time.perf_counter, GROUPS, Timeline(time.perf_counter)).batch()
  return done


def row(arm: str, measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
  """Return a row of the table: means over seeds, and paired speed-ups over the barrier."""
  results = measured[arm]
  return {
    'arm': arm,
    'seconds': float(np.mean([r['seconds'] for r in results])),
    'calls': float(np.mean([len(r['call_ends']) for r in results])),
    **paired_gains(measured, arm, 'barrier'),
  }


def draw() -> None:
  """Draw results/environment_async.png: finished environment calls against time, and the seconds of all rollouts, by arm."""
  saved = load('environment_async')
  result = saved['result']
  mean, std = result['latency']
  title = f'Rollouts with slow environments: {result["groups"]} x {result["group"]} episodes of up to {result["turns"]} turns'
  setting = (
    f'A small random policy; a call takes N({mean:g}, {std:g}) s; {len(result["runs"]["barrier"])} seeds; {machine_label(saved)}'
  )
  figure = new_figure(title, setting, 4.2)
  curves, total = figure.subplots(1, 2, width_ratios=[1.8, 1])
  style(curves, 'Calls over time (line: seed 0, band: all seeds)', 'seconds since the start', 'finished environment calls')
  style(total, 'Total (dots: seeds, bar: mean)', ylabel='seconds of all rollouts')
  for i, (arm, (colour, meaning)) in enumerate(LINES.items()):
    runs = result['runs'][arm]
    calls = np.arange(1, min(len(run['call_ends']) for run in runs) + 1)  # seeds end after different numbers of calls
    moments = [np.sort(run['call_ends'])[: len(calls)] for run in runs]
    curves.fill_betweenx(calls, np.min(moments, axis=0), np.max(moments, axis=0), color=colour, alpha=0.2, linewidth=0)
    curves.plot(
      np.sort(runs[0]['call_ends']), np.arange(1, len(runs[0]['call_ends']) + 1), color=colour, linewidth=1.5, label=meaning
    )
    seconds = [run['seconds'] for run in runs]
    draw_seeds(total, i, seconds, colour, bar=24)
    total.annotate(f'{np.mean(seconds):.1f} s', (i, max(seconds)), xytext=(0, 8), textcoords='offset points', ha='center',
                   fontsize=9, color=colour)  # fmt: skip
  curves.set(xlim=(0, None), ylim=(0, None))
  curves.legend(frameon=False, fontsize=8.5, loc='lower right')
  total.set(xlim=(-0.6, 2.6), ylim=(0, 10.5))
  total.set_xticks(range(3), LINES, fontsize=8)
  save(figure, 'environment_async')


if __name__ == '__main__':
  main()
