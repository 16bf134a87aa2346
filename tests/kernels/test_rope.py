"""Rotary frequencies against float64 formulas written plane by plane, and rotation against complex numbers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from sprl.kernels.rope import Rope, frequencies, rotate, turns

D = 64


def plain(theta=10_000.0):
  return np.array([theta ** (-2 * i / D) for i in range(D // 2)])


def test_default_frequencies_are_powers_of_theta():
  inv_freq, scale = frequencies(Rope(theta=1e6), D)
  assert inv_freq.dtype == np.float32
  assert scale == 1.0
  np.testing.assert_allclose(inv_freq, plain(1e6), rtol=1e-6)
  np.testing.assert_allclose(frequencies(Rope(theta=100.0), 4)[0], [1.0, 0.1], rtol=1e-7)


def test_linear_scaling_divides_every_frequency():
  inv_freq, scale = frequencies(Rope('linear', factor=4.0), D)
  np.testing.assert_allclose(inv_freq, plain() / 4, rtol=1e-6)
  assert scale == 1.0


def test_llama3_keeps_high_divides_low_and_blends_between():
  # Llama 3.1's numbers: wavelengths below 8192 / 4 are kept, frequencies of wavelengths above 8192 / 1 are divided by 8.
  rope = Rope('llama3', 500_000.0, factor=8.0, original_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
  expected, seen = [], set()
  for frequency in plain(500_000.0):
    wavelength = 2 * math.pi / frequency
    if wavelength < 2048:
      expected.append(frequency)
      seen.add('kept')
    elif wavelength > 8192:
      expected.append(frequency / 8)
      seen.add('slowed')
    else:
      smooth = (8192 / wavelength - 1) / 3
      expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
      seen.add('blended')
  assert seen == {'kept', 'slowed', 'blended'}
  inv_freq, scale = frequencies(rope, D)
  np.testing.assert_allclose(inv_freq, expected, rtol=2e-6)
  assert scale == 1.0


@pytest.mark.parametrize('truncate', [True, False])
def test_yarn_ramps_between_beta_fast_and_beta_slow(truncate):
  rope = Rope('yarn', factor=4.0, original_positions=2048, truncate=truncate)
  low, high = (D * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(10_000.0)) for turns in (32.0, 1.0))
  if truncate:
    low, high = math.floor(low), math.ceil(high)
  expected = []
  for i, frequency in enumerate(plain()):
    slowed = min(max((i - low) / (high - low), 0.0), 1.0)
    expected.append(frequency / 4 * slowed + frequency * (1 - slowed))
  inv_freq, scale = frequencies(rope, D)
  np.testing.assert_allclose(inv_freq, expected, rtol=2e-6)
  assert scale == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_yarn_with_equal_bounds_makes_a_step():
  inv_freq, _ = frequencies(Rope('yarn', factor=2.0, original_positions=64, beta_fast=1.0, beta_slow=1.0, truncate=False), D)
  assert np.isfinite(inv_freq).all()
  step = D * math.log(64 / (2 * math.pi)) / (2 * math.log(10_000.0))
  expected = [f if i <= step else f / 2 for i, f in enumerate(plain())]
  np.testing.assert_allclose(inv_freq, expected, rtol=2e-6)


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    ({'attention_factor': 1.25}, 1.25),
    ({'mscale': 1.0, 'mscale_all_dim': 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
    ({'mscale': 0.707}, 0.1 * math.log(40) + 1),  # needs both
    ({'factor': 1.0}, 1.0),
  ],
)
def test_yarn_attention_scale(settings, expected):
  assert frequencies(Rope('yarn', **{'factor': 40.0, 'original_positions': 4096} | settings), D)[1] == pytest.approx(expected)


def test_rotation_is_complex_multiplication():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
  positions = np.array([[0, 1, 2, 3, 4], [7, 7, 100, 0, 999]])
  rope = Rope('yarn', theta=100.0, factor=2.0, original_positions=64)
  inv_freq, scale = frequencies(rope, 8)
  turned = (x[..., :4] + 1j * x[..., 4:]) * scale * np.exp(1j * positions[..., None, None] * inv_freq.astype(np.float64))
  actual = rotate(jnp.asarray(x), turns(jnp.asarray(positions), 8, rope))
  np.testing.assert_allclose(actual, np.concatenate([turned.real, turned.imag], -1), atol=2e-4)


def test_position_zero_and_dtype_are_unchanged():
  x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 2, 1, 8)), jnp.bfloat16)
  actual = rotate(x, turns(jnp.zeros((1, 2), jnp.int32), 8, Rope()))
  assert actual.dtype == jnp.bfloat16
  np.testing.assert_array_equal(actual, x)


def test_score_depends_only_on_the_distance():
  rng = np.random.default_rng(2)
  q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

  def score(i, j):
    at = (turns(jnp.array([[position]]), 16, Rope()) for position in (i, j))
    return float(jnp.sum(rotate(q, next(at)) * rotate(k, next(at))))

  assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
  assert abs(score(9, 4) - score(9, 5)) > 1e-3
