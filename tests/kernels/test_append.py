"""The kernel that appends a decode step's tokens to the cache, against the network's own path and its roundings.

The kernel runs in Pallas's GPU interpreter, which raises on races. tests/kernels/test_compiled.py compiles it for the device.
"""

import dataclasses
import zlib
from functools import partial
from unittest.mock import Mock

import append_shapes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import Cache, Quant
from sprl.kernels import append as choice
from sprl.kernels import hopper_append as hopper
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.quant import dot
from sprl.sampler import decode
from sprl.sampler.weights import sampler_weights

BF16 = jnp.bfloat16
SIZES = {'hidden_size': 64, 'head_dim': 128, 'num_hidden_layers': 1, 'intermediate_size': 32, 'vocab_size': 32}
DENSE, RKV = Cache(), Cache(budget=8, interval=16, window=4, method='rkv')
LENGTHS, SEEN = [3, 9], [13, 9]  # slots and tokens of each row
ACTIVE = [True, False]
COUNTS = 'saturated', 'saturated_queries'
PARTS = 4  # of the sums of products in bfloat16


def randomised(params, key):
  """Return random biases and scales of norms, which are 0 and 1 in new weights."""

  def changed(path, x):
    name = path[-1].key
    if name not in ('scale', 'bias'):
      return x
    return x + (0.3 if name == 'scale' else 3) * jax.random.normal(
      jax.random.fold_in(key, zlib.crc32(str(path).encode())), x.shape
    )

  return jax.tree_util.tree_map_with_path(changed, params)


def step(family, cache, sampler, heads, kernel=None):
  """Return the hidden states and the caches before and after a decode step in bfloat16, through `kernel` if it is given."""
  config = tiny(family, **SIZES, num_attention_heads=heads[0], num_key_value_heads=heads[1])
  layout = cache_layout(config, cache, Quant(sampler=sampler), 16, 16, BF16)
  params = randomised(transformer.init_params(config, jax.random.key(0), scale=0.2), jax.random.key(1))
  weights = sampler_weights(params, BF16, Quant())
  if layout.fp8:  # some numbers are clamped
    weights = weights._replace(scales=Scales(jnp.array([0.01]), jnp.array([0.013]), jnp.array([0.005])))
  held = decode.empty_cache(layout, weights, len(LENGTHS))
  rng = np.random.default_rng(0)
  layers, counts = (
    jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 100, x.shape), x.dtype), tree)
    for tree in (held.layers, {name: getattr(held, name) for name in COUNTS})
  )
  held = dataclasses.replace(held, layers=layers, length=jnp.array(LENGTHS), seen=jnp.array(SEEN), **counts)
  run = partial(decode.decode_step, transformer.graph(config), compresses=False)
  with pytest.MonkeyPatch.context() as patch:
    if kernel is not None:
      patch.setattr(choice, 'chosen', lambda operation, kernels, obstacle, local: obstacle() is None)
      patch.setattr(hopper, 'append', kernel)
      patch.setattr(dot, 'parts_of_sum', lambda M, N, K: PARTS)
    # Otherwise XLA skips some of the roundings to bfloat16.
    exact = jax.jit(run, compiler_options={'xla_allow_excess_precision': False})
    hidden, _, after, _ = exact(weights, held, jnp.array([5, 6]), jnp.array(ACTIVE))
  return np.asarray(hidden, np.float32), held, after


@pytest.mark.parametrize(
  ('family', 'cache', 'sampler', 'heads'),
  [
    pytest.param('qwen2', DENSE, 'none', (4, 2), id='biases', marks=pytest.mark.slow),
    pytest.param('qwen3', RKV, 'none', (4, 2), id='norms, evicted'),
    pytest.param('qwen2', RKV, 'w8a8_kv8', (4, 2), id='key biases and queries in FP8, evicted'),
    pytest.param('qwen3', DENSE, 'kv8', (3, 3), id='norms, FP8, odd numbers of heads', marks=pytest.mark.slow),
    pytest.param('gemma3_text', DENSE, 'kv8', (4, 1), id='a sliding window, one kv head', marks=pytest.mark.slow),
  ],
)
def test_the_kernel_appends_as_the_network_does(family, cache, sampler, heads):
  """The arrays of a row with a token are equal but for a few roundings, and those of a row without one keep their values."""
  kernel = Mock(side_effect=partial(hopper.append, interpret=plgpu.InterpretGPUParams(detect_races=True)))
  expected, _, other = step(family, cache, sampler, heads)
  found, before, after = step(family, cache, sampler, heads, kernel)
  kernel.assert_called_once()
  np.testing.assert_allclose(found[0], expected[0], rtol=0.02, atol=0.02)
  for name in COUNTS:
    counted, want, old = (np.asarray(getattr(cache, name)) for cache in (after, other, before))
    np.testing.assert_array_equal(counted, want)
    np.testing.assert_array_equal(counted[1], old[1])
    assert (counted[0] > old[0]).all() == counts(name, sampler)
  for name, x in vars(after.layers[0]).items():
    if x is None:
      assert getattr(other.layers[0], name) is None
      continue
    mine, want, old = (np.asarray(getattr(each.layers[0], name), np.float32) for each in (after, other, before))
    # Sums in another order, of the squares of a norm or of the parts of a product, may round to the neighbour of a number.
    apart = mine[0] != want[0]
    assert apart.sum() <= (0 if name == 'position' else 3 + apart.size // 100), name
    assert (mine[0] != old[0]).any(), name
    np.testing.assert_array_equal(mine[1], old[1])


def counts(name, sampler):
  """Return whether the sampler counts clamped numbers under this name."""
  return sampler == 'w8a8_kv8' or (sampler == 'kv8' and name == 'saturated')


@pytest.mark.parametrize(
  ('product', 'k', 'words'),
  [
    ((4, 1024, BF16), (128, BF16), None),
    ((4, 1024, BF16), (128, jnp.uint8), None),
    ((4, 1024, jnp.float32), (128, BF16), 'float32, not bfloat16'),
    ((4, 1024, BF16), (128, jnp.float32), 'cache is float32'),
    ((4, 512, BF16), (64, BF16), '64 wide'),
    ((4, 128 * 96, BF16), (128, BF16), '96 heads'),
  ],
)
def test_obstacles_say_what_the_kernel_cannot_append(product, k, words):
  found = hopper.obstacle(jax.ShapeDtypeStruct(product[:2], product[2]), jax.ShapeDtypeStruct((4, 2, 16, k[0]), k[1]))
  assert found is None if words is None else words in found


@pytest.mark.parametrize(('H', 'K', 'D', 'dtype'), [(4, 1, 256, 'bfloat16'), (9, 3, 128, 'uint8'), (7, 1, 128, 'uint8')])
def test_odd_numbers_of_heads_can_be_lowered(H, K, D, dtype):
  """The interpreter accepts register layouts that Mosaic refuses. Gemma 3 of 1B has four query heads and one kv head."""
  assert jax.jit(hopper.append).trace(*append_shapes.arguments(H, K, D, dtype)).lower(lowering_platforms=('cuda',))
