"""Are the kernels correct on this GPU, and how close to its limits? One command, under 8 minutes on an H100 or H200.

    python benchmarks/gpu_check.py --save                 # for example benchmarks/results/gpu_check_NVIDIA_H200.json
    python benchmarks/gpu_check.py --save $OUT            # that file in the folder $OUT
    python benchmarks/gpu_check.py --save --only decode_step --limit 1500    # all rows of one check: .._decode_step.json
    python benchmarks/gpu_check.py --rehearse             # toy sizes in the GPU interpreter, on any machine

1. ceilings: the measured copy bandwidth and matrix rates of the device
2. parity: every kernel, and the library's attention, against its reference on random numbers
3. time of each kernel, and of the eviction of a layer, at real models' shapes: as a share of the ceilings, and beside XLA, cuDNN,
   cuBLAS and PyTorch. The FP8 product is also compared with its alternative in Triton
4. decode steps of Qwen2.5-1.5B and 7B with random weights, against the time that their bytes and products need, with an estimate
   of the most rows that fit; transformers' generate beside them
5. an update of Qwen2.5-1.5B on packed rows of 4,096 tokens: model FLOP per second over the matrix rate

Each figure shows its target and `met` or `MISSED`. A failed check is a table line; the others continue. Each check has SECONDS
plus the time earlier checks left, and is saved when it ends. Decode steps compile too slowly for one command, which measures
those with targets first: run --only decode_step for the full table. PyTorch runs in the reference environment (`make reference`,
or SPRL_REFERENCE_PYTHON). If PyTorch lacks CUDA, the report says so. The checks are in gpu_check_parity.py,
gpu_check_kernels.py and gpu_check_programs.py.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
from common import RESULTS, ROOT, record, report
from common import peer as run_peer
from device_timing import ceilings
from gpu_check_bench import DECODES, GENERATED, ROWS, TOY, Bench, Row, failed
from gpu_check_kernels import check_append, check_attention, check_eviction, check_matmul, check_rows
from gpu_check_parity import check_parity
from gpu_check_programs import check_decode_step, check_update
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_resources import MODELS

from sprl.kernels import hopper_block_matmul, hopper_decode_attention, hopper_eviction, hopper_grouped_matmul

LIMIT = 430  # seconds; no new row starts later
TORCH = 80  # seconds for all PyTorch measurements
CEILINGS = 15  # approximate seconds to measure the ceilings
SECONDS = {  # of each check; it starts no new row later
  'parity': 45, 'attention': 40, 'rows': 35, 'matmul': 40, 'eviction': 20, 'append': 5, 'update': 35, 'decode_step': 115,
}  # fmt: skip
KERNELS = (
  (hopper_decode_attention, 'decode_attention'),
  (hopper_block_matmul, 'block_matmul'),
  (hopper_block_matmul, 'grouped_matmul'),
  (hopper_grouped_matmul, 'grouped_matmul'),
  (hopper_grouped_matmul, 'grouped_outer'),
  (hopper_eviction, 'compact'),
  (hopper_eviction, 'similarity'),
)
CHECKS = {
  'parity': check_parity,
  'attention': check_attention,
  'rows': check_rows,
  'matmul': check_matmul,
  'eviction': check_eviction,
  'append': check_append,
  'update': check_update,
  'decode_step': check_decode_step,
}


def run(bench: Bench, name: str, until: float, later: tuple[str, ...] = ()) -> Iterator[Row]:
  """Yield the rows of a check, and a row if it fails or runs out of time. Reserves SECONDS for each check in `later`."""
  start = time.monotonic()
  until = min(until, max(start + SECONDS[name], until - sum(SECONDS[each] for each in later)))
  if start > until:
    yield {'check': name, 'case': '', 'status': 'not begun: out of time'}
    return
  try:
    for row in CHECKS[name](bench):
      print('  '.join(f'{key} {value:.4g}' if isinstance(value, float) else f'{value}' for key, value in row.items()), flush=True)
      yield {'status': 'ok', **row}
      if time.monotonic() > until:
        yield {'check': name, 'case': 'the rest of it', 'status': 'out of time'}
        break
  except Exception as error:
    yield failed(name, '', error)
  print(f'{name}: {time.monotonic() - start:.0f} s', flush=True)
  jax.clear_caches()


def by_torch(rehearse: bool) -> Row:
  """Measure PyTorch in a separate process, before JAX reserves the GPU's memory. The result names missing software."""
  of = {name: tuple(MODELS[name][:3]) for name in MODELS}
  cases = {
    'device': 'cuda',
    'decode': [(B, *of[name][:2], S, of[name][2]) for name, B, S in DECODES],
    'rows': [(R, T, *of[name]) for name, R, T in ROWS],
    'generate': [str(ROOT / 'benchmarks' / 'models' / GENERATED[0]), *GENERATED[1:]],
  }
  if rehearse:
    H, K, D, _, _ = TOY
    cases = {'device': 'cpu', 'decode': [(2, H, K, 64, D)], 'rows': [(1, 64, H, K, D)], 'generate': None}
  try:
    return run_peer('torch_gpu.py', json.dumps(cases), limit=TORCH)
  except SystemExit as missing:
    print(f'PyTorch: {missing}', flush=True)
    return {'missing': str(missing)}


