"""What the machine at hand does natively, and which program computes an operation that has a kernel beside its reference."""

import logging
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from sprl.parallel.rules import shared
from sprl.settings import Kernels, SettingsError

HOPPERS = re.compile(r'\bG?H(100|200|800|20)\b')  # in a device's name


def compute_dtype(name: str):
  """The dtype of a `model.dtype` setting. `auto` is bfloat16 wherever it is multiplied in hardware, else float32."""
  if name != 'auto':
    return jnp.dtype(name)
  return jnp.dtype('bfloat16' if native_bfloat16() else 'float32')


def native_bfloat16() -> bool:
  """Whether the default device multiplies bfloat16 faster than float32: GPUs, TPUs, and CPUs with AMX or AVX512-BF16."""
  if jax.default_backend() != 'cpu':
    return True
  if platform.machine() == 'arm64':  # Apple's cores have the instructions, XLA's CPU backend does not use them
    return False
  cpuinfo = Path('/proc/cpuinfo')
  return cpuinfo.exists() and any(flag in cpuinfo.read_text() for flag in ('amx_bf16', 'avx512_bf16'))


def hopper() -> bool:
  """Whether what is traced is for a GPU of NVIDIA's Hopper generation, which the Mosaic kernels are written for."""
  if (meant := _meant()) is not None:
    return HOPPERS.search(meant.device_kind) is not None
  return jax.default_backend() == 'gpu' and getattr(jax.devices()[0], 'compute_capability', '').startswith('9.')


def on_gpu() -> bool:
  """Whether what is traced is for a GPU: the default device, or those that the mesh in use has, here or not."""
  return jax.default_backend() == 'gpu' or _meant() is not None


def _meant():
  """What a mesh of GPUs says of its devices; None where no such mesh is in use. Compile-only devices are known by it alone."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device if device is not None and device.platform == 'gpu' else None


def can_run(kernels: Kernels) -> bool:
  """Whether kernels run under the setting `kernels`, where shapes allow it."""
  return kernels == 'mosaic_gpu' or (kernels == 'auto' and hopper())


def check_device(kernels: Kernels) -> None:
  """Says in the log that references run, where no operation will say it for itself: on what is no GPU.

  Raises SettingsError where kernels are forced on a device that has none.
  """
  kind = jax.devices()[0].device_kind
  if kernels == 'mosaic_gpu' and not hopper():
    raise SettingsError(
      f"config.model.kernels = 'mosaic_gpu': {kind} is no GPU of the Hopper generation; expected 'auto' or 'reference'"
    )
  if not on_gpu():
    _note(f'the references run where there are kernels for GPUs: this device is a {kind}')


def chosen(operation: str, kernels: Kernels, obstacle: Callable[[], str | None], library: str = '') -> bool:
  """Whether the kernel computes `operation`, under the setting `kernels`; `obstacle` is why it cannot, None where it can.

  Raises SettingsError where the kernel is forced and cannot. On a GPU one line in the log says which runs, and why.
  A `library`, by name, in the kernel's place has no interpreter: nothing forces it, and it runs on GPUs alone.
  """
  kernels = 'auto' if library and kernels == 'mosaic_gpu' else kernels
  if kernels == 'reference' or (kernels == 'auto' and not on_gpu()):
    return False
  reason = _obstacle(obstacle) if kernels == 'mosaic_gpu' or hopper() else 'this GPU is not of the Hopper generation'
  if reason is None:
    _note(f'{operation}: {library or "the Mosaic GPU kernel"} runs')
    return True
  if kernels == 'mosaic_gpu':
    raise SettingsError(f"config.model.kernels = 'mosaic_gpu': the kernel of {operation} cannot run: {reason}")
  _note(f'{operation}: the reference runs, as {reason}')
  return False


def _obstacle(of_operation: Callable[[], str | None]) -> str | None:
  """XLA would not split a kernel, but gather all that goes into it on every device."""
  return 'it is not divided between the devices that share it' if shared() else of_operation()


@cache
def _note(line: str) -> None:
  """Logs a line the first time only: operations are chosen anew in every layer and compilation."""
  logging.getLogger(__name__).info(line)
