"""The mixture of experts and its gradient against sums over all experts in float64, and its blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.config import Quant, SettingsError
from sprl.models.config import tiny
from sprl.models.moe import BLOCKS, blocks, check_split, gates, mixture, probabilities

E, F, X, k = 12, 10, 5, 2


def inputs(N, seed=0, X=X):
  """Return random (experts' kernels, x [N, E], router [X, E]) of unit size."""
  rng = np.random.default_rng(seed)
  shapes = {'gate': (X, F, E), 'up': (X, F, E), 'down': (X, E, F)}
  weights = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) / 3 for name, shape in shapes.items()}
  return weights, jnp.asarray(rng.normal(size=(N, E)), jnp.float32), jnp.asarray(rng.normal(size=(X, E)), jnp.float32)


def by_hand(weights, x, router, normalised):
  """Return the mixture in x's dtype: every expert on every token, with a gate of 0 for experts that are not chosen."""
  scores = x @ router.T
  scores = jnp.exp(scores - scores.max(-1, keepdims=True))
  scores = scores / scores.sum(-1, keepdims=True)
  chosen = jnp.argsort(-scores, axis=-1)[:, :k]
  taken = jnp.zeros(scores.shape).at[jnp.arange(len(x))[:, None], chosen].set(1)
  gate = scores * taken
  gate = gate / gate.sum(-1, keepdims=True) if normalised else gate
  return dense_mixture(weights, x, gate)


def dense_mixture(weights, x, gate):
  """Return the sum over all X experts, weighted by their gates [N, X]."""
  a, b = (jnp.einsum('ne,xfe->nxf', x, weights[name]) for name in ('gate', 'up'))
  return jnp.einsum('nxf,xef,nx->ne', a / (1 + jnp.exp(-a)) * b, weights['down'], gate)


def computed(weights, x, router, normalised):
  distribution = probabilities(x, router)
  chosen = jax.lax.top_k(distribution, k)[1]
  return mixture(weights, x, chosen, gates(distribution, chosen, normalised))


def gradient_of(function):
  """Return a jitted function of (direction, weights, x, router): value and gradients of sum(direction * function)."""

  def value(direction, normalised, *arguments):
    return jnp.sum(direction * function(*arguments, normalised))

  grad = jax.value_and_grad(value, argnums=(2, 3, 4))
  return jax.jit(grad, static_argnums=1)


@pytest.mark.parametrize(('N', 'normalised'), [(7, False), (150, True), pytest.param(1, True, marks=pytest.mark.slow)])
def test_mixture_and_gradient_equal_the_sum_over_all_experts(N, normalised):
  arguments = inputs(N)
  direction = np.random.default_rng(1).normal(size=(N, E))
  got = gradient_of(computed)(direction.astype(np.float32), normalised, *arguments)
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), arguments)
    expected = jax.device_get(gradient_of(by_hand)(direction, normalised, *wide))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)
  assert np.abs(expected[1][2]).max() > 0.01  # the router learns


def test_all_tokens_may_use_one_expert():
  weights, x, _ = inputs(300)
  chosen, gate = np.broadcast_to(np.array([3, 1], np.int32), (300, 2)), np.tile(np.float32([0.7, 0.3]), (300, 1))
  whole = np.zeros((300, X), np.float32)
  whole[:, 3], whole[:, 1] = 0.7, 0.3
  np.testing.assert_allclose(jax.jit(mixture)(weights, x, chosen, gate), jax.jit(dense_mixture)(weights, x, whole), atol=1e-5)
  laid = jax.jit(blocks, static_argnums=1)(chosen, X)
  assert laid.assignment.shape[1] == 128
  assert int(laid.used) == 6  # of 300 tokens each: 128, 128 and 44
  assert laid.expert[:6].tolist() == [1, 1, 1, 3, 3, 3]


def test_parts_of_the_experts_add_up_to_the_mixture():
  """Each of two devices has three of six experts. Outputs and gate gradients add up; weight gradients are concatenated."""
  weights, x, _ = inputs(20, X=6)
  rng = np.random.default_rng(2)
  chosen = jnp.asarray(np.stack([rng.permutation(6)[:k] for _ in range(20)]), jnp.int32)
  gate = jnp.asarray(rng.random((20, k)), jnp.float32)

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1))
  def value(weights, gate, chosen):
    return jnp.sum(jnp.sin(jnp.arange(E)) * mixture(weights, x, chosen, gate))

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1))
  def whole(weights, gate):
    gates = jnp.zeros((20, 6)).at[jnp.arange(20)[:, None], chosen].set(gate)
    return jnp.sum(jnp.sin(jnp.arange(E)) * dense_mixture(weights, x, gates))

  expected, slopes = whole(weights, gate)
  parts = [value(jax.tree.map(lambda w, first=first: w[first : first + 3], weights), gate, chosen - first) for first in (0, 3)]
  np.testing.assert_allclose(sum(v for v, _ in parts), expected, rtol=1e-4)
  np.testing.assert_allclose(sum(g for _, (_, g) in parts), slopes[1], atol=5e-5)
  joined = jax.tree.map(lambda *ws: np.concatenate(ws), *(w for _, (w, _) in parts))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5), joined, slopes[0])


