"""Mesh axes from flags and settings, and the devices of learner and rollouts."""

import re

import pytest

from sprl.config import Devices, Mesh, Meshes, Run, SettingsError
from sprl.planning.mesh_axes import MeshAxes, run_axes, separate_devices

TENSORS = Meshes(Mesh(fsdp=4, tensor=2), Mesh(data=4, fsdp=1, tensor=2))


@pytest.mark.parametrize('text', ['fsdp', 'fsdp=0', 'fsdp=x', 'fsdp=2,fsdp=2', 'pipe=2', f'fsdp={"9" * 5000}'])
def test_an_impossible_mesh_is_refused(text):
  with pytest.raises(SettingsError, match=f'--mesh={text}'):
    MeshAxes.parse(text)


def test_a_mesh_of_more_devices_than_there_can_be_is_refused():
  with pytest.raises(SettingsError, match='found data=10000 fsdp=10000, 100000000 devices; expected at most 1000000'):
    MeshAxes.parse('data=10000,fsdp=10000')
  with pytest.raises(SettingsError, match=r'config\.mesh: found .* devices; expected at most 1000000'):
    run_axes(Run(mesh=Meshes(Mesh(data=10**9, fsdp=1))))


@pytest.mark.parametrize(
  ('run', 'flags', 'learner', 'rollout'),
  [
    (Run(), [], MeshAxes(), MeshAxes()),
    (Run(), ['fsdp=4,tensor=2'], MeshAxes(fsdp=4, tensor=2), MeshAxes(data=4, tensor=2)),
    (Run(), ['fsdp=4,tensor=2', 'data=8'], MeshAxes(fsdp=4, tensor=2), MeshAxes(data=8)),
    (Run(mesh=Meshes(Mesh(fsdp=4, tensor=2))), [], MeshAxes(fsdp=4, tensor=2), MeshAxes(data=8)),  # as the run does
    (Run(mesh=TENSORS), [], MeshAxes(fsdp=4, tensor=2), MeshAxes(data=4, tensor=2)),
    (Run(mesh=TENSORS), ['fsdp=8'], MeshAxes(fsdp=8), MeshAxes(data=4, tensor=2)),
    (Run(mesh=Meshes(Mesh(tensor=2)), devices=Devices('4-7', '0-3')), [], MeshAxes(fsdp=2, tensor=2), MeshAxes(data=4)),
    (Run(devices=Devices('0-7', '0-7')), [], MeshAxes(fsdp=8), MeshAxes(data=8)),
    (Run(devices=Devices('4-5', '0-3')), ['fsdp=4'], MeshAxes(fsdp=4), MeshAxes(data=2)),
    (
      Run(mesh=Meshes(Mesh(fsdp=4), Mesh(-1, 1, 2)), devices=Devices(engines=2)),
      [],
      MeshAxes(fsdp=4),
      MeshAxes(data=2, tensor=2),
    ),
  ],
)
def test_axes_follow_from_flags_and_settings(run, flags, learner, rollout):
  assert run_axes(run, *flags) == (learner, rollout)


@pytest.mark.parametrize(
  ('run', 'flags', 'setting'),
  [
    (Run(mesh=TENSORS), ['fsdp=16'], 'config.mesh.rollout = '),  # the rollout mesh has 8 devices
    (Run(mesh=Meshes(Mesh(tensor=2))), [], 'config.mesh.learner.fsdp = -1'),  # the number of devices is unknown
    (Run(mesh=TENSORS, devices=Devices(engines=3)), [], 'config.devices.engines = 3'),
  ],
)
def test_axes_that_do_not_fit_the_devices_are_refused(run, flags, setting):
  with pytest.raises(SettingsError, match=re.escape(setting)):
    run_axes(run, *flags)


@pytest.mark.parametrize(
  ('devices', 'setting'),
  [
    (Devices(learner='0-3', rollout='4-11'), "config.devices.learner = '0-3': found 4 devices; expected 8"),
    (Devices(learner='0-7', rollout='8-11'), "config.devices.rollout = '8-11': found 4 devices; expected 8"),
    (Devices(learner='0-7', rollout='7-14'), "config.devices.rollout = '7-14'"),
    (Devices(engines=3), 'config.devices.engines = 3'),
  ],
)
def test_devices_that_contradict_the_mesh_are_refused(devices, setting):
  with pytest.raises(SettingsError, match=re.escape(setting)):
    separate_devices(devices, MeshAxes(fsdp=8), MeshAxes(data=8))


def test_device_numbers_decide_whether_rollouts_have_their_own():
  axes = MeshAxes(fsdp=4), MeshAxes(data=4)
  shared = Devices(), Devices(engines=2), Devices('0-3', '0,1,2,3'), Devices(learner='0-3'), Devices(rollout='4-7', learner='4-7')
  assert not any(separate_devices(each, *axes) for each in shared)
  assert separate_devices(Devices('0-3', '4-7'), *axes)
