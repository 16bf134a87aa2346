"""The KV cache against loops over lists: written slots, visible tokens, kept tokens, and updates in place."""

import dataclasses
from functools import partial

import eviction_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.cache.attend import CachedAttention, attend
from sprl.cache.compaction import compress
from sprl.cache.eviction import METHODS, eviction_window
from sprl.cache.kv_cache import KVCache, Step
from sprl.cache.layer import NEVER, LayerCache
from sprl.cache.layout import cache_layout
from sprl.config import Cache, Quant, Streaming
from sprl.models.attention import Attention
from sprl.models.config import tiny
from sprl.quant import fp8

DENSE, PLAIN, KV8 = Cache(), Quant(), Quant(sampler='kv8')
B, T, H, K, D = 3, 9, 4, 2, 4


def layout_of(cache=DENSE, layers=1, prompt=T, completion=19, D=D, dtype='float32', quant=PLAIN, record=False):
  config = tiny('llama', num_hidden_layers=layers, head_dim=D)
  return cache_layout(config, cache, quant, prompt, completion, dtype, record)


def tokens(T, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(B, T, n, D)), jnp.float32) for n in (H, K, K))


@partial(jax.jit, static_argnames='layer')
def prefill(cache, count, *qkv, layer=0):
  out, cache = attend(layer, cache, Step(count), *qkv)
  return out, cache.advance(Step(count))


@jax.jit
def decode(cache, *qkv):
  step = Step(jnp.ones(B, jnp.int32), decoding=True)
  out, cache = attend(0, cache, step, *qkv)
  return out, cache.advance(step)


# --- a dense cache ---------------------------------------------------------------------------------------------------


