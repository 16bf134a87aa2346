"""Kept caches: a turn that goes on from the cache of the turn before equals a turn that reads everything again.

The oracle is the engine without kept caches, which other tests compare with the learner. Log-probs agree to rounding: without a
kept cache, the tokens of earlier answers go through the network in one pass, with it they went through one by one.
"""

import dataclasses
import string
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import tiny_engine
from code_flips import flipped
from test_engine import FLIPPED, MEMORIES, SLOW, config_of, run, weights_of
from tiny_engine import C, network

from sprl.cache.layout import cache_layout
from sprl.config import Cache, Quant
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.sampler import decode, kept
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.types import NOTHING, Request

UIDS = (7, 3, 9, 4)
TURNS = 3


def prompt_of(uid):
  return np.random.default_rng(uid).integers(0, 259, 3 + uid).astype(np.int32)


def reply_of(uid, turn):
  rng = np.random.default_rng([uid, turn])
  return rng.integers(0, 259, 1 + rng.integers(4)).astype(np.int32)


class Talk:
  """Conversations with an engine, one turn after the other. `found` has the completions by (turn, uid)."""

  def __init__(self, engine, reuse, uids=UIDS, max_tokens=lambda uid: 4 + uid % 2, reply=reply_of):
    self.engine, self.reuse, self.max_tokens, self.reply = engine, reuse, max_tokens, reply
    self.given, self.found, self.turn = dict.fromkeys(uids, NOTHING), {}, 0

  def turns(self, count=1):
    for _ in range(count):
      for uid in self.given:
        self.engine.add(self.request(uid))
      for uid, completion in run(self.engine).items():
        self.found[self.turn, uid] = completion
        self.given[uid] = np.concatenate([self.given[uid], completion.tokens, self.reply(uid, self.turn)]).astype(np.int32)
      self.turn += 1
    return self

  def request(self, uid):
    before = (uid, 0) if self.reuse and self.turn else None
    return Request(uid, uid, prompt_of(uid), self.max_tokens(uid), self.given[uid], keep=self.reuse, continues=before)


def engine_of(memory='dense', version=0, **sampling):
  config = config_of(memory)
  return Engine(
    dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, **sampling)), weights_of(memory), version
  )


@cache
def read_again(memory='dense'):
  """Return conversations without kept caches."""
  return Talk(engine_of(memory), reuse=False).turns(TURNS)


def differing(found, expected, atol=1e-5):
  """Return the completions, by (turn, uid), that differ in a token, in a count of attended slots, or in a log-prob."""
  assert found.keys() == expected.keys()
  same = {at: np.array_equal(a.tokens, expected[at].tokens) for at, a in found.items()}
  same = {at: ok and np.array_equal(found[at].attended, expected[at].attended) for at, ok in same.items()}
  return [at for at, ok in same.items() if not ok or flipped([found[at].logp], [expected[at].logp], atol)]


# --- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('memory', [*MEMORIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_turns_that_go_on_from_kept_caches_equal_turns_that_read_everything(memory):
  again, reused = read_again(memory), Talk(engine_of(memory), reuse=True).turns(TURNS)
  assert len(differing(reused.found, again.found)) <= FLIPPED.get(memory, 0)
  usage, lengths = reused.engine.usage, [c.request.start for (turn, _), c in again.found.items() if turn]
  assert (usage.prefix_hits, usage.prefix_misses) == (len(UIDS) * (TURNS - 1), 0)
  assert usage.read + usage.prefix_tokens == again.engine.usage.read
  assert usage.prefix_tokens > 0.7 * sum(lengths)
  if memory == 'sparse':  # some answer was drawn from a compressed cache
    assert any(c.attended.max() < c.request.start for c in again.found.values())


def test_a_conversation_has_the_log_probs_of_one_forward_pass():
  """A dense conversation is one causal sequence: a plain forward pass over all of it gives the same log-probs."""
  talk, T = Talk(engine_of(), reuse=True).turns(TURNS), 64
  for uid in UIDS:
    last = talk.found[TURNS - 1, uid]
    tokens = np.concatenate([last.request.prompt, last.request.given, last.tokens])
    logp = forward_logp(np.pad(tokens, (0, T - len(tokens)))[None])[0]
    for turn in range(TURNS):
      c = talk.found[turn, uid]
      np.testing.assert_allclose(c.logp, logp[c.request.start - 1 + np.arange(len(c.tokens)), c.tokens], atol=2e-5)


@jax.jit
def forward_logp(tokens):
  config, params = network()
  positions, attention = jnp.arange(tokens.shape[1])[None], PackedAttention.of(jnp.ones(tokens.shape, jnp.int32))
  hidden = transformer.forward(transformer.graph(config), params, tokens, positions, attention).hidden
  return jax.nn.log_softmax(hidden @ transformer.head_weight(params).T / tiny_engine.SAMPLING.temperature)


