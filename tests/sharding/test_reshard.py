"""Resharding keeps the numbers and places each shard as requested."""

from host_devices import on_devices


def test_reshard_keeps_values_and_applies_the_target_sharding():
  found = on_devices('resharded.py')
  assert found['pairs'] == 48
  assert found['different'] == []
  assert found['wrong_place'] == []
