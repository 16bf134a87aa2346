"""Kernels that normalise or quantise activations, alone and behind other operations, against float64 and the reference.

The kernels run in Pallas's GPU interpreter, which raises on races. tests/kernels/test_compiled.py compiles them for the device.
"""

from collections import Counter
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.cache.layout import cache_layout
from sprl.config import Cache, Quant
from sprl.kernels import hopper_quantise as hopper
from sprl.kernels import quantise as choice
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import tiny
from sprl.models.moe import ACTIVATIONS, gated
from sprl.quant import dot
from sprl.quant.block import quantise_groups
from sprl.sampler import decode
from sprl.sampler.weights import sampler_weights

BF16 = jnp.bfloat16


def interpreted(kernel, **static):
  return jax.jit(partial(kernel, interpret=plgpu.InterpretGPUParams(detect_races=True), **static))


def tokens(T, M, seed=0):
  """Return random activations. The sizes of tokens and groups differ by up to a factor of 1,000; one group is all zeros."""
  rng = np.random.default_rng(seed)
  size = 10.0 ** rng.uniform(-2, 1, (T, -(-M // 128)))
  size[1, 0] = 0
  return jnp.asarray(rng.normal(size=(T, M)) * np.repeat(size, 128, 1)[:, :M], BF16)


def by_hand(x):
  """Return codes and scales of groups, in float64: the nearest e4m3 of a value over the group's largest over 448."""
  groups = np.asarray(x, np.float64).reshape(len(x), -1, 128)
  scale = np.maximum(np.abs(groups).max(-1), 1e-10) / 448
  exact = groups / scale[..., None]
  return exact.reshape(x.shape), scale


def check(found, x):
  """Compare with float64: scales to the rounding of float32, codes within half a step of e4m3."""
  codes, scale = found
  exact, expected = by_hand(x)
  np.testing.assert_allclose(scale, expected, rtol=3e-7)
  step = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 1e-30))) - 3), 2.0**-9)
  assert (np.abs(np.asarray(codes, np.float64) - exact) <= 0.5 * step * (1 + 1e-4)).all()


def test_codes_match_float64_and_equal_the_reference():
  x = tokens(16, 384)
  found = interpreted(hopper.codes)(x)
  check(found, x)
  for got, want in zip(found, quantise_groups(x, 'float32'), strict=True):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_tokens_are_the_axis_of_the_grid_that_may_be_longest(monkeypatch):
  """The last axis is CUDA's x. The others have at most 65,535 programs, and the tokens of experts can be more."""
  seen = Mock(return_value=lambda x: (jnp.zeros((len(x), 2, 128), hopper.FP8), jnp.zeros((2, len(x)))))
  monkeypatch.setattr(hopper.plgpu, 'kernel', seen)
  jax.eval_shape(hopper.codes, jax.ShapeDtypeStruct((1 << 20, 256), BF16))
  assert seen.call_args.kwargs['grid'] == (2, (1 << 20) // 8)


@pytest.mark.parametrize('M', [512, 768])  # groups for four warps, and for two
def test_a_norm_and_its_codes_are_those_of_one_after_the_other(M):
  x, scale = tokens(8, M), jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, M), jnp.float32)
  wide = np.asarray(x, np.float64)
  normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
  # The kernel rounds the norm to bfloat16. A float32 norm next to the middle of two bfloat16 numbers may round to the other.
  rounded = jnp.asarray(normed, BF16)
  codes, scales, same = interpreted(hopper.normalised_codes, eps=1e-6)(x, scale)
  np.testing.assert_array_equal(np.asarray(same, np.float32), np.asarray(x, np.float32))
  exact, expected = by_hand(rounded)
  np.testing.assert_allclose(scales, expected, rtol=2**-8)
  reference, _ = quantise_groups(rounded, 'float32')
  differ = np.asarray(codes, np.float32) != np.asarray(reference, np.float32)
  assert differ.mean() < 0.01
  np.testing.assert_allclose(np.asarray(codes, np.float64), exact, rtol=2.0**-4 + 2.0**-7, atol=2.0**-10 + 2.0**-8)


def test_a_sum_is_rounded_before_its_norm_and_returned():
  (x, added), scale = (tokens(8, 512, seed) for seed in (0, 1)), jnp.ones(512)
  kernel = interpreted(hopper.normalised_codes, eps=1e-6)
  codes, scales, total = kernel(x, scale, added=added)
  exact = jnp.asarray(np.asarray(x, np.float64) + np.asarray(added, np.float64), BF16)
  np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(exact, np.float32))
  for found, expected in zip((codes, scales), kernel(exact, scale)[:2], strict=True):
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize('M', [512, 768])  # groups for four warps, and for two
def test_the_norm_of_a_sum_in_parts_is_that_of_one_after_the_other(M):
  """The product is rounded, then its sum with the stream, then the norm."""
  x, scale = tokens(8, M), jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, M), BF16)
  added = jnp.asarray(np.random.default_rng(2).normal(size=(4, 8, M)), jnp.float32)
  normed, total = interpreted(hopper.normalised, eps=1e-6)(x, added, scale)
  product = np.asarray(jnp.asarray(np.asarray(added, np.float64).sum(0), BF16), np.float64)
  exact = np.asarray(jnp.asarray(np.asarray(x, np.float64) + product, BF16), np.float64)
  # A float32 sum next to the middle of two bfloat16 numbers may round to the other.
  np.testing.assert_allclose(np.asarray(total, np.float64), exact, rtol=2.0**-7, atol=2.0**-9)
  assert (np.asarray(total, np.float64) != exact).mean() < 0.001
  wide = np.asarray(total, np.float64)
  expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
  np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=2.0**-8 * 1.01)