def test_turns_record_the_tokens_that_filters_keep():
  def supports(reuse):
    config = engine_of(top_k=6).config
    engine = Engine(dataclasses.replace(config, record_support=True), weights_of())
    return {at: c.support for at, c in Talk(engine, reuse, UIDS[:2]).turns(TURNS).found.items()}

  again, reused = supports(False), supports(True)
  for at, kept_tokens in reused.items():
    assert len(kept_tokens) > 0
    np.testing.assert_array_equal(np.sort(kept_tokens), np.sort(again[at]))


def test_numbers_that_fp8_clamps_are_counted_once():
  """The counts of a turn are those of the whole sequence, as if it were read again."""
  again, reused = read_again('fp8'), Talk(engine_of('fp8'), reuse=True).turns(TURNS)
  last = TURNS - 1
  for uid in UIDS:
    a, b = again.found[last, uid], reused.found[last, uid]
    assert abs(a.saturated - b.saturated) <= 1
    assert abs(a.saturated_queries - b.saturated_queries) <= 1


@pytest.mark.slow
def test_turns_record_the_experts_of_all_tokens():
  """Stop strings end all answers but the last within a chunk, after one token. The tokens behind it leave no experts.

  The last answer has one token, which no step reads.
  """
  found = {}
  config, params = small.model('qwen3_moe', num_hidden_layers=1, num_experts=8, moe_intermediate_size=64)
  layout = cache_layout(config, Cache(), Quant(), 12, C, 'float32', routes=True)
  sampling = dataclasses.replace(tiny_engine.SAMPLING, stop=tuple(string.ascii_lowercase))
  settings = EngineConfig(config, sampling, layout, 4, 2, 0, (), tiny_engine.text)
  for reuse in (True, False):
    engine = Engine(settings, sampler_weights(params, jnp.dtype('float32')))
    talk = Talk(engine, reuse, max_tokens=lambda uid: 4, reply=lambda uid, turn: reply_of(uid, turn)[:1]).turns(TURNS - 1)
    talk.max_tokens = lambda uid: 1
    found[reuse] = talk.turns().found
  assert not differing(found[True], found[False])
  for at, c in found[True].items():
    assert len(c.tokens) == 1
    np.testing.assert_array_equal(c.routes, found[False][at].routes)
    assert (c.routes[:-1] >= 0).all()
    assert (c.routes[-1] >= 0).all() == (at[0] < TURNS - 1)


# --- which caches are kept ---------------------------------------------------------------------------------------------


def test_the_cache_that_was_kept_first_makes_room_for_another():
  engine = engine_of()
  engine._kept = kept.KeptCaches(engine.config.layout, places=2, mesh=None)
  talk = Talk(engine, reuse=True, uids=UIDS[:3], max_tokens=lambda uid: 4).turns(TURNS)
  assert (engine.usage.prefix_hits, engine.usage.prefix_misses) == (2 * (TURNS - 1), TURNS - 1)
  again = Talk(engine_of(), reuse=False, uids=UIDS[:3], max_tokens=lambda uid: 4).turns(TURNS)
  assert not differing(talk.found, again.found)


def test_a_cache_that_a_waiting_request_continues_makes_no_room():
  """Six rows are busy with others. The cache of 3 waits for a row; of the others two end and find one place."""
  engine = engine_of()
  engine._kept = kept.KeptCaches(engine.config.layout, places=2, mesh=None)
  (first,) = run_one(engine, Request(3, 0, prompt_of(3), 4, keep=True))
  for uid in range(10, 16):
    engine.add(Request(uid, 0, prompt_of(3), 4, keep=uid < 12))
  given = np.append(first.tokens, 5).astype(np.int32)
  engine.add(Request(3, 0, prompt_of(3), 4, given, continues=(3, 0)))
  assert len(run(engine)) == 7
  assert (engine.usage.prefix_hits, engine.usage.prefix_misses, len(engine._kept)) == (1, 0, 1)


def test_no_cache_is_kept_with_kept_caches_0():
  engine = engine_of(kept_caches=0)
  talk = Talk(engine, reuse=True).turns(TURNS)
  assert (engine.usage.prefix_hits, engine.usage.prefix_misses, len(engine._kept)) == (0, len(UIDS) * (TURNS - 1), 0)
  assert not differing(talk.found, read_again().found)


