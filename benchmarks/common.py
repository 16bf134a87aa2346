"""Code shared by the benchmarks: the machine and its measured ceilings, memory, peers, and the report.

A benchmark answers one question. It prints a table, then one line of JSON. --save writes both to benchmarks/results/NAME.json,
with the command, machine, versions and commit.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sprl.io.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'benchmarks' / 'results'
PACKAGES = ('sprl', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
CPU_FLAGS = ('avx2', 'avx512f', 'avx512_bf16', 'avx512_fp16', 'amx_tile', 'amx_bf16')


def machine() -> dict[str, Any]:
  """Return the machine and the package versions, without host name and paths."""
  accelerators = [device.device_kind for device in jax.devices() if device.platform != 'cpu']
  return {
    'cpu': _cpu_model(),
    'cores': cores(),
    'cpu_flags': sorted(_cpu_flags().intersection(CPU_FLAGS)),
    'memory_gib': round(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30, 1),
    'accelerators': accelerators,
    'system': f'{platform.system()} {platform.machine()}',
    'python': platform.python_version(),
    'versions': {name: _version(name) for name in PACKAGES},
  }


def cores() -> int:
  """Return the number of cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def commit() -> str:
  """Return the commit, followed by `+changes` if tracked files other than results differ; 'unknown' outside a git checkout."""
  head = _git('rev-parse', 'HEAD')
  if not head:
    return 'unknown'
  changes = _git('status', '--porcelain', '--untracked-files=no', '--', str(ROOT), f':(exclude){RESULTS}')
  return head + ('+changes' if changes else '')


def positive(text: str) -> int:
  """Return the number of an argument, for argparse. Raises ArgumentTypeError if it is no whole number from 1 on."""
  if not text.strip().isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'found {text!r}; expected a whole number from 1 on')
  return int(text)


def several(text: str) -> list[int]:
  """Return the numbers of an argument, which commas separate, for argparse. Raises ArgumentTypeError as `positive` does."""
  return [positive(part) for part in text.split(',')]


def memory_bandwidth(megabytes: int = 256, repeats: int = 5) -> float:
  """Return the bytes per second that all cores copy together, the best of `repeats`. Reads and writes both count."""
  parts = cores()
  source = np.ones((parts, megabytes * 2**20 // parts), np.uint8)
  target = np.zeros_like(source)
  with ThreadPoolExecutor(parts) as pool:
    seconds = best_of(repeats, lambda: list(pool.map(np.copyto, target, source)))
  return 2 * source.nbytes / seconds


def matmul_rate(dtype: jnp.dtype | str, size: int = 2048, repeats: int = 5) -> float:
  """Return the FLOP per second of a square matrix product on the default device, the best of `repeats`."""
  x = jnp.ones((size, size), dtype)
  product = jax.jit(jnp.matmul)
  jax.block_until_ready(product(x, x))
  return 2 * size**3 / best_of(repeats, lambda: jax.block_until_ready(product(x, x)))


def best_of(repeats: int, action: Callable[[], Any]) -> float:
  """Return the seconds of the fastest of `repeats` calls."""
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    action()
    times.append(time.perf_counter() - start)
  return min(times)


def peak_memory() -> int:
  """Return the peak resident memory of this process, in bytes.

  VmHWM is preferred to ru_maxrss: on Linux a process inherits ru_maxrss from its parent, so it would include the parent's memory.
  """
  status = Path('/proc/self/status')
  if status.exists():
    line = next(line for line in status.read_text().splitlines() if line.startswith('VmHWM'))
    return int(line.split()[1]) * 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


@contextlib.contextmanager
def sampled_memory(pid: int | None = None, period: float = 0.05) -> Iterator[Callable[[], int]]:
  """Sample the memory of a process (default: this one) and its descendants; yield a function that returns the peak in bytes.

  A page that several processes share counts once per process, so the memory of a program with workers is never understated.
  """
  import psutil  # imported late: the checks of a bare GPU image do not need it

  def resident(process: psutil.Process) -> int:
    try:
      return process.memory_info().rss
    except psutil.Error:  # the process ended meanwhile
      return 0

  watched = psutil.Process(pid)
  peak = 0
  done = threading.Event()

  def watch() -> None:
    nonlocal peak
    while not done.is_set():
      with contextlib.suppress(psutil.Error):
        peak = max(peak, sum(resident(process) for process in [watched, *watched.children(recursive=True)]))
      done.wait(period)

  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  try:
    yield lambda: peak
  finally:
    done.set()
    thread.join()


def peer(script: str, *arguments: object, limit: float | None = None) -> dict[str, Any]:
  """Run benchmarks/peers/`script` under the reference interpreter; return the JSON of its last line and `sampled_rss_bytes`.

  The interpreter is SPRL_REFERENCE_PYTHON, or the one that `make reference` installs. Raises SystemExit if there is none, or if
  the script fails or takes more than `limit` seconds.
  """
  python = os.environ.get('SPRL_REFERENCE_PYTHON', str(ROOT / '.venv-reference' / 'bin' / 'python'))
  if not Path(python).exists():
    raise SystemExit(f'no reference interpreter at {python}: run `make reference`, or set SPRL_REFERENCE_PYTHON')
  environment = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'PYTHONHOME')}
  command = [python, str(ROOT / 'benchmarks' / 'peers' / script), *map(str, arguments)]
  with (
    subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
    sampled_memory(process.pid) as peak,
  ):
    try:
      output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
      process.kill()
      raise SystemExit(f'{script} took more than {limit:g} s') from None
  if process.returncode:
    raise SystemExit(f'{script} failed with status {process.returncode}; its error message is above')
  return {**json.loads(output.splitlines()[-1]), 'sampled_rss_bytes': peak()}


