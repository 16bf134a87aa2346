"""How close is planned memory to the memory that XLA's compiler needs for the same programs on H200s that are not here?

    make aot                                                                               # makes .venv-aot with the compiler
    JAX_PLATFORMS=cpu .venv-aot/bin/python benchmarks/plan_check.py --rows runs/plan_check --save plan_check
    python benchmarks/plan_check.py --recheck benchmarks/results/plan_check.json --save plan_check

The first two lines compile 43 programs, which takes 2 cores two hours. Each row is written to the folder as soon as it is there,
so the command can be stopped and started again. The third line compiles nothing: it plans again and compares with saved figures,
if the programs are still made of the same files.

`largest`: decode steps with the most sequences that one H200 holds beside the learner's state; dense, FP8 and sparse FP8; with
AdamW, or with Adafactor if AdamW's update does not fit. `updates`: the updates of four models on three meshes, of 8 and of 64
H200s. `tokens`: two of them with four times as many tokens on each device. `spread`: decode steps of the 7B on the same devices.
`mixture`: the update and decode steps of Qwen3-30B-A3B, whose experts are split over a node. `--only` compiles the rows whose
names contain a text; the result names the missing rows.
"""

import argparse
import dataclasses
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from common import ROOT, report

from sprl.config import Cache, ModelSettings, Optimizer, Packing, Rollout, Run, Sampling
from sprl.models.config import ModelConfig
from sprl.planning import compile_check
from sprl.planning.devices import device
from sprl.planning.estimate import Plan, RolloutPlan, plan
from sprl.planning.mesh_axes import MeshAxes

GIB = 2**30
DENSE = 'Qwen2.5-0.5B', 'Qwen2.5-1.5B', 'Qwen2.5-7B', 'Qwen3-8B'
MESHES = MeshAxes(fsdp=8), MeshAxes(fsdp=4, tensor=2), MeshAxes(data=8, fsdp=8)
SPREAD = 'Qwen2.5-7B'
MIXTURE, EXPERT_MESHES = 'Qwen3-30B-A3B', (MeshAxes(expert=8), MeshAxes(fsdp=2, expert=4))
ROWS = Packing(row_tokens=4096, rows=1)
MADE_OF = 'cache', 'kernels', 'learner', 'models', 'objective', 'quant', 'sampler', 'sharding', 'planning/programs.py'  # in sprl/
KINDS = 'dense', 'dense fp8', 'sparse fp8'
Optimiser = Literal['adamw', 'adafactor']


class Job(NamedTuple):
  """A program to plan and to compile."""

  name: str
  model: str
  config: ModelConfig
  run: Run
  plan: Plan
  kind: RolloutPlan | None = None  # whose decode steps; None: the update
  more: Mapping[str, Any] = MappingProxyType({})  # columns of its row

  def columns(self) -> dict[str, Any]:
    """The columns that identify the row, and `more`."""
    axes = self.plan.rollout if self.kind else self.plan.learner
    sequences = {'sequences': self.kind.rows} if self.kind else {}
    program = f'decode, {self.kind.name}' if self.kind else 'update'
    return {'model': self.model, 'mesh': str(axes), 'program': program, **sequences, **self.more}

  def planned(self, sequences: int | None = None) -> int:
    """Planned bytes of one device; `sequences` replaces the number that the job decodes."""
    if self.kind is None:
      return compile_check.planned_update(self.plan)
    kind = dataclasses.replace(self.kind, rows=self.kind.rows if sequences is None else sequences)
    return compile_check.planned_decode(self.config, self.run, self.plan, kind)

  def compile(self) -> dict[str, Any]:
    """Compile the program and return the row of the table."""
    if self.kind is None:
      found = compile_check.check_update(self.config, self.run, self.plan).compiled
    else:
      found = compile_check.check_decode(self.config, self.run, self.plan, self.kind).compiled
    return {
      **self.columns(),
      'planned GiB': round(self.planned() / GIB, 2),
      'compiled GiB': round(found.total / GIB, 2),
      'temporary GiB': round(found.temporary / GIB, 2),
      'planned / compiled': round(self.planned() / found.total, 3),
      'collectives': len(found.collectives),
      'MiB of them': round(sum(each.bytes for each in found.collectives) / 2**20),
    }

  def recheck(self, row: dict[str, Any]) -> dict[str, Any]:
    """Return a saved row with the planned figures of today."""
    planned = self.planned(row.get('sequences')) / GIB
    return row | {'planned GiB': round(planned, 2), 'planned / compiled': round(planned / row['compiled GiB'], 3)}


def planned(model: str, axes: MeshAxes, optimiser: Optimiser = 'adamw', packing: Packing = ROWS) -> tuple[ModelConfig, Run, Plan]:
  """Plan for H200s: prompts of up to 512 tokens, completions of up to 1,536, float32 weights, `packing` on each device."""
  run = Run(
    model=ModelSettings(path=model, remat='layer'),
    sampling=Sampling(max_prompt=512, max_tokens=1536),
    rollout=Rollout(prompts=32, group=8),
    packing=packing,
    cache=Cache(budget=512),
    optimizer=Optimizer(name=optimiser),
  )
  config = ModelConfig.read(ROOT / 'benchmarks' / 'models' / model)
  return config, run, plan(config, run, axes, axes.gathered(), device('h200'))


