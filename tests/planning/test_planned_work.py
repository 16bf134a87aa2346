"""Planned operations and bytes, and the least time, by hand for Qwen2.5-7B with four layers and for Qwen3-30B-A3B."""

import dataclasses

import jax.numpy as jnp
import pytest
from plans import FEW, LAYER, MIXTURE, QWEN, RUN, D, E, F, H, K, V, shallow

from sprl.cache.layout import cache_layout
from sprl.config import Cache, Quant
from sprl.learner.batch import Shape
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.planning import work
from sprl.planning.devices import DEVICES, device
from sprl.planning.estimate import on
from sprl.planning.memory import RolloutMemory, rollout_cache, rollout_memory, size, update_memory
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.work import Part, Work, decode_work, longest, update_work

H200, L = DEVICES['h200'], 4
PARAMETERS = L * LAYER + 2 * V * E  # of four layers, without norms and biases


def updated(run, shape, axes, config=FEW):
  return update_work(config, run, shape, longest(config, run, shape), update_memory(config, run, shape, axes), axes, H200)


def sent(done):
  return {(part.name, part.axis): part.sent for part in done.parts if part.sent}


def test_heads_are_split_if_they_divide():
  assert [MeshAxes(tensor=n).heads(QWEN) for n in (1, 2, 4, 8, 28)] == [(28, 4), (14, 2), (7, 1), (7, 1), (1, 1)]


def test_mean_number_of_attended_slots():
  config, prompt, completion = tiny('llama'), 4, 10
  dense = cache_layout(config, Cache(), Quant(), prompt, completion, jnp.float32)
  assert work.attended(dense) == sum(range(5, 15)) / 10
  sparse = cache_layout(config, Cache(budget=6, interval=3, window=2), Quant(), prompt, completion, jnp.float32)
  # Steps 3, 6 and 9 compress 7, 9 and 9 slots to 6.
  assert work.attended(sparse) == (5 + 6 + 6 + 7 + 8 + 6 + 7 + 8 + 6 + 7) / 10
  longer = cache_layout(config, Cache(budget=6, interval=3, window=2), Quant(), 40, completion, jnp.float32)
  # The prompt is compressed to 6 when it is read, then steps 3, 6 and 9 compress 9 slots.
  assert work.attended(longer) == (7 + 8 + 6 + 7 + 8 + 6 + 7 + 8 + 6 + 7) / 10


def test_a_decode_step_by_hand():
  dense = rollout_cache(FEW, RUN, Cache(), Quant())
  held = RolloutMemory(weights=2 * PARAMETERS, experts=0, probe=0, prefill=0, kept=0, row=0)
  linears, attention, head, *_ = decode_work(FEW, RUN, dense, held, 64, MeshAxes(), H200).parts
  assert linears.flops == 2 * L * LAYER * 64
  assert linears.bytes == 2 * L * LAYER
  slots = round(512 + 1537 / 2)
  assert attention.flops == 64 * L * 4 * H * slots * D
  assert attention.bytes == pytest.approx(64 * L * 2 * 2 * K * slots * D, rel=0.01)
  assert head.flops == 64 * 2 * V * E
  assert head.bytes == 2 * V * E + 64 * 3 * 4 * V