@pytest.mark.parametrize('change', ['another token', 'another end of the prompt', 'another key', 'forgotten'])
def test_a_request_that_extends_no_kept_cache_reads_all_its_tokens(change):
  """An evicting cache depends on where its prompt ends, so a prompt of another length is another sequence."""
  engine = engine_of()
  (first,) = run_one(engine, Request(1, 0, prompt_of(3), 4, keep=True))
  given = np.concatenate([first.tokens, [5, 6]]).astype(np.int32)
  request = Request(1, 0, prompt_of(3), 4, given, continues=(1, 0))
  match change:
    case 'another token':
      request = dataclasses.replace(request, given=np.concatenate([first.tokens[:-1] + 1, given[-2:]]))
    case 'another end of the prompt':
      request = dataclasses.replace(request, prompt=np.concatenate([request.prompt, given[:2]]), given=given[2:])
    case 'another key':
      request = dataclasses.replace(request, continues=(1, 1))
    case 'forgotten':
      engine.forget([1])
  (found,) = run_one(engine, request)
  assert (engine.usage.prefix_hits, engine.usage.prefix_misses) == (0, 1)
  (alone,) = run_one(engine_of(), dataclasses.replace(request, continues=None))
  np.testing.assert_array_equal(found.tokens, alone.tokens)
  np.testing.assert_allclose(found.logp, alone.logp, atol=1e-5)


def run_one(engine, request):
  engine.add(request)
  return run(engine).values()


def test_a_kept_cache_serves_one_request():
  engine = engine_of()
  (first,) = run_one(engine, Request(1, 0, prompt_of(3), 4, keep=True))
  request = Request(1, 0, prompt_of(3), 4, np.append(first.tokens, 5).astype(np.int32), continues=(1, 0))
  for uid in (1, 2):
    engine.add(dataclasses.replace(request, uid=uid))
  assert len(run(engine)) == 2
  assert (engine.usage.prefix_hits, engine.usage.prefix_misses) == (1, 1)


def test_an_aborted_request_leaves_no_cache():
  engine = engine_of()
  engine.add(Request(1, 0, prompt_of(3), C, keep=True))
  engine.dispatch()
  engine.collect()
  engine.abort()
  assert len(engine._kept) == 0


def text_of_chunks(memory):
  """Return conversations that a stop string ends within a chunk, with and without kept caches, and both engines' usage."""
  found = []
  for reuse in (True, False):
    engine = engine_of(memory, stop=('a', 'e', 'i', 'o', 'u'))
    talk = Talk(engine, reuse, max_tokens=lambda uid: 4, reply=lambda uid, turn: reply_of(uid, turn)[:2]).turns(TURNS)
    found.append((talk.found, engine.usage))
  return found


@pytest.mark.parametrize('memory', ['dense', 'sparse'])
def test_a_stop_string_cuts_a_dense_cache_and_drops_an_evicting_one(memory):
  """A chunk may decode tokens behind a stop string. Evictions because of these tokens cannot be undone."""
  (reused, usage), (again, _) = text_of_chunks(memory)
  assert not differing(reused, again)
  ended = [c for (turn, _), c in reused.items() if turn < TURNS - 1]
  over = sum(len(c.tokens) < 4 for c in ended)  # the first chunk ends after the fourth token
  assert 0 < over < len(ended)
  assert usage.prefix_misses == (0 if memory == 'dense' else over)
  assert usage.prefix_hits == len(ended) - usage.prefix_misses


# --- other weights -----------------------------------------------------------------------------------------------------


def test_new_weights_read_everything_again_once_the_caches_are_forgotten():
  engine = engine_of()
  talk = Talk(engine, reuse=True).turns()
  engine.forget()
  engine.unload()
  assert engine._kept._store is None
  engine.swap(weights_of(seed=1), 1)
  talk.turns()
  assert engine.usage.prefix_misses == len(UIDS)
  fresh = Engine(config_of(), weights_of(seed=1), 1)
  for uid in UIDS:
    (alone,) = run_one(fresh, dataclasses.replace(talk.found[1, uid].request, keep=False, continues=None))
    np.testing.assert_array_equal(alone.tokens, talk.found[1, uid].tokens)
    np.testing.assert_allclose(alone.logp, talk.found[1, uid].logp, atol=1e-5)
    assert talk.found[1, uid].version.tolist() == [1] * len(alone.tokens)


def test_kept_caches_survive_new_weights_as_running_rows_do():
  """With equal weights the swap changes nothing. With others the old keys and values show in the log-probs."""
  found = {}
  for seed in (0, 1):
    engine = engine_of()
    talk = Talk(engine, reuse=True).turns()
    engine.unload()
    engine.swap(weights_of(seed=seed), 1)
    found[seed] = talk.turns().found
    assert engine.usage.prefix_hits == len(UIDS)
  expected = {at: c for at, c in read_again().found.items() if at[0] < 2}
  assert not differing(found[0], expected)
  fresh = Engine(config_of(), weights_of(seed=1), 1)
  for uid in UIDS:
    c = found[1][1, uid]
    (alone,) = run_one(fresh, dataclasses.replace(c.request, keep=False, continues=None))
    assert abs(alone.logp[0] - c.logp[0]) > 1e-3 or alone.tokens[0] != c.tokens[0]


