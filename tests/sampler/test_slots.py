"""Continuous batching: requests that come, go, are interrupted and go on, and weights that change under them."""

import dataclasses
import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.sampler import calibrate, decode
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.engine import Engine
from sprl.sampler.replay import replay
from sprl.sampler.served import serve
from sprl.sampler.slots import Slots, _Row
from sprl.settings import UNQUANTISED, Cache, Quant, Sampling, SettingsError
from sprl.trajectory import Request, Trajectory

C = 24
SAMPLING = Sampling(temperature=0.9, max_tokens=C, max_prompt=12, prompt_buckets=(6, 12), chunk=4)
DENSE = Cache()
SPARSE = Cache(budget=8, interval=4, window=2)
MEMORIES = {
  'dense': (DENSE, Quant()),
  'rkv': (SPARSE, Quant()),
  'h2o': (dataclasses.replace(SPARSE, method='h2o', when='after'), Quant()),
  'gkv, every step': (dataclasses.replace(SPARSE, method='gkv', interval=1, dense_layers=1), Quant()),
  'snapkv, one choice': (dataclasses.replace(SPARSE, method='snapkv', scope='global', interval=3), Quant()),
  'streaming in its cache': (dataclasses.replace(SPARSE, method='streaming', sinks=2, positions='in_cache', interval=2), Quant()),
  # An interval of 1 is taken in as it is drawn. Several tokens at a time round otherwise, and a number next to an FP8 code's edge
  # may get the other code.
  'fp8': (dataclasses.replace(SPARSE, interval=1), Quant(sampler='w8a8_kv8')),
}
pytestmark = pytest.mark.usefixtures('compiled_fast')


@cache
def weights(seed=0):
  config, params = small.model('qwen2')
  if seed:
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda w: w + 0.05 * rng.normal(size=w.shape).astype(np.float32), params)
  return config, params


@cache
def served(quant=UNQUANTISED, seed=0):
  config, params = weights(seed)
  made = serve(params, jnp.dtype('float32'), quant)
  if 'kv8' in quant.sampler:
    amax = np.full((3, config.num_layers), 6.0 + seed, np.float32)
    made = made._replace(scales=calibrate.scales((amax,), quant, config.num_layers))
  return made


@cache
def engine(memory='dense', rows=6, prefill=3, sampling=SAMPLING):
  cache_settings, quant = MEMORIES[memory]
  config, _ = weights()
  plan = cache_plan(config, cache_settings, quant, 12, C, 'float32')
  return Engine(config, sampling, plan, rows, prefill, 0, (), lambda ids: ''.join(chr(ord('a') + i % 26) for i in ids))


def requests(lengths=(4, 9, 6), group=2, max_tokens=C):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in lengths]
  return [Request(100 + g * group + k, g, prompt, max_tokens) for g, prompt in enumerate(prompts) for k in range(group)]


def run(slots, until=lambda done: False):
  """Everything that ends, until nothing runs (or enough has)."""
  done = []
  while slots.load and not until(done):
    slots.dispatch()
    done += slots.collect()
  return {c.request.uid: c for c in done}


def begun(memory='dense', version=0, chunks=1):
  """All requests under way, with so many chunks behind them."""
  slots = Slots(engine(memory), served(MEMORIES[memory][1]), version)
  for request in requests():
    slots.add(request)
  for _ in range(chunks):
    slots.dispatch()
    assert not slots.collect()
  return slots


def same(a, b, atol=1e-5):
  np.testing.assert_array_equal(a.tokens, b.tokens)
  np.testing.assert_array_equal(a.kept, b.kept)
  np.testing.assert_allclose(a.logp, b.logp, atol=atol)
  assert a.finish == b.finish


@cache
def whole(memory='dense'):
  """The completions that nothing interrupted."""
  slots = Slots(engine(memory), served(MEMORIES[memory][1]))
  for request in requests():
    slots.add(request)
  return run(slots)


