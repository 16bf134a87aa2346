"""Metrics of a batch of rollouts, by hand, and checks of the lengths of prompts."""

import dataclasses

import numpy as np
import pytest
import small

from sprl.cache.layout import cache_layout
from sprl.config import Cache, Quant, SettingsError
from sprl.io.tokenizer import Tokenizer, write_tiny
from sprl.models.config import tiny
from sprl.rollout import collect
from sprl.rollout.collect import Length, check_lengths
from sprl.rollout.episodes import TURNS_CUT


def layout(**changes):
  return cache_layout(tiny('llama'), Cache(**changes), Quant(sampler='kv8'), 6, 4, 'bfloat16')


def test_savings_follow_from_kept_slots_and_allocated_bytes():
  first, second = small.rollouts([(3, 2)], (6,))
  # a dense cache attends to all tokens before the drawn one
  assert first.attended[first.mask].tolist() == [6, 7, 8]
  sparse = dataclasses.replace(first, attended=np.where(first.mask, [0] * 6 + [6, 5, 5], 0).astype(np.int32), saturated=32)
  found = collect.metrics([sparse, second], layout(budget=5, interval=1, window=2), 3)
  assert found['sparse/kept_mean'] == pytest.approx((6 + 5 + 5 + 6 + 7) / 5)
  assert found['sparse/kept_peak'] == 6 + 1
  assert found['sparse/accounting_saving'] == pytest.approx(1 - 29 / 34)
  assert found['sparse/compressed'] == 0.5
  slots, width = 5 + 1, 2 * 2 * 2 * 16  # budget + interval; 2 layers, k and v, 2 heads of 16
  positions, queries = 4 * 2 * 2 * slots, 2 * 2 * 4 * 2 * 16  # of 2 layers: 2 heads' slots; 4 heads' last 2 queries, bfloat16
  row = slots * width + positions + queries + 4 * 9  # and nine numbers a row
  assert found['sparse/cache_bytes'] == pytest.approx(3 * row, rel=0.01)  # the scales are within the tolerance
  assert found['sparse/bytes_saving'] == pytest.approx(1 - row / (10 * 2 * width), abs=0.01)
  assert found['fp8/kv_saturation'] == pytest.approx(32 / (17 * width))


def test_saturation_is_the_share_of_clamped_numbers_of_cache_and_queries():
  rollouts = [
    dataclasses.replace(t, saturated=s, saturated_queries=q) for t, s, q in zip(small.rollouts([(3, 2)], (6,)), (32, 2), (5, 3))
  ]
  tokens, heads, kv_heads, width = 17, 4, 2, 2 * 16  # two layers of 16 numbers a head
  both = cache_layout(tiny('llama'), Cache(), Quant(sampler='w8a8_kv8'), 6, 4, 'bfloat16')
  found = collect.metrics(rollouts, both, 3)
  assert found['fp8/kv_saturation'] == pytest.approx(34 / (tokens * 2 * kv_heads * width))
  assert found['fp8/query_saturation'] == pytest.approx(8 / (tokens * heads * width))
  assert 'fp8/query_saturation' not in collect.metrics(rollouts, layout(), 3)  # kv8: queries are not FP8


def test_a_dense_cache_saves_nothing():
  found = collect.metrics(small.rollouts([(3, 2)], (6,)), layout(), 3)
  assert found['sparse/accounting_saving'] == 0
  assert found['sparse/compressed'] == 0
  assert found['sparse/bytes_saving'] == pytest.approx(0.5, abs=0.02)  # only FP8 saves bytes


def test_metrics_of_episodes_have_the_section_of_their_owner():
  given = {'wins': 1.0, TURNS_CUT: 0.5}, {'agent/turns': 2.0, TURNS_CUT: 0.0}
  episodes = [dataclasses.replace(t, metrics=metrics) for t, metrics in zip(small.rollouts([(3, 2)], (6,)), given, strict=True)]
  found = collect.metrics(episodes, layout(), 3)
  assert (found['env/wins'], found['agent/turns'], found['completion/turns_cut']) == (1.0, 2.0, 0.25)


def several_rewards():
  first, second = small.rollouts([(3, 2)], (6,))
  used = {'judge/tokens': 110.0, 'judge/cost': 0.25}
  first = dataclasses.replace(first, reward=1.5, parts={'exact': 1.0, 'brief': 5.0}, costs=used)
  failed = {'failed': ('brief',), 'status': 'timeout', 'reward_known': False}
  second = dataclasses.replace(second, reward=0.25, parts={'exact': 0.25, 'brief': 0.0}, **failed)
  return first, dataclasses.replace(second, costs={'judge/tokens': 100.0})


def test_each_of_several_rewards_is_logged_with_its_failures():
  found = collect.metrics(several_rewards(), layout(), 3)
  assert (found['reward/mean'], found['reward/exact'], found['reward/brief']) == (1.5, 0.625, 5.0)  # without the failed grade
  assert (found['reward/std'], found['reward/groups_equal']) == (0.0, 1.0)
  assert (found['grading/failed/exact'], found['grading/failed/brief'], found['grading/timeout']) == (0, 1, 1)
  assert (found['judge/tokens'], found['judge/cost']) == (210.0, 0.25)
  alone = collect.metrics(small.rollouts([(3, 2)], (6,)), layout(), 3)
  assert not [name for name in alone if name.startswith(('judge/', 'grading/failed/'))]
  assert [t.score for t in several_rewards()] == [1.0, 0.25]  # the first reward; with one, the reward
  assert dataclasses.replace(several_rewards()[0], parts={}).score == 1.5


def test_tables_of_samples_show_each_reward(tmp_path):
  write_tiny(tmp_path)
  (row,) = collect.sample_rows(several_rewards(), lambda number: '7', Tokenizer.load(tmp_path), 4)
  assert [(key, row[key]) for key in row if 'reward' in key] == [('reward', 1.5), ('reward/exact', 1.0), ('reward/brief', 5.0)]


def test_a_table_of_all_samples_names_their_groups(tmp_path):
  write_tiny(tmp_path)
  made, asked = small.rollouts([(3, 2, 4)] * 2, (6, 5)), []
  rows = collect.sample_rows(made, lambda number: asked.append(number) or str(number), Tokenizer.load(tmp_path), None)
  assert [(row['group'], row['answer'], row['tokens']) for row in rows] == [(g, str(g), n) for g in (0, 1) for n in (3, 2, 4)]
  assert asked == [0, 1]  # once for a group, also where another process holds the problem
  some = collect.sample_rows(made, str, Tokenizer.load(tmp_path), 1)
  assert [('group' in row, row['answer'], row['tokens']) for row in some] == [(False, '0', 3)]


def test_prompts_that_are_too_long_or_empty_are_named():
  lengths = [Length(place, tokens, f'p{place}') for place, tokens in ((2, 9), (0, 3), (1, 9), (3, 5))]
  check_lengths([], 4)  # no prompts are no error
  check_lengths(lengths, 9)
  with pytest.raises(SettingsError, match=r'config\.sampling\.max_prompt = 4: 3 of 4 .* 9.* p1$'):
    check_lengths(lengths, 4)
  with pytest.raises(SettingsError, match=r'config\.task: .* p4 is empty'):
    check_lengths([*lengths, Length(4, 0, 'p4')], 4)
