"""Weights as served: what is FP8 and what is not, and that a broken sync does not go unnoticed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.kernels import hopper_block_matmul as hopper
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.models.memory import CausalMemory
from sprl.models.moe import gates, mixture, probabilities
from sprl.parallel.mesh import make_mesh
from sprl.quant.block import FORMATS, BlockScaled, Emulated, quantise
from sprl.quant.dot import dot
from sprl.sampler.served import Served, check_linears, codes_changed, linear_kernels, quantised_linears, self_check, serve
from sprl.settings import LINEARS, Mesh, Quant, SettingsError

FLOAT32 = jnp.dtype('float32')
W8A8, BLOCKWISE = Quant(sampler='w8a8'), Quant(sampler='w8a8', arithmetic='blockwise')
BLOCKS = {'attention': 'qkvo', 'mlp': ('gate', 'up', 'down')}


@pytest.fixture(scope='module')
def params():
  return small.model('qwen2', num_hidden_layers=3)[1]


def formats(served):
  """The names of the quantised weights of each layer, and all other weights' paths."""
  found = [
    {
      name
      for block, names in BLOCKS.items()
      for name in names
      if isinstance(layer[block][name]['kernel'], BlockScaled | Emulated)
    }
    for layer in transformer.layers(served.params)
  ]
  leaves = jax.tree_util.tree_leaves_with_path(served.params, is_leaf=lambda w: isinstance(w, BlockScaled | Emulated))
  return found, [w for _, w in leaves if not isinstance(w, BlockScaled | Emulated)]


@pytest.mark.parametrize('quant', [W8A8, BLOCKWISE])
def test_the_linears_of_the_layers_are_fp8_and_nothing_else(params, quant):
  found, others = formats(serve(params, FLOAT32, quant))
  assert found == [{*'qkvo', 'gate', 'up', 'down'}] * 3
  assert all(w.dtype == FLOAT32 for w in others)  # embedding, head, norms, biases


@pytest.mark.parametrize('quant', [Quant(), W8A8])
def test_what_is_served_outlives_an_update_of_the_weights_in_place(params, quant):
  masters = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
  served = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(serve(params, FLOAT32, quant).params)}
  assert masters.isdisjoint(served)


def test_layers_and_names_can_be_spared(params):
  quant = Quant(sampler='w8a8_kv8', skip_first_layers=1, skip_last_layers=1, skip_names=('o', 'down'))
  found, _ = formats(serve(params, FLOAT32, quant))
  assert found == [set(), {'q', 'k', 'v', 'gate', 'up'}, set()]
  assert len(quantised_linears(params, quant)) == 5


@pytest.mark.parametrize(
  ('quant', 'words'),
  [
    (Quant(sampler='w8a8', skip_first_layers=40), ('skip_first_layers = 40', 'fewer than the 3 layers', "'bf16'")),
    (
      Quant(sampler='w8a8_kv8', skip_first_layers=1, skip_last_layers=2),
      ('skip_first_layers = 1', 'skip_last_layers = 2', "'kv8'"),
    ),
    (
      Quant(sampler='w8a8', skip_names=LINEARS),
      ('config.quant.skip_names', 'expected to leave one of q, k, v, o, gate, up, down'),
    ),
  ],
)
def test_fp8_linears_of_which_none_is_left_are_refused_by_name(quant, words):
  with pytest.raises(SettingsError) as error:
    check_linears(quant, 3)
  assert all(word in str(error.value) for word in words), error.value


def test_what_leaves_one_linear_or_asks_for_none_is_accepted():
  check_linears(Quant(sampler='w8a8', skip_first_layers=1, skip_last_layers=1, skip_names=LINEARS[1:]), 3)
  check_linears(Quant(sampler='kv8', skip_first_layers=40), 3)


@pytest.mark.parametrize(
  'quant', [Quant(sampler='w8a8', format=f, arithmetic=a) for f in FORMATS for a in ('emulate', 'blockwise')]
)
def test_widths_that_no_block_divides_are_served_all_the_same(quant):
  sizes = {'hidden_size': 40, 'intermediate_size': 50, 'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 20}
  _, params = small.model('qwen2', num_hidden_layers=1, **sizes)
  assert self_check(params, serve(params, FLOAT32, quant), FLOAT32, quant) == []


def test_only_w8a8_quantises_linears(params):
  for sampler in ('bf16', 'kv8'):
    assert formats(serve(params, FLOAT32, Quant(sampler=sampler)))[0] == [set()] * 3


def test_blockwise_and_emulated_weights_give_the_same_hidden_states(params):
  config, _ = small.model('qwen2', num_hidden_layers=3)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 259, (2, 9)))
  positions = jnp.broadcast_to(jnp.arange(9), (2, 9))

  def hidden(served):
    memory = CausalMemory.of(jnp.ones((2, 9), jnp.int32))
    return transformer.forward(transformer.graph(config), served.params, tokens, positions, memory)[0]

  blockwise, emulated, plain = (
    hidden(s) for s in (serve(params, FLOAT32, BLOCKWISE), serve(params, FLOAT32, W8A8), serve(params, FLOAT32))
  )
  assert np.linalg.norm(blockwise - plain) / np.linalg.norm(plain) > 0.01  # it is FP8
  # an activation that rounds to the other of two codes moves a product by an FP8 step, so not to the last digit
  assert np.linalg.norm(blockwise - emulated) / np.linalg.norm(plain) < 0.01


