"""Moments in fewer bytes: what rounding does to an average, what a state weighs, and moments that lie on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.learner.moments import rounded, scale_by_adam
from sprl.learner.state import make_optimizer
from sprl.settings import Optimizer, Run, SettingsError, resolve, to_dict


def test_a_number_is_rounded_to_its_neighbours_so_that_the_mean_is_the_number():
  """Between 1 and its successor 1 + 1/128 in bfloat16, a quarter of the way; below 0 and for tiny numbers alike."""
  for low, high in ((1.0, 1 + 2**-7), (-3.0, -3 - 2**-6), (2.0**-120, 2.0**-120 * (1 + 2**-7))):
    x = np.float32(low + 0.25 * (high - low))
    found = np.asarray(rounded(jnp.full(40_000, x), jnp.uint32(7))).astype(np.float64)
    assert set(np.unique(found)) == {low, high}
    np.testing.assert_allclose(np.mean(found == high), 0.25, atol=0.01)  # 4.6 standard deviations


def test_what_bfloat16_holds_stays_and_what_is_not_finite_too():
  x = jnp.array([0.0, -0.0, 1.5, -(2.0**-130), 3e38, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
  exact = x.astype(jnp.bfloat16).astype(jnp.float32)
  x = jnp.where(jnp.abs(x) == 3e38, exact, x)
  np.testing.assert_array_equal(np.asarray(rounded(x, jnp.uint32(1))).astype(np.float32), exact)


def adam(gradients, b1, b2, eps=1e-8):
  """The steps by Kingma and Ba's algorithm 1, in float64."""
  m = v = np.zeros(gradients.shape[1])
  for t, g in enumerate(gradients.astype(np.float64), start=1):
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    yield m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps), v


def run(gradients, dtype, b1, b2):
  """(the last step, the last second moment)."""
  optimizer = scale_by_adam(b1, b2, 1e-8, jnp.dtype(dtype))

  @jax.jit
  def all_of(gradients):
    def one(state, g):
      step, state = optimizer.update(g, state)
      return state, (step, state.nu)

    return jax.lax.scan(one, optimizer.init(gradients[0]), gradients)[1]

  steps, second = all_of(jnp.asarray(gradients))
  return np.asarray(steps), np.asarray(second, np.float32)


def test_in_float32_it_is_adam():
  gradients = np.random.default_rng(0).normal(size=(50, 30)).astype(np.float32)
  expected = np.array([step for step, _ in adam(gradients, 0.9, 0.98)])
  np.testing.assert_allclose(run(gradients, 'float32', 0.9, 0.98)[0], expected, rtol=2e-5, atol=1e-6)


def test_in_bfloat16_the_second_moment_follows_gradients_that_shrink():
  """At b2 = 0.999 rounding to nearest would leave it where the large gradients put it, 100 times too high."""
  rng = np.random.default_rng(1)
  gradients = np.concatenate([rng.normal(size=(1000, 64)), 0.1 * rng.normal(size=(5000, 64))]).astype(np.float32)
  *_, (_, expected) = adam(gradients, 0.9, 0.999)
  _, second = run(gradients, 'bfloat16', 0.9, 0.999)
  assert 0.009 < expected.mean() < 0.02
  np.testing.assert_allclose(second[-1].mean() / expected.mean(), 1, atol=0.03)
  # A step of d = 0.001 |g^2 - v| is taken whole, u = v / 180 on average, with chance d / u: a variance of d u, summed over 500.
  assert np.std(second[-1] / expected) < 0.08


WEIGHTS = {'matrix': (512, 2048), 'vector': (512,)}


@pytest.mark.parametrize(
  ('name', 'dtype', 'expected'),
  [
    ('adamw', 'float32', 8), ('adamw', 'bfloat16', 4), ('lion', 'float32', 4), ('lion', 'bfloat16', 2),
    ('adafactor', 'float32', 4 * (512 + 2048) / (512 * 2048)), ('sgd', 'float32', 0),
  ],
)  # fmt: skip
def test_bytes_of_state_a_weight(name, dtype, expected):
  weights = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in WEIGHTS.items()}
  state = jax.eval_shape(make_optimizer(Optimizer(name=name, moment_dtype=dtype), 10).init, weights)
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  assert size / sum(w.size for w in weights.values()) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize('changes', [{'moment_dtype': 'bfloat16'}, {'offload': True}])
def test_optimisers_without_moments_refuse_what_is_for_moments(changes):
  config = to_dict(Run())
  config['model']['path'] = 'somewhere'
  config['optimizer'] |= {'name': 'adafactor', **changes}
  (key,) = changes
  with pytest.raises(SettingsError, match=f"config.optimizer.{key} = .*: expected .* with config.optimizer.name = 'adafactor'"):
    resolve(config)
