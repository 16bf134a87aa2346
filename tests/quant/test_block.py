"""Block-wise quantisation and its product, against loops over blocks in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sprl.quant import block, fp8
from sprl.quant.block import BlockScaled, block_dot

quantise, quantise_groups, fake_groups = (
  jax.jit(f, static_argnames='format') for f in (block.quantise, block.quantise_groups, block.fake_groups)
)
fake, product = jax.jit(fp8.fake), jax.jit(block_dot)


@partial(jax.jit, static_argnames='format')
def round_trip(w, format):
  """Return (quantised weight, dequantised weight)."""
  q = block.quantise(w, format)
  return q, q.dequantised()


E4M3 = ml_dtypes.float8_e4m3fn
LAYOUT = {'float32': (128, 128, False), 'pow2': (128, 128, True), 'mxfp8': (1, 32, True)}  # rows, columns, power of two


def oracle(x, rows, columns, pow2):
  """Return (codes as float64, scales) of x [N, M], computed block by block."""
  N, M = x.shape
  codes, scale = np.zeros(x.shape), np.zeros((-(-N // rows), -(-M // columns)))
  for i in range(scale.shape[0]):
    for j in range(scale.shape[1]):
      block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
      s = max(np.abs(x[block]).max(), 1e-10) / 448
      scale[i, j] = s = np.float32(2 ** np.ceil(np.log2(s)) if pow2 else s)
      codes[block] = np.clip(x[block].astype(np.float32) / np.float32(s), -448, 448).astype(E4M3)
  return codes, scale


def spread(codes, scale, rows, columns):
  """Return codes times scales, number by number."""
  out = np.zeros(codes.shape)
  for i in range(codes.shape[0]):
    for j in range(codes.shape[1]):
      out[i, j] = codes[i, j] * scale[i // rows, j // columns]
  return out


def half(x):
  return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def normal(*shape, seed=0, scale=1.0):
  return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def error(x, reference):
  return np.linalg.norm(np.asarray(x, np.float64) - reference) / np.linalg.norm(reference)


SHAPES = [(128, 128), (256, 384), (200, 300), (5, 7), (130, 31)]  # one block, whole blocks, ragged edges


@pytest.mark.parametrize(
  ('format', 'shape'),
  [*(('float32', shape) for shape in SHAPES), ('pow2', SHAPES[2]), ('mxfp8', SHAPES[1]), ('mxfp8', SHAPES[4])],
)
def test_quantise_equals_the_oracle(format, shape):
  w = normal(*shape, scale=0.02)
  rows, columns, pow2 = LAYOUT[format]
  q = quantise(w, format)
  codes, scale = oracle(half(w), rows, columns, pow2)
  assert (q.codes.dtype, q.scale.dtype, q.codes.shape) == (jnp.float8_e4m3fn, jnp.float32, shape)
  np.testing.assert_allclose(q.scale, scale, rtol=0 if pow2 else 2e-7)  # XLA multiplies by 1 / 448 where numpy divides
  assert (np.asarray(q.codes, np.float64) != codes).mean() <= (0 if pow2 else 1e-4)
  values = spread(np.asarray(q.codes, np.float64), np.asarray(q.scale, np.float64), rows, columns)
  exact, rounded, emulated = jax.jit(lambda q: (q.dequantised(), q.dequantised(jnp.bfloat16), q.emulated(jnp.bfloat16)))(q)
  np.testing.assert_allclose(exact, values, rtol=1e-7)
  np.testing.assert_array_equal(emulated.values, rounded)


@pytest.mark.parametrize(
  ('format', 'shape', 'dtype'),
  [
    ('float32', (256,), jnp.bfloat16),
    ('float32', (2, 3, 31), jnp.float32),
    ('pow2', (3, 200), jnp.float32),
    ('mxfp8', (3, 200), jnp.bfloat16),
    ('mxfp8', (2, 3, 31), jnp.float32),
  ],
)
def test_quantise_groups_equals_the_oracle(format, shape, dtype):
  x = jnp.asarray(normal(*shape), dtype)
  _, group, pow2 = LAYOUT[format]
  codes, scale = quantise_groups(x, format)
  expected, scales = oracle(np.asarray(x, np.float64).reshape(-1, shape[-1]), 1, group, pow2)
  assert codes.shape == shape
  np.testing.assert_allclose(scale.reshape(scales.shape), scales, rtol=0 if pow2 else 2e-7)
  assert (np.asarray(codes, np.float64).reshape(expected.shape) != expected).mean() <= (0 if pow2 else 1e-3)
  back = fake_groups(x, format)
  assert back.dtype == dtype
  values = spread(np.asarray(codes, np.float64).reshape(expected.shape), np.asarray(scale).reshape(scales.shape), 1, group)
  np.testing.assert_allclose(
    np.asarray(back, np.float64).reshape(values.shape), values, rtol=1e-7 if dtype == jnp.float32 else 2**-8
  )


@pytest.mark.parametrize('format', LAYOUT)
def test_float32_weights_and_their_bfloat16_rounding_have_equal_codes(format):
  w = jnp.asarray(normal(200, 300, scale=0.02))
  a, b = quantise(w, format), quantise(w.astype(jnp.bfloat16), format)
  np.testing.assert_array_equal(np.asarray(a.codes).view(np.uint8), np.asarray(b.codes).view(np.uint8))
  np.testing.assert_array_equal(a.scale, b.scale)


def test_float32_activations_are_not_rounded_to_bfloat16():
  x = jnp.asarray([[448.0, 1 + 2.0**-4 + 2.0**-12]])  # a little above the tie of 1 and 1.125
  np.testing.assert_array_equal(fake_groups(x, 'pow2'), [[448, 1.125]])


@pytest.mark.parametrize(('format', 'expected'), [('float32', 0.02642), ('pow2', 0.0265), ('mxfp8', 0.0265)])
def test_round_trip_error_of_weights(format, expected):
  w = half(normal(1024, 1024, scale=0.02))
  assert error(round_trip(w.astype(np.float32), format)[1], w) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(('format', 'expected'), [('float32', 0.02569), ('pow2', 0.0265), ('mxfp8', 0.0265)])
def test_round_trip_error_of_activations(format, expected):
  x = normal(256, 1024)
  assert error(fake_groups(x, format), x) == pytest.approx(expected, abs=2e-4)


def test_round_trip_error_of_groups_of_32_with_float32_scales():
  x = normal(1024, 32)
  assert error(fake(x, np.abs(x).max(1, keepdims=True) / 448), x) == pytest.approx(0.02396, abs=3e-4)


@pytest.mark.parametrize(('outlier', 'tensor', 'block'), [(1e2, 0.0265, 0.0264), (1e4, 0.046, 0.0264), (1e5, 0.456, 0.0264)])
def test_blocks_are_more_precise_than_tensors_only_with_huge_outliers(outlier, tensor, block):
  w = normal(512, 512, scale=0.02)
  w[:, 7] *= outlier
  w = half(w).astype(np.float32)
  rest = np.s_[:, 128:]  # the blocks without the outlying column
  assert error(fake(w, np.abs(w).max() / 448)[rest], w[rest]) == pytest.approx(tensor, rel=0.05)
  assert error(round_trip(w, 'float32')[1][rest], w[rest]) == pytest.approx(block, abs=2e-4)


# --- special values, all of one shape ----------------------------------------------------------------------------------

RAGGED = 130, 260


@pytest.mark.parametrize('format', LAYOUT)
def test_blocks_of_zeros_come_back_as_zeros(format):
  zeros = np.zeros(RAGGED, np.float32)
  q, back = round_trip(zeros, format)
  assert (q.scale > 0).all()
  np.testing.assert_array_equal(back, zeros)
  np.testing.assert_array_equal(fake_groups(zeros, format), zeros)
  np.testing.assert_array_equal(product(zeros, q), np.zeros((130, 130)))


@pytest.mark.parametrize('format', LAYOUT)
def test_denormals_come_back_as_zeros(format):
  np.testing.assert_array_equal(round_trip(np.full(RAGGED, 1e-40, np.float32), format)[1], np.zeros(RAGGED))


@pytest.mark.parametrize('format', LAYOUT)
def test_a_largest_value_of_448_has_scale_one(format):
  w = np.full(RAGGED, 0.5, np.float32)
  w[:, ::32] = -448
  q, back = round_trip(w, format)
  np.testing.assert_array_equal(q.scale, np.ones_like(q.scale))
  np.testing.assert_array_equal(back, w)


@pytest.mark.parametrize('format', LAYOUT)
def test_values_that_are_not_finite_stay_not_finite(format):
  w = np.ones(RAGGED, np.float32)
  w[0, 0], w[1, 40] = np.nan, np.inf
  _, back = round_trip(w, format)
  assert not np.isfinite(back[0, 0])
  assert not np.isfinite(back[1, 40])


@pytest.mark.parametrize('format', ['pow2', 'mxfp8'])
def test_power_of_two_scales_are_rounded_up(format):
  top = np.ldexp(np.float32(448), np.arange(-20, 12))
  x = np.stack([top, np.nextafter(top, np.float32(np.inf)), np.nextafter(top, np.float32(0))]).reshape(-1, 1)
  codes, scale = quantise_groups(x, format)
  np.testing.assert_array_equal(scale[32:64], 2 * scale[:32])  # the least number above 448 needs the next scale
  assert not jax.jit(fp8.saturated)(x, scale).any()
  np.testing.assert_array_equal(np.asarray(codes, np.float32)[:, 0], np.repeat(np.float32([448, 224, 448]), 32))


# --- products, trees, experts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('format', LAYOUT)
def test_block_dot_equals_the_formula(format, dtype):
  """docs/methods/fp8.md, eq. 4, in float64."""
  rows, group, _ = LAYOUT[format]
  x, w = jnp.asarray(normal(2, 5, 200), dtype), quantise(normal(150, 200, seed=1, scale=0.02), format)
  codes, scale = (np.asarray(a, np.float64).reshape(10, -1) for a in quantise_groups(x, format))
  weights, scale_w = np.asarray(w.codes, np.float64), np.asarray(w.scale, np.float64)
  expected = np.zeros((10, 150))
  for n in range(150):
    for k in range(-(-200 // group)):
      inner = codes[:, k * group : (k + 1) * group] @ weights[n, k * group : (k + 1) * group]
      expected[:, n] += inner * scale[:, k] * scale_w[n // rows, k]
  y = product(x, w)
  assert (y.dtype, y.shape) == (dtype, (2, 5, 150))
  tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
  np.testing.assert_allclose(np.asarray(y, np.float64).reshape(10, 150), expected, rtol=tolerance, atol=1e-6)
  if dtype == jnp.float32:
    values = round_trip(normal(150, 200, seed=1, scale=0.02), format)[1]
    plain = np.asarray(fake_groups(x, format)).reshape(10, 200) @ np.asarray(values).T
    np.testing.assert_allclose(plain, expected, rtol=1e-5, atol=1e-5)


def test_error_of_a_product():
  x, w = normal(256, 1024), half(normal(1024, 1024, seed=1, scale=0.02))
  y = product(x, quantise(w.astype(np.float32), 'float32'))
  assert error(y, x.astype(np.float64) @ w.T) == pytest.approx(0.037, abs=1e-3)


def test_the_quantisation_of_a_token_depends_on_no_other_token():
  """Codes and scales of a token are equal alone and in a batch, bit for bit."""
  x = normal(16, 200)
  codes, scale = quantise_groups(x, 'float32')
  for i in (0, 7, 15):
    alone, of_one = quantise_groups(np.repeat(x[i : i + 1], 16, axis=0), 'float32')
    np.testing.assert_array_equal(np.asarray(alone).view(np.uint8)[3], np.asarray(codes).view(np.uint8)[i])
    np.testing.assert_array_equal(of_one[3], scale[i])


def test_a_quantised_weight_is_a_pytree_of_its_arrays():
  q = quantise(np.ones((4, 32), np.float32), 'mxfp8')
  leaves, tree = jax.tree.flatten(q)
  assert [leaf.dtype for leaf in leaves] == [jnp.float8_e4m3fn, jnp.float32]
  again = jax.tree.unflatten(tree, leaves)
  assert isinstance(again, BlockScaled)
  assert again.format == 'mxfp8'


@pytest.mark.parametrize('format', LAYOUT)
def test_each_expert_is_quantised_independently(format):
  w = (normal(3, 200, 140) * np.array([1, 1e-3, 50])[:, None, None]).astype(np.float32)
  together, values = round_trip(w, format)
  for x, (apart, of_one) in enumerate(round_trip(expert, format) for expert in w):
    np.testing.assert_array_equal(np.asarray(together.codes[x]).view(np.uint8), np.asarray(apart.codes).view(np.uint8))
    np.testing.assert_array_equal(together.scale[x], apart.scale)
    np.testing.assert_array_equal(values[x], of_one)
