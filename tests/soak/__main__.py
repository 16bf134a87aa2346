"""python tests/soak kills [VARIANT ...] [--minutes 5] [--seed 0] [--jobs 2] [--folder FOLDER] [--save]
python tests/soak faults [options of pytest]

kills: kills runs with SIGKILL at random moments, starts them again, and checks each complete run. A synchronous run must equal an
uninterrupted one bit for bit, unless a killed worker cost a grade. An asynchronous run must train on every group exactly once.
Each variant (variants.py) gets an equal share of the time. No run starts after the minutes are over; runs in progress are
completed. A violation gives exit status 1, and the folder of its run is kept. A call that kills nothing or checks no complete run
gives status 1 too.

Ctrl-C, SIGTERM and an error end the soak early. The figures of the runs that were complete are reported and saved.

--folder keeps the uninterrupted runs and compiled programs for later calls. --save adds the figures to
benchmarks/results/soak.json. If the code (sprl/, tests/soak/) has changed, it replaces them. A call that checked no run and
found no violation saves nothing.

faults: a full disk, a read-only folder, a clock that jumps, stopped processes, damaged files (tests/end_to_end/test_faults.py).
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / 'benchmarks'), str(HERE.parent), str(HERE.parent / 'end_to_end')]
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import arguments  # noqa: E402  (the lines above make these importable)
import common  # noqa: E402
import pytest  # noqa: E402
import tiny  # noqa: E402
from kills import Campaign, Tally  # noqa: E402
from starts import HELPERS  # noqa: E402
from variants import VARIANTS  # noqa: E402

RESULT = common.RESULTS / 'soak.json'


def main() -> int:
  parser = argparse.ArgumentParser(usage=__doc__)
  commands = parser.add_subparsers(dest='command', required=True)
  killing = commands.add_parser('kills')
  killing.add_argument('variants', nargs='*', metavar='VARIANT', help=', '.join(VARIANTS))
  killing.add_argument('--minutes', type=arguments.minutes, default=5.0)
  killing.add_argument('--seed', type=int, default=0)
  killing.add_argument('--jobs', type=common.positive, default=2, help='runs at a time')
  killing.add_argument('--folder', type=Path)
  killing.add_argument('--save', action='store_true')
  commands.add_parser('faults', add_help=False)
  given, others = parser.parse_known_args()
  if given.command == 'faults':
    return pytest.main([str(ROOT / 'tests/end_to_end/test_faults.py'), '-m', '', *others])
  if others or (unknown := [name for name in given.variants if name not in VARIANTS]):
    parser.error(f'{others or unknown}: expected variants among {", ".join(VARIANTS)}, and the options above')
  folder = (given.folder or Path(tempfile.mkdtemp(prefix='soak-'))).absolute()
  stop = threading.Event()
  campaigns = campaigns_of(given.variants or list(VARIANTS), folder, given.seed, stop)
  signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
  try:
    kills(campaigns, given.minutes, given.jobs, stop)
  finally:
    tallies = {campaign.variant.name: campaign.tally for campaign in campaigns}
    report(tallies, given.save)
    violations = [each for campaign in campaigns for each in campaign.tally.violations]
    print('\n'.join(violations or ['no violation']))
    if violations:
      print(f'the runs are in {folder}', flush=True)
    if idle := [name for name, tally in tallies.items() if not tally.runs]:
      print(f'no complete run was checked of {", ".join(idle)}', flush=True)
    if not (found := showed_something(tallies)):
      print('expected at least one kill and one checked run: give more --minutes', flush=True)
  return 0 if found and not violations else 1


def showed_something(tallies: Mapping[str, Tally]) -> bool:
  """Return whether a run was killed and a complete run was checked."""
  return any(tally.kills.total() for tally in tallies.values()) and any(tally.runs for tally in tallies.values())


def campaigns_of(names: list[str], folder: Path, seed: int, stop: threading.Event) -> list[Campaign]:
  """Return the campaigns of these variants. They write to a part of `folder` for this code."""
  of_code = folder / code()[:12]
  config = of_code / 'inputs' / 'config.py'
  if not config.exists():
    config.parent.mkdir(parents=True, exist_ok=True)
    tiny.write_inputs(config.parent, num_hidden_layers=1)
  return [Campaign(VARIANTS[name], config, of_code, folder / 'compiled', seed, say, stop) for name in names]


def kills(campaigns: list[Campaign], minutes: float, jobs: int, stop: threading.Event) -> None:
  """Kill runs of the campaigns for `minutes`, `jobs` runs at a time. Their tallies have the figures, also if this raises."""
  deadline = time.monotonic() + 60 * minutes
  free, lock = list(campaigns), threading.Lock()

  def work() -> None:
    while time.monotonic() < deadline:
      with lock:
        campaign = min(free, key=lambda c: c.spent, default=None)
        if campaign is None:
          return  # fewer variants than jobs
        free.remove(campaign)
      campaign.advance(deadline)
      with lock:
        free.append(campaign)

  with ThreadPoolExecutor(jobs) as pool:
    try:
      for done in as_completed([pool.submit(work) for _ in range(jobs)]):
        done.result()
    except BaseException:
      stop.set()  # the runs in progress are killed; leaving the pool waits for that
      raise


def say(text: str) -> None:
  print(text, flush=True)


def code() -> str:
  """A hash of the code that the figures describe."""
  files = sorted([*(ROOT / 'sprl').rglob('*.py'), *(file for file in HERE.glob('*.py') if not file.name.startswith('test_'))])
  return hashlib.sha256(b'\0'.join(file.read_bytes() for file in files)).hexdigest()


def report(tallies: dict[str, Tally], save: bool) -> None:
  """Print the figures of this call. `save` adds them to those of earlier calls with the same code, if a run was checked."""
  rows = [
    {'variant': name, **vars(tally), 'kills': dict(tally.kills), 'phases': dict(tally.phases)} for name, tally in tallies.items()
  ]
  total = sum(sum(row['kills'].values()) for row in rows)
  common.report('soak', [_flat(row) for row in rows], {'kills': total, 'phases': dict(sum_of(rows, 'phases'))})
  if save and any(tally.runs or tally.violations for tally in tallies.values()):
    earlier = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    same = earlier.get('result', {}).get('code') == code()
    rows, calls = (merged(earlier['rows'], rows), earlier['result']['calls']) if same else (rows, [])
    calls = [*calls, {'command': common.command_line(), 'commit': common.commit(), 'kills': total}]
    result = {
      'code': code(), 'kills': sum(sum_of(rows, 'kills').values()), 'violations': sum(len(row['violations']) for row in rows),
      'kinds': dict(sum_of(rows, 'kills')), 'phases': dict(sum_of(rows, 'phases')), 'calls': calls,
    }  # fmt: skip
    common.record('soak', rows, result)


def merged(earlier: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Return the rows of all variants, with the earlier and new figures of each variant added up."""
  found = {row['variant']: row for row in earlier}
  for row in new:
    old = found.get(row['variant'])
    if old is not None:
      row = {
        **{'variant': row['variant']},
        **{name: dict(sum_of([old, row], name)) for name in ('kills', 'phases')},
        **{name: old[name] + row[name] for name in ('starts', 'runs', 'violations')},
      }
    found[row['variant']] = row
  return list(found.values())


def sum_of(rows: list[dict[str, Any]], name: str) -> Counter[str]:
  return sum((Counter(row[name]) for row in rows), Counter())


def _flat(row: dict[str, Any]) -> dict[str, Any]:
  kinds = {kind: row['kills'].get(kind, 0) for kind in ('run', 'main', 'process', *HELPERS)}
  return {'variant': row['variant'], **kinds, 'starts': row['starts'], 'runs': row['runs'], 'violations': len(row['violations'])}


if __name__ == '__main__':
  sys.exit(main())
