"""The verdicts of benchmarks/load.py on made-up readings."""

import os

import load
import pytest

NAMES = [f'{who} {what}' for who in ('process', 'children') for what in ('MiB', 'files', 'threads')]


def readings(count=48, leak=0.0, slower=0.0, child_leak=0.0, children=64, of=('MiB',)):
  """Return readings ten seconds apart. The measures `of` grow by `leak` a reading, and the part after two thirds is `slower`."""
  tokens, total = [], 0.0
  for i in range(count):
    tokens.append(total)
    total += 1000.0 * (1 - slower * (i >= 2 * count // 3))
  columns = {'seconds': [10.0 * i for i in range(count)], 'tokens': tokens, 'episodes': tokens, 'children': [64] * count}
  columns |= {name: [100.0 + leak * i * name.endswith(of) for i in range(count)] for name in NAMES}
  memory = {pid: [50.0] * count for pid in range(children)}
  return load.Readings(None, columns, memory | {3: [50.0 + child_leak * i for i in range(count)]})


def failed(seen):
  return {row['what'] for row in load.judged(seen) if not row['flat']}


def test_a_flat_run_passes_and_a_leak_does_not():
  assert failed(readings()) == set()
  assert failed(readings(leak=0.5)) == {'process MiB', 'children MiB'}
  assert failed(readings(child_leak=0.1)) == {'MiB of the child that grows most'}
  assert failed(readings(leak=0.1, of=('files',))) == {'process files', 'children files'}
  assert failed(readings(leak=0.1, of=('threads',))) == {'process threads', 'children threads'}
  assert failed(readings(children=65)) == {'children, started in all'}


def test_the_largest_child_that_grows_is_found_beside_a_small_one_that_grows_more():
  seen = readings()
  seen.children[1], seen.children[2] = [0.5] * 24 + [0.9] * 24, [100.0] * 24 + [104.0] * 24
  assert failed(seen) == {'MiB of the child that grows most'}


def test_a_speed_may_rise_but_not_fall():
  (found,) = [row for row in load.judged(readings(slower=0.2)) if row['what'] == 'tokens a second']
  assert (found['beginning'], found['end'], found['flat']) == (100.0, pytest.approx(80.0), False)
  assert failed(readings(slower=0.04)) == failed(readings(slower=-0.2)) == set()


@pytest.mark.parametrize('new', [None, {'clock': [600.0, 610.0, 620.0, 630.0], 'tokens': [0.0, 1.0, 2.0, 3.0]}])
def test_a_new_process_that_failed_or_ran_too_briefly_decides_nothing(new):
  rows = load.compared({'clock': [0.0, 1200.0], 'tokens': [0.0, 1.0], 'episodes': [0.0, 1.0]}, new)
  assert [(row['change'], row['flat']) for row in rows] == [(None, False)] * 2


@pytest.mark.parametrize(('speed', 'flat'), [(1.0, True), (0.96, True), (0.9, False), (1.1, False)])
def test_the_speed_is_that_of_a_new_process_at_the_same_time(speed, flat):
  """The readings of the two are at other times, and the core is slower at the end."""
  work = [0.0 if at < 500 else min(at - 500, 400) + 0.5 * max(at - 900, 0) for at in range(1201)]  # of a process at full speed
  ours = {'clock': list(range(0, 1201, 40)), 'tokens': [1000 + 7 * speed * work[at] for at in range(0, 1201, 40)]}
  new = {'clock': list(range(600, 1171, 30)), 'tokens': [7 * work[at] - 7 * work[600] for at in range(600, 1171, 30)]}
  rows = load.compared(ours | {'episodes': ours['tokens']}, new | {'episodes': new['tokens']})
  assert [row['flat'] for row in rows] == [flat, flat]
  assert [row['change'] for row in rows] == pytest.approx([speed - 1] * 2, abs=0.01)


@pytest.mark.skipif(not os.path.isdir('/proc/self/task'), reason='needs /proc, which Linux has')
def test_the_state_of_this_process_and_of_none():
  state = load.state_of(os.getpid())
  assert state is not None
  assert state['MiB'] > 10
  assert state['files'] > 2
  assert state['threads'] >= 1
  assert load.state_of(2**22 + 1) is None  # above the largest process number
