"""Mixtures whose experts have FP8 copies: product and gradients at the rounded operands, against every expert in float64."""

from functools import partial

import fp8_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.models.moe import mixture
from sprl.quant.block import quantise
from sprl.quant.dot import StraightThrough

E, F, X, N = 140, 36, 4, 30
rng = np.random.default_rng(0)
SHAPES = {'gate': (X, F, E), 'up': (X, F, E), 'down': (X, E, F)}
WEIGHTS = {name: np.float32(rng.normal(size=shape) / 6) for name, shape in SHAPES.items()}
TOKENS, DIRECTION = (rng.normal(size=(N, E)).astype(np.float32) for _ in range(2))
CHOSEN = np.stack([rng.permutation(X - 1)[:2] for _ in range(N)]).astype(np.int32)  # the last expert has no token
GATES = rng.uniform(0.2, 0.8, (N, 2)).astype(np.float32)


def copied(w, arithmetic):
  copy = quantise(w, 'float32')
  return StraightThrough(w, copy if arithmetic == 'blockwise' else copy.emulated(jnp.float32))


@partial(jax.jit, static_argnums=(3, 4))
def value_and_gradients(weights, x, gates, arithmetic, plain=()):
  """Return (y, gradients) of sum(y * DIRECTION). The experts' weights named in `plain` have no copy."""

  def value(weights, x, gates):
    held = {name: w if name in plain else copied(w, arithmetic) for name, w in weights.items()}
    y = mixture(held, x, jnp.asarray(CHOSEN), gates)
    return jnp.sum(y * DIRECTION), y

  gradients, y = jax.grad(value, argnums=(0, 1, 2), has_aux=True)(weights, x, gates)
  return y, gradients


def by_hand(plain=()):
  """Return y and the gradients in NumPy, token by token."""
  weights = {n: w if n in plain else np.stack([fp8_oracle.weight(e) for e in w]) for n, w in WEIGHTS.items()}
  weights = jax.tree.map(lambda w: np.asarray(w, np.float64), weights)

  def seen(x, name):
    return np.float64(x) if name in plain else fp8_oracle.activations(x[None])[0]

  y, dx, dgates = np.zeros((N, E)), np.zeros((N, E)), np.zeros((N, 2))
  dweights = {name: np.zeros(shape) for name, shape in SHAPES.items()}
  for t in range(N):
    for j, e in enumerate(CHOSEN[t]):
      x, dy, gate = TOKENS[t], np.float64(DIRECTION[t]), np.float64(GATES[t, j])
      a, b = weights['gate'][e] @ seen(x, 'gate'), weights['up'][e] @ seen(x, 'up')
      sigmoid = 1 / (1 + np.exp(-a))
      hidden = seen(a * sigmoid * b, 'down')
      out, dhidden = weights['down'][e] @ hidden, gate * weights['down'][e].T @ dy
      da, db = dhidden * b * sigmoid * (1 + a * (1 - sigmoid)), dhidden * a * sigmoid
      y[t] += gate * out
      dgates[t, j] = out @ dy
      dx[t] += weights['gate'][e].T @ da + weights['up'][e].T @ db
      dweights['gate'][e] += np.outer(da, seen(x, 'gate'))
      dweights['up'][e] += np.outer(db, seen(x, 'up'))
      dweights['down'][e] += np.outer(gate * dy, hidden)
  return y, (dweights, dx, dgates)


@pytest.mark.parametrize(
  ('arithmetic', 'plain'),
  [('emulate', ()), ('blockwise', ()), ('emulate', ('down',)), ('blockwise', ('gate',))],
)
def test_product_and_gradients_are_those_of_the_rounded_operands(arithmetic, plain):
  found = value_and_gradients(WEIGHTS, TOKENS, GATES, arithmetic, plain)
  expected = by_hand(plain)

  def error(a, b):
    return np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)

  # A hidden number next to a rounding boundary may have another code: one in about 10^5.
  errors = jax.tree.map(error, found, expected)
  assert max(jax.tree.leaves(errors)) < 2e-3, errors
  unrounded = jax.tree.leaves(jax.tree.map(error, by_hand(('gate', 'up', 'down')), expected))
  assert min(unrounded) > 0.01
  assert not np.any(found[1][0]['gate'][X - 1])


def test_a_copy_changes_no_dtype():
  x = jnp.asarray(TOKENS, jnp.bfloat16)
  y, (dweights, dx, dgates) = jax.eval_shape(
    lambda *a: value_and_gradients(*a, 'emulate'), jax.tree.map(jnp.asarray, WEIGHTS), x, jnp.asarray(GATES)
  )
  assert {d.dtype for d in dweights.values()} == {jnp.dtype('float32')}
  assert (y.dtype, dx.dtype, dgates.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
