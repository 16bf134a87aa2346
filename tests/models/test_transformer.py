"""The network against a decoder in numpy: weights, outputs, and recomputation in the backward pass."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import tiny

FAMILIES = ('llama', 'qwen2', 'qwen3', 'qwen2_moe', 'qwen3_moe', 'mistral', 'gemma3_text', 'olmo2')


T = 8


def run(config, params, tokens, segments=None, positions=None, dtype=jnp.float32):
  """Return the hidden states of one row of T tokens. All rows of a model share one program."""
  segments = np.ones((1, T)) if segments is None else segments
  positions = np.arange(T)[None] if positions is None else positions
  return _run(config, params, *(jnp.asarray(x, jnp.int32) for x in (tokens, segments, positions)), dtype=dtype)


@functools.partial(jax.jit, static_argnames=('config', 'dtype'))
def _run(config, params, tokens, segments, positions, dtype):
  attention = PackedAttention.of(segments)
  return transformer.forward(transformer.graph(config), params, tokens, positions, attention, dtype).hidden


def by_hand(config, params, ids):
  """Return the hidden states of a decoder in numpy float64, written from the papers, one head and position at a time."""
  w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  T, H, K, D = len(ids), config.num_heads, config.num_kv_heads, config.head_dim
  raw, gemma = config.raw, config.family == 'gemma3_text'

  def norm(x, p):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * (p['scale'] + gemma)

  def maybe(x, p, name):
    return norm(x, p[name]) if name in p else x

  def linear(x, p):
    return x @ p['kernel'].T + p.get('bias', 0)

  def rotated(x, t, theta):
    angle = t / theta ** (np.arange(0, D, 2) / D)
    a, b = x[: D // 2], x[D // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

  def mlp(x, p):
    gate = linear(x, p['gate'])
    slope = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3) if gemma else gate  # tanh(y / 2) = 2 / (1 + exp(-y)) - 1
    return linear(gate / (1 + np.exp(-slope)) * linear(x, p['up']), p['down'])

  def mixture(x, p):  # for one token
    scores = np.exp(linear(x, p['router']))
    scores = scores / scores.sum()
    chosen = np.argsort(-scores)[: config.experts.per_token]
    whole = scores[chosen].sum() if config.experts.normalised else 1
    of_expert = [jax.tree.map(lambda leaf, e=e: leaf[e], p['experts']) for e in chosen]
    y = sum(scores[e] / whole * mlp(x, expert) for e, expert in zip(chosen, of_expert))
    return y + mlp(x, p['shared']) / (1 + np.exp(-linear(x, p['shared_gate']))) if 'shared' in p else y

  x = w['embed'][ids] * (np.sqrt(config.hidden_size) if gemma else 1)
  for i in range(config.num_layers):
    p = w['layers'][i]
    a, n = p['attention'], maybe(x, p, 'attention_norm')
    local = raw.get('sliding_window') and (not gemma or (i + 1) % raw['sliding_window_pattern'])
    theta = raw['rope_local_base_freq'] if gemma and local else raw['rope_theta']
    q, k, v = (linear(n, a[name]) for name in 'qkv')
    if config.family == 'olmo2':
      q, k = norm(q, a['q_norm']), norm(k, a['k_norm'])
    q, k, v = (x.reshape(T, -1, D) for x in (q, k, v))
    if config.family != 'olmo2':
      q, k = maybe(q, a, 'q_norm'), maybe(k, a, 'k_norm')
    heads = np.zeros((T, H, D))
    for t in range(T):
      seen = range(max(0, t + 1 - raw['sliding_window']) if local else 0, t + 1)
      for h in range(H):
        kv = h // (H // K)
        score = np.array([rotated(q[t, h], t, theta) @ rotated(k[s, kv], s, theta) for s in seen])
        weight = np.exp((score - score.max()) / np.sqrt(raw.get('query_pre_attn_scalar', D)))
        heads[t, h] = weight / weight.sum() @ v[seen, kv]
    x = x + maybe(linear(heads.reshape(T, -1), a['o']), p, 'attention_out_norm')
    m, n = p['mlp'], maybe(x, p, 'mlp_norm')
    x = x + maybe(np.stack([mixture(token, m) for token in n]) if 'router' in m else mlp(n, m), p, 'mlp_out_norm')
  return norm(x, w['norm'])


@pytest.mark.parametrize('family', FAMILIES)
def test_hidden_states_equal_those_of_a_decoder_in_numpy(family):
  config, params = small.model(family)
  ids = np.random.default_rng(0).integers(0, 259, T)
  np.testing.assert_allclose(run(config, params, ids[None])[0], by_hand(config, params, ids), atol=2e-4)


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
  normed = family.startswith('qwen3') or family in ('gemma3_text', 'olmo2')
  assert ('bias' in attention['k'], 'q_norm' in attention) == (family.startswith('qwen2'), normed)
  experts = axes['layers'][0]['mlp'].get('experts')
  assert (experts is not None) == family.endswith('_moe')
  if experts:
    assert (experts['up']['kernel'], experts['down']['kernel']) == (('expert', 'mlp', 'embed'), ('expert', 'embed', 'mlp'))


def test_the_initial_norms_of_a_gemma_are_1():
  params = transformer.init_params(tiny('gemma3_text'), jax.random.key(0))
  assert not np.any(params['norm']['scale'])  # 1 is added to it
  assert set(params['layers'][0]) == {'attention', 'mlp', 'attention_norm', 'attention_out_norm', 'mlp_norm', 'mlp_out_norm'}


def test_initial_weights_have_their_dtype_and_standard_deviation():
  params = transformer.init_params(tiny('qwen2'), jax.random.key(0), jnp.bfloat16, scale=0.5)
  layer = params['layers'][0]
  assert np.all(layer['attention_norm']['scale'] == 1)
  assert not np.any(layer['attention']['q']['bias'])
  assert layer['mlp']['up']['kernel'].dtype == jnp.bfloat16
  assert abs(float(layer['mlp']['up']['kernel'].astype(jnp.float32).std()) - 0.5) < 0.02


def test_a_tied_head_is_the_embedding():
  _, tied = small.model('qwen2')
  _, free = small.model('llama')
  assert transformer.head_weight(tied) is tied['embed']
  np.testing.assert_array_equal(transformer.head_weight(free), free['head']['kernel'])


def test_a_token_sees_no_later_token():
  config, params = small.model()
  tokens = np.arange(3, 3 + T)[None]
  changed = tokens.copy()
  changed[0, 5] = 99
  before, after = run(config, params, tokens), run(config, params, changed)
  np.testing.assert_array_equal(before[:, :5], after[:, :5])
  assert np.all(np.any(np.asarray(before[0, 5:] != after[0, 5:]), axis=-1))


@pytest.mark.parametrize('side', ['left', 'right'])
def test_padding_has_no_influence(side):
  config, params = small.model()
  n, ids = T - 3, np.arange(20, 20 + T - 3)
  here = slice(3, None) if side == 'left' else slice(n)

  def padded(pad):
    tokens, positions, segments = np.full((1, T), pad), np.zeros((1, T), np.int64), np.zeros((1, T), np.int32)
    tokens[0, here], positions[0, here], segments[0, here] = ids, np.arange(n), 1
    return run(config, params, tokens, segments, positions)[0, here]

  np.testing.assert_allclose(padded(7), by_hand(config, params, ids), atol=2e-4)
  np.testing.assert_array_equal(padded(7), padded(207))


def test_activations_have_the_requested_dtype():
  config, params = small.model()
  narrow = run(config, params, np.arange(3, 3 + T)[None], dtype=jnp.bfloat16)
  wide = run(config, params, np.arange(3, 3 + T)[None])
  assert narrow.dtype == jnp.bfloat16
  assert 0 < float(jnp.abs(narrow - wide).mean()) < 0.05


# --- recomputation ---------------------------------------------------------------------------------------------------


@functools.cache
def compiled_gradient(family, remat):
  """Return (params, compiled gradient of the sum of the hidden states' sines) for 64 tokens and one layer."""
  config, params = small.model(family, num_hidden_layers=1)
  tokens = jnp.arange(3, 67)[None]

  def value(params):
    attention, positions = PackedAttention.of(jnp.ones_like(tokens)), jnp.arange(64)[None]
    return jnp.sum(
      jnp.sin(transformer.forward(transformer.graph(config), params, tokens, positions, attention, remat=remat).hidden)
    )

  return params, jax.jit(jax.grad(value)).lower(params).compile()


@pytest.mark.parametrize(('family', 'remat'), [('llama', 'dots'), ('llama', 'layer'), ('qwen3_moe', 'layer')])
def test_recomputation_changes_no_gradient(family, remat):
  params, saved = compiled_gradient(family, 'none')
  _, recomputed = compiled_gradient(family, remat)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, saved(params), recomputed(params))


def test_matrix_products_are_recomputed_with_remat_layer_only():
  flops = {remat: compiled_gradient('llama', remat)[1].cost_analysis()['flops'] for remat in ('none', 'dots', 'layer')}
  params = compiled_gradient('llama', 'none')[0]
  weights = jax.tree_util.tree_flatten_with_path(params['layers'])[0]
  # The output of the layer's last product is added to the stream, and no gradient needs it.
  products = 2 * 64 * sum(w.size for path, w in weights if w.ndim == 2 and 'down' not in jax.tree_util.keystr(path))
  assert flops['dots'] - flops['none'] < 0.5 * products  # the products of attention
  assert flops['layer'] - flops['dots'] == pytest.approx(products, rel=0.1)


@pytest.mark.parametrize('remat', ['none', 'layer', pytest.param('dots', marks=pytest.mark.slow)])
def test_experts_are_chosen_once_and_computed_once_in_each_direction(remat):
  text = compiled_gradient('qwen3_moe', remat)[1].as_text()
  assert len(re.findall(r' while\(', text)) == 2
  assert text.count('custom_call_target="TopK"') == 1
