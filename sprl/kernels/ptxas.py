"""Find ptxas, NVIDIA's assembler for GPU kernels, and tell JAX its folder.

XLA and Mosaic take ptxas from the folder CUDA_ROOT, or from one of NVIDIA's wheels. If CUDA's wheels are installed without the
wheel that contains ptxas, jax 0.12 finds a folder without ptxas and stops searching. CUDA_ROOT must then be set before jax is
imported:

    os.environ.update(ptxas.environment())
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

WHEELS = ('nvidia.cu13', 'nvidia.cuda_nvcc')  # packages with bin/ptxas, for CUDA 13 and for CUDA 12
PLUGINS = ('jax_plugins.xla_cuda13', 'jax_plugins.xla_cuda12')
REMEDY = 'set CUDA_ROOT to a folder with bin/ptxas, such as /usr/local/cuda, or install the wheel nvidia-cuda-nvcc'


def find() -> Path | None:
  """Return the path of the ptxas that JAX should use, or None.

  If CUDA_ROOT is set, only this folder is searched. Otherwise the order is: NVIDIA's wheels, PATH, /usr/local/cuda*.
  """
  root = os.environ.get('CUDA_ROOT')
  folders = _folders() if root is None else iter([Path(root)])
  return next((path for path in (folder / 'bin' / 'ptxas' for folder in folders) if path.is_file()), None)


def environment() -> dict[str, str]:
  """Return CUDA_ROOT for the process's environment, or {} if it is set already or no ptxas is found."""
  found = find()
  return {} if found is None or 'CUDA_ROOT' in os.environ else {'CUDA_ROOT': str(found.parent.parent)}


def described() -> str:
  """Return one line that names the ptxas that JAX uses, or says how to install one."""
  found, root = find(), os.environ.get('CUDA_ROOT')
  if found is not None:
    return f'ptxas: {found}'
  return f'no ptxas{"" if root is None else f" in CUDA_ROOT = {root}"}: kernels cannot be compiled; {REMEDY}'


def needed() -> bool:
  """Return whether jax has a plugin for NVIDIA's GPUs."""
  return any(_folders_of(plugin) for plugin in PLUGINS)


def _folders() -> Iterator[Path]:
  for wheel in WHEELS:
    yield from _folders_of(wheel)
  if (on_path := shutil.which('ptxas')) is not None:
    yield Path(on_path).resolve().parent.parent
  yield from sorted(Path('/usr/local').glob('cuda*'), reverse=True)


def _folders_of(package: str) -> list[Path]:
  try:
    spec = importlib.util.find_spec(package)
  except ModuleNotFoundError:  # the parent package is missing
    return []
  return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
