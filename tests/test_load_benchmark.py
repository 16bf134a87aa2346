"""The verdicts of benchmarks/load.py on made-up looks."""

import os

import load
import pytest

NAMES = [f'{who} {what}' for who in ('process', 'children') for what in ('MiB', 'files', 'threads')]


def looks(count=40, leak=0.0, slower=0.0):
  """Return looks ten seconds apart; memory grows by `leak` MiB a look, and the last quarter is `slower`."""
  tokens, total = [], 0.0
  for i in range(count):
    tokens.append(total)
    total += 1000.0 * (1 - slower * (i >= 3 * count // 4))
  seen = {'seconds': [10.0 * i for i in range(count)], 'tokens': tokens, 'episodes': tokens, 'children': [64] * count}
  return seen | {name: [100.0 + leak * i * name.endswith('MiB') for i in range(count)] for name in NAMES}


def verdicts(seen):
  return {row['what']: row['flat'] for row in load.judged(seen)}


def test_a_flat_run_passes_and_a_leak_or_a_slower_run_does_not():
  assert all(verdicts(looks()).values())
  leaking = verdicts(looks(leak=0.5))
  assert {name for name, flat in leaking.items() if not flat} == {'process MiB', 'children MiB'}
  slower = verdicts(looks(slower=0.1))
  assert {name for name, flat in slower.items() if not flat} == {'tokens a second', 'episodes a second'}
  (row,) = [row for row in load.judged(looks(slower=0.1)) if row['what'] == 'tokens a second']
  assert (row['second quarter'], row['last quarter'], row['change']) == pytest.approx((100.0, 90.0, -0.1))


@pytest.mark.skipif(not os.path.isdir('/proc/self/task'), reason='needs /proc, which Linux has')
def test_the_state_of_this_process_and_of_none():
  state = load.state_of(os.getpid())
  assert state is not None
  assert state['MiB'] > 10
  assert state['files'] > 2
  assert state['threads'] >= 1
  assert load.state_of(2**22 + 1) is None  # above the largest process number
