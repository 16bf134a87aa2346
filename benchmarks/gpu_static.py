"""How fast would decode steps run on an H200? A prediction from the programs that XLA compiles for it. No GPU is needed.

    python benchmarks/gpu_static.py                           # all cases; sprl/planning/aot.py lists the requirements
    python benchmarks/gpu_static.py --only 'Qwen2.5-7B 256'   # the cases whose name contains this, or one of several texts
    python benchmarks/gpu_static.py --save gpu_static         # takes over an hour; if it is stopped, the same command goes on

Each case is compiled with 2 and with 4 layers of the model's width. From the difference follow the numbers of all layers. The row
of a case shows what XLA launches in a plain step, that is a decode step in which no row compresses its cache, and the time that
gpu_static_model.py predicts for it. `mean ms` includes the compressions of an interval if all rows compress at the same step,
`spread ms` if they compress at steps spread evenly over it. The other tables show the matrix products and the kernels' machine
code, which needs nvdisasm (the package nvidia-cuda-nvdisasm).

docs/kernels.md compares two predictions with an H200. Use them to compare programs, and replace assumptions by measurements.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax.numpy as jnp
from common import RESULTS, commit, cores, record, report
from gpu_static_model import Context, Matmul, Walk, Work, at_depth, decode_loop, tiled

from sprl.cache import compaction
from sprl.cache.layout import CacheLayout, cache_layout
from sprl.config import Cache, ModelSettings, Quant, Run, Sampling
from sprl.kernels.launch_model import BF16, MEMORY
from sprl.models.config import ModelConfig
from sprl.planning import aot, programs, sass
from sprl.planning.hlo import Module, parse, prepared
from sprl.planning.memory import nbytes
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.thunks import find, fragments

MODELS = Path(__file__).parent / 'models'
NAMES = ('Qwen2.5-1.5B', 'Qwen2.5-7B', 'Qwen3-8B', 'Qwen3-30B-A3B')
ROWS = 64, 256
PROMPT, TOKENS = 512, 4096  # of the longest prompt and of the whole sequence
CACHES = {'dense': Cache(), 'sparse': Cache(budget=512, interval=128)}
NUMBERS = {'bf16': Quant(), 'fp8': Quant(sampler='w8a8_kv8')}
LAYERS = 2, 4  # of the compiled programs
GAIN = {'Qwen2.5-7B': 3.0, 'Qwen2.5-1.5B': 2.5}  # targets: sparse FP8 over dense bfloat16, at 256 rows
LAUNCHES = {('dense', 'bf16'): 10, ('sparse', 'fp8'): 14}  # targets: launches of a layer
MIB = 2**20


class Case(NamedTuple):
  """A model's decode steps."""

  model: str
  rows: int
  cache: str
  numbers: str
  key_bias: bool = True  # as the settings say; False: none, to find its cost

  def __str__(self) -> str:
    return f'{self.model} {self.rows} {self.cache} {self.numbers}{"" if self.key_bias else " without key bias"}'

  def config(self, layers: int | None = None) -> ModelConfig:
    """Return the model's config, with the first `layers` layers only; None: all."""
    config = ModelConfig.read(MODELS / self.model)
    if layers is None:
      return config
    experts = config.experts and dataclasses.replace(config.experts, layers=tuple(range(layers)))
    return dataclasses.replace(config, num_layers=layers, experts=experts)

  @property
  def run(self) -> Run:
    """The settings."""
    sampling = Sampling(max_prompt=PROMPT, max_tokens=TOKENS - PROMPT, rows=self.rows)
    model = ModelSettings(path=self.model, kernels='mosaic_gpu')
    return Run(model=model, sampling=sampling, cache=CACHES[self.cache], quant=NUMBERS[self.numbers])

  def layout(self, config: ModelConfig) -> CacheLayout:
    """Return the layout of the cache."""
    run = self.run
    layout = cache_layout(config, run.cache, run.quant, PROMPT, TOKENS - PROMPT, jnp.bfloat16)
    return layout if self.key_bias else dataclasses.replace(layout, key_bias=False)

  @property
  def length(self) -> float:
    """Occupied slots of a row: all in a dense cache, the mean over an interval in a sparse one."""
    cache = CACHES[self.cache]
    return TOKENS if cache.budget is None else cache.budget + cache.interval / 2


# --- compiled programs -----------------------------------------------------------------------------------------------

