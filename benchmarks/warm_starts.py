"""How well do the models of the claims answer before training: sampled at temperature 1, and greedily? And greedily after it?

    python benchmarks/warm_starts.py [--save]
    python benchmarks/warm_starts.py --after staleness --arm fresh@high [--folder runs/claims] [--save]

The experiments of benchmarks/claims judge sampled answers. A model whose greedy answers are already good can gain by a sharper
distribution alone: the difference of the two accuracies is how much. `--after` asks the newest weights of an arm's runs, whose
work directories must still be there.
"""

import argparse
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from claims.experiment import find, names
from claims.tasks import TASKS
from claims.worker import ask, resolved
from common import report

HOW = {
  'sampled': {'eval.temperature': 1.0, 'eval.samples': 2},
  'greedy': {'eval.temperature': 0.0, 'eval.samples': 1},
}


def main() -> None:
  """Evaluate the models of each task that has them, or those of the runs of an arm."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--after', choices=names(), metavar='NAME', help='an experiment whose runs are evaluated')
  parser.add_argument('--arm', help='the arm of these runs')
  parser.add_argument('--folder', type=Path, default=Path('runs/claims'), help='work directories of the runs')
  parser.add_argument('--save', action='store_true', help='write the result below benchmarks/results')
  args = parser.parse_args()
  if (args.after is None) != (args.arm is None):
    parser.error('expected both --after and --arm, or neither')
  if args.after is None:
    return report('warm_starts', before(), {'problems': int(TASKS[0].final['eval.problems'])}, args.save)
  arms = find(args.after).arms
  if args.arm not in arms:
    parser.error(f'--arm = {args.arm}: expected one of {", ".join(arms)}')
  rows = after(args.after, args.arm, args.folder.absolute())
  name = re.sub(r'\W+', '_', f'greedy_after_{args.after}_{args.arm}')
  report(name, rows, {'experiment': args.after, 'arm': args.arm}, args.save)


def before() -> list[dict[str, Any]]:
  """Return the accuracies of each warm start, a row each."""
  rows = []
  for task in TASKS:
    with tempfile.TemporaryDirectory() as name:
      task.write(Path(name))
      for path in filter(Path.exists, map(Path, task.warm)):
        settings = {**task.settings_in(Path(name)), **task.final, 'model.path': str(path), 'steps': 1}
        rows.append({'task': task.name, 'model': path.name, **asked(settings, None)})
  return rows


def after(name: str, arm: str, folder: Path) -> list[dict[str, Any]]:
  """Return the accuracies of each seed's newest weights, a row each. Raises SystemExit if the folder has no runs of the arm."""
  experiment = find(name)
  runs = folder / f'{name}-{experiment.plan()}'
  seeds = [seed for of, seed in experiment.runs if of == arm and any((runs / f'{arm}-{seed}').glob('checkpoints/step_*'))]
  if not seeds:
    raise SystemExit(f'{runs}: no runs of {arm}; expected a --folder in which the command claims has trained them')
  rows = []
  for seed in seeds:
    settings = experiment.final(arm, seed, runs / 'task')
    rows.append({'seed': seed, 'model': Path(settings['model.path']).name, **asked(settings, runs / f'{arm}-{seed}')})
  return rows


def asked(settings: Mapping[str, Any], workdir: Path | None) -> dict[str, float]:
  """Return the accuracies on the held-out problems, by how answers are drawn. None: of the weights before training."""
  return {how: round(float(np.mean(ask(resolved({**settings, **changes}), workdir))), 4) for how, changes in HOW.items()}


if __name__ == '__main__':
  main()
