"""Every test runs with the shapes and types in sprl's signatures checked at run time, and on the CPU unless told otherwise."""

import hashlib
import os
import platform
from pathlib import Path

import jaxtyping
import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Compilation is most of a test's time, and halves without XLA's optional passes. Subprocesses inherit this.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
jaxtyping.install_import_hook('sprl', 'typechecking.checked')


def machine_key() -> str:
  """Return a short hash of the CPU's features: XLA's compiled CPU code may not run on a CPU that lacks some of them."""
  try:
    lines = Path('/proc/cpuinfo').read_text().splitlines()
    features = next(line for line in lines if line.startswith(('flags', 'Features')))
  except (OSError, StopIteration):
    features = platform.processor()
  return hashlib.sha256(f'{platform.machine()} {features}'.encode()).hexdigest()[:12]


def pytest_configure():
  """Keep compiled programs in `.cache/jax`, or in the folder that `SPRL_TEST_CACHE` names.

  The cache is set in this process only, not in the environment: a program for several CPU devices that is read from the cache
  loses the order of its collectives, and the subprocesses of some tests have several CPU devices.
  """
  if 'device_count' in os.environ.get('XLA_FLAGS', '') or 'JAX_NUM_CPU_DEVICES' in os.environ:
    return
  import jax
  import jaxlib

  root = Path(os.environ.get('SPRL_TEST_CACHE') or Path(__file__).resolve().parents[1] / '.cache' / 'jax')
  jax.config.update('jax_compilation_cache_dir', str(root / f'jaxlib-{jaxlib.__version__}-{machine_key()}'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


@pytest.fixture(scope='module')
def compiled_fast():
  """Deprecated: every file is compiled without optional passes now."""


@pytest.fixture(scope='module')
def optimised():
  """Compile a file's programs with all of XLA's passes: for files whose comparisons depend on them."""
  import jax  # after the hook and the platform

  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture(scope='module', autouse=True)
def programs_end_with_their_file():
  """Compiled programs are let go of: each holds memory maps, of which a process may have 65,530, and XLA crashes at the next."""
  yield
  import jax

  jax.clear_caches()
