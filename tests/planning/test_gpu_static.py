"""The model of a decode step: sums worked out by hand, and what XLA launches for two layers, against fixed limits.

The second part is skipped with a reason if sprl/planning/aot.py finds no compiler.
"""

import dataclasses
from collections import Counter

import gpu_static
import gpu_static_model as model
import pytest
from common import record
from gpu_static import Case

from sprl.kernels import launch_model
from sprl.planning import aot, sass
from sprl.planning.hlo import Product, Shape, parse
from sprl.planning.thunks import Thunk

LOOP = """ENTRY %main (a: f32[42,100000]) -> f32[42,100000] {
  %a = f32[42,100000]{1,0} parameter(0)
  %asked = f32[42,100000]{1,0} while(%a), condition=%more, body=%step
  %counted = f32[42,100000]{1,0} while(%a), condition=%more, body=%step, backend_config={"known_trip_count":{"n":"15"}}
  ROOT %copied = f32[42,100000]{1,0} copy(%a)
}
%step (b: f32[42,100000]) -> f32[42,100000] {
  ROOT %b = f32[42,100000]{1,0} parameter(0)
}
"""
# A loop over blocks of two of the rows, with the kernel that moves kept slots.
DUE = """ENTRY %main (a: u8[8,640,128]) -> u8[8,640,128] {
  %a = u8[8,640,128]{2,1,0} parameter(0)
  ROOT %blocks = u8[8,640,128]{2,1,0} while(%a), condition=%more, body=%step
}
%step (b: u8[8,640,128]) -> u8[8,640,128] {
  %b = u8[8,640,128]{2,1,0} parameter(0)
  %rows = s32[2]{0} parameter(1)
  %keep = s32[2,512]{1,0} parameter(2)
  ROOT %moved = u8[8,640,128]{2,1,0} custom-call(%b, %b, %rows, %keep), metadata={op_name="hopper_compact/mosaic_gpu"}
}
"""
COPIED = 2 * 4 * 42 * 100_000  # bytes: 8 us at model.MEMORY


@pytest.fixture
def walk():
  return model.Walk(parse(LOOP), model.Context(rows=8, slots=640, length=576, kernels={}))


def kernel(name='copied'):
  return Thunk('CustomKernel', name)


def test_launches_in_a_graph_start_faster_than_outside(walk):
  outside = walk.work([kernel()])
  assert outside.bytes == COPIED
  assert outside.rest == pytest.approx(8e-6)
  assert outside.seconds == pytest.approx(8e-6 + model.LAUNCH)
  graph = walk.work([Thunk('CommandBuffer', '', {'': [kernel(), kernel()]})])
  assert graph.seconds == pytest.approx(16e-6 + 2 * model.START + model.GRAPH)


def test_only_a_loop_without_a_known_trip_count_asks_the_host(walk):
  lists = {'condition': [kernel()], 'body': [kernel()]}
  counted = walk.work([Thunk('While', 'counted', lists)])
  assert (counted.host_reads, counted.launches) == (0, 15)
  asked = walk.work([Thunk('While', 'asked', lists)])  # no row is due: the condition is read once
  assert (asked.host_reads, asked.launches) == (1, 1)


def test_a_plain_step_takes_the_cheap_branch_and_a_due_one_the_other(walk):
  branch = Thunk('Conditional', 'copied', {'false_branch': [kernel()], 'true_branch': [kernel()] * 3})
  assert walk.work([branch]).launches == 1
  assert dataclasses.replace(walk, due=1.0).work([branch]).launches == 3


def test_kernels_of_a_compression_skip_the_rows_that_fill_up_a_block():
  blocks = Thunk('While', 'blocks', {'condition': [], 'body': [kernel('moved')]})
  moved = 2 * 2 * 512 * 128  # bytes of one row's 512 kept slots, keys and values, read and written
  for due, times, rows in ((0.0, 0, 0), (0.125, 1, 1), (0.375, 2, 3), (1.0, 4, 8)):  # of 8 rows
    walk = model.Walk(parse(DUE), model.Context(rows=8, slots=640, length=576, kernels={}), due=due)
    found = walk.work([blocks])
    assert (found.launches, found.host_reads) == (times, 1 + times)
    assert found.bytes == pytest.approx(rows * (moved + 4 * 512))


