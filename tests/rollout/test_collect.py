"""What a batch of rollouts says of itself, by hand; and prompts that are too long."""

import dataclasses

import numpy as np
import pytest
import small

from sprl.models.config import tiny
from sprl.rollout import collect
from sprl.rollout.collect import Length, check_lengths
from sprl.sampler.cache_plan import cache_plan
from sprl.settings import Cache, Quant, SettingsError


def plan(**changes):
  return cache_plan(tiny('llama'), Cache(**changes), Quant(sampler='kv8'), 6, 4, 'bfloat16')


def test_savings_are_those_of_what_was_kept_and_of_what_was_allocated():
  first, second = small.rollouts([(3, 2)], (6,))
  # what a dense cache attends to when a token is drawn: all the tokens before it
  assert first.kept[first.mask].tolist() == [6, 7, 8]
  sparse = dataclasses.replace(first, kept=np.where(first.mask, [0] * 6 + [6, 5, 5], 0).astype(np.int32), saturated=32)
  found = collect.metrics([sparse, second], plan(budget=5, interval=1, window=2), 3)
  assert found['sparse/kept_mean'] == pytest.approx((6 + 5 + 5 + 6 + 7) / 5)
  assert found['sparse/kept_peak'] == 6 + 1
  assert found['sparse/accounting_saving'] == pytest.approx(1 - 29 / 34)
  assert found['sparse/compressed'] == 0.5
  slots, width = 6 + 1, 2 * 2 * 2 * 16  # max(prompt, budget) + interval; 2 layers, k and v, 2 heads of 16
  positions, queries = 4 * 2 * 2 * slots, 2 * 2 * 4 * 2 * 16  # of 2 layers: 2 heads' slots; 4 heads' last 2 queries, bfloat16
  row = slots * width + positions + queries + 4 * 5  # and five numbers a row
  assert found['sparse/cache_bytes'] == pytest.approx(3 * row, rel=0.01)  # and the scales
  assert found['sparse/bytes_saving'] == pytest.approx(1 - row / (10 * 2 * width), abs=0.01)
  assert found['fp8/kv_saturation'] == pytest.approx(32 / (17 * width))


def test_layers_that_are_kept_dense_save_nothing():
  (trajectory,) = small.rollouts([(3,)], (6,))
  trajectory = dataclasses.replace(trajectory, kept=np.where(trajectory.mask, 5, 0).astype(np.int32))
  found = collect.metrics([trajectory], plan(budget=5, interval=1, window=2, dense_layers=1), 1)
  assert found['sparse/accounting_saving'] == pytest.approx((1 - 15 / 21) / 2)


def test_a_dense_cache_saves_nothing():
  found = collect.metrics(small.rollouts([(3, 2)], (6,)), plan(), 3)
  assert found['sparse/accounting_saving'] == 0
  assert found['sparse/compressed'] == 0
  assert found['sparse/bytes_saving'] == pytest.approx(0.5, abs=0.02)  # of which FP8 is the whole


def test_the_longest_prompt_is_named_and_no_prompts_are_no_error():
  lengths = [Length(place, tokens, f'p{place}') for place, tokens in ((2, 9), (0, 3), (1, 9), (3, 5))]
  check_lengths([], 4)
  check_lengths(lengths, 9)
  with pytest.raises(SettingsError, match=r'config\.sampling\.max_prompt = 4: 3 of 4 prompts .* at least 9, the tokens of p1$'):
    check_lengths(lengths, 4)
  with pytest.raises(SettingsError, match=r'config\.task: the prompt of p4 is empty'):
    check_lengths([*lengths, Length(4, 0, 'p4')], 4)
