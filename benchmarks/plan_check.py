"""Is the plan right? Its memory beside what XLA's compiler needs for the same programs on H200s that are not here.

    make aot                                                                               # makes .venv-aot, the compiler's
    JAX_PLATFORMS=cpu .venv-aot/bin/python benchmarks/plan_check.py --rows runs/plan_check --save plan_check

Four parts: `largest`, decode steps with the most sequences that one H200 holds beside the learner's state, dense, FP8 and sparse
FP8, with AdamW, or Adafactor where AdamW's update does not fit; `updates`, those of four models on three meshes, of 8 and of 64
H200s; `spread`, decode steps of the 7B on the same devices;
and `mixture`, the update and decode steps of Qwen3-30B-A3B, its experts split over a node. Each program is compiled whole, which
takes 2 cores two hours. So each row is written to the folder as soon as it is there, and not compiled again: the command may be
ended at any time, and goes on. `--only` compiles the rows whose names contain a text; rows that are missing in the end are named
in the result.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common import ROOT, report

from sprl import compiled
from sprl.models.config import ModelConfig
from sprl.planning.devices import device
from sprl.planning.layout import Axes
from sprl.planning.plan import Kind, Plan, plan
from sprl.settings import Cache, Model, Optimizer, Packing, Rollout, Run, Sampling

GIB = 2**30
DENSE = 'Qwen2.5-0.5B', 'Qwen2.5-1.5B', 'Qwen2.5-7B', 'Qwen3-8B'
MESHES = Axes(fsdp=8), Axes(fsdp=4, tensor=2), Axes(data=8, fsdp=8)
SPREAD = 'Qwen2.5-7B'
MIXTURE, EXPERT_MESHES = 'Qwen3-30B-A3B', (Axes(expert=8), Axes(fsdp=2, expert=4))
LARGEST = 'dense', 'dense fp8', 'sparse fp8'
OPTIMISERS: tuple[Literal['adamw', 'adafactor'], ...] = ('adamw', 'adafactor')  # of largest batches, by preference


def run_of(model: str, optimiser: Literal['adamw', 'adafactor'] = 'adamw') -> Run:
  """Prompts of up to 512 tokens, completions of up to 1,536, a row of 4,096 on each device; float32."""
  return Run(
    model=Model(path=model),
    sampling=Sampling(max_prompt=512, max_tokens=1536),
    rollout=Rollout(prompts=32, group=8),
    packing=Packing(row_tokens=4096, rows=1),
    cache=Cache(budget=512),
    optimizer=Optimizer(name=optimiser),
  )


def planned(model: str, axes: Axes, optimiser: Literal['adamw', 'adafactor'] = 'adamw') -> tuple[ModelConfig, Run, Plan]:
  """The model's plan for H200s."""
  config, run = ModelConfig.read(ROOT / 'benchmarks' / 'models' / model), run_of(model, optimiser)
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


class Job(NamedTuple):
  """A row to be: its name, and what compiles it."""

  name: str
  compiled: Callable[[], dict[str, Any]]


def largest(models: tuple[str, ...]) -> Iterator[Job]:
  """Decode steps with all the sequences that fit on one H200 beside the state of an optimiser whose update fits there too: AdamW,
  or else Adafactor, or where not even that does, the row says so."""
  for model in filter(DENSE.__contains__, models):
    config, run, its, fits = fitting(model)
    for kind in its.kinds:
      if kind.name in LARGEST and kind.most_rows > 0:
        full = dataclasses.replace(kind, rows=kind.most_rows)
        optimiser, update = run.optimizer.name, round(its.update.total / GIB, 2)
        more = {'optimiser': optimiser, 'beside': round(its.update.state / GIB, 2), 'update': update, 'update fits': fits}
        yield Job(f'largest {model} {kind.name} {optimiser}', partial(decoded, model, config, run, its, full, **more))


