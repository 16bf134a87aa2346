"""Rollouts beside the learner: time a step and reward against time, for staleness bounds and for losses.

    python benchmarks/async_training.py --folder FOLDER --save     # results/async_training.json and results/async_training.png
    python benchmarks/async_training.py --draw                     # the picture again, from the saved result

The small warm-started model of benchmarks/progressions.py, densely sampled, the learner on one device and the engine on another:
on a CPU, two host devices which share its cores. Every loss takes its ratio to the log-probs that sampled; decoupled_ppo has a
third policy between. Staleness bounds take turns, seed by seed. FOLDER keeps the runs: the same command goes on where it was
interrupted.
"""

import argparse
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import ROOT, report
from matplotlib.figure import Figure
from stability import LAST, command, config, prepare

from sprl.io.metrics import read_metrics, series

TWO_POLICIES = '--config.correction.mode=bypass', '--config.correction.level=None'
LOSSES = {  # by name in the saved result; decoupled_ppo is variant ppo with three policies
  'ppo': TWO_POLICIES,
  'decoupled_ppo': ('--config.correction.level=token', '--config.correction.cap=5.0'),
  'tis': TWO_POLICIES,
  'cispo': TWO_POLICIES,
  'topr': TWO_POLICIES,
}
COLOURS = ('#5c6470', '#2a6f97', '#e07a1f')


def main():
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--folder', type=Path, default=Path('runs/async_training'))
  parser.add_argument('--losses', default=','.join(LOSSES))
  parser.add_argument('--alphas', default='0,1,2')
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--steps', type=int, default=30)
  parser.add_argument('--warm-steps', type=int, default=500)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/async_training.json')
  parser.add_argument('--draw', action='store_true', help='only draw what was saved')
  args = parser.parse_args()
  if args.draw:
    return draw()
  if jax.default_backend() == 'cpu':  # for the runs, which are processes of their own
    os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=2'
  prepare('progressions', args.folder.absolute(), args.warm_steps)
  runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
  for loss, seed, alpha in itertools.product(*(given.split(',') for given in (args.losses, args.seeds, args.alphas))):
    runs.setdefault(loss, {}).setdefault(alpha, []).append(run(args, loss, alpha, seed))
  rows = [row(loss, alpha, results) for loss, alphas in runs.items() for alpha, results in alphas.items()]
  report('async_training', rows, {'steps': args.steps, 'devices': jax.default_backend(), 'runs': runs}, args.save)
  if args.save:
    draw()


def run(args: argparse.Namespace, loss: str, alpha: str, seed: str) -> dict[str, Any]:
  """One run: its rewards, the seconds at which each step ended (compilation left out: from the end of step 2), its staleness."""
  workdir = args.folder.absolute() / f'{loss}-{alpha}-{seed}'
  command(
    'main', *config('progressions', args.folder.absolute()), f'--workdir={workdir}', f'--config.seed={seed}',
    f'--config.steps={args.steps}', '--config.arm=dense', '--config.export=False',
    f'--config.loss.variant={loss.removeprefix("decoupled_")}', *LOSSES[loss],
    f'--config.rollout.async_ratio={float(alpha)}', '--config.devices.learner=0', '--config.devices.rollout=1',
    '--config.eval.problems=2',
  )  # fmt: skip
  records = [r for r in read_metrics(workdir) if r['kind'] == 'train']
  seconds = [sum(r['time'][name] for name in ('rollout', 'learn', 'sync')) for r in records]
  return {
    'reward': series(records, 'reward/mean')[1].tolist(),
    'seconds': np.cumsum([0.0, *seconds[2:]]).tolist(),
    'age': float(np.mean([r['async/off_policy_ratio'] for r in records])),
    **{name: float(np.mean([r['time'][name] for r in records[2:]])) for name in ('trainer_idle', 'rollout_idle')},
  }


def row(loss: str, alpha: str, results: list[dict[str, Any]]) -> dict[str, Any]:
  """A line of the table: means over seeds."""
  last = [float(np.mean(r['reward'][-LAST:])) for r in results]
  return {
    'loss': loss,
    'alpha': alpha,
    'seconds a step': float(np.mean([np.diff(r['seconds']).mean() for r in results])),
    'learner idle': float(np.mean([r['trainer_idle'] for r in results])),
    'engine idle': float(np.mean([r['rollout_idle'] for r in results])),
    'mean age': float(np.mean([r['age'] for r in results])),
    'last reward': float(np.mean(last)),
    'std over seeds': float(np.std(last, ddof=1)) if len(last) > 1 else None,
  }


def draw() -> None:
  """results/async_training.png: reward against seconds, a loss a panel and a staleness bound a colour, each seed."""
  results = ROOT / 'benchmarks' / 'results'
  runs = json.loads((results / 'async_training.json').read_text())['result']['runs']
  figure = Figure(figsize=(3.2 * len(runs), 3.4), layout='constrained')
  panels = np.atleast_1d(figure.subplots(1, len(runs), sharey=True))
  for axes, (loss, alphas) in zip(panels, runs.items()):
    for colour, (alpha, seeds) in zip(COLOURS, alphas.items()):
      for i, one in enumerate(seeds):
        reward = np.convolve(one['reward'][1:], np.ones(3) / 3, 'valid')
        label = f'alpha = {alpha}' if i == 0 else None
        axes.plot(one['seconds'][2:], reward[: len(one['seconds'][2:])], color=colour, linewidth=1.2, label=label)
    axes.set_title(loss, loc='left', fontsize=10)
    axes.set_xlabel('seconds')
    axes.spines[['top', 'right']].set_visible(False)
  panels[0].set_ylabel('sampled reward, mean of 3 steps')
  panels[0].legend(frameon=False, fontsize=8)
  figure.savefig(results / 'async_training.png', dpi=110)


if __name__ == '__main__':
  main()
