"""Casts to e4m3 against the casts of ml_dtypes and float64 arithmetic in numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sprl.kernels.e4m3 import numbers
from sprl.quant import fp8

E4M3 = ml_dtypes.float8_e4m3fn
TABLE = np.arange(256, dtype=np.uint8).view(E4M3)  # every code; 127 and 255 are nan
FINITE = np.unique(TABLE[np.isfinite(TABLE.astype(np.float32))].astype(np.float32))


def codes_of(array):
  return np.asarray(array).view(np.uint8)


def probes():
  """Return e4m3 values, the ties between two, their float32 neighbours, and a million values over and beyond the range."""
  rng = np.random.default_rng(0)
  ties = (FINITE[1:] + FINITE[:-1]) / 2
  near = [np.nextafter(v, np.float32(s * np.inf)) for v in (FINITE, ties) for s in (-1, 1)]
  wide = rng.choice([-1, 1], 10**6) * 2 ** rng.uniform(-14, 10, 10**6)
  return np.concatenate([FINITE, ties, *near, wide, [-0.0, 448, 464, 464.1, -464.1, np.inf, -np.inf]]).astype(np.float32)


@pytest.mark.parametrize('compiled', [False, True])
def test_cast_is_round_to_nearest_even_after_the_clamp(compiled):
  x = probes()
  cast = jax.jit(fp8.cast) if compiled else fp8.cast
  codes = cast(jnp.asarray(x), 1.0)
  assert codes.dtype == jnp.float8_e4m3fn
  np.testing.assert_array_equal(codes_of(codes), np.clip(x, -448, 448).astype(E4M3).view(np.uint8))


def test_nan_stays_nan_and_infinity_becomes_the_largest():
  x = jnp.asarray([jnp.nan, -jnp.nan, jnp.inf, -jnp.inf])
  np.testing.assert_array_equal(fp8.fake(x, 0.5), [np.nan, np.nan, 224, -224])


@pytest.mark.parametrize(
  ('x', 'code'), [(448, 448), (449, 448), (464, 448), (464.1, 448), (-464.1, -448), (2.0**-10, 0), (2.0**-9, 2.0**-9)]
)
def test_values_at_the_edges_of_the_range(x, code):
  assert float(fp8.cast(jnp.asarray([x], jnp.float32), 1.0)[0]) == code


@pytest.mark.parametrize('compiled', [False, True])
def test_fake_is_decast_of_cast_bit_for_bit(compiled):
  x, scale = np.append(probes(), np.float32(np.nan)), np.float32(0.37)
  fake = jax.jit(fp8.fake) if compiled else fp8.fake
  expected = np.clip(x / scale, -448, 448).astype(E4M3).astype(np.float32) * scale
  got = np.asarray(fake(jnp.asarray(x), jnp.asarray(scale)))
  np.testing.assert_array_equal(got.view(np.int32)[:-1], expected.view(np.int32)[:-1])
  assert np.isnan(got[-1])


def test_denormals_of_float32_are_zero():
  x = np.asarray([1e-40, -1e-45, 0], np.float32)
  np.testing.assert_array_equal(fp8.fake(jnp.asarray(x), 1.0), [0, 0, 0])


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
def test_numbers_of_every_code_bit_for_bit(dtype):
  got, expected = np.asarray(jax.jit(numbers, static_argnums=1)(jnp.asarray(TABLE), dtype)), TABLE.astype(dtype)
  finite = np.isfinite(TABLE.astype(np.float32))
  assert got.dtype == dtype
  np.testing.assert_array_equal(got.view(np.uint8).reshape(256, -1)[finite], expected.view(np.uint8).reshape(256, -1)[finite])
  assert np.isnan(got[~finite].astype(np.float32)).all()


def test_decast_of_every_code():
  scale = np.float32(0.37)
  np.testing.assert_array_equal(fp8.decast(jnp.asarray(TABLE), jnp.asarray(scale)), TABLE.astype(np.float32) * scale)
  half = fp8.decast(jnp.asarray(TABLE), jnp.asarray(scale), jnp.bfloat16)
  assert half.dtype == jnp.bfloat16
  expected = (TABLE.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(np.asarray(half, np.float32), expected.astype(np.float32))


def test_scales_broadcast_and_dtypes_are_kept():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16)
  scale = np.asarray([[0.01], [0.1], [1]], np.float32)
  codes = (x.astype(np.float32) / scale).clip(-448, 448).astype(E4M3)
  np.testing.assert_array_equal(codes_of(fp8.cast(jnp.asarray(x), jnp.asarray(scale))), codes.view(np.uint8))
  back = fp8.fake(jnp.asarray(x), jnp.asarray(scale))
  assert back.dtype == jnp.bfloat16
  np.testing.assert_array_equal(back, (codes.astype(np.float32) * scale).astype(ml_dtypes.bfloat16))


def test_saturated_marks_values_beyond_448_but_not_nan():
  x = jnp.asarray([447, 448, 448.1, -449, jnp.inf, jnp.nan])
  np.testing.assert_array_equal(fp8.saturated(x, 1.0), [False, False, True, True, True, False])
  assert not fp8.saturated(x[:5], 2.0)[:4].any()


def test_round_trip_error_of_one_scale():
  w = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
  error = fp8.fake(jnp.asarray(w), float(np.abs(w).max() / 448)) - w
  assert np.linalg.norm(error) / np.linalg.norm(w) == pytest.approx(0.0265, abs=3e-4)


def test_pow2_of_powers_of_two_is_exact():
  powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
  np.testing.assert_array_equal(fp8.pow2(jnp.asarray(powers)), powers)


def test_pow2_is_the_next_power_of_two():
  rng = np.random.default_rng(0)
  scale = rng.integers(1 << 23, 254 << 23, 10**6, dtype=np.int32).view(np.float32)  # every exponent below the last
  scale[:254] = np.nextafter(np.ldexp(np.float32(1), np.arange(-126, 128)), np.float32(0)).astype(np.float32)
  scale[0] = 2.0**-126
  scale[254:507] = np.nextafter(np.ldexp(np.float32(1), np.arange(-126, 127)), np.float32(np.inf)).astype(np.float32)
  np.testing.assert_array_equal(jax.jit(fp8.pow2)(jnp.asarray(scale)), np.exp2(np.ceil(np.log2(scale.astype(np.float64)))))


def test_pow2_is_clamped():
  scale = jnp.asarray([0, 1e-42, 3e38], jnp.float32)
  np.testing.assert_array_equal(fp8.pow2(scale), np.float32([2.0**-126, 2.0**-126, 2.0**127]))
