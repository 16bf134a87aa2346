"""The plan's arithmetic, by hand for Qwen2.5-7B: what is counted, what fits, and how long it takes at the least."""

import dataclasses
import itertools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from sprl import compiled, programs
from sprl.cache.kv_cache import KVCache
from sprl.learner.packing import Shape
from sprl.models import transformer
from sprl.models.config import Experts, ModelConfig, tiny
from sprl.parallel import aot
from sprl.parallel.mesh import filled, make_mesh
from sprl.planning import layout, memory, work
from sprl.planning.devices import DEVICES, device
from sprl.planning.layout import Axes, apart, heads, laid_out, size
from sprl.planning.plan import kinds, on, plan
from sprl.planning.show import page
from sprl.policy import HOST
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.served import serve
from sprl.settings import (
  Cache,
  Devices,
  Evaluation,
  Lora,
  Loss,
  Mesh,
  Meshes,
  Model,
  Optimizer,
  Packing,
  Quant,
  Rollout,
  Run,
  Sampling,
  SettingsError,
  default_config,
  resolve,
)

ROOT = Path(__file__).parents[2]
MODELS = ROOT / 'benchmarks' / 'models'
QWEN = ModelConfig.read(MODELS / 'Qwen2.5-7B')
RUN = Run(
  model=Model(path='Qwen2.5-7B'),
  sampling=Sampling(max_prompt=512, max_tokens=1536, rows=64),
  rollout=Rollout(prompts=16, group=4),
  packing=Packing(row_tokens=2048, rows=1),
  cache=Cache(budget=512),
)
MIXTURE = ModelConfig.read(MODELS / 'Qwen3-30B-A3B')
FEW = dataclasses.replace(QWEN, num_layers=4)
L, E, H, K, D, F, V = 28, 3584, 28, 4, 128, 18944, 152064
MATRICES = L * (2 * E * H * D + 2 * E * K * D + 3 * E * F)


@pytest.mark.parametrize(
  ('name', 'parameters'),
  [
    ('Qwen2.5-0.5B', 494_032_768),  # as the checkpoints on the hub have them
    ('Qwen2.5-1.5B', 1_543_714_304),
    ('Qwen2.5-7B', 7_615_616_512),
    ('Qwen3-8B', 8_190_735_360),
  ],
)
def test_models_of_the_benchmarks_have_the_parameters_that_are_published(name, parameters):
  assert size(transformer.abstract_params(ModelConfig.read(MODELS / name))) == parameters


# --- memory ----------------------------------------------------------------------------------------------------------


def test_train_state_and_gradients_by_hand():
  held = memory.update(QWEN, RUN, Shape(64, 1, 2048, 64, 1536), Axes())
  parameters = 7_615_616_512
  assert held.parameters == 4 * parameters
  assert held.optimiser == 8 * parameters + 8  # two moments, and two counts of updates
  assert held.reference == 0
  assert held.gradients == 4 * (parameters + V * E)  # and the head's, of the microbatch at hand
  alive = held.gradients + 2048 * (
    L * (2 * E + 4 * H * D + 8 * K * D)  # inputs, two buffers of queries' size, float32 gradients of keys and values
    + 3 * 4 * H * 1024  # scores of 1,024 queries at a time, which are more than six arrays of the MLP's width
    + 2 * 2048  # the mask, twice
    + 2 * 4 * E  # the stream and its gradient in float32
  )
  assert held.activations == round(1.1 * alive) - held.gradients


def test_gradients_of_experts_stand_beside_their_sum():
  shape = Shape(64, 8, 2048, 64, 1536)
  few, more = (dataclasses.replace(MIXTURE, num_layers=layers) for layers in (2, 4))
  with_two, with_four = (memory.update(config, RUN, shape, Axes(expert=8)) for config in (few, more))
  experts = 2 * 4 * 128 // 8 * 3 * 768 * 2048  # float32, of two layers on a device
  attention = 2 * 4 * (2048 * 128 * (2 * 32 + 2 * 4) + 2048 * 128 + 2 * 2048 + 2 * 128)  # with the router and norms
  assert with_four.gradients - with_two.gradients == experts + attention
  assert with_four.activations - with_two.activations > 1.1 * experts  # a second time, and the layers' inputs


def test_attention_by_a_library_has_neither_buffers_nor_scores_so_that_the_products_of_the_mlp_are_the_most():
  there, config = on(device('h200'), RUN), dataclasses.replace(QWEN, vocab_size=1024)
  shape, masked = Shape(64, 1, 2048, 64, 1536), dataclasses.replace(there, cache=Cache(budget=512, masked_learner=True))
  here, library, apart = (memory.update(config, run, shape, Axes()).activations for run in (RUN, there, masked))
  buffers, scores, products = L * (4 * H * D + 8 * K * D), 3 * 4 * H * 1024, 6 * 2 * F
  assert here - library == pytest.approx(1.1 * 2048 * (buffers + scores - products), abs=2)
  assert apart == here  # kv heads that forget differently are beyond the library
  flops = [work.update(QWEN, run, shape, memory.update(QWEN, run, shape, Axes()), Axes()).parts[1].flops for run in (RUN, there)]
  assert flops[0] == 2 * flops[1]


