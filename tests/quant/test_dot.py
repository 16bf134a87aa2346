"""The matrix product and its hand-written gradient, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.quant import dot as module
from sprl.quant.block import block_dot, quantise
from sprl.quant.dot import FEW_ROWS, Parts, dot, parted_dot, rows_dot


@pytest.mark.parametrize('lead', [(), (5,), (2, 3)])
def test_product_and_gradients_match_numpy(lead):
  rng = np.random.default_rng(0)
  x, w, g = rng.normal(size=(*lead, 4)), rng.normal(size=(6, 4)), rng.normal(size=(*lead, 6))
  y, back = jax.vjp(dot, jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
  dx, dw = back(jnp.asarray(g, jnp.float32))
  np.testing.assert_allclose(y, x @ w.T, atol=1e-5)
  np.testing.assert_allclose(dx, g @ w, atol=1e-5)
  np.testing.assert_allclose(dw, g.reshape(-1, 6).T @ x.reshape(-1, 4), atol=1e-5)


@pytest.mark.parametrize('slowly', [False, True])
@pytest.mark.parametrize('rows', [3, FEW_ROWS + 1])
@pytest.mark.parametrize(('dtype', 'out'), [('float32', None), ('bfloat16', 'float32')])
def test_products_with_few_and_with_many_rows_match_numpy(monkeypatch, rows, dtype, out, slowly):
  monkeypatch.setattr(module, 'copies_slowly', lambda: slowly)
  rng = np.random.default_rng(0)
  x, w = (jnp.asarray(rng.normal(size=size), dtype) for size in ((rows, 1, 4), (6, 4)))
  y = rows_dot(x, w, out)
  assert (y.shape, y.dtype) == ((rows, 1, 6), out or dtype)
  np.testing.assert_allclose(y, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, atol=1e-5)


def test_bits_of_a_row_do_not_depend_on_its_number_or_on_the_other_rows():
  """The order of the operands depends on the CPU (`copies_slowly`)."""
  x, w = (jax.random.normal(jax.random.key(seed), size) for seed, size in enumerate([(37, 96), (260, 96)]))
  product = jax.jit(rows_dot)
  together = product(x, w)
  for first, last in ((0, 1), (36, 37), (3, 9), (11, 36)):
    np.testing.assert_array_equal(product(x[first:last], w), together[first:last])


def test_float32_weights_under_bfloat16_activations():
  rng = np.random.default_rng(0)
  x, g = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((64, 4), (64, 6)))
  w = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
  y, back = jax.vjp(dot, x, w)
  dx, dw = back(g)
  assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
  exact = np.asarray(g, np.float64).T @ np.asarray(x, np.float64)
  np.testing.assert_allclose(dw, exact, rtol=1e-5, atol=1e-5)  # float32 sums; the error of bfloat16 sums is 1e-2
  assert np.abs(np.asarray(dw.astype(jnp.bfloat16), np.float64) - exact).max() > 1e-3


def test_weights_of_bfloat16_get_a_bfloat16_gradient():
  x, w = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((2, 4), jnp.bfloat16)
  assert jax.grad(lambda w: dot(x, w).sum().astype(jnp.float32))(w).dtype == jnp.bfloat16


product, quantised = jax.jit(dot), jax.jit(quantise, static_argnums=1)


@pytest.mark.parametrize(
  ('format', 'dtype'), [('float32', jnp.float32), ('float32', jnp.bfloat16), ('pow2', jnp.float32), ('mxfp8', jnp.bfloat16)]
)
def test_blockwise_and_emulated_products_agree(format, dtype):
  rng = np.random.default_rng(0)
  x, w = (
    jnp.asarray(rng.normal(size=(2, 5, 200)), dtype),
    quantised(jnp.asarray(rng.normal(size=(150, 200)), jnp.float32), format),
  )
  native, emulated = product(x, w), product(x, jax.jit(lambda w: w.emulated(dtype))(w))
  assert native.dtype == emulated.dtype == dtype
  np.testing.assert_array_equal(native, jax.jit(block_dot)(x, w))
  native, emulated = (np.asarray(y, np.float64) for y in (native, emulated))
  # bfloat16 rounds each factor to 2^-9 and so does the sum of 200 of them
  assert np.linalg.norm(emulated - native) < (1e-6 if dtype == jnp.float32 else 2**-8) * np.linalg.norm(native)


def test_the_sum_of_the_parts_of_a_product_is_the_product(monkeypatch):
  x, w = (np.random.default_rng(i).integers(-8, 8, shape) for i, shape in enumerate([(3, 1, 64), (5, 64)]))
  arrays = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32)
  monkeypatch.setattr(module, 'parts_of_sum', lambda M, N, K: 4 if (M, N, K) == (3, 5, 64) else None)
  found = parted_dot(*arrays)
  assert isinstance(found, Parts)
  assert (found.of.shape, found.of.dtype) == ((4, 3, 1, 5), jnp.float32)
  np.testing.assert_array_equal(found.whole(jnp.float32), x @ w.T)
  np.testing.assert_array_equal(found.of[1], x[..., 16:32] @ w[:, 16:32].T)
  monkeypatch.setattr(module, 'parts_of_sum', lambda M, N, K: 1)
  np.testing.assert_array_equal(parted_dot(*arrays), dot(*arrays))
