"""The timeline against seconds counted one by one, and the trace file against the rules of its viewers."""

import contextlib
import itertools
import json
import threading
from collections import defaultdict

import numpy as np
import pytest

from sprl.rollout.timeline import Timeline
from sprl.train import trace_file


class ManualClock:
  """A clock whose `time` the test sets."""

  def __init__(self):
    self.time = 0.0

  def __call__(self):
    return self.time


def random_timeline(rng, tracks, end=60):
  """Return (timeline of spans between whole seconds, {track: whether each second is busy, [end] bool})."""
  timeline, busy, spans = Timeline(ManualClock()), {}, []
  for track in tracks:
    edges = rng.choice(end + 1, size=2 * int(rng.integers(0, 10)), replace=False)
    busy[track] = np.zeros(end, bool)
    for start, stop in np.sort(edges).reshape(-1, 2).tolist():
      spans.append((track, 'work', float(start), float(stop)))
      busy[track][start:stop] = True
  for span in sorted(spans, key=lambda span: span[3]):
    timeline.add(*span)
  return timeline, busy


@pytest.mark.parametrize('seed', range(5))
def test_busy_time_equals_a_count_second_by_second(seed):
  rng = np.random.default_rng(seed)
  timeline, busy = random_timeline(rng, ('learner', 'engine 0', 'engine 1'))
  for track, seconds in busy.items():
    for start, stop in [(0, 60), *np.sort(rng.integers(0, 61, (5, 2))).tolist()]:
      assert timeline.busy(track, float(start), float(stop)) == seconds[start:stop].sum()
  assert timeline.busy('unknown', 0.0, 60.0) == 0


@pytest.mark.parametrize('seed', range(3))
def test_idle_is_the_share_of_seconds_without_a_span(seed):
  rng = np.random.default_rng(seed)
  timeline, busy = random_timeline(rng, ('learner', 'engine 0', 'engine 1'))
  for start, stop in [(0, 60), (20, 40), (59, 60)]:
    assert timeline.idle(['learner'], float(start), float(stop)) == pytest.approx(1 - busy['learner'][start:stop].mean())
    engines = np.stack([busy['engine 0'], busy['engine 1']])[:, start:stop]
    assert timeline.idle(['engine 0', 'engine 1'], float(start), float(stop)) == pytest.approx(1 - engines.mean())


def test_fractions_of_seconds_count():
  timeline = Timeline(ManualClock())
  timeline.add('a', 'x', 0.5, 2.0)
  timeline.add('b', 'y', 1.75, 3.0)
  assert timeline.busy('a', 1.0, 1.25) == 0.25
  assert timeline.busy('a', -5.0, 0.75) == 0.25
  assert timeline.busy('a', 2.0, 9.0) == 0


def test_a_span_ends_even_if_its_block_raises():
  now = ManualClock()
  timeline = Timeline(now)
  now.time = 3.0
  with timeline.span('learner', 'update 1', version=7):
    now.time = 5.0
  with contextlib.suppress(ZeroDivisionError), timeline.span('learner', 'update 2'):
    now.time = 6.0
    raise ZeroDivisionError
  assert [(s.track, s.name, s.start, s.end, s.facts) for s in timeline.spans] == [
    ('learner', 'update 1', 3.0, 5.0, {'version': 7}),
    ('learner', 'update 2', 5.0, 6.0, {}),
  ]


def test_the_newest_spans_are_kept():
  timeline = Timeline(ManualClock(), limit=10)
  for i in range(95):
    timeline.add('a', f'{i}', float(i), i + 1.0)
    kept = [int(s.name) for s in timeline.spans]
    assert kept == list(range(i + 1))[-len(kept) :]
    assert min(10, i + 1) <= len(kept) <= 20
  assert len(kept) < 95


