"""Plans of models with sliding windows, by hand for Gemma 3 1B: 22 layers with a window of 512, and 4 full layers."""

import dataclasses

import pytest
from plans import MODELS, RUN

from sprl.config import Cache, Packing, Quant
from sprl.learner.batch import Shape
from sprl.models.config import ModelConfig, tiny
from sprl.planning.devices import DEVICES
from sprl.planning.estimate import kinds, plan
from sprl.planning.memory import kv_bytes, rollout_cache, rollout_memory
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.work import attended, decode_work, longest, visible_keys

GEMMA = ModelConfig.read(MODELS / 'gemma-3-1b-it')
PROMPT, TOKENS, WINDOW, SLOT = 512, 2048, 512, 2 * 256 * 2  # SLOT: bytes of a key and a value of one head of width 256
BUDGET, INTERVAL = RUN.cache.budget or 0, RUN.cache.interval
COUNTERS = 4 * (3 + 1 + 4)  # bytes a row: three numbers, one of each kv head, one of each query head


def test_the_cache_of_a_sequence_has_a_ring_for_each_layer_with_a_window():
  assert kv_bytes(rollout_cache(GEMMA, RUN, Cache(), Quant())) == SLOT * (22 * WINDOW + 4 * TOKENS) + COUNTERS
  sparse = rollout_cache(GEMMA, RUN, Cache(method='streaming', budget=BUDGET, interval=INTERVAL), Quant())
  position = 4  # bytes of a slot's position, in the layers that evict
  assert kv_bytes(sparse) == SLOT * 22 * WINDOW + (SLOT + position) * 4 * (BUDGET + INTERVAL) + COUNTERS


def test_a_decode_step_reads_the_window_of_most_layers():
  dense = rollout_cache(GEMMA, RUN, Cache(), Quant())
  assert attended(dense, WINDOW) == WINDOW  # the longest prompt fills the window
  full = round(PROMPT + (TOKENS - PROMPT + 1) / 2)
  assert round(attended(dense)) == full
  held = rollout_memory(GEMMA, RUN, Cache(), Quant(), 16, MeshAxes())
  _, attention, *_ = decode_work(GEMMA, RUN, dense, held, 64, MeshAxes(), DEVICES['h200']).parts
  assert attention.bytes == pytest.approx(64 * SLOT * (22 * WINDOW + 4 * full), rel=0.01)
  assert attention.flops == 64 * 4 * 4 * 256 * (22 * WINDOW + 4 * full)


def test_an_update_compares_the_window_of_most_layers():
  sizes = Shape(micros=8, rows=1, tokens=TOKENS, sequences=8, columns=TOKENS - PROMPT)
  run = dataclasses.replace(RUN, packing=Packing(share_prefix=False))
  each = [sum(min(t, window) for t in range(1, TOKENS + 1)) for window in (WINDOW, TOKENS)]
  expected = (22 * each[0] + 4 * each[1]) / 26
  assert visible_keys(GEMMA, run, sizes) == pytest.approx(expected / TOKENS, rel=1e-3)
  assert longest(GEMMA, run, sizes).pairs == pytest.approx(8 * expected, rel=1e-3)


def test_a_plan_of_gemma_3():
  found = plan(GEMMA, RUN, MeshAxes(), MeshAxes(), DEVICES['h200'])
  assert found.parameters == 999_885_952
  assert {kind.name for kind in found.kinds} == {'dense', 'dense fp8', 'sparse', 'sparse fp8'}
  assert all(kind.rows > 0 for kind in found.kinds)


def test_a_model_with_windows_on_every_layer_has_dense_rollouts_only():
  dense = dataclasses.replace(RUN, cache=Cache())
  assert set(kinds(dense, tiny('mistral'))) == {'dense', 'dense fp8'}
  assert 'sparse' in kinds(dense, tiny('mistral', sliding_window=None))
