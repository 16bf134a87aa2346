"""Functions of users in place of sprl's: an eviction method, a loss or an advantage estimator, named `file.py:NAME`."""

import hashlib
from pathlib import Path

from sprl.cache import eviction
from sprl.config import Run
from sprl.foreign import split_reference
from sprl.objective import advantages, losses


def check_own_functions(run: Run) -> None:
  """Raise SettingsError if the file of a user's function does not exist, fails, or has no such function."""
  eviction.method(run.cache.method)
  losses.function_of(run.loss)
  advantages.estimator(run.advantage)


def checksums(run: Run) -> dict[str, str]:
  """Return a checksum of the file of each user's function, by its name in the settings."""
  found = {name: split_reference(name) for name in (run.cache.method, run.loss.variant, run.advantage.estimator)}
  return {name: hashlib.sha256(Path(each[0]).expanduser().read_bytes()).hexdigest()[:16] for name, each in found.items() if each}
