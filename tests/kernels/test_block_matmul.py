"""Block-scaled FP8 products: reference and kernel against float64, and the choice between them.

The kernels run in Pallas's GPU interpreter, which raises on races. tests/kernels/test_compiled.py compiles them for the device.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.config import SettingsError
from sprl.kernels import hopper_block_matmul as hopper
from sprl.kernels.block_matmul import block_matmul, cost, grouped_cost, grouped_matmul, grouped_reference, reference
from sprl.kernels.launch_model import candidates, cut, launch
from sprl.models.moe import mixture
from sprl.quant.block import BlockScaled, block_dot, quantise, quantise_groups
from sprl.quant.dot import StraightThrough, dot

BF16 = jnp.bfloat16
slow = pytest.mark.slow


def interpreted(kernel):
  """Return the kernel in the interpreter."""
  return jax.jit(partial(kernel, interpret=plgpu.InterpretGPUParams(detect_races=True)))


INTERPRETED, GROUPED = interpreted(hopper.block_matmul), interpreted(hopper.grouped_matmul)
GROUPED_REFERENCE = jax.jit(partial(grouped_reference, rows=128, group=128, dtype=BF16))


def random_arguments(M, N, K, format='float32', seed=0):
  """Return random arguments of the kernel. The sizes of blocks and groups differ by up to a factor of 1,000."""
  rng = np.random.default_rng(seed)

  def numbers(rows, grain):
    size = 10.0 ** rng.uniform(-2, 1, (-(-rows // grain), -(-K // 128)))
    return rng.normal(size=(rows, K)) * np.repeat(np.repeat(size, grain, 0), 128, 1)[:rows, :K]

  w = quantise(jnp.asarray(numbers(N, 128), jnp.float32), format)
  codes, scale = quantise_groups(jnp.asarray(numbers(M, 1), BF16), format)
  return codes, scale, w.codes, w.scale


def by_hand(x, sx, w, sw):
  """Compute the product in float64: codes times scales."""
  x, sx, w, sw = (np.asarray(a, np.float64) for a in (x, sx, w, sw))
  K = x.shape[1]
  spread = np.repeat(np.repeat(sw, 128, 0)[: len(w)], 128, 1)[:, :K]
  return (x * np.repeat(sx, 128, 1)[:, :K]) @ (w * spread).T


def check(found, arguments, bits=8):
  """Compare each token's product with float64, within the rounding of the result and of float32 sums."""
  expected = by_hand(*arguments)
  error = np.abs(np.asarray(found, np.float64) - expected)
  size = np.abs(expected).max(axis=1, keepdims=True)
  assert (error <= 2.0**-bits * np.abs(expected) + 1e-6 * size).all()


@pytest.mark.parametrize('format', ['float32', 'pow2'])
def test_reference_matches_float64(format):
  arguments = random_arguments(5, 200, 300, format)
  check(reference(*arguments, 128, 128, jnp.float32), arguments, 20)


def check_launch(plan, M, N, K):
  arguments = random_arguments(M, N, K)
  check(interpreted(partial(hopper.run, plan))(*arguments), arguments)


@pytest.mark.parametrize(
  ('M', 'N', 'K', 'tile', 'tiles'),
  [
    (5, 200, 1040, (1, 2, 8, 4), (2, 1, 4)),  # ragged in all directions; three of four programs sum; the last has no block
    pytest.param(1, 64, 128, (1, 1, 8), (1, 1, 1), marks=slow),  # one program, one stage
    pytest.param(24, 136, 1536, (1, 2, 32), (2, 1, 1), marks=slow),  # more blocks than stages, two products a stage
    pytest.param(100, 128, 512, (1, 1, 64, 2), (2, 2, 2), marks=slow),  # two tiles of tokens, each of two programs
    pytest.param(20, 72, 2048, (1, 1, 16, 8), (2, 2, 8), marks=slow),  # eight programs, of which two sum
    pytest.param(130, 264, 400, (2, 2, 128), (2, 2, 1), marks=slow),  # wide, ragged in all directions
    pytest.param(130, 136, 512, (2, 1, 128, 2), (2, 2, 2), marks=slow),  # wide, split sums
    pytest.param(130, 264, 400, (2, 1, 128, 1, (1, 2)), (3, 2, 1), marks=slow),  # pairs with the same weights
    pytest.param(70, 200, 272, (2, 1, 128, 1, (2, 1)), (2, 1, 1), marks=slow),  # pairs with the same tokens
  ],
)
def test_kernel_matches_float64(M, N, K, tile, tiles):
  plan = cut(M, N, K, *tile)
  assert plan.tiles == tiles
  check_launch(plan, M, N, K)


