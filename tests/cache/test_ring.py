"""Layers with a sliding window: the slots of their ring, and their outputs against windowed attention in numpy."""

import dataclasses

import eviction_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.cache import ring
from sprl.cache.attend import attend
from sprl.cache.kv_cache import KVCache, Step
from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import Cache, Quant, SettingsError
from sprl.models.config import tiny
from sprl.quant import fp8

B, H, K, D, WINDOW = 3, 4, 2, 4, 5
PROMPTS, T, GIVEN, STEPS = (9, 2, 5), 9, (4, 1, 0), 7  # lengths of the rows: some end before the window, some wrap twice
SPARSE = Cache(method='streaming', budget=6, interval=3, window=1)


def layout_of(cache=Cache(), quant=Quant(), types=None, window=WINDOW, prompt=T, completion=12, record=False):  # noqa: B008
  layers = types or ['sliding_attention', 'full_attention']
  config = tiny('gemma3_text', num_hidden_layers=len(layers), layer_types=layers, sliding_window=window, head_dim=D)
  return cache_layout(config, cache, quant, prompt, completion, 'float32', record)


def layer_step(layer, decoding):
  def step(cache, count, *qkv):
    out, cache = attend(layer, cache, Step(count, decoding), *qkv)
    return out, cache.advance(Step(count, decoding))

  return jax.jit(step)