def test_without_scores_the_head_may_be_the_worst_moment():
  held = memory.update(QWEN, on(device('h200'), RUN), Shape(64, 1, 2048, 64, 1536), Axes())
  alive = (
    held.gradients + 2048 * L * 2 * E + 2 * V * E + 2 * 4 * 256 * V
  )  # inputs, the head in bfloat16, logits and their gradient
  assert held.activations == round(1.1 * alive) - held.gradients


def test_fsdp_and_tensor_split_the_state_and_data_does_not():
  shape = Shape(8, 8, 2048, 64, 1536)
  whole = memory.update(QWEN, RUN, shape, Axes())
  for axes in (Axes(fsdp=8), Axes(data=4, fsdp=2, tensor=4), Axes(fsdp=2, tensor=4)):
    part = memory.update(QWEN, RUN, shape, axes)
    for name in ('parameters', 'optimiser', 'gradients'):
      assert getattr(part, name) == pytest.approx(getattr(whole, name) / 8, rel=1e-3)  # norms and biases may be whole


def test_what_fsdp_gathers_by_hand():
  alone, split = (memory.update(QWEN, RUN, Shape(8, rows, 2048, 64, 1536), Axes(fsdp=rows)) for rows in (1, 8))
  layer, inputs_split = MATRICES // L, L * (E * H * D + 2 * E * K * D + 2 * E * F)
  gathered = (
    2 * 2 * layer  # two layers' weights
    + 4 * inputs_split / 8  # master weights of q, k, v, gate and up, turned over
    + 4 * MATRICES / 8  # gradients of the layers, which wait to be added
    - L * 2 * 2048 * E  # layers' inputs, of which none is left then
  )
  beside = [each.activations - 0.1 * each.gradients for each in (alone, split)]
  assert beside[1] - beside[0] == pytest.approx(1.1 * gathered, rel=1e-3)


def test_rows_of_all_devices_meet_the_vocabulary_together_by_hand():
  """Where that is the worst moment: few layers, wide ones before a large vocabulary."""
  run = on(device('h200'), RUN)
  shallow = dataclasses.replace(QWEN, num_layers=1, intermediate_size=1024)
  alone, split = (memory.update(shallow, run, Shape(8, rows, 2048, 64, 1536), Axes(fsdp=rows)) for rows in (1, 8))
  gathered = (
    2 * 4 * 8 * 2048 * E  # rows of all eight, forward and back
    - 2 * V * E * 7 / 8  # of the vocabulary an eighth is there
    + 4 * (E * H * D + 2 * E * K * D + 2 * E * 1024) / 8
  )
  beside = [each.activations - 0.1 * each.gradients for each in (alone, split)]
  assert beside[1] - beside[0] == pytest.approx(1.1 * gathered, rel=1e-3)


def test_a_kl_term_keeps_a_reference_in_the_compute_dtype():
  run = dataclasses.replace(RUN, loss=Loss(kl_coef=1e-3))
  assert memory.update(QWEN, run, Shape(8, 8, 2048, 64, 1536), Axes(tensor=4)).reference == pytest.approx(
    2 * 7_615_616_512 / 4, rel=1e-3
  )


def test_optimisers_without_moments_hold_next_to_nothing():
  run = dataclasses.replace(RUN, optimizer=Optimizer(name='adafactor'))
  assert memory.update(QWEN, run, Shape(8, 8, 2048, 64, 1536), Axes()).optimiser < 0.01 * 4 * 7_615_616_512


@pytest.mark.parametrize(('optimizer', 'moments'), [(Optimizer(), 8), (Optimizer(moment_dtype='bfloat16'), 4)])
def test_offloaded_moments_are_counted_as_the_hosts(optimizer, moments):
  shape, axes = Shape(8, 8, 2048, 64, 1536), Axes(fsdp=8)
  kept, offloaded = (
    memory.update(QWEN, dataclasses.replace(RUN, optimizer=dataclasses.replace(optimizer, offload=offload)), shape, axes)
    for offload in (False, True)
  )
  assert kept.host == 0
  assert offloaded.host == pytest.approx(moments * 7_615_616_512 / 8, rel=1e-3)
  assert offloaded.optimiser == 8  # two counts of updates
  assert kept.total - offloaded.total == offloaded.host
  times = [work.update(QWEN, RUN, shape, held, axes).bytes for held in (kept, offloaded)]
  assert times[0] == times[1]  # they are read and written all the same


