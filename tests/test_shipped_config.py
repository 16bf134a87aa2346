"""A config of an installed sprl is found outside a checkout."""

import pytest

from sprl.command_line import with_shipped_config


@pytest.mark.parametrize('form', ['--config={}', '-config={}', '--config {}'])
def test_a_config_that_this_folder_lacks_is_that_of_the_package(tmp_path, monkeypatch, form):
  package, here = tmp_path / 'sprl', tmp_path / 'here'
  (package / 'configs').mkdir(parents=True)
  (here / 'configs').mkdir(parents=True)
  for name in ('both.py', 'shipped.py'):
    (package / 'configs' / name).touch()
  (here / 'configs' / 'both.py').touch()
  monkeypatch.chdir(here)

  def given(config):
    return with_shipped_config(['main', *form.format(config).split(' '), '--config.steps=1'], package)

  def expected(config):
    return ['main', *form.format(config).split(' '), '--config.steps=1']

  assert given('configs/shipped.py') == expected(package / 'configs/shipped.py')
  assert given('configs/shipped.py:large') == expected(f'{package}/configs/shipped.py:large')
  for kept in ('configs/both.py', 'configs/neither.py', 'configs/neither.py:large'):
    assert given(kept) == expected(kept)
