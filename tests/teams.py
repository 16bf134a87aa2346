"""Processes of a run as threads of a test."""

import threading
from multiprocessing import Pipe

from sprl.parallel.team import Team


def together(*programs):
  """What each process's program returns of its team, or the exception that it raises; the first leads."""
  pairs = [Pipe() for _ in programs[1:]]
  teams = [Team(0, len(programs), [ours for ours, _ in pairs])]
  teams += [Team(k, len(programs), [theirs]) for k, (_, theirs) in enumerate(pairs, 1)]
  found: dict[int, object] = {}

  def run(team, program):
    try:
      found[team.process] = program(team)
    except Exception as error:
      found[team.process] = error

  threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in zip(teams, programs)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=20)
  return [found.get(k) for k in range(len(programs))]