@pytest.mark.parametrize(('kernels', 'kind'), [('mosaic_gpu', BlockScaled), ('auto', Emulated)])
def test_codes_are_kept_where_a_kernel_multiplies_them(params, kernels, kind):
  w = serve(params, FLOAT32, Quant(sampler='w8a8'), kernels=kernels).params['layers'][0]['mlp']['down']['kernel']
  assert isinstance(w, kind)
  assert getattr(w, 'kernels', 'auto') == kernels


def test_a_forced_kernel_passes_the_self_check(monkeypatch):
  monkeypatch.setattr(hopper, 'block_matmul', partial(hopper.block_matmul, interpret=plgpu.InterpretGPUParams()))
  _, params = small.model('qwen2', num_hidden_layers=1)
  quant = Quant(sampler='w8a8', skip_names=('q', 'k', 'v', 'o', 'gate', 'up'))
  served = serve(params, jnp.dtype(jnp.bfloat16), quant, kernels='mosaic_gpu')
  assert self_check(params, served, jnp.dtype(jnp.bfloat16), quant) == []


def test_the_self_check_is_content_with_what_serve_makes(params):
  for quant in (W8A8, BLOCKWISE):
    assert self_check(params, serve(params, FLOAT32, quant), FLOAT32, quant) == []
  assert self_check(params, serve(params, FLOAT32), FLOAT32, Quant()) == []


def broken(served, name, change):
  """The weights with one leaf of the first layer changed."""
  layer = served.params['layers'][0]
  attention = {**layer['attention'], name: {**layer['attention'][name], 'kernel': change(layer['attention'][name]['kernel'])}}
  return served._replace(params={**served.params, 'layers': {**served.params['layers'], 0: {**layer, 'attention': attention}}})


def test_the_self_check_names_what_is_broken(params):
  served = serve(params, FLOAT32, W8A8)
  kernel = params['layers'][0]['attention']['k']['kernel']
  (left,) = self_check(params, broken(served, 'k', lambda w: kernel), FLOAT32, W8A8)
  assert "['k']['kernel']: not quantised" in left
  (extra,) = self_check(
    params, serve(params, FLOAT32, W8A8), FLOAT32, Quant(sampler='w8a8', skip_names=('v',), skip_last_layers=2)
  )[:1]
  assert 'quantised, against config.quant' in extra
  (poisoned,) = self_check(
    params, broken(served, 'q', lambda w: Emulated(w.values.at[0, 0].set(jnp.nan), w.format)), FLOAT32, W8A8
  )
  assert poisoned == 'a served weight is not finite'
  stale = broken(served, 'k', lambda w: quantise(jnp.flip(kernel, 0), 'float32').emulated())
  (off,) = self_check(params, stale, FLOAT32, W8A8)
  assert "['k']['kernel']: its FP8 product is off by" in off
  narrow = Served({**served.params, 'embed': served.params['embed'].astype(jnp.bfloat16)})
  (dtype,) = self_check(params, narrow, FLOAT32, W8A8)
  assert dtype == "['embed']: bfloat16, expected float32"


def test_small_steps_change_few_codes(params):
  """Spec 2.6: a step of 1e-6 a weight (sigma 0.02) changes 0.24 to 0.5 % of the codes, 1e-5 2 to 3 %, 1e-4 about 18 %."""
  rng = np.random.default_rng(0)
  w = rng.normal(0, 0.02, (512, 512)).astype(np.float32)
  codes = {'w': quantise(jnp.asarray(w), 'float32').codes}
  assert codes_changed(codes, codes) == 0
  for step, (low, high) in {1e-6: (0.0015, 0.006), 1e-5: (0.015, 0.035), 1e-4: (0.15, 0.21)}.items():
    moved = w + step * rng.choice([-1, 1], w.shape)
    changed = float(codes_changed(codes, {'w': quantise(jnp.asarray(moved, jnp.float32), 'float32').codes}))
    assert low < changed < high, (step, changed)


def test_the_probe_is_the_middle_layer(params):
  probe = serve(params, FLOAT32, W8A8).probe
  assert set(probe) == {*'qkvo', 'gate', 'up', 'down'}
  expected = quantise(params['layers'][1]['mlp']['up']['kernel'], 'float32').codes
  np.testing.assert_array_equal(probe['up'].astype(jnp.float32), expected.astype(jnp.float32))