def test_offloaded_moments_have_a_line_of_their_own_and_leave_room_for_sequences():
  run = dataclasses.replace(RUN, optimizer=Optimizer(offload=True))
  kept, offloaded = (plan(FEW, each, Axes(), Axes(), device('h200')) for each in (RUN, run))
  assert f'{offloaded.update.host / 2**30:.2f} GiB of moments in the host' in page(offloaded)
  assert "host's memory" not in page(kept)
  assert offloaded.json()['update']['host'] == offloaded.update.host > 0
  assert all(b.most_rows > a.most_rows for a, b in zip(kept.kinds, offloaded.kinds))


def test_an_update_with_offloaded_moments_is_that_of_the_run():
  """As it is compiled its moments lie on the host, here a CPU's."""
  config, mesh = tiny('qwen2'), make_mesh(Mesh(), jax.devices()[:1])
  for offload in (False, True):
    run = dataclasses.replace(RUN, optimizer=Optimizer(offload=offload))
    state = programs.update(config, run, Shape(1, 1, 32, 1, 8), mesh).arguments[0]
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {x.sharding.memory_kind == HOST for x in moments} == {offload}


def test_bytes_of_a_sequence_by_hand():
  kv = {
    name: memory.kv_bytes(memory.memory_plan(QWEN, RUN, cache, quant), H, K) for name, cache, quant in kinds(RUN)
  }  # beside keys and values: four counters of a row and one a kv head, and of an evicting layer positions and the last 8 queries
  assert kv['dense'] == 2 * 2 * L * K * D * 2048 + 32
  assert kv['dense fp8'] == 2 * L * K * D * 2048 + 32
  slots = 512 + 128
  beside = L * (4 * K * slots + 2 * H * 8 * D) + 32
  assert kv['sparse'] == 2 * 2 * L * K * D * slots + beside
  assert kv['sparse fp8'] == 2 * L * K * D * slots + beside


def test_bytes_of_a_sequence_are_those_of_the_cache_that_is_made():
  config, cache = tiny('qwen2'), Cache(budget=16, interval=4, method='h2o')
  layout = cache_plan(config, cache, Quant(sampler='kv8'), 8, 24, jnp.float32)
  made = KVCache.empty(layout, 3)
  assert 3 * memory.kv_bytes(layout, config.num_heads, config.num_kv_heads) == sum(x.nbytes for x in jax.tree.leaves(made))


@pytest.mark.parametrize('arithmetic', ['emulate', 'blockwise'])
@pytest.mark.parametrize('sampler', ['bf16', 'w8a8'])
def test_weights_as_served_are_those_that_serving_makes(sampler, arithmetic):
  config = tiny('qwen2', hidden_size=128, intermediate_size=256)
  quant = Quant(sampler=sampler, arithmetic=arithmetic)
  served = serve(transformer.init_params(config, jax.random.key(0)), jnp.bfloat16, quant)
  expected = sum(x.nbytes for x in jax.tree.leaves((served.params, served.probe)))
  assert memory.served_bytes(config, RUN, quant, Axes()) == expected


@pytest.mark.parametrize(
  ('name', 'kernels', 'tensor', 'codes'),
  [
    ('h200', 'auto', 1, True),
    ('h200', 'reference', 1, False),
    ('h200', 'auto', 8, False),  # 18,944 features are cut within a block of 128
    ('h100', 'mosaic_gpu', 1, True),
    ('a100', 'auto', 1, False),
    ('v5e', 'auto', 1, False),
  ],
)
def test_what_the_device_would_run_is_planned_whatever_runs_here(name, kernels, tensor, codes):
  """FP8 linears are codes where a kernel multiplies them, and elsewhere bfloat16 numbers that stand for them."""
  run = on(device(name), dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, kernels=kernels)))
  plain, fp8 = (memory.served_bytes(FEW, run, Quant(sampler=sampler), Axes(tensor=tensor)) for sampler in ('bf16', 'w8a8'))
  of_layer = MATRICES // L
  # The codes of one layer are kept once more: of 28 heads a device has at most 4, and 4 kv heads are not split over 8.
  kept = {1: of_layer, 8: 3 * E * F // 8 + 2 * E * 4 * D + 2 * E * K * D}[tensor]
  assert fp8 - plain == pytest.approx(kept - (FEW.num_layers * of_layer // tensor if codes else 0), rel=1e-2)


def test_a_kernel_that_the_device_cannot_run_is_refused():
  run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, kernels='mosaic_gpu'))
  with pytest.raises(SettingsError, match=r"config.model.kernels = 'mosaic_gpu': a100 is no GPU of the Hopper generation"):
    plan(FEW, run, Axes(), Axes(), device('a100'))


def test_the_codes_kept_of_one_layer_are_split_as_its_weights_are():
  attention, experts = 2048 * 128 * (2 * 32 + 2 * 4), 128 * 3 * 768 * 2048
  probes = [memory.probe_bytes(MIXTURE, RUN, Quant(sampler='w8a8'), axes) for axes in (Axes(), Axes(data=2, expert=4))]
  assert probes == [attention + experts, attention + experts / 4]
  assert memory.probe_bytes(MIXTURE, RUN, Quant(), Axes()) == 0


def test_weights_served_in_the_masters_dtype_are_a_second_copy():
  run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, dtype='float32'))
  assert memory.served_bytes(QWEN, run, Quant(), Axes()) == 4 * 7_615_616_512


