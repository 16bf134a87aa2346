"""Resharding keeps the numbers and never moves them through the host."""

from host_devices import on_devices


def test_arrays_move_between_layouts_without_the_host():
  found = on_devices('resharded.py')
  assert found['pairs'] == 48
  assert found['different'] == []
  assert found['wrong_place'] == []
