"""The compilation cache of the tests: `.cache/jax`, or the folder that `SPRL_TEST_CACHE` names."""

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache


def machine_key() -> str:
  """Return a short hash of the CPU's features. XLA's CPU code may not run on a CPU that lacks one of them."""
  try:
    lines = Path('/proc/cpuinfo').read_text().splitlines()
    features = next(line for line in lines if line.startswith(('flags', 'Features')))
  except (OSError, StopIteration):
    features = platform.processor()
  return hashlib.sha256(f'{platform.machine()} {features}'.encode()).hexdigest()[:12]


def use() -> None:
  """Let this process use the cache."""
  root = Path(os.environ.get('SPRL_TEST_CACHE') or Path(__file__).resolve().parents[1] / '.cache' / 'jax')
  jax.config.update('jax_compilation_cache_dir', str(root / f'jaxlib-{jaxlib.__version__}-{machine_key()}'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


@contextmanager
def in_use() -> Iterator[None]:
  """Use the cache for a while. For programs of one device, in a process with several CPU devices: see conftest.py."""
  use()
  yield
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()


def variables() -> dict[str, str]:
  """Return environment variables that name the cache, if any, for processes that tests start.

  Only for processes with one CPU device: see conftest.py.
  """
  folder = jax.config.jax_compilation_cache_dir
  return {'JAX_COMPILATION_CACHE_DIR': folder, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'} if folder else {}
