"""Planned bytes of weights, train state, caches and activations, beside real arrays and literals."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from plans import FEW, LAYER, MIXTURE, MODELS, PARAMETERS, QWEN, RUN, D, E, F, H, K, V, shallow

from sprl.cache.key_bias import KeyBias
from sprl.cache.kv_cache import KVCache
from sprl.cache.layout import cache_layout
from sprl.config import Cache, Loss, Mesh, Optimizer, Quant
from sprl.learner.batch import Shape
from sprl.learner.copies import copies_of
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.model import HOST
from sprl.models import transformer
from sprl.models.config import Experts, ModelConfig, tiny
from sprl.planning import memory, programs
from sprl.planning.devices import device
from sprl.planning.estimate import kinds, on
from sprl.planning.memory import kv_bytes, rollout_memory, sampler_weight_bytes, size, update_memory
from sprl.planning.mesh_axes import MeshAxes
from sprl.sampler.weights import sampler_weights
from sprl.sharding.mesh import make_mesh

SHAPE = Shape(micros=8, rows=8, tokens=2048, sequences=64, columns=1536)


@pytest.mark.parametrize(
  ('name', 'parameters'),
  [
    ('Qwen2.5-0.5B', 494_032_768),  # as published on the hub
    ('Qwen2.5-1.5B', 1_543_714_304),
    ('Qwen2.5-7B', PARAMETERS),
    ('Qwen3-8B', 8_190_735_360),
  ],
)
def test_benchmark_models_have_the_published_size(name, parameters):
  assert size(transformer.abstract_params(ModelConfig.read(MODELS / name))) == parameters


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['adamw', 'adafactor'])
def test_planned_state_equals_the_bytes_of_real_arrays(name):
  config, run = tiny('llama'), dataclasses.replace(RUN, optimizer=Optimizer(name=name))
  params = transformer.init_params(config, jax.random.key(0))
  state = jax.eval_shape(lambda params: TrainState.create(params, make_optimizer(run.optimizer, 1)), params)
  held = update_memory(config, run, SHAPE, MeshAxes())
  assert held.parameters == sum(w.nbytes for w in jax.tree.leaves(params))
  assert held.optimiser == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state))
  assert (held.host, held.reference) == (0, 0)


def test_state_and_gradients_of_a_7b_in_bytes():
  held = update_memory(QWEN, RUN, SHAPE, MeshAxes())
  assert held.parameters == 30_462_466_048
  assert held.optimiser == 60_924_932_104  # two moments, and two counts of updates
  assert held.gradients == 30_462_466_048 + 2_179_989_504  # and the gradients of the head, of the current microbatch


def test_fsdp_and_tensor_split_the_state_and_data_does_not():
  whole = update_memory(FEW, RUN, SHAPE, MeshAxes())
  for axes in (MeshAxes(fsdp=8), MeshAxes(data=4, fsdp=2, tensor=4), MeshAxes(fsdp=2, tensor=4)):
    part = update_memory(FEW, RUN, SHAPE, axes)
    for name in ('parameters', 'optimiser', 'gradients'):
      assert getattr(part, name) == pytest.approx(getattr(whole, name) / 8, rel=1e-3)  # norms and biases may be whole


def test_a_kl_term_keeps_a_reference_in_the_compute_dtype():
  run = dataclasses.replace(RUN, loss=Loss(kl_coef=1e-3))
  assert update_memory(FEW, run, SHAPE, MeshAxes(tensor=4)).reference == pytest.approx(
    2 * size(transformer.abstract_params(FEW)) / 4, rel=1e-3
  )


@pytest.mark.parametrize(('arithmetic', 'number'), [('emulate', 2), ('blockwise', 1)])
def test_fp8_copies_of_the_learner_are_counted(arithmetic, number):
  run = dataclasses.replace(RUN, quant=Quant(learner='w8a8', arithmetic=arithmetic, skip_names=('down',)))
  linears = 4 * (LAYER - E * F)
  scales = 4 * linears / 128**2 if arithmetic == 'blockwise' else 0
  for axes in (MeshAxes(), MeshAxes(fsdp=8)):
    copied, plain = (update_memory(FEW, each, dataclasses.replace(SHAPE, micros=1), axes) for each in (run, RUN))
    assert plain.copies == 0  # of the only microbatch
    assert copied.copies == pytest.approx(number * linears / axes.fsdp + scales, rel=1e-3)  # every device has all scales
    assert copied.total - plain.total == copied.copies


def test_several_microbatches_share_a_copy_of_the_matrices_in_two_bytes():
  matrices = 4 * LAYER + V * E  # and the head; of the embedding only some rows are read
  for axes in (MeshAxes(), MeshAxes(fsdp=8)):
    assert update_memory(FEW, RUN, SHAPE, axes).copies == 2 * matrices // axes.fsdp


def test_planned_copies_equal_the_bytes_of_real_ones():
  config = tiny('qwen3_moe', hidden_size=128)
  for arithmetic in ('emulate', 'blockwise'):
    run = dataclasses.replace(RUN, quant=Quant(learner='w8a8', arithmetic=arithmetic))
    copies = jax.eval_shape(
      partial(copies_of, quant=run.quant.in_learner, dtype=jnp.bfloat16, cast=True), transformer.abstract_params(config)
    )
    expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(copies))
    assert update_memory(config, run, SHAPE, MeshAxes()).copies == expected


@pytest.mark.parametrize(('dtype', 'moments'), [('float32', 8), ('bfloat16', 4)])
def test_offloaded_moments_are_counted_as_host_memory(dtype, moments):
  kept, offloaded = (
    update_memory(
      FEW, dataclasses.replace(RUN, optimizer=Optimizer(moment_dtype=dtype, offload=offload)), SHAPE, MeshAxes(fsdp=8)
    )
    for offload in (False, True)
  )
  assert kept.host == 0
  assert offloaded.host == pytest.approx(moments * size(transformer.abstract_params(FEW)) / 8, rel=1e-3)
  assert offloaded.optimiser == 8  # two counts of updates
  assert kept.total - offloaded.total == offloaded.host


def test_offloaded_moments_of_the_update_program_lie_on_the_host():
  config, mesh = tiny('qwen2'), make_mesh(Mesh(), jax.devices()[:1])
  for offload in (False, True):
    run = dataclasses.replace(RUN, optimizer=Optimizer(offload=offload))
    state = programs.train_state(config, run, mesh)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {x.sharding.memory_kind == HOST for x in moments} == {offload}


def test_a_mixture_with_dense_layers_counts_each_layer_by_its_own_width():
  """Every other layer is dense; the others have a shared expert of width 32."""
  mixed = Experts(count=8, per_token=2, width=64, normalised=True, layers=(1, 3), shared_width=32)
  config = dataclasses.replace(tiny('qwen2_moe'), num_layers=4, hidden_size=128, intermediate_size=512, experts=mixed)
  assert memory.mlp_widths(config, 2) == [256, 16, 256, 16]
  held = {
    remat: update_memory(config, dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, remat=remat)), SHAPE, MeshAxes())
    for remat in ('dots', 'none')
  }
  # Without rematerialisation a layer saves three more arrays than with `dots`: as wide as the model (128), as the query heads
  # (4 of width 16), and as its MLP. 4 * (128 + 64) + (512 + 32 + 512 + 32) = 1,856 numbers per token. The device has 8 rows of
  # 2,048 tokens, and a number takes two bytes: 1,856 * 16,384 * 2 = 60,817,408 bytes. XLA needs 5% more for gaps: 63,858,278.
  assert held['none'].activations - held['dots'].activations == pytest.approx(63_858_278, abs=2)


def test_the_record_of_filters_is_counted():
  """With top_k = 50 it has 200 bytes a token: of all tokens of a batch, and of 17 tokens of a row of the sampler.

  The sampler also sorts the 152,064 logits of a row with their ids.
  """
  filtered = dataclasses.replace(RUN, sampling=dataclasses.replace(RUN.sampling, top_k=50))
  assert filtered.sampling.chunk == 16
  rows = [rollout_memory(FEW, run, run.cache, run.quant, 4, MeshAxes()).row for run in (RUN, filtered)]
  assert rows[1] - rows[0] == 17 * 200 + 2 * 4 * 152_064
  # The mask of a chunk's 2,048 positions: 152,064 bytes each, where the head is the peak.
  updates = [update_memory(FEW, run, SHAPE, MeshAxes(data=8)).activations for run in (RUN, filtered)]
  assert 0 <= updates[1] - updates[0] - 8 * 2048 * 200 <= memory.MARGIN * 2048 * 152_064 + 1


# --- rollouts --------------------------------------------------------------------------------------------------------


def test_bytes_of_a_sequence_in_the_cache():
  kv = {name: kv_bytes(memory.rollout_cache(QWEN, RUN, cache, quant)) for name, (cache, quant) in kinds(RUN, QWEN).items()}
  # Keys and values, in FP8 16 second codes of a key; counters: three of a row, one of each kv head and one of each query head; in
  # a layer that evicts, positions and the last 8 queries.
  numbers = 4 * (3 + K + H)
  assert kv['dense'] == 2 * 2 * 28 * K * D * 2048 + numbers
  assert kv['dense fp8'] == 28 * K * (2 * D + 16) * 2048 + numbers
  slots = 512 + 128
  beside = 28 * (4 * K * slots + 2 * H * 8 * D) + numbers
  assert kv['sparse'] == 2 * 2 * 28 * K * D * slots + beside
  assert kv['sparse fp8'] == 28 * K * (2 * D + 16) * slots + beside


def test_bytes_of_a_sequence_equal_those_of_a_real_cache():
  config, cache = tiny('qwen2'), Cache(budget=16, interval=4, method='h2o')
  layout = cache_layout(config, cache, Quant(sampler='kv8'), 8, 24, jnp.float32)
  assert 3 * kv_bytes(layout) == sum(x.nbytes for x in jax.tree.leaves(KVCache.empty(layout, 3)))


def test_prompts_longer_than_the_budget_are_planned_with_the_slots_of_rows_and_one_whole_layer():
  prefill = {n: memory.rollout_memory(QWEN, RUN, Cache(budget=n), Quant(), 4, MeshAxes()).prefill for n in (512, 256)}
  slot = 28 * (2 * 2 * K * D + 4 * K)  # keys, values and a position
  whole_layer = 2 * 2 * K * D * 512 + 4 * (3 + K + H)  # of a prompt of 512 tokens, with the counters of a row
  assert prefill[512] - prefill[256] == 4 * ((512 - (256 + 128)) * slot - whole_layer)


def test_prompts_under_h2o_are_planned_with_the_scores_of_the_reference():
  """H2O sums the attention that each key of a prompt receives, which no kernel does."""

  def prefill(method, kernels):
    run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, kernels=kernels))
    return rollout_memory(QWEN, run, Cache(budget=512, method=method), Quant(), 4, MeshAxes()).prefill

  assert prefill('h2o', 'mosaic_gpu') == prefill('h2o', 'reference')
  assert prefill('rkv', 'mosaic_gpu') < prefill('rkv', 'reference')


def test_kept_caches_of_conversations_are_counted():
  """A kept cache takes as much as a row's, plus the engine's rounding to whole parts of the rows."""
  talking = dataclasses.replace(RUN, task=dataclasses.replace(RUN.task, kind='environment', name='frozen_lake'))
  few = dataclasses.replace(talking, sampling=dataclasses.replace(talking.sampling, kept_caches=10))
  found = [rollout_memory(QWEN, run, Cache(budget=512), Quant(), 4, MeshAxes(data=4)) for run in (RUN, talking, few)]
  kv = kv_bytes(memory.rollout_cache(QWEN, RUN, Cache(budget=512), Quant()))
  assert [m.row - found[0].row for m in found] == [0, kv, 0]
  assert [m.kept for m in found] == [0, 0, 3 * kv]  # 10 on four devices
  assert found[2].total(8) == found[2].weights + found[2].prefill + 3 * kv + 8 * found[2].row


@pytest.mark.parametrize('arithmetic', ['emulate', 'blockwise'])
def test_bytes_of_sampler_weights_equal_those_of_real_ones(arithmetic):
  config = tiny('qwen2', hidden_size=128, intermediate_size=256, num_hidden_layers=2)
  params = transformer.init_params(config, jax.random.key(0))
  for sampler in ('none', 'w8a8'):
    quant = Quant(sampler=sampler, arithmetic=arithmetic)
    weights = jax.eval_shape(lambda params, quant=quant: sampler_weights(params, jnp.bfloat16, quant), params)
    expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((weights.params, weights.probe)))
    assert sampler_weight_bytes(config, RUN, quant, MeshAxes()) == expected


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
def test_the_planned_device_decides_the_form_of_fp8_weights(name, kernels, tensor, codes):
  """FP8 linears are codes if a kernel multiplies them, else bfloat16 numbers. The probe adds the codes of one layer."""
  run = on(device(name), dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, kernels=kernels)))
  config = shallow(QWEN, 2)
  plain, fp8 = (
    sampler_weight_bytes(config, run, Quant(sampler=sampler), MeshAxes(tensor=tensor)) for sampler in ('none', 'w8a8')
  )
  # Of 28 query heads a device has at least 4; over tensor = 8, two devices share each kv head.
  probe = {1: LAYER, 8: 3 * E * F // 8 + 2 * E * 4 * D + 2 * E * K * D}[tensor]
  assert fp8 - plain == pytest.approx(probe - (2 * LAYER // tensor if codes else 0), rel=1e-2)


def test_the_probe_of_fp8_codes_is_split_as_its_weights():
  config = shallow(MIXTURE, 2)
  attention, experts = 2048 * 128 * (2 * 32 + 2 * 4), 128 * 3 * 768 * 2048
  for axes, expected in ((MeshAxes(), attention + experts), (MeshAxes(data=2, expert=4), attention + experts // 4)):
    weights = programs.abstract_sampler_weights(config, RUN, Quant(sampler='w8a8'), axes.mesh(config))
    assert memory.nbytes(memory.local(weights.probe)) == expected


def test_float32_sampler_weights_are_a_second_copy_of_the_master_weights():
  run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, dtype='float32'))
  assert sampler_weight_bytes(QWEN, run, Quant(), MeshAxes()) == 30_462_466_048


def test_copies_of_kept_caches_take_the_place_of_prefilled_prompts():
  """A later turn is read behind a copy of a whole sequence, not of a prompt."""
  talking = dataclasses.replace(RUN, task=dataclasses.replace(RUN.task, kind='environment', name='frozen_lake'))
  found = [rollout_memory(QWEN, run, Cache(), Quant(), 4, MeshAxes()).prefill for run in (RUN, talking)]
  assert found[1] - found[0] == 4 * 2 * 2 * 28 * K * D * 1536  # keys and values of four completions, in two bytes


def test_what_an_fp8_cache_derives_from_key_biases_is_counted_once():
  layout = cache_layout(QWEN, Cache(), Quant(sampler='kv8'), 512, 1536, jnp.bfloat16)
  derived = jax.eval_shape(lambda: KeyBias.of(layout, (jnp.zeros(K * D),) * 28))
  found = rollout_memory(QWEN, RUN, Cache(), Quant(sampler='kv8'), 4, MeshAxes()).weights
  weights = sampler_weight_bytes(QWEN, RUN, Quant(sampler='kv8'), MeshAxes())
  assert found - weights == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(derived)) == 28 * 4 * K * (D + 16)


def test_the_record_of_filters_is_that_of_all_minibatches_of_a_step():
  sampling = dataclasses.replace(RUN.sampling, top_k=20)  # 20 ids of four bytes for each token

  def activations(minibatches, sampling):
    run = dataclasses.replace(RUN, sampling=sampling, optimizer=Optimizer(minibatches=minibatches))
    return update_memory(QWEN, run, SHAPE, MeshAxes()).activations

  record = {n: activations(n, sampling) - activations(n, RUN.sampling) for n in (1, 2, 4)}
  assert record[2] - record[1] == 8 * 8 * 2048 * 20 * 4
  assert record[4] - record[1] == 3 * (record[2] - record[1])


@pytest.mark.parametrize('replay', ['none', 'R2', 'R3'])
def test_the_experts_to_replay_are_counted(replay):
  """A token has eight experts in each of two layers, a byte each. Rollouts record them for R3: of a row, and of a prompt."""
  config = shallow(MIXTURE, 2)
  run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, router_replay=replay))
  updates = [update_memory(config, each, SHAPE, MeshAxes(data=2)).activations for each in (RUN, run)]
  assert updates[1] - updates[0] == (0 if replay == 'none' else 8 * 4 * 2048 * 2 * 8)
  before, after = (rollout_memory(config, each, Cache(), Quant(), 4, MeshAxes()) for each in (RUN, run))
  routes = 2048 * 2 * 8 if replay == 'R3' else 0
  assert (after.row - before.row, after.prefill - before.prefill) == (routes, 4 * routes)


def test_the_evictions_that_the_learner_masks_are_counted():
  """A token has an int32 for each kv head of each layer, of which a device holds half over tensor = 2."""
  config, axes = shallow(QWEN, 2), MeshAxes(tensor=2)
  masked, dense = dataclasses.replace(RUN, arm='learner_mask'), dataclasses.replace(RUN, arm='learner_mask', cache=Cache())
  found = [update_memory(config, run, SHAPE, axes).activations for run in (masked, dense)]
  assert found[0] - found[1] == 8 * 8 * 2048 * 2 * K // 2 * 4


def test_rollouts_that_continue_keep_their_caches():
  """All 64 sequences are on the devices during an update, if they are there when it begins."""
  ahead = dataclasses.replace(RUN.rollout, async_ratio=1.0, sync='keep')
  keeps = dataclasses.replace(RUN, rollout=ahead)
  row = rollout_memory(QWEN, RUN, RUN.cache, RUN.quant, RUN.prefill, MeshAxes(data=4)).row
  assert memory.caches_kept(QWEN, keeps, MeshAxes(data=4)) == 16 * row
  for changes in ({'sync': 'recompute'}, {'async_ratio': 0.0}):
    run = dataclasses.replace(RUN, rollout=dataclasses.replace(ahead, **changes))
    assert memory.caches_kept(QWEN, run, MeshAxes(data=4)) == 0
