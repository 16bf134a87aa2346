"""Signals that ask a run to stop. The training loop checks for them between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
  """A request to end the run: `received` is the name of the signal or of another cause, or ''."""

  received = ''


@contextmanager
def signals() -> Iterator[Stop]:
  """Record the first SIGTERM or SIGINT in the `Stop` that it yields. A second signal of that kind has its usual effect.

  Outside the main thread, Python handles no signals: the `Stop` then records none.
  """
  stop = Stop()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return

  def record(number, _):
    stop.received = signal.Signals(number).name
    signal.signal(number, previous[number])

  previous = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
