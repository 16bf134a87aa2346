"""starts.jsonl: one line for each start of a run: when, with which version, and on which devices.

metrics.jsonl has none of this, so that the lines of a resumed run equal those of an uninterrupted one.
"""

import json
import os
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

import sprl
from sprl.io import files

_FILE = 'starts.jsonl'


def record_start(workdir: Path, resume_step: int | None) -> None:
  """Append a line for this start, which continues from the checkpoint of `resume_step`. None begins a new file."""
  path = workdir / _FILE
  before = path.read_text(encoding='utf-8') if resume_step is not None and path.exists() else ''
  files.write_text(path, before + json.dumps({'resume_step': resume_step, **provenance()}, sort_keys=True) + '\n')


def read_starts(workdir: Path) -> list[dict[str, Any]]:
  """Return the lines, oldest first; [] for a run of an older version, which wrote none."""
  path = workdir / _FILE
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()] if path.exists() else []


def provenance() -> dict[str, Any]:
  """Return the time in seconds since 1970, versions, the commit of a git checkout (else None), devices and cores."""
  return {
    'time': time.time(),
    'sprl': sprl.__version__,
    'commit': commit(),
    'jax': jax.__version__,
    'python': platform.python_version(),
    'devices': dict(Counter(device.device_kind for device in jax.devices())),
    'processes': jax.process_count(),
    'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
  }


def commit() -> str | None:
  """Return the commit of the checkout that holds this package, with `+changes` if its files differ from it; None for a wheel."""
  folder = Path(__file__).parents[1]
  if _git(folder, 'ls-files', '__init__.py') != '__init__.py':  # no checkout, or one of another project
    return None
  changed = _git(folder, 'status', '--porcelain', '--untracked-files=no', '--', '.')
  return (_git(folder, 'rev-parse', 'HEAD') or '')[:12] + ('+changes' if changed else '')


def _git(folder: Path, *arguments: str) -> str | None:
  """Return the output of a git command; None if it fails or git is not installed."""
  try:
    done = subprocess.run(['git', '-C', str(folder), *arguments], capture_output=True, text=True, timeout=10)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout.strip() if done.returncode == 0 else None