# --- experts ---------------------------------------------------------------------------------------------------------

SHARED = {('shared', name) for name in BLOCKS['mlp']}
EXPERTS = {('experts', name) for name in BLOCKS['mlp']}


@pytest.mark.parametrize(('quant', 'spared'), [(W8A8, ()), (BLOCKWISE, ()), (Quant(sampler='w8a8', skip_names=('up',)), ('up',))])
def test_experts_are_fp8_and_their_router_is_not(quant, spared):
  _, params = small.model('qwen2_moe', num_hidden_layers=1)
  served = serve(params, FLOAT32, quant)
  mlp = served.params['layers'][0]['mlp']
  for part, name in EXPERTS | SHARED:
    assert isinstance(mlp[part][name]['kernel'], BlockScaled | Emulated) == (name not in spared)
  assert mlp['router']['kernel'].dtype == mlp['shared_gate']['kernel'].dtype == FLOAT32
  assert set(served.probe) == {*'qkvo', *(f'{part}.{name}' for part, name in EXPERTS | SHARED if name not in spared)}
  assert self_check(params, served, FLOAT32, quant) == []


def test_a_broken_expert_does_not_go_unnoticed():
  _, params = small.model('qwen3_moe', num_hidden_layers=1)
  quant = Quant(sampler='w8a8', skip_names=(*'qkvo', 'up', 'gate'))
  served = serve(params, FLOAT32, quant)
  served.params['layers'][0]['mlp']['experts']['down']['kernel'] = quantise(
    params['layers'][0]['mlp']['experts']['down']['kernel'][::-1], 'float32'
  ).emulated()
  (off,) = self_check(params, served, FLOAT32, quant)
  assert "['experts']['down']['kernel']: its FP8 product is off by" in off


@pytest.mark.parametrize('quant', [W8A8, BLOCKWISE])
def test_fp8_experts_multiply_as_each_would_alone(quant):
  """Against `dot` with one expert's weights at a time, on all tokens, which the gates then leave out."""
  config, params = small.model('qwen3_moe', num_hidden_layers=1)
  mlp = serve(params, FLOAT32, quant).params['layers'][0]['mlp']
  kernels = {name: mlp['experts'][name]['kernel'] for name in BLOCKS['mlp']}
  x = jnp.asarray(np.random.default_rng(0).normal(size=(37, 64)), jnp.float32)
  distribution = probabilities(x, mlp['router']['kernel'])
  chosen = jax.lax.top_k(distribution, 2)[1]
  gate = np.asarray(gates(distribution, chosen, True))
  expected = np.zeros(x.shape)
  for e in range(config.experts.count):
    one = jax.tree.map(lambda w, e=e: w[e], kernels)
    a, b = dot(x, one['gate']), dot(x, one['up'])
    out = dot(a / (1 + jnp.exp(-a)) * b, one['down'])
    expected += np.asarray(out) * np.sum(np.where(np.asarray(chosen) == e, gate, 0), axis=1)[:, None]
  got = np.asarray(jax.jit(mixture)(kernels, x, chosen, jnp.asarray(gate)))
  # XLA's exp differs in the last digit here and there, and an activation that rounds to the other of two codes is an FP8 step off
  assert np.mean(np.abs(got - expected) > 1e-4) < 0.02
  assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 2e-3


HEADS = {'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 128}


@pytest.mark.parametrize(
  ('F', 'tensor', 'quant', 'expected'),
  [
    (512, 4, W8A8, 'auto'),
    (640, 1, W8A8, 'auto'),
    (640, 2, W8A8, 'reference'),  # 320 of 640 are two blocks and a half
    (640, 2, Quant(sampler='w8a8', skip_names=('gate', 'up', 'down')), 'auto'),
    (640, 2, Quant(sampler='w8a8', format='mxfp8'), 'auto'),  # blocks of 1 x 32
    (640, 2, Quant(sampler='kv8'), 'auto'),
  ],
)
def test_weights_that_a_mesh_cuts_within_their_blocks_are_not_for_the_kernel(F, tensor, quant, expected):
  config = tiny('qwen2', **HEADS, intermediate_size=F)
  meshes = [make_mesh(Mesh(data=-1, fsdp=1, tensor=each), jax.devices() * 8, (4, 2)) for each in (1, tensor)]
  assert linear_kernels(config, quant, 'auto', meshes) == expected
  if expected == 'reference':
    with pytest.raises(SettingsError, match=r"kernels = 'mosaic_gpu'.*'down'.*\[64, 640\] is cut within its blocks"):
      linear_kernels(config, quant, 'mosaic_gpu', meshes)
