"""Let the processes that tests start use the compilation cache of the tests (conftest.py)."""

import jax


def variables() -> dict[str, str]:
  """Return environment variables that name the cache, if any. Only for processes with one CPU device: see conftest.py."""
  folder = jax.config.jax_compilation_cache_dir
  return {'JAX_COMPILATION_CACHE_DIR': folder, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'} if folder else {}