def test_most_rows_are_the_most_that_fit():
  planned = plan(FEW, RUN, Axes(fsdp=8), Axes(data=8), device('h200'))
  for kind in planned.kinds:
    filled = [planned.update.state + kind.memory.total(rows) for rows in (kind.most_rows, kind.most_rows + 1)]
    assert filled[0] <= planned.usable < filled[1]
  dense, dense8, sparse, sparse8 = (kind.most_rows for kind in planned.kinds)
  assert dense < dense8 < sparse < sparse8
  assert [kind.rows for kind in planned.kinds] == [8] * 4  # 64 that are asked for, on 8 devices


def test_what_does_not_fit_is_told():
  planned = plan(FEW, RUN, Axes(), Axes(), device('v5e'))
  assert not planned.json()['update']['fits']
  assert all(kind.most_rows < 0 and kind.rows == 0 for kind in planned.kinds)


def test_an_evaluation_by_hand():
  """Dense and unquantised as it is by default, of answers that sparse FP8 rollouts have room for, it may not fit."""
  run = dataclasses.replace(
    RUN,
    sampling=Sampling(max_prompt=512, max_tokens=4096, rows=256),
    rollout=Rollout(prompts=32, group=8),
    packing=Packing(row_tokens=4608, rows=1),
    quant=Quant(sampler='w8a8_kv8'),
    loss=Loss(kl_coef=1e-3),
  )
  planned = plan(FEW, run, Axes(fsdp=4), Axes(data=4), device('h100', memory=16.5e9))
  found, parameters = planned.evaluation, size(transformer.abstract_params(FEW))
  assert (found.rows, found.rows_asked) == (32, 128)  # problems, one sample each
  assert found.state == pytest.approx((4 + 8 + 2) * parameters / 4, rel=1e-3)
  assert found.served == planned.kinds[3].memory.weights
  drawn = 4 * (3 * 4096 + V)  # tokens, their log-probs, what was kept; logits
  prefill = 8 * 512 * (2 * 2 * 4 * K * D + 2 * (2 * E + 2 * F) + 2 * 512)  # of 8 prompts: keys, values, a layer's, the mask
  assert found.sampling == pytest.approx(2 * parameters + 32 * (2 * 2 * 4 * K * D * 4608 + drawn) + prefill, rel=1e-3)
  assert planned.json()['update']['fits']
  assert planned.kinds[3].rows == 64
  assert planned.json()['evaluation']['fits'] is False
  told = f'fits: no, {(found.total - planned.usable) / 2**30:.1f} too much'
  assert 'An evaluation (eval.memory=dense) of 128 sequences: 32 on each device, ' in page(planned)
  assert told in page(planned)


@pytest.mark.parametrize(
  ('asked', 'rows'), [(Evaluation(problems=5, samples=1), 5), (Evaluation(problems=5, samples=4, temperature=1.0), 20)]
)
def test_an_evaluation_has_no_more_rows_than_samples(asked, rows):
  found = plan(FEW, dataclasses.replace(RUN, eval=asked), Axes(), Axes(), device('h200')).evaluation
  assert (found.rows, found.rows_asked) == (rows, rows)


def test_an_evaluation_as_rollouts_are_sampled_takes_what_they_take():
  run = dataclasses.replace(RUN, eval=Evaluation(memory='sampler'), quant=Quant(sampler='w8a8_kv8'))
  planned = plan(FEW, run, Axes(), Axes(), device('h200'))
  assert planned.evaluation.sampling == planned.kinds[3].memory.total(64)
  short = dataclasses.replace(run, eval=Evaluation(max_tokens=64), cache=Cache())
  dense = plan(FEW, short, Axes(), Axes(), device('h200'))
  assert dense.kinds[0].memory.total(64) - dense.evaluation.sampling == 64 * (1536 - 64) * (2 * 2 * 4 * K * D + 12)


