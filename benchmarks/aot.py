"""Compiles JAX programs for an H200 on a machine without a GPU, and reads what they would take of one.

XLA's GPU compiler needs no GPU where it is told what one is like: a compile-only topology of one H200, described below, is
enough to run everything up to machine code. So spills, memory and lowering errors are found on any machine; what is not: no
autotuning, and no timing.

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION    # of the jax installed
    ptxas: on the path or under /usr/local/cuda, or from the package nvidia-cuda-nvcc

This is the one place that uses what JAX keeps half private: compile-only topologies, the device that Pallas asks for when
lowering, and Mosaic's dumps. Checked with jax 0.11.2 and 0.12.0.1.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')  # of libraries that only running needs; read at the plugin's import

import jax
import numpy as np
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# Text form of XLA's GpuTargetConfigProto: an H200 as its driver and NVIDIA's CUDA documentation (compute capability 9.0) tell.
# Clock, bandwidth and L2 feed XLA's cost model only.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_memory_size: 150754820096 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
"""


@dataclass(frozen=True)
class Kernel:
  """A Mosaic GPU kernel, as ptxas and Mosaic report it."""

  name: str
  registers: int  # a thread
  spills: int  # bytes a thread stores to and loads from local memory because registers ran out
  shared: int  # bytes of shared memory a program, barriers apart; the most, where kernels of one name differ


@dataclass(frozen=True)
class Compiled:
  """A program compiled for an H200. Bytes of device memory; what is donated counts as argument."""

  kernels: tuple[Kernel, ...]  # Mosaic's, where this process compiles them for the first time; what XLA generates is not told
  text: str  # the program that XLA's optimisation ends with
  arguments: int
  outputs: int
  temporary: int


def missing() -> str | None:
  """What this machine lacks to compile for a GPU; None where it lacks nothing."""
  absent = [name for name in ('jax_cuda13_plugin', 'jax_plugins.xla_cuda13') if not _importable(name)]
  if absent:
    return f'{" and ".join(absent)} cannot be imported: see benchmarks/aot.py'
  if not (shutil.which('ptxas') or any(Path('/usr/local').glob('cuda*/bin/ptxas')) or _importable('nvidia.cu13')):
    return 'there is no ptxas: see benchmarks/aot.py'
  return None


def compile_for_h200(function: Callable, *shapes: Any, donate: tuple[int, ...] = ()) -> Compiled:
  """Compiles `function` for arguments of these shapes (trees of jax.ShapeDtypeStruct)."""
  topology = topologies.get_topology_desc('h200', 'cuda', topology='1x1x1', target_config=H200)
  there = NamedSharding(Mesh(np.array(topology.devices[:1]), ('x',)), PartitionSpec())
  # Pallas asks the mesh in use for the device that it lowers for.
  device = AbstractDevice(device_kind='NVIDIA H200', num_cores=132, platform='gpu')
  mesh = AbstractMesh((1,), ('x',), (AxisType.Auto,), abstract_device=device)
  jitted = jax.jit(function, in_shardings=there, out_shardings=there, donate_argnums=donate)
  with tempfile.TemporaryDirectory() as folder:
    with jax.sharding.use_abstract_mesh(mesh), _dumping(folder):
      compiled = jitted.trace(*shapes).lower(lowering_platforms=('cuda',)).compile()
    kernels = tuple(_kernel(path) for path in sorted(Path(folder).glob('*.ptxas')))
  memory = compiled.memory_analysis()
  assert memory is not None  # as it is on backends that cannot tell; this one can
  return Compiled(
    kernels, compiled.as_text() or '', memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
  )


@contextlib.contextmanager
def _dumping(folder: str) -> Iterator[None]:
  """Lets Mosaic write its reports to a folder. Of the machine code too, for which it tries a disassembler: that it may not be
  there is no news, so what is written to stderr meanwhile is dropped. Errors are exceptions."""
  before, stderr = os.environ.get('MOSAIC_GPU_DUMP_TO'), os.dup(2)
  os.environ['MOSAIC_GPU_DUMP_TO'] = folder
  with open(os.devnull, 'w') as nowhere:
    os.dup2(nowhere.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
      os.environ.pop('MOSAIC_GPU_DUMP_TO')
      if before is not None:
        os.environ['MOSAIC_GPU_DUMP_TO'] = before


def _kernel(report: Path) -> Kernel:
  # hopper_decode_attention_3.ptxas: the two kinds of report are numbered apart, so they meet by name only.
  text, name = report.read_text(), report.stem.rpartition('_')[0]
  resources = [path.read_text() for path in report.parent.glob(f'{name}_*.resources.txt')]
  return Kernel(
    name=name,
    registers=int(_found(r'Used (\d+) registers', text)),
    spills=sum(map(int, re.findall(r'(\d+) bytes spill', text))),
    shared=max(int(_found(r'smem_scratch_bytes=(\d+)', each)) for each in resources),
  )


def _found(pattern: str, text: str) -> str:
  match = re.search(pattern, text)
  if match is None:
    raise ValueError(f'Mosaic reports in another form: no {pattern!r} in {text!r}')
  return match[1]


def _importable(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:
    return False
