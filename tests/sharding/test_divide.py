"""Division of devices between rollouts and learner: the same devices or disjoint ones; others are refused by name."""

from types import SimpleNamespace

import pytest

from sprl.config import Devices, SettingsError
from sprl.config_checks import device_numbers
from sprl.sharding.mesh import check_dealt, divide

EIGHT = [f'device {i}' for i in range(8)]  # `divide` only compares them


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
      r"config\.devices\.rollout = '0-4', learner = '4-7': expected ",
    ),
    (Devices('0', ''), r"config\.devices\.rollout = '0', learner = '': expected the same"),
    (Devices('', '1-7'), r"config\.devices\.rollout = '', learner = '1-7': expected the same"),
    (Devices('0-3', '4-8'), r"config\.devices\.learner = '4-8': expected device numbers below 8"),
    (Devices('9,0,11', '1'), r"config\.devices\.rollout = '9,0,11': expected device numbers below 8"),
    (Devices(engines=3), r'config\.devices\.engines = 3: expected a divisor of 8'),
    (Devices('4-7', '0', engines=3), r'config\.devices\.engines = 3: expected a divisor of 4'),
    (Devices('7', '0', engines=2), r'config\.devices\.engines = 2: expected a divisor of 1'),
  ],
)
def test_impossible_divisions_are_refused_by_name(settings, message):
  with pytest.raises(SettingsError, match=message):
    divide(settings, EIGHT)


def dealt(settings, processes, platform='cuda'):
  """Call `check_dealt` for 8 devices, of which each process has the same number."""

  class Device(SimpleNamespace):
    __hash__ = object.__hash__

  devices = [Device(process_index=i * processes // 8, platform=platform) for i in range(8)]
  learner, engines = divide(settings, devices)
  return check_dealt(settings, learner, engines[0] if engines else learner, processes)


@pytest.mark.parametrize(
  'settings', [Devices(), Devices('2-3,6-7', '0-1,4-5'), Devices('3,7', '0-2,4-6'), Devices('1,5', '0,4'), Devices('1,5', '1,5')]
)
def test_each_process_may_have_devices_of_both_sets(settings):
  dealt(settings, 2)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (Devices('4-7', '0-3'), r"config\.devices\.learner = '0-3': expected .*SPRL_PROCESS=1"),
    (Devices('0,1,2', '3,4'), r"config\.devices\.rollout = '0,1,2': expected .*SPRL_PROCESS=1"),
    (Devices('0,4', '0,4,5'), r"config\.devices\.rollout = '0,4', learner = '0,4,5': expected"),
    (Devices('1,5', '0,4,6'), r"config\.devices\.learner = '0,4,6': expected"),
    (Devices('5,1', '0,4'), r"config\.devices\.rollout = '5,1': expected"),
  ],
)
def test_sets_with_unequal_shares_per_process_are_refused_by_name(settings, message):
  with pytest.raises(SettingsError, match=message):
    dealt(settings, 2)


def test_on_cpus_only_one_set_may_have_several_devices_per_process():
  both = Devices('2-3,6-7', '0-1,4-5')
  with pytest.raises(SettingsError, match=r"rollout = '2-3,6-7': expected one device per process"):
    dealt(both, 2, 'cpu')
  dealt(Devices('2-3,6-7', '0,4'), 2, 'cpu')
  dealt(Devices(), 2, 'cpu')


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
