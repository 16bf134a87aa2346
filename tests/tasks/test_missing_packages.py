"""Environments of packages that are not installed."""

import sys

import pytest
from foreign_packages import write_prompts

from sprl.config import SettingsError
from sprl.tasks.environments import registry


@pytest.fixture
def missing(monkeypatch):
  """Make imports of the packages fail."""
  for name in ('gem', 'skyrl_gym'):
    monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
  ('name', 'args', 'complaint'),
  [
    ('gem', {'id': 'game:Game2048-v0-easy'}, r'gem-llm .*pip install --no-deps --ignore-requires-python gem-llm'),
    ('chat', {'environment': 'gsm8k'}, r'skyrl-gym, which is not installed \(pip install skyrl-gym\)'),
  ],
)
def test_a_missing_package_is_named_with_how_to_install_it(missing, tmp_path, name, args, complaint):
  with pytest.raises(SettingsError, match=complaint):
    registry.make(name, {**args, 'prompts': write_prompts(tmp_path)} if name == 'chat' else args)
