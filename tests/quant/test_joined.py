"""Joined weights of linears: the order of their rows, their codes, their products, and when linears stay apart."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.config import UNQUANTISED, Mesh, Quant
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import tiny
from sprl.quant.block import BlockScaled, quantise
from sprl.quant.dot import dot
from sprl.quant.joined import GROUPS, Joined, Within, join, join_all, separated
from sprl.sampler.weights import sampler_weights
from sprl.sharding.mesh import make_mesh

FLOAT32 = jnp.dtype('float32')
BLOCKWISE = Quant(sampler='w8a8', arithmetic='blockwise')


def normal(*shape):
  return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def test_rows_are_stored_part_by_part():
  gate, up = jnp.arange(4.0)[:, None], jnp.arange(10.0, 14.0)[:, None]
  assert join([gate, up]).weight[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
  assert join([gate, up], parts=2).weight[:, 0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
  assert join([gate, up[:2]], parts=2).weight[:, 0].tolist() == [0, 1, 10, 2, 3, 11]


@pytest.mark.parametrize('parts', [1, 2])
def test_the_parts_of_a_product_are_the_products_of_the_parts(parts):
  x, weights = normal(3, 8), [normal(n, 8) for n in (6, 4, 2)]
  joined = join(weights, parts)
  for y, w in zip(joined.split(x @ joined.weight.T), weights, strict=True):
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-6, atol=1e-6)
  rows = joined.weight.shape[0] // parts
  for part in range(parts):  # of one device
    own = joined.split(x @ joined.weight[part * rows : (part + 1) * rows].T)
    for y, w in zip(own, weights, strict=True):
      np.testing.assert_allclose(y, x @ jnp.split(w, parts)[part].T, rtol=1e-6, atol=1e-6)


def test_codes_and_scales_are_those_of_each_weight():
  weights = [normal(256, 200), normal(128, 200)]
  each, whole = [quantise(w, 'float32') for w in weights], quantise(jnp.concatenate(weights), 'float32')
  joined = join(each).weight
  np.testing.assert_array_equal(joined.codes.view(np.uint8), whole.codes.view(np.uint8))
  np.testing.assert_array_equal(joined.scale, whole.scale)


@pytest.mark.parametrize('parts', [1, 2])
def test_weights_come_apart_as_they_were(parts):
  stacks = [quantise(normal(3, 256, 40), 'float32') for _ in range(2)]
  for before, after in zip(stacks, join(stacks, parts).separated(), strict=True):
    assert dataclasses.replace(after, codes=None, scale=None) == dataclasses.replace(before, codes=None, scale=None)
    np.testing.assert_array_equal(after.codes.view(np.uint8), before.codes.view(np.uint8))
    np.testing.assert_array_equal(after.scale, before.scale)


def joined_linears(quant=UNQUANTISED, tensor=1, family='qwen2', **sizes):
  """Return the names of the linears of a layer whose weight is part of a joined one, and the numbers of parts."""
  heads = {'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 128, 'intermediate_size': 256} | sizes
  config = tiny(family, num_hidden_layers=1, **heads)
  H, K = config.num_heads, config.num_kv_heads
  mesh = make_mesh(Mesh(data=-1, fsdp=1, tensor=tensor), jax.devices() * 8, (H, K))
  made = partial(sampler_weights, dtype=FLOAT32, quant=quant, used_on=(mesh,))
  layer = jax.eval_shape(made, transformer.abstract_params(config)).params['layers'][0]
  linears = layer['attention'] | layer['mlp']
  kernels = {name: linears[name]['kernel'] for names in GROUPS for name in names}
  parts = {name: w.parts for name, w in kernels.items() if isinstance(w, Joined)}
  return ''.join(name[0] for name, w in kernels.items() if isinstance(w, Joined | Within)), parts


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    ({}, ('qkvgu', {'q': 1, 'gate': 1})),
    ({'quant': BLOCKWISE}, ('qkvgu', {'q': 1, 'gate': 1})),
    ({'tensor': 2}, ('qkvgu', {'q': 2, 'gate': 2})),
    ({'quant': BLOCKWISE, 'tensor': 2}, ('qkvgu', {'q': 2, 'gate': 2})),
    ({'tensor': 4}, ('gu', {'gate': 4})),  # cuts the two query heads of a kv head
    ({'quant': BLOCKWISE, 'tensor': 4}, ('', {})),  # gives a device half a block of gate
    ({'quant': BLOCKWISE, 'head_dim': 32}, ('gu', {'gate': 1})),  # k and v are half a block
    ({'quant': Quant(sampler='w8a8', arithmetic='blockwise', skip_names=('v',))}, ('gu', {'gate': 1})),
    ({'quant': Quant(sampler='w8a8', skip_names=('q', 'k', 'v'))}, ('qkvgu', {'q': 1, 'gate': 1})),
  ],
)
def test_linears_are_joined_if_they_have_one_format_and_one_cut(settings, expected):
  assert joined_linears(**settings) == expected


def test_groups_have_the_axes_of_the_network():
  layer = transformer.logical_axes(tiny('llama'))['layers'][0]
  linears = layer['attention'] | layer['mlp']
  assert all(linears[name]['kernel'][0] == axis for names in GROUPS for name, axis in names.items())


@pytest.mark.parametrize('quant', [Quant(), Quant(sampler='w8a8')], ids=['plain', 'fp8'])
@pytest.mark.parametrize('family', ['qwen2', 'qwen2_moe'])
def test_the_network_gives_the_same_with_joined_weights(family, quant):
  config, params = small.model(family, num_hidden_layers=1)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 259, (2, 9)))
  positions = jnp.broadcast_to(jnp.arange(9), (2, 9))

  @jax.jit
  def hidden(params):
    memory = PackedAttention.of(jnp.ones((2, 9), jnp.int32))
    return transformer.forward(transformer.graph(config), params, tokens, positions, memory).hidden

  joined = sampler_weights(params, FLOAT32, quant).params
  assert any(isinstance(w, Joined) for w in jax.tree.leaves(joined, is_leaf=lambda w: isinstance(w, Joined)))
  np.testing.assert_allclose(hidden(joined), hidden(separated(joined)), rtol=1e-5, atol=1e-5)


def test_a_joined_fp8_product_is_bit_equal_to_those_of_its_parts():
  x = normal(5, 200).astype(jnp.bfloat16)
  each = [quantise(normal(n, 200), 'float32') for n in (256, 128, 128)]
  joined = join(each)
  assert isinstance(joined.weight, BlockScaled)
  for got, w in zip(joined.split(dot(x, joined.weight)), each, strict=True):
    np.testing.assert_array_equal(got.astype(np.float32), dot(x, w).astype(np.float32))


def test_experts_are_joined_too():
  params = small.model('qwen3_moe', num_hidden_layers=1)[1]
  experts = join_all(params, ())['layers'][0]['mlp']['experts']
  X, F, E = params['layers'][0]['mlp']['experts']['gate']['kernel'].shape
  assert experts['gate']['kernel'].weight.shape == (X, 2 * F, E)
  assert isinstance(experts['up']['kernel'], Within)