# (kernel, case) -> report. Mosaic reports a kernel only when a process compiles it for the first time.
reports: dict[tuple[str, str], Any] = {}


class Step(NamedTuple):
  """What one compiled program shows about a decode step."""

  plain: Work  # of a plain step
  call: Work  # of the whole program, a chunk of steps, if no row is due for compression
  due: Work  # of the whole program, if all rows are due at its last step
  spread: Work  # of the whole program, if compressions are spread evenly over an interval
  counts: dict[str, float]
  matmuls: list[Matmul]
  kernels: list[aot.Kernel]


def compiled(case: Case, layers: int) -> aot.Compiled:
  """Compile the decode program of a case with this number of layers.

  A compression takes as many rows at a time as its share of the cache holds. With few layers it takes as many as with all.
  """
  config, run = case.config(layers), case.run
  share = compaction.SHARE * case.config().num_layers / layers
  mesh = MeshAxes().mesh_of(config, aot.devices('h200'))
  with aot.lowering_for(mesh):  # the device decides which form the sampler weights have
    program = programs.decoding(config, run, case.layout(config), run.quant, case.rows, mesh)
  with mock.patch.object(compaction, 'SHARE', share):
    return aot.inspect(program.jitted, *program.arguments, **program.static)


def step(case: Case, layers: int) -> Step:
  """Compile a program and read its decode step."""
  found = compiled(case, layers)
  for kernel in found.kernels:
    reports.setdefault((kernel.name, str(case)), kernel)
  known: dict[str, aot.Kernel] = {}
  for shape in (str(case._replace(key_bias=True)), str(case)):  # the later one wins
    known |= {name: kernel for (name, of), kernel in reports.items() if of == shape}
  return read_step(case, case.config(), parse(found.text), found, known)


def read_step(case: Case, config: ModelConfig, module: Module, found: aot.Compiled, kernels: dict[str, aot.Kernel]) -> Step:
  """Return what the program says about a decode step."""
  layout = case.layout(config)
  context = Context(case.rows, layout.slots, case.length, kernels, experts_used(config, case.rows))
  loop = decode_loop(module, found.thunks)
  plain, due = Walk(module, context), Walk(module, context, due=1.0)
  spread = Walk(module, context, due=case.run.sampling.chunk / CACHES[case.cache].interval)
  body = loop.lists['body']
  work = plain.iteration(loop)
  matmuls = unique(plain.matmuls)
  whole = [each for each in found.thunks if each is not loop]
  # The rows that are due take the last step of a chunk outside of the loop.
  inside = module.instructions[loop.name].trip_count or case.run.sampling.chunk
  call = plain.work(whole).plus(work, inside)
  compress, some = (walk.work(whole).plus(work, inside) for walk in (due, spread))
  ready = prepared(module, module.computations[module.instructions[loop.name].body])
  graphs, outside = fragments(body)
  nested = [*find(body, 'While'), *find(body, 'Conditional')]
  counts = {
    'launches': work.launches,
    'graphs': graphs,
    'launches outside graphs': outside,
    'nested loops': sum(thunk.kind == 'While' for thunk, _ in nested),
    'branches': sum(thunk.kind == 'Conditional' for thunk, _ in nested),
    'host reads a step': work.host_reads,
    'host reads a chunk': call.host_reads,
    'prepared MiB': sum(each.bytes for each in ready.launched) / MIB,
    'fused preparations': len(ready.fused),
    'bytes': work.bytes,
  }
  return Step(work, call, compress, some, counts, matmuls, list(found.kernels))


def unique(matmuls: Sequence[Matmul]) -> list[Matmul]:
  """Return the products of the first layer and those outside of layers."""
  return [each for each in matmuls if not each.name.startswith('layer') or each.name.startswith('layer0/')]


def experts_used(config: ModelConfig, rows: int) -> float:
  """Return the expected share of the experts that at least one row chooses, if all experts are equally likely."""
  return 1 - (1 - config.experts.per_token / config.experts.count) ** rows if config.experts else 1.0


def least_bytes(case: Case) -> float:
  """Return the fewest bytes that a step can read: all weights but the embeddings, and the occupied slots of the cache.

  A slot counts as the cache stores it: in an FP8 cache of a model with key biases, second codes count too.
  """
  config, run = case.config(), case.run
  mesh = MeshAxes().mesh_of(config, aot.devices('h200'))
  with aot.lowering_for(mesh):
    weights = programs.abstract_sampler_weights(config, run, run.quant, mesh)._replace(probe=None, scales=None)
  embedded = 0 if config.tie_embeddings else nbytes(weights.params['embed'])
  layout = case.layout(config)
  return nbytes(weights) - embedded + layout.kv_bytes(case.rows) / layout.slots * case.length