@pytest.mark.parametrize('memory', MEMORIES)
@pytest.mark.parametrize('chunks', [1, 3])
def test_what_is_aborted_and_asked_again_goes_on_as_if_nothing_had_happened(memory, chunks):
  slots = begun(memory, chunks=chunks)
  parts = {c.request.uid: c for c in slots.abort()}
  assert slots.load == 0
  assert all(c.finish == 'abort' and len(c.tokens) == 4 * chunks + 1 for c in parts.values())
  for part in parts.values():
    slots.add(part.rest())
  later = run(slots)
  for uid, expected in whole(memory).items():
    same(parts[uid].then(later[uid]), expected)


def test_a_row_that_is_kept_goes_on_bit_for_bit_when_the_same_weights_are_swapped_in():
  for memory in ('dense', 'rkv'):
    slots = begun(memory)
    slots.swap(serve(weights()[1], jnp.dtype('float32')), 0)
    for uid, completion in run(slots).items():
      same(completion, whole(memory)[uid], atol=0)


@pytest.mark.parametrize('memory', ['dense', 'rkv', 'fp8'])
def test_after_a_swap_tokens_have_the_new_version_and_those_before_it_the_old(memory):
  quant = MEMORIES[memory][1]
  slots = begun(memory, version=3)
  slots.swap(served(quant, 1), 4)
  changed = 0
  for uid, c in run(slots).items():
    expected = whole(memory)[uid]
    assert c.version.tolist() == [3] * 5 + [4] * (len(c.tokens) - 5)
    np.testing.assert_array_equal(c.tokens[:5], expected.tokens[:5])
    np.testing.assert_allclose(c.logp[:5], expected.logp[:5], atol=1e-6)
    changed += not np.array_equal(c.tokens, expected.tokens)
  assert changed >= 4


@pytest.mark.parametrize('memory', ['dense', 'rkv', 'fp8'])
def test_a_completion_of_two_versions_has_the_log_probs_of_each(memory):
  """Aborted and computed anew: a replay under the old weights gives the old part back, one under the new the new part."""
  quant = MEMORIES[memory][1]
  slots = begun(memory, version=3)
  parts = {c.request.uid: c for c in slots.abort()}
  slots.swap(served(quant, 1), 4)
  for part in parts.values():
    slots.add(part.rest())
  joined = [parts[uid].then(later) for uid, later in run(slots).items()]
  trajectories = [Trajectory.of(c) for c in joined]
  old, new = (replay(engine(memory), served(quant, seed), trajectories) for seed in (0, 1))
  for t, a, b in zip(trajectories, old, new):
    assert t.version[t.mask].tolist() == [3] * 5 + [4] * (C - 5)
    np.testing.assert_allclose(t.sampler_logp, np.where(t.version == 3, a, b), atol=1e-5)
    assert np.abs(a - b)[t.mask].min() > 1e-4


@pytest.mark.parametrize('memory', ['dense', 'rkv', 'fp8'])
def test_nothing_is_left_of_weights_and_prompts_that_were_served_before(memory):
  """Poison what was served, prefilled and cached, swap: the answers are those of new rows (fp8_rollouts 10.11)."""
  quant = MEMORIES[memory][1]
  poison = jax.tree.map(lambda w: jnp.full(w.shape, jnp.nan, w.dtype), served(quant))
  slots = Slots(engine(memory), poison)
  for request in requests():
    slots.add(request)
  slots.dispatch()
  slots.collect()
  aborted = slots.abort()
  assert any(np.isnan(c.logp).any() for c in aborted)
  slots.swap(served(quant), 1)
  for request in requests():
    slots.add(request)
  for uid, completion in run(slots).items():
    same(completion, whole(memory)[uid])


def test_keys_and_values_that_are_kept_are_those_of_the_old_weights():
  """`keep` and `recompute` differ: the second forgets what the old weights made of the prompt."""
  kept, anew = begun(), begun()
  kept.swap(served(seed=1), 1)
  parts = {c.request.uid: c for c in anew.abort()}
  anew.swap(served(seed=1), 1)
  for part in parts.values():
    anew.add(part.rest())
  a, b = run(kept), {uid: parts[uid].then(c) for uid, c in run(anew).items()}
  assert any(abs(a[uid].logp[5] - b[uid].logp[5]) > 1e-3 for uid in a)


