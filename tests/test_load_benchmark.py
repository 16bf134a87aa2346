"""The verdicts of benchmarks/load.py on made-up readings."""

import os

import load
import pytest

NAMES = [f'{who} {what}' for who in ('process', 'children') for what in ('MiB', 'files', 'threads')]


def readings(count=48, leak=0.0, slower=0.0, child_leak=0.0, children=64):
  """Return readings ten seconds apart; memory grows by `leak` MiB a reading, and the last sixth is `slower`."""
  tokens, total = [], 0.0
  for i in range(count):
    tokens.append(total)
    total += 1000.0 * (1 - slower * (i >= 5 * count // 6))
  columns = {'seconds': [10.0 * i for i in range(count)], 'tokens': tokens, 'episodes': tokens, 'children': [64] * count}
  columns |= {'processor seconds': columns['seconds'], 'fixed computation': [0.1] * count}
  columns |= {name: [100.0 + leak * i * name.endswith('MiB') for i in range(count)] for name in NAMES}
  memory = {pid: [50.0] * count for pid in range(children)}
  return load.Readings(columns, memory | {3: [50.0 + child_leak * i for i in range(count)]})


def failed(seen):
  return {row['what'] for row in load.judged(seen) if not row['flat']}


def test_a_flat_run_passes_and_a_leak_or_a_slower_run_does_not():
  assert failed(readings()) == set()
  assert failed(readings(leak=0.5)) == {'process MiB', 'children MiB'}
  assert failed(readings(child_leak=0.1)) == {'MiB of the child that grows most'}
  assert failed(readings(children=65)) == {'children, started in all'}
  assert failed(readings(slower=0.1)) == {'tokens in the time of a fixed computation', 'episodes a second'}
  (row,) = [row for row in load.judged(readings(slower=0.1)) if row['what'] == 'tokens in the time of a fixed computation']
  assert (row['beginning'], row['end'], row['change']) == pytest.approx((10.0, 9.0, -0.1))


def test_a_slower_core_is_not_a_slower_program():
  seen = readings(slower=0.1)
  assert failed(seen) == {'tokens in the time of a fixed computation', 'episodes a second'}
  seen.columns['fixed computation'] = [0.1 if i < 40 else 0.1 / 0.9 for i in range(48)]  # of the same processor time
  assert failed(seen) == {'episodes a second'}


@pytest.mark.skipif(not os.path.isdir('/proc/self/task'), reason='needs /proc, which Linux has')
def test_the_state_of_this_process_and_of_none():
  state = load.state_of(os.getpid())
  assert state is not None
  assert state['MiB'] > 10
  assert state['files'] > 2
  assert state['threads'] >= 1
  assert load.state_of(2**22 + 1) is None  # above the largest process number
