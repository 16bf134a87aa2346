"""Is the plan right? Its memory beside what XLA's compiler needs for the same programs on H200s that are not here.

    JAX_PLATFORMS=cpu python benchmarks/plan_check.py --save plan_check    # half an hour on 2 cores; see sprl/parallel/aot.py

Three tables: decode steps with the most sequences that one H200 holds beside the learner's state, dense, FP8 and sparse FP8;
the update of four models on three meshes, of 8 and of 64 H200s; and decode steps of the 7B on the same devices. Each program is
compiled in full.
"""

import argparse
import dataclasses
import json
from typing import Any

from common import ROOT, report

from sprl import compiled
from sprl.models.config import ModelConfig
from sprl.planning.devices import device
from sprl.planning.layout import Axes
from sprl.planning.plan import Plan, plan
from sprl.settings import Cache, Model, Packing, Rollout, Run, Sampling

GIB = 2**30
MODELS = 'Qwen2.5-0.5B', 'Qwen2.5-1.5B', 'Qwen2.5-7B', 'Qwen3-8B'
MESHES = Axes(fsdp=8), Axes(fsdp=4, tensor=2), Axes(data=8, fsdp=8)
SPREAD = 'Qwen2.5-7B'
LARGEST = 'dense', 'dense fp8', 'sparse fp8'


def run_of(model: str) -> Run:
  """Prompts of up to 512 tokens, completions of up to 1,536, a row of 4,096 on each device; AdamW in float32."""
  return Run(
    model=Model(path=model),
    sampling=Sampling(max_prompt=512, max_tokens=1536),
    rollout=Rollout(prompts=32, group=8),
    packing=Packing(row_tokens=4096, rows=1),
    cache=Cache(budget=512),
  )


def planned(model: str, axes: Axes) -> tuple[ModelConfig, Run, Plan]:
  """The model's plan for H200s."""
  config, run = ModelConfig.read(ROOT / 'benchmarks' / 'models' / model), run_of(model)
  return config, run, plan(config, run, axes, axes.gathered(), device('h200'))


def line(model: str, axes: Axes, check: compiled.Check, **more: Any) -> dict[str, Any]:
  """A row of the table."""
  found = check.compiled
  return {
    'model': model,
    'mesh': str(axes),
    'program': check.name,
    **more,
    'planned GiB': round(check.planned / GIB, 2),
    'compiled GiB': round(found.total / GIB, 2),
    'temporary GiB': round(found.temporary / GIB, 2),
    'planned / compiled': round(check.planned / found.total, 3),
    'collectives': len(found.collectives),
    'MiB of them': round(sum(each.bytes for each in found.collectives) / 2**20),
  }


def updates(models: tuple[str, ...]) -> list[dict[str, Any]]:
  """Updates on several devices, and on one."""
  rows = []
  for model in models:
    for axes in MESHES:
      config, run, its = planned(model, axes)
      rows.append(line(model, axes, compiled.check_update(config, run, its)))
      print(json.dumps(rows[-1]), flush=True)
  return rows


def largest(models: tuple[str, ...]) -> list[dict[str, Any]]:
  """Decode steps with all the sequences that fit on one H200."""
  rows = []
  for model in models:
    config, run, its = planned(model, Axes())
    for kind in its.kinds:
      if kind.name not in LARGEST or kind.most_rows < 1:
        continue
      check = compiled.check_decode(config, run, its, dataclasses.replace(kind, rows=kind.most_rows))
      rows.append(line(model, Axes(), check, sequences=kind.most_rows, beside=round(its.update.state / GIB, 2)))
      print(json.dumps(rows[-1]), flush=True)
  return rows


def spread(model: str) -> list[dict[str, Any]]:
  """Decode steps of the sequences that the run asks for, on all devices of each mesh."""
  rows = []
  for axes in MESHES:
    config, run, its = planned(model, axes)
    for kind in its.kinds:
      if kind.name in LARGEST and kind.rows:
        rows.append(line(model, its.rollout, compiled.check_decode(config, run, its, kind), sequences=kind.rows))
        print(json.dumps(rows[-1]), flush=True)
  return rows


def main() -> None:
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--models', default=','.join(MODELS), help=', '.join(MODELS))
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()
  models = tuple(args.models.split(','))
  rows = largest(models) + updates(models) + [row for model in models if model == SPREAD for row in spread(model)]
  ratios = [row['planned / compiled'] for row in rows]
  result = {
    'programs': len(rows),
    'lowest': min(ratios),
    'highest': max(ratios),
    'beyond_10_percent': sum(abs(ratio - 1) > 0.1 for ratio in ratios),
  }
  report(args.save or 'plan_check', rows, result, bool(args.save))


if __name__ == '__main__':
  main()
