"""A run whose chunks take a while: whether any of them was begun while weights were on their way to the engine. Prints JSON.

Arguments: those of sprl.main.
"""

import json
import threading
import time

from sprl import command_line, main
from sprl.rollout.setup import PlacedEngine
from sprl.sampler.engine import Engine

dispatch, place = Engine.dispatch, PlacedEngine.place
chunk, waited = threading.Event(), []


def dispatching(slots):
  chunk.set()
  time.sleep(0.5)  # so that a batch takes longer than an update, and there is always more to do
  dispatch(slots)


def placing(placed, served):
  chunk.clear()
  waited.append(chunk.wait(1))
  return place(placed, served)


def run():
  status = main.main()
  print(json.dumps(waited[1:]))  # the first are those that the engine begins with
  return status


Engine.dispatch, PlacedEngine.place = dispatching, placing
command_line.start(run)
