"""What tests of worker pools share: a clock that the test turns, workers that answer at once, and waiting for results."""

import os
import time
from concurrent.futures import Future

from sprl.tasks.foreign import attempt

PATIENCE = 30.0  # seconds that a broken pool may keep a test


class Hand:
  """A clock that a test turns."""

  def __init__(self):
    self.time = 0.0

  def __call__(self):
    return self.time


class Inline:
  """A worker that answers at once, in the thread of the pool. `gone` says how it died while it was idle."""

  def __init__(self, load):
    self.ready: Future[str] = Future()
    self.service, why = attempt(load)
    self.ready.set_result(why)
    self.gone, self.ended = '', False

  def ask(self, call):
    future: Future = Future()
    future.set_result(attempt(self.service, call))
    return future

  def died(self):
    return self.gone

  def end(self):
    self.ended = True


def results(pool, *tickets):
  """The results of these tickets, once all are ready."""
  found, until = {}, time.monotonic() + PATIENCE
  while len(found) < len(tickets):
    assert time.monotonic() < until, f'no results for {set(tickets) - found.keys()}'
    pool.wait(0.1)
    found |= pool.poll(tickets)
  return [found[ticket] for ticket in tickets]


def answers(pool, *calls):
  """The results of these calls."""
  return results(pool, *[pool.submit(call) for call in calls])


def until(condition, what='in time'):
  """Waits until the condition holds."""
  end = time.monotonic() + PATIENCE
  while not condition():
    assert time.monotonic() < end, what
    time.sleep(0.01)


def alive(pid):
  """Whether a process runs. One that has ended and waits for its parent does not."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def processes(command):
  """The ids of running processes whose command line begins so (arguments separated by NUL)."""
  found = []
  for pid in filter(str.isdigit, os.listdir('/proc') if os.path.isdir('/proc') else []):
    try:
      with open(f'/proc/{pid}/cmdline') as file:
        if file.read().startswith(command) and alive(pid):
          found.append(int(pid))
    except OSError:
      continue
  return found