def test_each_assignment_is_in_one_block_of_its_expert():
  chosen = np.stack([np.random.default_rng(i).permutation(X)[:k] for i in range(61)])
  laid = jax.device_get(jax.jit(blocks, static_argnums=1)(chosen, X))
  n, C = laid.assignment.shape
  assert BLOCKS[0] <= C <= BLOCKS[1]
  filled = laid.assignment < chosen.size
  assert sorted(laid.assignment[filled]) == list(range(chosen.size))
  assert not filled[laid.used :].any()
  assert filled[: laid.used].any(axis=1).all()
  experts = np.repeat(laid.expert[:, None], C, axis=1)[filled]
  np.testing.assert_array_equal(experts, chosen.reshape(-1)[laid.assignment[filled]])
  np.testing.assert_array_equal(laid.assignment.reshape(n * C)[laid.place], np.arange(chosen.size))


def test_outputs_have_the_dtype_of_x_and_gradients_that_of_the_weights():
  weights, x, router = inputs(7)
  narrow = x.astype(jnp.bfloat16)

  @jax.jit
  def both(*arguments):
    y, pull = jax.vjp(lambda *a: computed(*a, True), *arguments)
    return y, pull(jnp.ones_like(y))

  y, (dweights, dx, drouter) = both(weights, narrow, router)
  assert (y.dtype, dx.dtype, drouter.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
  assert {d.dtype for d in jax.tree.leaves(dweights)} == {jnp.dtype(jnp.float32)}
  np.testing.assert_allclose(y.astype(jnp.float32), jax.jit(by_hand, static_argnums=3)(weights, x, router, True), atol=0.05)


def test_temporary_memory_does_not_grow_with_the_experts():
  """512 tokens through 2 of 64 experts: the masked products of ragged_dot would take 64 * 1024 * 64 floats."""
  weights = {name: jax.ShapeDtypeStruct((64, 64, 64), jnp.float32) for name in ('gate', 'up', 'down')}
  x, router = jax.ShapeDtypeStruct((512, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
  compiled = jax.jit(lambda *a: computed(*a, True)).lower(weights, x, router).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * 64 * (1024 + 64 * 16) * 4


@pytest.mark.parametrize(
  ('expert', 'tensor', 'quant', 'said'),
  [
    (4, 1, Quant(), 'expert = 4; .* 6'),
    (2, 3, Quant(), 'tensor = 3; .* 40'),
    (1, 2, Quant(sampler='w8a8'), 'tensor = 2 .* 20 .* 40; expected a multiple of 128'),
    (1, 2, Quant(sampler='w8a8_kv8', format='mxfp8'), 'tensor = 2 .* a multiple of 32, .*config.quant.format = .mxfp8.'),
  ],
)
def test_a_mesh_that_cannot_split_the_experts_is_named(expert, tensor, quant, said):
  with pytest.raises(SettingsError, match=f'config.mesh.rollout: {said}'):
    check_split(tiny('qwen3_moe'), expert, tensor, 'config.mesh.rollout', quant)


def test_a_mesh_that_can_split_the_experts_is_accepted():
  for expert, tensor, quant in ((6, 1, Quant(sampler='w8a8')), (3, 8, Quant(sampler='kv8')), (1, 1, Quant(sampler='w8a8'))):
    check_split(tiny('qwen3_moe'), expert, tensor, '', quant)
  check_split(tiny('qwen3_moe'), 2, 2, '', Quant(sampler='w8a8', skip_names=('gate', 'up', 'down')))
  check_split(tiny('qwen3_moe', moe_intermediate_size=64), 2, 2, '', Quant(sampler='w8a8', format='mxfp8'))
  check_split(tiny('llama'), 1, 3, '')
  with pytest.raises(SettingsError, match=r'expert = 2; expected 1 .* llama'):
    check_split(tiny('llama'), 2, 1, '')
