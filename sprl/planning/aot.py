"""Compile JAX programs for devices that this machine does not have, and read the resources that they would take.

XLA's compilers need the properties of a device, not the device: an H200's are below, and libtpu knows the TPUs'. This finds
spills, memory, collectives, lowering errors and launches on any machine. There is no autotuning, and there are no timings.

    make install EXTRAS=aot    # GPUs; also needs ptxas: on PATH, under /usr/local/cuda, or from the package nvidia-cuda-nvcc
    make install EXTRAS=tpu    # TPUs

Compile-only topologies and Mosaic's dumps are not stable parts of JAX, and are used only here. Benchmarks compare kernels with
JAX's own attention, which lowers to cuDNN without cuDNN, by a patch of a private part of JAX: cudnn_version.py. Checked with jax
0.11.2 and 0.12.0.1.
"""

import contextlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

# Read when the plugins are imported: do not look for libraries that only running needs, nor for a cloud machine's metadata.
os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sprl.config import SettingsError
from sprl.planning import sass, thunks
from sprl.planning.collectives import Collective, collectives
from sprl.planning.cudnn_version import cudnn_version
from sprl.planning.sass import Sass
from sprl.planning.thunks import Thunk

# Text form of XLA's GpuTargetConfigProto: an H200 according to its driver and NVIDIA's CUDA documentation (compute capability
# 9.0). Clock, bandwidth and L2 feed XLA's cost model only.
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
CUDNN = 90800  # dnn_version_info above, as cuDNN numbers its versions
NODE = 8  # GPUs
MODULES = {'h200': ('jax_cuda13_plugin', 'jax_plugins.xla_cuda13'), 'v5e': ('libtpu',)}  # XLA's compilers
V5E = {1: '1x1', 4: '2x2', 8: '2x4', 16: '4x4', 32: '4x8', 64: '8x8', 128: '8x16', 256: '16x16'}  # topologies by size


@dataclass(frozen=True)
class Kernel:
  """A Mosaic GPU kernel, as ptxas and Mosaic report it."""

  name: str
  registers: int  # per thread
  spills: int  # bytes that a thread stores to and loads from local memory for lack of registers
  shared: int  # bytes of shared memory per program, without barriers; the most, if kernels of one name differ
  threads: int = 0  # of a program
  sass: Sass | None = None  # its machine code, if `inspect` compiled it and there is a disassembler


@dataclass(frozen=True)
class Compiled:
  """A compiled program. Bytes of one device's memory; donated arguments count as argument and as output."""

  kernels: tuple[Kernel, ...]  # Mosaic's, if this process compiles them for the first time; XLA's own are not reported
  text: str  # the HLO after XLA's optimisations
  arguments: int
  outputs: int
  aliased: int  # the part of the outputs that overwrites arguments
  temporary: int
  collectives: tuple[Collective, ...]
  thunks: tuple[Thunk, ...] = ()  # what XLA launches, if `inspect` compiled it for a GPU

  @property
  def total(self) -> int:
    """Bytes that the program needs."""
    return self.arguments + self.outputs - self.aliased + self.temporary


def missing(device: str = 'h200') -> str | None:
  """Return what this machine lacks to compile for `device`, or None."""
  absent = [name for name in MODULES[device] if not _importable(name)]
  if device == 'h200' and sass.tool('ptxas') is None:
    absent.append('ptxas')
  return f'{", ".join(absent)} not found: make install EXTRAS={"aot" if device == "h200" else "tpu"}' if absent else None


