"""Do memory, threads and speed stay constant for an hour with a queue of 10,000 requests and 64 slow, failing environments?

    python benchmarks/load.py --minutes 60 --save     # results/load.json and results/load.png
    python benchmarks/load.py --draw                  # redraw the figure from the saved result

One process serves both loads, with two engines of the tiny model. A thread keeps QUEUED requests with prompts of mixed lengths in
the queue of the first engine: it adds a request for each one that ends. The scheduler plays episodes on the second engine, with
64 environments in separate processes (claims/dictation.py). The time of an environment call is log-normal. One episode in fifty
is ten times as slow. 5 % of the calls that return an observation raise, so about 23 % of the attempts at an episode fail. Groups
are finished in the order in which they start. AHEAD more groups may start before that: with fewer open groups, a slow episode
would stop the others. Every SAMPLE seconds the benchmark reads the resident memory, file descriptors and threads of all processes
from /proc (Linux).

The verdict compares the end of the run, its last sixth, with the beginning: a sixth after the first twelfth, in which caches
fill. In an hour these are minutes 5 to 15 and 50 to 60. It covers the memory, files and threads of the process, their sums over
its children, the child that grows most, and the number of children that were started.

Other programs, and other guests of a host, change the speed of a core by a tenth and more within minutes. So the speed has two
verdicts. Alone, from the beginning to the sixth before the last, it must not fall by more than 5 %. In the last sixth a second
process with the same load starts beside the first. They share the core or cores, and must agree within 5 % at the same time.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import positive, report
from environment_async import FixedLengthCodec
from pictures import BLACK, BLUE, ORANGE, load, machine_label, new_figure, save, style

from sprl.cache.layout import cache_layout
from sprl.config import DENSE, UNQUANTISED, Rollout, Sampling, Task
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.rollout.episodes import Limits
from sprl.rollout.prompts import ConversationSource
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.timeline import Timeline
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import SamplerWeights, sampler_weights
from sprl.tasks.environment_pool import environment_pool, make_environment
from sprl.types import Request

CLAIMS = Path(__file__).resolve().parent / 'claims'
QUEUED, ROWS, PROMPTS = 10_000, 32, (8, 16, 32, 64)  # requests in the queue; rows and prompt buckets of its engine
QUEUE = Sampling(max_prompt=PROMPTS[-1], max_tokens=48, chunk=8, prompt_buckets=PROMPTS)
ENVIRONMENTS, GROUP, AHEAD, TURNS, TURN_TOKENS = 64, 8, 31, 5, 4  # AHEAD: groups that may start before their batch
EPISODES = Sampling(max_prompt=8, max_tokens=TURNS * (TURN_TOKENS + 4), chunk=4, prompt_buckets=(8,))
RAISING = 0.05  # share of the environment calls that raise, of those that return an observation
SPANS = 1000  # of the timeline, which by default keeps 100,000 and so grows for hours
SAMPLE, SIXTH = 10.0, 1 / 6  # seconds between two readings; share of the time in which a new process runs too
FLAT, STEADY = 0.02, 0.05  # largest relative growth of memory; largest relative change of a speed
TASK = Task(
  kind='environment', name=f'{CLAIMS}/dictation.py:Dictation', args={'turns': TURNS, 'raising': RAISING}, executor='processes'
)


def main() -> None:
  """Print a report; save and draw it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--minutes', type=positive, default=60)
  parser.add_argument('--new', action='store_true', help=argparse.SUPPRESS)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/load.json')
  parser.add_argument('--draw', action='store_true', help='draw the saved result and exit')
  args = parser.parse_args()
  if args.draw:
    return draw()
  seconds = 60.0 * args.minutes
  if args.new:
    time.sleep(seconds * (1 - SIXTH))
    return print(json.dumps(run(seconds * SIXTH).columns))
  command = [sys.executable, __file__, '--minutes', str(args.minutes), '--new']
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # from the beginning, as it takes a file
    try:
      seen = run(seconds, process.pid)
    except BaseException:
      process.kill()
      raise
    lines = process.communicate()[0].splitlines()
  beside = json.loads(lines[-1]) if process.returncode == 0 else None
  rows = judged(seen) + compared(seen.columns, beside)
  settings = {'queued': QUEUED, 'rows': ROWS, 'environments': ENVIRONMENTS, 'raising': RAISING, 'sample': SAMPLE}
  report('load', rows, {**settings, 'seen': seen.columns, 'new process': beside}, args.save)
  if args.save:
    draw()
  if grown := [row['what'] for row in rows if not row['flat']]:
    raise SystemExit(f'not flat: {", ".join(grown)}')