def fitting(model: str) -> tuple[ModelConfig, Run, Plan, bool]:
  """The model's plan for one H200 with the first of OPTIMISERS whose update fits there, or the last; and whether it fits."""
  for optimiser in OPTIMISERS:
    config, run, its = planned(model, Axes(), optimiser)
    if fits := its.update.total <= its.usable:
      break
  return config, run, its, fits


def updates(models: tuple[str, ...]) -> Iterator[Job]:
  """Updates on several devices."""
  for axes in MESHES:
    for model in filter(DENSE.__contains__, models):
      yield Job(f'update {model} {axes}', partial(updated, model, axes))


def spread(models: tuple[str, ...]) -> Iterator[Job]:
  """Decode steps of the sequences that the run asks for, on all devices of each mesh."""
  for axes in MESHES if SPREAD in models else ():
    config, run, its = planned(SPREAD, axes)
    for kind in its.kinds:
      if kind.name in LARGEST and kind.rows:
        yield Job(f'decode {SPREAD} {kind.name} {its.rollout}', partial(decoded, SPREAD, config, run, its, kind))


def mixture(models: tuple[str, ...]) -> Iterator[Job]:
  """The update and decode steps of a mixture whose experts are split over a node."""
  for axes in EXPERT_MESHES if MIXTURE in models else ():
    config, run, its = planned(MIXTURE, axes)
    yield Job(f'update {MIXTURE} {axes}', partial(updated, MIXTURE, axes))
    for kind in its.kinds:
      if kind.name in LARGEST and kind.rows:
        yield Job(f'decode {MIXTURE} {kind.name} {its.rollout}', partial(decoded, MIXTURE, config, run, its, kind))


PARTS = {'largest': largest, 'updates': updates, 'spread': spread, 'mixture': mixture}


def updated(model: str, axes: Axes) -> dict[str, Any]:
  """A row of an update."""
  config, run, its = planned(model, axes)
  return line(model, axes, compiled.check_update(config, run, its))


def decoded(model: str, config: ModelConfig, run: Run, its: Plan, kind: Kind, **more: Any) -> dict[str, Any]:
  """A row of decode steps."""
  return line(model, its.rollout, compiled.check_decode(config, run, its, kind), sequences=kind.rows, **more)


def row(job: Job, folder: Path | None, only: str) -> dict[str, Any] | None:
  """The job's row: as it lies in the folder, or compiled where it is asked for."""
  path = folder and folder / f'{job.name.replace(" ", "_")}.json'
  if path and path.exists():
    return json.loads(path.read_text())
  if only not in job.name:
    return None
  start = time.monotonic()
  made = job.compiled()
  print(f'{time.monotonic() - start:.0f} s: {json.dumps(made)}', flush=True)
  if path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix('.part').write_text(json.dumps(made))
    path.with_suffix('.part').rename(path)
  return made


def main() -> None:
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--models', default=','.join((*DENSE, MIXTURE)), help='default: %(default)s')
  parser.add_argument('--parts', default=','.join(PARTS), help=', '.join(PARTS))
  parser.add_argument('--only', default='', metavar='TEXT', help='compile the rows whose names contain it')
  parser.add_argument('--rows', type=Path, metavar='FOLDER', help='keep rows there, and take those that are there already')
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()
  jobs = [job for part in args.parts.split(',') for job in PARTS[part](tuple(args.models.split(',')))]
  found = {job.name: row(job, args.rows, args.only) for job in jobs}
  rows = [each for each in found.values() if each is not None]
  if not rows:
    parser.error(f'no row has {args.only!r} in its name; there are: ' + ', '.join(found))
  ratios = [each['planned / compiled'] for each in rows]
  result = {
    'programs': len(rows),
    'lowest': min(ratios),
    'highest': max(ratios),
    'beyond_10_percent': sum(abs(ratio - 1) > 0.1 for ratio in ratios),
    'not_compiled': [name for name, each in found.items() if each is None],
  }
  report(args.save or 'plan_check', rows, result, bool(args.save))


if __name__ == '__main__':
  main()
