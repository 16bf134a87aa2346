"""The papers' claims, tested by training small models.

    python benchmarks/claims --list
    python benchmarks/claims NAME --minutes 60          # start or continue an experiment
    python benchmarks/claims NAME --report              # verdicts and figure of the saved result
    python benchmarks/claims --page                     # docs/claims.md from all saved results

An experiment (experiments/NAME.py) fixes its arms, seeds, thresholds and held-out measure before it runs. Results go to
benchmarks/results/claims/NAME.json. The command does the runs that this file lacks, a run on each core at a time, until --minutes
are over. On a GPU it does one run at a time. A run that was interrupted continues from its checkpoint in --folder.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from claims import figure, page
from claims.experiment import Experiment, count, find, names
from claims.verdict import judged
from claims.worker import result_file, stop_file
from common import RESULTS, ROOT, commit, cores, positive, record, report

SAVED = RESULTS / 'claims'
POLL = 5.0  # seconds between two checks for new records
Found = dict[str, dict[int, dict[str, Any]]]  # the records that this command has, as `Records`


def main() -> None:
  """Run, report, or write the page."""
  parser = argparse.ArgumentParser(prog='claims', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('name', nargs='?', choices=names(), metavar='NAME', help=f'one of {", ".join(names())}')
  parser.add_argument('--list', action='store_true', help='list the experiments and their runs')
  parser.add_argument('--minutes', type=positive, help='stop after this time; the next call continues a run in progress')
  parser.add_argument('--folder', type=Path, default=Path('runs/claims'), help='work directories of the runs')
  parser.add_argument('--report', action='store_true', help='run nothing; print verdicts and draw the figure')
  parser.add_argument('--page', action='store_true', help='run nothing; write docs/claims.md')
  args = parser.parse_args()
  if args.list:
    return listed()
  if args.page:
    return page.write({name: saved(find(name)) for name in names()})
  if args.name is None:
    parser.error('expected NAME, --list or --page')
  if args.folder.exists() and not args.folder.is_dir():
    parser.error(f'--folder = {args.folder}: expected a folder')
  experiment = find(args.name)
  records = saved(experiment)
  if missing := [path for path in map(Path, experiment.task.warm) if path.is_absolute() and not path.exists()]:
    raise SystemExit(f'{missing[0]}: no such model; in benchmarks/: python -m claims.warm {experiment.task.name}')
  if not args.report:
    if commit().endswith('+changes'):
      raise SystemExit('the checkout has uncommitted changes: expected none, because a result names the commit of its runs')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the workers end too
    run(experiment, records, args.folder.absolute() / f'{args.name}-{experiment.plan()}', args.minutes)
  rows = [row for claim in experiment.claims for row in judged(claim, experiment, records)]
  report(experiment.name, rows or [{'claims': 'none'}], {'runs': count(records)})
  if count(records):
    figure.draw(experiment, records)


def listed() -> None:
  """Print the experiments, how many of their runs are saved, and the hours that all runs take."""
  for experiment in map(find, names()):
    done = count(saved(experiment))
    print(
      f'{experiment.name}: {experiment.question} {done} of {len(experiment.runs)} runs; all take about '
      f'{experiment.hours:g} hours of {experiment.device}'
    )


# --- runs ------------------------------------------------------------------------------------------------------------


def run(experiment: Experiment, records: Found, folder: Path, minutes: int | None) -> None:
  """Do the missing runs with a worker on each core, or one on the GPU, and save each record when it is there."""
  folder.mkdir(parents=True, exist_ok=True)
  if not (folder / 'task').exists():  # renamed when complete: this process may end while it writes the files
    shutil.rmtree(folder / 'draft', ignore_errors=True)
    experiment.task.write(folder / 'draft')
    (folder / 'draft').rename(folder / 'task')
  for arm, of_arm in records.items():
    for seed, found in of_arm.items():
      result_file(folder, arm, seed).write_text(json.dumps(found))
  end = time.monotonic() + 60 * minutes if minutes else float('inf')
  start = [sys.executable, '-c', 'from claims.worker import main; main()', experiment.name, str(folder)]
  paths = [str(ROOT / 'benchmarks'), str(ROOT), os.environ.get('PYTHONPATH', '')]
  compiled = {'JAX_COMPILATION_CACHE_DIR': str(folder.parent / 'compiled'), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  environment = {**compiled, **os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}
  places = ['gpu']
  if experiment.device == 'one core':
    environment['JAX_PLATFORMS'] = 'cpu'
    places = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else range(cores())
  workers = [subprocess.Popen([*start, str(place)], env=environment, stdout=sys.stderr) for place in places]
  try:
    while any(worker.poll() is None for worker in workers) and time.monotonic() < end:
      time.sleep(POLL)
      collect(experiment, records, folder)
  finally:
    end_file = stop_file(folder, os.getpid())
    end_file.touch()  # a signal between two runs does not prevent the next one; this file does
    for worker in workers:
      worker.send_signal(signal.SIGTERM)
    statuses = [worker.wait() for worker in workers]
    end_file.unlink()
    collect(experiment, records, folder)
  if failed := set(statuses) - {0, -signal.SIGTERM}:
    raise SystemExit(f'{experiment.name}: a worker ended with status {failed.pop()}; its message is above')


def collect(experiment: Experiment, records: Found, folder: Path) -> None:
  """Save the records that workers have written since the last time."""
  before = count(records)
  for arm, seed in experiment.runs:
    path = result_file(folder, arm, seed)
    if seed not in records.setdefault(arm, {}) and path.exists():
      records[arm][seed] = json.loads(path.read_text())
  if count(records) > before:
    kept = {arm: {str(seed): found for seed, found in sorted(of.items())} for arm, of in records.items()}
    result = {'plan': experiment.plan(), 'steps': experiment.steps, 'records': kept}
    rows = [row for claim in experiment.claims for row in judged(claim, experiment, records)]
    # JSON has no infinite numbers: the interval of a comparison with one seed has no bounds.
    rows = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    record(experiment.name, rows, result, SAVED)


def saved(experiment: Experiment) -> Found:
  """Return the saved records. Raises SystemExit if they were made under another plan."""
  path = SAVED / f'{experiment.name}.json'
  if not path.exists():
    return {}
  result = json.loads(path.read_text())['result']
  if result['plan'] != experiment.plan():
    raise SystemExit(
      f'{path}: its runs were made under another plan (arms, settings, steps or thresholds). A plan is fixed before its runs: '
      'restore the experiment, or delete the result and run it again'
    )
  return {arm: {int(seed): found for seed, found in of.items()} for arm, of in result['records'].items()}
