"""The KV cache: who is written where, who sees what, and that decoding writes in place."""

import jax
import jax.numpy as jnp
import numpy as np

from sprl.cache.kv_cache import KVCache
from sprl.models.memory import CausalMemory, Memory


def tokens(T, B=2, H=4, K=2, D=4, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(B, T, n, D)), jnp.float32) for n in (H, K, K))


def test_a_new_token_goes_behind_the_row_s_length():
  cache = KVCache.empty(2, 2, 2, 6, 4, jnp.float32).advance(jnp.array([1, 3]))
  q, k, v = tokens(2)
  _, cache = cache.attend(1, q, k, v)
  assert cache.slots == 6
  assert not np.any(cache.k[0])  # the other layer's
  for row, start in ((0, 1), (1, 3)):
    np.testing.assert_array_equal(cache.k[1][row, :, start : start + 2], jnp.swapaxes(k[row], 0, 1))
    np.testing.assert_array_equal(cache.v[1][row, :, start : start + 2], jnp.swapaxes(v[row], 0, 1))
    assert np.count_nonzero(np.any(np.asarray(cache.k[1][row]), axis=(0, 2))) == 2
  np.testing.assert_array_equal(cache.length, [1, 3])
  np.testing.assert_array_equal(cache.advance(jnp.array([2, 0])).length, [3, 3])


def test_a_sequence_in_pieces_gets_the_answers_of_the_sequence_whole():
  q, k, v = tokens(7)
  whole, _ = CausalMemory.of(jnp.ones((2, 7), jnp.int32)).attend(0, q, k, v)
  cache, start, pieces = KVCache.empty(1, 2, 2, 8, 4, jnp.float32), 0, []
  for size in (4, 1, 1, 1):
    here = slice(start, start + size)
    out, cache = cache.attend(0, q[:, here], k[:, here], v[:, here])
    cache, start = cache.advance(jnp.array([size, size])), start + size
    pieces.append(out)
  np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=1e-6)


def test_padding_written_behind_the_length_is_overwritten_and_never_seen():
  q, k, v = tokens(5)
  length = jnp.array([3, 5])  # row 0: two tokens of padding
  _, padded = KVCache.empty(1, 2, 2, 8, 4, jnp.float32).attend(0, q, k, v)
  _, other = KVCache.empty(1, 2, 2, 8, 4, jnp.float32).attend(0, q, k.at[0, 3:].set(9.0), v.at[0, 3:].set(9.0))
  new = tokens(1, seed=1)
  a, b = (cache.advance(length).attend(0, *new)[0] for cache in (padded, other))
  np.testing.assert_array_equal(a, b)


def test_a_token_beyond_the_last_slot_is_dropped():
  cache = KVCache.empty(1, 2, 2, 3, 4, jnp.float32).advance(jnp.array([3, 2]))
  _, after = cache.attend(0, *tokens(1))
  assert not np.any(after.k[0][0])
  assert np.any(after.k[0][1, :, 2])


def test_rows_start_as_copies_of_a_shorter_cache_s_rows():
  mine = jax.tree.map(lambda x: x + 1, KVCache.empty(1, 3, 2, 6, 4, jnp.float32))
  q, k, v = tokens(4)
  prompts = KVCache.empty(1, 2, 2, 4, 4, jnp.float32).attend(0, q, k, v)[1].advance(jnp.array([4, 2]))
  forked = mine.fork(prompts, jnp.array([1, 0, 1]), jnp.array([True, False, True]))
  np.testing.assert_array_equal(forked.length, [2, 1, 2])
  for row in (0, 2):
    np.testing.assert_array_equal(forked.k[0][row, :, :4], prompts.k[0][1])
    np.testing.assert_array_equal(forked.v[0][row, :, :4], prompts.v[0][1])
  np.testing.assert_array_equal(forked.k[0][1], mine.k[0][1])


def test_keys_are_stored_in_the_cache_s_dtype():
  cache = KVCache.empty(1, 2, 2, 3, 4, jnp.bfloat16)
  _, after = cache.attend(0, *(x.astype(jnp.bfloat16) for x in tokens(1)))
  assert after.k[0].dtype == after.v[0].dtype == jnp.bfloat16
  assert isinstance(after, Memory)


def test_a_donated_decode_step_writes_in_place():
  cache = KVCache.empty(2, 4, 2, 512, 16, jnp.float32)
  q, k, v = tokens(1, B=4, D=16)

  def step(cache, q, k, v):
    for layer in range(2):
      q, cache = cache.attend(layer, q, k, v)
    return q, cache.advance(jnp.ones(4, jnp.int32))

  memory = jax.jit(step, donate_argnums=0).lower(cache, q, k, v).compile().memory_analysis()
  held = sum(x.nbytes for x in jax.tree.leaves(cache))
  assert memory.alias_size_in_bytes >= held
  assert memory.temp_size_in_bytes < held / 4