def test_an_evaluation_is_on_the_learners_devices_where_rollouts_have_their_own():
  run = dataclasses.replace(RUN, devices=Devices(learner='0-3', rollout='4-5'))
  found = plan(FEW, run, Axes(fsdp=4), Axes(data=2), device('h200')).evaluation
  assert found.rows == 64 / 4
  assert found.served == memory.served_bytes(FEW, on(device('h200'), run), run.quant, Axes(fsdp=4))


# --- work ------------------------------------------------------------------------------------------------------------


def test_heads_are_cut_where_they_may_be():
  assert [heads(QWEN, tensor) for tensor in (1, 2, 4, 8, 28)] == [(28, 4), (14, 2), (7, 1), (7, 1), (1, 1)]


def test_attended_slots_by_hand():
  config, prompt, completion = tiny('llama'), 4, 10
  dense = cache_plan(config, Cache(), Quant(), prompt, completion, jnp.float32)
  assert work.attended(dense, 0) == sum(range(5, 15)) / 10
  sparse = cache_plan(config, Cache(budget=6, interval=3, window=2, dense_layers=1), Quant(), prompt, completion, jnp.float32)
  # Steps 3, 6 and 9 compress what is then 7, 9 and 9 long to 6.
  assert work.attended(sparse, 1) == (5 + 6 + 6 + 7 + 8 + 6 + 7 + 8 + 6 + 7) / 10
  assert work.attended(sparse, 0) == work.attended(dense, 0)


def test_a_decode_step_by_hand():
  dense = memory.memory_plan(QWEN, RUN, Cache(), Quant())
  weights = 2 * 7_615_616_512
  linears, attention, head = work.decode(QWEN, RUN, dense, weights, 64, Axes()).parts
  assert linears.flops == 2 * MATRICES * 64
  assert linears.bytes == pytest.approx(2 * MATRICES, rel=1e-3)  # and biases and norms
  slots = round(512 + 1537 / 2)
  assert attention.flops == 64 * L * 4 * H * slots * D
  assert attention.bytes == pytest.approx(64 * L * 2 * 2 * K * slots * D, rel=0.01)
  assert head.flops == 64 * 2 * V * E
  assert head.bytes == 2 * V * E + 64 * 3 * 4 * V


def test_an_update_by_hand():
  shape = Shape(micros=8, rows=8, tokens=2048, sequences=64, columns=1536)
  held = memory.update(QWEN, RUN, shape, Axes(fsdp=8))
  done = work.update(QWEN, RUN, shape, held, Axes(fsdp=8))
  linears, attention, head, step = done.parts
  assert done.tokens == 8 * 8 * 2048
  assert linears.flops == 4 * 2 * MATRICES * 8 * 2048  # forward, twice that backward, and forward again
  assert attention.flops == 8 * L * 2048**2 * H * D * (4 + 4 + 10)
  assert head.flops == 64 * 1536 / 8 * V * E * 8
  state = 12 * 7_615_616_512 / 8
  assert step.bytes == pytest.approx(8 * 2 * state / 3 + 2 * state, rel=1e-3)  # sums read and written 8 times; state once
  gathers, scatters = done.collectives
  assert (gathers.kind, gathers.count) == ('all-gather', 8 * 3 * L)
  met = 3 * MATRICES - L * E * F  # forward, again up to the MLP's output, and back; the vocabulary never
  assert gathers.bytes == pytest.approx(8 * 2 * met * 7 / 8, rel=1e-3)
  assert scatters.bytes == pytest.approx(8 * 4 * MATRICES * 7 / 8, rel=1e-3)


def test_experts_by_hand():
  """Qwen3-30B-A3B on fsdp 2 x expert 8: 16 of 128 experts each, whose tokens come from eight devices."""
  shape, axes, gate = Shape(micros=4, rows=16, tokens=2048, sequences=64, columns=1536), Axes(fsdp=2, expert=8), 768 * 2048
  held = memory.update(MIXTURE, RUN, shape, axes)
  experts, whole = 48 * 128 * 3 * gate, size(transformer.abstract_params(MIXTURE))
  assert held.parameters == pytest.approx(4 * (experts / 16 + (whole - experts) / 2), rel=1e-3)
  done = work.update(MIXTURE, RUN, shape, held, axes)
  attention = 2048 * 128 * (2 * 32 + 2 * 4)
  assert done.parts[0].flops == 4 * 4 * 2 * 2048 * 48 * (attention + 8 * 3 * gate + 2048 * 128)  # eight of its experts a token
  sent = {(each.kind, each.axis): each for each in done.collectives}
  token = 48 * 2048 * 2 * 2048  # its row's hidden states, in bfloat16, to the layers' experts
  assert sent['all-gather', 'expert'].bytes == 4 * 3 * token * 7
  assert sent['reduce-scatter', 'expert'].bytes == 4 * 2 * token * 7
  layers, vocabulary = 48 * (attention + 2048 * 128), 2 * MIXTURE.vocab_size * 2048  # the second once, not every microbatch
  assert sent['all-reduce', 'expert'].bytes == pytest.approx(2 * 4 * (4 * layers + vocabulary) / 2 * 7 / 8, rel=1e-3)
  gathered = {(each.kind, each.axis): each.bytes for each in work.update(MIXTURE, RUN, shape, held, Axes(fsdp=16)).collectives}
  assert sent['all-gather', 'fsdp'].bytes < 0.1 * gathered['all-gather', 'fsdp']


