"""The floors of the README: a room imports only from floors below its own."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUND = ('config', 'types')
FILES = (*GROUND, 'config_checks', 'config_reader', 'model', 'mismatch')
FLOORS = (
  GROUND,
  ('config_checks',),
  ('config_reader',),
  ('sharding', 'distributed'),
  ('kernels',),
  ('quant',),
  ('models', 'objective'),
  ('cache',),
  ('sampler', 'tasks', 'io'),
  ('model',),
  ('rollout', 'learner'),
  ('mismatch', 'planning'),
)


def rooms_of(path):
  """The rooms that a file imports from."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').partition('.')[0] == 'sprl':
      yield from (node.module.split('.')[1:2] or [name.name for name in node.names])
    if isinstance(node, ast.Import):
      yield from (name.name.split('.')[1] for name in node.names if name.name.startswith('sprl.'))


def test_a_room_imports_only_from_floors_below_its_own():
  floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
  upward = [
    f'{path.relative_to(ROOT)}: {other}'
    for path in sorted((ROOT / 'sprl').rglob('*.py'))
    if (room := path.relative_to(ROOT / 'sprl').parts[0].removesuffix('.py')) in floor
    for other in rooms_of(path)
    if other != room and floor.get(other, len(FLOORS)) >= floor[room]
  ]
  assert upward == []


def test_every_room_has_a_floor():
  folders = {path.name for path in (ROOT / 'sprl').iterdir() if (path / '__init__.py').exists()}
  assert folders | set(FILES) == {room for rooms in FLOORS for room in rooms}
