"""The KV cache: who is written where, who sees what, who is kept, and that all of it happens in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scores_oracle as oracle

from sprl.cache.evict import compress
from sprl.cache.kv_cache import KVCache
from sprl.cache.layer import Layer
from sprl.cache.scores import window
from sprl.models.config import tiny
from sprl.models.memory import CausalMemory, Memory
from sprl.sampler.cache_plan import cache_plan
from sprl.settings import Cache, Quant

DENSE, BF16 = Cache(), Quant()


def plan_of(cache=DENSE, layers=1, prompt=8, completion=32, D=4, dtype='float32', quant=BF16, record=False):
  config = tiny('llama', num_hidden_layers=layers, head_dim=D)
  return cache_plan(config, cache, quant, prompt, completion, dtype, record)


def tokens(T, B=2, H=4, K=2, D=4, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(B, T, n, D)), jnp.float32) for n in (H, K, K))


@jax.jit
def prefill(cache, count, *qkv):
  out, cache = cache.expecting(count).attend(0, *qkv)
  return out, cache.advance()


@jax.jit
def step(cache, *qkv):
  out, cache = cache.expecting(jnp.ones(qkv[0].shape[0], jnp.int32)).attend(0, *qkv)
  return out, cache.advance(decoding=True)


def started(plan, prefilled, rows):
  """Row b a copy of row b of a prefilled cache."""
  return jax.jit(lambda other: KVCache.empty(plan, rows).fork(other, jnp.arange(rows), jnp.ones(rows, bool)))(prefilled)


def filled(cache, *count):
  """The cache with so many tokens in its rows, whatever they are."""
  return cache.expecting(jnp.array(count)).advance()


def test_a_new_token_goes_behind_the_row_s_length():
  cache = filled(KVCache.empty(plan_of(layers=2), 2, 6), 1, 3)
  q, k, v = tokens(2)
  _, cache = cache.expecting(jnp.array([2, 0])).attend(1, q, k, v)
  assert cache.layers[1].k.shape[2] == 6
  assert not np.any(cache.layers[0].k)  # the other layer's
  held = cache.layers[1]
  for row, start in ((0, 1), (1, 3)):
    np.testing.assert_array_equal(held.k[row, :, start : start + 2], jnp.swapaxes(k[row], 0, 1))
    np.testing.assert_array_equal(held.v[row, :, start : start + 2], jnp.swapaxes(v[row], 0, 1))
    assert np.count_nonzero(np.any(np.asarray(held.k[row]), axis=(0, 2))) == 2
  for name in ('length', 'seen'):
    np.testing.assert_array_equal(getattr(cache, name), [1, 3])
    np.testing.assert_array_equal(getattr(cache.advance(), name), [3, 3])


def test_a_sequence_in_pieces_gets_the_answers_of_the_sequence_whole():
  q, k, v = tokens(7)
  whole, _ = CausalMemory.of(jnp.ones((2, 7), jnp.int32)).attend(0, q, k, v)
  out, cache = prefill(KVCache.empty(plan_of(), 2, 8), jnp.array([4, 4]), q[:, :4], k[:, :4], v[:, :4])
  pieces = [out]
  for t in (4, 5, 6):
    out, cache = step(cache, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
    pieces.append(out)
  np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=1e-6)


def test_padding_written_behind_the_length_is_overwritten_and_never_seen():
  q, k, v = tokens(5)
  empty, count = KVCache.empty(plan_of(), 2, 8), jnp.array([3, 5])  # row 0: two tokens of padding
  _, padded = prefill(empty, count, q, k, v)
  _, other = prefill(empty, count, q, k.at[0, 3:].set(9.0), v.at[0, 3:].set(9.0))
  new = tokens(1, seed=1)
  a, b = (step(cache, *new)[0] for cache in (padded, other))
  np.testing.assert_array_equal(a, b)


def test_a_token_beyond_the_last_slot_is_dropped():
  cache = filled(KVCache.empty(plan_of(), 2, 3), 3, 2)
  _, after = cache.expecting(jnp.array([1, 1])).attend(0, *tokens(1))
  assert not np.any(after.layers[0].k[0])
  assert np.any(after.layers[0].k[1, :, 2])


def test_rows_start_as_copies_of_a_shorter_cache_s_rows():
  mine = jax.tree.map(lambda x: x + 1, KVCache.empty(plan_of(), 3, 6))
  q, k, v = tokens(4)
  _, prompts = prefill(KVCache.empty(plan_of(), 2, 4), jnp.array([4, 2]), q, k, v)
  forked = mine.fork(prompts, jnp.array([1, 0, 1]), jnp.array([True, False, True]))
  np.testing.assert_array_equal(forked.length, [2, 1, 2])
  np.testing.assert_array_equal(forked.seen, [2, 1, 2])
  np.testing.assert_array_equal(forked.count, [0, 1, 0])
  held, theirs = forked.layers[0], prompts.layers[0]
  for row in (0, 2):
    np.testing.assert_array_equal(held.k[row, :, :4], theirs.k[1])
    np.testing.assert_array_equal(held.v[row, :, :4], theirs.v[1])
  np.testing.assert_array_equal(held.k[1], mine.layers[0].k[1])


@pytest.mark.parametrize('method', ['h2o', 'gkv'])
def test_a_row_that_starts_again_remembers_nothing_of_its_last_tenant(method):
  plan = plan_of(Cache(method=method, budget=4, interval=2, window=2), record=True)
  used = jax.tree.map(lambda x: x + 1, KVCache.empty(plan, 2))
  q, k, v = tokens(3)
  _, prompts = prefill(KVCache.empty(plan, 2, 4), jnp.array([3, 2]), q, k, v)
  fresh, again = (c.fork(prompts, jnp.array([1, 0]), jnp.array([True, True])) for c in (KVCache.empty(plan, 2), used))
  jax.tree.map(np.testing.assert_array_equal, again.layers, fresh.layers)
  np.testing.assert_array_equal(again.layers[0].position[:, :, 4:], -1)
  np.testing.assert_array_equal(again.layers[0].carried[:, :, 4:], 0.0 if method == 'h2o' else -1.0)
  for name in ('length', 'seen', 'count'):
    np.testing.assert_array_equal(getattr(again, name), getattr(fresh, name))


def test_keys_are_stored_in_the_cache_s_dtype():
  cache = KVCache.empty(plan_of(dtype='bfloat16'), 2, 3).expecting(jnp.array([1, 1]))
  _, after = cache.attend(0, *(x.astype(jnp.bfloat16) for x in tokens(1)))
  assert after.layers[0].k.dtype == after.layers[0].v.dtype == jnp.bfloat16
  assert isinstance(after, Memory)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('prompt', 'completion', 'cache', 'S'),
  [
    (300, 4096, Cache(budget=512, interval=128), 640),
    (700, 4096, Cache(budget=512, interval=128), 828),
    (300, 300, Cache(budget=512, interval=128), 600),  # never more than the whole sequence
    (300, 4096, Cache(), 4396),
  ],
)
@pytest.mark.parametrize('quant', [Quant(), Quant(sampler='kv8')], ids=lambda q: q.sampler)
def test_slots_and_bytes_are_what_the_plan_says(prompt, completion, cache, S, quant):
  plan = plan_of(cache, layers=2, prompt=prompt, completion=completion, dtype='bfloat16', quant=quant)
  held = jax.eval_shape(lambda: KVCache.empty(plan, 3)).layers
  assert [layer.k.shape for layer in held] == [layer.v.shape for layer in held] == [(3, 2, S, 4)] * 2
  itemsize = 1 if quant.sampler == 'kv8' else 2
  assert plan.bytes(3) == sum(x.size * x.dtype.itemsize for layer in held for x in (layer.k, layer.v))
  assert plan.bytes(3) == 2 * 2 * 3 * 2 * S * 4 * itemsize
  assert plan.dense_bytes(3) == 2 * 2 * 3 * 2 * (prompt + completion) * 4 * 2


def test_the_first_layers_can_be_left_whole():
  plan = plan_of(Cache(budget=16, interval=4, dense_layers=1), layers=3, prompt=8, completion=100)
  held = KVCache.empty(plan, 2).layers
  assert [layer.k.shape[2] for layer in held] == [108, 20, 20]
  assert plan.bytes(2) == sum(layer.k.nbytes + layer.v.nbytes for layer in held)
  assert [layer.position is None for layer in held] == [True, False, False]


def test_a_donated_decode_step_writes_in_place():
  cache = KVCache.empty(plan_of(layers=2, D=16), 4, 512)
  q, k, v = tokens(1, B=4, D=16)

  def step(cache, q, k, v):
    cache = cache.expecting(jnp.ones(4, jnp.int32))
    for layer in range(2):
      q, cache = cache.attend(layer, q, k, v)
    return q, cache.advance(decoding=True)

  memory = jax.jit(step, donate_argnums=0).lower(cache, q, k, v).compile().memory_analysis()
  held = sum(layer.k.nbytes + layer.v.nbytes for layer in cache.layers)
  assert memory.alias_size_in_bytes >= held
  assert memory.temp_size_in_bytes < held / 4


@pytest.mark.parametrize(
  ('settings', 'quant'),
  [
    (Cache(method='rkv', scope='global'), Quant()),
    (Cache(method='h2o', scope='head'), Quant()),
    (Cache(method='keydiff', scope='layer'), Quant(sampler='kv8')),
  ],
  ids=lambda x: getattr(x, 'method', getattr(x, 'sampler', '')),
)
def test_eviction_takes_next_to_no_memory_beside_the_cache(settings, quant):
  settings = dataclasses.replace(settings, budget=64, interval=32, when='after')
  B = 64 if quant.sampler == 'kv8' else 32  # a block's scores are float32 whatever the keys are
  plan = plan_of(settings, layers=12, prompt=64, completion=1000, D=64, quant=quant, record=True)
  cache = jax.eval_shape(lambda: KVCache.empty(plan, B).expecting(jnp.ones(B, jnp.int32)))
  memory = jax.jit(lambda cache: cache.advance(decoding=True), donate_argnums=0).lower(cache).compile().memory_analysis()
  peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  assert memory.alias_size_in_bytes > plan.bytes(B)
  assert peak <= 1.15 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def test_the_compression_of_an_fp8_cache_widens_rows_and_not_the_cache():
  """XLA's CPU backend moves FP8 numbers as float16, whole arrays at a time; bytes it moves as they are."""
  B, quant = 64, Quant(sampler='kv8')
  plan = plan_of(Cache(budget=64, interval=32, window=8, method='snapkv'), prompt=64, completion=1000, D=64, quant=quant)
  layer, now = Layer.empty(plan, 0, B, 96), jnp.full(B, 95)
  compiled = jax.jit(lambda layer, due: compress(plan, layer, due, now + 1, now, now, jnp.float32(1))[0], donate_argnums=0)
  text = compiled.lower(layer, jnp.ones(B, bool)).compile().as_text()
  assert f'u8[{B},2,96,64]' in text
  assert f'f16[{B},2,96,64]' not in text