def test_scoring_adds_a_forward_pass():
  shape = Shape(micros=8, rows=1, tokens=2048, sequences=64, columns=1536)
  scored = dataclasses.replace(RUN, correction=dataclasses.replace(RUN.correction, veto=1e-4))
  plain, more = (work.update(QWEN, run, shape, memory.update(QWEN, run, shape, Axes()), Axes()) for run in (RUN, scored))
  assert more.parts[0].flops / plain.parts[0].flops == 5 / 4
  assert more.parts[1].flops / plain.parts[1].flops == 22 / 18


def test_time_is_that_of_each_parts_bound_and_of_what_is_sent():
  done = work.Work(
    1,
    (work.Part('a', 989 * 10**12, 1), work.Part('b', 1, 96 * 10**11)),
    (work.Collective('all-reduce', 'tensor', 1, 450 * 10**9),),
  )
  assert done.seconds(DEVICES['h200'], Axes(tensor=8), jnp.bfloat16) == pytest.approx(4)
  assert done.seconds(DEVICES['h200'], Axes(tensor=16), jnp.bfloat16) == pytest.approx(1 + 2 + 9)  # beyond a node
  assert done.seconds(DEVICES['h200'], Axes(tensor=8), jnp.float32) == pytest.approx(989 / 494 + 3)


def test_an_axis_reaches_beyond_a_node_where_it_and_those_within_it_do():
  h200, axes = DEVICES['h200'], Axes(data=2, fsdp=4, tensor=2)
  assert [work.speed(h200, axes, name) == h200.link for name in ('data', 'fsdp', 'tensor')] == [False, True, True]


# --- what is given ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('text', ['fsdp', 'fsdp=0', 'fsdp=x', 'fsdp=2,fsdp=2', 'pipe=2'])
def test_a_mesh_that_cannot_be_is_refused_by_name(text):
  with pytest.raises(SettingsError, match='--mesh='):
    Axes.parse(text)


def test_measured_ceilings_take_the_place_of_stated_ones():
  measured = device('h100', bandwidth=3e12, link=None)
  assert (measured.bandwidth, measured.link) == (3e12, DEVICES['h100'].link)
  assert 'given: bandwidth' in measured.source
  with pytest.raises(SettingsError, match='--device=b200: expected one of h100, h200'):
    device('b200')
  with pytest.raises(SettingsError, match='--memory=0'):
    device('h100', memory=0.0)


def test_rollouts_that_share_devices_need_as_many():
  with pytest.raises(SettingsError, match='--rollout_mesh: 4 devices; expected 8'):
    plan(FEW, RUN, Axes(fsdp=8), Axes(data=4), device('h200'))


TENSORS = Meshes(Mesh(fsdp=4, tensor=2), Mesh(data=4, fsdp=1, tensor=2))


@pytest.mark.parametrize(
  ('run', 'flags', 'learner', 'rollout'),
  [
    (Run(), [], Axes(), Axes()),
    (Run(), ['fsdp=4,tensor=2'], Axes(fsdp=4, tensor=2), Axes(data=4, tensor=2)),
    (Run(), ['fsdp=4,tensor=2', 'data=8'], Axes(fsdp=4, tensor=2), Axes(data=8)),
    (Run(mesh=Meshes(Mesh(fsdp=4, tensor=2))), [], Axes(fsdp=4, tensor=2), Axes(data=8)),  # as the run has it
    (Run(mesh=TENSORS), [], Axes(fsdp=4, tensor=2), Axes(data=4, tensor=2)),
    (Run(mesh=TENSORS), ['fsdp=16'], Axes(fsdp=16), None),  # rollouts are on 8 devices
    (Run(mesh=TENSORS), ['fsdp=8'], Axes(fsdp=8), Axes(data=4, tensor=2)),
    (Run(mesh=Meshes(Mesh(tensor=2))), [], None, None),  # the rest is fsdp, of who knows how many devices
    (Run(mesh=Meshes(Mesh(tensor=2)), devices=Devices('4-7', '0-3')), [], Axes(fsdp=2, tensor=2), Axes(data=4)),
    (Run(devices=Devices('0-7', '0-7')), [], Axes(fsdp=8), Axes(data=8)),
    (Run(devices=Devices('4-5', '0-3')), ['fsdp=4'], Axes(fsdp=4), Axes(data=2)),
    (Run(mesh=Meshes(Mesh(fsdp=4), Mesh(-1, 1, 2)), devices=Devices(engines=2)), [], Axes(fsdp=4), Axes(data=2, tensor=2)),
  ],
)  # fmt: skip
def test_a_plan_is_laid_out_as_its_flags_and_config_say(run, flags, learner, rollout):
  if rollout is None:
    with pytest.raises(SettingsError, match=r'config\.mesh\.(learner.fsdp = -1: expected a size|rollout = .* 16 devices)'):
      laid_out(run, *flags)
    return
  assert laid_out(run, *flags) == (learner, rollout)


