"""Adapters: their product, the merged sampler weights, the gradients, and the saved computation and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from jax.sharding import AbstractMesh

from sprl.config import LINEARS, Correction, Lora, Loss, Optimizer, Quant, SettingsError
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.restore import check_base
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import tiny
from sprl.models.lora import Base, abstract_adapters, adapter_axes, fingerprint, init_adapters, network
from sprl.quant.dot import LowRank, dot, plain
from sprl.sampler.weights import sampler_weights, self_check
from sprl.sharding.rules import shardings

LORA = Lora(rank=3, alpha=6.0)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 259, (2, 9)), jnp.int32)


def adapted(family='qwen2', lora=LORA):
  """Return (config, frozen weights, random adapters) of a model with one layer."""
  config, params = small.model(family, num_hidden_layers=1)
  leaves, tree = jax.tree.flatten(init_adapters(config, lora, jax.random.key(2)))
  keys = jax.random.split(jax.random.key(3), len(leaves))
  return (
    config,
    Base(params, lora.alpha / lora.rank),
    tree.unflatten([0.1 * jax.random.normal(k, w.shape) for w, k in zip(leaves, keys)]),
  )


def merged_by_hand(base, adapters):
  """Return the weights W + alpha / rank B A, computed in numpy and float64."""
  out = jax.tree.map(lambda w: np.asarray(w, np.float64), base.params)
  for i, layer in adapters['layers'].items():
    for part, linears in layer.items():
      for name, pair in linears.items():
        a, b = np.asarray(pair['a'], np.float64), np.asarray(pair['b'], np.float64)
        out['layers'][i][part][name]['kernel'] = out['layers'][i][part][name]['kernel'] + 2.0 * b @ a
  return jax.tree.map(lambda w: w.astype(np.float32), out)


@functools.partial(jax.jit, static_argnames='config')
def hidden(config, params):
  positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
  attention = PackedAttention.of(jnp.ones_like(TOKENS))
  return transformer.forward(transformer.graph(config), params, TOKENS, positions, attention).hidden


# --- product ---------------------------------------------------------------------------------------------------------


def test_product_and_gradients_of_a_low_rank_weight():
  rng = np.random.default_rng(0)
  x, w, a, b, g = (rng.normal(size=s) for s in ((5, 4), (6, 4), (2, 4), (6, 2), (5, 6)))
  arrays = [jnp.asarray(each, jnp.float32) for each in (x, w, a, b)]

  @jax.jit
  def product(arrays, g):
    y, back = jax.vjp(lambda x, w, a, b: dot(x, LowRank(w, a, b, 0.5)), *arrays)
    return y, back(g)

  y, (dx, dw, da, db) = product(arrays, jnp.asarray(g, jnp.float32))
  whole = w + 0.5 * b @ a
  np.testing.assert_allclose(y, x @ whole.T, atol=1e-5)
  np.testing.assert_allclose(dx, g @ whole, atol=1e-5)
  np.testing.assert_allclose(da, 0.5 * b.T @ (g.T @ x), atol=1e-5)
  np.testing.assert_allclose(db, 0.5 * (g.T @ x) @ a.T, atol=1e-5)
  assert not np.any(dw)  # frozen
  np.testing.assert_allclose(plain(LowRank(*arrays[1:], 0.5)), whole, atol=1e-6)


@pytest.mark.parametrize('family', ['qwen2', *(pytest.param(name, marks=pytest.mark.slow) for name in ('llama', 'qwen3'))])
def test_a_network_with_adapters_equals_one_with_merged_weights(family):
  config, base, adapters = adapted(family)
  expected = hidden(config, merged_by_hand(base, adapters))
  np.testing.assert_allclose(hidden(config, base.under(adapters)), expected, atol=2e-4)
  assert np.abs(hidden(config, base.params) - expected).max() > 0.1


def test_new_adapters_change_nothing():
  config, base, _ = adapted()
  adapters = init_adapters(config, LORA, jax.random.key(0))
  a, b = (adapters['layers'][0]['mlp']['down'][name] for name in 'ab')
  assert (a.shape, b.shape) == ((3, 96), (64, 3))
  assert not np.any(b)
  assert 0.9 * 96**-0.5 < np.abs(a).max() <= 96**-0.5
  assert np.any(np.asarray(a)[:, :64] != np.asarray(adapters['layers'][0]['mlp']['up']['a']))
  np.testing.assert_array_equal(hidden(config, base.under(adapters)), hidden(config, base.params))


def test_only_targets_have_adapters_and_unknown_targets_are_named():
  config = tiny('llama')
  adapters = abstract_adapters(config, Lora(rank=2, targets=('v', 'down')))
  assert jax.tree.map(lambda leaf: leaf.shape, adapters['layers'][0]) == {
    'attention': {'v': {'a': (2, 64), 'b': (32, 2)}},
    'mlp': {'down': {'a': (2, 96), 'b': (64, 2)}},
  }
  assert set(abstract_adapters(config, Lora(rank=2, targets=('q',)))['layers'][0]) == {'attention'}
  with pytest.raises(SettingsError, match=r"config.lora.targets = .*'router'.* k, o, q, v, down, gate, up"):
    abstract_adapters(config, Lora(rank=2, targets=('q', 'router')))


def test_adapters_are_sharded_as_their_kernels_are():
  config, mesh = tiny('llama'), AbstractMesh((2, 2), ('fsdp', 'tensor_kv'))
  axes = adapter_axes(config, LORA)
  assert axes['layers'][0]['attention']['o'] == {'a': ('rank', 'heads'), 'b': ('embed', 'rank')}
  assert axes['layers'][0]['mlp']['up'] == {'a': ('rank', 'embed'), 'b': ('mlp', 'rank')}
  kernels = shardings(mesh, transformer.logical_axes(config), transformer.abstract_params(config))
  pairs = shardings(mesh, axes, abstract_adapters(config, LORA))
  for name in ('gate', 'down'):
    outputs, inputs = kernels['layers'][0]['mlp'][name]['kernel'].spec
    pair = pairs['layers'][0]['mlp'][name]
    assert (tuple(pair['b'].spec), tuple(pair['a'].spec)) == ((outputs,), (None, inputs))
    assert None not in (outputs, inputs)


# --- sampler weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('quant', [Quant(), Quant(sampler='w8a8'), Quant(sampler='w8a8', arithmetic='blockwise')])
def test_the_sampler_gets_merged_weights(quant):
  _, base, adapters = adapted()
  weights = sampler_weights(base.under(adapters), jnp.dtype('float32'), quant)
  expected = sampler_weights(jax.tree.map(jnp.asarray, merged_by_hand(base, adapters)), jnp.dtype('float32'), quant)
  assert jax.tree.structure(weights) == jax.tree.structure(expected)
  for got, want in zip(jax.tree.leaves(weights), jax.tree.leaves(expected)):
    got, want = (np.asarray(each).astype(np.float32) for each in (got, want))
    step = 2**-3 * np.abs(want) + 1e-5 if quant.sampler == 'w8a8' else 1e-6  # an FP8 code may flip
    assert np.all(np.abs(got - want) <= step)
    assert np.mean(np.abs(got - want) > 1e-5 * np.abs(want)) < 1e-2
  assert self_check(base.under(adapters), weights, jnp.dtype('float32'), quant) == []


# --- training --------------------------------------------------------------------------------------------------------

BATCH, _ = pack(small.rollouts([(5, 3), (4, 6)], (6, 3)), np.array([1, -1, 0.5, -2], np.float32), Shape(2, 1, 32, 4, 6), True)


def computation(**changes):
  return UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, jnp.dtype('float32'), 8), **changes)


def test_a_step_of_adapters_follows_the_gradient_of_merged_weights():
  """dA = s B^T dW and dB = s dW A^T, with dW the step of plain gradient descent on the merged weights."""
  config, base, adapters = adapted()
  rate = 10.0
  optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=rate, clip_norm=None), 10)
  update = make_update(transformer.graph(config), optimizer, computation())
  whole = jax.tree.map(jnp.asarray, merged_by_hand(base, adapters))
  before = jax.tree.map(np.asarray, jax.device_get(jax.tree.map(jnp.copy, (whole, adapters))))
  of_whole, _ = update(TrainState.create(whole, optimizer), BATCH, small.unscored(BATCH))
  frozen = jax.tree.map(np.array, base.params)
  stepped, _ = update(TrainState.create(jax.tree.map(jnp.copy, adapters), optimizer), BATCH, small.unscored(BATCH), base)
  for part, name in (('attention', 'q'), ('attention', 'o'), ('mlp', 'down')):
    old, new = (tree['layers'][0][part][name] for tree in (before[1], stepped.params))
    was, now = (tree['layers'][0][part][name]['kernel'] for tree in (before[0], of_whole.params))
    gradient = (was.astype(np.float64) - np.asarray(now)) / rate
    scale = np.abs(gradient).max()
    np.testing.assert_allclose((old['a'] - np.asarray(new['a'])) / rate, 2 * old['b'].T @ gradient, atol=5e-4 * scale)
    np.testing.assert_allclose((old['b'] - np.asarray(new['b'])) / rate, 2 * gradient @ old['a'].T, atol=5e-4 * scale)
  jax.tree.map(np.testing.assert_array_equal, base.params, frozen)


def test_no_gradient_of_a_frozen_weight_is_computed():
  """A linear needs four products a step: forward, recomputation, gradient of x, gradient of W. Adapters need no gradient of W."""
  config, params = small.model(num_hidden_layers=1, hidden_size=256, intermediate_size=768)
  base = Base(params, 1.0)
  adapters = init_adapters(config, Lora(rank=1), jax.random.key(0))
  optimizer = make_optimizer(Optimizer(name='sgd', clip_norm=None), 10)
  update = make_update(transformer.graph(config), optimizer, computation(remat='layer'))

  def cost(trained, *frozen):
    state = jax.eval_shape(lambda: TrainState.create(trained, optimizer))
    compiled = update.lower(state, BATCH, small.unscored(BATCH), *frozen).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return compiled.cost_analysis()['flops'], memory.temp_size_in_bytes

  (flops, temporary), (all_flops, all_temporary) = cost(adapters, base), cost(base.params)
  assert flops / all_flops == pytest.approx(3 / 4, abs=0.05)
  assert all_temporary - temporary > 0.8 * sum(w.size * 4 for w in jax.tree.leaves(base.params))  # the gradients take no memory


def test_a_state_of_adapters_is_small():
  config = tiny('llama', hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, vocab_size=32_000)
  optimizer = make_optimizer(Optimizer(), 10)

  def size(trained):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, trained)))

  assert size(abstract_adapters(config, Lora(rank=16))) < 0.02 * size(transformer.abstract_params(config))


# --- fingerprint -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_depends_on_the_weights_but_not_on_their_dtype():
  _, params = small.model()
  params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
  name = fingerprint(params)
  assert len(name) == 10
  assert fingerprint(jax.tree.map(lambda w: w.astype(jnp.float32), params)) == name
  other = jax.tree.map(lambda w: w, params)
  other['layers'][1]['mlp']['up']['kernel'] = params['layers'][1]['mlp']['up']['kernel'].at[3, 5].multiply(1.01)
  assert fingerprint(other) != name
  other['layers'][1]['mlp']['up']['kernel'] = params['layers'][1]['mlp']['up']['kernel'][::-1]
  assert fingerprint(other) != name
  other['layers'][1]['mlp']['up']['kernel'] = params['layers'][1]['mlp']['up']['kernel'].at[0, 0].multiply(1.01)
  assert fingerprint(other) != name
  swapped = {**params, 'layers': {0: params['layers'][1], 1: params['layers'][0]}}
  assert fingerprint(swapped) != name


def test_the_fingerprint_of_an_older_version_is_not_reported_as_other_weights():
  base = Base({}, 1.0, '2-00000001')
  check_base(base, '2-00000001', 'model')
  with pytest.raises(SettingsError, match=r"config\.model\.path = 'model': .*2-00000002.* found others \(2-00000001\)"):
    check_base(base, '2-00000002', 'model')
  with pytest.raises(SettingsError, match='00000001, is that of an older version of sprl'):
    check_base(base, '00000001', 'model')


def test_without_a_base_the_network_is_the_trained_weights():
  _, params = small.model()
  assert network(params, None) is params
  assert set(LINEARS) == set(Lora().targets)
