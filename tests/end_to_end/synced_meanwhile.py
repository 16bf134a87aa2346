"""Run sprl.main with slow chunks. Print JSON: for each transfer of weights to the engine, whether a chunk begins during it.

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


def dispatching(engine):
  chunk.set()
  time.sleep(0.5)  # a batch then takes longer than an update, so the engine rarely runs out of work
  dispatch(engine)


def placing(placed, weights):
  chunk.clear()
  waited.append(chunk.wait(1))
  return place(placed, weights)


def run():
  status = main.main()
  print(json.dumps(waited[1:]))  # the first transfer brings the initial weights
  return status


Engine.dispatch, PlacedEngine.place = dispatching, placing
command_line.start(run)