@pytest.mark.parametrize(
  ('given', 'mesh'),
  [
    (Meshes(), 'data=2,fsdp=2,tensor=2'),
    (TENSORS, 'fsdp=8'),
    (Meshes(Mesh(data=8, fsdp=1), Mesh(data=2, fsdp=1, tensor=4)), 'data=8'),
  ],
)
def test_the_flags_that_a_plan_prints_make_a_run_laid_out_so(given, mesh):
  config = default_config()
  config.model.path = 'a model'
  config.mesh.update(dataclasses.asdict(given))
  axes = Axes.parse(mesh)
  planned = plan(FEW, dataclasses.replace(RUN, mesh=given), axes, axes.gathered(), device('h200'))
  assert ' '.join(planned.flags) in page(planned)
  for flag in planned.flags:
    name, _, size = flag.removeprefix('--config.').partition('=')
    with config.ignore_type():
      config.update_from_flattened_dict({name: int(size)})
  meshes = resolve(config).mesh
  found = [Axes(**filled(each, 8)) for each in (meshes.learner, meshes.rollout)]
  assert found == [axes, axes.gathered()]


@pytest.mark.parametrize(
  ('devices', 'told'),
  [
    (Devices(learner='0-3', rollout='4-11'), r"config\.devices\.learner = '0-3': 4 devices; expected 8, as --mesh has"),
    (Devices(learner='0-7', rollout='8-11'), r"config\.devices\.rollout = '8-11': 4 devices; expected 8, as --rollout_mesh has"),
    (Devices(learner='0-7', rollout='7-14'), r'expected the same devices, or sets that share none'),
    (Devices(engines=3), r'config\.devices\.engines = 3: expected a divisor of 8'),
  ],
)
def test_devices_that_disagree_with_the_mesh_are_refused_by_name(devices, told):
  with pytest.raises(SettingsError, match=told):
    plan(FEW, dataclasses.replace(RUN, devices=devices), Axes(fsdp=8), Axes(data=8), device('h200'))


def test_devices_are_shared_or_apart_by_their_numbers():
  axes = Axes(fsdp=4), Axes(data=4)
  shared = Devices(), Devices(engines=2), Devices('0-3', '0,1,2,3'), Devices(learner='0-3'), Devices(rollout='4-7', learner='4-7')
  assert not any(apart(each, *axes) for each in shared)
  assert apart(Devices('0-3', '4-7'), *axes)


def command(*arguments):
  line = [sys.executable, '-m', 'sprl.plan', '--config=configs/qwen_gsm8k.py:qwen2.5-7b', *arguments]
  return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_plans_from_a_config_json_alone(tmp_path):
  (tmp_path / 'config.json').write_text((MODELS / 'Qwen2.5-7B' / 'config.json').read_text())
  out, drawn = tmp_path / 'plan.json', tmp_path / 'plan.picture'
  done = command(f'--config.model.path={tmp_path}', '--mesh=fsdp=8', f'--json={out}', f'--png={drawn}', '--bandwidth=4e12')
  assert done.returncode == 0, done.stderr
  assert '7.62 B parameters; learner fsdp=8, rollouts data=8' in done.stdout
  told = json.loads(out.read_text())
  assert told['parameters'] == 7_615_616_512
  assert told['device']['bandwidth'] == 4e12
  assert [kind['name'] for kind in told['kinds']] == ['dense', 'dense fp8', 'sparse', 'sparse fp8']
  assert drawn.read_bytes().startswith(b'\x89PNG')


def test_the_readme_shows_what_the_command_prints():
  line, _, rest = (ROOT / 'README.md').read_text().partition('    python -m sprl.plan ')[2].partition('\n')
  shown = textwrap.dedent(
    ''.join(itertools.takewhile(lambda row: row[:4].isspace() or row == '\n', rest.splitlines(True)))
  ).strip()
  done = command(*line.split()[1:], f'--config.model.path={MODELS / "Qwen2.5-7B"}')
  assert len(shown.splitlines()) > 12
  assert shown in done.stdout


