"""Generation: a trajectory does not depend on the other requests, and ends at its first stop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import SAMPLING, C, engine_config, network, requests, text, weights

from sprl.cache.layout import cache_layout
from sprl.config import Cache, Quant, Sampling, SettingsError
from sprl.models import transformer
from sprl.sampler import decode
from sprl.sampler.buckets import prompt_buckets
from sprl.sampler.engine import Engine, generate
from sprl.sampler.running import Row
from sprl.sampler.weights import sampler_weights
from sprl.types import Request


@pytest.fixture(scope='module')
def free():
  """Nine trajectories of full length, over six rows."""
  return generate(engine_config(), weights(), requests(group=3))


def same(a, b):
  assert (a.uid, a.group, a.prompt_length, a.finish) == (b.uid, b.group, b.prompt_length, b.finish)
  for name in ('tokens', 'mask', 'attended', 'version'):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
  np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=1e-5)


def test_a_trajectory_holds_tokens_and_their_records(free):
  for request, t in zip(requests(group=3), free):
    P = len(request.prompt)
    assert (t.uid, t.group, t.prompt_length, t.finish) == (request.uid, request.group, P, 'length')
    np.testing.assert_array_equal(t.tokens[:P], request.prompt)
    assert len(t.completion) == C
    np.testing.assert_array_equal(t.mask, [False] * P + [True] * C)
    assert not np.any(t.sampler_logp[:P])
    assert np.all(t.sampler_logp[P:] < 0)
    np.testing.assert_array_equal(t.version, [-1] * P + [0] * C)
    # The query that predicts completion token i is at position P + i - 1; it attends to itself and all tokens before it.
    np.testing.assert_array_equal(t.attended, [0] * P + [P + i for i in range(C)])


def test_samples_of_a_prompt_differ(free):
  assert len({t.tokens.tobytes() for t in free}) == len(free)


def test_the_order_of_requests_changes_nothing(free):
  for a, b in zip(free, reversed(generate(engine_config(), weights(), requests(group=3)[::-1]))):
    same(a, b)


def test_a_request_alone_gives_the_same_trajectory(free):
  """Its prompt is prefilled alone, not in a batch of three."""
  for i in (0, 4, 8):
    same(free[i], generate(engine_config(), weights(), [requests(group=3)[i]])[0])


def test_the_number_of_rows_changes_nothing(free):
  narrow = dataclasses.replace(engine_config(), rows=2, prefill=1)
  limits = [3, 10, 1, 7, 10, 2, 10, 5, 9]  # rows end at different times, inside chunks
  asked = [dataclasses.replace(r, max_tokens=n) for r, n in zip(requests(group=3), limits)]
  for t, n, whole in zip(generate(narrow, weights(), asked), limits, free):
    assert t.finish == 'length'
    np.testing.assert_array_equal(t.completion, whole.completion[:n])
    np.testing.assert_allclose(t.sampler_logp, whole.sampler_logp[: len(t.tokens)], atol=1e-5)


def test_the_version_of_the_weights_is_recorded():
  t = generate(engine_config(), weights(), requests()[:1], version=7)[0]
  assert set(t.version[t.mask].tolist()) == {7}


def test_no_requests_give_no_trajectories():
  assert generate(engine_config(), weights(), []) == []


def test_another_seed_draws_other_tokens(free):
  other = generate(dataclasses.replace(engine_config(), seed=1), weights(), requests(group=3))
  assert all(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(free, other))


# --- where a completion ends -------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def stopping(free):
  """The config of an engine with stop ids and stop strings that some completions contain. Each string spans several tokens."""
  ids = int(free[0].completion[4]), int(free[5].completion[9])
  strings = text(free[1].completion[5:7]), text(free[7].completion[2:5]), text(free[3].completion[3:7])
  return dataclasses.replace(engine_config(), stop_ids=ids, sampling=dataclasses.replace(SAMPLING, stop=strings))


def first_stop(config, ids):
  """Return (number of tokens up to the first stop, whether there is one)."""
  for n in range(1, len(ids) + 1):
    if ids[n - 1] in config.stop_ids or any(s in text(ids[:n].tolist()) for s in config.sampling.stop):
      return n, True
  return len(ids), False


def test_stop_ids_and_strings_end_a_completion_and_stay_in_it(free, stopping):
  by_string = 0
  for t, whole in zip(generate(stopping, weights(), requests(group=3)), free):
    n, stopped = first_stop(stopping, whole.completion)
    assert t.finish == ('stop' if stopped else 'length')
    np.testing.assert_array_equal(t.completion, whole.completion[:n])
    np.testing.assert_allclose(t.sampler_logp, whole.sampler_logp[: len(t.tokens)], atol=1e-5)
    by_string += stopped and t.completion[-1] not in stopping.stop_ids
  assert 2 <= by_string < len(free)


def test_a_stop_string_may_begin_before_an_interruption(free, stopping):
  ids, uid = free[3].completion, free[3].uid
  n, _ = first_stop(stopping, ids)
  assert 5 < n <= 7  # the first chunk ends after five tokens
  engine = Engine(stopping, weights())
  engine.add(next(r for r in requests(group=3) if r.uid == uid))
  engine.dispatch()
  engine.collect()
  (part,) = engine.abort()
  engine.add(part.rest())
  later = []
  while engine.load:
    engine.dispatch()
    later += engine.collect()
  joined = part.then(later[0])
  assert joined.finish == 'stop'
  np.testing.assert_array_equal(joined.tokens, ids[:n])


@pytest.mark.parametrize('offset', range(8))
def test_a_stop_string_is_found_at_any_offset(offset):
  """A token is one byte of a character: nine tokens for three characters, over four chunks."""
  stop, chunk = '終わり', 4
  sampling = dataclasses.replace(SAMPLING, stop=(stop,), chunk=chunk)
  config = dataclasses.replace(
    engine_config(), sampling=sampling, text=lambda ids: bytes(i % 256 for i in ids).decode(errors='ignore')
  )
  engine, ids = Engine(config, weights()), [97] * offset + list(stop.encode()) + [98] * 20
  row = Row(requests()[0], 0)
  for seen in range(1, len(ids), chunk):
    new, row.tokens = seen - len(row.tokens), ids[:seen]
    if (cut := engine._stop_string(row, new)) is not None:
      break
  assert cut == offset + len(stop.encode())
  assert seen - cut < chunk


@pytest.mark.parametrize(
  ('request_', 'words'),
  [
    (Request(5, 0, np.zeros(13, np.int32), 4), ('config.sampling.max_prompt = 12', 'request 5', '13 tokens')),
    (Request(6, 0, np.zeros(0, np.int32), 4), ('config.sampling.max_prompt = 12', 'request 6', '0 tokens')),
    (Request(7, 0, np.zeros(3, np.int32), 25), ('config.sampling.max_tokens = 24', 'request 7', '25')),
  ],
)
def test_requests_that_do_not_fit_raise(request_, words):
  with pytest.raises(SettingsError) as error:
    generate(engine_config(), weights(), [request_])
  assert all(word in str(error.value) for word in words)


# --- compilations, memory, buckets -------------------------------------------------------------------------------------


def test_nothing_compiles_after_the_first_use_of_each_shape(free, caplog):
  config, asked = engine_config(), requests(group=3)
  jitted = (decode.prefill, decode.insert, decode.decode, decode.release)
  for count in (1, 2):  # a prompt alone, and together with another
    generate(config, sampler_weights(network()[1], jnp.dtype('float32')), asked[: 3 * count])
  sizes = [f._cache_size() for f in jitted]
  rng = np.random.default_rng(1)
  other = [Request(i, i, rng.integers(0, 259, n).astype(np.int32), 3 + i) for i, n in enumerate((1, 12, 5, 2, 3, 7, 9))]
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    generate(config, weights(), other)
    generate(config, sampler_weights(network()[1], jnp.dtype('float32')), asked[:5])
  assert [f._cache_size() for f in jitted] == sizes
  assert not [r.getMessage() for r in caplog.records if 'Compiling' in r.getMessage()]
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
  assert any('Compiling' in r.getMessage() for r in caplog.records)  # the check above can detect a compilation


def test_decoding_updates_the_cache_in_place():
  config, _ = network()
  layout = cache_layout(config, Cache(), Quant(), 12, 500, 'float32')
  state = jax.eval_shape(lambda weights: decode.empty_state(layout, weights, 6, C, jax.random.key(0)), weights())
  memory = decode.decode.lower(transformer.graph(config), weights(), state, SAMPLING, (), 4).compile().memory_analysis()
  cache = sum(x.size * x.dtype.itemsize for layer in state.cache.layers for x in (layer.k, layer.v))
  assert memory.alias_size_in_bytes >= cache
  assert memory.temp_size_in_bytes < cache / 4


@pytest.mark.parametrize(
  ('max_prompt', 'buckets'), [(256, (32, 64, 128, 256)), (200, (32, 64, 128, 200)), (32, (32,)), (20, (20,)), (33, (32, 33))]
)
def test_prompt_buckets_double_up_to_the_longest_prompt(max_prompt, buckets):
  assert prompt_buckets(Sampling(max_prompt=max_prompt)) == buckets


def test_prompt_buckets_can_be_set():
  assert prompt_buckets(SAMPLING) == (12,)


def test_a_dense_engine_has_buckets_for_given_tokens():
  assert engine_config().buckets == (12, 24, 36)
  assert engine_config(Cache(budget=8, interval=4, window=2)).buckets == (12,)


@pytest.mark.parametrize(
  ('given', 'resumed', 'new', 'cut'),
  [('xyab', 0, 'bcd', None), ('xya', 0, 'bcd', None), ('xyab', 0, 'cab', 3), ('xya', 1, 'bcd', 1), ('xyabc', 1, 'bcd', None)],
)
def test_only_the_completion_itself_may_contain_a_stop_string(given, resumed, new, cut):
  """An earlier turn may end in the stop string. Of the given tokens only the last `resumed` belong to the completion."""
  given, new = (np.array([ord(c) - ord('a') for c in word], np.int32) for word in (given, new))
  engine = Engine(dataclasses.replace(engine_config(), sampling=dataclasses.replace(SAMPLING, stop=('ab',))), weights())
  row = Row(dataclasses.replace(requests()[0], given=given, resumed=resumed), 0, tokens=new.tolist())
  assert engine._stop_string(row, len(new)) == cut