def test_layers_are_extrapolated_along_a_line():
  few, more = model.Work(launches=10, rest=3.0), model.Work(launches=16, rest=4.0)
  assert model.at_depth(few, more, (2, 4), 28) == model.Work(launches=10 + 26 * 3, rest=3.0 + 26 * 0.5)
  assert model.at_depth(1.0, 2.0, (2, 4), 8) == 4.0


def test_attention_reads_the_occupied_slots_only():
  cache, q = Shape('f8e4m3fn', (8, 640, 128)), Shape('bf16', (8, 7, 128))
  work = model.attention([q, cache, cache], [q], model.Context(4, 640, 576, {}))
  assert work.bytes == 2 * 2 * 8 * 7 * 128 + 2 * 8 * 576 * 128


def test_a_comparison_of_keys_takes_the_time_of_its_loop_or_its_share_of_the_rate():
  keys, context = Shape('bf16', (8, 640, 128)), model.Context(4, 640, 576, {})
  assert model.similarity([keys], context, 0).rest == pytest.approx(2 * 8 * 640 * 640 * 128 / (0.1 * model.BF16))
  busy = aot.Kernel('', registers=128, spills=0, shared=100 * 1024, threads=128, sass=sass.Sass(Counter(), Counter(other=700)))
  found = model.similarity([keys], context._replace(kernels={'hopper_similarity': busy}), 0)
  assert found.rest == pytest.approx(model.loop_seconds(busy, 8 * 10 * 10))  # 10 blocks of 64 keys with as many


def test_a_product_is_timed_in_whole_waves():
  """133 tiles of 128 x 128 take two waves; each needs 2 * 128 * 128 * 4096 operations of a multiprocessor's share of the rate."""
  found = model.tiled(128, 133 * 128, 4096, batch=2, size=2, rate=model.BF16, traffic=0)
  assert found.seconds >= 2 * 2 * 128 * 133 * 128 * 4096 / model.BF16
  one_wave = model.tiled(256, 132 * 128, 4096, 1, 2, model.BF16, traffic=0)
  assert one_wave.wave_use == 1
  bound = model.tiled(1, 128, 4096, 1, 2, model.BF16, traffic=model.MEMORY)
  assert bound.seconds == pytest.approx(1 / model.STREAMED)


def test_an_fp8_product_takes_its_launch_model_or_its_bytes_at_the_rate_of_other_products():
  M, N, K = 256, 37888, 3584  # one launch of many operations, and one of many bytes
  plan = launch_model.launch(M, N, K)
  whole = launch_model.seconds(plan, M, N, K)
  assert model.fp8_tiled(M, N, K).seconds == pytest.approx(whole - launch_model.LAUNCH - launch_model.FILL)
  assert model.fp8_tiled(16, N, K).seconds == pytest.approx((N * K + 16 * K + 2 * 16 * N) / (0.9 * launch_model.MEMORY))
  assert model.fp8_tiled(256, 1536, 8960).partial == 2 * launch_model.launch(256, 1536, 8960).partial_bytes > 0


def test_the_issue_rate_and_the_dependent_instructions_of_a_loop_are_timed_apart():
  busy = sass.Sass(Counter(), Counter(other=700))
  report = aot.Kernel('hopper_decode_attention', registers=128, spills=0, shared=100 * 1024, threads=128, sass=busy)
  # 700 instructions of 4 warps on 4 schedulers are 1,000 cycles at 70 %; those of one warp follow each other in 1,400.
  loop = model.kernel_loop(report)
  assert loop.resident == 2
  assert loop.issue == pytest.approx(1000 / model.CLOCK)
  assert loop.chain == pytest.approx(1400 / model.CLOCK)


