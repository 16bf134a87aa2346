"""Are the kernels correct on this GPU, and how close are they to its limits? Takes 10 minutes on an H100 or H200.

    python benchmarks/gpu_check.py --save                 # for example benchmarks/results/gpu_check_NVIDIA_H200.json
    python benchmarks/gpu_check.py --save $OUT            # that file in the folder $OUT
    python benchmarks/gpu_check.py --save --resume        # only the rows that this file lacks
    python benchmarks/gpu_check.py --save --only decode_whole --limit 1500    # one part: .._decode_whole.json
    python benchmarks/gpu_check.py --rehearse             # toy sizes in the GPU interpreter, on any machine

The device's ceilings are measured first, except for parity alone: copy bandwidth and matrix rates. Important parts run first:

    parity        every kernel against its reference on random numbers
    decode        decode steps of Qwen2.5-7B and 1.5B at 4 and 8 layers, dense and sparse, bfloat16 and FP8
    launches      the cost of a kernel launch, and of a loop iteration whose condition the host must read
    attention     decode attention at real models' shapes, beside XLA, cuDNN and PyTorch
    matmul        FP8 products and those of experts, beside cuBLAS and a kernel in Triton
    quantise      activations to FP8: alone, behind a norm and behind a gated activation, beside XLA
    rows          the learner's attention of packed rows, with gradients, beside XLA and cuDNN
    eviction      compaction, comparison of keys, the eviction of a layer
    append        the write of new keys
    update        updates of Qwen2.5-1.5B on packed rows of 4,096 tokens: model FLOP per second over the matrix rate
    decode_whole  decode steps of all layers, with an estimate of the most rows that fit
    torch         PyTorch's attention and transformers' generate, for comparison; only with --only, before all other parts

The file has all planned rows from the start, with the status `not run`. Each row is saved as soon as it is measured, so a process
that is killed loses only the row in progress. --resume keeps the rows of an earlier file whose status is ok, and measures the
others.

A figure with a target shows `met` or `MISSED`. If a case fails, its row says so, and the others continue. A part may use its
SECONDS and the time that earlier parts did not use. PyTorch runs in this environment if it is installed here, else in that of
`make reference` or SPRL_REFERENCE_PYTHON. The script needs jax, flax, optax, orbax-checkpoint, jaxtyping and their dependencies.
sprl need not be installed.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # sprl of this checkout, installed or not

from sprl.kernels import gpu_memory, ptxas

os.environ.update(ptxas.environment())  # before jax is imported

import jax
from common import RESULTS, ROOT, record, report
from common import peer as run_peer
from device_timing import Ceilings, ceilings
from gpu_check_bench import DECODES, GENERATED, ROWS, TOY, Bench, Row
from gpu_check_decode import check_decode, check_decode_whole, random_params
from gpu_check_kernels import check_append, check_attention, check_eviction, check_matmul, check_quantise, check_rows
from gpu_check_launches import check_launches
from gpu_check_parity import check_parity
from gpu_check_record import deadline, key, planned, run, summary, table
from gpu_check_update import check_update
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_resources import MODELS

from sprl.kernels import (
  hopper_append,
  hopper_block_matmul,
  hopper_decode_attention,
  hopper_eviction,
  hopper_grouped_matmul,
  hopper_packed_attention,
  hopper_quantise,
)

LIMIT = 560  # seconds, after which no new row starts
TORCH = 100  # seconds for all PyTorch measurements
SECONDS = {  # of each part, after which it starts no new row
  'parity': 130, 'decode': 140, 'launches': 10, 'attention': 45, 'matmul': 50, 'quantise': 10, 'rows': 40, 'eviction': 20,
  'append': 5, 'update': 45, 'decode_whole': 60,
}  # fmt: skip
KERNELS = (
  (hopper_append, 'append'),
  (hopper_decode_attention, 'decode_attention'),
  (hopper_block_matmul, 'block_matmul'),
  (hopper_block_matmul, 'grouped_matmul'),
  (hopper_grouped_matmul, 'grouped_matmul'),
  (hopper_grouped_matmul, 'grouped_outer'),
  (hopper_eviction, 'compact'),
  (hopper_eviction, 'similarity'),
  (hopper_packed_attention, 'packed_attention'),
  (hopper_quantise, 'codes'),
  (hopper_quantise, 'gated_codes'),
  (hopper_quantise, 'normalised'),
  (hopper_quantise, 'normalised_codes'),
)
CHECKS = {
  'parity': check_parity,
  'decode': check_decode,
  'launches': check_launches,
  'attention': check_attention,
  'matmul': check_matmul,
  'quantise': check_quantise,
  'rows': check_rows,
  'eviction': check_eviction,
  'append': check_append,
  'update': check_update,
  'decode_whole': check_decode_whole,
}
PARTS = (*CHECKS, 'torch')


def by_torch(rehearse: bool) -> Row:
  """Measure PyTorch in a separate process, before JAX reserves the GPU's memory. The result names missing software."""
  if importlib.util.find_spec('torch') is not None:
    os.environ.setdefault('SPRL_REFERENCE_PYTHON', sys.executable)
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