# --- bookkeeping, without a network ----------------------------------------------------------------------------------


def attended(plan, prompts, steps, slots=None):
  """[steps, B] slots that each decode step sees, by the cache's own bookkeeping."""
  cache = filled(KVCache.empty(plan, len(prompts), slots), *prompts)

  @jax.jit
  def run(cache):
    def step(cache, active):
      cache = cache.expecting(active)
      return cache.advance(decoding=True), cache.attended

    return jax.lax.scan(step, cache, jnp.asarray(steps, jnp.int32))

  cache, seen = run(cache)
  return np.asarray(seen), cache


@pytest.mark.parametrize(('steps', 'mean', 'saving'), [(1200, 542.5, 39.8), (4096, 566.3, 75.9)])
def test_a_row_of_the_spec_s_numbers_sees_as_much_as_the_spec_says(steps, mean, saving):
  """sparse_rollouts 10.3."""
  plan = plan_of(Cache(budget=512, interval=128, method='streaming'), prompt=300, completion=4096)
  seen, _ = attended(plan, [300], np.ones((steps, 1)))
  whole = 300 + np.arange(1, steps + 1)
  assert seen.max() == 639
  assert round(float(seen.mean()), 1) == mean
  assert round(100 * (1 - float(seen.sum()) / whole.sum()), 1) == saving
  early = 212 + 44  # until the first compression, at the first multiple of 128 behind 212 tokens, nothing is gone
  np.testing.assert_array_equal(seen[: early - 1, 0], whole[: early - 1])
  assert seen[early - 1, 0] == 512


