"""The matrix product and its hand-written gradient, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.quant.dot import dot


@pytest.mark.parametrize('lead', [(), (5,), (2, 3)])
def test_product_and_gradients(lead):
  rng = np.random.default_rng(0)
  x, w, g = rng.normal(size=(*lead, 4)), rng.normal(size=(6, 4)), rng.normal(size=(*lead, 6))
  y, back = jax.vjp(dot, jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
  dx, dw = back(jnp.asarray(g, jnp.float32))
  np.testing.assert_allclose(y, x @ w.T, atol=1e-5)
  np.testing.assert_allclose(dx, g @ w, atol=1e-5)
  np.testing.assert_allclose(dw, g.reshape(-1, 6).T @ x.reshape(-1, 4), atol=1e-5)


def test_master_weights_of_float32_under_bfloat16_activations():
  rng = np.random.default_rng(0)
  x, g = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((64, 4), (64, 6)))
  w = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
  y, back = jax.vjp(dot, x, w)
  dx, dw = back(g)
  assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
  exact = np.asarray(g, np.float64).T @ np.asarray(x, np.float64)
  np.testing.assert_allclose(dw, exact, rtol=1e-5, atol=1e-5)  # summed in float32: bfloat16 is good for 1e-2
  assert np.abs(np.asarray(dw.astype(jnp.bfloat16), np.float64) - exact).max() > 1e-3


def test_weights_of_bfloat16_get_a_bfloat16_gradient():
  x, w = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((2, 4), jnp.bfloat16)
  assert jax.grad(lambda w: dot(x, w).sum().astype(jnp.float32))(w).dtype == jnp.bfloat16
