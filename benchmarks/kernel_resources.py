"""What do the GPU kernels take of an H200? Compiled for one at the shapes of real models; no GPU is needed, nothing is timed.

    python benchmarks/kernel_resources.py --save kernel_resources    # 20 s; sprl/parallel/aot.py says what must be installed

A row is a kernel at a model's heads, a batch and a number of slots: what ptxas and Mosaic report of it (registers a thread,
bytes spilled, shared memory, and so how many programs a multiprocessor holds), the temporary memory of the compiled call, and
the bytes and operations that it must do at the least.
"""

import argparse
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from common import report

from sprl.kernels.decode_attention import cost, decode_attention
from sprl.kernels.hopper_decode_attention import launch
from sprl.parallel.aot import Compiled, compile_for_h200, missing

MIB = 2**20
REGISTERS, THREADS, SHARED = 65536, 128, 228 * 1024  # of a Hopper multiprocessor; of a program; bytes of a multiprocessor


class Heads(NamedTuple):
  """A model's attention, from its config.json."""

  queries: int  # H
  kv: int  # K
  width: int  # D


MODELS = {
  'Qwen2.5-0.5B': Heads(14, 2, 64),
  'Qwen2.5-1.5B': Heads(12, 2, 128),
  'Qwen2.5-7B': Heads(28, 4, 128),
  'Qwen3-8B': Heads(32, 8, 128),
  'Qwen3-30B-A3B': Heads(32, 4, 128),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One layer's decode attention: a batch of B rows with S slots."""

  model: str
  B: int
  S: int
  dtype: str
  share: bool = False  # every slot's probability too, as methods that accumulate attention ask for

  @property
  def shapes(self) -> tuple[Any, ...]:
    """Arguments of decode_attention."""
    H, K, D = MODELS[self.model]
    shape, scale = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((), jnp.float32)
    cache = shape((self.B, K, self.S, D), self.dtype)
    return shape((self.B, H, D), jnp.bfloat16), cache, cache, shape((self.B,), jnp.int32), (scale, scale)

  def compile(self) -> Compiled:
    """The call compiled for an H200."""
    return compile_for_h200(lambda *x: decode_attention(*x, share=self.share, kernels='mosaic_gpu'), *self.shapes)

  @property
  def cache_bytes(self) -> int:
    """Keys and values."""
    return 2 * self.shapes[1].size * self.shapes[1].dtype.itemsize


CASES = [Case(*each) for each in itertools.product(MODELS, (64, 256), (640, 4096), ('bfloat16', 'float8_e4m3fn'), (False, True))]


def row(case: Case) -> dict[str, Any]:
  """The case's line of the table."""
  compiled = case.compile()
  [kernel] = compiled.kernels
  H, K, D = MODELS[case.model]
  plan = launch(case.B * K, case.S, D, case.dtype, case.share, bias=False)
  least = cost(case.B, H, K, case.S, D, case.dtype, case.share)
  # Each program's shared memory has 1 KiB beside it that the system takes.
  resident = min(SHARED // (kernel.shared + 1024), REGISTERS // (THREADS * kernel.registers))
  return {
    **dataclasses.asdict(case),
    'splits': plan.splits,
    'stages': plan.stages,
    'registers': kernel.registers,
    'spilled': kernel.spills,
    'shared KiB': kernel.shared / 1024,
    'programs/SM': resident,
    'temporary MiB': compiled.temporary / MIB,
    'least MiB': least.bytes / MIB,
    'MFLOP': least.flops / 1e6,
    'FLOP/byte': least.flops / least.bytes,
  }


def main() -> None:
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()
  if reason := missing():
    raise SystemExit(reason)
  rows = [row(case) for case in CASES]
  result = {
    'compiled': len(rows),
    'spilled': sum(line['spilled'] for line in rows),
    'most_registers': max(line['registers'] for line in rows),
    'most_temporary_of_cache': max(line['temporary MiB'] * MIB / case.cache_bytes for line, case in zip(rows, CASES)),
    'fewest_programs': min(line['programs/SM'] for line in rows),
  }
  report(args.save or 'kernel_resources', rows, result, bool(args.save))


if __name__ == '__main__':
  main()