def test_an_fp8_cache_takes_the_scales_of_new_weights():
  """Scales of twice the size halve all numbers, which is exact. So the cache equals one that is read under the new scales."""
  weights = weights_of('fp8')
  assert weights.scales is not None
  doubled = weights._replace(scales=jax.tree.map(lambda x: 2 * x, weights.scales))
  engine = engine_of('fp8')
  talk = Talk(engine, reuse=True).turns()
  engine.swap(doubled, 1)
  talk.turns()
  assert engine.usage.prefix_hits == len(UIDS)
  fresh = Engine(config_of('fp8'), doubled, 1)
  again = {}
  for uid in UIDS:
    (again[1, uid],) = run_one(fresh, dataclasses.replace(talk.found[1, uid].request, keep=False, continues=None))
  later = {at: c for at, c in talk.found.items() if at[0] == 1}
  assert len(differing(later, again)) <= FLIPPED['fp8']


# --- the programs ------------------------------------------------------------------------------------------------------


def test_conversations_compile_nothing_after_the_first():
  def programs():
    jitted = kept.empty_store, kept.store_rows, kept.read_behind, decode.prefill, decode.insert, decode.decode
    return [f._cache_size() for f in jitted]

  Talk(engine_of(), reuse=True).turns(TURNS)
  before = programs()
  talk = Talk(engine_of(), reuse=True, uids=(5, 8, 2, 6)).turns(TURNS)
  assert talk.engine.usage.prefix_hits > 0
  assert programs() == before


def test_the_tokens_of_a_running_request_can_be_read():
  engine = engine_of()
  engine.add(Request(1, 0, prompt_of(3), 8))
  assert engine.partial(1).tolist() == []
  seen = []
  while engine.load:
    engine.dispatch()
    done = engine.collect()
    seen.append(engine.partial(1))
  assert seen[-1] is None
  assert [len(tokens) for tokens in seen[:-1]] == [5]  # the first token, and a chunk of four
  assert seen[0].tolist() == done[0].tokens[:5].tolist()


def test_a_stop_string_at_the_end_of_a_chunk_keeps_no_cache_to_which_the_next_chunk_writes():
  """With lookahead the next chunk is in the queue when the host finds the stop string. Its evictions cannot be undone."""
  plain = config_of('sparse')

  def engine(stop=()):
    sampling = dataclasses.replace(plain.sampling, stop=stop)
    return Engine(dataclasses.replace(plain, sampling=sampling, fixed_chunks=True), weights_of('sparse'))

  (whole,) = run_one(engine(), Request(3, 3, prompt_of(3), 12))
  stop, found = (tiny_engine.text(whole.tokens[3:5].tolist()),), {}  # the fifth token is the last of the first chunk
  for reuse in (True, False):
    subject = engine(stop)
    assert subject.config.in_flight == 2
    (first,) = run_one(subject, Request(3, 3, prompt_of(3), 12, keep=reuse))
    assert (first.finish, len(first.tokens)) == ('stop', 5)
    given = np.concatenate([first.tokens, reply_of(3, 0)]).astype(np.int32)
    (found[0, reuse],) = run_one(subject, Request(3, 3, prompt_of(3), 6, given, continues=(3, 0) if reuse else None))
    assert (subject.usage.prefix_hits, subject.usage.prefix_misses) == (0, int(reuse))
  assert not differing({0: found[0, True]}, {0: found[0, False]})


def test_a_sequence_that_ends_again_counts_as_the_newest():
  """Three places. Sequence 1 ends again without its cache, so sequence 2 is the oldest when a fifth cache needs a place."""
  engine = engine_of()
  engine._kept = kept.KeptCaches(engine.config.layout, places=3, mesh=None)
  last = {}
  for uid in (1, 2, 1, 3, 4):
    (last[uid],) = run_one(engine, Request(uid, uid, prompt_of(uid), 4, keep=True))
  counts = {}
  for uid, completion in last.items():
    given, before = np.append(completion.tokens, 5).astype(np.int32), engine.usage.prefix_hits
    run_one(engine, Request(uid, uid, prompt_of(uid), 4, given, continues=(uid, 0)))
    counts[uid] = engine.usage.prefix_hits - before
  assert counts == {1: 1, 2: 0, 3: 1, 4: 1}
