"""Environments of other packages, for their tests: the packages or fakes of them, and a file of prompts."""

import importlib.util
import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / 'fakes'


def fake_and_real(name, install):
  """Return a fixture that runs a test twice: imports of `name` find the fake in tests/tasks/fakes, then the real package.

  If the real package is not installed, its test is skipped; `install` says how to install it.
  """

  @pytest.fixture(params=['fake', 'real'])
  def which(request, monkeypatch):
    ours = lambda: [m for m in sys.modules if m.partition('.')[0] == name]  # noqa: E731
    if request.param == 'real':
      if importlib.util.find_spec(name) is None:
        pytest.skip(f'{name} is not installed: {install}')
      yield 'real'
      return
    kept = {module: sys.modules.pop(module) for module in ours()}
    monkeypatch.syspath_prepend(str(FAKES))
    yield 'fake'
    for module in ours():
      del sys.modules[module]
    sys.modules.update(kept)

  return which


def write_prompts(folder):
  """Write prompts of the chat form for training; return their folder."""
  lines = [
    '{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}],'
    ' "reward_spec": {"ground_truth": "5"}, "max_turns": 3}',
    '{"prompt": "3 + 3?", "reward_spec": {"ground_truth": "6"}, "max_turns": 2}',
  ]
  (folder / 'train.jsonl').write_text('\n'.join(lines))
  return str(folder)
