"""`import sprl` is quick and imports nothing; its names are imported when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sprl

ROOT = Path(__file__).parents[1]
IMPORTS = """
import sys, time

start = time.perf_counter()
import sprl
ours = time.perf_counter() - start
early = [name for name in ('jax', 'numpy', 'matplotlib', 'sprl.config') if name in sys.modules]
sprl.SettingsError
later = [name for name in ('jax', 'sprl.train') if name in sys.modules]
start = time.perf_counter()
import jax
jaxs = time.perf_counter() - start
print(early, later, ours < 0.2 * jaxs)
"""


def test_import_takes_a_fraction_of_the_time_of_jax_and_does_not_import_it():
  start = [sys.executable, '-c', IMPORTS]
  outs = [subprocess.run(start, cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(3)]
  assert {out.rpartition(' ')[0] for out in outs} == {'[] []'}
  assert any(out.endswith('True\n') for out in outs)  # other processes may delay one of them


def test_every_name_is_there_and_typed():
  """Type checkers read the imports under TYPE_CHECKING; Python reads the table of homes. The two name the same things."""
  tree = ast.parse((ROOT / 'sprl/__init__.py').read_text())
  typed = {
    alias.asname: node.module
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.asname
  }
  homes = {name: getattr(sprl, name).__module__ for name in dir(sprl) if name != '__version__'}
  assert homes == typed
  assert len(homes) > 8
  with pytest.raises(AttributeError, match='nothing'):
    sprl.nothing  # noqa: B018