def largest(models: tuple[str, ...]) -> Iterator[Job]:
  """Decode steps with all sequences that fit beside the state of AdamW, or of Adafactor if AdamW's update does not fit.

  If neither update fits, the row says so.
  """
  for model in filter(DENSE.__contains__, models):
    optimisers: tuple[Optimiser, ...] = ('adamw', 'adafactor')
    for optimiser in optimisers:
      config, run, its = planned(model, MeshAxes(), optimiser)
      if its.fits['update']:
        break
    state, update = (round(size / GIB, 2) for size in (its.update.state, its.update.total))
    more = {'optimiser': optimiser, 'beside': state, 'update': update, 'update fits': its.fits['update']}
    for kind in its.kinds:
      if kind.name in KINDS and kind.most_rows > 0:
        full = dataclasses.replace(kind, rows=kind.most_rows)
        yield Job(f'largest {model} {kind.name} {optimiser}', model, config, run, its, full, more)


def updates(models: tuple[str, ...]) -> Iterator[Job]:
  """Updates on several devices."""
  for axes in MESHES:
    for model in filter(DENSE.__contains__, models):
      yield Job(f'update {model} {axes}', model, *planned(model, axes))


def tokens(models: tuple[str, ...]) -> Iterator[Job]:
  """Updates with two rows of 8,192 tokens on each of 8 devices."""
  for model in filter(('Qwen2.5-0.5B', 'Qwen2.5-7B').__contains__, models):
    made = planned(model, MeshAxes(fsdp=8), packing=Packing(row_tokens=8192, rows=2))
    yield Job(f'tokens {model}', model, *made, more={'tokens': 16384})


def decoding(model: str, config: ModelConfig, run: Run, its: Plan) -> Iterator[Job]:
  """Decode steps of the sequences that the run asks for."""
  for kind in its.kinds:
    if kind.name in KINDS and kind.rows:
      yield Job(f'decode {model} {kind.name} {its.rollout}', model, config, run, its, kind)


def spread(models: tuple[str, ...]) -> Iterator[Job]:
  """Decode steps on all devices of each mesh."""
  for axes in MESHES if SPREAD in models else ():
    yield from decoding(SPREAD, *planned(SPREAD, axes))


def mixture(models: tuple[str, ...]) -> Iterator[Job]:
  """The update and decode steps of a mixture whose experts are split over a node."""
  for axes in EXPERT_MESHES if MIXTURE in models else ():
    made = planned(MIXTURE, axes)
    yield Job(f'update {MIXTURE} {axes}', MIXTURE, *made)
    yield from decoding(MIXTURE, *made)


PARTS = {'largest': largest, 'updates': updates, 'tokens': tokens, 'spread': spread, 'mixture': mixture}


def row(job: Job, folder: Path | None, only: str) -> dict[str, Any] | None:
  """Return the job's row: from the folder, or compiled if its name contains `only`; else None."""
  path = folder and folder / f'{job.name.replace(" ", "_")}.json'
  if path and path.exists():
    return json.loads(path.read_text())
  if only not in job.name:
    return None
  start = time.monotonic()
  made = job.compile()
  print(f'{time.monotonic() - start:.0f} s: {json.dumps(made)}', flush=True)
  if path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix('.part').write_text(json.dumps(made))
    path.with_suffix('.part').rename(path)
  return made


def saved_row(job: Job, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
  """Return the saved row of a job, with the planned figures of today."""
  keys = ('model', 'mesh', 'program', 'optimiser', 'tokens')
  wanted = [job.columns().get(key) for key in keys]
  found = next((each for each in rows if [each.get(key) for key in keys] == wanted), None)
  return found and job.recheck(found)


def stale(compiled: str) -> str | None:
  """Return why programs compiled at a commit may differ from today's; None if they are of the same files."""
  made_of = [str(ROOT / 'sprl' / name) for name in MADE_OF]
  command = ['git', '-C', str(ROOT), 'diff', '--name-only', compiled, '--', *made_of]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    return f'commit {compiled} is not in this checkout'
  differ = done.stdout.split()
  return f'{len(differ)} files of the programs, such as {differ[0]}, have changed since commit {compiled}' if differ else None


def main() -> None:
  """Report on the jobs that the arguments select."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--models', default=','.join((*DENSE, MIXTURE)), help='default: %(default)s')
  parser.add_argument('--parts', default=','.join(PARTS), help=', '.join(PARTS))
  parser.add_argument('--only', default='', metavar='TEXT', help='compile the rows whose names contain it')
  parser.add_argument('--rows', type=Path, metavar='FOLDER', help='write rows there, and do not compile the rows in it')
  parser.add_argument('--recheck', type=Path, metavar='FILE', help='compile nothing; take compiled figures from a saved result')
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()
  if unknown := set(args.models.split(',')) - {*DENSE, MIXTURE}:
    parser.error(f'--models: found {", ".join(sorted(unknown))}; expected some of {", ".join((*DENSE, MIXTURE))}')
  if args.recheck and not args.recheck.is_file():
    parser.error(f'--recheck = {args.recheck}: no such file')
  if args.recheck:
    saved = json.loads(args.recheck.read_text())
    compiled = saved['result'].get('compiled_at_commit', saved['commit'])
    if reason := stale(compiled):
      parser.error(f'--recheck = {args.recheck}: expected figures of the same programs, but {reason}; compile again')
  jobs = [job for part in args.parts.split(',') for job in PARTS[part](tuple(args.models.split(',')))]
  if args.recheck:
    found = {job.name: saved_row(job, saved['rows']) for job in jobs}
  else:
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
  if args.recheck:
    result['compiled_at_commit'] = compiled
  report(args.save or 'plan_check', rows, result, bool(args.save))


if __name__ == '__main__':
  main()
