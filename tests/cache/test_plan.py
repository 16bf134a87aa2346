"""The plan: sizes as the spec has them, and what will never evict."""

import itertools

from sprl.cache.plan import never_evicts
from sprl.models.config import tiny
from sprl.sampler.cache_plan import cache_plan
from sprl.settings import Cache, Quant


def plan(cache=Cache(), quant=Quant(), prompt=300, completion=4096, family='qwen3', dtype='bfloat16'):  # noqa: B008
  return cache_plan(tiny(family), cache, quant, prompt, completion, dtype)


def test_a_sparse_cache_has_the_larger_of_prompt_and_budget_and_one_interval_of_slots():
  assert plan(Cache(budget=512)).slots(0) == 512 + 128
  assert plan(Cache(budget=64)).slots(0) == 300 + 128
  assert plan().slots(0) == 300 + 4096
  assert plan(Cache(budget=512), completion=100).slots(0) == 400  # no row can need more


def test_layers_that_are_kept_dense_have_room_for_everything():
  sparse = plan(Cache(budget=64, dense_layers=1))
  assert [sparse.slots(0), sparse.slots(1)] == [4396, 428]
  assert [sparse.evicts(0), sparse.evicts(1)] == [False, True]


def test_bytes_are_those_of_the_keys_and_values():
  # 2 layers, 2 kv heads of 24: 2 x 2 x 2 x 24 numbers a token
  assert plan().bytes(5) == 5 * 4396 * 192 * 2
  assert plan(Cache(budget=64), Quant(sampler='kv8')).bytes(5) == 5 * 428 * 192
  assert plan(Cache(budget=64), Quant(sampler='kv8')).dense_bytes(5) == 5 * 4396 * 192 * 2
  assert plan(Cache(budget=64), Quant(sampler='w8a8')).bytes(5) == 5 * 428 * 192 * 2


def compresses(cache, prompt, completion):
  """Whether any row of at most so many tokens is compressed, step by step: the last token drawn is never taken in."""
  for n in range(1, prompt + 1):
    for step in range(1, completion):
      if step % cache.interval == 0 and n + step > cache.budget:
        return True
  return False


def test_what_never_evicts_is_told():
  for budget, interval, prompt, completion in itertools.product(range(3, 14), range(1, 7), (1, 4, 6), range(1, 8)):
    cache = Cache(budget=budget, interval=interval)
    told = never_evicts(cache, prompt, completion)
    assert (told is None) == compresses(cache, prompt, completion), (cache, prompt, completion)
  assert never_evicts(Cache(), 300, 100) is None
  assert 'config.cache.budget = 399 never evicts: at most 399 tokens' in str(
    never_evicts(Cache(budget=399, interval=4), 300, 100)
  )
  assert 'config.cache.interval = 100 never evicts' in str(never_evicts(Cache(budget=64, interval=100), 300, 100))
  assert 'after 90 steps' in str(never_evicts(Cache(budget=395, interval=45), 300, 100))


def test_counted_by_batch_a_row_may_be_compressed_at_any_step():
  assert never_evicts(Cache(budget=64, interval=100, trigger_scope='batch'), 300, 100) is None
  assert never_evicts(Cache(budget=398, interval=100, trigger_scope='batch'), 300, 100) is None
  assert never_evicts(Cache(budget=399, interval=100, trigger_scope='batch'), 300, 100)
