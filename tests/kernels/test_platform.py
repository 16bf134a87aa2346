"""The compute dtype, and the devices on which kernels run."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from sprl.config import SettingsError
from sprl.kernels import platform
from sprl.kernels.platform import compute_dtype


@pytest.mark.parametrize('name', ['float32', 'bfloat16'])
def test_named_dtype_is_used(name):
  assert compute_dtype(name) == jnp.dtype(name)


@pytest.mark.parametrize(('native', 'name'), [(True, 'bfloat16'), (False, 'float32')])
def test_auto_dtype_is_bfloat16_if_native(monkeypatch, native, name):
  monkeypatch.setattr(platform, 'native_bfloat16', lambda: native)
  assert compute_dtype('auto') == jnp.dtype(name)


def test_bfloat16_is_native_on_gpu(monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert platform.native_bfloat16()


@pytest.mark.parametrize(
  ('kernels', 'hopper', 'expected'),
  [('auto', True, True), ('auto', False, False), ('reference', True, False), ('mosaic_gpu', False, True)],
)
def test_kernels_run_if_forced_or_on_hopper(monkeypatch, kernels, hopper, expected):
  monkeypatch.setattr(platform, 'hopper', lambda: hopper)
  assert platform.can_run(kernels) is expected


def test_forced_kernels_raise_on_cpu():
  with pytest.raises(SettingsError, match=r"config\.model\.kernels = 'mosaic_gpu': expected .*cpu is not a Hopper GPU"):
    platform.check_device('mosaic_gpu')


@pytest.mark.parametrize('kernels', ['auto', 'reference'])
def test_log_says_that_references_run_on_cpu(caplog, kernels):
  platform._note.cache_clear()
  caplog.set_level(logging.INFO, logger='sprl')
  platform.check_device(kernels)
  [line] = caplog.messages
  assert 'reference' in line
  assert 'cpu' in line


@pytest.mark.parametrize(
  ('kind', 'hopper'),
  [('NVIDIA H200', True), ('NVIDIA H100 80GB HBM3', True), ('NVIDIA GH200 480GB', True), ('NVIDIA A100-SXM4-80GB', False),
   ('NVIDIA B200', False)],
)  # fmt: skip
def test_mesh_of_absent_gpus_decides_for_kernels(kind, hopper):
  device = AbstractDevice(device_kind=kind, num_cores=132, platform='gpu')
  assert not platform.on_gpu()
  with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ('x',), (AxisType.Auto,), abstract_device=device)):
    assert platform.on_gpu()
    assert platform.hopper() is hopper
    assert platform.chosen('sorting', 'auto', lambda: None) is hopper


def test_mesh_of_absent_tpus_is_an_accelerator_and_no_gpu():
  device = AbstractDevice(device_kind='TPU v5 lite', num_cores=1, platform='tpu')
  with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ('x',), (AxisType.Auto,), abstract_device=device)):
    assert platform.on_accelerator()
    assert not platform.on_gpu()
    assert not platform.hopper()
  assert not platform.on_accelerator()


@pytest.mark.parametrize(
  ('flags', 'native', 'slowly'),
  [
    ('avx2 fma', False, True),
    ('avx2 amx_bf16 avx512f', True, False),
    ('avx512_bf16 avx2 avx512f', True, False),
    ('', False, False),
  ],
)
def test_a_cpu_has_the_capabilities_of_its_flags(monkeypatch, tmp_path, flags, native, slowly):
  cpuinfo = tmp_path / 'cpuinfo'
  cpuinfo.write_text(f'flags : fpu {flags}\n')
  monkeypatch.setattr(platform, 'Path', lambda _: cpuinfo)
  monkeypatch.setattr(platform.platform, 'machine', lambda: 'x86_64')
  monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu')
  platform._flags.cache_clear()
  assert (platform.native_bfloat16(), platform.copies_slowly()) == (native, slowly)
  platform._flags.cache_clear()