def test_operations_of_a_product_exceed_the_bytes_of_its_weights_only_with_many_tokens():
  """In bfloat16 a weight of 2 bytes takes as long as 2 M operations if M = BF16 / MEMORY, 167 tokens."""
  few, many = (model.excess(Product(M, 4096, 4096), 2, model.BF16) for M in (64, 256))
  assert few == 0
  assert many == pytest.approx(2 * 4096**2 * (256 / model.BF16 - 1 / model.MEMORY))


def test_targets_are_judged():
  row = {'tokens/s': 10.0, 'roofline': 0.9, 'launches/layer': 11, 'nested loops': 0, 'host reads a step': 1, 'a chunk': 1}
  rows = {
    'Qwen2.5-7B 256 dense bf16': row,
    'Qwen2.5-7B 256 sparse fp8': row | {'tokens/s': 31.0, 'mean ms': 1.05, 'spread ms': 1.2, 'step ms': 1.0},
    'Qwen2.5-7B 256 sparse fp8 without key bias': row | {'step ms': 0.96},
  }
  met = {each['target'].partition(': ')[2]: each['met'] for each in gpu_static.judged(rows, []) if 'sparse' in each['target']}
  assert met == {
    'times dense bf16': True,
    'mean over plain step, compressions together': True,
    'mean over plain step, compressions spread': False,
    'launches a layer': True,
    'nested loops': True,
    'host reads a step': False,
    'host reads a chunk': True,
    'share of key biases': True,
  }


def test_a_run_that_was_stopped_goes_on_with_the_results_of_its_commit(tmp_path, monkeypatch):
  monkeypatch.setattr(gpu_static, 'RESULTS', tmp_path)
  row = {'case': 'Qwen2.5-7B 256 dense bf16', 'tokens/s': 10.0, 'roofline': 0.9, 'launches/layer': 9, 'nested loops': 0}
  done = gpu_static.Result(row | {'host reads a step': 0, 'a chunk': 0}, [], [{'first case': row['case'], 'kernel': 'append'}])
  record('made', *gpu_static.tables([done]), tmp_path)
  assert gpu_static.recorded('made') == {row['case']: done}
  assert gpu_static.recorded(None) == gpu_static.recorded('other') == {}
  monkeypatch.setattr(gpu_static, 'commit', lambda: 'another')
  assert gpu_static.recorded('made') == {}


# --- compiled for an H200 --------------------------------------------------------------------------------------------

# Limits of two layers of Qwen2.5-1.5B with 64 rows: launches of a plain step, its nested loops, reads by the host, MiB that
# the loop computes again from weights, conversions and concatenations of weights inside of products. They may only go down.
NONE = {'nested loops': 0, 'host reads a step': 0, 'host reads a chunk': 0, 'prepared MiB': 0, 'fused preparations': 0}
MOST = {
  Case('Qwen2.5-1.5B', 64, 'dense', 'bf16'): NONE | {'launches': 39},
  Case('Qwen2.5-1.5B', 64, 'sparse', 'fp8'): NONE | {'launches': 46, 'host reads a chunk': 1},
}


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
@pytest.mark.parametrize('case', MOST, ids=str)
def test_a_plain_step_launches_no_more_than_before(case, optimised):
  counts = gpu_static.step(case, layers=2).counts
  assert {name: counts[name] for name, most in MOST[case].items() if counts[name] > most} == {}


@pytest.mark.slow
@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_eight_layers_lie_on_the_line_through_two_and_four(optimised):
  few, more, many = (gpu_static.step(Case('Qwen2.5-1.5B', 64, 'dense', 'bf16'), layers) for layers in (2, 4, 8))
  assert model.at_depth(few.plain, more.plain, (2, 4), 8).seconds == pytest.approx(many.plain.seconds, rel=0.02)
  assert model.at_depth(few.plain, more.plain, (2, 4), 8).launches == many.plain.launches
