"""Products of experts in bfloat16 and their gradients: kernels and references against float64, and the mixture with both.

The kernels run in Pallas's GPU interpreter, which raises on races. tests/kernels/test_compiled.py compiles them for the device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.config import SettingsError
from sprl.kernels import hopper_grouped_matmul as hopper
from sprl.kernels.grouped_matmul import cost, grouped_matmul, grouped_outer, grouped_reference, outer_cost, outer_reference, runs
from sprl.models import moe
from sprl.models.moe import mixture
from sprl.quant.block import quantise
from sprl.quant.dot import StraightThrough

BF16 = jnp.bfloat16
slow = pytest.mark.slow
RACES = plgpu.InterpretGPUParams(detect_races=True)


def kernels_interpreted():
  """Return both kernels in the interpreter. New jits: compiled programs depend on MULTIPROCESSORS, which tests change."""
  matmul = jax.jit(partial(hopper.grouped_matmul, interpret=RACES), static_argnames='back')
  return matmul, jax.jit(partial(hopper.grouped_outer, interpret=RACES), static_argnums=4)


MATMUL, OUTER = kernels_interpreted()
REFERENCES = jax.jit(grouped_reference, static_argnames='back'), jax.jit(outer_reference, static_argnums=4)
INFINITE = np.float32(np.inf)


def experts(sizes, T, N, K, seed=0):
  """Return x [n, T, K], dy [n, T, N], w [X, N, K], expert and used, for sizes[e] tokens of expert e in blocks of T.

  Blocks are padded with zeros. Two more blocks are not in use and hold infinities, which would spoil any sum.
  """
  rng = np.random.default_rng(seed)
  owners = [e for e, size in enumerate(sizes) for _ in range(-(-size // T))]
  x, dy = (rng.normal(size=(len(owners) + 2, T, width)) for width in (K, N))
  for i, e in enumerate(owners):
    empty = max(0, sizes[e] - T * (i - owners.index(e)))
    x[i, empty:] = dy[i, empty:] = 0
  x[len(owners) :] = dy[len(owners) :] = INFINITE
  x, dy, w = (jnp.asarray(a, BF16) for a in (x, dy, rng.normal(size=(len(sizes), N, K))))
  return x, dy, w, jnp.asarray([*owners, len(sizes) - 1, 0], jnp.int32), jnp.int32(len(owners))


def close(found, expected, bits):
  """Compare within the rounding of the result and of float32 sums."""
  found, expected = (np.asarray(a, np.float64) for a in (found, expected))
  assert found.shape == expected.shape
  size = np.abs(expected).max(initial=0)
  assert (np.abs(found - expected) <= 2.0**-bits * np.abs(expected) + 1e-6 * size).all()


def check(arguments, matmul, outer):
  """Compare all three products with float64."""
  x, dy, w, expert, used = arguments
  x64, dy64, w64 = (np.asarray(a, np.float64) for a in (x, dy, w))
  blocks = range(int(used))
  owners = [int(expert[i]) for i in blocks]
  close(matmul(x, w, expert, used)[:used], np.array([x64[i] @ w64[e].T for i, e in zip(blocks, owners)]), 8)
  close(matmul(dy, w, expert, used, back=True)[:used], np.array([dy64[i] @ w64[e] for i, e in zip(blocks, owners)]), 8)
  dw = np.zeros(w.shape)
  for i, e in zip(blocks, owners):
    dw[e] += dy64[i].T @ x64[i]
  found = outer(dy, x, expert, used, len(w))
  assert found.dtype == jnp.float32
  close(found, dw, 20)


RAGGED = [
  ([3, 0, 1, 9], 8, 64, 192),  # a stage of a gradient has parts of eight blocks; an expert has at most two blocks
  pytest.param([17, 0, 90], 32, 192, 128, marks=slow),  # two warpgroups; the last tile of 128 rows is half empty
  pytest.param([130, 0, 1], 128, 64, 320, marks=slow),
]


@pytest.mark.parametrize(('sizes', 'T', 'N', 'K'), RAGGED)
def test_products_and_gradients_match_float64(sizes, T, N, K):
  arguments = experts(sizes, T, N, K)
  check(arguments, *REFERENCES)
  check(arguments, MATMUL, OUTER)


def test_program_walks_through_tiles_of_several_experts(monkeypatch):
  monkeypatch.setattr(hopper, 'MULTIPROCESSORS', 2)
  check(experts([70, 5, 1], 64, 320, 640), *kernels_interpreted())  # more steps than stages


def test_no_tokens_give_zero_gradients():
  x, dy, w, expert, _ = experts(*RAGGED[0])  # the shapes of test_products_and_gradients_match_float64
  np.testing.assert_array_equal(OUTER(dy, x, expert, jnp.int32(0), len(w)), np.zeros(w.shape))
  assert MATMUL(x, w, expert, jnp.int32(0)).shape == dy.shape


@st.composite
def shares(draw):
  sizes = draw(st.lists(st.integers(0, 40) | st.integers(0, 1), min_size=1, max_size=5).filter(any))
  return sizes, draw(st.sampled_from(hopper.TOKENS)), 64 * draw(st.integers(1, 5)), 64 * draw(st.integers(1, 9))


@given(shares(), st.integers(0, 99))
@settings(max_examples=6)
@slow
def test_products_match_float64_on_random_shapes(shape, seed):
  check(experts(*shape, seed=seed), MATMUL, OUTER)


@pytest.mark.parametrize(
  ('rows', 'columns', 'most', 'tiles'),
  [(768, 8, 32, 192), (2048, 32, 128, 160), (768, 128, 512, 384), (64, 64, 256, 9)],
)
def test_launch_covers_every_row_and_fits_memory(rows, columns, most, tiles):
  plan = hopper.launch(rows, columns, most, tiles)
  assert 64 <= plan.rows <= max(rows, 64)
  assert 2 <= plan.stages <= hopper.STAGES
  held = 2 * 64 * plan.stages * (plan.rows + columns) + 2 * plan.warpgroups * columns * 64
  assert held < hopper.SHARED[0 if plan.warpgroups > 1 else 1]
  assert plan.programs <= tiles * -(-rows // plan.rows)


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('shape', 'dtype', 'T', 'reason'),
  [
    ((2, 64, 128), jnp.float32, 8, 'the product is float32'),
    ((2, 64, 128), BF16, 24, 'blocks have 24 tokens'),
    ((2, 64, 96), BF16, 8, r'weights are \[64, 96\]: expected multiples of 64'),
    ((2, 40, 64), BF16, 8, r'weights are \[40, 64\]: expected multiples of 64'),
  ],
)
def test_forced_kernels_that_cannot_run_raise(shape, dtype, T, reason):
  with pytest.raises(SettingsError, match=f"config.model.kernels = 'mosaic_gpu'.*grouped matmul.*{reason}"):
    runs(shape, dtype, T, 'mosaic_gpu')
  assert not runs(shape, dtype, T, 'auto')


def test_forced_kernels_get_the_arguments(monkeypatch):
  x, dy, w, expert, used = experts([3, 9], 8, 64, 128)
  monkeypatch.setattr(hopper, 'grouped_matmul', lambda x, w, expert, used, back: 7 + jnp.zeros_like(dy if back is True else x))
  monkeypatch.setattr(hopper, 'grouped_outer', lambda dy, x, expert, used, X: jnp.full((X, 64, 128), 7.0))
  np.testing.assert_array_equal(grouped_matmul(dy, w, expert, used, back=True, kernels='mosaic_gpu'), jnp.full(dy.shape, 7))
  np.testing.assert_array_equal(grouped_outer(dy, x, expert, used, 2, kernels='mosaic_gpu'), jnp.full(w.shape, 7))
  np.testing.assert_array_equal(grouped_matmul(x, w, expert, used), grouped_reference(x, w, expert, used))
  np.testing.assert_array_equal(grouped_outer(dy, x, expert, used, 2), outer_reference(dy, x, expert, used, 2))


def test_costs_by_hand():
  # 5 tokens of 6 features through 2 experts of 8 rows: 2 bytes a number, 4 bytes a gradient
  assert cost(5, 2, 8, 6) == (2 * (5 * 6 + 2 * 8 * 6 + 5 * 8), 2 * 5 * 8 * 6)
  assert outer_cost(5, 2, 8, 6) == (2 * (5 * 6 + 5 * 8) + 4 * 2 * 8 * 6, 2 * 5 * 8 * 6)


# --- the mixture -----------------------------------------------------------------------------------------------------

X, E, F, k = 4, 128, 64, 2


@pytest.fixture
def interpreted(monkeypatch):
  """Run the kernels in the interpreter; return the list of the shapes of their calls."""
  seen = []
  monkeypatch.setattr(hopper, 'MULTIPROCESSORS', 2)
  matmul, outer = kernels_interpreted()

  def noted(kernel):
    def call(a, b, *others):
      seen.append((a.shape, b.shape))
      return kernel(a, b, *others)

    return call

  monkeypatch.setattr(hopper, 'grouped_matmul', noted(matmul))
  monkeypatch.setattr(hopper, 'grouped_outer', noted(outer))
  return seen


def routed(N, seed=0):
  """Return weights, x, chosen and gates. The second expert of every other token is on another device."""
  rng = np.random.default_rng(seed)
  shapes = {'gate': (X, F, E), 'up': (X, F, E), 'down': (X, E, F)}
  weights = {name: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for name, shape in shapes.items()}
  chosen = np.stack([rng.permutation(X - 1)[:k] for _ in range(N)])  # no token chooses the last expert
  chosen[::2, 1] = -3
  return (
    weights,
    jnp.asarray(rng.normal(size=(N, E)), BF16),
    jnp.asarray(chosen),
    jnp.asarray(rng.uniform(size=(N, k)), jnp.float32),
  )


def in_float64(weights, x, chosen, gates, dy):
  """Compute the mixture (every expert on every token, times its gate or 0) and the gradients of sum(y * dy), in NumPy."""
  one_hot = np.float64(np.asarray(chosen)[..., None] == np.arange(X))  # [N, k, X]
  taken = np.sum(one_hot * gates[..., None], axis=1)
  a, b = (np.einsum('ne,xfe->nxf', x, weights[name]) for name in ('gate', 'up'))
  sigmoid = 1 / (1 + np.exp(-a))
  hidden = a * sigmoid * b
  y = np.einsum('nxf,xef,nx->ne', hidden, weights['down'], taken)
  by_expert = np.einsum('ne,xef->nxf', dy, weights['down'])
  dhidden = by_expert * taken[..., None]
  da, db = dhidden * b * sigmoid * (1 + a * (1 - sigmoid)), dhidden * a * sigmoid
  dweights = {
    'gate': np.einsum('nxf,ne->xfe', da, x),
    'up': np.einsum('nxf,ne->xfe', db, x),
    'down': np.einsum('ne,nxf,nx->xef', dy, hidden, taken),
  }
  dx = np.einsum('nxf,xfe->ne', da, weights['gate']) + np.einsum('nxf,xfe->ne', db, weights['up'])
  dgates = np.einsum('nkx,nxf,nxf->nk', one_hot, by_expert, hidden)
  return y, (dweights, dx, dgates)


def test_mixture_and_gradients_match_sum_over_all_experts(interpreted):
  weights, x, chosen, gates = routed(14)
  weights['down'] = weights['down'].astype(BF16)  # gathered weights have the compute dtype already
  dy = np.random.default_rng(1).normal(size=x.shape)

  def value(function):
    def loss(weights, x, gates):
      y = function(weights, x, chosen, gates)
      return jnp.sum(y * dy), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

  kernel, loop = (value(partial(mixture, kernels=kernels))(weights, x, gates) for kernels in ('mosaic_gpu', 'reference'))
  wide_weights, wide_x, wide_gates = jax.tree.map(lambda a: np.asarray(a, np.float64), (weights, x, gates))
  y_exact, gradients_exact = in_float64(wide_weights, wide_x, chosen, wide_gates, dy)
  n, C = moe.blocks(chosen, X).assignment.shape
  rows, hidden, into, out = (n, C, E), (n, C, F), (X, F, E), (X, E, F)
  again, weights_of = [(rows, into), (rows, into)], [(hidden, rows), (hidden, rows), (rows, hidden)]
  inputs_of = [(rows, out), (hidden, into), (hidden, into)]
  assert sorted(interpreted) == sorted([*again, (hidden, out), *again, *inputs_of, *weights_of])

  def error(found, expected):
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)

  ((_, y), gradients), ((_, y_loop), gradients_loop) = kernel, loop
  assert [g.dtype for g in jax.tree.leaves(gradients)] == [g.dtype for g in jax.tree.leaves((weights, x, gates))]
  found, by_loop = (
    jax.tree.leaves(jax.tree.map(error, g, (y_exact, gradients_exact))) for g in ((y, gradients), (y_loop, gradients_loop))
  )
  assert max(found) < 0.01
  assert all(mine < 1.5 * theirs for mine, theirs in zip(found, by_loop))  # errors like those of the reference's rounding
  assert not np.any(gradients[0]['down'][X - 1])
  assert np.any(gradients[0]['down'][0])


def test_emulated_fp8_weights_take_the_kernel(interpreted):
  weights, x, chosen, gates = routed(3)
  held = {name: quantise(w, 'float32').emulated(BF16) for name, w in weights.items()}
  found, expected = (
    np.asarray(jax.jit(partial(mixture, kernels=kernels))(held, x, chosen, gates), np.float32)
    for kernels in ('mosaic_gpu', 'reference')
  )
  assert len(interpreted) == 3
  np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


def test_mixture_in_float32_or_odd_widths_takes_the_reference(monkeypatch):
  weights, x, chosen, gates = routed(6)
  with pytest.raises(SettingsError, match='grouped matmul cannot run: the product is float32'):
    mixture(weights, x.astype(jnp.float32), chosen, gates, 'mosaic_gpu')
  odd = {'gate': weights['gate'][:, :40], 'up': weights['up'][:, :40], 'down': weights['down'][:, :, :40]}
  with pytest.raises(SettingsError, match=r'weights are \[128, 40\]: expected multiples of 64'):
    mixture(odd, x, chosen, gates, 'mosaic_gpu')
  monkeypatch.setattr('sprl.kernels.platform.on_gpu', lambda: True)
  monkeypatch.setattr('sprl.kernels.platform.hopper', lambda: True)
  found, expected = (jax.jit(partial(mixture, kernels=kernels))(odd, x, chosen, gates) for kernels in ('auto', 'reference'))
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize('arithmetic', ['blockwise', 'emulate'])
def test_gradients_of_fp8_copies_take_the_kernels(interpreted, arithmetic):
  """The backward pass multiplies code times scale in bfloat16; the FP8 kernel of the forward pass has its own tests."""
  weights, x, chosen, gates = routed(14)
  dy = np.random.default_rng(1).normal(size=x.shape)

  def gradients(kernels):
    def loss(weights, x, gates):
      copies = {name: quantise(w, 'float32') for name, w in weights.items()}
      if arithmetic == 'emulate':
        copies = {name: copy.emulated(BF16) for name, copy in copies.items()}
      held = {name: StraightThrough(w, copies[name]) for name, w in weights.items()}
      return jnp.sum(mixture(held, x, chosen, gates, kernels) * dy)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(weights, x, gates)

  found, expected = gradients('mosaic_gpu'), gradients('reference')
  n, C = moe.blocks(chosen, X).assignment.shape
  backward = [((n, C, E), (X, E, F)), *[((n, C, F), (X, F, E))] * 2]
  assert all(interpreted.count(call) >= backward.count(call) for call in backward)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    a, b = (np.asarray(each, np.float64) for each in (a, b))
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)  # bfloat16 sums in another order, and flipped codes of hidden numbers
