"""Device capabilities, and the choice between a GPU kernel and its reference."""

import logging
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from sprl.config import Kernels, SettingsError
from sprl.sharding.rules import shared

HOPPERS = re.compile(r'\bG?H(100|200|800|20)\b')  # matches the names of Hopper devices


def compute_dtype(name: str):
  """Return the dtype of a `model.dtype` setting. `auto` is bfloat16 where hardware multiplies it, else float32."""
  if name != 'auto':
    return jnp.dtype(name)
  return jnp.dtype('bfloat16' if native_bfloat16() else 'float32')


def native_bfloat16() -> bool:
  """Whether the default device multiplies bfloat16 faster than float32: a GPU, a TPU, or a CPU with AMX or AVX512-BF16."""
  if jax.default_backend() != 'cpu':
    return True
  if platform.machine() == 'arm64':  # XLA's CPU backend does not use the instructions of Apple's cores
    return False
  return not _flags().isdisjoint(('amx_bf16', 'avx512_bf16'))


def copies_slowly() -> bool:
  """Whether this CPU has AVX2 and no AVX-512: XLA's copy of a weight then takes longer than its product with few rows.

  Before a product, XLA's CPU library copies the right operand into another layout. With AVX-512 this costs little.
  """
  return 'avx2' in _flags() and 'avx512f' not in _flags()


@cache
def _flags() -> frozenset[str]:
  """Return the features of the CPU as Linux names them; nothing elsewhere."""
  cpuinfo = Path('/proc/cpuinfo')
  return frozenset(cpuinfo.read_text(encoding='utf-8').split() if cpuinfo.exists() else ())


def hopper() -> bool:
  """Whether the program being traced is for an NVIDIA Hopper GPU, the target of the Mosaic kernels."""
  if (meant := _meant('gpu')) is not None:
    return HOPPERS.search(meant.device_kind) is not None
  return jax.default_backend() == 'gpu' and getattr(jax.devices()[0], 'compute_capability', '').startswith('9.')


def on_gpu() -> bool:
  """Whether the program being traced is for a GPU: the default device, or the devices of the mesh in use."""
  return jax.default_backend() == 'gpu' or _meant('gpu') is not None


def on_accelerator() -> bool:
  """Whether the program being traced is for a GPU or a TPU."""
  return jax.default_backend() != 'cpu' or _meant('gpu', 'tpu') is not None


def _meant(*platforms: str):
  """Return the abstract device of the mesh in use if it is of these platforms. Compile-only devices are known only this way."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device if device is not None and device.platform in platforms else None


def can_run(kernels: Kernels) -> bool:
  """Whether the setting `kernels` lets kernels run, shapes permitting."""
  return kernels == 'mosaic_gpu' or (kernels == 'auto' and hopper())


def check_device(kernels: Kernels) -> None:
  """Log once that references run, on a device that is not a GPU; on a GPU each operation logs its own choice.

  Raises SettingsError if kernels are forced on a device without them.
  """
  kind = jax.devices()[0].device_kind
  if kernels == 'mosaic_gpu' and not hopper():
    raise SettingsError(f"config.model.kernels = 'mosaic_gpu': expected 'auto' or 'reference': {kind} is not a Hopper GPU")
  if not on_gpu():
    _note(f'reference implementations run in place of GPU kernels: the device is {kind}')


def chosen(operation: str, kernels: Kernels, obstacle: Callable[[], str | None], local: bool = False) -> bool:
  """Return whether the kernel of `operation` runs under the setting `kernels`, and log the choice once on a GPU.

  `obstacle()` returns the reason why the kernel cannot run, or None. `local` says that the caller will run it on each device's
  part of the arrays (`sprl.sharding.rules.local`).

  Raises SettingsError if the kernel is forced and cannot run.
  """
  if kernels == 'reference' or (kernels == 'auto' and not on_gpu()):
    return False
  reason = _obstacle(obstacle, local) if kernels == 'mosaic_gpu' or hopper() else 'this GPU is not of the Hopper generation'
  if reason is None:
    _note(f'{operation}: the Mosaic GPU kernel runs')
    return True
  if kernels == 'mosaic_gpu':
    raise SettingsError(
      f"config.model.kernels = 'mosaic_gpu': expected 'auto' or 'reference': the kernel of {operation} cannot run: {reason}"
    )
  _note(f'{operation}: the reference runs, because {reason}')
  return False


def _obstacle(of_operation: Callable[[], str | None], local: bool) -> str | None:
  # XLA does not split a kernel over devices: it would gather the inputs on every device.
  return 'it is not split between the devices that share it' if shared() and not local else of_operation()


@cache
def _note(line: str) -> None:
  """Log a line the first time only: every layer and compilation chooses its operations again."""
  logging.getLogger(__name__).info(line)
