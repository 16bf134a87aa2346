"""The mixture of experts against sums over all experts in float64, and what its gradient and its blocks are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.models.config import tiny
from sprl.models.moe import BLOCKS, blocks, check_split, gates, mixture, probabilities
from sprl.settings import Quant, SettingsError

E, F, X, k = 12, 10, 5, 2


def inputs(N, seed=0):
  """(experts' kernels, x [N, E], router [X, E]) of unit size."""
  rng = np.random.default_rng(seed)
  shapes = {'gate': (X, F, E), 'up': (X, F, E), 'down': (X, E, F)}
  weights = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) / 3 for name, shape in shapes.items()}
  return weights, jnp.asarray(rng.normal(size=(N, E)), jnp.float32), jnp.asarray(rng.normal(size=(X, E)), jnp.float32)


def by_hand(weights, x, router, normalised, chosen=None):
  """Every expert on every token, and the gates of those that are not chosen 0; in the arithmetic of x."""
  scores = x @ router.T
  scores = jnp.exp(scores - scores.max(-1, keepdims=True))
  scores = scores / scores.sum(-1, keepdims=True)
  chosen = jnp.argsort(-scores, axis=-1)[:, :k] if chosen is None else chosen
  taken = jnp.zeros(scores.shape).at[jnp.arange(len(x))[:, None], chosen].set(1)
  gate = scores * taken
  gate = gate / gate.sum(-1, keepdims=True) if normalised else gate
  a, b = (jnp.einsum('ne,xfe->nxf', x, weights[name]) for name in ('gate', 'up'))
  return jnp.einsum('nxf,xef,nx->ne', a / (1 + jnp.exp(-a)) * b, weights['down'], gate)


def computed(weights, x, router, normalised, chosen=None):
  distribution = probabilities(x, router)
  chosen = jax.lax.top_k(distribution, k)[1] if chosen is None else chosen
  return mixture(weights, x, chosen, gates(distribution, chosen, normalised))


@pytest.mark.parametrize(('N', 'normalised'), [(1, True), (7, False), (150, True)])
def test_the_mixture_and_its_gradient_are_those_of_the_sum_over_all_experts(N, normalised):
  weights, x, router = inputs(N)
  down = np.random.default_rng(1).normal(size=x.shape)

  def value(function, *arguments):
    return jax.value_and_grad(lambda *a: jnp.sum(function(*a, normalised) * down), argnums=(0, 1, 2))(*arguments)

  got = jax.jit(lambda *a: value(computed, *a))(weights, x, router)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (weights, x, router))
    expected = value(by_hand, *wide)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, jax.device_get(expected))
  assert np.abs(expected[1][2]).max() > 0.01  # the router learns


def test_all_tokens_may_go_through_one_expert():
  weights, x, router = inputs(300)
  chosen = jnp.broadcast_to(jnp.array([3, 1]), (300, 2))
  np.testing.assert_allclose(computed(weights, x, router, True, chosen), by_hand(weights, x, router, True, chosen), atol=1e-5)
  laid = blocks(chosen, X)
  assert laid.assignment.shape[1] == 128
  assert int(laid.used) == 6  # of 300 tokens each: 128, 128 and 44
  assert laid.expert[:6].tolist() == [1, 1, 1, 3, 3, 3]


def test_experts_of_which_devices_have_a_part_each_add_up_to_the_mixture():
  weights, x, router = inputs(70)
  distribution = probabilities(x, router)
  chosen = jax.lax.top_k(distribution, k)[1]
  gate = gates(distribution, chosen, True)

  def value(weights, gate, first):
    return jnp.sum(jnp.sin(jnp.arange(E)) * mixture(weights, x, chosen - first, gate))

  whole, slopes = jax.value_and_grad(value, argnums=(0, 1))(weights, gate, 0)
  parts = [
    jax.value_and_grad(value, argnums=(0, 1))(jax.tree.map(lambda w, n=n: w[n], weights), gate, n.start)
    for n in (slice(0, 2), slice(2, X))
  ]
  np.testing.assert_allclose(sum(v for v, _ in parts), whole, rtol=1e-5)
  np.testing.assert_allclose(sum(g for _, (_, g) in parts), slopes[1], atol=1e-5)
  joined = jax.tree.map(lambda *ws: jnp.concatenate(ws), *(w for _, (w, _) in parts))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), joined, slopes[0])


