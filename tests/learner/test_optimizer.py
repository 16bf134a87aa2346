"""Optimisers: schedules worked out by hand, updates of matrices and vectors, and moments in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.config import Optimizer
from sprl.learner.optimizer import clip_by_norm, last_rate, make_optimizer, rounded, scale_by_adam, schedule
from sprl.learner.state import TrainState, guarded_step


def rates(updates, **settings):
  rate = schedule(Optimizer(learning_rate=1.0, **settings), updates)
  return [float(rate(i)) for i in range(updates + 1)]


def test_constant_after_a_linear_warm_up():
  np.testing.assert_allclose(rates(4), [1, 1, 1, 1, 1])
  np.testing.assert_allclose(rates(5, warmup_steps=3), [0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_down_to_0():
  np.testing.assert_allclose(rates(4, schedule='linear'), [1, 0.75, 0.5, 0.25, 0], atol=1e-6)
  np.testing.assert_allclose(rates(5, schedule='linear', warmup_steps=1), [0.5, 1, 0.75, 0.5, 0.25, 0], atol=1e-6)


def test_cosine_down_to_0():
  expected = [(1 + np.cos(np.pi * i / 4)) / 2 for i in range(5)]
  np.testing.assert_allclose(rates(4, schedule='cosine'), expected, atol=1e-6)


def test_a_warm_up_longer_than_the_run_keeps_rising():
  np.testing.assert_allclose(rates(2, schedule='cosine', warmup_steps=9), [0.1, 0.2, 0.3], rtol=1e-6)


@pytest.mark.parametrize('name', ['adamw', 'adam', 'lion', 'sgd', 'adafactor'])
def test_the_logged_rate_is_that_of_the_schedule_and_a_skipped_update_does_not_advance_it(name):
  """Updates 0 and 1 are taken, update 2 is skipped, update 3 is taken with the rate that update 2 would have had."""
  settings = Optimizer(name=name, schedule='cosine', learning_rate=0.1, warmup_steps=1, clip_norm=1.0)
  state, rate, found = TrainState.create(PARAMS, make_optimizer(settings, 4)), schedule(settings, 4), []
  for gradient in (0.3, 0.3, np.nan, 0.3):
    grads = jax.tree.map(lambda p, g=gradient: jnp.full_like(p, g), PARAMS)
    state, metrics = guarded_step(state, make_optimizer(settings, 4), grads, jnp.float32(0), jnp.int32(1))
    assert int(metrics['update/skipped']) == int(np.isnan(gradient))
    found.append(last_rate(rate, state.opt_state, skipped=bool(metrics['update/skipped'])))
  after = 0.05 * (1 + np.cos(np.pi / 3))
  np.testing.assert_allclose(found, [0.05, 0.1, after, after], rtol=1e-6)


PARAMS = {'matrix': jnp.full((2, 3), 4.0), 'vector': jnp.full(3, 4.0)}


def first_update(gradient, **settings):
  optimizer = make_optimizer(Optimizer(learning_rate=0.01, **settings), 10)
  grads = jax.tree.map(lambda p: jnp.full_like(p, gradient), PARAMS)
  return jax.jit(optimizer.update)(grads, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize('name', ['adamw', 'lion', 'adafactor'])
def test_weight_decay_follows_the_rate_and_leaves_out_vectors(name):
  update, _ = first_update(0.0, name=name, weight_decay=0.5)
  np.testing.assert_allclose(update['matrix'], -0.01 * 0.5 * 4.0, rtol=1e-6)
  assert not np.any(update['vector'])


@pytest.mark.parametrize(('name', 'size'), [('sgd', 0.01 * 0.3), ('adamw', 0.01), ('adam', 0.01), ('lion', 0.01)])
def test_a_first_step_goes_down_the_gradient(name, size):
  update, _ = first_update(0.3, name=name, weight_decay=0.0, clip_norm=None)
  for step in jax.tree.leaves(update):
    np.testing.assert_allclose(step, -size, rtol=1e-4)


def test_adafactor_steps_in_proportion_to_the_weights():
  update, _ = first_update(0.3, name='adafactor', weight_decay=0.0)
  for step in jax.tree.leaves(update):
    np.testing.assert_allclose(step, -0.01 * 4.0, rtol=1e-3)


def test_gradients_are_clipped_by_their_norm_over_all_weights():
  update, _ = first_update(2.0, name='sgd', clip_norm=0.6)
  np.testing.assert_allclose(update['vector'], -0.01 * 2.0 * 0.6 / np.sqrt(9 * 4.0), rtol=1e-6)
  update, _ = first_update(0.1, name='sgd', clip_norm=0.6)  # norm 0.3
  np.testing.assert_allclose(update['vector'], -0.01 * 0.1, rtol=1e-6)


def test_a_known_norm_is_not_computed_again():
  grads = {'matrix': jnp.full((2, 3), 2.0), 'vector': jnp.full(3, jnp.nan)}  # their own norm is NaN
  update, _ = clip_by_norm(0.5).update(grads, clip_by_norm(0.5).init(grads), None, norm=jnp.float32(4.0))
  np.testing.assert_allclose(update['matrix'], 2.0 * 0.5 / 4.0, rtol=1e-6)
  for limit in (None, np.inf):
    unclipped = make_optimizer(Optimizer(name='sgd', learning_rate=1.0, clip_norm=limit), 1)
    update, _ = unclipped.update(grads, unclipped.init(grads), grads, norm=jnp.float32(4.0))
    np.testing.assert_array_equal(update['matrix'], -2.0)


def test_a_gradient_of_zeros_is_clipped_to_zeros():
  nothing = jnp.zeros(3)
  np.testing.assert_array_equal(clip_by_norm(0.5).update(nothing, clip_by_norm(0.5).init(nothing))[0], nothing)


# --- moments ---------------------------------------------------------------------------------------------------------


def test_stochastic_rounding_keeps_the_mean():
  """Numbers are a quarter of the way from a bfloat16 number to the next, such as from 1 to 1 + 1/128."""
  for low, high in ((1.0, 1 + 2**-7), (-3.0, -3 - 2**-6), (2.0**-120, 2.0**-120 * (1 + 2**-7))):
    x = np.float32(low + 0.25 * (high - low))
    found = np.asarray(rounded(jnp.full(40_000, x), jnp.uint32(7))).astype(np.float64)
    assert set(np.unique(found)) == {low, high}
    np.testing.assert_allclose(np.mean(found == high), 0.25, atol=0.01)  # 4.6 standard deviations


def test_rounding_keeps_bfloat16_and_non_finite_numbers():
  x = jnp.array([0.0, -0.0, 1.5, -(2.0**-130), 3e38, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
  exact = x.astype(jnp.bfloat16).astype(jnp.float32)
  x = jnp.where(jnp.abs(x) == 3e38, exact, x)
  np.testing.assert_array_equal(np.asarray(rounded(x, jnp.uint32(1))).astype(np.float32), exact)


def adam(gradients, b1, b2, eps=1e-8):
  """Yield the steps and second moments of Kingma and Ba, algorithm 1, in float64."""
  m = v = np.zeros(gradients.shape[1])
  for t, g in enumerate(gradients.astype(np.float64), start=1):
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    yield m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps), v


def run(gradients, dtype, b1, b2):
  """Return (steps, second moments) of `scale_by_adam`."""
  optimizer = scale_by_adam(b1, b2, 1e-8, jnp.dtype(dtype))

  @jax.jit
  def all_of(gradients):
    def one(state, g):
      step, state = optimizer.update(g, state)
      return state, (step, state.nu)

    return jax.lax.scan(one, optimizer.init(gradients[0]), gradients)[1]

  steps, second = all_of(jnp.asarray(gradients))
  return np.asarray(steps), np.asarray(second, np.float32)


def test_scale_by_adam_in_float32_is_adam():
  gradients = np.random.default_rng(0).normal(size=(50, 30)).astype(np.float32)
  expected = np.array([step for step, _ in adam(gradients, 0.9, 0.98)])
  np.testing.assert_allclose(run(gradients, 'float32', 0.9, 0.98)[0], expected, rtol=2e-5, atol=1e-6)


def test_the_second_moment_in_bfloat16_follows_shrinking_gradients():
  """At b2 = 0.999, rounding to nearest keeps the moment of the large gradients, which is 100 times too high."""
  rng = np.random.default_rng(1)
  gradients = np.concatenate([rng.normal(size=(1000, 64)), 0.1 * rng.normal(size=(5000, 64))]).astype(np.float32)
  *_, (_, expected) = adam(gradients, 0.9, 0.999)
  _, second = run(gradients, 'bfloat16', 0.9, 0.999)
  assert 0.009 < expected.mean() < 0.02
  np.testing.assert_allclose(second[-1].mean() / expected.mean(), 1, atol=0.03)
  # A change of d = 0.001 |g^2 - v| becomes one unit u = v / 180 with probability d / u: variance d u, summed over 500 updates.
  assert np.std(second[-1] / expected) < 0.08


WEIGHTS = {'matrix': (512, 2048), 'vector': (512,)}


@pytest.mark.parametrize(
  ('name', 'dtype', 'expected'),
  [
    ('adamw', 'float32', 8), ('adamw', 'bfloat16', 4), ('lion', 'float32', 4), ('lion', 'bfloat16', 2),
    ('adafactor', 'float32', 4 * (512 + 2048) / (512 * 2048)), ('sgd', 'float32', 0),
  ],
)  # fmt: skip
def test_bytes_of_optimiser_state_a_weight(name, dtype, expected):
  weights = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in WEIGHTS.items()}
  state = jax.eval_shape(make_optimizer(Optimizer(name=name, moment_dtype=dtype), 10).init, weights)
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
  assert size / sum(w.size for w in weights.values()) == pytest.approx(expected, abs=0.01)
