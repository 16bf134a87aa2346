"""The plan beside XLA's compilers, for an H200 and for TPUs that are not here.

Skipped, with the reason, where sprl/planning/aot.py finds that a compiler is not installed: make aot, make tpu.
"""

import dataclasses
import math
from collections import Counter
from pathlib import Path

import jax
import pytest
from sprl.planning.layout import Axes, shards, size

from sprl.config import Cache, ModelSettings, Optimizer, Packing, Rollout, Run, Sampling, SettingsError
from sprl.models import transformer
from sprl.models.config import ModelConfig, tiny
from sprl.planning import aot, compile_check
from sprl.planning.devices import device
from sprl.planning.estimate import plan
from sprl.planning.memory import FLOAT32

MODELS = Path(__file__).parents[2] / 'benchmarks' / 'models'
QWEN = ModelConfig.read(MODELS / 'Qwen2.5-0.5B')
RUN = Run(
  model=ModelSettings(path='Qwen2.5-0.5B'),
  sampling=Sampling(max_prompt=512, max_tokens=1536, rows=64),
  rollout=Rollout(prompts=16, group=4),
  packing=Packing(row_tokens=4096, rows=1),
  cache=Cache(budget=512),
)
SMALL = dataclasses.replace(
  RUN,
  sampling=Sampling(max_prompt=32, max_tokens=96),
  packing=Packing(row_tokens=128, rows=1),
  cache=Cache(budget=32, interval=16),
)
LAYERS, SPLIT = 2, Axes(fsdp=2, expert=4)
MIXTURE = dataclasses.replace(ModelConfig.read(MODELS / 'Qwen3-30B-A3B'), num_layers=LAYERS)
h200, tpu = (pytest.mark.skipif(why is not None, reason=str(why)) for why in (aot.missing(), aot.missing_tpu()))


def planned(config, run, axes, name='h200'):
  return plan(config, run, axes, axes.gathered(), device(name))


@h200
def test_the_memory_of_an_update_is_planned_within_a_tenth():
  config = dataclasses.replace(QWEN, num_layers=2)
  check = compile_check.check_update(config, RUN, planned(config, RUN, Axes()))
  assert check.planned == pytest.approx(check.compiled.total, rel=0.1)
  assert check.compiled.collectives == ()


@h200
@pytest.mark.parametrize('kind', [0, 3], ids=['dense', 'sparse fp8'])
def test_the_memory_of_decode_steps_is_planned_within_a_tenth(kind):
  config = dataclasses.replace(QWEN, num_layers=2)
  made = planned(config, RUN, Axes())
  check = compile_check.check_decode(config, RUN, made, made.kinds[kind])
  assert check.planned == pytest.approx(check.compiled.total, rel=0.1)


@h200
def test_the_memory_of_an_update_on_eight_is_planned_within_a_tenth():
  """Of all 24 layers, whose gradients XLA's scheduler would let wait for each other: without `rules.in_turn` twice of what is
  planned."""
  check = compile_check.check_update(QWEN, RUN, planned(QWEN, RUN, Axes(fsdp=4, tensor=2)))
  assert check.planned == pytest.approx(check.compiled.total, rel=0.1)
  assert {each.kind for each in check.compiled.collectives} >= {'all-gather', 'reduce-scatter', 'all-reduce'}


@h200
@pytest.mark.parametrize('axes', [Axes(fsdp=4, tensor=2), Axes(data=2, fsdp=4)], ids=str)
def test_an_update_sends_what_is_planned(axes):
  """A microbatch's collectives in the layers: gathered weights, scattered and summed gradients, summed outputs. (Of two layers
  XLA sums the first's gradients after the loop, which the plan counts within it, as all others'.)"""
  config, LAYERS = dataclasses.replace(QWEN, num_layers=4), 4
  made = planned(config, RUN, axes)
  found = Counter()
  for each in compile_check.check_update(config, RUN, made).compiled.collectives:
    if 'layer' in each.name and each.depth == 1:
      found[each.kind, each.devices] += each.moved
  sent = {(each.kind, each.axis): each.bytes / made.shape.micros for each in made.work.collectives}
  assert found['all-gather', 4] == pytest.approx(sent['all-gather', 'fsdp'], rel=0.02)
  assert found['reduce-scatter', 4] == pytest.approx(sent['reduce-scatter', 'fsdp'], rel=0.02)
  if axes.tensor > 1:
    assert found['all-reduce', 2] == pytest.approx(sent['all-reduce', 'tensor'], rel=0.02)
  else:
    layers = FLOAT32 * size(transformer.layers(shards(config, axes, 'float32')))
    assert found['all-reduce', 2] == pytest.approx(layers * (LAYERS - 1) / LAYERS, rel=0.02)


