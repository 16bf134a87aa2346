"""benchmarks/simulation.py: an engine whose steps take longer with more running requests, against times worked out by hand."""

import numpy as np
import pytest
from simulation import Clock, SimulatedEngine

from sprl.types import Request

pytestmark = pytest.mark.usefixtures('unchecked')

STEPS = {0: 10, 1: 5, 2: 4}  # decode steps of each request


def engine_of(capacity, chunk=0.0):
  """Return an engine whose steps take 2 + n seconds with n running requests."""
  return SimulatedEngine(Clock(), capacity, lambda request: STEPS[request.uid], chunk, lambda running: 2.0 + running)


def ask(engine, *uids):
  for uid in uids:
    engine.add(Request(uid, 0, np.zeros(1, np.int32), 100))
  engine.dispatch()


def until_empty(engine):
  """Return {uid: time when it was collected} of the requests that are left."""
  ends = {}
  while engine.load:
    while not engine.ready:
      engine.wait(1.0)
    ends |= {completion.request.uid: engine.clock() for completion in engine.collect()}
    engine.dispatch()
  return ends


def test_a_request_slows_down_when_others_join_and_speeds_up_when_they_leave():
  engine = engine_of(capacity=2)
  ask(engine, 0)
  engine.clock.until(6.0)  # 2 steps of 3 s
  assert not engine.collect()
  ask(engine, 1, 2)  # 2 waits for room
  # Request 1 takes 5 steps of 4 s, until 26. Request 0 has made 7 steps then. Its last 3 take 12 s beside request 2, which has
  # one step of 3 s left at 38.
  assert until_empty(engine) == pytest.approx({1: 26.0, 0: 38.0, 2: 41.0})


def test_the_others_end_earlier_if_a_request_is_aborted():
  engine = engine_of(capacity=2)
  ask(engine, 0, 2)
  engine.clock.until(8.0)  # 2 steps of 4 s
  (aborted,) = engine.abort([0])
  assert len(aborted.tokens) == 20  # 2 of 10 steps, of 100 tokens
  assert until_empty(engine) == pytest.approx({2: 14.0})  # 2 more steps of 3 s


def test_a_resumed_request_takes_the_rest_of_its_steps():
  engine = engine_of(capacity=1)
  ask(engine, 1)
  engine.clock.until(6.0)  # 2 steps of 3 s
  (aborted,) = engine.abort()
  assert aborted.rest().max_tokens == 60
  engine.clock.until(20.0)
  engine.add(aborted.rest())
  engine.dispatch()
  assert until_empty(engine) == pytest.approx({1: 29.0})


def test_a_request_that_ends_within_a_chunk_keeps_its_place_to_the_chunk_s_end():
  engine = engine_of(capacity=2, chunk=10.0)
  ask(engine, 0, 2)
  # Four steps of 4 s end request 2 at 16; it is collected at 20. Request 0 has made 5 steps then; 5 of 3 s end at 35.
  assert until_empty(engine) == pytest.approx({2: 20.0, 0: 40.0})