def interpreted() -> None:
  """Make the kernels run in Pallas's GPU interpreter. It blocks a thread of XLA's for each warpgroup of a cluster."""
  os.environ.setdefault('NPROC', '32')  # read when the first array is made
  for module, name in KERNELS:
    setattr(module, name, partial(getattr(module, name), interpret=plgpu.InterpretGPUParams()))


def ceilings_note(found: Ceilings) -> str | None:
  """Return a note if the library's FP8 product is too slow to be one, else None."""
  if not found.upcast:
    return None
  return (
    f'the library multiplies e4m3 at {found.fp8 or 0:.3g} FLOP/s, bfloat16 at {found.bf16:.3g}: it converts e4m3 to bfloat16. '
    f'Shares of FP8 rows refer to twice the bfloat16 rate, {found.fp8_rate:.3g}'
  )


def read_earlier(path: Path, device: str) -> tuple[list[Row], Row]:
  """Return the rows and the summary of an earlier result of the same device; nothing if there is no such file."""
  if not path.is_file():
    return [], {}
  found = json.loads(path.read_text(encoding='utf-8'))
  if found['result']['device'] != device:
    raise SystemExit(f'--resume={path}: measured on {found["result"]["device"]}; expected a result of {device}')
  return found['rows'], found['result'] | {'commit': found['commit']}


def main() -> None:
  """Run the parts and print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--rehearse', action='store_true', help='run toy sizes in the interpreter')
  parser.add_argument('--only', default=','.join(CHECKS), help='parts, separated by commas; default: %(default)s')
  parser.add_argument('--limit', type=float, default=LIMIT, help='seconds; no new row starts later; default: %(default)s')
  help_save = 'write gpu_check_DEVICE.json to this folder (default: benchmarks/results); the file name lists the parts of --only'
  parser.add_argument('--save', nargs='?', const=RESULTS, type=Path, help=help_save)
  help_resume = 'keep the rows with status ok of this file; default: the file that --save writes'
  parser.add_argument('--resume', nargs='?', const=Path(), type=Path, help=help_resume)
  args = parser.parse_args()
  asked = args.only.split(',')
  if unknown := set(asked) - set(PARTS):
    parser.error(f'--only={args.only}: unknown: {", ".join(sorted(unknown))}; accepted: {", ".join(PARTS)}')
  if args.resume == Path() and not args.save:
    parser.error('--resume: expected a file, or --save')
  ended: list[int] = []

  def end(signum: int, frame: object) -> None:
    """End the process with a report. Python calls this only between its own instructions: after a compilation, not in it."""
    ended.append(signum)
    raise SystemExit(128 + signum)

  signal.signal(signal.SIGTERM, end)
  until = time.monotonic() + args.limit
  gpu_memory.reserve(os.environ)
  if not (args.rehearse or driver()):
    raise SystemExit('no GPU here; --rehearse runs the script without one')
  print(ptxas.described(), flush=True)
  torch = by_torch(args.rehearse) if 'torch' in asked else {}
  if args.rehearse:
    interpreted()
  elif jax.default_backend() != 'gpu':
    raise SystemExit('JAX finds no GPU: install sprl with its extra `cuda`')
  device = re.sub(r'\W+', '_', jax.devices()[0].device_kind)
  parts = [name for name in CHECKS if name in asked]
  name = '_'.join(['gpu_check', device, *(asked if set(asked) < set(CHECKS) or 'torch' in asked else [])])
  earlier_rows, earlier = [], {}
  if args.resume is not None:
    file = args.resume if args.resume != Path() else args.save / f'{name}.json'
    earlier_rows, earlier = read_earlier(file, device)
    torch = torch or earlier.get('torch', {})
  if 'copy' in earlier:
    found = Ceilings(**{field: earlier[field] for field in Ceilings._fields})
  else:
    found = None if parts == ['parity'] else ceilings(args.rehearse)
  about: Row = {
    'device': device,
    'driver': driver(),
    'runtime': jax.devices()[0].client.platform_version,
    'torch': torch,
  }
  if found is not None:
    print(found, flush=True)
    about |= found._asdict()
    if note := ceilings_note(found):
      print(note, flush=True)
      about['note'] = note
  if earlier:
    about['resumed from commit'] = earlier['commit']
  bench = Bench(args.rehearse, found or Ceilings(math.nan, math.nan, None), torch)  # parity has no ceilings
  cases = {part: list(CHECKS[part](bench)) for part in parts}
  rows = planned((each for part in parts for each in cases[part]), earlier_rows)

  def save() -> None:
    if args.save:
      record(name, table(rows.values()), summary(rows.values(), **about), args.save)

  save()
  try:
    for i, part in enumerate(parts):
      later = sum(SECONDS[each] for each in parts[i + 1 :])
      for row in run(part, cases[part], rows, deadline(time.monotonic(), until, SECONDS[part], later)):
        if ended:  # the exception of the signal made the case fail
          raise SystemExit(128 + ended[0])
        rows[key(row)] = row
        save()
      random_params.cache_clear()  # the next part needs the memory
  finally:  # a signal, too, ends with the report
    if rows:
      report(name, table(rows.values()), summary(rows.values(), **about))


if __name__ == '__main__':
  main()