@pytest.mark.parametrize('when', ['before', 'after'])
def test_rows_of_any_length_with_pauses_count_for_themselves(when):
  budget, interval, prompts, steps = 10, 4, [3, 12, 10, 7], 60
  active = np.random.default_rng(0).random((steps, 4)) < [1.0, 0.7, 0.5, 0.9]
  settings = Cache(budget=budget, interval=interval, method='keydiff', window=2, when=when)
  plan = plan_of(settings, prompt=12, completion=steps)
  seen, cache = attended(plan, prompts, active)
  for row, n in enumerate(prompts):
    count = 0
    for t in range(steps):
      if not active[t, row]:
        continue
      count, n = count + 1, n + 1
      due = count % interval == 0 and n > budget
      assert seen[t, row] == (budget if due and when == 'before' else n)
      n = budget if due else n
      assert n <= plan.slots(0)
    assert (cache.length[row], cache.seen[row], cache.count[row]) == (n, prompts[row] + count, count)


def test_counting_by_batch_starts_again_with_every_admission_but_never_overflows_a_row():
  """Two rows start again every third step, so that a count of 8 is never reached; then nobody comes any more."""
  settings = Cache(budget=10, interval=8, method='keydiff', window=2, trigger_scope='batch')
  plan = plan_of(settings, prompt=6, completion=200)
  S = plan.slots(0)
  assert S == 18
  fork = jax.jit(lambda cache, prompts: cache.fork(prompts, jnp.zeros(3, jnp.int32), jnp.array([True, True, False])))
  one = jax.jit(lambda cache: (cache.attended, cache.advance(decoding=True)))
  cache, prompts = filled(KVCache.empty(plan, 3), 5, 5, 5), filled(KVCache.empty(plan, 1, 6), 5)
  n, count, full, rung = [5, 5, 5], 0, 0, 0
  for t in range(60):
    if t % 3 == 0 and t < 40:
      cache, n[:2], count = fork(cache, prompts), [5, 5], 0
    due = [x + 1 > 10 and ((count + 1) % 8 == 0 or x + 1 == S) for x in n]
    full, rung, count = full + (n[2] + 1 == S), rung + sum(due[:2]), count + 1
    seen, cache = one(cache.expecting(jnp.ones(3, jnp.int32)))
    assert seen.tolist() == [10 if d else x + 1 for d, x in zip(due, n)]
    n = [10 if d else x + 1 for d, x in zip(due, n)]
    assert cache.length.tolist() == n
    assert max(n) < S
  assert full >= 3
  assert rung >= 3


