"""Environments that are a class in a user's file."""

import sys

import pytest

from sprl.config import SettingsError
from sprl.tasks.environments import registry
from sprl.tasks.environments.protocol import checked_reset, checked_step

OWN = """
import dataclasses
import neighbour

@dataclasses.dataclass
class Own:
  bonus: float = neighbour.BONUS

  def reset(self, seed):
    return f'seed {seed}', {}

  def step(self, action):
    return 'seen', self.bonus, True, False, {}

class Failing(Own):
  def __init__(self, when):
    raise OSError(f'no database, {when}')

class Half:
  def reset(self, seed):
    return '', {}

class Mute(Half):
  step = 3

class Leaving(Own):
  def __init__(self):
    raise SystemExit(0)

function = Own
number = 3
"""


@pytest.fixture
def own(tmp_path):
  (tmp_path / 'neighbour.py').write_text('BONUS = 0.25')
  (tmp_path / 'own.py').write_text(OWN)
  (tmp_path / 'broken.py').write_text('import no_such_module_at_all')
  (tmp_path / 'leaving.py').write_text('import sys; sys.exit(2)')
  (tmp_path / 'base.py').write_text('class Base(BaseException): pass\nraise Base("x")')
  yield str(tmp_path)
  sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
  sys.modules.pop('neighbour', None)


def test_a_users_class_is_made_with_its_arguments(own):
  env = registry.make(f'{own}/own.py:Own', {'bonus': 2})
  assert checked_reset(env, 7) == ('seed 7', {})
  assert checked_step(env, 'a').reward == 2.0
  assert checked_step(registry.make(f'{own}/own.py:Own', {}), 'a').reward == 0.25
  assert type(registry.make(f'{own}/own.py:Own', {})) is type(env)  # the file runs once
  assert registry.takes(f'{own}/own.py:Own', 'bonus')
  assert not registry.takes(f'{own}/own.py:Own', 'split')


@pytest.mark.parametrize(
  ('name', 'args', 'complaint'),
  [
    ('none.py:Own', {}, r'task\.name = .*none\.py: no such file'),
    ('own.py:Other', {}, r'own\.py has no Other; it has Failing, Half, Leaving, Mute, Own'),
    ('own.py:number', {}, r'own\.py:number.: expected a class; got int'),
    ('own.py:Half', {}, r'Half has no method step; expected reset, step'),
    ('own.py:Mute', {}, r'Mute has no method step'),
    ('broken.py:Own', {}, r'broken\.py fails to import \(ModuleNotFoundError: .*no_such_module_at_all'),
    ('leaving.py:Own', {}, r'leaving\.py fails to import \(SystemExit'),
    ('own.py:Own', {'malus': 1}, r"task\.args = \{'malus': 1\}: Own takes \(bonus: .*unexpected keyword argument 'malus'"),
    ('own.py:Failing', {}, r"Failing takes \(when\).*missing a required argument: 'when'"),
    ('own.py:Leaving', {}, r'Leaving failed \(SystemExit: 0 \(.*own\.py:\d+, in __init__\)\)'),
    ('base.py:Own', {}, r'base\.py fails to import \(Base: x \(.*base\.py:\d+, in <module>\)\)'),
    ('own.py:Failing', {'when': 'today'}, r'Failing failed \(OSError: no database, today \(.*own\.py:\d+, in __init__\)\)'),
  ],
)
def test_the_error_of_an_unusable_users_class_names_its_fault(own, name, args, complaint):
  with pytest.raises(SettingsError, match=complaint):
    registry.make(f'{own}/{name}', args)