def driver() -> str:
  """Return the version of the GPU driver from nvidia-smi; '' without a driver."""
  query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
  with contextlib.suppress(OSError, subprocess.CalledProcessError):
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
  return ''


def table(rows: list[Row]) -> list[Row]:
  """Return the rows with the union of their columns."""
  between = dict.fromkeys(key for row in rows for key in row if key not in ('check', 'case', 'asked', 'status'))
  return [{column: row.get(column) for column in ('check', 'case', *between, 'asked', 'status')} for row in rows]


def summary(rows: list[Row], **about: Any) -> Row:
  """Return the summary: counts of checks and targets, missed targets, and failed checks."""
  asked = [(row, each) for row in rows for each in filter(None, str(row.get('asked') or '').split('; '))]
  return {
    **about,
    'checks': len(rows),
    'asked': len(asked),
    'met': sum(each.endswith(', met') for _, each in asked),
    'missed': [f'{row["check"]} {row["case"]}: {each}' for row, each in asked if each.endswith('MISSED')],
    'bad': [f'{row["check"]} {row["case"]}'.strip() for row in rows if row['status'] != 'ok'],
  }


def interpreted() -> None:
  """Make the kernels run in Pallas's GPU interpreter. It blocks a thread of XLA's for each warpgroup of a cluster."""
  os.environ.setdefault('NPROC', '32')  # read when the first array is made
  for module, name in KERNELS:
    setattr(module, name, partial(getattr(module, name), interpret=plgpu.InterpretGPUParams()))


def main() -> None:
  """Run the checks and print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--rehearse', action='store_true', help='run toy sizes in the interpreter')
  parser.add_argument('--only', default=','.join(CHECKS), help='checks, separated by commas; default: %(default)s')
  parser.add_argument('--limit', type=float, default=LIMIT, help='seconds; no new row starts later')
  help_save = 'write gpu_check_DEVICE.json to this folder (default: benchmarks/results); the file name lists the checks of --only'
  parser.add_argument('--save', nargs='?', const=RESULTS, type=Path, help=help_save)
  args = parser.parse_args()
  checks = args.only.split(',')
  if unknown := set(checks) - set(CHECKS):
    parser.error(f'--only={args.only}: unknown: {", ".join(sorted(unknown))}; accepted: {", ".join(CHECKS)}')
  until = time.monotonic() + args.limit
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.92')  # JAX reads it when it first uses the GPU
  if not (args.rehearse or driver()):
    raise SystemExit('no GPU here; --rehearse runs the script without one')
  torch = by_torch(args.rehearse)
  if args.rehearse:
    interpreted()
  elif jax.default_backend() != 'gpu':
    raise SystemExit('JAX finds no GPU: install sprl with its extra `cuda`')
  found = ceilings(args.rehearse)
  print(found, flush=True)
  device = re.sub(r'\W+', '_', jax.devices()[0].device_kind)
  about = {
    'device': device,
    'driver': driver(),
    'runtime': jax.devices()[0].client.platform_version,
    **found._asdict(),
    'torch': torch,
  }
  name = '_'.join(['gpu_check', device, *(checks if set(checks) != set(CHECKS) else [])])  # a full run keeps its file
  rows, bench = [], Bench(args.rehearse, found, torch)
  for i, check in enumerate(checks):
    for row in run(bench, check, until, tuple(checks[i + 1 :])):
      rows.append(row)
    if args.save:
      record(name, table(rows), summary(rows, **about), args.save)
  report(name, table(rows), summary(rows, **about))


if __name__ == '__main__':
  main()
