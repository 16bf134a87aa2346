"""Settings of the test suite: signatures are checked at run time, tests run on the CPU, compiled programs are cached.

The examples of hypothesis are the same in every run.
"""

import os

import hypothesis
import jaxtyping
import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Compilation takes most of a test's time. Without XLA's optional passes it takes half. Subprocesses inherit this setting.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
# Threads of XLA's CPU client. Pallas's interpreter blocks one for each warpgroup of a cluster that waits, so a cluster of eight
# programs with three warpgroups each would hang on a machine of few cores.
os.environ.setdefault('NPROC', '32')
jaxtyping.install_import_hook('sprl', 'typechecking.checked')
hypothesis.settings.register_profile('sprl', derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile('sprl')


def pytest_collection_modifyitems(items):
  """Start with tests/sharding: its files take minutes each, and the last one would keep one core alone busy."""
  items.sort(key=lambda item: 'sharding' not in item.path.parts)


def pytest_configure():
  """Cache compiled programs in `.cache/jax`, or in the folder that `SPRL_TEST_CACHE` names.

  Only this process uses the cache; the environment of its subprocesses does not name it. Some subprocesses have several CPU
  devices. A program for several CPU devices loses the order of its collectives when XLA reads it from the cache.
  """
  if 'device_count' in os.environ.get('XLA_FLAGS', '') or 'JAX_NUM_CPU_DEVICES' in os.environ:
    return
  import compilation_cache  # imports jax

  compilation_cache.use()


@pytest.fixture(scope='module')
def optimised():
  """Compile the file's programs with all of XLA's passes, for comparisons that depend on them."""
  import jax  # after the import hook and the platform are set

  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture
def no_pauses(monkeypatch):
  """Failed episodes are tried again at once."""
  monkeypatch.setattr('sprl.tasks.worker_pool.PAUSES', (0.0,))


@pytest.fixture(scope='module', autouse=True)
def free_compiled_programs():
  """Free compiled programs after each file: they hold memory maps, and XLA crashes if a process needs more than 65,530."""
  yield
  import jax

  jax.clear_caches()