def test_requests_come_in_while_others_run_and_neither_notices():
  slots = Slots(engine(rows=4), served())
  early, late = requests()[:3], requests()[3:]
  for request in early:
    slots.add(request)
  slots.dispatch()
  done = slots.collect()
  for request in late:
    slots.add(request)
  done += run(slots).values()
  assert {c.request.uid for c in done} == set(whole())
  for c in done:
    same(c, whole()[c.request.uid])


def test_running_rows_wait_for_one_prefill_at_most(monkeypatch):
  """Eight prompts come at once while a row decodes: they are let in a prefill at a time, a chunk between."""
  calls = []
  for name in ('prefill', 'decode'):
    function = getattr(decode, name)
    monkeypatch.setattr(decode, name, lambda *args, f=function, name=name: calls.append(name) or f(*args))
  slots = Slots(engine(rows=6, prefill=2), served())
  slots.add(requests()[0])
  slots.dispatch()
  slots.collect()
  calls.clear()
  rng = np.random.default_rng(1)
  for uid in range(4):
    slots.add(Request(uid, uid, rng.integers(0, 259, 5).astype(np.int32), C))
  for _ in range(3):
    slots.dispatch()
    slots.collect()
  assert calls == ['prefill', 'decode', 'prefill', 'decode', 'decode']


def test_samples_of_a_prompt_share_its_prefill():
  slots = Slots(engine(rows=6, prefill=3), served())
  for request in requests():
    slots.add(request)
  slots.dispatch()
  slots.collect()
  assert slots.usage.prefills == 1


def test_samples_of_a_prompt_share_its_prefill_whenever_rows_become_free():
  rng = np.random.default_rng(3)
  slots = Slots(engine(rows=3, prefill=2), served())
  for prompt in range(4):
    tokens = rng.integers(0, 259, 5).astype(np.int32)
    for sample in range(4):
      slots.add(Request(4 * prompt + sample, prompt, tokens, 3 + (5 * sample + prompt) % 7))
  assert len(run(slots)) == 16
  assert slots.usage.prefills <= 4


def test_new_weights_prefill_a_prompt_anew(monkeypatch):
  slots, request = Slots(engine(rows=2), served()), requests()[0]
  for version in (1, 2):
    slots.add(request)
    run(slots)
    slots.add(dataclasses.replace(request, uid=101))
    run(slots)
    assert slots.usage.prefills == version
    slots.swap(served(), version)


def test_an_aborted_request_leaves_the_others_as_they_were_and_its_row_to_the_next():
  slots = Slots(engine(rows=2), served())
  for request in requests()[:4]:
    slots.add(request)
  slots.dispatch()
  slots.collect()
  running, waiting = slots.abort([100, 103])
  assert (running.request.uid, len(running.tokens), waiting.request.uid, len(waiting.tokens)) == (100, 5, 103, 0)
  done = run(slots)
  assert set(done) == {101, 102}
  for uid, completion in done.items():
    same(completion, whole()[uid])


def test_what_is_aborted_in_the_middle_of_a_chunk_leaves_after_it_and_is_not_heard_of_again():
  slots = Slots(engine(rows=2), served())
  for request in requests()[:3]:
    slots.add(request)
  slots.dispatch()
  slots.collect()
  slots.dispatch()
  (aborted,) = slots.abort([100])
  assert aborted.tokens.tolist() == whole()[100].tokens[:5].tolist()
  assert not slots.abort([100])
  assert slots.load == 3  # its row is not free yet
  slots.wait(60.0)
  assert slots.ready
  assert not slots.collect()
  assert slots.load == 2
  done = run(slots)
  assert set(done) == {101, 102}
  for uid, completion in done.items():
    same(completion, whole()[uid])


def test_another_attempt_draws_other_tokens():
  slots = Slots(engine(), served())
  for request in requests():
    slots.add(dataclasses.replace(request, attempt=1))
  for uid, completion in run(slots).items():
    assert completion.tokens.tolist() != whole()[uid].tokens.tolist()


