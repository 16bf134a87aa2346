"""Resharding keeps the numbers and never moves them through the host. Checkpoints are restored onto other layouts."""

import pytest
from host_devices import FAST, on_devices


@pytest.fixture(scope='module')
def found():
  return on_devices('resharded.py', **FAST)


def test_arrays_move_between_layouts_without_the_host(found):
  assert found['pairs'] == 48
  assert found['different'] == []
  assert found['wrong_place'] == []


def test_arrays_of_a_checkpoint_are_restored_onto_another_layout(found):
  assert found['restored'] == {'placed': True, 'equal': True}
