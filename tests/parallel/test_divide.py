"""Which devices sample and which train: the same, or disjoint; everything else is refused by name."""

import pytest

from sprl.parallel.mesh import divide
from sprl.settings import Devices, SettingsError, device_numbers

EIGHT = [f'device {i}' for i in range(8)]  # `divide` only tells them apart


def named(*numbers):
  return [EIGHT[n] for n in numbers]


@pytest.mark.parametrize(
  ('settings', 'numbers'),
  [
    (Devices(), range(8)),
    (Devices(rollout='0-7'), range(8)),
    (Devices(rollout='3,1', learner='1,3'), (1, 3)),
    (Devices(rollout='2', learner='2'), (2,)),
  ],
)
def test_one_engine_on_the_learners_devices_takes_turns_with_it(settings, numbers):
  assert divide(settings, EIGHT) == (named(*numbers), None)


def test_several_engines_divide_the_learners_devices():
  assert divide(Devices(engines=4), EIGHT) == (EIGHT, [named(0, 1), named(2, 3), named(4, 5), named(6, 7)])


@pytest.mark.parametrize(
  ('settings', 'learner', 'engines'),
  [
    (Devices('4-7', '0-3'), (0, 1, 2, 3), [(4, 5, 6, 7)]),
    (Devices('4-7', '0-3', engines=2), (0, 1, 2, 3), [(4, 5), (6, 7)]),
    (Devices('7,5,6', '0', engines=3), (0,), [(7,), (5,), (6,)]),
    (Devices('0,2-3', '1'), (1,), [(0, 2, 3)]),
  ],
)
def test_disjoint_devices_are_used_side_by_side_in_the_order_given(settings, learner, engines):
  assert divide(settings, EIGHT) == (named(*learner), [named(*of) for of in engines])


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (
      Devices('0-4', '4-7'),
      r"config\.devices\.rollout = '0-4', learner = '4-7': expected the same devices, or sets that share none",
    ),
    (Devices('0', ''), r"config\.devices\.rollout = '0', learner = '': expected the same"),
    (Devices('', '1-7'), r"config\.devices\.rollout = '', learner = '1-7': expected the same"),
    (Devices('0-3', '4-8'), r"config\.devices\.learner = '4-8': expected numbers below 8, the devices here; 8 is none"),
    (Devices('9,0,11', '1'), r"config\.devices\.rollout = '9,0,11': expected numbers below 8, .*; 9 is none"),
    (Devices(engines=3), r'config\.devices\.engines = 3: expected a divisor of 8, the rollout devices'),
    (Devices('4-7', '0', engines=3), r'config\.devices\.engines = 3: expected a divisor of 4'),
    (Devices('7', '0', engines=2), r'config\.devices\.engines = 2: expected a divisor of 1'),
  ],
)
def test_devices_that_cannot_be_divided_so_are_refused_by_name(settings, message):
  with pytest.raises(SettingsError, match=message):
    divide(settings, EIGHT)


@pytest.mark.parametrize(
  ('text', 'numbers'),
  [
    ('0', (0,)),
    ('0-3', (0, 1, 2, 3)),
    ('4,5,6,7', (4, 5, 6, 7)),
    ('6,0-2, 9 - 10', (6, 0, 1, 2, 9, 10)),
    ('5-5', (5,)),
    ('12', (12,)),
    *((text, None) for text in ('', ',', '0,', '1-', '-1', '3-1', '1-2-3', 'all', '0;1', '0..3', '0.5', '1,1', '0-3,2')),
  ],
)
def test_a_list_of_device_numbers(text, numbers):
  assert device_numbers(text) == numbers
