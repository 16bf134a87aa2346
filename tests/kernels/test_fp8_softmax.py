"""Softmax weights rounded to e4m3, against the casts of ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from sprl.kernels.fp8_softmax import origin, rounded

E4M3 = ml_dtypes.float8_e4m3fn


def test_rounding_equals_the_cast_of_ml_dtypes():
  """The values are all codes up to 448, the ties between two, their float32 neighbours, and values down to underflow."""
  codes = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
  ties = (codes[1:] + codes[:-1]) / 2
  near = [np.nextafter(x, np.float32(to)) for x in (codes, ties) for to in (0, 448)]
  wide = 2 ** np.random.default_rng(0).uniform(-20, np.log2(448), 10**6)
  given = np.concatenate([codes, ties, *near, wide]).astype(np.float32)
  expected = given.astype(E4M3).astype(np.float32)
  for function in (rounded, jax.jit(rounded)):
    np.testing.assert_array_equal(function(jnp.asarray(given)), expected)


def test_the_largest_weight_is_half_a_power_of_two_around_256():
  largest = np.concatenate([np.random.default_rng(0).uniform(-1e4, 1e4, 1000), [-0.5, 0.5, 1.5]]).astype(np.float32)
  found = np.asarray(origin(jnp.asarray(largest)))
  np.testing.assert_array_equal(found, np.round(found))
  weight = 2.0 ** (largest.astype(np.float64) - found)
  assert np.all((weight >= 2**7.5) & (weight <= 2**8.5))