# --- results ---------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
  """A case's rows of the three tables."""

  row: dict[str, Any]
  products: list[dict[str, Any]]
  kernels: list[dict[str, Any]]


def result(case: Case, depths: tuple[int, int] = LAYERS) -> Result:
  """Compile a case at two depths; return its rows."""
  few, more = (step(case, layers) for layers in depths)
  layers = case.config().num_layers

  def whole(name):
    return at_depth(getattr(few, name), getattr(more, name), depths, layers)

  plain, call, due, spread = whole('plain'), whole('call'), whole('due'), whole('spread')
  counts = {name: at_depth(few.counts[name], more.counts[name], depths, layers) for name in few.counts}
  per_layer = (more.counts['launches'] - few.counts['launches']) / (depths[1] - depths[0])
  cache, steps = CACHES[case.cache], case.run.sampling.chunk
  calls = cache.interval / steps  # of an interval; the rows compress in one of them
  mean = (call.seconds * (calls - 1) + due.seconds) / calls / steps if cache.budget else call.seconds / steps
  roof = least_bytes(case) / MEMORY
  row = {
    'case': str(case),
    'launches/layer': per_layer,
    'launches': round(counts['launches']),
    'graphs': round(counts['graphs']),
    'outside graphs': round(counts['launches outside graphs']),
    'nested loops': round(counts['nested loops']),
    'branches': round(counts['branches']),
    'host reads a step': round(counts['host reads a step']),
    'a chunk': round(counts['host reads a chunk']),
    'prepared MiB': counts['prepared MiB'],
    'fused': round(counts['fused preparations']),
    'GB': counts['bytes'] / 1e9,
    'starts ms': 1e3 * plain.overhead,
    'products ms': 1e3 * plain.products,
    'attention ms': 1e3 * plain.attention,
    'rest ms': 1e3 * plain.rest,
    'step ms': 1e3 * plain.seconds,
    'tokens/s': case.rows / plain.seconds,
    'roofline': roof / plain.seconds,
    'bound': (roof + plain.excess) / plain.seconds,
    'mean ms': 1e3 * mean,
    'spread ms': 1e3 * spread.seconds / steps,
  }
  return Result(row, [product_row(case, each) for each in few.matmuls], [kernel_row(case, each) for each in few.kernels])


def product_row(case: Case, each: Matmul) -> dict[str, Any]:
  """Return a product's row: its tiling and, for FP8, the time of the same product in bfloat16."""
  M, N, K, batch = each.sizes
  plain = tiled(M, N, K, batch, 2, BF16, 2 * batch * (M * K + N * K + M * N)) if each.kind == 'fp8' else None
  return {
    'case': str(case),
    'product': each.name,
    'kind': each.kind,
    'M': M,
    'N': N,
    'K': K,
    'batch': batch,
    'tile': each.tiling.name,
    'wave use': each.tiling.wave_use,
    'partial MiB': each.tiling.partial / MIB,
    'us': 1e6 * each.tiling.seconds,
    'bf16 us': 1e6 * plain.seconds if plain else None,
  }


def kernel_row(case: Case, kernel: aot.Kernel) -> dict[str, Any]:
  """Return a kernel's row: resources, and the instructions of a warp in the loop that multiplies, by class."""
  loop = kernel.sass.loop if kernel.sass else {}
  return {
    'first case': str(case),
    'kernel': kernel.name,
    'threads': kernel.threads,
    'registers': kernel.registers,
    'spilled': kernel.spills,
    'shared KiB': kernel.shared / 1024,
    'instructions': sum(kernel.sass.total.values()) if kernel.sass else None,
    'loop': sum(loop.values()) if kernel.sass else None,
    **{name: loop.get(name, 0) if kernel.sass else None for name in [*sass.CLASSES, 'other']},
  }


