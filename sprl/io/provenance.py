"""When a run starts, and the commit that it runs."""

import subprocess
import time
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
  """Return the time in seconds since 1970, and the commit of the checkout that holds this package (None without one)."""
  return {'time': round(time.time(), 3), 'commit': commit(Path(__file__).parents[1])}


def commit(package: Path) -> str | None:
  """Return the commit of the checkout that holds a package, with `+changes` if files of the package differ from it.

  None for an installed wheel, also if it lies inside the checkout of another project.
  """
  if _git(package, 'ls-files', '__init__.py') != '__init__.py':
    return None
  changed = _git(package, 'status', '--porcelain', '--untracked-files=no', '--', '.')
  return (_git(package, 'rev-parse', 'HEAD') or '')[:12] + ('+changes' if changed else '')


def _git(folder: Path, *arguments: str) -> str | None:
  """Return the output of a git command; None if it fails or git is not installed."""
  try:
    done = subprocess.run(['git', '-C', str(folder), *arguments], capture_output=True, text=True, timeout=10)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout.strip() if done.returncode == 0 else None
