"""The model of a launch against hand computations, and the launches that it chooses."""

import json

import launch_sweep
import pytest
from common import RESULTS

from sprl.kernels import launch_model
from sprl.kernels.launch_model import CLUSTERS, SHARED, bf16_seconds, candidates, cut, launch, seconds

TOKENS = 1, 16, 64, 128, 256, 512, 4096
# Weights [N, K] of a layer with fused q, k, v and fused gate, up; and the output of attention and the down projection.
FUSED = {
  'Qwen2.5-1.5B': [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)],
  'Qwen2.5-7B': [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
  'Qwen3-8B': [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
  'Qwen3-30B-A3B': [(5120, 2048), (2048, 4096)],
}
APART = [(256, 1536), (8960, 1536), (512, 3584), (18944, 3584), (1024, 4096), (12288, 4096)]  # k, and gate, of the same models
EXPERTS = [(1536, 2048), (768, 2048), (2048, 768)]  # gate and up fused, apart; down
SHAPES = [(M, N, K) for M in TOKENS for N, K in [*(each for shapes in FUSED.values() for each in shapes), *APART]]


@pytest.fixture
def simple(monkeypatch):
  """A device of round numbers, on which nothing but bytes and operations takes time."""
  for name in ('LAUNCH', 'FILL', 'MEET', 'LATENCY', 'PRODUCT', 'STEP'):
    monkeypatch.setattr(launch_model, name, 1e-30)
  for name, rate in {'MEMORY': 1e12, 'L2': 132e11, 'FETCH': 1e11, 'FP8': 132e15, 'CLOCK': 1e15}.items():
    monkeypatch.setattr(launch_model, name, rate)


def test_time_by_hand(simple, monkeypatch):
  # 132 tiles of 64 rows x 8 tokens, 2 blocks: codes of weights and of tokens, and results of 2 bytes.
  few = cut(8, 64 * 132, 256, 1, 1, 8)
  assert seconds(few, 8, 64 * 132, 256) == pytest.approx((64 * 132 * 256 + 8 * 256 + 2 * 8 * 64 * 132) / 1e12)
  # One tile of 128 rows x 64 tokens, 4 blocks: (128 + 64) * 128 bytes each.
  one = cut(64, 128, 512, 1, 2, 64)
  assert seconds(one, 64, 128, 512) == pytest.approx(4 * 192 * 128 / 1e11)
  # The same, shared by two programs: two blocks each; both write 32 KiB of float32 sums, then each reads half of both.
  two = cut(64, 128, 512, 1, 2, 64, 2)
  assert two.partial_bytes == 2 * 128 * 64 * 4
  assert seconds(two, 64, 128, 512) == pytest.approx((2 * 192 * 128 + 128 * 64 * 4) / 1e11)
  # bfloat16, one token: 132 tiles of 64 rows, whose weights take 2 bytes.
  assert bf16_seconds(1, 64 * 132, 256) == pytest.approx(2 * (64 * 132 * 256 + 256 + 64 * 132) / 1e12)
  # 133 tiles of 256 rows x 128 tokens, 8 blocks: one multiprocessor has two. 2 * 256 * 128 * 128 operations a block.
  monkeypatch.setattr(launch_model, 'FP8', 132e12)
  many = cut(128, 256 * 133, 1024, 2, 2, 128)
  assert (many.turns, many.wave_use) == (2, 133 / 264)
  assert seconds(many, 128, 256 * 133, 1024) == pytest.approx(2 * 8 * 2 * 256 * 128 * 128 / 1e12)


def test_clusters_share_copies(simple):
  M, N, K = 256, 256, 1024
  alone, four = (cut(M, N, K, 2, 1, 128, 1, together) for together in ((1, 1), (2, 2)))
  assert (alone.clusters, alone.cluster, four.clusters, four.cluster) == (4, 1, 1, 4)
  assert seconds(alone, M, N, K) == pytest.approx(8 * 256 * 128 / 1e11)
  assert seconds(four, M, N, K) == pytest.approx(8 * 128 * 128 / 1e11)


@pytest.mark.parametrize(('M', 'N', 'K'), SHAPES)
def test_a_launch_covers_every_number_once_and_fits_memory(M, N, K):
  for plan in [launch(M, N, K), *candidates(M, N, K)]:
    across, along, splits = plan.tiles
    assert across * plan.rows >= N > (across - 1) * plan.rows
    assert along * plan.tokens >= M > (along - 1) * plan.tokens
    assert splits * plan.depth >= -(-K // 128) > (splits - 1) * (plan.depth - 1)
    assert plan.tokens % plan.share == 0
    assert plan.share % 8 == 0
    assert plan.tokens // plan.share <= splits
    assert plan.stages >= 2
    stage = (plan.rows + plan.tokens) * 128 + 4 * max(plan.tokens, 32)
    assert plan.stages * stage + 2 * plan.warpgroups * plan.share * 64 < SHARED[plan.resident - 1]
    assert across % plan.together[0] == along % plan.together[1] == 0
    assert plan.clusters * plan.cluster <= across * along * splits
    assert plan.warpgroups == 1 or plan.clusters <= CLUSTERS[plan.cluster]


@pytest.mark.parametrize('model', FUSED)
def test_fp8_is_at_most_a_tenth_slower_than_bfloat16_by_the_model(model):
  """Every linear keeps its FP8 codes at every number of tokens. That should cost little where it does not gain."""
  for M in TOKENS:
    for N, K in FUSED[model]:
      assert seconds(launch(M, N, K), M, N, K) <= 1.1 * bf16_seconds(M, N, K), (M, N, K)


def test_fp8_linears_that_are_not_fused_are_at_most_a_tenth_slower():
  for M in TOKENS:
    for N, K in APART:
      assert seconds(launch(M, N, K), M, N, K) <= 1.1 * bf16_seconds(M, N, K), (M, N, K)


@pytest.mark.parametrize('tokens', [8, 16, 32, 64, 128])
@pytest.mark.parametrize(('N', 'K'), EXPERTS)
def test_fp8_experts_are_faster_than_bfloat16_by_the_model(N, K, tokens):
  for blocks in (64, 128, 200):
    M = blocks * tokens
    plan = launch(M, N, K, tokens)
    assert plan.splits == plan.cluster == 1
    assert plan.tokens == tokens
    assert seconds(plan, M, N, K, tokens) < bf16_seconds(M, N, K, tokens)


def test_launches_of_decode_steps_of_7b():
  """256 tokens: clusters of four for gate and up, split sums for down; no shape leaves half of the device idle."""
  gate, down = launch(256, 37888, 3584), launch(256, 3584, 18944)
  assert (gate.rows, gate.tokens, gate.together, gate.splits) == (128, 128, (2, 2), 1)
  assert (down.rows, down.splits) == (128, 2)
  assert down.partial_bytes < 0.25 * 3584 * 18944
  for N, K in FUSED['Qwen2.5-7B']:
    assert launch(256, N, K).wave_use > 0.5


@pytest.mark.parametrize(
  ('M', 'N', 'K', 'parts'),
  [
    (256, 4608, 3584, 2),  # 72 tiles of 128 x 128 become 144
    (64, 4608, 3584, 4),
    (256, 3584, 18944, 4),  # 56 tiles become 112, and 224 because the sum is long
    (256, 1536, 8960, 8),
    (256, 1536, 1536, 4),  # 8 parts would have 192 terms
    (64, 4096, 12288, 8),
    (256, 1024, 64, 1),
    (256, 3584, 3600, 1),  # not a multiple of 64 terms
    (1024, 10240, 8192, 1),
  ],
)
def test_a_product_has_as_many_parts_as_occupy_the_multiprocessors(M, N, K, parts):
  assert launch_model.parts_of_sum(M, N, K) == parts


def test_constants_are_those_fitted_to_the_measured_launches():
  rows = json.loads((RESULTS / 'launch_sweep.json').read_text(encoding='utf-8'))['rows']
  found = launch_sweep.fit(rows)
  assert len(rows) == 136
  assert found['rms error'] < 0.15
  for name in launch_sweep.FITTED:
    assert getattr(launch_model, name) == pytest.approx(found[name], rel=0.03), name
