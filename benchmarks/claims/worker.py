"""A worker process: trains the runs of an experiment one after another, on one core or on the GPU.

Small models do not use two cores well, so each core has its own worker. The runs of a worker share its compiled programs. A
worker claims a run with a lock on a file of that run. The system releases the lock when the process ends.
"""

import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from claims.controls import PATCHES, controlled
from claims.experiment import REWARD, Experiment, find
from common import commit, machine

from sprl.config import Run, default_config
from sprl.config_reader import resolve
from sprl.guards import stop
from sprl.hooks import StopRun
from sprl.io.files import write_text
from sprl.io.metrics import read_metrics, series
from sprl.learner.restore import restore
from sprl.model import Model
from sprl.rollout.evaluate import evaluate
from sprl.rollout.setup import RolloutSetup
from sprl.train import train

EVERY = 10  # a point of a curve is the mean over this number of steps
COMPILING = 2  # number of the first steps, which compile: their time does not count


def main() -> None:
  """Train runs until none is left, or until SIGTERM arrives. Arguments: experiment, folder, number of a core or `gpu`."""
  name, folder, place = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
  if place == 'gpu':
    if jax.default_backend() != 'gpu':
      raise SystemExit(f'{name} needs a GPU: its models are too large for {jax.default_backend()}')
  elif hasattr(os, 'sched_setaffinity'):  # Linux only; before the first computation, when jax counts the cores
    os.sched_setaffinity(0, {int(place)})
  experiment, failed = find(name), False
  parent = os.getppid()
  for arm, seed in experiment.runs:
    if os.getppid() != parent or stop_file(folder, parent).exists():
      return  # the command that started this worker was killed, or ends
    done = result_file(folder, arm, seed)
    with taken(done.with_suffix('.lock')) as mine:
      if not mine or done.exists():
        continue
      start = time.perf_counter()
      try:
        record = run(experiment, arm, seed, folder)
      except Exception:
        traceback.print_exc()  # the other runs go on
        failed = True
        continue
      if record is None:
        return  # a signal arrived
      # Written atomically: the command may read the file at any time.
      write_text(done, json.dumps(record | {'seconds': time.perf_counter() - start}))
  sys.exit(failed)


def stop_file(folder: Path, command: int) -> Path:
  """Return the path of the file that exists while the command with this process id ends its workers."""
  return folder / f'stop-{command}'


def result_file(folder: Path, arm: str, seed: int) -> Path:
  """Return the path of the record of a run."""
  return folder / f'{arm}-{seed}.json'


@contextmanager
def taken(path: Path):
  """Hold a lock on a file during the block. Yields True, or False if another process holds it."""
  with open(path, 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      yield False
    else:
      yield True


def run(experiment: Experiment, arm: str, seed: int, folder: Path) -> dict[str, Any] | None:
  """Train a run, or resume an interrupted one. Return its record; None if a signal ended it early.

  A run that a guard stopped, for example because weights are not finite, has a record too. Its scores are those of its newest
  checkpoint, or of the weights before training if it has none.
  """
  changes = experiment.changes(arm, seed, folder / 'task')
  workdir = folder / f'{arm}-{seed}'
  here = machine()
  ran_on = here['accelerators'][0] if here['accelerators'] else here['cpu']
  record: dict[str, Any] = {'arm': arm, 'seed': seed, 'commit': commit(), 'machine': ran_on, 'stopped': None}
  try:
    with controlled(changes), mock.patch.object(stop, 'MAX_KL', float('inf')):  # a large mismatch is a result, not a mistake
      if not train(resolved(changes), workdir).completed:
        return None
  except StopRun as error:
    record['stopped'] = str(error).splitlines()[1].strip()
  final = resolved(experiment.final(arm, seed, folder / 'task'))
  record |= {'before': before(final, folder / f'before-{seed}.json'), 'scores': ask(final, workdir)}
  samplers = experiment.inference if arm in experiment.asked else ()
  record['under'] = {name: ask(resolved(experiment.answers(name, seed, folder / 'task')), workdir) for name in samplers}
  records = read_metrics(workdir)
  curves = {name: series(records, name) for name in (REWARD, *experiment.series)}
  record['curves'] = {name: averaged(*each) for name, each in curves.items()}
  record['measures'] = {name: float(values.mean()) for name, (_, values) in curves.items() if len(values)}
  steps, accuracy = series(records, 'eval/avg@k')
  record['clock'] = clock(records, steps[1:])
  record['accuracy'] = {'steps': steps.tolist(), 'mean': [round(float(x), 4) for x in accuracy]}
  return record


def before(settings: Run, kept: Path) -> list[float]:
  """Return the scores of the model from which the runs of a seed start. All arms share them, in the file `kept`."""
  if not kept.exists():
    write_text(kept, json.dumps(ask(settings, None)))
  return json.loads(kept.read_text())


def ask(settings: Run, workdir: Path | None) -> list[float]:
  """Return the scores on held-out problems of a run's newest weights, or of the weights before training if `workdir` is None."""
  model = Model.open(settings)
  with ExitStack() as stack:
    held_out = RolloutSetup.open(settings, model.tokenizer, train=False).begin_evaluation(stack.enter_context)
    if workdir and any(workdir.glob('checkpoints/step_*')):  # a run that a guard stopped early has none
      params, _, scales = restore(model, settings, workdir)
    else:
      params, scales = model.load(), None
    return evaluate(settings, model, params, held_out, shown=0, scales=scales)['scores']


def resolved(changes: Mapping[str, Any]) -> Run:
  """Return the settings of a run that differ from the defaults in `changes`, without those of controls.py."""
  config = default_config()
  config.update_from_flattened_dict({key: value for key, value in changes.items() if key not in PATCHES})
  return resolve(config)


def clock(records: Sequence[Mapping[str, Any]], steps: np.ndarray) -> list[float]:
  """Return the seconds of rollouts, updates and syncs up to each of these steps, from the end of step COMPILING."""
  parts = [series(records, f'time/{name}') for name in ('rollout', 'learn', 'sync')]
  taken = sum((np.where(at > COMPILING, seconds, 0.0).cumsum() for at, seconds in parts), np.zeros(len(parts[0][0])))
  return [round(float(taken[parts[0][0] <= step][-1]), 3) for step in steps]


def averaged(steps: np.ndarray, values: np.ndarray) -> list[float | None]:
  """Return the mean over each block of EVERY steps, with four significant digits; None for a block without a value."""
  bins = (steps - 1) // EVERY
  found = (values[bins == i] for i in range(int(bins.max(initial=-1)) + 1))
  return [float(f'{each.mean():.4g}') if len(each) else None for each in found]
