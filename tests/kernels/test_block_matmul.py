"""Block-scaled FP8 products: reference and kernel against float64, and the choice between them.

The kernel runs in Pallas's GPU interpreter, which raises on races. tests/kernels/test_compiled.py compiles it for the device.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.kernels import hopper_block_matmul as hopper
from sprl.kernels.block_matmul import block_matmul, cost, grouped_cost, grouped_matmul, grouped_reference, reference
from sprl.models.moe import mixture
from sprl.quant.block import BlockScaled, block_dot, quantise, quantise_groups
from sprl.settings import SettingsError

BF16 = jnp.bfloat16
INTERPRETED, GROUPED = (
  partial(kernel, interpret=plgpu.InterpretGPUParams(detect_races=True))
  for kernel in (hopper.block_matmul, hopper.grouped_matmul)
)


def some(M, N, K, format='float32', seed=0):
  """Arguments of the kernel: numbers whose blocks and groups differ in size a thousandfold."""
  rng = np.random.default_rng(seed)

  def numbers(rows, grain):
    size = 10.0 ** rng.uniform(-2, 1, (-(-rows // grain), -(-K // 128)))
    return rng.normal(size=(rows, K)) * np.repeat(np.repeat(size, grain, 0), 128, 1)[:rows, :K]

  w = quantise(jnp.asarray(numbers(N, 128), jnp.float32), format)
  codes, scale = quantise_groups(jnp.asarray(numbers(M, 1), BF16), format)
  return codes, scale, w.codes, w.scale


def by_hand(x, sx, w, sw):
  """The contract in float64: numbers of codes times scales."""
  x, sx, w, sw = (np.asarray(a, np.float64) for a in (x, sx, w, sw))
  K = x.shape[1]
  spread = np.repeat(np.repeat(sw, 128, 0)[: len(w)], 128, 1)[:, :K]
  return (x * np.repeat(sx, 128, 1)[:, :K]) @ (w * spread).T


def check(found, arguments, bits=8):
  """Each token's product to the rounding of the result, and of float32 sums."""
  expected = by_hand(*arguments)
  error = np.abs(np.asarray(found, np.float64) - expected)
  size = np.abs(expected).max(axis=1, keepdims=True)
  assert (error <= 2.0**-bits * np.abs(expected) + 1e-6 * size).all()


@pytest.mark.parametrize('format', ['float32', 'pow2'])
def test_the_reference(format):
  arguments = some(5, 200, 300, format)
  check(reference(*arguments, 128, 128, jnp.float32), arguments, 20)


@pytest.mark.parametrize(
  ('M', 'N', 'K'),
  [
    (1, 64, 128),  # one program, one stage
    (5, 200, 1040),  # nothing a multiple of anything; split sums
    (24, 136, 1536),  # more blocks than stages, two products a stage
    (100, 128, 256),  # two tiles of tokens
    (130, 264, 400),  # wide, ragged in all directions
  ],
)
def test_the_kernel(M, N, K):
  arguments = some(M, N, K)
  check(INTERPRETED(*arguments), arguments)


def test_a_program_that_walks_through_several_tiles(monkeypatch):
  monkeypatch.setattr(hopper, 'MULTIPROCESSORS', 2)
  arguments = some(300, 520, 640)
  plan = hopper.launch(300, 520, 640)
  assert (plan.programs, plan.tiles) == (2, (3, 3, 1))
  assert plan.depth > plan.stages
  check(INTERPRETED(*arguments), arguments)


def test_split_sums_are_added_up():
  plan = hopper.launch(9, 72, 1536)
  assert plan.splits == 3
  arguments = some(9, 72, 1536)
  check(INTERPRETED(*arguments), arguments)


@st.composite
def shapes(draw, tokens):
  return draw(tokens), 8 * draw(st.integers(1, 40)), 16 * draw(st.integers(1, 60)), draw(st.integers(0, 99))


@given(shapes(st.integers(1, 100)))
@settings(max_examples=3, deadline=None, derandomize=True)
def test_the_kernel_over_random_shapes(shape):
  M, N, K, seed = shape
  arguments = some(M, N, K, 'pow2', seed)
  check(INTERPRETED(*arguments), arguments)


@given(shapes(st.integers(1, 400)))
@settings(max_examples=60, deadline=None, derandomize=True)
@pytest.mark.slow
def test_the_kernel_over_many_shapes(shape):
  M, N, K, seed = shape
  arguments = some(M, N, K, 'float32', seed)
  check(INTERPRETED(*arguments), arguments)


def test_the_one_dot_takes_the_kernel(monkeypatch):
  monkeypatch.setattr(hopper, 'block_matmul', INTERPRETED)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 3, 256)), BF16)
  w = quantise(jnp.asarray(rng.normal(size=(64, 256)), jnp.float32), 'float32')
  forced = BlockScaled(w.codes, w.scale, w.format, kernels='mosaic_gpu')
  found, expected = (np.asarray(block_dot(x, each), np.float32) for each in (forced, w))
  np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
  ('M', 'N', 'K'),
  [(1, 256, 896), (16, 1536, 1536), (64, 18944, 3584), (256, 3584, 18944), (512, 4096, 2048), (16384, 18944, 3584)],
)
def test_every_block_is_summed_once_and_memory_suffices(M, N, K):
  plan = hopper.launch(M, N, K)
  across, along, splits = plan.tiles
  assert across * plan.rows >= N > (across - 1) * plan.rows
  assert along * plan.tokens >= M > (along - 1) * plan.tokens
  assert splits * plan.depth >= -(-K // 128) > (splits - 1) * plan.depth
  assert plan.stages >= 2
  assert 1 <= plan.programs <= across * along * splits


# --- experts ---------------------------------------------------------------------------------------------------------


def experts(sizes, T, N, K, seed=0):
  """Arguments of the grouped kernel for so many tokens of each expert: blocks of T, zeros behind, and two not in use."""
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
  ([17, 0, 33], 32, 136, 144),  # two products
  ([0, 0], 16, 8, 16),  # nothing to do
]


