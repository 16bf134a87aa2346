"""Kept caches on a mesh of 8 devices: rows over four, heads over two."""

import pytest
from host_devices import FAST, on_devices


@pytest.mark.slow
def test_kept_caches_stay_on_the_mesh():
  found = on_devices('sharded_turns.py', **FAST)
  assert found['tokens']
  assert found['attended']
  assert found['routes']
  assert found['apart'] < 1e-5
  assert found['hits'] == 8  # four conversations, two turns each after the first
  assert found['compiled_again'] == 0
  assert found['part'] == [[8, 2, 13, 24], [2, 1, 13, 24]]  # of the keys of all places, one device holds two places and one head
  assert found['gathered'] <= 4 * found['row']  # of the rows that are copied at once, not of the whole store
