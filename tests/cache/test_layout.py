"""The layout of a cache: its sizes, refused settings, and budgets that never evict."""

import itertools

import pytest

from sprl.cache.compaction import rows_at_once
from sprl.cache.eviction import METHODS
from sprl.cache.layout import cache_layout, never_evicts
from sprl.config import Cache, Quant, SettingsError
from sprl.models.config import tiny


def layout(cache=Cache(), quant=Quant(), prompt=300, completion=4096, family='qwen3', dtype='bfloat16'):  # noqa: B008
  return cache_layout(tiny(family), cache, quant, prompt, completion, dtype)


def test_a_sparse_cache_has_budget_plus_interval_slots_for_prompts_of_any_length():
  assert layout(Cache(budget=512)).slots == 512 + 128
  assert layout(Cache(budget=64)).slots == 64 + 128
  assert layout(Cache(budget=64), prompt=3000).slots == 64 + 128
  assert layout().slots == 300 + 4096
  assert layout(Cache(budget=512), completion=100).slots == 400  # no row can need more


def test_bytes_count_keys_and_values():
  # keys and values x 2 layers x 2 kv heads x 24 = 192 numbers a token; 64 + 128 = 192 is also the number of slots
  assert layout().kv_bytes(5) == 5 * 4396 * 192 * 2
  assert layout(Cache(budget=64), Quant(sampler='kv8')).kv_bytes(5) == 5 * 192 * 192
  assert layout(Cache(budget=64), Quant(sampler='kv8')).dense_bytes(5) == 5 * 4396 * 192 * 2
  assert layout(Cache(budget=64), Quant(sampler='w8a8')).kv_bytes(5) == 5 * 192 * 192 * 2


def test_key_biases_stay_out_of_fp8_if_the_model_has_them():
  assert layout(quant=Quant(sampler='kv8'), family='qwen2').key_bias
  assert not layout(quant=Quant(sampler='kv8'), family='qwen3').key_bias
  assert not layout(quant=Quant(sampler='w8a8'), family='qwen2').key_bias


def test_a_new_slot_carries_0_for_a_sum_and_minus_1_otherwise():
  assert layout(Cache(budget=64, method='h2o')).initial_carried == 0
  assert layout(Cache(budget=64, method='gkv')).initial_carried == -1


@pytest.mark.parametrize(
  ('cache', 'words'),
  [
    (Cache(budget=8), ('config.cache.budget = 8', 'more than 8', 'window of 8')),
    (Cache(budget=16, method='gkv'), ('config.cache.budget = 16', 'more than 16')),
    (Cache(budget=12, method='streaming'), ('config.cache.budget = 12', 'more than 12', '4 sinks')),
  ],
)
def test_a_budget_or_window_that_does_not_fit_names_the_setting(cache, words):
  with pytest.raises(SettingsError) as error:
    layout(cache)
  assert all(word in str(error.value) for word in words), error.value


def test_a_window_may_be_longer_than_the_prompts():
  assert layout(Cache(budget=512, window=301)).window == 301


@pytest.mark.parametrize('method', METHODS)
def test_a_budget_beyond_the_longest_sequence_is_reduced_to_it(method):
  settings = layout(Cache(budget=10_000, method=method), prompt=14, completion=30).settings
  assert settings.budget == 44
  assert 1 <= settings.window < 44


def compresses(cache, prompt, completion):
  """Return whether a row is ever compressed, by simulation of its steps. The last drawn token never enters the cache."""
  for n in range(1, prompt + 1):
    if n > cache.budget:
      return True
    for step in range(1, completion):
      if step % cache.interval == 0 and n + step > cache.budget:
        return True
  return False


def test_a_budget_that_never_evicts_is_reported():
  for budget, interval, prompt, completion in itertools.product(range(3, 14), range(1, 7), (1, 4, 6), range(1, 8)):
    cache = Cache(budget=budget, interval=interval)
    reason = never_evicts(cache, prompt, completion)
    assert (reason is None) == compresses(cache, prompt, completion), (cache, prompt, completion)
  assert never_evicts(Cache(), 300, 100) is None
  assert never_evicts(Cache(budget=299, interval=100), 300, 100) is None  # it compresses the longest prompt
  for cache, words in (
    (Cache(budget=399, interval=4), ('config.cache.budget = 399', '399 tokens')),
    (Cache(budget=364, interval=100), ('config.cache.interval = 100', 'config.cache.budget = 364')),
    (Cache(budget=395, interval=45), ('config.cache.interval = 45', 'every 45 decode steps')),
  ):
    reason = never_evicts(cache, 300, 100)
    assert reason is not None
    assert all(word in reason for word in words), reason


def test_methods_that_compare_no_keys_compress_more_rows_together():
  rows = {}
  for method in METHODS:
    sparse = cache_layout(tiny('qwen3', head_dim=128), Cache(method=method, budget=512), Quant(), 300, 4096, 'bfloat16')
    rows[method] = rows_at_once(sparse, 64, sparse.slots)
  compare = {rows.pop('rkv'), rows.pop('gkv')}
  assert len(compare) == len({*rows.values()}) == 1
  assert min(rows.values()) > max(compare)
