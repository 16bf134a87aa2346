"""Run Python where only the packages of a bare JAX GPU image can be imported: `python tests/bare.py SCRIPT ARGUMENT...`.

The image has jax, flax, optax, orbax-checkpoint, numpy, jaxtyping and ml_dtypes. pip installs their dependencies with them.
"""

import importlib.abc
import re
import runpy
import sys
from importlib import metadata
from pathlib import Path

IMAGE = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'jaxtyping', 'ml-dtypes')


def with_dependencies(packages):
  """Return the packages and all that pip would install for them, as far as they are installed here."""
  found, asked = set(), list(packages)
  while asked:
    name = asked.pop()
    if name in found:
      continue
    try:
      requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # of another platform
      continue
    found.add(name)
    asked += [normal(re.split(r'[\s;\[<>=!~(]', each)[0]) for each in requirements if 'extra ==' not in each]
  return found


def normal(name):
  return re.sub(r'[-_.]+', '-', name).lower()


class OnlyTheImage(importlib.abc.MetaPathFinder):
  """Refuses modules of packages that the image lacks."""

  def __init__(self):
    allowed = with_dependencies(IMAGE)
    owners = metadata.packages_distributions()
    self.refused = {module for module, packages in owners.items() if not allowed.intersection(map(normal, packages))} - {'sprl'}

  def find_spec(self, name, path=None, target=None):
    if name.partition('.')[0] in self.refused:
      raise ModuleNotFoundError(f'{name}: a bare JAX image lacks it', name=name)


if __name__ == '__main__':
  sys.meta_path.insert(0, OnlyTheImage())
  del sys.argv[0]
  sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
  runpy.run_path(sys.argv[0], run_name='__main__')
