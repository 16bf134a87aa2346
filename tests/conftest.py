"""Every test runs with the shapes and types in sprl's signatures checked at run time, and on the CPU unless told otherwise."""

import os

import jaxtyping
import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
jaxtyping.install_import_hook('sprl', 'typechecking.checked')


@pytest.fixture(scope='module')
def compiled_fast():
  """For files most of whose time is compilation, of which their tests ask nothing."""
  import jax  # after the hook and the platform

  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture(scope='module', autouse=True)
def programs_end_with_their_file():
  """Compiled programs are let go of: each holds memory maps, of which a process may have 65,530, and XLA crashes at the next."""
  yield
  import jax

  jax.clear_caches()