@pytest.mark.parametrize(
  ('N', 'tile', 'clusters'),
  [
    (392, (2, 1, 128, 1, (2, 2)), 1),  # clusters of four
    pytest.param(264, (2, 2, 128, 2), 1, marks=slow),  # clusters of two that share sums
    pytest.param(264, (2, 2, 128), 2, marks=slow),  # no clusters
  ],
)
def test_wide_program_walks_through_several_tiles(N, tile, clusters):
  M, K = 130, 656  # ragged in all directions
  plan = cut(M, N, K, *tile)
  assert plan.clusters >= 2 * clusters
  assert plan.depth > (1 if plan.splits > 1 else plan.stages)
  check_launch(replace(plan, clusters=clusters), M, N, K)


def test_sums_that_are_read_before_all_are_written_are_a_race(monkeypatch, capfd):
  """The race check covers the exchange of partial sums. With jax 0.11 the interpreter prints a race, and does not raise."""
  monkeypatch.setattr(hopper, 'meet', lambda barrier: None)
  said = ''
  try:
    check_launch(cut(8, 64, 512, 1, 1, 8, 2), 8, 64, 512)
  except (jax.errors.JaxRuntimeError, AssertionError) as error:
    said = str(error)
  assert 'RACE DETECTED' in said + ''.join(capfd.readouterr())


@st.composite
def shapes(draw, tokens):
  return draw(tokens), 8 * draw(st.integers(1, 40)), 16 * draw(st.integers(1, 60)), draw(st.integers(0, 99))


@given(shapes(st.integers(1, 400)), st.sampled_from(['float32', 'pow2']), st.data())
@settings(max_examples=20)
@slow
def test_kernel_matches_float64_on_random_shapes_and_launches(shape, format, data):
  M, N, K, seed = shape
  arguments = random_arguments(M, N, K, format, seed)
  plans = list(candidates(M, N, K))
  check(interpreted(partial(hopper.run, data.draw(st.sampled_from(plans))))(*arguments), arguments)


def test_block_dot_uses_the_kernel(monkeypatch):
  monkeypatch.setattr(hopper, 'block_matmul', INTERPRETED)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 3, 256)), BF16)
  w = quantise(jnp.asarray(rng.normal(size=(64, 256)), jnp.float32), 'float32')
  forced = BlockScaled(w.codes, w.scale, w.format, kernels='mosaic_gpu')
  found, expected = (np.asarray(jax.jit(block_dot)(x, each), np.float32) for each in (forced, w))
  np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-3)


