"""Functions of users in place of sprl's: an eviction method, a loss or an advantage estimator, named `file.py:NAME`."""

from sprl.cache import eviction
from sprl.config import Run
from sprl.foreign import check_unchanged, checksum, expanded, split_reference
from sprl.objective import advantages, losses


def check_own_functions(run: Run) -> None:
  """Raise SettingsError if the file of a user's function does not exist, fails or lacks it, or has changed since its import."""
  eviction.method(run.cache.method)
  losses.function_of(run.loss)
  advantages.estimator(run.advantage)
  own = {
    'cache.method': run.cache.method, 'loss.variant': run.loss.variant, 'advantage.estimator': run.advantage.estimator,
    'task.name': run.task.name or '',
  }  # fmt: skip
  for setting, name in own.items():
    if (found := split_reference(name)) and (path := expanded(found[0])).is_file():
      check_unchanged(f'config.{setting} = {name!r}', path)


def checksums(run: Run) -> dict[str, str]:
  """Return a checksum of the file of each user's function, environment or agent, by its name in the settings."""
  names = (run.cache.method, run.loss.variant, run.advantage.estimator, run.task.name or '')
  files = {name: expanded(found[0]) for name in names if (found := split_reference(name))}
  return {name: checksum(path.read_bytes()) for name, path in files.items() if path.is_file()}
