"""What the machine at hand does natively."""

import platform
from pathlib import Path

import jax
import jax.numpy as jnp


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