def causal(q, k, v):
  """Return the float64 output [H, D] of the last of T queries [T, H, D] over T keys and values [T, K, D]."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = []
  for h in range(H):
    weight = oracle.softmax([oracle.logit(q[-1, h], key) for key in k[:, h * K // H]])
    out.append(sum(w * value for w, value in zip(weight, v[:, h * K // H])))
  return np.array(out)


def test_pieces_of_a_sequence_give_the_outputs_of_the_whole_sequence():
  """Prompts have 9, 2 and 6 tokens, padded with other numbers. Two decode steps follow."""
  prompts, steps = [9, 2, 6], 2
  q, k, v = tokens(T + steps)
  keys, values = ([np.asarray(x[b, :n]) for b, n in enumerate(prompts)] for x in (k, v))
  out, cache = prefill(KVCache.empty(layout_of(), B), jnp.array(prompts), q[:, :T], k[:, :T], v[:, :T])
  for b, n in enumerate(prompts):
    for t in range(n):
      np.testing.assert_allclose(out[b, t], causal(q[b, : t + 1], keys[b][: t + 1], values[b][: t + 1]), atol=1e-6)
  for t in range(T, T + steps):
    new = tuple(x[:, t : t + 1] for x in (q, k, v))
    out, cache = decode(cache, *new)
    for b in range(B):
      keys[b], values[b] = np.concatenate([keys[b], new[1][b]]), np.concatenate([values[b], new[2][b]])
      np.testing.assert_allclose(out[b, 0], causal(q[b, t : t + 1], keys[b], values[b]), atol=1e-6)
  for name in ('length', 'seen'):
    assert getattr(cache, name).tolist() == [n + steps for n in prompts]
  assert cache.decoded.tolist() == [steps] * B


def test_new_tokens_are_appended_to_their_row_and_layer_only():
  layout = layout_of(layers=2)
  start = dataclasses.replace(KVCache.empty(layout, B), length=jnp.array([1, 3, 28]), seen=jnp.array([1, 3, 28]))
  q, k, v = tokens(T)
  _, cache = prefill(start, jnp.array([2, 0, 1]), q, k, v, layer=1)
  held = cache.layers[1]
  assert held.k.shape[2] == 28
  assert not np.any(cache.layers[0].k)
  for row, first in ((0, 1), (1, 3)):
    np.testing.assert_array_equal(held.k[row, :, first : first + T], jnp.swapaxes(k[row], 0, 1))
    np.testing.assert_array_equal(held.v[row, :, first : first + T], jnp.swapaxes(v[row], 0, 1))
    assert np.count_nonzero(np.any(np.asarray(held.k[row]), axis=(0, 2))) == T
  assert not np.any(held.k[2])  # a token beyond the last slot is dropped
  assert cache.length.tolist() == cache.seen.tolist() == [3, 3, 29]


def test_keys_are_stored_in_the_compute_dtype():
  layer = LayerCache.empty(layout_of(dtype='bfloat16'), 2, 3)
  assert layer.k.dtype == layer.v.dtype == jnp.bfloat16


def test_a_cache_and_a_step_are_an_attention_argument():
  attention = CachedAttention(KVCache.empty(layout_of(), B), Step(jnp.array([9, 2, 6])))
  assert isinstance(attention, Attention)
  out, after = jax.eval_shape(lambda attention: attention.attend(0, *tokens(T)), attention)
  assert out.shape == (B, T, H, D)
  assert jax.tree.structure(after) == jax.tree.structure(attention)


def test_forked_rows_are_copies_of_a_shorter_cache_without_old_values():
  """The cache has history, records and stored queries. No earlier value of a forked row remains."""
  layout = layout_of(Cache(method='gkv', budget=8, interval=3, window=3), record=True)
  rng = np.random.default_rng(0)

  def random(cache):
    return jax.tree.map(lambda x: jnp.asarray(rng.integers(2, 9, x.shape), x.dtype), cache)

  mine, prompts = random(KVCache.empty(layout, B)), random(KVCache.empty(layout, 2, T))
  parent, take = np.array([1, 0, 1]), np.array([True, False, True])
  forked = jax.device_get(jax.jit(KVCache.fork)(mine, prompts, jnp.array(parent), jnp.array(take)))
  empty = {'k': 0, 'v': 0, 'position': -1, 'carried': -1}
  for name in ('k', 'v', 'position', 'carried', 'queries', 'evicted'):
    got, old, new = (getattr(cache.layers[0], name) for cache in (forked, mine, prompts))
    for b in range(B):
      if not take[b]:
        np.testing.assert_array_equal(got[b], old[b])
      elif name in empty:
        np.testing.assert_array_equal(got[b][:, :T], new[parent[b]])
        assert np.all(got[b][:, T:] == empty[name])
      else:
        np.testing.assert_array_equal(got[b], new[parent[b]])
  for name in ('length', 'seen', 'decoded', 'saturated', 'saturated_queries'):
    got, old, new = (np.asarray(getattr(cache, name)) for cache in (forked, mine, prompts))
    np.testing.assert_array_equal(got, np.where(take.reshape(-1, *[1] * (got.ndim - 1)), new[parent], old))


# --- sizes and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('prompt', 'completion', 'cache', 'S'),
  [
    (300, 4096, Cache(budget=512, interval=128), 640),
    (700, 4096, Cache(budget=512, interval=128), 640),  # a longer prompt needs no more: it is compressed
    (300, 300, Cache(budget=512, interval=128), 600),  # never more than the whole sequence
    (300, 4096, Cache(), 4396),
  ],
)
@pytest.mark.parametrize('quant', [PLAIN, KV8], ids=lambda q: q.sampler)
def test_slots_and_bytes_follow_the_layout(prompt, completion, cache, S, quant):
  layout = layout_of(cache, layers=2, prompt=prompt, completion=completion, dtype='bfloat16', quant=quant)
  held = jax.eval_shape(lambda: KVCache.empty(layout, 3)).layers
  assert [layer.k.shape for layer in held] == [layer.v.shape for layer in held] == [(3, 2, S, 4)] * 2
  itemsize = 1 if quant.sampler == 'kv8' else 2
  assert layout.kv_bytes(3) == sum(x.size * x.dtype.itemsize for layer in held for x in (layer.k, layer.v))
  assert layout.kv_bytes(3) == 2 * 2 * 3 * 2 * S * 4 * itemsize
  assert layout.dense_bytes(3) == 2 * 2 * 3 * 2 * (prompt + completion) * 4 * 2


def test_a_donated_decode_step_writes_in_place():
  rows, layout = 4, layout_of(layers=2, D=16, completion=503)
  cache = jax.eval_shape(lambda: KVCache.empty(layout, rows))
  q, k, v = (jax.ShapeDtypeStruct((rows, 1, n, 16), jnp.float32) for n in (H, K, K))

  def step(cache, q, k, v):
    step = Step(jnp.ones(rows, jnp.int32), decoding=True)
    for layer in range(2):
      q, cache = attend(layer, cache, step, q, k, v)
    return q, cache.advance(step)

  memory = jax.jit(step, donate_argnums=0).lower(cache, q, k, v).compile().memory_analysis()
  held = layout.kv_bytes(rows)
  assert memory.alias_size_in_bytes >= held
  assert memory.temp_size_in_bytes < held / 4


@pytest.mark.parametrize(
  ('method', 'quant'),
  [('rkv', PLAIN), ('keydiff', KV8), ('h2o', PLAIN)],
  ids=['rkv', 'keydiff, FP8', 'h2o'],
)
def test_a_compression_needs_little_memory_beside_the_cache(method, quant):
  rows = 64 if quant.sampler == 'kv8' else 32  # scores are float32 for keys of any dtype
  settings = Cache(method=method, budget=64, interval=32)
  layout = layout_of(settings, layers=12, prompt=64, completion=1000, D=64, quant=quant, record=True)
  layer = jax.eval_shape(lambda: LayerCache.empty(layout, rows, layout.slots))
  due, number = jax.ShapeDtypeStruct((rows,), bool), jax.ShapeDtypeStruct((rows,), jnp.int32)

  def compressed(layer, due, occupied, now):
    keys = (lambda row: fp8.decast(row.keys, jnp.float32(1))) if layout.fp8 else (lambda row: row.keys)
    return compress(layout, layer, due, occupied=occupied, newest=now, gone=now, keys=keys)[0]

  compiled = jax.jit(compressed, donate_argnums=0).lower(layer, due, number, number).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes > layout.kv_bytes(rows) / 12
  beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  assert beside <= 0.15 * KVCache.bytes(layout, rows)
  if layout.fp8:  # XLA's CPU backend moves FP8 numbers as float16, whole arrays at a time, but bytes as they are
    assert f'u8[{rows},2,{layout.slots},64]' in compiled.as_text()
    assert f'f16[{rows},2,{layout.slots},64]' not in compiled.as_text()


# --- when rows are compressed, without a network ---------------------------------------------------------------------


def attended(layout, prompts, steps):
  """Return the number of slots [steps, rows] that each decode step attends to, from the cache's own counts."""
  cache = KVCache.empty(layout, len(prompts)).advance(Step(jnp.array(prompts)))

  @jax.jit
  def run(cache):
    def one(cache, active):
      step = Step(active, decoding=True)
      return cache.advance(step), cache.attended(step)

    return jax.lax.scan(one, cache, jnp.asarray(steps, jnp.int32))

  cache, seen = run(cache)
  return np.asarray(seen), cache


