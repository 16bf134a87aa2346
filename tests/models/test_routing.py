"""Records of routes: what is replayed is what was computed, the router still learns, and how balance is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.models import transformer
from sprl.models.memory import CausalMemory
from sprl.models.routing import MISSING, Balance, Routed, balance_loss, balance_metrics, record_dtype

pytestmark = pytest.mark.usefixtures('compiled_fast')

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 259, (2, 9)))


@pytest.fixture(scope='module')
def world():
  """(config, weights, a jitted pass with routes given: hidden states, routes, gradient of the hidden states' sum of sines)."""
  config, params = small.model('qwen3_moe', num_hidden_layers=3, mlp_only_layers=[1])

  def hidden(params, given):
    memory = Routed(CausalMemory.of(jnp.ones((2, 9), jnp.int32)), given)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    out, memory = transformer.forward(transformer.graph(config), params, TOKENS, positions, memory)
    return jnp.sum(jnp.sin(out)), (out, memory.routes)

  def run(given):
    (_, (out, routes)), gradient = jax.value_and_grad(hidden, has_aux=True)(params, given)
    return out, routes, gradient

  return config, params, jax.jit(run)


def routers(gradient):
  return [np.asarray(gradient['layers'][i]['mlp']['router']['kernel']) for i in (0, 2)]


def test_replayed_live_routes_give_the_same_bits(world):
  _, _, run = world
  free, routes, gradient = run(jnp.full((2, 9, 2, 2), MISSING, jnp.int8))
  assert (routes.shape, routes.dtype) == ((2, 9, 2, 2), jnp.int8)
  again, followed, gradient_again = run(routes)
  np.testing.assert_array_equal(followed, routes)
  np.testing.assert_array_equal(again, free)
  jax.tree.map(np.testing.assert_array_equal, gradient_again, gradient)


def test_what_a_record_leaves_out_is_the_router_s_to_choose(world):
  _, _, run = world
  free, live, _ = run(jnp.full((2, 9, 2, 2), MISSING, jnp.int8))
  other = (live + 1) % 6
  given = jnp.where(jnp.arange(9)[:, None, None] == 4, other, MISSING).astype(jnp.int8)
  out, taken, _ = run(given)
  np.testing.assert_array_equal(taken[:, 4], other[:, 4])
  np.testing.assert_array_equal(taken[:, :4], live[:, :4])
  np.testing.assert_array_equal(out[:, :4], free[:, :4])
  assert np.all(np.abs(out[:, 4] - free[:, 4]).max(-1) > 1e-3)


def test_gradients_reach_the_router_whose_choice_is_overruled(world):
  _, _, run = world
  _, live, _ = run(jnp.full((2, 9, 2, 2), MISSING, jnp.int8))
  given = (live + 3) % 6
  for layer, router in enumerate(routers(run(given)[2])):
    assert np.abs(router)[np.unique(given[:, :, layer])].max(axis=1).min() > 1e-3


def test_records_take_a_byte_where_it_holds_the_experts():
  assert [record_dtype(X) for X in (8, 128, 129, 512)] == [jnp.int8, jnp.int8, jnp.int16, jnp.int16]


# --- balance ---------------------------------------------------------------------------------------------------------


def balance_of(probabilities, chosen, real):
  """Of two layers, as the network adds it up."""
  memory = Routed(CausalMemory.of(jnp.ones((2, 5), jnp.int32)), real=real)
  for p, c in zip(probabilities, chosen):
    _, memory = memory.route(p, c)
  assert memory.balance is not None
  return memory.balance


def test_balance_against_loops_over_tokens():
  rng = np.random.default_rng(0)
  X, k, M = 4, 2, 2
  probabilities = rng.dirichlet(np.ones(X), (M, 2, 5)).astype(np.float32)
  chosen = np.argsort(-probabilities, axis=-1)[..., :k]
  real = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)
  f, P, entropy = np.zeros((M, X)), np.zeros((M, X)), 0.0
  for m in range(M):
    for b, t in zip(*np.nonzero(real)):
      P[m] += probabilities[m, b, t] / real.sum()
      entropy -= np.sum(probabilities[m, b, t] * np.log(probabilities[m, b, t])) / real.sum() / M
      for e in chosen[m, b, t]:
        f[m, e] += 1 / (real.sum() * k)
  balance = balance_of(jnp.asarray(probabilities), jnp.asarray(chosen), jnp.asarray(real))
  assert float(balance_loss(balance)) == pytest.approx(X * np.sum(f * P, axis=1).mean(), rel=1e-5)
  metrics = {name.removeprefix('moe/'): float(x) for name, x in balance_metrics(balance).items()}
  assert metrics['balance_loss'] == pytest.approx(X * np.sum(f * P, axis=1).mean(), rel=1e-5)
  assert metrics['load_max'] == pytest.approx((f.max(axis=1) * X).mean(), rel=1e-5)
  assert metrics['load_max_worst'] == pytest.approx((f.max(axis=1) * X).max(), rel=1e-5)
  of_loads = -np.sum(f * np.log(np.where(f > 0, f, 1)), axis=1)
  assert metrics['load_entropy'] == pytest.approx(of_loads.mean() / np.log(X), rel=1e-5)
  assert metrics['router_entropy'] == pytest.approx(entropy / np.log(X), rel=1e-5)
  assert metrics['dropped'] == pytest.approx(0, abs=1e-6)


def test_all_alike_is_one_and_all_to_the_same_is_the_number_of_experts():
  alike = Balance(*(jnp.asarray(x, jnp.float32) for x in ([[6] * 4], [[3] * 4], [12 * np.log(4)], [24], [12])))
  assert float(balance_loss(alike)) == pytest.approx(1)
  assert {name: round(float(x), 5) for name, x in balance_metrics(alike).items()} == {
    'moe/load_max': 1, 'moe/load_max_worst': 1, 'moe/load_entropy': 1, 'moe/router_entropy': 1, 'moe/unused': 0, 'moe/dropped': 0,
    'moe/balance_loss': 1,
  }  # fmt: skip
  one = Balance(*(jnp.asarray(x, jnp.float32) for x in ([[12, 0, 0, 0]], [[12, 0, 0, 0]], [0], [12], [12])))
  assert float(balance_loss(one)) == pytest.approx(4)
  assert float(balance_metrics(one)['moe/unused']) == 3


def test_the_balance_s_gradient_is_through_the_probabilities_alone():
  balance = Balance(*(jnp.asarray(x, jnp.float32) for x in ([[9, 3]], [[4, 2]], [1], [12], [6])))
  gradient = jax.grad(balance_loss)(balance)
  np.testing.assert_allclose(gradient.probability, [[2 * 9 / 12 / 6, 2 * 3 / 12 / 6]], rtol=1e-6)
  assert not np.any(gradient.load)