def run(seconds: float, beside: int | None = None) -> 'Readings':
  """Serve both loads for `seconds`. Return the readings, which leave out the child process `beside`."""
  config = tiny('llama')
  weights = sampler_weights(transformer.init_params(config, jax.random.key(0), scale=0.1), jnp.dtype('float32'))
  seen = Readings(beside)
  end, drawn = threading.Event(), [0, 0]  # tokens of the queue, and of the episodes: each written by one thread
  queue = threading.Thread(target=serve_queue, args=(weights, config, end, drawn), daemon=True)
  with environment_pool(partial(make_environment, TASK, False), ENVIRONMENTS, 60.0, 'processes') as workers:
    layout = cache_layout(config, DENSE, UNQUANTISED, 8, EPISODES.max_tokens, 'float32')
    engine = Engine(EngineConfig(config, EPISODES, layout, ENVIRONMENTS, 8, 0, (), lambda ids: ''), weights)
    limits = Limits(TURNS, TURN_TOKENS, 8, EPISODES.max_tokens)
    source = ConversationSource(lambda number: 2 * number, limits, FixedLengthCodec(), workers.release, None, 60.0)
    settings = Rollout(prompts=1, group=GROUP, async_ratio=float(AHEAD))
    timeline = Timeline(time.perf_counter, SPANS)
    scheduler = Scheduler([engine], workers, source, settings, time.perf_counter, timeline=timeline, retries=20)
    start = time.perf_counter()
    due = start + SAMPLE
    queue.start()
    seen.take(0.0, sum(drawn), 0, 0)
    episodes = 0
    while time.perf_counter() < start + seconds and queue.is_alive():
      groups = scheduler.batch(lambda at=due: time.perf_counter() > at)
      for group in groups or ():
        episodes += len(group.trajectories)
        drawn[1] += sum(int(t.mask.sum()) for t in group.trajectories)
      if groups:
        scheduler.metrics()  # as a step of training does: it ends the records of the samples since the last call
        scheduler.sync([weights])
      if (now := time.perf_counter()) > due:
        due = now + SAMPLE
        seen.take(now - start, sum(drawn), episodes, scheduler.counts['errors'])
    assert queue.is_alive(), 'the thread that serves the queue ended; its error is above'
    end.set()
    queue.join()
  return seen


def serve_queue(weights: SamplerWeights, config, end: threading.Event, drawn: list[int]) -> None:
  """Answer requests from a queue that always holds QUEUED, until `end` is set. Adds to `drawn[0]` the tokens that were drawn."""
  layout = cache_layout(config, DENSE, UNQUANTISED, PROMPTS[-1], QUEUE.max_tokens, 'float32')
  engine = Engine(EngineConfig(config, QUEUE, layout, ROWS, 8, 1, (), lambda ids: ''), weights)
  rng, uids = np.random.default_rng(0), itertools.count()
  while not end.is_set():
    while engine.load < QUEUED:
      uid, length = next(uids), int(rng.integers(1, PROMPTS[-1] + 1))
      engine.add(Request(uid, uid, rng.integers(3, 259, length).astype(np.int32), int(rng.integers(1, QUEUE.max_tokens + 1))))
    engine.dispatch()
    drawn[0] += sum(len(completion.tokens) for completion in engine.collect())


# --- readings and verdicts -------------------------------------------------------------------------------------------


@dataclass
class Readings:
  """What was seen of the processes, a value for each reading."""

  beside: int | None = None  # a child process that is left out, with its own children
  columns: dict[str, list[float]] = field(default_factory=dict)
  children: dict[int, list[float]] = field(default_factory=dict)  # process -> its memory in MiB

  def take(self, seconds: float, tokens: int, episodes: int, failures: int) -> None:
    """Append a reading of this process and its descendants. `failures` are calls that raised."""
    own, children = os.getpid(), descendants(os.getpid(), self.beside)
    found = {
      'clock': round(time.monotonic(), 1),
      'seconds': round(seconds, 1),
      'tokens': tokens,
      'episodes': episodes,
      'failures': failures,
      'children': len(children),
    }
    for name, pids in (('process', [own]), ('children', children)):
      states = {pid: state for pid in pids if (state := state_of(pid))}
      found |= {f'{name} {what}': round(sum(s[what] for s in states.values()), 1) for what in ('MiB', 'files', 'threads')}
    for pid, state in states.items():  # of the children
      self.children.setdefault(pid, []).append(state['MiB'])
    for name, value in found.items():
      self.columns.setdefault(name, []).append(value)


def descendants(pid: int, without: int | None = None) -> list[int]:
  """Return the ids of the children of a process, of their children, and so on, but not of the child `without`."""
  found = []
  with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
    for task in Path(f'/proc/{pid}/task').iterdir():
      for child in map(int, (task / 'children').read_text().split()):
        found += [child, *descendants(child)] if child != without else []
  return found


def state_of(pid: int) -> dict[str, float] | None:
  """Return the resident memory (MiB) and the numbers of open files and threads of a process; None if it has ended."""
  try:
    pages = int(Path(f'/proc/{pid}/statm').read_text().split()[1])
    return {
      'MiB': pages * os.sysconf('SC_PAGE_SIZE') / 2**20,
      'files': len(os.listdir(f'/proc/{pid}/fd')),
      'threads': len(os.listdir(f'/proc/{pid}/task')),
    }
  except (FileNotFoundError, ProcessLookupError):
    return None


