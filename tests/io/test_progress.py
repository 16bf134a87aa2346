"""The progress line: its format, and the time left."""

from sprl.io.progress import Progress, format_duration, progress_line


def test_progress_line_and_durations():
  rest = '1,234 tokens/s  3m 20s left'
  assert progress_line(12, 100, 0.53125, 0.00214, 1234.4, 200.0) == f'step  12/100  reward  0.531  mismatch  0.0021     {rest}'
  for mismatch, shown in ((1.23e-13, '1.2e-13'), (0.0, '      0'), (0.125, '   0.12'), (22015.0, '2.2e+04'), (None, '      -')):
    assert f'mismatch {shown}     {rest}' in progress_line(12, 100, 0.5, mismatch, 1234.4, 200.0)
  durations = [format_duration(seconds) for seconds in (-1.0, 0.4, 59.4, 60.0, 3599.6, 7500.0)]
  assert durations == ['0s', '0s', '59s', '1m 00s', '1h 00m', '2h 05m']


def test_time_left_is_the_median_step_times_the_steps_left():
  now, shown = [100.0], []
  progress = Progress(20, clock=lambda: now[0], show=shown.append)
  for step, seconds in enumerate([60.0, 2.0, 2.0, 30.0, 2.0], 1):  # the first compiles, the fourth evaluates
    now[0] += seconds
    progress.step(step, 0.5, 1e-3, 1000.0)
  assert shown[0].endswith('19m 00s left')
  assert shown[4].endswith('30s left')
