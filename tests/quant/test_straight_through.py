"""FP8 products with gradients to the master weight, against NumPy in float64 at the same rounded operands."""

from functools import partial

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.quant.block import quantise
from sprl.quant.dot import PRODUCT, LowRank, StraightThrough, dot

rng = np.random.default_rng(0)
X, W, G = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 5, 300), (150, 300), (2, 5, 150)))
X[..., :40] *= 50  # groups of different size
W[:, 140:] *= 0.01


def copied(w, format, arithmetic, dtype=jnp.float32):
  copy = quantise(w, format)
  return copy if arithmetic == 'blockwise' else copy.emulated(dtype)


@partial(jax.jit, static_argnums=(3, 4))
def product_and_gradients(x, w, g, format, arithmetic):
  copy = copied(w, format, arithmetic, x.dtype)
  y, back = jax.vjp(lambda x, w: dot(x, StraightThrough(w, copy)), x, w)
  return y, *back(g)


@pytest.mark.parametrize('arithmetic', ['emulate', 'blockwise'])
@pytest.mark.parametrize('format', ['float32', 'pow2', 'mxfp8'])
def test_product_and_gradients_are_those_of_the_rounded_operands(format, arithmetic):
  y, dx, dw = product_and_gradients(X, W, G, format, arithmetic)
  x8, w8 = fp8_oracle.activations(X.reshape(10, 300), format), fp8_oracle.weight(W, format)
  g = G.reshape(10, 150).astype(np.float64)
  np.testing.assert_allclose(y.reshape(10, 150), x8 @ w8.T, rtol=1e-5, atol=1e-3)
  np.testing.assert_allclose(dx.reshape(10, 300), g @ w8, rtol=1e-5, atol=1e-4)
  np.testing.assert_allclose(dw, g.T @ x8, rtol=1e-5, atol=1e-4)
  # A gradient at the unrounded operands would differ by the error of FP8.
  assert np.linalg.norm(dx.reshape(10, 300) - g @ W) > 0.01 * np.linalg.norm(dx)
  assert np.linalg.norm(dw - g.T @ X.reshape(10, 300)) > 0.01 * np.linalg.norm(dw)


@pytest.mark.parametrize('arithmetic', ['emulate', 'blockwise'])
def test_float32_weights_under_bfloat16_activations_have_float32_gradients(arithmetic):
  x, g = jnp.asarray(X, jnp.bfloat16), jnp.asarray(G, jnp.bfloat16)
  y, dx, dw = product_and_gradients(x, W, g, 'float32', arithmetic)
  assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
  x8, g = fp8_oracle.activations(np.asarray(x).reshape(10, 300)), np.asarray(g, np.float64).reshape(10, 150)
  exact = g.T @ x8
  assert np.linalg.norm(dw - exact) < 2**-8 * np.linalg.norm(exact)  # code times scale is rounded to bfloat16, the sum is not
  assert np.abs(np.asarray(dw.astype(jnp.bfloat16), np.float64) - np.asarray(dw)).max() > 1e-3


@pytest.mark.parametrize('arithmetic', ['emulate', 'blockwise'])
def test_an_adapter_is_merged_before_rounding_and_gets_the_gradient_of_the_merged_weight(arithmetic):
  """dA = s B^T dW and dB = s dW A^T."""
  a, b, s = rng.normal(size=(3, 300)).astype(np.float32), rng.normal(size=(150, 3)).astype(np.float32), 0.5

  @jax.jit
  def of_adapter(x, a, b):
    def product(a, b):
      w = LowRank(jnp.asarray(W), a, b, s)
      return dot(x, StraightThrough(w, copied(w.merged(), 'float32', arithmetic)))

    y, back = jax.vjp(product, a, b)
    return y, *back(jnp.asarray(G))

  y, da, db = of_adapter(X, a, b)
  w8 = fp8_oracle.weight(np.float32(W + s * (b.astype(np.float64) @ a)))
  x8 = fp8_oracle.activations(X.reshape(10, 300))
  error = np.linalg.norm(y.reshape(10, 150) - x8 @ w8.T)
  assert error < 1e-3 * np.linalg.norm(y)  # a sum next to a rounding boundary may have another code
  dw = G.reshape(10, 150).astype(np.float64).T @ x8
  np.testing.assert_allclose(da, s * b.T.astype(np.float64) @ dw, rtol=1e-4, atol=1e-2)
  np.testing.assert_allclose(db, s * dw @ a.T, rtol=1e-4, atol=1e-2)


def test_rematerialisation_can_save_the_product_and_keeps_the_gradient():
  copy = copied(jnp.asarray(W), 'float32', 'emulate')

  def loss(x, w):
    return jnp.sum(G * jnp.tanh(dot(x, StraightThrough(w, copy))))

  policy = jax.checkpoint_policies.save_only_these_names(PRODUCT)
  gradients = [jax.jit(jax.value_and_grad(f, (0, 1))) for f in (loss, jax.checkpoint(loss, policy=policy), jax.checkpoint(loss))]
  inputs = jnp.asarray(X * 0.01), jnp.asarray(W)
  (_, plain), (_, saved), _ = (gradient(*inputs) for gradient in gradients)
  for a, b in zip(plain, saved):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
  products = [gradient.lower(*inputs).as_text().count('stablehlo.dot_general') for gradient in gradients]
  assert products == [3, 3, 4]  # without the name, rematerialisation computes the product again
  assert np.abs(plain[1]).max() > 0.1
