"""The records of a sequence that was read several times: an interrupted request, the turns of a conversation. Worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
from test_episodes import WIDE, Letters, completion

from sprl.rollout.episodes import Generate, Work, conversation
from sprl.tasks.environments.protocol import Outcome
from sprl.types import Completion, Request, Trajectory

PROMPT = np.array([7, 8], np.int32)


def experts(*numbers):
  """Return routes [T, 1, 2]: token t has the experts (numbers[t], numbers[t] + 1); None: not read."""
  return np.array([[[-1, -1] if n is None else [n, n + 1]] for n in numbers], np.int8)


def part(request, tokens, version, finish='abort', **records):
  n = len(tokens)
  logp, versions, attended = np.full(n, -version - 1, np.float32), np.full(n, version, np.int32), np.arange(n, dtype=np.int32)
  tokens = np.array(tokens, np.int32)
  return Completion(request=request, tokens=tokens, logp=logp, version=versions, attended=attended, finish=finish, **records)


def interrupted_twice():
  """Return the parts of a request that draws two tokens, waits for a row in vain, and draws two more."""
  first = part(Request(1, 0, PROMPT, 5), [10, 11], 3, saturated=6, routes=experts(0, 2, 4, None), prefilled=(4, 32))
  waiting = part(first.rest(), [], 4)
  last = part(waiting.rest(), [12, 13], 5, 'stop', saturated=4, routes=experts(20, 22, 24, 26, 28, None), prefilled=(1, 64))
  return first, waiting, last


def test_a_token_keeps_the_experts_of_its_first_reading():
  first, waiting, last = interrupted_twice()
  for joined in (first.then(waiting).then(last), first.then(waiting.then(last))):
    trajectory = Trajectory.of(joined)
    assert trajectory.tokens.tolist() == [7, 8, 10, 11, 12, 13]
    assert trajectory.version.tolist() == [-1, -1, 3, 3, 5, 5]
    np.testing.assert_array_equal(trajectory.routes, experts(0, 2, 4, 26, 28, None))
    assert trajectory.routes.dtype == np.int8


def test_experts_of_the_only_part_that_recorded_them_are_kept():
  first, _, last = interrupted_twice()
  np.testing.assert_array_equal(replace(first, routes=None).then(last).routes, last.routes)
  assert replace(first, routes=None).then(replace(last, routes=None)).routes is None


def test_saturation_is_that_of_the_worst_cache():
  """A sum would count the tokens of the first part twice: the continuation reads them again."""
  first, waiting, last = interrupted_twice()
  assert first.then(waiting).then(last).saturated == 6
  assert replace(first, saturated=1).then(last).saturated == 4


def test_the_first_prefill_is_recorded():
  first, waiting, last = interrupted_twice()
  assert first.then(waiting).then(last).prefilled == (4, 32)
  assert waiting.then(last).prefilled == (1, 64)


def test_evictions_of_two_caches_are_not_joined():
  first, _, last = interrupted_twice()
  with pytest.raises(AssertionError, match='evicts other tokens'):
    first.then(replace(last, evicted=np.zeros((1, 1, 6), np.int32)))


def test_a_token_of_a_conversation_keeps_the_experts_of_its_first_turn():
  """`a/>` and the answer `xy`; then `.b/>` and the answer `z`."""
  episode = conversation(0, WIDE, Letters(), lambda method, argument: (method, argument), lambda: None)
  assert isinstance(next(episode), Work)
  wanted = episode.send(('a', {}))
  assert isinstance(wanted, Generate)
  episode.send(replace(completion(wanted, 'xy'), saturated=9, routes=experts(0, 1, 2, 3, None)))
  wanted = episode.send(Outcome('b', 0.0, False, False, {}))
  numbers = *range(30, 39), None
  episode.send(replace(completion(wanted, 'z'), saturated=2, routes=experts(*numbers)))
  with pytest.raises(StopIteration) as end:
    episode.send(Outcome('', 1.0, True, False, {}))
  trajectory = end.value.value
  assert ''.join(map(chr, trajectory.tokens)) == 'a/>xy.b/>z'
  np.testing.assert_array_equal(trajectory.routes, experts(0, 1, 2, 3, *numbers[4:]))
  assert trajectory.saturated == 9


def test_the_request_behind_several_interruptions_knows_all_tokens_of_its_completion():
  """`resumed` tells the engine where the completion begins: a stop string may span the interruptions."""
  asked = Request(1, 0, PROMPT, 9, given=np.array([20, 21], np.int32))  # an earlier turn
  first = part(asked, [10, 11], 3)
  waiting = part(first.rest(), [], 4)
  rest = part(waiting.rest(), [12, 13, 14], 5).rest()
  assert rest.given.tolist() == [20, 21, 10, 11, 12, 13, 14]
  assert (rest.resumed, rest.max_tokens, rest.start) == (5, 4, 9)