def judged(rows: dict[str, dict[str, Any]], products: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Return the verdicts on the targets of the compiled cases: value, target, and whether it is met."""
  found = []

  def judge(name, value, target, most):
    found.append({'target': name, 'found': value, 'asked': target, 'met': value <= target if most else value >= target})

  for case, row in rows.items():
    model, batch, cache, numbers = case.split()[:4]
    dense, bare = rows.get(f'{model} {batch} dense bf16'), rows.get(f'{case} without key bias')
    if 'without' in case:
      continue
    if (cache, numbers) == ('sparse', 'fp8') and dense and model in GAIN and batch == '256':
      judge(f'{case}: times dense bf16', row['tokens/s'] / dense['tokens/s'], GAIN[model], most=False)
    if (cache, numbers) == ('dense', 'bf16'):
      judge(f'{case}: share of byte roofline', row['roofline'], 0.85, most=False)
    if cache == 'sparse':
      for when, column in (('together', 'mean ms'), ('spread', 'spread ms')):
        judge(f'{case}: mean over plain step, compressions {when}', row[column] / row['step ms'], 1.1, most=True)
    if (cache, numbers) in LAUNCHES:
      judge(f'{case}: launches a layer', row['launches/layer'], LAUNCHES[cache, numbers], most=True)
    judge(f'{case}: nested loops', row['nested loops'], 0, most=True)
    judge(f'{case}: host reads a step', row['host reads a step'], 0, most=True)
    judge(f'{case}: host reads a chunk', row['a chunk'], 1, most=True)
    if bare:
      judge(f'{case}: share of key biases', 1 - bare['step ms'] / row['step ms'], 0.05, most=True)
  for each in products:
    if each['kind'] == 'fp8':
      name = f'{each["case"]} {each["product"]} {each["N"]}x{each["K"]}: FP8 over bf16 time'
      judge(name, each['us'] / each['bf16 us'], 1.0, most=True)
  return found


def cases() -> list[Case]:
  """Return all cases. Models with key biases have FP8 cases without them too, to find the cost of the biases."""
  all_ = [Case(*each) for each in itertools.product(NAMES, ROWS, CACHES, NUMBERS)]
  return all_ + [case._replace(key_bias=False) for case in all_ if case.numbers == 'fp8' and case.config().qkv_bias]


def tables(results: Sequence[Result]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """Return the rows of all cases, and the other tables with the number of targets that are met."""
  rows = {each.row['case']: each.row for each in results}
  for name, row in rows.items():
    dense = rows.get(' '.join([*name.split()[:2], 'dense', 'bf16']))
    row['times dense'] = row['tokens/s'] / dense['tokens/s'] if dense else None
  products = [row for each in results for row in each.products]
  kernels = list({str({**row, 'first case': ''}): row for each in reversed(results) for row in each.kernels}.values())[::-1]
  targets = judged(rows, products)
  short = {'targets': len(targets), 'met': sum(each['met'] for each in targets), 'no SASS': sass.missing()}
  return list(rows.values()), {**short, 'judged': targets, 'products': products, 'kernels': kernels}


def recorded(name: str | None) -> dict[str, Result]:
  """Return the results of benchmarks/results/NAME.json by case, if they are of this commit."""
  path = RESULTS / f'{name}.json'
  found = json.loads(path.read_text()) if name and path.exists() else {}
  if found.get('commit') != commit():
    return {}

  def of(case, table, column):
    return [row for row in found['result'][table] if row[column] == case]

  return {
    row['case']: Result(row, of(row['case'], 'products', 'case'), of(row['case'], 'kernels', 'first case'))
    for row in found['rows']
  }


def main() -> None:
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json; the same command goes on with it')
  parser.add_argument('--only', metavar='TEXT', nargs='+', default=[''], help='only the cases whose name contains one of these')
  args = parser.parse_args()
  if reason := aot.missing():
    raise SystemExit(reason)
  wanted = [case for case in cases() if any(text in str(case) for text in args.only)]
  if not wanted:
    raise SystemExit(f'--only={" ".join(args.only)}: expected a part of a case, such as {cases()[0]}')
  known = recorded(args.save)
  with ProcessPoolExecutor(min(2, cores()), multiprocessing.get_context('spawn')) as pool:
    running = {str(case): pool.submit(result, case) for case in wanted if str(case) not in known}
    for case in map(str, wanted):
      if case in running:
        known[case] = running[case].result()
        if args.save:
          record(args.save, *tables(list(known.values())))
  rows, result_of_all = tables(list(known.values()))
  for name in ('products', 'kernels', 'judged'):
    if table := result_of_all.pop(name):
      report('gpu_static', table, {})
  report('gpu_static', rows, result_of_all)


if __name__ == '__main__':
  main()
