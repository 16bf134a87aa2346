"""Adapters on a mesh, compared with one device."""

import pytest
from host_devices import on_devices


@pytest.mark.slow
def test_adapters_on_a_mesh_train_as_on_one_device():
  found = on_devices('sharded_lora.py', JAX_DISABLE_MOST_OPTIMIZATIONS='1')
  assert found['begun_apart'] == 0  # the same random numbers
  assert found['moved'] > 1e-2
  assert found['apart'] < 1e-5
  assert found['sampler_apart'] < 2e-5
  assert found['shards'] == {'a': [2, 32], 'b': [48, 2]}  # fsdp splits the axis `embed`, tensor the axis `mlp`
  assert found['moments'] == ['pinned_host']