def test_a_decode_step_gathers_layers_over_fsdp_but_neither_the_embeddings_nor_the_head():
  dense = rollout_cache(FEW, RUN, Cache(), Quant())
  held = RolloutMemory(weights=2 * PARAMETERS // 4, experts=0, probe=0, prefill=0, kept=0, row=0)
  done = decode_work(FEW, RUN, dense, held, 64, MeshAxes(fsdp=4), H200)
  linears, _, head, *_ = done.parts
  assert linears.flops == 2 * L * LAYER * 64
  assert linears.bytes == 2 * L * LAYER
  assert head.flops == 4 * 64 * 2 * (V // 4) * E  # of the rows of all four devices, with a quarter of the vocabulary
  assert head.bytes == 2 * (V // 4) * E + 64 * 3 * 4 * V
  assert sent(done) == {('all-gather', 'fsdp'): 2 * L * LAYER * 3 // 4}


def test_a_decode_step_reads_only_the_experts_that_its_tokens_choose():
  """A token chooses 8 of 128 experts. Over expert = 8, the tokens of eight devices meet at the 16 experts of each."""
  config, dense = shallow(MIXTURE, 2), rollout_cache(shallow(MIXTURE, 2), RUN, Cache(), Quant())
  for axes in (MeshAxes(), MeshAxes(expert=8)):
    held = rollout_memory(config, RUN, Cache(), Quant(), 16, axes)
    read = [decode_work(config, RUN, dense, held, rows, axes, H200).parts[0].bytes for rows in (1, 2, 4096)]
    experts = 2 * 2 * 128 * 3 * 768 * 2048 // axes.expert
    assert held.experts == experts
    shares = [1 - (15 / 16) ** (rows * axes.expert) for rows in (1, 2)]
    assert [read[2] - each for each in read[:2]] == pytest.approx([experts * (1 - share) for share in shares])


def test_an_update_by_hand():
  done = updated(RUN, Shape(micros=8, rows=8, tokens=2048, sequences=64, columns=1536), MeshAxes(fsdp=8))
  linears, attention, head, step, *_ = done.parts
  assert done.tokens == 8 * 8 * 2048
  assert linears.flops == 4 * 2 * L * LAYER * 8 * 2048  # forward, recomputation, and backward to inputs and weights
  assert attention.flops == 8 * L * 2048**2 * H * D * (4 + 4 + 10)
  assert head.flops == 64 * 1536 / 8 * V * E * 8
  width = L * (4 * E + 2 * H * D + 2 * K * D + 3 * F)  # of inputs and outputs of products
  met = L * (3 * LAYER - E * F)  # forward, recomputation up to the last product, backward; never the vocabulary
  assert linears.bytes == pytest.approx(8 * 2 * met + 4 * 8 * 2048 * 2 * width, rel=1e-3)  # weights in bfloat16
  assert attention.bytes == 4 * L * 8 * 2048 * 2 * 2 * (H + K) * D
  state = 12 * PARAMETERS / 8
  assert step.bytes == pytest.approx(8 * 2 * state / 3 + 2 * state, rel=1e-3)  # sums read and written 8 times, state once
  assert sent(done) == {
    ('all-gather', 'fsdp'): pytest.approx(8 * 2 * met * 7 / 8, rel=1e-3),
    ('reduce-scatter', 'fsdp'): pytest.approx(8 * 4 * L * LAYER * 7 / 8, rel=1e-3),
  }


@pytest.mark.parametrize(('tokens', 'answers'), [(2048, 1), (512 + 2 * 1536, 2)])
def test_the_kernel_of_attention_multiplies_only_the_keys_that_tokens_see(tokens, answers):
  """A row has a prompt of 512 tokens and one or two answers of 1,536 tokens, each of which sees the prompt and itself.

  The kernels multiply 2 times forward, 2 in the recomputation and 7 backward; the reference 2, 2 and 5, with all keys of the row.
  """
  rows = 64 // answers
  shape = Shape(rows, 1, tokens, 64, 1536)
  masked = dataclasses.replace(on(H200, RUN), arm='learner_mask')  # kv heads have their own masks
  reference, kernel, masked = (updated(run, shape, MeshAxes()).parts[1].flops for run in (RUN, on(H200, RUN), masked))
  pairs = 512**2 // 2 + answers * (512 * 1536 + 1536**2 // 2)
  assert kernel == rows * L * 2 * H * D * pairs * 11
  assert reference == masked == rows * L * 2 * H * D * tokens**2 * 9


def test_the_kernel_of_attention_does_not_multiply_padding():
  full, padded = (updated(on(H200, RUN), Shape(64, 1, tokens, 64, 1536), MeshAxes()).parts for tokens in (2048, 3072))
  assert padded[1].flops == full[1].flops
  assert padded[0].flops == 1.5 * full[0].flops


def test_forward_passes_of_an_fp8_learner_read_one_byte_for_each_weight():
  shape = Shape(micros=8, rows=1, tokens=2048, sequences=64, columns=1536)
  fp8 = dataclasses.replace(RUN, quant=Quant(learner='w8a8'))
  codes, plain = (updated(on(H200, run), shape, MeshAxes()).parts[0].bytes for run in (fp8, RUN))
  assert plain - codes == pytest.approx(8 * L * (2 * LAYER - E * F), rel=1e-3)  # forward and recomputation


def test_experts_by_hand():
  """Qwen3-30B-A3B with two layers on fsdp 2 x expert 8: a device has 16 of 128 experts, and their tokens come from 8 devices."""
  config, axes, gate = shallow(MIXTURE, 2), MeshAxes(fsdp=2, expert=8), 768 * 2048
  shape = Shape(micros=4, rows=16, tokens=2048, sequences=64, columns=1536)
  experts, whole = 2 * 128 * 3 * gate, size(transformer.abstract_params(config))
  assert update_memory(config, RUN, shape, axes).parameters == pytest.approx(4 * (experts / 16 + (whole - experts) / 2), rel=1e-3)
  done = updated(RUN, shape, axes, config)
  attention = 2048 * 128 * (2 * 32 + 2 * 4)
  assert done.parts[0].flops == 4 * 4 * 2 * 2048 * 2 * (attention + 8 * 3 * gate + 2048 * 128)  # eight experts a token
  found = sent(done)
  token = 2 * 2048 * 2 * 2048  # hidden states of a row, in bfloat16, for the experts of two layers
  assert found['all-gather', 'expert'] == 4 * 3 * token * 7
  assert found['reduce-scatter', 'expert'] == 4 * 2 * token * 7
  layers, vocabulary = 2 * (attention + 2048 * 128), 2 * MIXTURE.vocab_size * 2048  # every microbatch, and once
  assert found['all-reduce', 'expert'] == pytest.approx(2 * 4 * (4 * layers + vocabulary) / 2 * 7 / 8, rel=1e-3)
  assert found['all-gather', 'fsdp'] < 0.1 * sent(updated(RUN, shape, MeshAxes(fsdp=16), config))['all-gather', 'fsdp']


def test_scoring_adds_a_forward_pass():
  shape = Shape(micros=8, rows=1, tokens=2048, sequences=64, columns=1536)
  scored = dataclasses.replace(RUN, correction=dataclasses.replace(RUN.correction, veto=1e-4))
  plain, more = (updated(run, shape, MeshAxes()).parts for run in (RUN, scored))
  assert more[0].flops / plain[0].flops == 5 / 4
  assert more[1].flops / plain[1].flops == 22 / 18


def test_fp8_forward_passes_take_half_the_time_where_a_kernel_multiplies_codes():
  shape = Shape(micros=8, rows=1, tokens=2048, sequences=64, columns=1536)
  fp8 = dataclasses.replace(RUN, quant=Quant(learner='w8a8'))
  for name, arithmetic, expected in (('h200', 'auto', True), ('h200', 'emulate', False), ('a100', 'blockwise', False)):
    run = dataclasses.replace(fp8, quant=dataclasses.replace(fp8.quant, arithmetic=arithmetic))
    linears, plain = (updated(on(device(name), each), shape, MeshAxes()).parts[0] for each in (run, RUN))
    assert linears.flops == plain.flops
    assert plain.fp8 == 0
    # An update is a forward pass, two gradients and the recomputed forward pass.
    assert linears.fp8 == (linears.flops / 2 if expected else 0)


def test_the_least_time_is_that_of_the_parts_or_of_what_is_sent_meanwhile():
  parts = (Part('a', 989 * 10**12, 1), Part('b', 1, 96 * 10**11), Part('all-reduce', sent=450 * 10**9, axis='tensor'))

  def seconds(tensor, dtype):
    return Work.of(parts, 1, H200, MeshAxes(tensor=tensor), dtype).seconds

  assert seconds(8, jnp.bfloat16) == pytest.approx(1 + 2)  # sending takes 1 s
  assert seconds(16, jnp.bfloat16) == pytest.approx(9)  # beyond a node
  assert seconds(8, jnp.float32) == pytest.approx(989 / 494 + 2)
  half = Part('a', 989 * 10**12, 1, fp8=989 * 10**12 // 2)
  assert Work.of((half,), 1, H200, MeshAxes(), jnp.bfloat16).seconds == pytest.approx(0.75)


def test_a_decode_step_multiplies_fp8_codes_at_their_rate_and_does_not_read_the_probe():
  dense = rollout_cache(FEW, RUN, Cache(), Quant())
  for name, sampler, expected in (('h200', 'w8a8', True), ('h200', 'kv8', False), ('a100', 'w8a8', False)):
    quant = Quant(sampler=sampler)
    run = dataclasses.replace(on(device(name), RUN), quant=quant)
    held = rollout_memory(FEW, run, Cache(), quant, 16, MeshAxes())
    linears = decode_work(FEW, run, dense, held, 64, MeshAxes(), H200).parts[0]
    assert linears.fp8 == (linears.flops if expected else 0)
    assert linears.bytes == pytest.approx(L * LAYER * (1 if expected else 2), rel=0.01)  # else the numbers that codes stand for
    assert held.probe == pytest.approx(LAYER if 'w8a8' in sampler else 0, rel=0.01)


def test_an_axis_uses_the_network_if_it_spans_more_than_a_node():
  axes = MeshAxes(data=2, fsdp=4, tensor=2)
  assert [work.link_speed(H200, axes, name) == H200.link for name in ('data', 'fsdp', 'tensor')] == [False, True, True]


def test_measured_ceilings_replace_stated_ones():
  measured = device('h100', bandwidth=3e12, link=None)
  assert (measured.bandwidth, measured.link) == (3e12, DEVICES['h100'].link)
  assert 'given: bandwidth' in measured.source