# --- who is kept: the whole cache against loops ----------------------------------------------------------------------


class Loops:
  """One kv head of one row of a layer, as lists in float64."""

  def __init__(self, settings, group):
    self.settings, self.a, self.group = settings, window(settings), group
    self.k, self.v, self.position, self.carried, self.queries, self.count, self.gone = [], [], [], [], [], 0, {}

  def prefill(self, q, k, v):
    for x in zip(q, k, v):
      self.take_in(*x)
      self.attend(x[0])

  def take_in(self, q, k, v):
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

  def step(self, q, k, v, keep=None):
    """The answer, and the slots kept where this step compressed; `keep` are those that another head or layer chose."""
    self.take_in(q, k, v)
    self.count += 1
    due = self.count % self.settings.interval == 0 and len(self.k) > self.settings.budget
    if self.settings.when == 'after':
      out = self.attend(q)
      return out, self.compress(len(self.queries)) if due else None
    kept = self.compress(len(self.queries) - 1) if due else None
    return self.attend(q), kept

  def compress(self, gone):
    n, a, settings = len(self.k), self.a, self.settings
    at = range(max(0, len(self.queries) - a), len(self.queries))
    q = np.array([[self.queries[p][h] for p in at] for h in range(self.group)])
    score, carried = oracle.score(settings.method, np.array(self.k), self.position, q, [*at], self.carried, a, settings)
    best = sorted(range(n - a), key=lambda i: (-score[i], i))[: settings.budget - a]
    kept = [*(sorted(best) if settings.sort_kept else best), *range(n - a, n)]
    if settings.method == 'gkv':
      self.carried = [*carried, *[-1.0] * a]
    self.gone |= {self.position[i]: gone for i in range(n) if i not in kept}
    for name in ('k', 'v', 'position', 'carried'):
      setattr(self, name, [getattr(self, name)[i] for i in kept])
    return kept


METHODS_AND_ORDERS = [
  *(Cache(method=method) for method in ('rkv', 'snapkv', 'h2o', 'streaming', 'keydiff', 'gkv', 'tova_like')),
  Cache(method='rkv', sort_kept=False, mix=0.7),
  Cache(method='gkv', sort_kept=False, pool=3, window=5),
]


