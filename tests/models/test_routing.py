"""Routes: the network follows replayed routes, the router still learns, and the balance loss equals loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.routing import MISSING, Balance, LayerRouting, Routing, balance_loss, balance_metrics, balance_of, route_dtype

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 259, (2, 9)))
FREE = np.full((2, 9, 2, 2), MISSING, np.int8)


@pytest.fixture(scope='module')
def run():
  """A jitted function of routes. It returns (hidden states, routes, gradient of the sum of the hidden states' sines)."""
  config, params = small.model('qwen3_moe', num_hidden_layers=3, mlp_only_layers=[1])

  def value(params, routes):
    attention = PackedAttention.of(jnp.ones((2, 9), jnp.int32))
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    out = transformer.forward(transformer.graph(config), params, TOKENS, positions, attention, routes=routes)
    return jnp.sum(jnp.sin(out.hidden)), (out.hidden, out.routing.routes)

  @jax.jit
  def run(routes):
    (_, (hidden, used)), gradient = jax.value_and_grad(value, has_aux=True)(params, routes)
    return hidden, used, gradient

  return run


@pytest.fixture(scope='module')
def free(run):
  return run(FREE)


def test_replaying_the_routers_own_routes_gives_the_same_bits(run, free):
  hidden, routes, gradient = free
  assert (routes.shape, routes.dtype) == ((2, 9, 2, 2), jnp.int8)
  again, followed, gradient_again = run(routes)
  np.testing.assert_array_equal(followed, routes)
  np.testing.assert_array_equal(again, hidden)
  jax.tree.map(np.testing.assert_array_equal, gradient_again, gradient)


def test_the_router_chooses_where_routes_are_missing(run, free):
  hidden, routes, _ = free
  other = (routes + 1) % 6
  given = jnp.where(jnp.arange(9)[:, None, None] == 4, other, MISSING).astype(jnp.int8)
  out, used, _ = run(given)
  np.testing.assert_array_equal(used[:, 4], other[:, 4])
  np.testing.assert_array_equal(used[:, :4], routes[:, :4])
  np.testing.assert_array_equal(out[:, :4], hidden[:, :4])
  assert np.all(np.abs(out[:, 4] - hidden[:, 4]).max(-1) > 1e-3)


def test_gradients_reach_a_router_whose_choice_is_replaced(run, free):
  given = (free[1] + 3) % 6
  gradient = run(given)[2]
  for m, layer in enumerate((0, 2)):
    router = np.asarray(gradient['layers'][layer]['mlp']['router']['kernel'])
    assert np.abs(router)[np.unique(given[:, :, m])].max(axis=1).min() > 1e-3


def test_a_model_without_experts_has_no_routing():
  config, params = small.model()
  out = jax.eval_shape(
    lambda: transformer.forward(transformer.graph(config), params, TOKENS, TOKENS, PackedAttention.of(jnp.ones_like(TOKENS)))
  )
  assert out.routing == Routing(None, None)


def test_routes_take_one_byte_if_it_holds_the_experts():
  assert [route_dtype(X) for X in (8, 128, 129, 512)] == [jnp.int8, jnp.int8, jnp.int16, jnp.int16]


# --- balance ---------------------------------------------------------------------------------------------------------


@jax.jit
def metrics_of(probabilities, chosen, mask):
  """Return (loss, metrics) of several layers, stacked as in a forward pass."""
  layers = [LayerRouting(c, balance_of(p, c, mask)) for p, c in zip(probabilities, chosen)]
  balance = Routing.of(layers).balance
  assert balance is not None
  return balance_loss(balance), balance_metrics(balance)


def test_balance_equals_loops_over_tokens():
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
  loss, metrics = metrics_of(probabilities, chosen, real)
  metrics = {name.removeprefix('moe/'): float(x) for name, x in metrics.items()}
  expected = X * np.sum(f * P, axis=1).mean()
  assert float(loss) == pytest.approx(expected, rel=1e-5)
  assert metrics['balance_loss'] == pytest.approx(expected, rel=1e-5)
  assert metrics['load_max'] == pytest.approx((f.max(axis=1) * X).mean(), rel=1e-5)
  assert metrics['load_max_worst'] == pytest.approx((f.max(axis=1) * X).max(), rel=1e-5)
  of_loads = -np.sum(f * np.log(np.where(f > 0, f, 1)), axis=1)
  assert metrics['load_entropy'] == pytest.approx(of_loads.mean() / np.log(X), rel=1e-5)
  assert metrics['router_entropy'] == pytest.approx(entropy / np.log(X), rel=1e-5)


def test_balance_is_1_if_uniform_and_the_number_of_experts_at_worst():
  both = jax.jit(lambda balance: (balance_loss(balance), balance_metrics(balance)))
  loss, metrics = both(Balance(*(np.array(x, np.float32) for x in ([[6] * 4], [[3] * 4], [12 * np.log(4)], [12]))))
  assert float(loss) == pytest.approx(1)
  assert {name: round(float(x), 5) for name, x in metrics.items()} == {
    'moe/load_max': 1, 'moe/load_max_worst': 1, 'moe/load_entropy': 1, 'moe/router_entropy': 1, 'moe/unused': 0,
    'moe/balance_loss': 1,
  }  # fmt: skip
  loss, metrics = both(Balance(*(np.array(x, np.float32) for x in ([[12, 0, 0, 0]], [[12, 0, 0, 0]], [0], [12]))))
  assert float(loss) == pytest.approx(4)
  assert float(metrics['moe/unused']) == 3


def test_the_gradient_of_the_balance_is_through_the_probabilities_only():
  balance = Balance(*(jnp.asarray(x, jnp.float32) for x in ([[9, 3]], [[4, 2]], [1], [6])))
  gradient = jax.jit(jax.grad(balance_loss))(balance)
  np.testing.assert_allclose(gradient.probability, [[2 * 9 / 12 / 6, 2 * 3 / 12 / 6]], rtol=1e-6)
  assert not np.any(gradient.load)