def test_attended_slots_of_the_worked_example():
  """docs/methods/sparse.md, eq. 6: prompt 300, budget 512, interval 128."""
  layout = layout_of(Cache(budget=512, interval=128, method='streaming'), prompt=300, completion=4096)
  every, _ = attended(layout, [300], np.ones((4096, 1)))
  for steps, mean, saving in ((1200, 542.5, 39.8), (4096, 566.3, 75.9)):
    seen, whole = every[:steps], 300 + np.arange(1, steps + 1)
    assert seen.max() == 639
    assert round(float(seen.mean()), 1) == mean
    assert round(100 * (1 - float(seen.sum()) / whole.sum()), 1) == saving
  first = 212 + 44  # the first compression is at the first multiple of 128 after 212 tokens
  np.testing.assert_array_equal(every[: first - 1, 0], whole[: first - 1])
  assert every[first - 1, 0] == 512


def test_each_row_counts_its_own_steps_through_pauses():
  budget, interval, prompts, steps = 10, 4, [3, 12, 10, 7], 60
  active = np.random.default_rng(0).random((steps, 4)) < [1.0, 0.7, 0.5, 0.9]
  layout = layout_of(Cache(budget=budget, interval=interval, method='keydiff', window=2), prompt=12, completion=steps)
  seen, cache = attended(layout, prompts, active)
  for row, n in enumerate(prompts):
    n, count = min(n, budget), 0  # the longer prompts are compressed when they are read
    for t in range(steps):
      if not active[t, row]:
        continue
      count, n = count + 1, n + 1
      n = budget if count % interval == 0 and n > budget else n
      assert seen[t, row] == n
      assert n <= layout.slots
    assert (cache.length[row], cache.seen[row], cache.decoded[row]) == (n, prompts[row] + count, count)


