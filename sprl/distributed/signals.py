"""Signals that ask a run to stop. The training loop checks for them between steps."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ECHO = 0.5  # seconds in which a signal that arrives again belongs to the same request


class Stop:
  """A request to end the run: `received` is the name of the signal or of another cause, or ''."""

  received = ''


@contextmanager
def signals() -> Iterator[Stop]:
  """Record the first SIGTERM or SIGINT in the `Stop` that it yields. A second signal of that kind has its usual effect.

  A signal that arrives again within ECHO seconds is ignored. `timeout` sends its signal to a command and to the command's group;
  systemd sends it to all processes of a service, and a launcher then forwards it.
  Outside the main thread, Python handles no signals: the `Stop` then records none.
  """
  stop = Stop()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return

  def record(number, _):
    stop.received = signal.Signals(number).name
    signal.signal(number, lambda *_: None)  # not SIG_IGN, which processes that start now would inherit
    time.sleep(ECHO)
    signal.signal(number, previous[number])

  previous = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield stop
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