def test_fp8_copies_of_the_learner_use_the_kernel_forward(monkeypatch):
  """The gradients are products in the compute dtype: they do not depend on the implementation."""
  calls = []
  monkeypatch.setattr(hopper, 'block_matmul', lambda *arguments: calls.append(arguments[2].shape) or INTERPRETED(*arguments))
  rng = np.random.default_rng(0)
  x, g = jnp.asarray(rng.normal(size=(6, 256)), BF16), jnp.asarray(rng.normal(size=(6, 64)), BF16)
  w = jnp.asarray(rng.normal(size=(64, 256)), jnp.float32)

  @partial(jax.jit, static_argnums=0)
  def product(kernels, x, w):
    copy = replace(quantise(w, 'float32'), kernels=kernels)
    y, back = jax.vjp(lambda x, w: dot(x, StraightThrough(w, copy)), x, w)
    return y, back(g)

  (y, gradients), (expected, others) = product('mosaic_gpu', x, w), product('reference', x, w)
  np.testing.assert_allclose(np.float32(y), np.float32(expected), rtol=2**-7, atol=1e-3)
  jax.tree.map(np.testing.assert_array_equal, gradients, others)
  assert calls == [(64, 256)]


# --- experts ---------------------------------------------------------------------------------------------------------


def experts(sizes, T, N, K, seed=0):
  """Return arguments of the grouped kernel, for sizes[e] tokens of expert e in blocks of T.

  Blocks are padded with zeros. Two more blocks are not in use.
  """
  rng = np.random.default_rng(seed)
  owners = [e for e, size in enumerate(sizes) for _ in range(-(-size // T))]
  w = quantise(jnp.asarray(rng.normal(size=(len(sizes), N, K)), jnp.float32), 'float32')
  x = rng.normal(size=(len(owners) + 2, T, K))
  for i, e in enumerate(owners):
    x[i, max(0, sizes[e] - T * (i - owners.index(e))) :] = 0
  codes, scale = quantise_groups(jnp.asarray(x, BF16), 'float32')
  expert = jnp.asarray([*owners, len(sizes) - 1, 0], jnp.int32)
  return codes, scale, w.codes, w.scale, expert, jnp.int32(len(owners))


def check_experts(found, arguments):
  x, sx, w, sw, expert, used = arguments
  assert found.shape == (*x.shape[:2], w.shape[1])
  for i in range(int(used)):
    check(found[i], (x[i], sx[i], w[expert[i]], sw[expert[i]]))


RAGGED = [
  ([3, 0, 1, 9], 8, 72, 272),  # narrow, one product a stage
  pytest.param([17, 0, 33], 32, 136, 144, marks=slow),  # two products
]


@pytest.mark.parametrize(('sizes', 'T', 'N', 'K'), RAGGED)
def test_grouped_products_match_float64(sizes, T, N, K):
  arguments = experts(sizes, T, N, K)
  check_experts(GROUPED(*arguments), arguments)
  check_experts(GROUPED_REFERENCE(*arguments), arguments)
  without_blocks = (*arguments[:-1], jnp.int32(0))
  check_experts(GROUPED(*without_blocks), without_blocks)


def test_wide_program_walks_through_blocks_of_several_experts(monkeypatch):
  monkeypatch.setattr(hopper, 'launch', lambda *shape: replace(launch(*shape), clusters=2))
  arguments = experts([130, 0, 1], 128, 136, 272)  # wide; neither N nor K a multiple of a block
  check_experts(interpreted(hopper.grouped_matmul)(*arguments), arguments)


@st.composite
def shares(draw):
  sizes = draw(st.lists(st.integers(0, 40) | st.integers(0, 1), min_size=1, max_size=6))
  return sizes, draw(st.sampled_from(hopper.TOKENS)), 8 * draw(st.integers(1, 40)), 16 * draw(st.integers(1, 60))


@given(shares(), st.integers(0, 99))
@settings(max_examples=10)
@slow
def test_grouped_products_match_float64_on_random_shapes(shape, seed):
  arguments = experts(*shape, seed)
  check_experts(GROUPED(*arguments), arguments)


@pytest.mark.parametrize(('T', 'K', 'reason'), [(24, 128, 'blocks have 24 tokens'), (8, 40, r'\[64, 40\]')])
def test_forced_grouped_kernel_that_cannot_run_raises(T, K, reason):
  x, w = jnp.zeros((1, T, K), jnp.float8_e4m3fn), jnp.zeros((2, 64, K), jnp.float8_e4m3fn)
  scales, expert = (jnp.ones((1, T, 1)), jnp.ones((2, 1, 1))), jnp.zeros(1, jnp.int32)
  with pytest.raises(SettingsError, match=f"'mosaic_gpu'.*grouped block-scaled matmul.*{reason}"):
    grouped_matmul(x, scales[0], w, scales[1], expert, expert[0], 128, 128, BF16, 'mosaic_gpu')


def test_mixture_uses_the_grouped_kernel(monkeypatch):
  seen = []

  def kernel(x, x_scale, w, *others):
    seen.append(w.shape)
    return grouped_reference(x, x_scale, w, *others, 128, 128, BF16)

  monkeypatch.setattr(hopper, 'grouped_matmul', kernel)
  rng = np.random.default_rng(0)
  X, E, F = 3, 48, 32
  shapes = {'gate': (X, F, E), 'up': (X, F, E), 'down': (X, E, F)}
  held = {name: quantise(jnp.asarray(rng.normal(size=shape), jnp.float32), 'float32') for name, shape in shapes.items()}
  x, chosen, weights = jnp.asarray(rng.normal(size=(2, E)), BF16), jnp.array([[2], [0]]), jnp.ones((2, 1), jnp.float32)
  found, expected = (
    np.asarray(jax.jit(mixture)({name: replace(w, kernels=kernels) for name, w in held.items()}, x, chosen, weights))
    for kernels in ('mosaic_gpu', 'reference')
  )
  assert seen == list(shapes.values())
  np.testing.assert_array_equal(found, expected)


def test_costs_by_hand():
  # 2 tokens and 8 rows of weights of 256 FP8 features; 2 + 1 float32 scales for each of 2 groups; 2 x 8 results of 2 bytes
  assert cost(2, 8, 256) == (2 * 256 + 8 * 256 + 4 * (2 + 1) * 2 + 2 * 8 * 2, 2 * 2 * 8 * 256)
  # 5 tokens of 256 features through 2 experts of 8 rows: one product, and the codes and two scales of one more expert
  assert grouped_cost(5, 2, 8, 256) == (cost(5, 8, 256).bytes + 8 * 256 + 4 * 2, cost(5, 8, 256).flops)


@pytest.mark.parametrize(
  ('N', 'K', 'dtype', 'format', 'reason'),
  [
    (64, 256, BF16, 'float32', None),
    (64, 256, BF16, 'pow2', None),
    (40, 112, BF16, 'float32', None),
    (64, 256, jnp.float32, 'float32', 'the product is float32'),
    (64, 256, BF16, 'mxfp8', '1 rows of 32'),
    (64, 40, BF16, 'float32', r'\[64, 40\]'),
    (20, 256, BF16, 'float32', r'\[20, 256\]'),
    (64, 576, BF16, 'float32', r'\[64, 576\]: above 64 and 128 expected multiples'),
    (96, 256, BF16, 'float32', r'\[96, 256\]: above 64 and 128 expected multiples'),
  ],
)
def test_forced_kernel_runs_or_raises(monkeypatch, N, K, dtype, format, reason):
  seen = []
  monkeypatch.setattr(hopper, 'block_matmul', lambda x, sx, w, sw: seen.append(w.shape) or jnp.zeros((1, N), BF16))
  rows, group = (1, 32) if format == 'mxfp8' else (128, 128)

  def run(x, w):
    w = quantise(w, format)
    return block_matmul(*quantise_groups(x, format), w.codes, w.scale, rows, group, dtype, 'mosaic_gpu')

  x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, K), (N, K)))  # the choice is by shapes and dtypes
  if reason is None:
    jax.eval_shape(run, x, w)
    assert seen == [(N, K)]
  else:
    with pytest.raises(SettingsError, match=f"config.model.kernels = 'mosaic_gpu'.*block-scaled matmul.*{reason}"):
      jax.eval_shape(run, x, w)
