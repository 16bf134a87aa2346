"""How much processor time does it take to compile the large programs of a run?

    python benchmarks/compilation.py                          # this checkout
    python benchmarks/compilation.py --base FOLDER --save     # beside another checkout, the two in turn

The programs are the update, a chunk of decode steps with a dense and with a sparse cache, and the prefill of prompts, for the
sizes of a model and without its weights. Each checkout compiles all of them in a fresh process without a compilation cache.
Figures are processor seconds of all threads; the least of the repeats counts. `operations` are lines of the program that JAX
gives to XLA, `instructions` those of the program that XLA makes of it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import ROOT, positive, report

from sprl.cache.layout import cache_layout
from sprl.config import Cache, ModelSettings, Packing, Remat, Rollout, Run, Sampling
from sprl.io.random_model import NAMED
from sprl.learner.batch import shape
from sprl.models.config import ModelConfig
from sprl.planning import programs
from sprl.planning.mesh_axes import MeshAxes
from sprl.sampler import decode

CACHES = {'dense decode': Cache(), 'sparse decode': Cache(method='rkv', budget=64, interval=32)}
PROGRAMS = ('update', *CACHES, 'prefill')
PHASES = ('trace', 'lower', 'compile')


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', default='smollm2-135m', choices=[name for name in NAMED if name != 'tiny'])
  parser.add_argument('--remat', default='none', choices=['none', 'dots', 'layer'], help='what the backward pass recomputes')
  parser.add_argument('--programs', default=','.join(PROGRAMS), help='programs to compile, separated by commas')
  parser.add_argument('--repeats', type=positive, default=2)
  parser.add_argument('--base', metavar='FOLDER', help='another checkout of sprl, compiled in turn with this one')
  parser.add_argument('--save', action='store_true')
  parser.add_argument('--worker', help=argparse.SUPPRESS)
  args = parser.parse_args()
  names = args.programs.split(',')
  if unknown := set(names) - set(PROGRAMS):
    parser.error(f'--programs: found {", ".join(sorted(unknown))}; expected some of {", ".join(PROGRAMS)}')
  if args.base and not (Path(args.base) / 'sprl').is_dir():
    parser.error(f'--base = {args.base}: expected a checkout of sprl')
  if args.worker:
    jax.block_until_ready(jax.jit(lambda x: x @ x)(np.ones((8, 8))))  # starts the compiler
    for name in names:
      print(json.dumps(measured(program(name, args.model, args.remat)) | {'program': name}), flush=True)
    return
  trees = {'this': ROOT} | ({'base': Path(args.base).resolve()} if args.base else {})
  runs = {tree: [] for tree in trees}
  for _ in range(args.repeats):
    for tree, folder in trees.items():
      runs[tree].append(in_process(folder, args))
  least = {tree: [best([run[i] for run in runs[tree]]) for i in range(len(names))] for tree in trees}
  rows = [{'checkout': tree, **row} for i in range(len(names)) for tree, found in least.items() for row in [found[i]]]
  result: dict[str, Any] = {'model': args.model, 'remat': args.remat, 'repeats': args.repeats, 'runs': runs}
  if args.base:
    result['base_commit'] = git_commit(Path(args.base))
    result['share'] = {name: least['this'][i]['seconds'] / least['base'][i]['seconds'] for i, name in enumerate(names)}
  report('compilation', rows, result, save=args.save)


def in_process(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
  """Compile the programs of the checkout in `folder` in a fresh process. This script runs with the code of that checkout."""
  environment = {**os.environ, 'PYTHONPATH': str(folder), 'JAX_ENABLE_COMPILATION_CACHE': 'false', 'JAX_PLATFORMS': 'cpu'}
  options = '--model', args.model, '--remat', args.remat, '--programs', args.programs
  command = [sys.executable, __file__, '--worker', 'yes', *options]
  output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
  return [json.loads(line) for line in output.splitlines()]


def best(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Return the figures of one program, the least of its repeats."""
  names = ('program', 'seconds', *PHASES, 'operations', 'instructions', 'temporary MiB')
  return {name: found[0][name] if name == 'program' else min(each[name] for each in found) for name in names}


def program(name: str, model: str, remat: Remat) -> programs.Program:
  """Return a program of a run of this model: 8 prompts x 8 samples in float32, as benchmarks/grpo_step.py has them."""
  family, sizes = NAMED[model]
  config = ModelConfig.from_json({'model_type': family, **sizes})
  mesh = MeshAxes().mesh_of(config, jax.devices()[:1])
  run = Run(
    model=ModelSettings(path='random:' + model, dtype='float32', remat=remat),
    sampling=Sampling(max_prompt=64, max_tokens=64, chunk=32),
    rollout=Rollout(prompts=8, group=8),
    packing=Packing(row_tokens=256, rows=1, score_chunk=256),
    cache=CACHES.get(name, Cache()),
  )
  if name == 'update':
    return programs.update(config, run, shape(run.sampling, run.rollout, run.packing, run.optimizer.minibatches), mesh)
  layout = cache_layout(config, run.cache, run.quant, 64, 64, np.dtype('float32'))
  if name != 'prefill':
    return programs.decoding(config, run, layout, run.quant, 64, mesh)
  weights = programs.abstract_sampler_weights(config, run, run.quant, mesh)._replace(probe=None)
  prompts = np.zeros((8, 64), np.int32), np.zeros(8, np.int32)
  return programs.Program(decode.prefill.on(mesh), (programs.transformer.graph(config), layout, weights, *prompts))


def measured(program: programs.Program) -> dict[str, Any]:
  """Trace, lower and compile a program; return the processor seconds of each and the sizes of the result."""
  jitted, seconds = program.jitted, {}

  def timed(phase, action):
    start = time.process_time()
    result = action()
    seconds[phase] = time.process_time() - start
    return result

  with jitted._entered((program.arguments, program.static)):
    traced = timed('trace', lambda: jitted.jitted.trace(*program.arguments, **program.static))
    lowered = timed('lower', traced.lower)
    compiled = timed('compile', lowered.compile)
  return {
    'seconds': sum(seconds.values()),
    **seconds,
    'operations': sum(' = ' in line for line in lowered.as_text().splitlines()),
    'instructions': sum(' = ' in line for line in compiled.as_text().splitlines()),
    'temporary MiB': compiled.memory_analysis().temp_size_in_bytes / 2**20,
  }


def git_commit(folder: Path) -> str:
  """Return the commit of a checkout."""
  return subprocess.run(['git', '-C', folder, 'rev-parse', 'HEAD'], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == '__main__':
  main()