def test_every_assignment_is_in_a_block_of_its_expert_once():
  chosen = np.stack([np.random.default_rng(i).permutation(X)[:k] for i in range(61)])
  laid = jax.device_get(blocks(jnp.asarray(chosen), X))
  n, C = laid.assignment.shape
  assert BLOCKS[0] <= C <= BLOCKS[1]
  filled = laid.assignment < chosen.size
  assert sorted(laid.assignment[filled]) == list(range(chosen.size))
  assert not filled[laid.used :].any()
  assert filled[: laid.used].any(axis=1).all()
  experts = np.repeat(laid.expert[:, None], C, axis=1)[filled]
  np.testing.assert_array_equal(experts, chosen.reshape(-1)[laid.assignment[filled]])
  np.testing.assert_array_equal(laid.assignment.reshape(n * C)[laid.place], np.arange(chosen.size))


def test_products_are_in_the_dtype_of_the_tokens_and_gradients_in_that_of_the_weights():
  weights, x, router = inputs(40)
  narrow = x.astype(jnp.bfloat16)
  y, pull = jax.vjp(lambda *a: computed(*a, True), weights, narrow, router)
  dweights, dx, drouter = pull(jnp.ones_like(y))
  assert (y.dtype, dx.dtype, drouter.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
  assert {d.dtype for d in jax.tree.leaves(dweights)} == {jnp.dtype(jnp.float32)}
  np.testing.assert_allclose(y.astype(jnp.float32), computed(weights, x, router, True), atol=0.05)


def test_memory_grows_by_one_block_not_by_the_number_of_experts():
  """512 tokens through 2 of 64 experts: ragged_dot's masked products would take 64 * 1024 * 64 floats."""
  rng = np.random.default_rng(0)
  weights = {name: jnp.asarray(rng.normal(size=(64, 64, 64)), jnp.float32) for name in ('gate', 'up', 'down')}
  x, router = jnp.ones((512, 64)), jnp.ones((64, 64))
  compiled = jax.jit(lambda *a: computed(*a, True)).lower(weights, x, router).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * 64 * (1024 + 64 * 16) * 4


@pytest.mark.parametrize(
  ('expert', 'tensor', 'quant', 'said'),
  [
    (4, 1, Quant(), 'expert = 4; expected a divisor of 6, the experts of a layer'),
    (2, 3, Quant(), 'tensor = 3; expected a divisor of 40, the width of an expert'),
    (1, 2, Quant(sampler='w8a8'), 'tensor = 2 leaves a device 20 of the 40 of an expert; expected a multiple of 128'),
    (1, 2, Quant(sampler='w8a8_kv8', format='mxfp8'), '.*; expected a multiple of 32, a block of config.quant.format = .mxfp8.'),
  ],
)
def test_experts_that_cannot_be_split_so_are_refused_by_name(expert, tensor, quant, said):
  with pytest.raises(SettingsError, match=f'config.mesh.rollout: {said}'):
    check_split(tiny('qwen3_moe'), expert, tensor, 'config.mesh.rollout', quant)


def test_experts_that_can_be_split_so_are_not():
  for expert, tensor, quant in ((6, 1, Quant(sampler='w8a8')), (3, 8, Quant(sampler='kv8')), (1, 1, Quant(sampler='w8a8'))):
    check_split(tiny('qwen3_moe'), expert, tensor, '', quant)
  check_split(tiny('qwen3_moe'), 2, 2, '', Quant(sampler='w8a8', skip_names=('gate', 'up', 'down')))
  check_split(tiny('qwen3_moe', moe_intermediate_size=64), 2, 2, '', Quant(sampler='w8a8', format='mxfp8'))
  check_split(tiny('llama'), 1, 3, '')
  with pytest.raises(SettingsError, match='expected 1 with a model of family llama, without experts'):
    check_split(tiny('llama'), 2, 1, '')
