"""From settings and model to a plan of the memory: what it holds, and what is refused before anything is compiled."""

import pytest

from sprl.cache.scores import METHODS
from sprl.models.config import tiny
from sprl.sampler.cache_plan import cache_plan
from sprl.settings import Cache, Quant, SettingsError


def plan(cache=Cache(), quant=Quant(), prompt=300, completion=4096, family='qwen3', dtype='bfloat16'):  # noqa: B008
  return cache_plan(tiny(family), cache, quant, prompt, completion, dtype)


def test_only_biased_keys_have_their_bias_kept_apart():
  assert plan(quant=Quant(sampler='kv8'), family='qwen2').key_bias
  assert not plan(quant=Quant(sampler='kv8'), family='qwen3').key_bias
  assert not plan(quant=Quant(sampler='w8a8'), family='qwen2').key_bias
  assert not plan(quant=Quant(sampler='kv8', key_bias=False), family='qwen2').key_bias


@pytest.mark.parametrize(
  ('cache', 'words'),
  [
    (Cache(budget=8), ('config.cache.budget = 8', 'more than 8', 'window of 8')),
    (Cache(budget=16, method='gkv'), ('config.cache.budget = 16', 'more than 16')),
    (Cache(budget=12, method='streaming'), ('config.cache.budget = 12', 'more than 12', '4 sinks')),
    (Cache(budget=512, window=301), ('config.cache.window = 301', 'at most 300', 'prompt bucket')),
    (Cache(budget=64, dense_layers=2), ('config.cache.dense_layers = 2', 'fewer than the 2 layers')),
  ],
)
def test_a_budget_without_room_is_refused_by_name(cache, words):
  with pytest.raises(SettingsError) as error:
    plan(cache)
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize('method', METHODS)
def test_a_budget_beyond_every_sequence_is_cut_to_the_longest(method):
  cut = plan(Cache(budget=10_000, method=method), prompt=14, completion=30).settings
  assert cut.budget == 44
  assert 1 <= cut.window < 44
