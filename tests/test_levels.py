"""Imports follow the levels of docs/contributing.md: a module imports only from levels below its own."""

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEVELS = (  # the lowest first; packages and modules of sprl/
  ('config', 'types'),
  ('foreign',),
  ('config_checks', 'presets'),
  ('config_reader',),
  ('sharding', 'distributed'),
  ('kernels',),
  ('quant',),
  ('models', 'objective'),
  ('cache', 'guards'),
  ('sampler', 'tasks', 'io'),
  ('model', 'own_functions'),
  ('agents',),
  ('rollout', 'learner'),
  ('ledger', 'planning', 'command_line', 'other_data', 'remarks'),
  ('session',),
  ('hooks', 'summary'),
  ('train',),
  ('api',),
  ('main', 'evaluate', 'serve', 'sft', 'export', 'plan', 'report'),
  ('__init__',),  # imports the names of `api` when they are used
)
LEVEL = {module: i for i, modules in enumerate(LEVELS) for module in modules}


def imported_modules(path):
  """Yield the modules of sprl, such as `config` and `models`, that a file imports from."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').partition('.')[0] == 'sprl':
      yield from (node.module.split('.')[1:2] or [name.name for name in node.names])
    if isinstance(node, ast.Import):
      yield from (name.name.split('.')[1] for name in node.names if name.name.startswith('sprl.'))


def test_a_module_imports_only_from_levels_below_its_own():
  upward = [
    f'{path.relative_to(ROOT)}: {other}'
    for path in sorted((ROOT / 'sprl').rglob('*.py'))
    if (module := path.relative_to(ROOT / 'sprl').parts[0].removesuffix('.py')) in LEVEL
    for other in imported_modules(path)
    if other != module and LEVEL.get(other, len(LEVELS)) >= LEVEL[module]
  ]
  assert upward == []


def test_every_module_has_a_level():
  folders = {path.name for path in (ROOT / 'sprl').iterdir() if (path / '__init__.py').exists()}
  assert folders | {path.stem for path in (ROOT / 'sprl').glob('*.py')} == set(LEVEL)


def test_the_diagram_of_the_levels_agrees():
  """A box of the diagram has all modules of one or more levels; the boxes go down from the highest level."""
  text = (ROOT / 'docs/contributing.md').read_text()
  boxes = [re.split(r', | \| ', box) for box in re.findall(r'\w+\["([^"]+)"\]', text)]
  assert sorted(name for box in boxes for name in box) == sorted(set(LEVEL) - {'__init__'})
  levels = [[LEVEL[name] for name in box] for box in boxes]
  assert all(min(above) > max(below) for above, below in pairwise(levels))