def paired_gains(
  measured: Mapping[str, Sequence[Mapping[str, Any]]], arm: str, base: str, cost: str = 'seconds'
) -> dict[str, float]:
  """Return the gains of `arm` over `base`, ratios of `cost` paired by run: their mean, minimum and maximum."""
  gains = [slow[cost] / fast[cost] for slow, fast in zip(measured[base], measured[arm])]
  return {'gain': float(np.mean(gains)), 'least': min(gains), 'most': max(gains)}


def report(name: str, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], save: bool = False) -> None:
  """Print `rows` as a table (columns: the keys of the first row), then `result` as one line of JSON; `save` records both."""
  columns = list(rows[0])
  cells = [columns, *([_shown(row.get(column)) for column in columns] for row in rows)]
  widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
  for line in cells:
    print('  '.join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]))
  if save:
    record(name, rows, result)
  print(json.dumps(dict(result)), flush=True)


def record(name: str, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any], folder: Path = RESULTS) -> None:
  """Write FOLDER/NAME.json: rows and result, with the command, machine, versions and commit."""
  source = {'benchmark': name, 'command': command_line(), 'commit': commit(), 'machine': machine()}
  folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps({**source, 'result': dict(result), 'rows': list(rows)}, indent=2)
  # Lists of numbers take a line each, not a line a number.
  text = re.sub(r'\[[-+\d.eE,\s]*\]', lambda found: ' '.join(found[0].split()).replace('[ ', '[').replace(' ]', ']'), text)
  write_text(folder / f'{name}.json', text + '\n')


def _shown(value: Any) -> str:
  if isinstance(value, float):
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.4g}'
  return '-' if value is None else f'{value:,}' if isinstance(value, int) else str(value)


def command_line() -> str:
  """Return the command line of the run; absolute paths are cut to their last part."""
  shown = []
  for argument in sys.argv[1:]:
    flag, equals, value = argument.rpartition('=')
    shown.append(flag + equals + (Path(value).name if os.path.isabs(value) else value))
  script = Path(sys.argv[0]).resolve()
  return ' '.join(['python', str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name, *shown])


def _cpu_model() -> str:
  info = Path('/proc/cpuinfo')
  for line in info.read_text().splitlines() if info.exists() else []:
    if line.startswith('model name'):
      return line.partition(':')[2].strip()
  return platform.processor() or 'unknown'


def _cpu_flags() -> set[str]:
  info = Path('/proc/cpuinfo')
  for line in info.read_text().splitlines() if info.exists() else []:
    if line.startswith(('flags', 'Features')):
      return set(line.partition(':')[2].split())
  return set()


def _version(package: str) -> str | None:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return None


def _git(*arguments: str) -> str:
  try:
    return subprocess.run(['git', '-C', str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return ''
