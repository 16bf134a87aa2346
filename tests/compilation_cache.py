"""The compilation cache of the tests (conftest.py), for processes that they start."""

import jax


def variables() -> dict[str, str]:
  """Return environment variables that name the cache. For processes with one CPU device only: see conftest.py."""
  folder = jax.config.jax_compilation_cache_dir
  return {'JAX_COMPILATION_CACHE_DIR': folder, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'} if folder else {}