def judged(seen: Readings) -> list[dict[str, Any]]:
  """Return a row for each measure: its value at the beginning and at the end, the relative change, and the verdict."""
  columns, count = seen.columns, len(seen.columns['seconds'])
  begin, end = slice(count // 12, count // 4), slice(5 * count // 6, count)
  rows = []
  for name in [name for name in columns if name.startswith(('process ', 'children '))]:
    before, after = (float(np.mean(columns[name][part])) for part in (begin, end))
    rows.append(row(name, before, after, after <= before * (1 + (FLAT if name.endswith('MiB') else 0.0)) + 0.5))
  grown = [[float(np.mean(each[part])) for part in (begin, end)] for each in seen.children.values() if len(each) == count]
  before, after = max(grown, key=lambda pair: pair[1] - pair[0] * (1 + FLAT), default=[1.0, np.inf])
  rows.append(row('MiB of the child that grows most', before, after, after <= before * (1 + FLAT) + 0.5))
  before, after = columns['children'][0], len(seen.children)
  rows.append(row('children, started in all', before, after, after <= before))
  for name in ('tokens', 'episodes'):
    alone = begin, slice(2 * count // 3, 5 * count // 6)  # a second process runs afterwards
    before, after = (float(np.ptp(columns[name][part]) / np.ptp(columns['seconds'][part])) for part in alone)
    rows.append(row(f'{name} a second', before, after, after >= before * (1 - STEADY)))
  return rows


def compared(ours: Mapping[str, Sequence[float]], new: Mapping[str, Sequence[float]] | None) -> list[dict[str, Any]]:
  """Return rows that compare the speed of a new process (the beginning) with this one's (the end), while both run.

  The first third of the new process, in which it starts and compiles, is left out. The rows have no numbers, and fail, if the new
  process failed (None) or ran for less than a minute after its start.
  """
  first, last = (new['clock'][len(new['clock']) // 3], min(new['clock'][-1], ours['clock'][-1])) if new else (0.0, 0.0)
  rows = []
  for name in ('tokens', 'episodes'):
    what = f'{name} a second, a new process and this one'
    if new is None or last - first < 6 * SAMPLE:
      rows.append({'what': what, 'beginning': None, 'end': None, 'change': None, 'flat': False})
      continue
    before, after = (float(np.diff(np.interp([first, last], each['clock'], each[name]))[0]) for each in (new, ours))
    rows.append(row(what, before / (last - first), after / (last - first), abs(after / before - 1) <= STEADY))
  return rows


def row(name: str, before: float, after: float, flat: bool) -> dict[str, Any]:
  """Return a row of the table."""
  return {'what': name, 'beginning': before, 'end': after, 'change': after / before - 1, 'flat': flat}


def draw() -> None:
  """Draw results/load.png: memory, open files and threads, and speed against time."""
  saved = load('load')
  seen = {name: np.array(values, float) for name, values in saved['result']['seen'].items()}
  minutes = seen['seconds'] / 60
  title = 'An hour of load: memory, open files and threads, speed'
  setting = f'{QUEUED:,} requests in the queue and {ENVIRONMENTS} environments; tiny model; {machine_label(saved)}'
  figure = new_figure(title, setting, 6.0)
  memory, counts, speed = figure.subplots(3, 1, sharex=True)
  style(memory, 'Resident memory', ylabel='GiB')
  style(counts, 'Open files (lines) and threads (dashed)', ylabel='number')
  style(speed, 'Speed, mean over ten readings', 'minutes', 'tokens a second')
  for name, colour in (('process', BLUE), ('children', ORANGE)):
    label = 'the run' if name == 'process' else f'{ENVIRONMENTS} environments together'
    memory.plot(minutes, seen[f'{name} MiB'] / 1024, color=colour, label=label)
    counts.plot(minutes, seen[f'{name} files'], color=colour, label=label)
    counts.plot(minutes, seen[f'{name} threads'], '--', color=colour)
  ten = 10
  tokens, seconds = (seen[name][ten:] - seen[name][:-ten] for name in ('tokens', 'seconds'))
  speed.plot(minutes[ten:], tokens / seconds, color=BLACK)
  begins = minutes[-1] * (1 - SIXTH)
  speed.axvline(begins, color=BLACK, linewidth=0.8, linestyle=':')
  speed.annotate('a second process shares the core', (begins, 0), (-4, 6), textcoords='offset points', ha='right', fontsize=8.5)
  for axes in (memory, counts, speed):
    axes.set_ylim(0, None)
  memory.legend(frameon=False, fontsize=8.5)
  save(figure, 'load')


if __name__ == '__main__':
  main()