@pytest.mark.parametrize('activation', ['silu', 'gelu_tanh'])
def test_a_gated_activation_and_its_codes_are_those_of_one_after_the_other(activation):
  x = tokens(8, 512)
  codes, scales = interpreted(hopper.gated_codes, activate=ACTIVATIONS[activation])(x)
  product = gated(x[:, :256], x[:, 256:], activation)
  reference, expected = quantise_groups(product, 'float32')
  np.testing.assert_allclose(scales, expected, rtol=2**-8)
  differ = np.asarray(codes, np.float32) != np.asarray(reference, np.float32)
  assert differ.mean() < 0.01


@pytest.mark.parametrize(
  ('shape', 'dtype', 'changes', 'words'),
  [
    ((8, 256), BF16, {}, None),
    ((8, 256), jnp.float32, {}, 'float32, not bfloat16'),
    ((5, 256), BF16, {}, r'[5, 256]'),
    ((8, 200), BF16, {}, r'[8, 200]'),
    ((8, 896), BF16, {'norm': True}, '896 wide'),
    ((8, 896), BF16, {}, None),
    ((8, 256), BF16, {'group': 32}, '32 features'),
    ((8, 256), BF16, {'pow2': True}, 'power of two'),
  ],
)
def test_obstacles_say_what_the_kernel_cannot_quantise(shape, dtype, changes, words):
  found = hopper.obstacle(jax.ShapeDtypeStruct(shape, dtype), **{'group': 128, 'pow2': False, **changes})
  assert found is None if words is None else words in found


def test_the_network_gives_the_same_with_the_kernels(monkeypatch):
  """Each kernel runs where the network calls it. The products are those of the reference."""
  sizes = {'hidden_size': 256, 'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 128, 'intermediate_size': 384}
  config = tiny('qwen2', num_hidden_layers=1, **sizes)
  params = jax.jit(partial(transformer.init_params, config, scale=0.1))(jax.random.key(0))
  weights = sampler_weights(params, BF16, Quant(sampler='w8a8', arithmetic='blockwise')).params
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 259, (2, 8)))
  positions, rows = jnp.broadcast_to(jnp.arange(8), (2, 8)), PackedAttention.of(jnp.ones((2, 8), jnp.int32))

  def hidden():
    forward = partial(transformer.forward, transformer.graph(config), dtype=BF16)
    # Otherwise XLA quantises norms and activations that it has not rounded to bfloat16.
    exact = jax.jit(forward, compiler_options={'xla_allow_excess_precision': False})
    return np.asarray(exact(weights, tokens, positions, rows).hidden, np.float32)

  expected, called = hidden(), Counter()

  def interpreted(name, kernel):
    def run(*arguments):
      called[name] += 1
      return kernel(*arguments, interpret=plgpu.InterpretGPUParams())

    return run

  for name in ('normalised_codes', 'gated_codes', 'codes'):
    monkeypatch.setattr(hopper, name, interpreted(name, getattr(hopper, name)))
  monkeypatch.setattr(choice, 'chosen', lambda operation, kernels, obstacle: obstacle() is None)
  transformer._equal_block.clear_cache()  # it was traced without the kernels
  found = hidden()
  transformer._equal_block.clear_cache()
  assert called == {'normalised_codes': 2, 'gated_codes': 1, 'codes': 1}
  # An activation that rounds to another bfloat16 number may get another code.
  assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)


@pytest.mark.parametrize('family', ['qwen2', 'gemma3_text'])
def test_a_decode_step_adds_products_in_parts_where_a_norm_follows(monkeypatch, family):
  """The kernel runs for the stream before each norm but the first. Gemma has norms of the products themselves: no parts."""
  sizes = {'hidden_size': 256, 'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 128, 'intermediate_size': 512}
  config = tiny(family, num_hidden_layers=2, **sizes)
  params = jax.jit(partial(transformer.init_params, config, dtype=BF16, scale=0.1))(jax.random.key(0))
  layout = cache_layout(config, Cache(), Quant(), 16, 16, BF16)
  weights = sampler_weights(params, BF16, Quant())
  held = decode.empty_cache(layout, weights, 8)

  def hidden():
    step = partial(decode.decode_step, transformer.graph(config))
    exact = jax.jit(step, compiler_options={'xla_allow_excess_precision': False})
    return np.asarray(exact(weights, held, jnp.arange(8), jnp.ones(8, bool))[0], np.float32)

  expected, called = hidden(), []

  def normalised(x, added, scale, eps):
    called.append(added.shape)
    return kernel(x, added, scale, eps, interpret=plgpu.InterpretGPUParams())

  kernel = hopper.normalised
  monkeypatch.setattr(hopper, 'normalised', normalised)
  monkeypatch.setattr(choice, 'chosen', lambda operation, kernels, obstacle: obstacle() is None)
  monkeypatch.setattr(dot, 'parts_of_sum', lambda M, N, K: K // 128)
  found = hidden()
  assert called == ([(2, 8, 256), (4, 8, 256)] * 2 if family == 'qwen2' else [])
  assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