@pytest.mark.parametrize(('sizes', 'T', 'N', 'K'), RAGGED)
def test_each_block_meets_its_experts_weights(sizes, T, N, K):
  arguments = experts(sizes, T, N, K)
  check_experts(GROUPED(*arguments), arguments)
  check_experts(grouped_reference(*arguments, 128, 128, BF16), arguments)


def test_a_program_that_walks_through_the_blocks_of_several_experts(monkeypatch):
  monkeypatch.setattr(hopper, 'MULTIPROCESSORS', 2)
  arguments = experts([130, 0, 1], 128, 136, 272)  # wide; neither N nor K a multiple of a block
  assert hopper.launch(5 * 128, 136, 272, 128).programs == 2
  check_experts(GROUPED(*arguments), arguments)


@st.composite
def shares(draw):
  sizes = draw(st.lists(st.integers(0, 40) | st.integers(0, 1), min_size=1, max_size=6))
  return sizes, draw(st.sampled_from(hopper.TOKENS)), 8 * draw(st.integers(1, 40)), 16 * draw(st.integers(1, 60))


@given(shares(), st.integers(0, 99))
@settings(max_examples=20, deadline=None, derandomize=True)
@pytest.mark.slow
def test_experts_of_many_shapes(shape, seed):
  arguments = experts(*shape, seed)
  check_experts(GROUPED(*arguments), arguments)


@pytest.mark.parametrize(('T', 'K', 'reason'), [(24, 128, 'blocks are of 24 tokens'), (8, 40, r'\[64, 40\]')])
def test_a_forced_kernel_of_experts_refuses(T, K, reason):
  x, w = jnp.zeros((1, T, K), jnp.float8_e4m3fn), jnp.zeros((2, 64, K), jnp.float8_e4m3fn)
  scales, expert = (jnp.ones((1, T, 1)), jnp.ones((2, 1, 1))), jnp.zeros(1, jnp.int32)
  with pytest.raises(SettingsError, match=f"'mosaic_gpu'.*grouped block-scaled matmul.*{reason}"):
    grouped_matmul(x, scales[0], w, scales[1], expert, expert[0], 128, 128, BF16, 'mosaic_gpu')


def test_a_mixture_takes_the_kernel(monkeypatch):
  seen = []

  def kernel(x, x_scale, w, *others):
    seen.append(w.shape)
    return grouped_reference(x, x_scale, w, *others, 128, 128, BF16)

  monkeypatch.setattr(hopper, 'grouped_matmul', kernel)
  rng = np.random.default_rng(0)
  X, E, F = 3, 48, 32
  shapes = {'gate': (X, F, E), 'up': (X, F, E), 'down': (X, E, F)}
  held = {name: quantise(jnp.asarray(rng.normal(size=shape), jnp.float32), 'float32') for name, shape in shapes.items()}
  x, weights = jnp.asarray(rng.normal(size=(2, E)), BF16), jnp.ones((2, 1), jnp.float32)
  found, expected = (
    np.asarray(mixture({name: replace(w, kernels=kernels) for name, w in held.items()}, x, jnp.array([[2], [0]]), weights))
    for kernels in ('mosaic_gpu', 'reference')
  )
  assert seen == list(shapes.values())
  np.testing.assert_array_equal(found, expected)


def test_a_cost_by_hand():
  # 2 tokens of 256 features and 8 rows of them in FP8; 2 + 1 float32 scales for each of 2 groups; 2 x 8 numbers of 2 bytes
  assert cost(2, 8, 256) == (2 * 256 + 8 * 256 + 4 * (2 + 1) * 2 + 2 * 8 * 2, 2 * 2 * 8 * 256)
  # 5 tokens of 256 features through 2 experts of 8 rows: as one product, and another expert's codes and two scales
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
    (64, 576, BF16, 'float32', r'\[64, 576\]: beyond 64 and 128 not multiples'),
    (96, 256, BF16, 'float32', r'\[96, 256\]: beyond 64 and 128 not multiples'),
  ],
)
def test_a_forced_kernel_computes_or_refuses(monkeypatch, N, K, dtype, format, reason):
  monkeypatch.setattr(hopper, 'block_matmul', lambda x, sx, w, sw: jnp.full((1, N), 7, BF16))
  w = quantise(jnp.ones((N, K)), format)
  codes, scale = quantise_groups(jnp.ones((1, K)), format)
  rows, group = (1, 32) if format == 'mxfp8' else (128, 128)
  run = partial(block_matmul, codes, scale, w.codes, w.scale, rows, group, dtype, 'mosaic_gpu')
  if reason is None:
    np.testing.assert_array_equal(run(), 7)
  else:
    with pytest.raises(SettingsError, match=f"config.model.kernels = 'mosaic_gpu'.*block-scaled matmul.*{reason}"):
      run()