@pytest.mark.parametrize(
  ('settings', 'when'),
  [
    pytest.param(
      settings,
      when,
      marks=[pytest.mark.slow] if when == 'after' and settings.method not in ('rkv', 'h2o', 'gkv') else [],
      id=f'{settings.method}-{when}' + ('' if settings.sort_kept else '-unsorted'),
    )
    for settings in METHODS_AND_ORDERS
    for when in ('before', 'after')
    if settings.sort_kept or (when == 'after') == (settings.method == 'gkv')
  ],
)
def test_ragged_rows_keep_and_answer_what_loops_keep_and_answer(settings, when):
  B, H, K, steps, prompts = 3, 4, 2, 19, [9, 2, 6]
  settings = dataclasses.replace(settings, budget=8, interval=3, when=when, sinks=2)
  settings = settings if settings.window or settings.method == 'h2o' else dataclasses.replace(settings, window=3)
  plan = plan_of(settings, prompt=9, completion=steps, record=True)
  q, k, v = tokens(9, B=B, seed=3)
  _, prefilled = prefill(KVCache.empty(plan, B, 9), jnp.array(prompts), q, k, v)
  cache = started(plan, prefilled, B)
  loops = [[Loops(settings, H // K) for _ in range(K)] for _ in range(B)]
  for b, h in np.ndindex(B, K):
    mine = slice(h * 2, h * 2 + 2)
    loops[b][h].prefill(*(np.asarray(x[b, : prompts[b]], np.float64) for x in (q[:, :, mine], k[:, :, h], v[:, :, h])))
  compressions = 0
  for t in range(steps):
    q, k, v = tokens(1, B=B, seed=100 + t)
    out, cache = step(cache, q, k, v)
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
  assert cache.length.tolist() == [len(row[0].k) for row in loops]
  never = np.iinfo(np.int32).max
  for b, h in np.ndindex(B, K):
    gone = [loops[b][h].gone.get(p, never) for p in range(prompts[b] + steps)]
    assert held.evicted[b, h, : prompts[b] + steps].tolist() == gone
  ascending = all(np.all(np.diff(head.position) > 0) for row in loops for head in row)
  assert ascending == (settings.sort_kept or settings.method == 'streaming')


# --- positions = in_cache --------------------------------------------------------------------------------------------


def turned(x, position):
  """A head's vector at a position, float64: plane i holds coordinates i and i + D/2."""
  half = len(x) // 2
  angle = position * 10_000.0 ** (-2 * np.arange(half) / len(x))
  a, b = np.asarray(x[:half], np.float64), np.asarray(x[half:], np.float64)
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


@pytest.mark.parametrize('when', ['before', 'after'])
def test_streaming_in_cache_turns_keys_and_query_by_their_slots(when):
  B, steps, prompts, budget, interval, sinks = 2, 14, [5, 2], 6, 3, 2
  settings = Cache(method='streaming', positions='in_cache', budget=budget, interval=interval, sinks=sinks, window=2, when=when)
  plan = plan_of(settings, prompt=5, completion=steps)
  plain = jax.device_get(tokens(5 + steps, B=B, seed=5))  # before the rotation

  def rotated(start, T):
    """Tokens `start[b]` and the next of each row, turned to their true positions as the network hands them over."""
    at = np.asarray(start)[:, None] + np.arange(T)
    q, k, v = (np.stack([np.asarray(x)[b, at[b]] for b in range(B)]) for x in plain)
    q, k = (np.stack([[[turned(h, p) for h in x[b, t]] for t, p in enumerate(at[b])] for b in range(B)]) for x in (q, k))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v))

  out, prefilled = prefill(KVCache.empty(plan, B, 5), jnp.array(prompts), *rotated([0, 0], 5))
  dense, _ = CausalMemory.of(jnp.ones((B, 5), jnp.int32)).attend(0, *rotated([0, 0], 5))
  np.testing.assert_allclose(out, dense, atol=1e-5)
  cache = started(plan, prefilled, B)
  held = [[*range(n)] for n in prompts]
  moved = False
  for t in range(steps):
    start = [n + t for n in prompts]
    out, cache = step(cache, *rotated(start, 1))
    out = jax.device_get(out)
    for b in range(B):
      held[b].append(start[b])
      due = (t + 1) % interval == 0 and len(held[b]) > budget
      evicted = held[b][:sinks] + held[b][-(budget - sinks) :]
      seen = evicted if due and when == 'before' else held[b]
      held[b] = evicted if due else held[b]
      moved |= len(seen) <= start[b]
      for h in range(4):
        q = turned(plain[0][b, start[b], h], len(seen) - 1)
        keys = [turned(plain[1][b, p, h // 2], slot) for slot, p in enumerate(seen)]
        weights = oracle.softmax([oracle.logit(q, key) for key in keys])
        expected = sum(w * np.asarray(plain[2][b, p, h // 2], np.float64) for w, p in zip(weights, seen))
        np.testing.assert_allclose(out[b, 0, h], expected, atol=1e-5)
  assert moved
