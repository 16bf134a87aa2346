"""The progress line that a run prints after each step."""

import statistics
import time
from collections import deque
from collections.abc import Callable


class Progress:
  """Prints one line per step, with an estimate of the time left.

  The estimate uses the median of the last ten steps: single steps that compile, evaluate or save do not distort it.
  """

  def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic, show: Callable[[str], None] = print):
    self._steps, self._clock, self._show = steps, clock, show
    self._durations: deque[float] = deque(maxlen=10)
    self._before = clock()

  def step(self, step: int, reward: float, mismatch: float | None, tokens_per_second: float) -> None:
    """Print the line of `step`, which has just ended. The arguments are those of `progress_line`."""
    now = self._clock()
    self._durations.append(now - self._before)
    self._before = now
    left = statistics.median(self._durations) * (self._steps - step)
    self._show(progress_line(step, self._steps, reward, mismatch, tokens_per_second, left))


def progress_line(
  step: int, steps: int, reward: float, mismatch: float | None, tokens_per_second: float, seconds_left: float
) -> str:
  """Format a line such as `step  12/100  reward  0.531  mismatch  0.0021     1,234 tokens/s  3m 20s left`.

  `mismatch` is the KL estimate k3 between sampler and learner, in nats per token; None: it was not measured.
  """
  count = f'{step:{len(str(steps))}d}/{steps}'
  apart = '-' if mismatch is None else f'{mismatch:.2g}'
  return (
    f'step {count}  reward {reward:6.3f}  mismatch {apart:>7}  {tokens_per_second:8,.0f} tokens/s  '
    f'{format_duration(seconds_left)} left'
  )


def format_duration(seconds: float) -> str:
  """Format seconds as `45s`, `3m 20s` or `2h 05m`."""
  seconds = max(0, round(seconds))
  if seconds < 60:
    return f'{seconds}s'
  if seconds < 3600:
    return f'{seconds // 60}m {seconds % 60:02d}s'
  return f'{seconds // 3600}h {seconds % 3600 // 60:02d}m'
