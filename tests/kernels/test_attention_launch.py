"""Teams of decode attention, and the model of its time, against numbers worked out by hand."""

import pytest

from sprl.kernels.attention_launch import BLOCK, MEET, Loop, launch, seconds, shares
from sprl.kernels.launch_model import FILL, MEMORY

CACHE = {'D': 128, 'dtype': 'bfloat16', 'share': False, 'second': False}
STORED = 2.0 * 2 * 128 * BLOCK  # bytes of a block of keys and values
LOOP = Loop(resident=2, issue=0.3e-6, chain=0.7e-6)


@pytest.mark.parametrize(
  ('N', 'S', 'members', 'rows'),
  [
    (1024, 4096, 4, 4),  # enough rows: one for each member
    (1024, 640, 1, 1),  # rows of at most 16 blocks are never divided
    (128, 4096, 2, 1),
    (64, 4096, 4, 1),
    (8, 4096, 8, 1),  # 33 programs a row would fill the device; a cluster has 8
    (8, 512, 2, 1),  # parts have at least 256 slots
    (8, 256, 1, 1),
  ],
)
def test_few_rows_are_divided_among_more_programs(N, S, members, rows):
  plan = launch(N, S, **CACHE)
  assert (plan.members, plan.rows, plan.teams) == (members, rows, N // rows)


def test_teams_of_fp8_rows_that_fill_the_device_have_one_program():
  fp8 = CACHE | {'dtype': 'float8_e4m3fn'}
  assert (launch(1024, 4096, **fp8).members, launch(1024, 4096, **fp8).rows) == (1, 1)
  assert launch(64, 4096, **fp8).members == 4


@pytest.mark.parametrize(('N', 'programs'), [(1024, 3), (512, 2), (264, 2), (265, 3)])
def test_as_many_fp8_programs_share_a_multiprocessor_as_need_the_least_time(N, programs):
  """1,024 rows need three rounds with three programs or four with two; 512 need two rounds in both cases."""
  shared = launch(N, 4096, 128, 'float8_e4m3fn', share=False, second=True).shared
  assert 228 * 1024 // (shared + 1024) == programs


def test_programs_that_return_probabilities_have_no_team():
  assert launch(8, 4096, **CACHE | {'share': True}).members == 1


def test_a_team_divides_its_rows_only_if_one_is_much_longer():
  plan = launch(1024, 4096, **CACHE)
  assert shares(plan, [64, 60, 64, 20]) == [64, 60, 64, 20]
  assert shares(plan, [64, 0, 0, 0]) == [16, 16, 16, 16]
  assert shares(plan, [64, 3, 0, 0]) == [16, 16, 16, 19]  # parts stay whole
  assert shares(plan, [0, 64, 0, 64]) == [32, 32, 32, 32]
  assert shares(plan, [16, 0, 0, 0]) == [16, 0, 0, 0]  # one part


def test_the_members_of_a_team_share_its_only_row():
  assert shares(launch(64, 4096, **CACHE), [64]) == [16, 16, 16, 16]
  assert shares(launch(64, 4096, **CACHE), [9]) == [4, 0, 4, 1]


def test_many_long_rows_take_their_bytes_and_four_turns():
  plan, traffic = launch(1024, 4096, **CACHE), 1024 * 64 * STORED
  found = seconds(plan, [4096] * 1024, traffic, STORED, LOOP)  # 1,024 programs, 264 at a time
  assert found == pytest.approx(traffic / MEMORY + 4 * FILL)


def test_a_long_row_takes_a_quarter_of_its_chain_of_blocks():
  plan, lengths = launch(1024, 4096, **CACHE), [0] * 1024
  lengths[5] = 4096
  assert seconds(plan, lengths, 64 * STORED, STORED, LOOP) == pytest.approx(16 * LOOP.chain + FILL + MEET)


def test_slow_instructions_bound_a_launch():
  plan, slow = launch(1024, 4096, **CACHE), Loop(resident=2, issue=3e-6, chain=0.7e-6)
  found = seconds(plan, [4096] * 1024, 1024 * 64 * STORED, STORED, slow)
  assert found == pytest.approx(1024 * 64 * 3e-6 / 132 + 4 * FILL)
