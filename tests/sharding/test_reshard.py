"""Arrays from devices to other devices, in another layout: the same numbers, and none by way of the host."""

from test_mesh import on_devices


def test_any_layout_becomes_any_other_without_the_host():
  found = on_devices('resharded.py')
  assert found['pairs'] == 48
  assert found['different'] == []
  assert found['wrong_place'] == []
