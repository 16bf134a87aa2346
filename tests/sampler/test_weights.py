"""Sampler weights: the set of FP8 weights, their values, and a self-check that finds a broken sync."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from jax.experimental.pallas import mosaic_gpu as plgpu

from sprl.config import LINEARS, Mesh, Quant, SettingsError
from sprl.kernels import hopper_block_matmul as hopper
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import tiny
from sprl.models.moe import gates, mixture, probabilities
from sprl.quant.block import BlockScaled, Emulated, quantise
from sprl.quant.dot import dot
from sprl.quant.joined import separated
from sprl.sampler.weights import (
  SamplerWeights,
  check_learner_mesh,
  check_linears,
  codes_changed,
  linear_kernels,
  quantised_linears,
  sampler_weights,
  self_check,
)
from sprl.sharding.mesh import make_mesh

FLOAT32, BFLOAT16 = jnp.dtype('float32'), jnp.dtype('bfloat16')
W8A8, BLOCKWISE = Quant(sampler='w8a8'), Quant(sampler='w8a8', arithmetic='blockwise')
BLOCKS = {'attention': 'qkvo', 'mlp': ('gate', 'up', 'down')}


@pytest.fixture(scope='module')
def params():
  return small.model('qwen2', num_hidden_layers=1)[1]


def shapes(layers=3, family='qwen2', quant=W8A8, **changes):
  """Return shapes and dtypes of the sampler weights. Nothing is compiled."""
  params = transformer.abstract_params(tiny(family, num_hidden_layers=layers))
  return jax.eval_shape(partial(sampler_weights, dtype=FLOAT32, quant=quant, **changes), params)


def is_fp8(w):
  return isinstance(w, BlockScaled | Emulated)


def formats(weights):
  """Return (names of the quantised weights of each layer, all other weights)."""
  found = [
    {name for block, names in BLOCKS.items() for name in names if is_fp8(layer[block][name]['kernel'])}
    for layer in transformer.layers(jax.eval_shape(separated, weights.params))
  ]
  return found, [w for w in jax.tree.leaves(weights.params, is_leaf=is_fp8) if not is_fp8(w)]


# --- the set of FP8 weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('quant', [W8A8, BLOCKWISE])
def test_only_the_linears_of_all_layers_are_fp8(quant):
  found, others = formats(shapes(quant=quant))
  assert found == [{*'qkvo', 'gate', 'up', 'down'}] * 3
  assert all(w.dtype == FLOAT32 for w in others)  # embedding, head, norms, biases


@pytest.mark.parametrize('sampler', ['none', 'kv8'])
def test_only_w8a8_quantises_linears(sampler):
  assert formats(shapes(quant=Quant(sampler=sampler)))[0] == [set()] * 3


def test_layers_and_names_can_be_skipped():
  quant = Quant(sampler='w8a8_kv8', skip_layers=(0, -1), skip_names=('o', 'down'))
  assert formats(shapes(quant=quant))[0] == [set(), {'q', 'k', 'v', 'gate', 'up'}, set()]
  assert len(quantised_linears(transformer.abstract_params(tiny('qwen2', num_hidden_layers=3)), quant)) == 5


@pytest.mark.parametrize(('kernels', 'kind'), [('mosaic_gpu', BlockScaled), ('auto', Emulated)])
def test_codes_are_kept_where_a_kernel_multiplies_them(kernels, kind):
  w = shapes(1, kernels=kernels).params['layers'][0]['mlp']['down']['kernel']
  assert isinstance(w, kind)
  assert getattr(w, 'kernels', 'auto') == kernels


def test_auto_keeps_no_codes_in_a_format_that_no_kernel_multiplies():
  found = {
    arithmetic: shapes(1, quant=Quant(sampler='w8a8', format='mxfp8', arithmetic=arithmetic), kernels='mosaic_gpu').params[
      'layers'
    ][0]['mlp']
    for arithmetic in ('auto', 'blockwise')
  }
  assert isinstance(found['auto']['down']['kernel'], Emulated)
  assert isinstance(found['blockwise']['down']['kernel'], BlockScaled)


@pytest.mark.parametrize(
  ('quant', 'words'),
  [
    (Quant(sampler='w8a8', skip_layers=(3,)), ('config.quant.skip_layers = (3,)', '-3 to 2')),
    (Quant(sampler='w8a8', skip_layers=(0, 1, -1)), ('config.quant.skip_layers = (0, 1, -1)', '3 layers', "'none'")),
    (Quant(sampler='w8a8_kv8', skip_layers=(0, 1, 2)), ('config.quant.skip_layers = (0, 1, 2)', "'kv8'")),
    (Quant(sampler='w8a8', skip_names=LINEARS), ('config.quant.skip_names', ', '.join(LINEARS))),
  ],
)
def test_skipping_every_linear_raises(quant, words):
  with pytest.raises(SettingsError) as error:
    check_linears(quant, 3)
  assert all(word in str(error.value) for word in words), error.value


def test_one_remaining_linear_or_no_quantisation_is_accepted():
  check_linears(Quant(sampler='w8a8', skip_layers=(0, 2), skip_names=LINEARS[1:]), 3)
  check_linears(Quant(sampler='kv8', skip_layers=(40,)), 3)


def test_skipping_every_linear_of_an_fp8_learner_raises():
  with pytest.raises(SettingsError, match=r"config.quant.skip_layers = \(0, 1, 2\): .*config.quant.learner = 'none'"):
    check_linears(Quant(learner='w8a8', skip_layers=(0, 1, 2)), 3)
  check_linears(Quant(learner='w8a8', skip_layers=(0, 2)), 3)


# --- their values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('quant', [Quant(), W8A8])
def test_sampler_weights_survive_an_update_in_place(params, quant):
  masters = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
  copies = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(sampler_weights(params, FLOAT32, quant).params)}
  assert masters.isdisjoint(copies)


@pytest.mark.parametrize('family', ['llama', 'qwen2'])
def test_unquantised_weights_equal_the_learners_in_another_dtype(family):
  _, params = small.model(family, num_hidden_layers=1)
  cast = sampler_weights(params, BFLOAT16)
  head = params['embed'] if family == 'qwen2' else params['head']['kernel']
  np.testing.assert_array_equal(cast.head, np.asarray(head).astype(BFLOAT16))
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(BFLOAT16)), separated(cast.params), params)


def test_blockwise_and_emulated_products_agree(params):
  config = tiny('qwen2', num_hidden_layers=1)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 259, (2, 9)))
  positions = jnp.broadcast_to(jnp.arange(9), (2, 9))

  @jax.jit
  def hidden(params):
    memory = PackedAttention.of(jnp.ones((2, 9), jnp.int32))
    return transformer.forward(transformer.graph(config), params, tokens, positions, memory)[0]

  blockwise, emulated, plain = (hidden(sampler_weights(params, FLOAT32, quant).params) for quant in (BLOCKWISE, W8A8, Quant()))
  assert np.linalg.norm(blockwise - plain) / np.linalg.norm(plain) > 0.01  # the products are FP8
  # The products differ a little: an activation that rounds to another code moves a product by an FP8 step.
  assert np.linalg.norm(blockwise - emulated) / np.linalg.norm(plain) < 0.01


def test_small_steps_change_few_codes():
  """A step of 1e-6 a weight (sigma 0.02) changes 0.24 to 0.5 % of the codes, 1e-5 2 to 3 %, 1e-4 about 18 %."""
  rng = np.random.default_rng(0)
  w = rng.normal(0, 0.02, (512, 512)).astype(np.float32)
  code = jax.jit(lambda w: quantise(w, 'float32').codes)
  codes = {'w': code(w)}
  assert codes_changed(codes, codes) == 0
  for step, (low, high) in {1e-6: (0.0015, 0.006), 1e-5: (0.015, 0.035), 1e-4: (0.15, 0.21)}.items():
    moved = (w + step * rng.choice([-1, 1], w.shape)).astype(np.float32)
    changed = float(codes_changed(codes, {'w': code(moved)}))
    assert low < changed < high, (step, changed)


def test_the_probe_holds_the_codes_of_the_middle_layer():
  _, params = small.model('qwen2', num_hidden_layers=3)
  probe = sampler_weights(params, FLOAT32, W8A8).probe
  assert set(probe) == {*'qkvo', 'gate', 'up', 'down'}
  expected = jax.jit(quantise, static_argnums=1)(params['layers'][1]['mlp']['up']['kernel'], 'float32').codes
  np.testing.assert_array_equal(probe['up'].view(np.uint8), expected.view(np.uint8))


# --- the self-check ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(('format', 'arithmetic'), [('float32', 'blockwise'), ('pow2', 'emulate'), ('mxfp8', 'blockwise')])
def test_self_check_accepts_widths_that_blocks_do_not_divide(format, arithmetic):
  sizes = {'hidden_size': 40, 'intermediate_size': 50, 'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 20}
  params = jax.jit(partial(transformer.init_params, tiny('qwen2', num_hidden_layers=1, **sizes)))(jax.random.key(0))
  quant = Quant(sampler='w8a8', format=format, arithmetic=arithmetic)
  assert self_check(params, sampler_weights(params, FLOAT32, quant), FLOAT32, quant) == []


def test_self_check_accepts_a_forced_kernel(monkeypatch):
  monkeypatch.setattr(hopper, 'block_matmul', partial(hopper.block_matmul, interpret=plgpu.InterpretGPUParams()))
  _, params = small.model('qwen2', num_hidden_layers=1)
  quant = Quant(sampler='w8a8', skip_names=('q', 'k', 'v', 'o', 'gate', 'up'))
  weights = sampler_weights(params, BFLOAT16, quant, kernels='mosaic_gpu')
  assert self_check(params, weights, BFLOAT16, quant) == []


def test_self_check_accepts_sampler_weights(params):
  for quant in (W8A8, BLOCKWISE, Quant()):
    assert self_check(params, sampler_weights(params, FLOAT32, quant), FLOAT32, quant) == []


def broken(weights, name, change):
  """Return the weights, with none joined, and with one leaf of the first layer changed."""
  weights = weights._replace(params=separated(weights.params))
  layer = weights.params['layers'][0]
  attention = {**layer['attention'], name: {**layer['attention'][name], 'kernel': change(layer['attention'][name]['kernel'])}}
  return weights._replace(params={**weights.params, 'layers': {**weights.params['layers'], 0: {**layer, 'attention': attention}}})


def test_self_check_names_the_fault(params):
  weights = sampler_weights(params, FLOAT32, W8A8)
  kernel = params['layers'][0]['attention']['k']['kernel']
  (left,) = self_check(params, broken(weights, 'k', lambda w: kernel), FLOAT32, W8A8)
  assert "['k']['kernel']: not quantised" in left
  (extra,) = self_check(params, weights, FLOAT32, Quant(sampler='w8a8', skip_names=('v',)))
  assert "['v']['kernel']: quantised, against config.quant" in extra
  (poisoned,) = self_check(
    params, broken(weights, 'q', lambda w: Emulated(w.values.at[0, 0].set(jnp.nan), w.format)), FLOAT32, W8A8
  )
  assert 'not finite' in poisoned
  stale = broken(weights, 'k', lambda w: quantise(jnp.flip(kernel, 0), 'float32').emulated())
  (off,) = self_check(params, stale, FLOAT32, W8A8)
  assert "['k']['kernel']: relative error" in off
  narrow = SamplerWeights({**weights.params, 'embed': weights.params['embed'].astype(BFLOAT16)})
  (dtype,) = self_check(params, narrow, FLOAT32, W8A8)
  assert dtype == "['embed']: bfloat16, expected the dtype float32"


# --- experts ---------------------------------------------------------------------------------------------------------

SHARED = {('shared', name) for name in BLOCKS['mlp']}
EXPERTS = {('experts', name) for name in BLOCKS['mlp']}


@pytest.mark.parametrize(
  ('quant', 'skipped'), [(W8A8, ()), (BLOCKWISE, ()), (Quant(sampler='w8a8', skip_names=('up',)), ('up',))]
)
def test_experts_are_fp8_and_their_router_is_not(quant, skipped):
  weights = shapes(1, 'qwen2_moe', quant)
  mlp = jax.eval_shape(separated, weights.params)['layers'][0]['mlp']
  for part, name in EXPERTS | SHARED:
    assert is_fp8(mlp[part][name]['kernel']) == (name not in skipped)
  assert mlp['router']['kernel'].dtype == mlp['shared_gate']['kernel'].dtype == FLOAT32
  assert set(weights.probe) == {*'qkvo', *(f'{part}.{name}' for part, name in EXPERTS | SHARED if name not in skipped)}


def test_self_check_finds_a_broken_expert():
  _, params = small.model('qwen3_moe', num_hidden_layers=1)
  quant = Quant(sampler='w8a8', skip_names=(*'qkvo', 'up', 'gate'))
  weights = sampler_weights(params, FLOAT32, quant)
  assert self_check(params, weights, FLOAT32, quant) == []
  experts = params['layers'][0]['mlp']['experts']['down']['kernel']
  broken = jax.jit(lambda w: quantise(w[::-1], 'float32').emulated())(experts)
  weights.params['layers'][0]['mlp']['experts']['down']['kernel'] = broken
  (off,) = self_check(params, weights, FLOAT32, quant)
  assert "['experts']['down']['kernel']: relative error" in off


@pytest.mark.parametrize('quant', [W8A8, BLOCKWISE])
def test_fp8_experts_multiply_as_each_does_alone(quant):
  """The oracle is `dot` with the weights of one expert on all tokens. Gates of 0 leave out the tokens of other experts."""
  config, params = small.model('qwen3_moe', num_hidden_layers=1)
  mlp = separated(sampler_weights(params, FLOAT32, quant).params)['layers'][0]['mlp']
  kernels = {name: mlp['experts'][name]['kernel'] for name in BLOCKS['mlp']}
  x = jnp.asarray(np.random.default_rng(0).normal(size=(37, 64)), jnp.float32)

  @jax.jit
  def route(x):
    distribution = probabilities(x, mlp['router']['kernel'])
    chosen = jax.lax.top_k(distribution, 2)[1]
    return chosen, gates(distribution, chosen, True)

  @jax.jit
  def alone(x, one):
    a, b = dot(x, one['gate']), dot(x, one['up'])
    return dot(a / (1 + jnp.exp(-a)) * b, one['down'])

  chosen, gate = route(x)
  expected = np.zeros(x.shape)
  for e in range(config.experts.count):
    out = alone(x, jax.tree.map(lambda w, e=e: w[e], kernels))
    expected += np.asarray(out) * np.sum(np.where(np.asarray(chosen) == e, gate, 0), axis=1)[:, None]
  got = np.asarray(jax.jit(mixture)(kernels, x, chosen, gate))
  # exp may differ in the last digit, and an activation that rounds to another code moves a product by an FP8 step.
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
    (640, 2, Quant(sampler='w8a8', arithmetic='emulate'), 'auto'),  # multiplies no codes
  ],
)
def test_a_mesh_that_cuts_within_blocks_rules_out_the_kernel(F, tensor, quant, expected):
  config = tiny('qwen2', **HEADS, intermediate_size=F)
  meshes = [make_mesh(Mesh(data=-1, fsdp=1, tensor=each), jax.devices() * 8, (4, 2)) for each in (1, tensor)]
  assert linear_kernels(config, quant, 'auto', meshes) == expected
  if expected == 'reference':
    with pytest.raises(SettingsError, match=r"kernels = 'mosaic_gpu'.*'down'.*\[64, 640\] is cut within its blocks"):
      linear_kernels(config, quant, 'mosaic_gpu', meshes)


def test_a_learner_refuses_to_multiply_codes_that_its_mesh_cuts_within_blocks():
  config, quant = tiny('qwen2', **HEADS, intermediate_size=640), Quant(learner='w8a8', arithmetic='blockwise')
  meshes = [make_mesh(Mesh(data=-1, fsdp=1, tensor=n), jax.devices() * 8, (4, 2)) for n in (1, 2)]
  check_learner_mesh(config, quant, 'auto', meshes[0])
  said = r"config.quant.learner = 'w8a8': .* config.quant.arithmetic = 'emulate', .* config.mesh.learner: .*'down'.* cut within"
  with pytest.raises(SettingsError, match=said):
    check_learner_mesh(config, quant, 'auto', meshes[1])
  for accepted in (Quant(sampler='w8a8', arithmetic='blockwise'), Quant(learner='w8a8'), Quant(learner='w8a8', format='mxfp8')):
    check_learner_mesh(config, accepted, 'auto', meshes[1])  # another setting's concern; emulated; cut between blocks
