"""Compiles JAX programs for devices that are not here, and reads what they would take of them.

XLA's compilers need no device where they are told what one is like. For an H200 the description is below; of TPUs libtpu knows
it. So spills, memory, collectives and lowering errors are found on any machine; what is not: no autotuning, and no timing.

    pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION    # GPUs; VERSION of the jax installed
    ptxas: on the path or under /usr/local/cuda, or from the package nvidia-cuda-nvcc
    pip install 'jax[tpu]==VERSION'                                              # TPUs

This is the one place that uses what JAX keeps half private: compile-only topologies, the device that Pallas asks for when
lowering, cuDNN's version, and Mosaic's dumps. Checked with jax 0.11.2 and 0.12.0.1.
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

# Read at the import of the plugins: libraries that only running needs, and a cloud machine's description that is none here.
os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.mesh import AbstractDevice
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sprl.parallel.collectives import Collective, collectives

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
CUDNN = 90800  # its dnn_version_info as cuDNN's own number, which JAX asks for when it lowers what cuDNN computes
NODE = 8  # GPUs


@dataclass(frozen=True)
class Kernel:
  """A Mosaic GPU kernel, as ptxas and Mosaic report it."""

  name: str
  registers: int  # a thread
  spills: int  # bytes a thread stores to and loads from local memory because registers ran out
  shared: int  # bytes of shared memory a program, barriers apart; the most, where kernels of one name differ


@dataclass(frozen=True)
class Compiled:
  """A compiled program. Bytes of one device's memory; what is donated counts as argument and as output."""

  kernels: tuple[Kernel, ...]  # Mosaic's, where this process compiles them for the first time; what XLA generates is not told
  text: str  # the program that XLA's optimisation ends with
  arguments: int
  outputs: int
  aliased: int  # of the outputs those that lie where arguments lay
  temporary: int
  collectives: tuple[Collective, ...]

  @property
  def total(self) -> int:
    """All that the program needs."""
    return self.arguments + self.outputs - self.aliased + self.temporary


def missing() -> str | None:
  """What this machine lacks to compile for a GPU; None where it lacks nothing."""
  absent = [name for name in ('jax_cuda13_plugin', 'jax_plugins.xla_cuda13') if not _importable(name)]
  if absent:
    return f'{" and ".join(absent)} cannot be imported: see sprl/parallel/aot.py'
  if not (shutil.which('ptxas') or any(Path('/usr/local').glob('cuda*/bin/ptxas')) or _importable('nvidia.cu13')):
    return 'there is no ptxas: see sprl/parallel/aot.py'
  return None


def missing_tpu() -> str | None:
  """What this machine lacks to compile for a TPU; None where it lacks nothing."""
  return None if _importable('libtpu') else 'libtpu cannot be imported: see sprl/parallel/aot.py'


# --- devices ---------------------------------------------------------------------------------------------------------


def h200s(count: int = 1) -> list[Any]:
  """So many H200s, of eight to a node; compile-only. Raises ValueError where they fill no whole nodes."""
  nodes = -(-count // NODE)
  if count % nodes:
    raise ValueError(f'{count} GPUs: expected at most {NODE}, or a multiple of that')
  return list(topologies.get_topology_desc('h200', 'cuda', topology=f'{nodes}x{count // nodes}x1', target_config=H200).devices)


def tpus(name: str) -> list[Any]:
  """The TPUs of a topology such as v5e:2x4; compile-only."""
  with _silence():  # it looks for the cloud machine that it is not on
    return list(topologies.get_topology_desc(name, 'tpu').devices)


# --- programs --------------------------------------------------------------------------------------------------------


def meant_for(mesh: Mesh) -> contextlib.AbstractContextManager:
  """Within it what is traced is for the mesh's devices: names of axes mean the mesh in use, which kernels ask for the GPU."""
  device = AbstractDevice(device_kind='NVIDIA H200', num_cores=132, platform='gpu') if _platform(mesh) == 'gpu' else None
  return jax.sharding.use_abstract_mesh(
    AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device)
  )


def _platform(mesh: Mesh) -> str:
  return mesh.devices.flat[0].platform


def compile_for(jitted: Any, *arguments: Any, **static: Any) -> Compiled:
  """Compiles a jitted function for the compile-only devices that its arguments lie on: trees of ShapeDtypeStruct.

  Static arguments come as they are.
  """
  there: Any = next(x.sharding.mesh for x in jax.tree.leaves(arguments) if isinstance(x, jax.ShapeDtypeStruct))
  with tempfile.TemporaryDirectory() as folder:
    with meant_for(there), _cudnn(), _dumping(folder):
      lowered = jitted.trace(*arguments, **static).lower(lowering_platforms=('tpu' if _platform(there) == 'tpu' else 'cuda',))
      compiled = lowered.compile()
    kernels = tuple(_kernel(path) for path in sorted(Path(folder).glob('*.ptxas')))
  memory = compiled.memory_analysis()
  assert memory is not None  # as it is on backends that cannot tell; these can
  text = compiled.as_text() or ''
  return Compiled(
    kernels,
    text,
    memory.argument_size_in_bytes,
    memory.output_size_in_bytes,
    memory.alias_size_in_bytes,
    memory.temp_size_in_bytes,
    tuple(collectives(text)),
  )


def compile_for_h200(function: Callable, *shapes: Any, donate: tuple[int, ...] = ()) -> Compiled:
  """Compiles `function` for one H200 and arguments of these shapes (trees of jax.ShapeDtypeStruct)."""
  there = NamedSharding(Mesh(np.array(h200s()), ('x',)), PartitionSpec())
  placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), shapes)
  return compile_for(jax.jit(function, out_shardings=there, donate_argnums=donate), *placed)


@contextlib.contextmanager
def _cudnn() -> Iterator[None]:
  """Lets JAX lower to cuDNN without having it: calls of it are compiled by name, and its plans are made where they run."""
  asked = fused_attention_stablehlo.check_cudnn_version
  fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN
  try:
    yield
  finally:
    fused_attention_stablehlo.check_cudnn_version = asked


# --- Mosaic ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _dumping(folder: str) -> Iterator[None]:
  """Lets Mosaic write its reports to a folder. Of the machine code too, for which it tries a disassembler: that it may not be
  there is no news."""
  before = os.environ.get('MOSAIC_GPU_DUMP_TO')
  os.environ['MOSAIC_GPU_DUMP_TO'] = folder
  try:
    with _silence():
      yield
  finally:
    os.environ.pop('MOSAIC_GPU_DUMP_TO')
    if before is not None:
      os.environ['MOSAIC_GPU_DUMP_TO'] = before


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """Drops what libraries write to stderr meanwhile. Errors are exceptions."""
  stderr = os.dup(2)
  with open(os.devnull, 'w') as nowhere:
    os.dup2(nowhere.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)


def _kernel(report: Path) -> Kernel:
  # hopper_decode_attention_3.ptxas: the two kinds of report are numbered apart, so they meet by name only.
  text, name = report.read_text(), report.stem.rpartition('_')[0]
  resources = [path.read_text() for path in report.parent.glob(f'{name}_[0-9]*.resources.txt')]
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
