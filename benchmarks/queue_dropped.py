"""Which sequences do redundant groups drop, and how much shorter are the kept ones?

    python benchmarks/queue_dropped.py --save         # results/queue_dropped.json

The redundant arm of queue_scheduling.py: 8 groups more than needed start, and the first 48 complete groups count. The dropped
groups are then sampled to their end, with the same tokens as if they had not been dropped, so all lengths are known. All figures
are counts, which do not depend on the machine's load.

    kept, dropped    sequences
    kept length      mean tokens of the kept sequences
    drawn            mean tokens that the dropped sequences had when the batch was complete
    dropped length   mean tokens of the dropped sequences at their end
    bias             mean tokens of the kept sequences / of all sequences - 1
    logged bias      what a run logs as async/dropped_length_bias: a dropped sequence counts with the tokens that it had
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import report
from queue_scheduling import EXTRA, GROUPS, MAX_TOKENS, ROWS, N, batch, scheduled, setting

from sprl.sampler.engine import Engine


def main():
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/queue_dropped.json')
  args = parser.parse_args()
  engine, prompts = setting()
  runs = [{'seed': seed, **dropping(engine(seed), prompts)} for seed in map(int, args.seeds.split(','))]
  rows = [{'seed': run['seed'], 'decode steps': run['steps'], **bias(**run['lengths'])} for run in runs]
  for run, row in zip(runs, rows):
    row['logged bias'] = run['logged bias']
  setup = {'rows': ROWS, 'groups': GROUPS, 'group': N, 'extra': EXTRA, 'max_tokens': MAX_TOKENS}
  report('queue_dropped', rows, {**setup, 'runs': runs}, args.save)


def dropping(engine: Engine, prompts: Sequence[np.ndarray]) -> dict[str, Any]:
  """Run the redundant arm. Return its decode steps, the bias that it logs, and the lengths of kept and dropped sequences."""
  scheduler = scheduled('redundant', engine, prompts, GROUPS)
  groups = scheduler.batch() or []
  logged, steps = scheduler.metrics()[0], engine.usage.steps
  others = set(range(GROUPS + EXTRA)) - {group.number for group in groups}
  ends = [ended for _, ended in batch(engine, sorted(others), prompts)]
  return {
    'steps': steps,
    'logged bias': logged['async/dropped_length_bias'],
    'lengths': {
      'kept': [len(t.completion) for group in groups for t in group.trajectories],
      'dropped': list(itertools.chain.from_iterable(each.values() for each in ends)),
      'drawn': logged['async/dropped_tokens'],
    },
  }


def bias(kept: Sequence[int], dropped: Sequence[int], drawn: float) -> dict[str, float]:
  """Return the columns of a row from the lengths of sequences; `drawn` is the sum of the tokens that the dropped ones had."""
  return {
    'kept': len(kept), 'dropped': len(dropped), 'kept length': float(np.mean(kept)), 'drawn': drawn / len(dropped),
    'dropped length': float(np.mean(dropped)), 'bias': float(np.mean(kept) / np.mean([*kept, *dropped]) - 1),
  }  # fmt: skip


if __name__ == '__main__':
  main()
