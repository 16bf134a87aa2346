"""Helpers of tests of worker pools: a manual clock, workers that answer at once, and waits with a time limit."""

import os
import time
from concurrent.futures import Future

from sprl.foreign import attempt

PATIENCE = 120.0  # seconds until a test of a broken pool fails; on a busy machine a Ray actor starts in 40


class ManualClock:
  """A clock whose `time` the test sets."""

  def __init__(self):
    self.time = 0.0

  def __call__(self):
    return self.time


class InlineWorker:
  """A worker that answers at once, in the pool's thread. Set `gone` to the reason of its death while it is idle."""

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
  """Wait for these tickets. Return their results."""
  found, until = {}, time.monotonic() + PATIENCE
  while len(found) < len(tickets):
    assert time.monotonic() < until, f'no results for {set(tickets) - found.keys()}'
    pool.wait(0.1)
    found |= pool.poll(tickets)
  return [found[ticket] for ticket in tickets]


def answers(pool, *calls):
  """Submit these calls and wait for them. Return their results."""
  return results(pool, *[pool.submit(call) for call in calls])


def until(condition, what='in time', seconds=PATIENCE):
  """Wait until the condition holds. Fail after `seconds`."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, what
    time.sleep(0.01)


def alive(pid):
  """Return whether a process runs. A zombie does not run."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except OSError:  # it ended before the file was opened, or while it was read
    return False


def processes(command):
  """Return the ids of running processes whose command line starts with `command` (arguments separated by NUL)."""
  found = []
  for pid in filter(str.isdigit, os.listdir('/proc') if os.path.isdir('/proc') else []):
    try:
      with open(f'/proc/{pid}/cmdline') as file:
        if file.read().startswith(command) and alive(pid):
          found.append(int(pid))
    except OSError:
      continue
  return found
