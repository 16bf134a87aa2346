"""Functions of users in place of sprl's: an eviction method, a loss or an advantage estimator, named `file.py:NAME`."""

from pathlib import Path

from sprl.cache import eviction
from sprl.config import Run
from sprl.foreign import check_unchanged, checksum, expanded, split_reference
from sprl.objective import advantages, losses


def check_own_functions(run: Run) -> None:
  """Raise SettingsError if the file of a user's function does not exist, fails or lacks it, or has changed since its import."""
  eviction.method(run.cache.method)
  losses.function_of(run.loss)
  advantages.estimator(run.advantage)
  for setting, (name, path) in _files(run).items():
    check_unchanged(f'config.{setting} = {name!r}', path)


def checksums(run: Run) -> dict[str, str]:
  """Return a checksum of the file of each user's function, environment or agent, and of those in task.args, by its name there."""
  return {name: checksum(path.read_bytes()) for name, path in _files(run).values()}


def _files(run: Run) -> dict[str, tuple[str, Path]]:
  """Return (`file.py:NAME`, the file) of each setting that names a user's function, environment or agent, if the file exists."""
  names = {
    'cache.method': run.cache.method, 'loss.variant': run.loss.variant, 'advantage.estimator': run.advantage.estimator,
    'task.name': run.task.name or '',
  }  # fmt: skip
  names |= {f'task.args[{key!r}]': value for key, value in run.task.args.items() if isinstance(value, str)}
  references = {setting: (name, expanded(found[0])) for setting, name in names.items() if (found := split_reference(name))}
  return {setting: (name, path) for setting, (name, path) in references.items() if path.is_file()}
