"""How long do other launches of FP8 products take on this GPU, and does the model of launches choose a fast one?

    python benchmarks/launch_sweep.py --save            # on a GPU: measure the launches that the model predicts to be fast
    python benchmarks/launch_sweep.py --fit             # anywhere: fit constants of the model to the saved times

A row is a launch of a product and its measured time. The table compares, for each product, the launch that the model of
sprl/kernels/launch_model.py would choose among the measured ones with the fastest of them. `--fit` varies FITTED, and a constant
time that is added to every launch, to minimise the differences between the logarithms of predicted and measured times. It prints
the constants, and the launches that the model then chooses.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # sprl of this checkout, installed or not

from sprl.kernels import gpu_memory, ptxas

os.environ.update(ptxas.environment())  # before jax is imported

import jax
import numpy as np
from common import RESULTS, positive, record, report
from device_timing import seconds
from gpu_check_calls import transposed_inputs

from sprl.kernels import launch_model
from sprl.kernels.launch_model import Launch

NAME = 'launch_sweep'
FITTED = {'FP8': 1.5e15, 'MEET': 1e-6, 'PRODUCT': 70.0, 'STEP': 100.0}  # constants, and where the fit starts
PRODUCTS = {  # (N, K) of joined linears, and numbers of tokens
  '7B gate, up': ((37888, 3584), (64, 256)),
  '7B down': ((3584, 18944), (64, 256, 8192)),
  '7B qkv': ((4608, 3584), (256,)),
  '7B o': ((3584, 3584), (256,)),
  '1.5B gate, up': ((17920, 1536), (256,)),
  '1.5B down': ((1536, 8960), (256,)),
  '1.5B qkv': ((2048, 1536), (256,)),
}
Row = dict[str, Any]


def plans(M: int, N: int, K: int, most: int) -> list[Launch]:
  """Return up to `most` launches: the one predicted to be the fastest of each layout, then the next ones."""
  ordered = sorted(launch_model.candidates(M, N, K), key=lambda plan: launch_model.seconds(plan, M, N, K))
  layouts: dict[tuple, Launch] = {}
  for plan in ordered:
    layouts.setdefault((plan.warpgroups, plan.products, plan.tokens), plan)
  return list(dict.fromkeys([*layouts.values(), *ordered]))[:most]


def measured(product: str, M: int, N: int, K: int, plan: Launch) -> Row:
  """Return the row of a launch."""
  from sprl.kernels import hopper_block_matmul

  def call(x, x_scale, *weights):
    return hopper_block_matmul.run(plan, x, x_scale.T, *weights)

  us = 1e6 * seconds(call, partial(transposed_inputs, M, N, K))
  return {'product': product, 'M': M, 'N': N, 'K': K, **dataclasses.asdict(plan), 'us': us}


def plan_of(row: Row) -> Launch:
  """Return the launch of a row."""
  fields: Row = {field.name: row[field.name] for field in dataclasses.fields(Launch)}
  fields |= {name: tuple(row[name]) for name in ('tiles', 'together')}
  return Launch(**fields)


def predicted(row: Row) -> float:
  """Return the microseconds that the model predicts."""
  return 1e6 * launch_model.seconds(plan_of(row), row['M'], row['N'], row['K'])


def choices(rows: Sequence[Row]) -> list[Row]:
  """Return, for each product, the fastest launch and the one that the model would choose among those measured."""
  found = []
  for product, M in dict.fromkeys((row['product'], row['M']) for row in rows):
    of = [row for row in rows if (row['product'], row['M']) == (product, M)]
    best = min(of, key=lambda row: row['us'])
    chosen = min(of, key=lambda row: launch_model.order(plan_of(row), row['M'], row['N'], row['K']))
    found.append({'product': product, 'M': M, 'us': chosen['us'], 'fastest us': best['us'], 'launches': len(of)})
  return found


def replaced(constants: Row) -> Any:
  """Return a context in which the model has these constants."""
  return mock.patch.multiple(launch_model, **constants)


def fit(rows: Sequence[Row]) -> dict[str, float]:
  """Return the constants FITTED, the time added to every launch in microseconds, and the rms of log(predicted / measured)."""
  from scipy.optimize import least_squares

  start = np.log([*FITTED.values(), 5.0])

  def constants(x):
    return replaced(dict(zip(FITTED, map(float, np.exp(x[:-1])))))

  def errors(x):
    with constants(x):
      return [np.log((predicted(row) + np.exp(x[-1])) / row['us']) for row in rows]

  best = least_squares(errors, start, loss='soft_l1', f_scale=0.1, diff_step=0.02).x
  return dict(zip((*FITTED, 'added us', 'rms error'), [*np.exp(best), float(np.sqrt(np.mean(np.square(errors(best)))))]))


def main() -> None:
  """Measure launches, or fit the model to saved ones."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--most', type=positive, default=16, help='launches measured of each product; default: %(default)s')
  either = parser.add_mutually_exclusive_group()
  either.add_argument('--save', action='store_true', help=f'write benchmarks/results/{NAME}.json after each launch')
  either.add_argument('--fit', action='store_true', help='fit the model to the saved times')
  args = parser.parse_args()
  if args.fit:
    if not (saved := RESULTS / f'{NAME}.json').is_file():
      raise SystemExit(f'--fit: no saved times at benchmarks/results/{NAME}.json; --save writes them, on a GPU')
    rows = json.loads(saved.read_text(encoding='utf-8'))['rows']
    fitted = fit(rows)
    with replaced({name: fitted[name] for name in FITTED}):
      report(NAME, choices(rows), fitted)
    return
  gpu_memory.reserve(os.environ)
  if jax.default_backend() != 'gpu':
    raise SystemExit('no GPU here, so launches cannot be timed; --fit uses saved times')
  rows = []
  for product, ((N, K), tokens) in PRODUCTS.items():
    for M in tokens:
      for plan in plans(M, N, K, args.most):
        rows.append(measured(product, M, N, K, plan))
        if args.save:
          record(NAME, rows, {'device': jax.devices()[0].device_kind, 'choices': choices(rows)})
  report(NAME, choices(rows), {'device': jax.devices()[0].device_kind})


if __name__ == '__main__':
  main()
