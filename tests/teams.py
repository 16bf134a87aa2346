"""Threads that stand for the processes of a run."""

import threading
from multiprocessing import Pipe

from sprl.distributed.team import Team


def together(*programs):
  """Run `programs[k](team)` as process k. Return the results. If a program raises an exception, its result is the exception."""
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