def test_threads_add_spans_in_parallel():
  timeline, barrier = Timeline(ManualClock()), threading.Barrier(4)

  def work(track):
    barrier.wait(30)
    for i in range(500):
      timeline.add(track, 'x', float(i), i + 1.0)

  threads = [threading.Thread(target=work, args=(f'{k}',)) for k in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [timeline.busy(f'{k}', 0.0, 500.0) for k in range(4)] == [500.0] * 4


# --- the trace file --------------------------------------------------------------------------------------------------


def read_trace(timeline, folder):
  """Return ({row id: name}, spans) of the trace file."""
  timeline.write(folder / 'trace.json')
  events = json.loads((folder / 'trace.json').read_text(encoding='utf-8'))['traceEvents']
  names = {e['tid']: e['args']['name'] for e in events if e['ph'] == 'M' and e['name'] == 'thread_name'}
  assert len(names) == sum(e['ph'] == 'M' for e in events)  # one name for each row
  spans = [e for e in events if e['ph'] == 'X']
  assert len(spans) + len(names) == len(events)
  assert all(e['pid'] == 0 and e['tid'] in names for e in spans)
  return names, spans


def test_the_trace_has_a_named_row_for_each_track(tmp_path):
  timeline = Timeline(ManualClock())
  timeline.add('learner', 'update 1', 1.5, 2.25, version=0)
  timeline.add('engine 0', 'chunk', 0.0, 3.0, load=4)
  timeline.add('learner', 'update 2', 2.25, 4.0, reason='größer ✓')
  names, spans = read_trace(timeline, tmp_path)
  assert list(names.values()) == ['learner', 'engine 0']
  found = [(names[e['tid']], e['name'], e['ts'], e['dur'], e['args']) for e in spans]
  assert found == [  # in microseconds
    ('learner', 'update 1', 1.5e6, 0.75e6, {'version': 0}),
    ('engine 0', 'chunk', 0.0, 3e6, {'load': 4}),
    ('learner', 'update 2', 2.25e6, 1.75e6, {'reason': 'größer ✓'}),
  ]


def test_an_empty_timeline_writes_a_valid_trace(tmp_path):
  assert read_trace(Timeline(ManualClock()), tmp_path) == ({}, [])


def test_nested_spans_share_a_row(tmp_path):
  timeline = Timeline(ManualClock())
  for start, end in ((0, 9), (1, 4), (2, 3), (4, 9), (9, 10)):
    timeline.add('controller', f'{start}', float(start), float(end))
  names, _ = read_trace(timeline, tmp_path)
  assert list(names.values()) == ['controller']


@pytest.mark.parametrize('seed', range(3))
def test_overlapping_spans_get_separate_rows(tmp_path, seed):
  """Viewers drop a span that overlaps another span of its row only in part. Groups overlap in every way."""
  rng = np.random.default_rng(seed)
  timeline = Timeline(ManualClock())
  start = 1e5 + rng.random(60) * 10  # on a clock that has run for a day
  for i, (a, b) in enumerate(zip(start, start + rng.random(60))):
    timeline.add('groups', f'group {i}', float(a), float(b))
  timeline.add('learner', 'update', 0.0, 10.0)
  names, spans = read_trace(timeline, tmp_path)
  assert len(set(names.values())) == len(names)
  assert [name for name in names.values() if not name.startswith('groups')] == ['learner']
  assert 'groups' in names.values()
  assert len(spans) == 61  # none is lost
  rows = defaultdict(list)
  for e in spans:
    rows[e['tid']].append((round(e['ts'] * 1e3), round((e['ts'] + e['dur']) * 1e3)))
  for row in rows.values():
    for a, b in row:
      for c, d in row:
        assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
  most = max(np.sum((start <= t) & (t < start + 1)) for t in start)
  assert len(rows) - 1 <= most


def test_a_start_that_ends_before_its_first_step_does_not_replace_an_earlier_timeline(tmp_path):
  def start(done: int, text: str) -> dict[str, str]:
    """Write the timeline of a start that resumes after `done` steps. Return all timelines."""
    path = trace_file(tmp_path, done, steps=20)
    assert path is not None
    path.write_text(text)
    return {path.name: path.read_text() for path in tmp_path.iterdir()}

  start(0, 'steps 1 to 10')
  for attempt in ('first', 'second'):
    assert start(10, attempt) == {'trace.json': attempt, 'trace_until_10.json': 'steps 1 to 10'}
  start(10, 'steps 11 to 15')
  assert start(15, 'more') == {
    'trace.json': 'more', 'trace_until_10.json': 'steps 1 to 10', 'trace_until_15.json': 'steps 11 to 15'
  }  # fmt: skip
  assert trace_file(tmp_path, 20, steps=20) is None


def test_adjacent_spans_do_not_overlap_in_the_file(tmp_path):
  """On a clock that has run for long, microseconds are large numbers, so sums of them are rounded."""
  rng = np.random.default_rng(0)
  edges = 1e5 + np.cumsum(rng.random(2000) * 1e-3)
  timeline = Timeline(ManualClock())
  for a, b in itertools.pairwise(edges):
    timeline.add('engine 0', 'chunk', float(a), float(b))
  _, spans = read_trace(timeline, tmp_path)
  nanoseconds = [(round(e['ts'] * 1e3), round(e['dur'] * 1e3)) for e in spans]
  assert all(start + lasts == following for (start, lasts), (following, _) in itertools.pairwise(nanoseconds))