def windowed(q, k, v, window=WINDOW):
  """Return the float64 output [H, D] of the last of T queries [T, H, D], which sees the newest `window` of T keys and values."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = []
  for h in range(H):
    kv = h * K // H
    weight = oracle.softmax([oracle.logit(q[-1, h], key) for key in k[-window:, kv]])
    out.append(sum(w * value for w, value in zip(weight, v[-window:, kv])))
  return np.array(out)


def tokens(n, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(B, n, heads, D)), jnp.float32) for heads in (H, K, K))


def test_slots_hold_the_newest_positions():
  assert ring.positions(jnp.array([6, 2, 0]), 4, 4).tolist() == [[4, 5, 2, 3], [0, 1, -2, -1], [-4, -3, -2, -1]]


def test_tokens_overwrite_those_that_no_later_query_sees_and_padding_is_dropped():
  """One head of width 1. The rows have read 6, 2 and 0 tokens; 2, 0 and 6 of the 6 new ones are real."""
  held = jnp.array([[4, 5, 2, 3], [0, 1, 9, 9], [9, 9, 9, 9]])[:, None, :, None]
  new = jnp.array([[6, 7, 0, 0, 0, 0], [0] * 6, [0, 1, 2, 3, 4, 5]])[:, :, None, None]
  after = ring.write(held, new, jnp.array([6, 2, 0]), jnp.array([2, 0, 6]), 4)
  assert after[:, 0, :, 0].tolist() == [[4, 5, 6, 7], [0, 1, 9, 9], [4, 5, 2, 3]]


@pytest.mark.parametrize('cache', [Cache(), SPARSE], ids=['dense', 'sparse'])
def test_pieces_of_a_sequence_give_the_outputs_of_windowed_attention(cache):
  """A padded prompt, several given tokens at once, then decode steps. A budget does not change a layer with a window."""
  held = KVCache.empty(layout_of(cache), B)
  keys, values = ([np.zeros((0, K, D))] * B for _ in range(2))
  pieces = [(T, PROMPTS, False), (4, GIVEN, True), *[(1, (1, 1, 1), True)] * STEPS]
  for seed, (n, counts, decoding) in enumerate(pieces):
    q, k, v = tokens(n, seed)
    out, held = layer_step(0, decoding)(held, jnp.array(counts), q, k, v)
    for b, count in enumerate(counts):
      for t in range(count):
        keys[b], values[b] = np.concatenate([keys[b], k[b, t : t + 1]]), np.concatenate([values[b], v[b, t : t + 1]])
        np.testing.assert_allclose(out[b, t], windowed(q[b, : t + 1], keys[b], values[b]), atol=1e-6)
  assert held.seen.tolist() == [p + g + STEPS for p, g in zip(PROMPTS, GIVEN)]
  assert held.layers[0].k.shape == (B, K, WINDOW, D)


def test_a_row_without_a_new_token_keeps_its_ring():
  q, k, v = tokens(T)
  _, held = layer_step(0, False)(KVCache.empty(layout_of(), B), jnp.array(PROMPTS), q, k, v)
  _, after = layer_step(0, True)(held, jnp.array([0, 0, 1]), *tokens(1, seed=1))
  for b in (0, 1):
    np.testing.assert_array_equal(after.layers[0].k[b], held.layers[0].k[b])
  assert np.any(np.asarray(after.layers[0].k[2]) != held.layers[0].k[2])


def test_a_row_starts_on_a_prompt_whose_cache_is_shorter_than_the_window():
  """The ring of the prompts has 3 slots. After the fork the row fills the window and wraps."""
  layout = layout_of(prompt=3, completion=12)
  q, k, v = tokens(3 + 8)
  prompts = KVCache.empty(layout, B, 3)
  assert [layer.k.shape[2] for layer in prompts.layers] == [3, 3]
  _, prompts = layer_step(0, False)(prompts, jnp.array([3, 2, 3]), *(x[:, :3] for x in (q, k, v)))
  held = KVCache.empty(layout, B).fork(prompts, jnp.array([2, 0, 0]), jnp.array([True, False, True]))
  keys, values = ([np.asarray(x[b, :3]) for b in (2, 0, 0)] for x in (k, v))
  for t in range(3, 11):
    new = tuple(x[:, t : t + 1] for x in (q, k, v))
    out, held = layer_step(0, True)(held, jnp.array([1, 0, 1]), *new)
    for b in (0, 2):
      keys[b], values[b] = np.concatenate([keys[b], new[1][b]]), np.concatenate([values[b], new[2][b]])
      np.testing.assert_allclose(out[b, 0], windowed(new[0][b], keys[b], values[b]), atol=1e-6)


def test_an_fp8_ring_gives_the_outputs_of_rounded_keys_and_values():
  scales = Scales(*(jnp.full(2, 0.02) for _ in range(3)))
  held = KVCache.empty(layout_of(quant=Quant(sampler='kv8')), B, scales=scales)
  q, k, v = tokens(T + 3)
  _, held = layer_step(0, False)(held, jnp.full(B, T), *(x[:, :T] for x in (q, k, v)))
  assert held.layers[0].k.dtype == jnp.uint8
  rounded = tuple(fp8.fake(x, jnp.float32(0.02)) for x in (k, v))
  out = None
  for t in range(T, T + 3):
    out, held = layer_step(0, True)(held, jnp.ones(B, jnp.int32), *(x[:, t : t + 1] for x in (q, k, v)))
  assert out is not None
  for b in range(B):
    np.testing.assert_allclose(out[b, 0], windowed(q[b], *(x[b] for x in rounded)), atol=1e-5)
  assert np.sum(held.saturated) == np.sum(np.abs(np.concatenate([k, v])) > 448 * 0.02)


def test_bytes_count_the_slots_of_each_layer():
  types = ['sliding_attention', 'sliding_attention', 'full_attention']
  dense, sparse = layout_of(types=types), layout_of(SPARSE, types=types, record=True)
  assert [dense.slots_of(layer) for layer in range(3)] == [5, 5, 21]
  assert [sparse.slots_of(layer) for layer in range(3)] == [5, 5, 9]
  assert dense.full_layers == (2,)
  for layout in (dense, sparse):
    empty = KVCache.empty(layout, B)
    assert layout.kv_bytes(B) == sum(layer.k.nbytes + layer.v.nbytes for layer in empty.layers)
    assert KVCache.bytes(layout, B) == sum(x.nbytes for x in jax.tree.leaves(empty))
    assert layout.dense_bytes(B) == 2 * B * K * D * 4 * (5 + 5 + 21)
  assert [layer.position is None for layer in KVCache.empty(sparse, B).layers] == [True, True, False]
  assert [layer.evicted is None for layer in KVCache.empty(sparse, B).layers] == [True, True, False]


def test_a_window_longer_than_any_sequence_needs_no_more_slots_than_tokens():
  assert layout_of(window=100).slots_of(0) == 21


def test_with_scope_global_the_first_layer_without_a_window_chooses():
  types = ['sliding_attention', 'full_attention', 'full_attention']
  layout = layout_of(dataclasses.replace(SPARSE, scope='global'), types=types)
  held, step = KVCache.empty(layout, B), Step(jnp.full(B, T))
  for layer in range(3):
    _, held = attend(layer, held, step, *tokens(T, layer))
  assert held.chosen is not None
  assert held.chosen.tolist() == [[0, 1, 2, 3, 7, 8]] * B  # four sinks and the newest
  assert (
    held.layers[1].position[:, :, :6].tolist() == held.layers[2].position[:, :, :6].tolist() == [[[0, 1, 2, 3, 7, 8]] * K] * B
  )


def test_a_budget_needs_a_layer_that_evicts():
  with pytest.raises(
    SettingsError, match=r'config.cache.budget = 6: expected None: every layer of the model has a sliding window'
  ):
    layout_of(SPARSE, types=['sliding_attention'])


def test_a_donated_decode_step_writes_the_ring_in_place():
  rows, layout = 64, layout_of(types=['sliding_attention'] * 2, window=256, completion=1000)
  cache = jax.eval_shape(lambda: KVCache.empty(layout, rows))
  q, k, v = (jax.ShapeDtypeStruct((rows, 1, n, D), jnp.float32) for n in (H, K, K))

  def step(cache, q, k, v):
    step = Step(jnp.ones(rows, jnp.int32), decoding=True)
    for layer in range(2):
      q, cache = attend(layer, cache, step, q, k, v)
    return q, cache.advance(step)

  memory = jax.jit(step, donate_argnums=0).lower(cache, q, k, v).compile().memory_analysis()
  assert memory.alias_size_in_bytes >= layout.kv_bytes(rows)
  assert memory.temp_size_in_bytes < layout.kv_bytes(rows) / 2  # float32 scores of the heads, whose width is only 4
