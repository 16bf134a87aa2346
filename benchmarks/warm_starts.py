"""How well do the models of the claims answer before training: sampled at temperature 1, and greedily?

    python benchmarks/warm_starts.py [--save]

The experiments of benchmarks/claims judge sampled answers. A model whose greedy answers are already good can gain by a sharper
distribution alone: the difference of the two accuracies is how much.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from claims.tasks import TASKS
from claims.worker import ask, resolved
from common import report

HOW = {
  'sampled': {'eval.temperature': 1.0, 'eval.samples': 2},
  'greedy': {'eval.temperature': 0.0, 'eval.samples': 1},
}


def main() -> None:
  """Evaluate the models of each task that has them."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/warm_starts.json')
  save = parser.parse_args().save
  rows = []
  for task in TASKS:
    with tempfile.TemporaryDirectory() as name:
      task.write(Path(name))
      for path in filter(Path.exists, map(Path, task.warm)):
        row: dict = {'task': task.name, 'model': path.name}
        for how, settings in HOW.items():
          run = resolved({**task.settings_in(Path(name)), **task.final, **settings, 'model.path': str(path), 'steps': 1})
          row[how] = round(float(np.mean(ask(run, None))), 4)
        rows.append(row)
  report('warm_starts', rows, {'problems': int(TASKS[0].final['eval.problems'])}, save)


if __name__ == '__main__':
  main()