def _importable(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:
    return False


def devices(name: str, count: int = 1) -> list[Any]:
  """Return compile-only devices: `name` is h200, in nodes of eight, or v5e.

  Raises SettingsError for another name, a count that has no topology, or a compiler that is missing.
  """
  if name not in MODULES:
    raise SettingsError(f'--device={name}: expected h200 or v5e with --compile')
  if reason := missing(name):
    raise SettingsError(f'--compile: {reason}')
  nodes = -(-count // NODE)
  if name == 'h200' and (count <= NODE or count % NODE == 0):
    return list(topologies.get_topology_desc('h200', 'cuda', topology=f'{nodes}x{count // nodes}x1', target_config=H200).devices)
  if name == 'v5e' and count in V5E:
    with _silence():  # libtpu warns that this is no cloud machine
      return list(topologies.get_topology_desc(f'v5e:{V5E[count]}', 'tpu').devices)
  accepted = f'at most {NODE}, or a multiple of {NODE}' if name == 'h200' else f'one of {", ".join(map(str, V5E))}'
  raise SettingsError(f'--mesh: found {count} devices; expected {accepted}, with --device={name} --compile')


def lowering_for(mesh: Mesh) -> contextlib.AbstractContextManager:
  """Context in which functions are traced for the devices of `mesh`: kernels and sharding rules read the mesh in use."""
  if _is_tpu(mesh):
    device = AbstractDevice(device_kind=mesh.devices.flat[0].device_kind, num_cores=1, platform='tpu')
  else:
    device = AbstractDevice(device_kind='NVIDIA H200', num_cores=132, platform='gpu')
  return jax.sharding.use_abstract_mesh(
    AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device)
  )


def _is_tpu(mesh: Mesh) -> bool:
  return mesh.devices.flat[0].platform == 'tpu'


def compile_for(jitted: Any, *arguments: Any, **static: Any) -> Compiled:
  """Compile a jitted function for the compile-only devices of its arguments, trees of ShapeDtypeStruct with shardings.

  Static arguments are passed by name.
  """
  return _compile(jitted, arguments, static, deeply=False)


def inspect(jitted: Any, *arguments: Any, **static: Any) -> Compiled:
  """Compile as `compile_for` does, for GPUs, and read what XLA launches and the kernels' machine code as well."""
  return _compile(jitted, arguments, static, deeply=True)


def _compile(jitted, arguments, static, deeply):
  mesh: Any = next(x.sharding.mesh for x in jax.tree.leaves(arguments) if isinstance(x, jax.ShapeDtypeStruct))
  with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=name):
    folder = Path(name)
    options: dict[str, Any] = {'xla_dump_to': str(folder / 'xla')} if deeply else {}
    with lowering_for(mesh), cudnn_version(CUDNN), _silence():  # Mosaic warns if there is no disassembler
      lowered = jitted.trace(*arguments, **static).lower(lowering_platforms=('tpu' if _is_tpu(mesh) else 'cuda',))
      compiled = lowered.compile(compiler_options=options)
    kernels = tuple(_kernel(path, deeply) for path in sorted(folder.glob('*.ptxas')))
    launched = thunks.parse(*(_dumped(folder, name) for name in ('sequence_after_thunk_passes', 'metadata'))) if deeply else []
  memory = compiled.memory_analysis()
  assert memory is not None, 'these backends have a memory analysis'
  text = compiled.as_text() or ''
  return Compiled(
    kernels=kernels,
    text=text,
    arguments=memory.argument_size_in_bytes,
    outputs=memory.output_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
    temporary=memory.temp_size_in_bytes,
    collectives=tuple(collectives(text)),
    thunks=tuple(launched),
  )


def _dumped(folder: Path, name: str) -> str:
  """Return one of XLA's dumps about thunks. Constants are computed by small programs of their own: the program is the largest."""
  return max((path.read_text() for path in folder.glob(f'xla/*.thunk_{name}.txt')), key=len)


def compile_for_h200(function: Callable, *shapes: Any, donate: tuple[int, ...] = ()) -> Compiled:
  """Compile a function for one H200; `shapes` are its arguments, trees of jax.ShapeDtypeStruct."""
  there = NamedSharding(Mesh(np.array(devices('h200')), ('x',)), PartitionSpec())
  placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), shapes)
  return compile_for(jax.jit(function, out_shardings=there, donate_argnums=donate), *placed)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """Drop what libraries write to standard error. Errors are exceptions."""
  stderr = os.dup(2)
  with open(os.devnull, 'w') as nowhere:
    os.dup2(nowhere.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)


def _kernel(report: Path, deeply: bool) -> Kernel:
  # The two kinds of reports have separate numbers, such as hopper_decode_attention_3.ptxas, so they are matched by name only.
  text, name = report.read_text(), report.stem.rpartition('_')[0]
  resources = [path.read_text() for path in report.parent.glob(f'{name}_[0-9]*.resources.txt')]
  ptx = report.with_suffix('.ptx').read_text() if deeply else ''
  return Kernel(
    name=name,
    registers=_number(r'Used (\d+) registers', text),
    spills=sum(map(int, re.findall(r'(\d+) bytes spill', text))),
    shared=max(_number(r'smem_scratch_bytes=(\d+)', each) for each in resources),
    threads=_number(r'\.(?:max|req)ntid (\d+)', ptx) if deeply else 0,
    sass=sass.count(sass.disassemble(ptx)) if deeply and not sass.missing() else None,
  )


def _number(pattern: str, text: str) -> int:
  if (match := re.search(pattern, text)) is None:
    raise ValueError(f'found no {pattern!r} in the report of Mosaic or ptxas: {text!r}')
  return int(match[1])
