"""Engines that start the next chunk before the host reads the last one, against engines that read each chunk first."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import tiny_engine
from tiny_engine import SAMPLING, engine_config, requests, weights

from sprl.config import Cache
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig

CHUNK = SAMPLING.chunk
DENSE, SPARSE = Cache(), Cache(method='h2o', budget=10, interval=CHUNK, window=3)


class OneAtATime(EngineConfig):
  """Chunks of fixed length without lookahead."""

  @property
  def in_flight(self):
    return 1


def engine_of(settings=SPARSE, kind=EngineConfig, asked=(), **changes):
  fields = vars(dataclasses.replace(engine_config(settings), fixed_chunks=True, **changes))
  engine = Engine(kind(**{field.name: fields[field.name] for field in dataclasses.fields(EngineConfig)}), weights())
  for request in asked:
    engine.add(request)
  return engine


def finish(engine):
  done = []
  while engine.load:
    engine.dispatch()
    done += engine.collect()
  return {c.request.uid: c for c in done}


def assert_equal(found, expected):
  assert set(found) == set(expected)
  for uid, completion in found.items():
    for name in ('tokens', 'attended', 'finish'):
      np.testing.assert_array_equal(getattr(completion, name), getattr(expected[uid], name), err_msg=f'{uid} {name}')
    np.testing.assert_allclose(completion.logp, expected[uid].logp, atol=1e-5)


def asked():
  """Nine requests for six rows, which end at different steps."""
  return [dataclasses.replace(r, max_tokens=5 + 2 * i) for i, r in enumerate(requests(group=3))]


@cache
def one_at_a_time(settings=SPARSE, stop=()):
  return finish(engine_of(settings, OneAtATime, asked(), sampling=dataclasses.replace(SAMPLING, stop=stop)))


@pytest.mark.parametrize('settings', [SPARSE, pytest.param(DENSE, marks=pytest.mark.slow)], ids=['sparse', 'dense'])
def test_tokens_do_not_depend_on_lookahead(settings):
  assert_equal(finish(engine_of(settings, asked=asked())), one_at_a_time(settings))


def test_stop_strings_end_at_the_same_token():
  longest = max(one_at_a_time().values(), key=lambda c: len(c.tokens))
  stop = (tiny_engine.text(longest.tokens[6:8]),)
  expected = one_at_a_time(stop=stop)
  assert 'stop' in {c.finish for c in expected.values()}
  assert_equal(finish(engine_of(asked=asked(), sampling=dataclasses.replace(SAMPLING, stop=stop))), expected)


def test_a_second_chunk_starts_only_if_a_request_may_outlast_the_first():
  engine = engine_of(asked=[dataclasses.replace(requests()[0], max_tokens=CHUNK + 1)])
  engine.dispatch()
  assert len(engine._chunks) == 1
  engine.collect()
  engine.add(dataclasses.replace(requests()[1], max_tokens=CHUNK + 2))
  engine.dispatch()
  assert len(engine._chunks) == 2
  assert not engine.collect()
  (done,) = engine.collect()
  assert len(done.tokens) == CHUNK + 2


def test_a_chunk_in_the_queue_draws_with_the_weights_that_it_was_started_with():
  engine = engine_of(
    asked=[dataclasses.replace(r, max_tokens=2 * CHUNK + 1 + 3 * (i == 1)) for i, r in enumerate(requests()[:2])]
  )
  engine.dispatch()
  assert not engine.collect()
  engine.swap(weights(seed=1), 1)  # reads the second chunk, in which the first request ends
  assert engine.load == 2
  done = finish(engine)
  assert done[100].version.tolist() == [0] * (2 * CHUNK + 1)
  assert done[101].version.tolist() == [0] * (2 * CHUNK + 1) + [1] * 3
  np.testing.assert_array_equal(
    done[101].tokens[: 2 * CHUNK + 1], finish(engine_of(asked=requests()[1:2]))[101].tokens[: 2 * CHUNK + 1]
  )


def started_behind_the_queued_chunks():
  """Return an engine with one request in two queued chunks, and another in a row that is in neither."""
  engine = engine_of(asked=requests()[:1])
  engine.dispatch()
  engine.add(requests()[1])
  engine.dispatch()
  assert len(engine._chunks) == 2
  assert engine.load == 2
  return engine


def test_the_first_token_has_the_version_of_the_weights_that_drew_it():
  engine = started_behind_the_queued_chunks()
  engine.swap(weights(seed=1), 1)
  done = finish(engine)[101]
  assert done.version.tolist() == [0] + [1] * (len(done.tokens) - 1)
  expected = finish(engine_of(asked=requests()[1:2]))[101]
  assert done.tokens[0] == expected.tokens[0]
  assert done.logp[0] == pytest.approx(expected.logp[0], abs=1e-5)


def test_an_aborted_request_in_no_chunk_frees_its_row_at_once():
  engine = started_behind_the_queued_chunks()
  (aborted,) = engine.abort([101])
  assert (aborted.finish, len(aborted.tokens), engine.load) == ('abort', 0, 1)
  engine.abort([100])
  assert engine.load == 1  # the row is in the chunks
  engine.unload()
  assert engine._state is None


def test_aborted_requests_continue_as_if_never_aborted():
  engine = engine_of(asked=asked()[4:])
  engine.dispatch()
  assert not engine.collect()
  parts = {c.request.uid: c for c in engine.abort()}
  assert max(len(part.tokens) for part in parts.values()) == 2 * CHUNK + 1  # of the chunk that was in the queue too
  for part in parts.values():
    engine.add(part.rest())
  engine.swap(weights(), 1)
  assert engine.load == len(parts)
  later = finish(engine)
  assert_equal({uid: part.then(later[uid]) for uid, part in parts.items()}, {uid: one_at_a_time()[uid] for uid in parts})


def test_usage_counts_the_time_of_a_chunk_that_a_swap_collects():
  engine = engine_of(asked=asked()[4:])
  engine.dispatch()
  engine.collect()
  busy = engine.usage.busy
  engine.swap(weights(), 1)
  assert engine.usage.chunks == 2
  assert engine.usage.busy > busy
  assert 0 <= engine.usage.host_overhead <= 1