@pytest.mark.parametrize('settings', [DENSE, Cache(method='h2o', budget=8, interval=3, window=2)], ids=['dense', 'h2o'])
def test_a_row_without_a_token_attends_to_nothing(settings):
  """Its output is zero, its state stays, and the other rows have the outputs and counts that they have beside a running row."""
  cache = KVCache.empty(layout_of(settings), B)
  _, cache = prefill(cache, jnp.array([9, 5, 7]), *tokens(T))
  new = tuple(x[:, :1] for x in tokens(T, seed=1))
  counts = []
  for active in ([1, 1, 1], [1, 0, 1]):
    step = Step(jnp.array(active), decoding=True)
    out, after = attend(0, cache, step, *new)
    counts.append((np.asarray(cache.attended(step)), np.asarray(out), jax.device_get(after.advance(step))))
  (seen, out, running), (seen_beside, out_beside, waiting) = counts
  np.testing.assert_array_equal(seen_beside, np.where([True, False, True], seen, 0))
  np.testing.assert_array_equal(out_beside, np.where(np.array([True, False, True])[:, None, None, None], out, 0))
  assert np.abs(out).min(axis=(1, 2, 3)).all()
  for name in ('length', 'seen', 'decoded'):
    expected = np.where([True, False, True], getattr(running, name), getattr(cache, name))
    np.testing.assert_array_equal(getattr(waiting, name), expected)


def test_a_step_that_compresses_nothing_is_a_step_in_which_no_row_is_due():
  """Without `compresses` a step computes the same, as long as no row is due."""
  cache = KVCache.empty(layout_of(Cache(method='h2o', budget=8, interval=3, window=2)), B)
  _, cache = prefill(cache, jnp.array([9, 5, 7]), *tokens(T))
  for t in range(2):
    new, step = tuple(x[:, t : t + 1] for x in tokens(T, seed=1)), Step(jnp.array([1, 1, t]), decoding=True)
    assert not cache.due(step).any()
    plain = dataclasses.replace(step, compresses=False)
    (out, after), (plainly, same) = attend(0, cache, step, *new), attend(0, cache, plain, *new)
    np.testing.assert_array_equal(plainly, out)
    jax.tree.map(np.testing.assert_array_equal, same.advance(plain), after.advance(step))
    cache = after.advance(step)
  assert cache.due(Step(jnp.ones(B, jnp.int32), decoding=True)).tolist() == [True, False, False]


# --- kept tokens: the whole cache against loops ----------------------------------------------------------------------


