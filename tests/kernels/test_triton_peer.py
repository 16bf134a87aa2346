"""The Triton kernel of the block-scaled product: its results in Triton's interpreter against float64, compiled for an H200.

Skipped if jax-triton is not installed. It is in the dependency group `bench`; the environments of the tests omit it (290 MB).
"""

import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_block_matmul import check, random_arguments

from sprl.planning.aot import compile_for_h200, missing

pytest.importorskip('jax_triton', reason='jax-triton is not installed')
import triton
from peers import triton_block_matmul as peer
from triton.runtime.interpreter import InterpretedFunction


class Host:
  """A numpy array with the interface of a tensor that Triton's interpreter expects. It is its own storage and its own copy."""

  def __init__(self, array):
    self.array = array
    self.dtype = {'float8_e4m3fn': 'fp8e4nv'}.get(array.dtype.name, array.dtype.name)

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  def cpu(self):
    return self

  def new_empty(self, *_, **__):
    return Host(self.array)

  def set_(self, *_):
    return self

  def copy_(self, other):
    assert other.array is self.array

  def storage_offset(self):
    return 0

  def size(self):
    return self.array.shape

  def stride(self):
    return self.array.strides


def interpreted(plan, x, sx, w, sw):
  """Return the product by Triton's interpreter, before it is rounded to bfloat16."""
  (M, K), N = x.shape, len(w)
  across, along, splits = plan.tiles
  y = np.full((splits, M, N), np.nan, np.float32)
  arguments = [Host(np.ascontiguousarray(a)) for a in (x, sx, w, sw)]
  run = InterpretedFunction(peer.triton_block_matmul.fn).run
  run(*arguments, Host(y), grid=(across * along, splits), warmup=False, **peer.constants(plan, M, N, K))
  return y.sum(axis=0)


@pytest.mark.parametrize(
  ('M', 'N', 'K'),
  [
    (1, 64, 128),  # one program, one block
    (5, 200, 1040),  # ragged in all directions; split sums
    (130, 264, 400),  # many tokens, ragged in all directions
    (2200, 136, 128),  # more tiles of tokens than a patch has
  ],
)
def test_interpreted_products_match_float64(M, N, K):
  arguments = random_arguments(M, N, K)
  check(interpreted(peer.launch(M, N, K), *map(np.asarray, arguments)), arguments, 20)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(
  ('M', 'N', 'K'),
  [(1, 256, 896), (16, 18944, 3584), (64, 3584, 18944), (100, 1536, 400), (256, 3584, 3584), (16384, 18944, 3584)],
)
def test_it_compiles_for_the_tensor_cores_of_an_h200_without_spills(M, N, K, tmp_path, monkeypatch):
  monkeypatch.setattr(peer.jax_triton.triton_lib, '_JAX_TRITON_DUMP_DIR', str(tmp_path))
  monkeypatch.setattr(peer.triton_block_matmul, '_jT_kernel_cache', {}, raising=False)  # only a new compilation is dumped
  shape, C, R = jax.ShapeDtypeStruct, -(-K // 128), -(-N // 128)
  x, w = shape((M, K), jnp.float8_e4m3fn), shape((N, K), jnp.float8_e4m3fn)
  scales = shape((M, C), jnp.float32), shape((R, C), jnp.float32)
  compiled = compile_for_h200(lambda *arguments: peer.block_matmul(*arguments), x, scales[0], w, scales[1])
  splits = peer.launch(M, N, K).tiles[2]
  assert compiled.outputs == 2 * M * N
  assert compiled.temporary == (4 * splits * M * N if splits > 1 else 0)
  [ptx] = tmp_path.glob('*/triton_block_matmul.ptx')
  assert 'wgmma.mma_async.sync.aligned.m64' in ptx.read_text()
  command = [triton.knobs.nvidia.ptxas.path, '-v', '-arch=sm_90a', ptx, '-o', tmp_path / 'cubin']
  told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  assert re.findall(r'(\d+) bytes spill', told) == ['0', '0']
