"""A few cases of each target, in this process: what is random is the same in every run. `python tests/fuzz` runs more."""

import campaign
import pytest

CASES = {
  'settings': 24, 'commands': 2, 'weights': 24, 'tokenizers': 40, 'rows': 80, 'templates': 20, 'graders': 3, 'environments': 3,
  'endpoint': 100,
}  # fmt: skip
SLOW = ('commands',)  # a run of one step takes 15 seconds of CPU time


@pytest.mark.parametrize('name', [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES])
def test_random_inputs_end_in_an_answer_or_a_refusal(name):
  with campaign.opened(name) as (target, world):
    outcomes = {target.check(world, campaign.case_of(target, world, 0, number)) for number in range(CASES[name])}
  assert len(outcomes) > 1  # not all are refused


def test_every_target_has_cases_here():
  assert set(campaign.TARGETS) == set(CASES)
