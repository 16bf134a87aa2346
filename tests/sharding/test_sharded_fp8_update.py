"""FP8 in the learner on a mesh, compared with one device."""

import numpy as np
import pytest
from host_devices import FAST, on_devices

MESHES = ('llama:2x2x2:emulate', 'qwen2_moe:1x2x2x2:emulate')
MORE_MESHES = ('llama:1x2x4:blockwise', 'llama:1x8x1:blockwise', 'qwen2_moe:2x1x2x2:blockwise', 'qwen2_moe:1x8x1x1:emulate')


@pytest.fixture(scope='module')
def updates():
  return on_devices('sharded_fp8_update.py', *MESHES, **FAST)


@pytest.fixture(scope='module')
def more_updates():
  return on_devices('sharded_fp8_update.py', *MORE_MESHES, **FAST)


def check(found):
  assert found['compiled'] == 1  # the second update compiles nothing
  # A mesh sums in another order, which can move a number to the neighbouring FP8 code.
  assert np.median(found['apart']) < 1e-4
  assert max(found['apart']) < 0.05
  assert np.median(found['rounding']) > 0.1  # without FP8 the gradient is another


@pytest.mark.slow  # 40 seconds of compilation on 8 host devices
@pytest.mark.parametrize('mesh', MESHES)
def test_fp8_updates_on_a_mesh_have_the_gradient_of_one_device(updates, mesh):
  check(updates[mesh])


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MORE_MESHES)
def test_fp8_updates_on_more_meshes_have_the_gradient_of_one_device(more_updates, mesh):
  check(more_updates[mesh])
