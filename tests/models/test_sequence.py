"""mesh.learner.sequence: which models and settings it is refused for. tests/sharding/test_mesh.py has its updates."""

import re

import pytest

from sprl.config import Cache, Mesh, Meshes, ModelSettings, Run, SettingsError
from sprl.config_checks import validate
from sprl.models.config import tiny
from sprl.models.sequence import check_sequence, kv_copies
from sprl.planning.mesh_axes import MeshAxes


def test_kv_heads_are_repeated_until_the_devices_can_share_them():
  assert [kv_copies(4, devices) for devices in (1, 2, 4, 8, 6)] == [1, 1, 1, 2, 3]


@pytest.mark.parametrize(
  ('heads', 'axes', 'accepted'),
  [
    ((12, 2), MeshAxes(sequence=5), '1, 2, 3, 4, 6, 12'),
    ((28, 4), MeshAxes(sequence=8), '1, 2, 4, 7, 14, 28'),
    ((28, 4), MeshAxes(sequence=4, tensor=4), '1, 7'),  # a device has 7 query heads of one kv head
  ],
)
def test_devices_that_cannot_split_the_heads_are_refused(heads, axes, accepted):
  config = tiny('qwen2', num_attention_heads=heads[0], num_key_value_heads=heads[1])
  with pytest.raises(SettingsError, match=re.escape(f'.sequence = {axes.sequence}: expected one of {accepted},')):
    check_sequence(config, axes.mesh(config))


def test_a_mixture_is_refused_and_one_device_a_row_never_is():
  config = tiny('qwen3_moe')
  check_sequence(config, MeshAxes(fsdp=4).mesh(config))
  with pytest.raises(SettingsError, match=r'config\.mesh\.learner\.sequence = 2: expected 1 .* experts'):
    check_sequence(config, MeshAxes(sequence=2).mesh(config))


@pytest.mark.parametrize(
  ('changes', 'named'),
  [
    ({'mesh': Meshes(rollout=Mesh(data=-1, fsdp=1, sequence=2))}, 'config.mesh.rollout.sequence = 2'),
    (
      {'mesh': Meshes(learner=Mesh(sequence=2)), 'arm': 'learner_mask', 'cache': Cache(budget=64)},
      'config.mesh.learner.sequence = 2',
    ),
  ],
)
def test_settings_that_contradict_it_are_refused(changes, named):
  with pytest.raises(SettingsError, match=re.escape(named)):
    validate(Run(model=ModelSettings('some/model'), **changes))
