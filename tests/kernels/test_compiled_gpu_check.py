"""What benchmarks/gpu_check.py runs on a GPU, at its real sizes, as an H200's compiler makes it: so that it runs the first time.

Skipped, with the reason, where sprl/planning/aot.py finds that the compiler is not installed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / 'benchmarks'))
import gpu_check
from device_timing import Ceilings

from sprl.planning.aot import compile_for_h200, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class Call(NamedTuple):
  """Something that is called on the GPU, and what makes its arguments."""

  name: str
  function: Callable
  make: Callable
  moving: int = 0

  def compile(self):
    return compile_for_h200(self.function, *self.arguments, donate=tuple(range(self.moving)))

  @property
  def arguments(self):
    return jax.eval_shape(self.make, jax.random.key(0))


@dataclass(frozen=True)
class Noted(gpu_check.Bench):
  """Notes what is timed, and times nothing."""

  calls: list[Call] = field(default_factory=list)
  peers: list[Call] = field(default_factory=list)

  def timed(self, name, case, kernel, make, least, peers=None, makes=None, moving=0, fp8=False):
    self.calls.append(Call(f'{name} {case}', kernel, make, moving))
    for peer, call in (peers or {}).items():
      self.peers.append(Call(f'{peer} beside {name} {case}', call, (makes or {}).get(peer, make), moving))
    return {'us': 1.0}


REAL = Noted(rehearse=False, ceilings=Ceilings(copy=1.0, bf16=1.0, fp8=1.0))
COMPARED = [Call(f'{each.check} {each.case}', each.kernel, each.make) for each in gpu_check.comparisons(REAL)]
for check in ('attention', 'rows', 'matmul', 'eviction', 'append'):
  list(gpu_check.CHECKS[check](REAL))


@pytest.mark.parametrize('call', [*COMPARED, *REAL.calls], ids=lambda call: call.name)
def test_a_kernel_of_the_one_command_compiles_at_its_real_size_and_spills_nothing(call):
  assert all(kernel.spills == 0 for kernel in call.compile().kernels)


@pytest.mark.parametrize('call', [call for call in REAL.peers if call.name.startswith('cudnn')], ids=lambda call: call.name)
def test_cudnn_reads_the_cache_where_it_lies(call):
  compiled = call.compile()
  assert '__cudnn$fmhaSoftmax' in compiled.text
  assert compiled.temporary < 0.01 * compiled.arguments