def test_a_stop_string_may_begin_before_the_interruption():
  host = engine()
  ids = whole()[101].tokens
  spanning = host.text(ids[3:7].tolist())  # the first look sees five tokens of it
  stopping = engine(sampling=dataclasses.replace(SAMPLING, stop=(spanning,)))
  slots = Slots(stopping, served())
  slots.add(requests()[1])
  slots.dispatch()
  slots.collect()
  (part,) = slots.abort()
  slots.add(part.rest())
  end = next(n for n in range(1, C + 1) if spanning in host.text(ids[:n].tolist()))
  joined = part.then(run(slots)[101])
  assert end <= 7
  assert joined.finish == 'stop'
  np.testing.assert_array_equal(joined.tokens, ids[:end])


@pytest.mark.parametrize('offset', range(8))
def test_a_stop_string_is_found_however_many_tokens_it_takes(offset):
  """A token may be a byte of a character: nine of them for three characters, over four looks."""
  stop, chunk = '終わり', 4
  host = dataclasses.replace(engine(), text=lambda ids: bytes(i % 256 for i in ids).decode(errors='ignore'))
  host = dataclasses.replace(host, sampling=dataclasses.replace(SAMPLING, stop=(stop,), chunk=chunk))
  slots, ids = Slots(host, served()), [97] * offset + list(stop.encode()) + [98] * 20
  row = _Row(requests()[0])
  for seen in range(1, len(ids), chunk):
    row.tokens = ids[:seen]
    if (cut := slots._stop_string(row)) is not None:
      break
  assert cut == offset + len(stop.encode())
  assert seen - cut < chunk


@pytest.mark.parametrize('memory', ['dense', 'rkv', 'fp8'])
def test_given_tokens_are_part_of_the_sequence_and_not_of_what_the_model_wrote(memory):
  """A second turn: what is said of it is what teacher forcing through the same memory says."""
  rng = np.random.default_rng(5)
  slots, quant = Slots(engine(memory), served(MEMORIES[memory][1])), MEMORIES[memory][1]
  for request in requests():
    given = rng.integers(0, 259, 3 + request.uid % 8).astype(np.int32)
    slots.add(dataclasses.replace(request, given=given, max_tokens=10))
  trajectories = [Trajectory.of(c) for c in run(slots).values()]
  for t, again in zip(trajectories, replay(engine(memory), served(quant), trajectories)):
    assert t.mask.sum() == 10
    assert t.mask[-10:].all()
    np.testing.assert_allclose(t.sampler_logp, again, atol=1e-5)


def test_usage_counts_row_steps_and_tokens():
  slots = Slots(engine(rows=4), served())
  limits = [1, 5, 9, 13]  # a first token as they come in, then 0, 1, 2 and 3 chunks of 4
  for request, n in zip(requests(), limits):
    slots.add(dataclasses.replace(request, max_tokens=n))
  run(slots)
  usage = slots.usage
  assert (usage.chunks, usage.steps, usage.tokens, usage.prefills) == (3, 12, 24, 1)
  assert usage.metrics(4)['engine/occupancy'] == 24 / 48
  assert 0 <= usage.host_overhead <= 1


def test_the_host_s_time_between_two_chunks_is_counted_and_the_learner_s_is_not():
  slots = Slots(engine(rows=2), served())
  slots.add(requests()[0])
  slots.dispatch()
  slots.collect()
  before = slots.usage.busy
  time.sleep(0.5)
  slots.dispatch()
  slots.collect()
  assert slots.usage.busy - before >= 0.5
  before = slots.usage.busy
  slots.unload()
  time.sleep(0.5)
  slots.swap(served(), 1)
  slots.dispatch()
  slots.collect()
  assert 0 < slots.usage.busy - before < 0.5


def test_requests_that_leave_no_room_for_what_is_given_are_refused():
  with pytest.raises(SettingsError, match=r'max_tokens = 24: request 100 asks for 24 behind 3 that are given'):
    Slots(engine(), served()).add(dataclasses.replace(requests()[0], given=np.zeros(3, np.int32)))
