"""Signals that ask a run to stop. The training loop checks for them between steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
  """A request to end the run: `received` is the name of the signal, or ''."""

  received = ''


@contextmanager
def signals() -> Iterator[Stop]:
  """Record the first SIGTERM or SIGINT in the `Stop` that it yields. A second signal of that kind has its usual effect."""
  stop = Stop()

  def record(number, _):
    stop.received = signal.Signals(number).name
    signal.signal(number, previous[number])

  previous = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
