"""Schedules by hand, and what the optimisers do to matrices and vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.learner.state import TrainState, clipped, make_optimizer, schedule
from sprl.settings import Optimizer


def rates(updates, **settings):
  rate = schedule(Optimizer(learning_rate=1.0, **settings), updates)
  return [float(rate(i)) for i in range(updates + 1)]


def test_constant_after_a_linear_warm_up():
  np.testing.assert_allclose(rates(4), [1, 1, 1, 1, 1])
  np.testing.assert_allclose(rates(5, warmup_steps=3), [0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_down_to_the_final_fraction():
  np.testing.assert_allclose(rates(4, schedule='linear'), [1, 0.75, 0.5, 0.25, 0], atol=1e-6)
  np.testing.assert_allclose(rates(4, schedule='linear', final_fraction=0.2), [1, 0.8, 0.6, 0.4, 0.2], rtol=1e-6)
  np.testing.assert_allclose(rates(5, schedule='linear', warmup_steps=1), [0.5, 1, 0.75, 0.5, 0.25, 0], atol=1e-6)


def test_cosine_down_to_the_final_fraction():
  expected = [0.1 + 0.9 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(5)]
  np.testing.assert_allclose(rates(4, schedule='cosine', final_fraction=0.1), expected, rtol=1e-6)


def test_a_warm_up_longer_than_the_run_keeps_rising():
  np.testing.assert_allclose(rates(2, schedule='cosine', warmup_steps=9), [0.1, 0.2, 0.3], rtol=1e-6)


PARAMS = {'matrix': jnp.full((2, 3), 4.0), 'vector': jnp.full(3, 4.0)}


def first_update(gradient, **settings):
  optimizer = make_optimizer(Optimizer(learning_rate=0.01, **settings), 10)
  grads = jax.tree.map(lambda p: jnp.full_like(p, gradient), PARAMS)
  return optimizer.update(grads, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize('name', ['adamw', 'lion', 'adafactor'])
def test_weight_decay_follows_the_learning_rate_and_spares_vectors(name):
  update, _ = first_update(0.0, name=name, weight_decay=0.5)
  np.testing.assert_allclose(update['matrix'], -0.01 * 0.5 * 4.0, rtol=1e-6)
  assert not np.any(update['vector'])


@pytest.mark.parametrize(('name', 'size'), [('sgd', 0.01 * 0.3), ('adamw', 0.01), ('adam', 0.01), ('lion', 0.01)])
def test_a_first_step_goes_down_the_gradient(name, size):
  update, _ = first_update(0.3, name=name, weight_decay=0.0, clip_norm=0.0)
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


def test_a_norm_that_is_known_is_not_found_again():
  grads = {'matrix': jnp.full((2, 3), 2.0), 'vector': jnp.full(3, jnp.nan)}  # of which no norm could be found
  update, _ = clipped(0.5).update(grads, clipped(0.5).init(grads), None, norm=jnp.float32(4.0))
  np.testing.assert_allclose(update['matrix'], 2.0 * 0.5 / 4.0, rtol=1e-6)
  for limit in (0.0, np.inf):
    unclipped = make_optimizer(Optimizer(name='sgd', learning_rate=1.0, clip_norm=limit), 1)
    update, _ = unclipped.update(grads, unclipped.init(grads), grads, norm=jnp.float32(4.0))
    np.testing.assert_array_equal(update['matrix'], -2.0)


def test_a_gradient_of_zeros_is_clipped_to_zeros():
  nothing = jnp.zeros(3)
  np.testing.assert_array_equal(clipped(0.5).update(nothing, clipped(0.5).init(nothing))[0], nothing)


def test_a_state_starts_at_version_0():
  state = TrainState.create(PARAMS, make_optimizer(Optimizer(), 10))
  assert (int(state.version), int(state.skipped), int(state.bad_streak)) == (0, 0, 0)
  buffers = [x.unsafe_buffer_pointer() for x in (state.version, state.skipped, state.bad_streak)]
  assert len(set(buffers)) == 3  # each can be donated