class Loops:
  """One kv head of one row of a layer, as lists in float64."""

  def __init__(self, settings, group):
    self.settings, self.a, self.group = settings, eviction_window(settings), group
    self.k, self.v, self.position, self.carried, self.queries, self.count, self.gone = [], [], [], [], [], 0, {}

  def prefill(self, q, k, v):
    for x in zip(q, k, v):
      self.append(*x)
      self.attend(x[0])
    if len(self.k) > self.settings.budget:
      self.compress(len(self.queries))  # all queries of the prompt have attended to all of it

  def append(self, q, k, v):
    self.k.append(k)
    self.v.append(v)
    self.position.append(len(self.queries))
    self.carried.append(0.0 if self.settings.method == 'h2o' else -1.0)
    self.queries.append(q)

  def attend(self, q):
    weights = [oracle.softmax([oracle.logit(head, key) for key in self.k]) for head in q]
    if self.settings.method == 'h2o':
      self.carried = [c + sum(w[i] for w in weights) / len(weights) for i, c in enumerate(self.carried)]
    return np.array([sum(w * v for w, v in zip(row, self.v)) for row in weights])

  def step(self, q, k, v):
    """Return (output, kept slots), with None for the slots if this step does not compress."""
    self.append(q, k, v)
    self.count += 1
    due = self.count % self.settings.interval == 0 and len(self.k) > self.settings.budget
    kept = self.compress(len(self.queries) - 1) if due else None
    return self.attend(q), kept

  def compress(self, gone):
    n, a, settings = len(self.k), self.a, self.settings
    at = range(max(0, len(self.queries) - a), len(self.queries))
    q = np.array([[self.queries[p][h] for p in at] for h in range(self.group)])
    score, carried = oracle.score(settings.method, np.array(self.k), self.position, q, [*at], self.carried, a, settings)
    best = sorted(range(n - a), key=lambda i: (-score[i], i))[: settings.budget - a]
    kept = [*sorted(best), *range(n - a, n)]
    if settings.method == 'gkv':
      self.carried = [*carried, *[-1.0] * a]
    self.gone |= {self.position[i]: gone for i in range(n) if i not in kept}
    for name in ('k', 'v', 'position', 'carried'):
      setattr(self, name, [getattr(self, name)[i] for i in kept])
    return kept


@pytest.mark.parametrize('method', METHODS)
def test_ragged_rows_keep_the_slots_and_return_the_outputs_of_loops(method):
  """The prompt of the first row exceeds the budget, and has more tokens than a row has slots."""
  steps, prompts = 19, [14, 2, 6]
  settings = Cache(method=method, budget=8, interval=3, streaming=Streaming(2), window=None if method == 'h2o' else 3)
  layout = layout_of(settings, prompt=14, completion=steps, record=True)
  q, k, v = tokens(14, seed=3)
  _, cache = prefill(KVCache.empty(layout, B, 14), jnp.array(prompts), q, k, v)
  assert cache.layers[0].k.shape[2] == layout.slots == 8 + 3
  loops = [[Loops(settings, H // K) for _ in range(K)] for _ in range(B)]
  for b, h in np.ndindex(B, K):
    mine = slice(h * 2, h * 2 + 2)
    loops[b][h].prefill(*(np.asarray(x[b, : prompts[b]], np.float64) for x in (q[:, :, mine], k[:, :, h], v[:, :, h])))
  compressions = 0
  for t in range(steps):
    q, k, v = tokens(1, seed=100 + t)
    out, cache = decode(cache, q, k, v)
    (out, (q, k, v)), held = jax.device_get((out, (q, k, v))), jax.device_get(cache.layers[0])
    for b, h in np.ndindex(B, K):
      mine = slice(h * 2, h * 2 + 2)
      expected, kept = loops[b][h].step(*(np.asarray(x, np.float64) for x in (q[b, 0, mine], k[b, 0, h], v[b, 0, h])))
      compressions += kept is not None
      np.testing.assert_allclose(out[b, 0, mine], expected, atol=1e-5)
      n = len(loops[b][h].k)
      assert held.position[b, h, :n].tolist() == loops[b][h].position
      if kept is not None:
        assert set(held.position[b, h, n:].tolist()) == {-1}
      np.testing.assert_array_equal(held.k[b, h, :n], np.float32(loops[b][h].k))
      np.testing.assert_array_equal(held.v[b, h, :n], np.float32(loops[b][h].v))
      if held.carried is not None:
        np.testing.assert_allclose(held.carried[b, h, :n], loops[b][h].carried, atol=1e-5)
  assert compressions >= 3 * B * K
  assert any(gone == 14 for gone in loops[0][0].gone.values())  # evicted with the prompt
  assert cache.length.tolist() == [len(row[0].k) for row in loops]
  for b, h in np.ndindex(B, K):
    gone = [loops[b][h].gone.get(p, NEVER) for p in range(prompts[b] + steps)]
    assert held.evicted[b, h, : prompts[b] + steps].tolist() == gone
    assert np.all(np.diff(loops[b][h].position) > 0)  # kept tokens stay in the order of their positions