# --- a mixture of experts, on fsdp 2 x expert 4 -----------------------------------------------------------------------


def among_experts(check):
  """(kind, bytes) of what the four devices that share the experts out send each other in loops, and how often."""
  return Counter((each.kind, each.bytes) for each in check.compiled.collectives if each.devices == 4 and each.depth)


@h200
def test_an_update_of_a_mixture_is_planned_within_a_tenth_and_sends_tokens_to_experts():
  check = compile_check.check_update(MIXTURE, RUN, planned(MIXTURE, RUN, SPLIT))
  assert check.planned == pytest.approx(check.compiled.total, rel=0.1)
  tokens = 4 * 4096
  hidden, gates = 2 * tokens * MIXTURE.hidden_size, 4 * tokens * MIXTURE.experts.chosen
  gathered = {('all-gather', hidden): 3 * LAYERS, ('all-gather', 2 * gates): 2 * LAYERS}  # gates with the experts' numbers
  scattered = {('reduce-scatter', hidden): 2 * LAYERS, ('reduce-scatter', gates): LAYERS}
  sent = among_experts(check)
  summed = {key: times for key, times in sent.items() if key[0] == 'all-reduce'}
  layer = jax.tree.leaves(transformer.layers(transformer.abstract_params(MIXTURE))[1])
  shared = sum(math.prod(w.shape) for w in layer if w.ndim == 2)  # the layer's matrices, but for its experts'
  assert sum(size * times for (_, size), times in summed.items()) == 4 * shared // 2  # their gradients, which fsdp splits
  assert sent == gathered | scattered | summed  # and no expert's weights


@h200
@pytest.mark.slow
def test_an_update_of_experts_on_eight_holds_the_blocks_of_one_layer_at_a_time():
  config = dataclasses.replace(MIXTURE, num_layers=6)
  check = compile_check.check_update(config, RUN, planned(config, RUN, Axes(expert=8)))
  assert check.planned == pytest.approx(check.compiled.total, rel=0.1)


@h200
@pytest.mark.parametrize('kind', [0, 3], ids=['dense', 'sparse fp8'])
def test_decode_steps_of_a_mixture_are_planned_within_a_tenth_and_send_tokens_to_experts(kind):
  made = planned(MIXTURE, RUN, SPLIT)
  check = compile_check.check_decode(MIXTURE, RUN, made, made.kinds[kind])
  assert check.planned == pytest.approx(check.compiled.total, rel=0.1)
  rows = 4 * made.kinds[kind].rows
  hidden, chosen = 2 * MIXTURE.hidden_size, 8 * MIXTURE.experts.chosen
  sent = among_experts(check)
  assert sent == {('all-gather', rows * (hidden + chosen)): LAYERS, ('reduce-scatter', rows * hidden): LAYERS}


@tpu
def test_an_update_compiles_for_eight_tpus():
  config = tiny('qwen2')
  check = compile_check.check_update(config, SMALL, planned(config, SMALL, Axes(fsdp=4, tensor=2), 'v5e'))
  assert {each.kind for each in check.compiled.collectives} >= {'all-gather', 'all-reduce'}


@tpu
@pytest.mark.parametrize('kind', [0, 3], ids=['dense', 'sparse fp8'])
def test_decode_steps_compile_for_eight_tpus(kind):
  config = tiny('qwen2')
  made = planned(config, SMALL, Axes(data=4, tensor=2), 'v5e')
  check = compile_check.check_decode(config, SMALL, made, made.kinds[kind])
  assert check.compiled.total >= made.kinds[kind].rows * made.kinds[kind].kv_bytes // 2


@pytest.mark.parametrize(('name', 'count'), [('h100', 1), ('v5e', 3), ('h200', 12)])
def test_devices_that_cannot_be_compiled_for_are_refused(name, count, monkeypatch):
  monkeypatch.setattr(aot, 'missing', lambda: None)
  monkeypatch.setattr(aot, 'missing_tpu', lambda: None)
  with pytest.raises(SettingsError, match='--compile'):
    compile_check.devices(name, count)


def test_offloaded_moments_cannot_be_compiled_for_devices_that_are_not_here(monkeypatch):
  monkeypatch.setattr(compile_check, 'devices', lambda name, count: [])
  compile_check.check_compilable(RUN, 'h200', 1)
  run = dataclasses.replace(RUN, optimizer=Optimizer(offload=True))
  with pytest.raises(SettingsError, match=r'config\.optimizer\.offload = True: expected False with --compile'):
    compile_check.check_compilable(run, 'h200', 1)


def test_a_compiler_that_is_missing_is_told(monkeypatch):
  monkeypatch.setattr(aot, 'missing', lambda: 'there is no ptxas')
  with pytest.raises(SettingsError, match='--compile: there is no ptxas'):
    compile_check.devices('h200', 8)
