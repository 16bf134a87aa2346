"""The network: its description of its weights, and what its outputs may depend on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.models import transformer
from sprl.models.config import tiny
from sprl.models.memory import CausalMemory

FAMILIES = ('llama', 'qwen2', 'qwen3', 'qwen2_moe', 'qwen3_moe')


def run(config, params, tokens, segments=None, positions=None, **how):
  B, T = tokens.shape
  memory = CausalMemory.of(jnp.ones((B, T), jnp.int32) if segments is None else segments)
  positions = jnp.broadcast_to(jnp.arange(T), (B, T)) if positions is None else positions
  return transformer.forward(transformer.graph(config), params, tokens, positions, memory, **how)[0]


def by_hand(config, params, ids):
  """A decoder in numpy float64, written from the papers: one sequence, one head, one position at a time."""
  w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  T, H, K, D = len(ids), config.num_heads, config.num_kv_heads, config.head_dim

  def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

  def linear(x, p):
    return x @ p['kernel'].T + p.get('bias', 0)

  def turned(x, t):
    angle = t / 10_000.0 ** (np.arange(0, D, 2) / D)
    a, b = x[: D // 2], x[D // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

  def mlp(x, p):
    gate = linear(x, p['gate'])
    return linear(gate / (1 + np.exp(-gate)) * linear(x, p['up']), p['down'])

  def mixture(x, p):  # of one token
    scores = np.exp(linear(x, p['router']))
    scores = scores / scores.sum()
    chosen = np.argsort(-scores)[: config.experts.chosen]
    whole = scores[chosen].sum() if config.experts.normalised else 1
    of_expert = [jax.tree.map(lambda leaf, e=e: leaf[e], p['experts']) for e in chosen]
    y = sum(scores[e] / whole * mlp(x, expert) for e, expert in zip(chosen, of_expert))
    return y + mlp(x, p['shared']) / (1 + np.exp(-linear(x, p['shared_gate']))) if 'shared' in p else y

  x = w['embed'][ids]
  for i in range(config.num_layers):
    p = w['layers'][i]
    a, n = p['attention'], norm(x, p['attention_norm']['scale'])
    q, k, v = (linear(n, a[name]).reshape(T, -1, D) for name in 'qkv')
    if config.qk_norm:
      q, k = norm(q, a['q_norm']['scale']), norm(k, a['k_norm']['scale'])
    heads = np.zeros((T, H, D))
    for t in range(T):
      for h in range(H):
        kv = h // (H // K)
        score = np.array([turned(q[t, h], t) @ turned(k[s, kv], s) for s in range(t + 1)]) / np.sqrt(D)
        weight = np.exp(score - score.max())
        heads[t, h] = weight / weight.sum() @ v[: t + 1, kv]
    x = x + linear(heads.reshape(T, -1), a['o'])
    m, n = p['mlp'], norm(x, p['mlp_norm']['scale'])
    x = x + (np.stack([mixture(token, m) for token in n]) if 'router' in m else mlp(n, m))
  return norm(x, w['norm']['scale'])


@pytest.mark.parametrize('family', FAMILIES)
def test_hidden_states_are_those_of_the_decoder_written_out(family):
  config, params = small.model(family)
  ids = np.random.default_rng(0).integers(0, 259, 6)
  got = run(config, params, jnp.asarray(ids[None], jnp.int32))[0]
  np.testing.assert_allclose(got, by_hand(config, params, ids), atol=2e-4)


@pytest.mark.parametrize('family', FAMILIES)
def test_every_weight_is_described_once(family):
  config, params = small.model(family)
  shapes, axes = transformer.abstract_params(config, jnp.bfloat16), transformer.logical_axes(config)
  assert jax.tree.structure(shapes) == jax.tree.structure(params)
  for (path, leaf), weight in zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(params)):
    names = axes
    for key in path:
      names = names[key.key]
    assert (leaf.shape, leaf.dtype, len(names)) == (weight.shape, jnp.bfloat16, weight.ndim)
  attention = axes['layers'][0]['attention']
  assert attention['q']['kernel'] == ('heads', 'embed')
  assert attention['o']['kernel'] == ('embed', 'heads')
  assert axes['embed'] == ('vocab', 'embed')
  assert ('bias' in attention['k'], 'q_norm' in attention) == (family.startswith('qwen2'), family.startswith('qwen3'))
  experts = axes['layers'][0]['mlp'].get('experts')
  assert (experts is not None) == family.endswith('_moe')
  if experts:
    assert (experts['up']['kernel'], experts['down']['kernel']) == (('expert', 'mlp', 'embed'), ('expert', 'embed', 'mlp'))


def test_weights_from_scratch():
  params = transformer.init_params(tiny('qwen2'), jax.random.key(0), jnp.bfloat16, scale=0.5)
  layer = params['layers'][0]
  assert np.all(layer['attention_norm']['scale'] == 1)
  assert not np.any(layer['attention']['q']['bias'])
  assert layer['mlp']['up']['kernel'].dtype == jnp.bfloat16
  assert abs(float(layer['mlp']['up']['kernel'].astype(jnp.float32).std()) - 0.5) < 0.02


def test_the_head_is_the_embedding_where_they_are_tied():
  _, tied = small.model('qwen2')
  _, free = small.model('llama')
  assert transformer.head_weight(tied) is tied['embed']
  np.testing.assert_array_equal(transformer.head_weight(free), free['head']['kernel'])


def test_a_token_sees_nothing_later():
  config, params = small.model()
  tokens = jnp.arange(3, 11)[None]
  changed = tokens.at[0, 5].set(99)
  before, after = run(config, params, tokens), run(config, params, changed)
  np.testing.assert_array_equal(before[:, :5], after[:, :5])
  assert np.all(np.any(np.asarray(before[0, 5:] != after[0, 5:]), axis=-1))


@pytest.mark.parametrize('side', ['left', 'right'])
def test_padding_changes_nothing_whatever_it_holds(side):
  config, params = small.model()
  real, pad = jnp.arange(20, 27)[None], jnp.full((1, 5), 7)
  alone = run(config, params, real)

  def padded(pad):
    parts = [(pad, 0, jnp.zeros((1, 5), jnp.int32)), (real, 1, jnp.arange(7)[None])]
    parts = parts if side == 'left' else parts[::-1]
    tokens, positions = (jnp.concatenate([p[i] for p in parts], axis=1) for i in (0, 2))
    segments = jnp.concatenate([jnp.full(p[0].shape, p[1]) for p in parts], axis=1)
    out = run(config, params, tokens, segments, positions)
    return out[:, 5:] if side == 'left' else out[:, :7]

  np.testing.assert_allclose(padded(pad), alone, atol=1e-5)
  np.testing.assert_array_equal(padded(pad), padded(pad + 200))


@pytest.mark.parametrize(('family', 'remat'), [('llama', 'dots'), ('llama', 'layer'), ('qwen3_moe', 'layer')])
def test_recomputing_layers_changes_no_gradient(family, remat):
  config, params = small.model(family, num_hidden_layers=1)
  tokens = jnp.arange(3, 11)[None]

  def loss(params, remat):
    return jnp.sum(jnp.sin(run(config, params, tokens, remat=remat)))

  kept, recomputed = (jax.jit(jax.grad(lambda p, r=r: loss(p, r)))(params) for r in ('none', remat))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), kept, recomputed)


def test_products_with_weights_are_computed_again_only_where_a_whole_layer_is():
  config, params = small.model()
  tokens = jnp.arange(3, 67)[None]

  def flops(remat):
    compiled = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(run(config, p, tokens, remat=remat))))).lower(params).compile()
    return compiled.cost_analysis()['flops']

  none, dots, layer = map(flops, ('none', 'dots', 'layer'))
  weights = jax.tree_util.tree_flatten_with_path(params['layers'])[0]
  # what the last product of a layer says is added to the stream, and no gradient asks for it
  products = 2 * tokens.size * sum(w.size for path, w in weights if w.ndim == 2 and 'down' not in jax.tree_util.keystr(path))
  assert dots - none < 0.5 * products  # attention's own
  assert layer - dots == pytest.approx(products, rel=0.1)


@pytest.mark.parametrize('remat', ['none', 'dots', 'layer'])
def test_experts_are_chosen_once_and_computed_once_in_each_direction(remat):
  config, params = small.model('qwen3_moe', num_hidden_layers=1)
  tokens = jnp.arange(3, 67)[None]
  text = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(run(config, p, tokens, remat=remat))))).lower(params).compile().as_text()
  assert len(re.findall(r' while\(', text)) == 2
  assert text.count('custom_call_target="TopK"') == 1


def test_activations_are_in_the_dtype_asked_for():
  config, params = small.model()
  narrow = run(config, params, jnp.arange(3, 11)[None], dtype=jnp.bfloat16)
  wide = run(config, params, jnp.arange(3, 11)[None])
  assert narrow.dtype == jnp.bfloat16
  assert 0 < float(jnp.abs(narrow - wide).mean()) < 0.05
