"""Compare the kernels on 8 host devices, in Pallas's GPU interpreter, with the references on one device. Prints JSON.

The interpreter shares one memory between devices and expects each device to run a kernel equally often. Therefore all rows are
due together. Its check for forgotten barriers is off: barriers of a slower device would look forgotten.

Arguments: CHECK:DATAxFSDPxTENSOR, one or more.
"""

import dataclasses
import json
import sys
from functools import partial

import compilation_cache
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.cache.attend import attend
from sprl.cache.kv_cache import KVCache, Step
from sprl.cache.layout import CacheLayout
from sprl.cache.scales import Scales
from sprl.config import Cache, Mesh
from sprl.kernels import hopper_block_matmul, hopper_decode_attention, hopper_eviction
from sprl.kernels.rope import Rope
from sprl.quant.block import block_dot, quantise
from sprl.sharding.mesh import make_mesh
from sprl.sharding.rules import OnMesh, row_shards, shardings

BF16, FP8 = map(jnp.dtype, ('bfloat16', 'float8_e4m3fn'))
H, K, D, S = 4, 2, 128, 16
rng = np.random.default_rng(0)
ran = set()


def interpreted():
  """Make the kernels run in the interpreter, and record their names in `ran`."""
  gpu_callbacks.call_assert_no_barriers_allocated = lambda token: token
  for module, name in (
    (hopper_decode_attention, 'decode_attention'),
    (hopper_block_matmul, 'block_matmul'),
    (hopper_eviction, 'compact'),
    (hopper_eviction, 'similarity'),
  ):
    setattr(module, name, partial(run, name, getattr(module, name)))


def run(name, kernel, *args):
  ran.add(f'{name} of {list(args[0].shape)}' + (f' and {list(args[2].shape)}' if name == 'block_matmul' else ''))
  return kernel(*args, interpret=plgpu.InterpretGPUParams())


def numbers(*shape, dtype=BF16):
  return jnp.asarray(rng.normal(size=shape), dtype)


def off(found, expected):
  """Return the largest error, relative to the largest expected number."""
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  return float(np.abs(found - expected).max() / np.abs(expected).max())


def attending(storage, B):
  """Return a cache of B rows, the next token's step, queries, keys and values. All rows are due."""
  settings = Cache(budget=6, interval=4, window=2, method='rkv')
  layout = CacheLayout(settings, 1, K, H, D, Rope(1e4), 12, 32, BF16, storage)
  scales = Scales(*(jnp.full(1, x) for x in (1.0, 0.02, 0.03))) if storage == FP8 else None
  cache = KVCache.empty(layout, B, scales=scales)
  held = cache.layers[0]
  k, v = ((rng.integers(0, 120, (B, K, S, D)).astype(np.uint8) if storage == FP8 else numbers(B, K, S, D)) for _ in range(2))
  length = rng.integers(8, S, B)
  position = np.where(np.arange(S) < length[:, None, None], np.arange(S), -1) + np.zeros((1, K, 1), int)
  held = dataclasses.replace(
    held, k=jnp.asarray(k), v=jnp.asarray(v), position=jnp.asarray(position, jnp.int32), queries=numbers(*held.queries.shape)
  )
  length, ones = jnp.asarray(length, jnp.int32), jnp.ones(B, jnp.int32)
  cache = dataclasses.replace(cache, layers=(held,), length=length, seen=length, decoded=3 * ones)
  return cache, Step(ones, decoding=True), numbers(B, 1, H, D), numbers(B, 1, K, D), numbers(B, 1, K, D)


@OnMesh
@partial(jax.jit, donate_argnums=0)
def attend_first(cache, step, q, k, v):
  return attend(0, cache, step, q, k, v)


def with_kernels(kernels, cache):
  return dataclasses.replace(cache, layout=dataclasses.replace(cache.layout, kernels=kernels))


def check_cache(mesh, storage):
  """Return the error of the outputs, and whether the kept slots and positions are equal."""
  B = max(4, row_shards(mesh))
  cache, step, *new = attending(jnp.dtype(storage), B)
  with compilation_cache.in_use():
    out, kept = attend_first(with_kernels('reference', jax.tree.map(jnp.copy, cache)), step, *new)
  laid = with_kernels('mosaic_gpu', jax.device_put(cache, shardings(mesh, cache.axes, cache)))
  heads = [('rows', None, 'kv_heads', None)] * 3
  on_mesh = jax.device_put((step, *new), shardings(mesh, (step.axes, *heads), (step, *new)))
  out_there, kept_there = attend_first.on(mesh)(laid, *on_mesh)
  used = (slice(None), slice(None), slice(cache.layout.settings.budget))
  sides = [[getattr(each.layers[0], name)[used] for name in ('k', 'v', 'position')] for each in (kept, kept_there)]
  return {
    'off': off(out_there, out),
    'kept': all(np.array_equal(a, b) for a, b in zip(*sides)),
    'moved': not np.array_equal(sides[0][2][:, 0], np.broadcast_to(np.arange(6), (B, 6))),
  }


@OnMesh
@partial(jax.jit, static_argnames='axes')
def product(x, w, axes):
  return block_dot(x, w, axes)


def check_product(mesh, axes, N, M):
  """Return the errors of kernel and reference for a product whose weight is split along `axes`."""
  x, w = numbers(max(4, row_shards(mesh)), 1, M), quantise(numbers(N, M), 'float32')
  expected = product(x, w, (None, None))
  found = {}
  for kernels in ('mosaic_gpu', 'reference'):
    held = dataclasses.replace(w, kernels=kernels)
    where = shardings(mesh, (('rows', None, axes[1]), dataclasses.replace(held, codes=axes, scale=(None, None))), (x, held))
    found[kernels] = off(product.on(mesh)(*jax.device_put((x, held), where), axes), expected)
  return found


CHECKS = {
  'bf16': partial(check_cache, storage='bfloat16'),
  'fp8': partial(check_cache, storage='float8_e4m3fn'),
  'columns': partial(check_product, axes=('heads', 'embed'), N=H * D, M=256),
  'rows': partial(check_product, axes=('embed', 'mlp'), N=64, M=512),
  'within blocks': partial(check_product, axes=('mlp', 'embed'), N=192, M=128),
}

interpreted()
report = {}
for argument in sys.argv[1:]:
  check, _, shape = argument.partition(':')
  mesh = make_mesh(Mesh(*map(int, shape.split('x'))), None, (H, K), 'rollout')
  ran.clear()
  report[argument] = CHECKS[check](mesh) | {'ran': sorted(ran)}
print(json.dumps(report))
