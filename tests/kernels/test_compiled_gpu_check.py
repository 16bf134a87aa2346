"""The kernels of benchmarks/gpu_check.py and their peers (library calls), compiled at real sizes for an H200; needs no GPU.

Skipped with a reason if sprl/planning/aot.py finds no compiler.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from device_timing import Ceilings, loop
from gpu_check import CHECKS
from gpu_check_bench import Bench
from gpu_check_parity import comparisons

from sprl.kernels import hopper_quantise
from sprl.planning.aot import compile_for_h200, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class Call(NamedTuple):
  """A function to call on the GPU. `make(key)` returns its arguments; the first `moving` of them are donated."""

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
class RecordingBench(Bench):
  """A bench that records the calls and times nothing."""

  calls: list[Call] = field(default_factory=list)
  peers: list[Call] = field(default_factory=list)

  def timed(self, name, case, kernel, make, least, peers=None, makes=None, moving=0, fp8=False):
    self.calls.append(Call(f'{name} {case}', kernel, make, moving))
    for peer, call in (peers or {}).items():
      self.peers.append(Call(f'{peer} beside {name} {case}', call, (makes or {}).get(peer, make), moving))
    return {'us': 1.0}


REAL = RecordingBench(rehearse=False, ceilings=Ceilings(copy=1.0, bf16=1.0, fp8=1.0))
COMPARED = [Call(f'{each.check} {each.case}', each.kernel, each.make) for each in comparisons(REAL)]
for check in ('attention', 'rows', 'matmul', 'quantise', 'eviction', 'append'):
  for case in CHECKS[check](REAL):
    case.measure({})


@pytest.mark.parametrize('call', [*COMPARED, *REAL.calls], ids=lambda call: call.name)
def test_kernels_compile_at_their_real_sizes_without_spills(call):
  assert all(kernel.spills == 0 for kernel in call.compile().kernels)


def cudnn_beside(check):
  return [call for call in REAL.peers if call.name.startswith(f'cudnn beside {check}')]


@pytest.mark.parametrize('call', cudnn_beside('rows'), ids=lambda call: call.name)
def test_cudnn_runs_both_passes_of_packed_rows_with_their_mask(call):
  text = call.compile().text
  assert '__cudnn$fmhaScaleBiasSoftmax"' in text
  assert '__cudnn$fmhaScaleBiasSoftmaxBackward"' in text


@pytest.mark.parametrize('call', cudnn_beside('decode_attention'), ids=lambda call: call.name)
def test_cudnn_reads_the_cache_without_a_copy(call):
  compiled = call.compile()
  assert '__cudnn$fmhaSoftmax' in compiled.text
  assert compiled.temporary < 0.01 * compiled.arguments


def test_a_timed_loop_makes_every_call():
  """Two inputs, three calls each: XLA merges none, moves none out of the loop and drops none."""
  given = (jax.ShapeDtypeStruct((256, 3584), jnp.bfloat16),)
  outs = [jax.eval_shape(hopper_quantise.codes, *given)] * 6
  iterations = jax.ShapeDtypeStruct((), jnp.int32)
  compiled = compile_for_h200(loop(hopper_quantise.codes, 0, 3), ([(), ()], outs), [given] * 2, iterations, donate=(0,))
  [body] = re.findall(r'body=%?([\w.]+)', compiled.text)
  inside = compiled.text[compiled.text.index(f'%{body} (') :].split('\n}')[0]
  assert len(re.findall(r' custom-call\(.*hopper_codes', inside)) == 6