def test_the_command_refuses_in_one_line():
  done = command(f'--config.model.path={MODELS / "Qwen2.5-7B"}', '--mesh=fsdp=eight')
  assert done.returncode == 2
  assert done.stderr.count('\n') == 1
  assert '--mesh=fsdp=eight' in done.stderr


@pytest.mark.parametrize('usable', [-1.0, 0.0, 1.5, float('nan')])
def test_a_part_of_memory_that_cannot_be_is_refused(usable):
  with pytest.raises(SettingsError, match=f'--usable={usable}: expected a number above 0, and at most 1'):
    plan(FEW, RUN, Axes(), Axes(), device('h200'), usable)


def test_files_that_cannot_be_written_are_told_in_one_line_before_anything_is_compiled(tmp_path):
  done = command(f'--config.model.path={MODELS / "Qwen2.5-0.5B"}', f'--json={tmp_path}/none/plan.json')
  assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
  assert 'none/plan.json' in done.stderr


@pytest.mark.parametrize(
  ('sampler', 'budget', 'name'),
  [('bf16', 0, 'dense'), ('w8a8_kv8', 512, 'sparse fp8'), ('w8a8', 0, 'dense w8a8'), ('kv8', 512, 'sparse kv8')],
)
def test_the_kind_that_a_run_asks_for_of_rollouts_is_planned_and_compiled(sampler, budget, name, monkeypatch):
  run = dataclasses.replace(RUN, quant=Quant(sampler=sampler), cache=Cache(budget=budget))
  planned = plan(FEW, run, Axes(), Axes(), device('h200'))
  assert [kind.name for kind in planned.kinds] == list(dict.fromkeys(['dense', 'dense fp8', 'sparse', 'sparse fp8', name]))
  own = next(kind for kind in planned.kinds if kind.name == name)
  assert (own.sampler, own.budget) == (sampler, budget)
  dense, fp8 = (planned.kinds[i + 2 * (budget > 0)] for i in range(2))
  assert own.kv_bytes == (fp8 if 'kv8' in sampler else dense).kv_bytes
  assert own.memory.weights == (fp8 if 'w8a8' in sampler else dense).memory.weights
  nothing = aot.Compiled((), '', 0, 0, 0, 0, ())
  monkeypatch.setattr(compiled, 'check_update', lambda *_: compiled.Check('update', 0, nothing))
  monkeypatch.setattr(compiled, 'check_decode', lambda config, run, planned, kind: compiled.Check(kind.name, 0, nothing))
  assert [check.name for check in compiled.checks(FEW, run, planned)] == ['update', name]


def test_experts_that_a_mesh_cannot_split_are_refused_by_name():
  with pytest.raises(SettingsError, match='--mesh: expert = 3; expected a divisor of 128'):
    plan(MIXTURE, RUN, Axes(expert=3), Axes(data=3), device('h200'))
  with pytest.raises(SettingsError, match='--rollout_mesh: expert = 3; expected a divisor of 128'):
    plan(MIXTURE, RUN, Axes(data=3), Axes(expert=3), device('h200'))


def test_adapters_are_not_planned_for():
  with pytest.raises(SettingsError, match=r'config\.lora\.rank = 8: expected 0'):
    plan(FEW, dataclasses.replace(RUN, lora=Lora(rank=8)), Axes(), Axes(), device('h200'))


def test_layers_of_a_mixture_that_have_an_mlp_of_their_own_are_planned_by_their_own_width():
  """Every other layer dense, and an expert that all go through in the others: by hand, for each way of computing again."""
  mixed = Experts(count=8, chosen=2, width=64, normalised=True, layers=(1, 3), shared_width=32)
  config = dataclasses.replace(tiny('qwen2_moe'), num_layers=4, hidden_size=128, intermediate_size=512, experts=mixed)
  assert layout.widths(config, 2) == [256, 16, 256, 16]
  shape, b, kept = Shape(8, 1, 2048, 64, 1536), 2, {}
  for remat in ('layer', 'dots', 'none'):
    run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, remat=remat))
    kept[remat] = memory.update(config, run, shape, Axes()).activations
  q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  dots = 4 * (2 * 128 + q + 2 * kv) + 2 * (512 + 32 + 512 + 32)
  assert kept['dots'] - kept['layer'] == pytest.approx(1.1 * 2048 * b * dots, abs=2)
  assert kept['none'] - kept['dots'] == pytest.approx(1.1 * 2048 * b * (4 * (128 + q) + 512 + 32 + 512 + 32), abs=2)
  attention, beside = 2 * 128 * q + 2 * 128 * kv, 8 * 128 + 128  # router, the shared one's gate
  dense, mixture = 3 * 128 * 512, 3 * 128 * (8 * 64 + 32) + beside
  assert memory._gathered(config, RUN, Axes(fsdp=2)) == pytest.approx(b * (2 * attention + dense + mixture), rel=0.01)
