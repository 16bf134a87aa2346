"""Is training faster if rollouts run beside the learner, and does the model learn as well? By staleness bound and loss.

    python benchmarks/async_training.py --folder FOLDER --save     # results/async_training.json and results/async_training.png
    python benchmarks/async_training.py --draw                     # redraw the figure from the saved result

Trains the small warm-started model of benchmarks/progressions.py with dense rollouts. Learner and engine use separate devices; on
a CPU, these are two host devices that share its cores. Every loss takes its ratio to the sampler's log-probs, except
decoupled_ppo, which uses the old policy as a third policy. The sampled reward of a step belongs to weights up to alpha updates
old, so the newest weights are also evaluated on held-out problems, sampled densely. For each loss and seed, all staleness bounds
run in turn. FOLDER keeps the runs: the same command resumes an interrupted benchmark.
"""

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import report
from pictures import BLACK, BLUE, GREY, ORANGE, draw_band, draw_seeds, load, machine_label, new_figure, save, style
from stability import LAST, command, config, prepare

from sprl.io.metrics import read_metrics, series
from sprl.io.plots import running_mean

TWO_POLICIES = '--config.correction.mode=bypass', '--config.correction.level=None'
LOSSES = {  # name in the saved result -> flags; decoupled_ppo is variant ppo with three policies
  'ppo': TWO_POLICIES,
  'decoupled_ppo': ('--config.correction.level=token', '--config.correction.cap=5.0'),
  'tis': TWO_POLICIES,
  'cispo': TWO_POLICIES,
  'topr': TWO_POLICIES,
}
COLOURS = (BLACK, BLUE, ORANGE)
MEANINGS = {'0': 'alpha = 0: synchronous', '1': 'alpha = 1: at most 1 update old', '2': 'alpha = 2: at most 2 updates old'}


def main():
  """Print a report; save and draw it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--folder', type=Path, default=Path('runs/async_training'))
  parser.add_argument('--losses', default=','.join(LOSSES))
  parser.add_argument('--alphas', default='0,1,2')
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--steps', type=int, default=30)
  parser.add_argument('--warm-steps', type=int, default=500)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/async_training.json')
  parser.add_argument('--draw', action='store_true', help='draw the saved result and exit')
  args = parser.parse_args()
  if args.draw:
    return draw()
  if jax.default_backend() == 'cpu':  # for the runs, which are separate processes
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
  """Train once. Return rewards, the seconds at which steps ended, the mean staleness, and the idle shares of both sides.

  Seconds count from the end of step 2, so that compilation is excluded.
  """
  workdir = args.folder.absolute() / f'{loss}-{alpha}-{seed}'
  command(
    'main', *config('progressions', args.folder.absolute()), f'--workdir={workdir}', f'--config.seed={seed}',
    f'--config.steps={args.steps}', '--config.arm=dense', '--config.export=False',
    f'--config.loss.variant={loss.removeprefix("decoupled_")}', *LOSSES[loss],
    f'--config.rollout.async_ratio={float(alpha)}', '--config.devices.learner=0', '--config.devices.rollout=1',
    '--config.eval.problems=200', '--config.eval.temperature=1.0', '--config.eval.samples=4',
  )  # fmt: skip
  records = [r for r in read_metrics(workdir) if r['kind'] == 'train']
  seconds = [sum(r['time'][name] for name in ('rollout', 'learn', 'sync')) for r in records]
  return {
    'reward': series(records, 'reward/mean')[1].tolist(),
    'held out': float(series(read_metrics(workdir), 'eval/avg@k')[1][-1]),  # the newest weights
    'seconds': np.cumsum([0.0, *seconds[2:]]).tolist(),
    'age': float(np.mean([r['async/age_mean'] for r in records])),
    **{name: float(np.mean([r['time'][name] for r in records[2:]])) for name in ('learner_idle', 'rollout_idle')},
  }


def row(loss: str, alpha: str, results: list[dict[str, Any]]) -> dict[str, Any]:
  """Return a row of the table: means over seeds."""
  last = [float(np.mean(r['reward'][-LAST:])) for r in results]
  return {
    'loss': loss,
    'alpha': alpha,
    'seconds a step': float(np.mean([np.diff(r['seconds']).mean() for r in results])),
    'learner idle': float(np.mean([r['learner_idle'] for r in results])),
    'engine idle': float(np.mean([r['rollout_idle'] for r in results])),
    'mean age': float(np.mean([r['age'] for r in results])),
    'held out': float(np.mean([r['held out'] for r in results])),
    'last reward': float(np.mean(last)),
    'std over seeds': float(np.std(last, ddof=1)) if len(last) > 1 else None,
  }


def draw() -> None:
  """Draw results/async_training.png: reward against seconds for each loss and staleness bound, and the seconds of a step."""
  saved = load('async_training')
  runs = saved['result']['runs']
  seeds = max(len(results) for alphas in runs.values() for results in alphas.values())
  setting = (
    f'Llama of 0.85 M parameters on arithmetic progressions, dense rollouts; {saved["result"]["steps"]} steps, '
    f'{seeds} seeds; {machine_label(saved)}'
  )
  figure = new_figure('Training with rollouts that run ahead of the learner: five losses', setting, 5.8)
  *panels, last = figure.subplots(2, 3).flat
  longest = max(np.mean([run['seconds'][-1] for run in results]) for alphas in runs.values() for results in alphas.values())
  for axes, (loss, alphas) in zip(panels, runs.items()):
    style(axes, loss, 'seconds since the end of step 2', 'sampled reward')
    axes.text(0.02, 0.05, f'last {LAST}:', transform=axes.transAxes, fontsize=8.5, color=GREY)
    for i, (colour, (alpha, results)) in enumerate(zip(COLOURS, alphas.items())):
      points = len(results[0]['seconds'])  # from the end of step 2, whose reward is the second
      reward = np.array([running_mean(np.array(run['reward'][-points:]), 3) for run in results])
      label = MEANINGS.get(alpha, f'alpha = {alpha}')
      draw_band(axes, np.mean([run['seconds'] for run in results], axis=0), reward, colour, label)
      final = np.mean([run['reward'][-LAST:] for run in results])
      axes.text(0.29 + 0.22 * i, 0.05, f'{final:.3f}', transform=axes.transAxes, fontsize=8.5, color=colour)
    axes.set(xlim=(0, 1.02 * longest), ylim=(0, 0.75))
  for axes in panels[len(runs) :]:
    axes.axis('off')
  style(last, 'Time of a step', ylabel='seconds per step')
  for i, alphas in enumerate(runs.values()):
    for j, (colour, results) in enumerate(zip(COLOURS, alphas.values())):
      draw_seeds(last, i + 0.27 * (j - 1), [float(np.diff(run['seconds']).mean()) for run in results], colour, bar=7)
  last.set_xticks(range(len(runs)), runs, rotation=30, ha='right', rotation_mode='anchor')
  last.set(xlim=(-0.6, len(runs) - 0.4), ylim=(0, None))
  about = f'Reward: means over 3 steps, and over the last {LAST}. Lines, bars: mean of the seeds. Bands: their range. Dots: seeds'
  legend = {'loc': 'outside lower center', 'ncols': 3, 'frameon': False, 'fontsize': 8.5, 'title_fontsize': 8.5}
  figure.legend(*panels[0].get_legend_handles_labels(), title=about, **legend)
  save(figure, 'async_training')


if __name__ == '__main__':
  main()
