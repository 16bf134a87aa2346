"""The train state: its start, and the guarded step of the optimiser."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.config import Mesh, Optimizer
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState, guarded_step
from sprl.sharding.mesh import make_mesh, replicated

PARAMS = {'matrix': jnp.full((2, 3), 4.0, jnp.float32), 'vector': jnp.full(3, 4.0, jnp.float32)}  # not weakly typed
GRADIENT = jax.tree.map(lambda p: jnp.full_like(p, 0.3), PARAMS)
ADAMW = make_optimizer(Optimizer(learning_rate=0.1), 10)


def jitted(optimizer, donated=0):
  def step(state, gradient, loss, microbatches):
    return guarded_step(state, optimizer, gradient, loss, microbatches)

  return jax.jit(step, donate_argnums=donated)


@pytest.fixture(scope='module')
def step():
  """A jitted guarded step of AdamW: step(state, gradient=..., loss=..., microbatches=...)."""
  compiled = jitted(ADAMW)

  def call(state, gradient=GRADIENT, loss=1.0, microbatches=1):
    return compiled(state, gradient, jnp.float32(loss), jnp.int32(microbatches))

  return call


def fresh(optimizer=ADAMW, params=PARAMS):
  return TrainState.create(jax.tree.map(jnp.copy, params), optimizer)


def arrays(state):
  return jax.tree.map(np.array, (state.params, state.opt_state))


def test_a_state_starts_with_0_updates():
  state = fresh()
  assert (int(state.updates), int(state.skipped), int(state.bad_streak)) == (0, 0, 0)
  buffers = [x.unsafe_buffer_pointer() for x in (state.updates, state.skipped, state.bad_streak)]
  assert len(set(buffers)) == 3  # each can be donated


def test_a_finite_step_moves_weights_and_moments(step):
  state, metrics = step(fresh())
  assert {name: float(x) for name, x in metrics.items()} == {
    'update/loss': 1.0,
    'update/grad_norm': pytest.approx(0.3 * 3),
    'update/skipped': 0.0,
    'update/bad_streak': 0.0,
  }
  np.testing.assert_allclose(state.params['vector'], 4 - 0.1, rtol=1e-5)  # the first step of Adam has the size of the rate
  assert (int(state.updates), int(state.skipped)) == (1, 0)


def test_steps_that_are_not_finite_are_skipped_and_counted(step):
  state, _ = step(fresh())
  before = arrays(state)
  bad = GRADIENT | {'vector': jnp.array([0.1, jnp.inf, 0.1])}
  for streak, wrong in enumerate(({'gradient': bad}, {'loss': np.nan}), start=1):
    state, metrics = step(state, **wrong)
    jax.tree.map(np.testing.assert_array_equal, before, arrays(state))
    assert (int(metrics['update/skipped']), int(metrics['update/bad_streak'])) == (1, streak)
    assert (int(state.updates), int(state.skipped), int(state.bad_streak)) == (1 + streak, streak, streak)
  state, _ = step(state)
  assert (int(state.updates), int(state.skipped), int(state.bad_streak)) == (4, 2, 0)
  assert np.any(state.params['vector'] != before[0]['vector'])


def test_without_a_microbatch_momentum_moves_nothing(step):
  state, _ = step(fresh())
  before = arrays(state)
  state, metrics = step(state, jax.tree.map(jnp.zeros_like, PARAMS), 0.0, microbatches=0)
  jax.tree.map(np.testing.assert_array_equal, before, arrays(state))
  assert (int(state.updates), int(metrics['update/skipped'])) == (2, 0)


def test_offloaded_moments_give_equal_states():
  here = replicated(make_mesh(Mesh(), jax.devices()[:1]))
  abstract = jax.eval_shape(partial(TrainState.create, optimizer=ADAMW), PARAMS)

  def two_updates(kind):
    places = jax.tree.map(lambda _: here, abstract)
    moments = jax.tree.map(lambda leaf: here.with_memory_kind(kind) if leaf.ndim else here, abstract.opt_state)
    places = TrainState(places.params, moments, places.updates, places.skipped, places.bad_streak)
    state = TrainState.create(jax.device_put(jax.tree.map(jnp.copy, PARAMS), here), ADAMW, places)
    update = jitted(ADAMW)
    for _ in range(2):
      state, _ = update(state, GRADIENT, jnp.float32(1), jnp.int32(1))
    assert update._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.sharding.memory_kind, state) == jax.tree.map(lambda place: place.memory_kind, places)
    return state

  default = jax.devices()[0].default_memory().kind
  jax.tree.map(np.testing.assert_array_equal, two_updates('pinned_host'), two_updates(default))


@pytest.mark.parametrize(
  'name', ['adamw', 'adafactor', *(pytest.param(name, marks=pytest.mark.slow) for name in ('adam', 'lion', 'sgd'))]
)
def test_weights_and_moments_in_bfloat16_keep_their_dtype_and_move(name):
  half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  optimizer = make_optimizer(Optimizer(name=name, learning_rate=0.1, moment_dtype='bfloat16'), 10)
  state = fresh(optimizer, half)
  kinds = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  after, _ = jitted(optimizer)(state, GRADIENT, jnp.float32(1), jnp.int32(1))  # gradients are float32
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == kinds
  assert np.all(after.params['matrix'] != half['matrix'])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_adam_overwrites_weights_and_moments_without_copies(dtype):
  held = {'a': jnp.ones((24, 40), dtype), 'b': jnp.ones((56, 8), dtype)}
  optimizer = make_optimizer(Optimizer(moment_dtype=dtype), 10)
  gradient = jax.tree.map(lambda p: p.astype(jnp.float32), held)
  shapes = {'24,40', '56,8'}

  def copied(donated):
    step = jitted(optimizer, donated).lower(fresh(optimizer, held), gradient, jnp.float32(1), jnp.int32(1))
    return shapes & set(re.findall(r'= \w+\[([\d,]*)\]\S* copy\(%?(?:state|get-tuple-element)', step.compile().as_text()))

  assert copied(donated=()) == shapes
  assert copied(donated=0) == set()
