"""Which dtype a model is computed in."""

import jax
import jax.numpy as jnp
import pytest

from sprl.kernels import platform
from sprl.kernels.platform import compute_dtype


@pytest.mark.parametrize('name', ['float32', 'bfloat16'])
def test_a_named_dtype_is_taken_at_its_word(name):
  assert compute_dtype(name) == jnp.dtype(name)


@pytest.mark.parametrize(('native', 'name'), [(True, 'bfloat16'), (False, 'float32')])
def test_auto_is_bfloat16_where_the_machine_multiplies_it(monkeypatch, native, name):
  monkeypatch.setattr(platform, 'native_bfloat16', lambda: native)
  assert compute_dtype('auto') == jnp.dtype(name)


def test_accelerators_multiply_bfloat16(monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert platform.native_bfloat16()


@pytest.mark.parametrize(
  ('kernels', 'hopper', 'expected'),
  [('auto', True, True), ('auto', False, False), ('reference', True, False), ('mosaic_gpu', False, True)],
)
def test_where_kernels_run(monkeypatch, kernels, hopper, expected):
  monkeypatch.setattr(platform, 'hopper', lambda: hopper)
  assert platform.can_run(kernels) is expected


@pytest.mark.parametrize(('flags', 'native'), [('avx2 fma', False), ('avx2 amx_bf16', True), ('avx512_bf16 avx2', True)])
def test_a_cpu_is_asked_for_its_flags(monkeypatch, tmp_path, flags, native):
  cpuinfo = tmp_path / 'cpuinfo'
  cpuinfo.write_text(f'flags : fpu {flags}\n')
  monkeypatch.setattr(platform, 'Path', lambda _: cpuinfo)
  monkeypatch.setattr(platform.platform, 'machine', lambda: 'x86_64')
  monkeypatch.setattr(jax, 'default_backend', lambda: 'cpu')
  assert platform.native_bfloat16() is native
