"""Continuous batching: requests are added, finish, are aborted and continued, and weights change between chunks."""

import dataclasses
import weakref
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine
from code_flips import flipped
from garbage import no_collections
from pools import ManualClock
from tiny_engine import C, network, requests

from sprl.cache.scales import from_amax, with_margin
from sprl.config import Cache, Quant, SettingsError, Streaming
from sprl.sampler import decode
from sprl.sampler.engine import Engine
from sprl.sampler.replay import replay
from sprl.sampler.running import Chunk
from sprl.sampler.weights import sampler_weights
from sprl.sharding.rules import OnMesh
from sprl.types import Request, Trajectory

SPARSE = Cache(budget=8, interval=4, window=2)
# Cache, quantisation, layers. The default entries cover methods that carry queries or history, an interval of 1 (the engine reads
# given tokens one by one, as it drew them), and FP8.
MEMORIES = {
  'dense': (Cache(), Quant(), 1),
  'sparse': (dataclasses.replace(SPARSE, method='gkv', scope='global', interval=3), Quant(), 1),
  'fp8': (dataclasses.replace(SPARSE, interval=1), Quant(sampler='w8a8_kv8'), 1),
}
SLOW = {
  'rkv': (SPARSE, Quant(), 1),
  'h2o': (dataclasses.replace(SPARSE, method='h2o', window=None), Quant(), 1),
  'gkv, every step': (dataclasses.replace(SPARSE, method='gkv', interval=1), Quant(), 1),
  'snapkv, one choice': (dataclasses.replace(SPARSE, method='snapkv', scope='global', interval=3), Quant(), 2),
  'streaming': (dataclasses.replace(SPARSE, method='streaming', streaming=Streaming(sinks=2), interval=2), Quant(), 1),
}
FLIPPED = {'fp8': 1}  # completions of six that may differ because codes flip (code_flips)
SOME = pytest.mark.parametrize('memory', MEMORIES)


def config_of(memory='dense'):
  return tiny_engine.engine_config(*(MEMORIES | SLOW)[memory])


def weights_of(memory='dense', seed=0):
  _, quant, layers = (MEMORIES | SLOW)[memory]
  return tiny_engine.weights(quant, seed, layers)


def engine_of(memory='dense', asked=(), version=0):
  engine = Engine(config_of(memory), weights_of(memory), version)
  for request in asked:
    engine.add(request)
  return engine


def run(engine):
  """Run the engine until it is idle. Return the completions by uid."""
  done = []
  while engine.load:
    engine.dispatch()
    done += engine.collect()
  return {c.request.uid: c for c in done}


def begun_engine(memory='dense', version=0, chunks=1):
  """Return an engine that runs all requests, after `chunks` chunks."""
  engine = engine_of(memory, requests(), version)
  for _ in range(chunks):
    engine.dispatch()
    assert not engine.collect()
  return engine


def restart(engine):
  """Abort all requests and add the rest of each. Return the aborted parts by uid."""
  parts = {c.request.uid: c for c in engine.abort()}
  for part in parts.values():
    engine.add(part.rest())
  return parts


def alike(a, b, atol=1e-5):
  equal = a.finish == b.finish and np.array_equal(a.tokens, b.tokens) and np.array_equal(a.attended, b.attended)
  return equal and np.abs(a.logp - b.logp).max() <= atol


def differing(found, memory='dense', atol=1e-5):
  """Return the uids of the completions that differ from the uninterrupted completions."""
  return [uid for uid, completion in found.items() if not alike(completion, uninterrupted(memory)[uid], atol)]


@cache
def uninterrupted(memory='dense'):
  """Return completions without interruption: nine for a dense cache, six for others."""
  return run(engine_of(memory, requests(group=3 if memory == 'dense' else 2)))


@cache
def same_prefill(memory):
  """Return completions of the requests of `begun_engine` without interruption.

  A prefill of another number of prompts may round differently.
  """
  return run(engine_of(memory, requests()))


# --- abort, continue, swap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('memory', [*MEMORIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.parametrize('chunks', [1, 3])
def test_an_aborted_request_continues_as_if_never_aborted(memory, chunks):
  engine = begun_engine(memory, chunks=chunks)
  parts = restart(engine)
  assert all(c.finish == 'abort' and len(c.tokens) == 4 * chunks + 1 for c in parts.values())
  found = {uid: parts[uid].then(later) for uid, later in run(engine).items()}
  assert set(found) == set(parts)
  assert len(differing(found, memory)) <= FLIPPED.get(memory, 0)


def test_an_interrupted_request_keeps_the_larger_count_of_clamped_numbers():
  """The first part is sampled with scales that clamp numbers, the continuation with scales that clamp none."""
  engine = Engine(config_of('fp8'), with_amax(0.5))
  for request in requests():
    engine.add(request)
  engine.dispatch()
  engine.collect()
  parts = {c.request.uid: c for c in engine.abort()}
  engine.swap(with_amax(100.0), 1)
  for part in parts.values():
    engine.add(part.rest())
  for uid, later in run(engine).items():
    assert later.saturated == 0
    assert parts[uid].then(later).saturated == parts[uid].saturated > 0


def with_amax(largest):
  """Return FP8 weights whose cache has scales for numbers up to `largest`."""
  *_, layers = MEMORIES['fp8']
  amax = np.full((3, network(0, layers)[0].num_layers), largest, np.float32)
  return weights_of('fp8')._replace(scales=from_amax(amax, with_margin(1.05)))


def test_swapping_in_the_same_weights_changes_no_bit():
  for memory in ('dense', 'sparse'):
    engine = begun_engine(memory)
    engine.swap(sampler_weights(network()[1], jnp.dtype('float32')), 0)
    expected = same_prefill(memory)
    assert all(alike(found, expected[uid], atol=0) for uid, found in run(engine).items())


@SOME
def test_tokens_record_the_version_that_drew_them(memory):
  engine = begun_engine(memory, version=3)
  engine.swap(weights_of(memory, 1), 4)
  changed = 0
  for uid, c in run(engine).items():
    expected = same_prefill(memory)[uid]
    assert c.version.tolist() == [3] * 5 + [4] * (len(c.tokens) - 5)
    np.testing.assert_array_equal(c.tokens[:5], expected.tokens[:5])
    np.testing.assert_allclose(c.logp[:5], expected.logp[:5], atol=1e-6)
    changed += not np.array_equal(c.tokens, expected.tokens)
  assert changed >= 4


@SOME
def test_tokens_of_each_version_have_its_log_probs(memory):
  """Replay of a continued request returns its old part under the old weights, and its new part under the new weights."""
  engine = begun_engine(memory, version=3)
  parts = {c.request.uid: c for c in engine.abort()}
  engine.swap(weights_of(memory, 1), 4)
  for part in parts.values():
    engine.add(part.rest())
  trajectories = [Trajectory.of(parts[uid].then(later)) for uid, later in run(engine).items()]
  old, new = (replay(config_of(memory), weights_of(memory, seed), trajectories) for seed in (0, 1))
  for t, a, b in zip(trajectories, old, new):
    assert t.version[t.mask].tolist() == [3] * 5 + [4] * (C - 5)
    assert np.abs(a - b)[t.mask].min() > 1e-4
  expected = [np.where(t.version == 3, a, b) for t, a, b in zip(trajectories, old, new)]
  assert len(flipped([t.sampler_logp for t in trajectories], expected)) <= FLIPPED.get(memory, 0)


@SOME
def test_nothing_remains_of_earlier_weights_and_prompts(memory):
  """After NaN weights, NaN prompts and NaN caches a swap gives the completions of a new engine."""
  good = weights_of(memory)
  engine = Engine(config_of(memory), jax.tree.map(lambda w: jnp.full(w.shape, jnp.nan, w.dtype), good))
  for request in requests():
    engine.add(request)
  engine.dispatch()
  engine.collect()
  assert any(np.isnan(c.logp).any() for c in engine.abort())
  engine.swap(good, 1)
  for request in requests():
    engine.add(request)
  assert not differing(run(engine), memory)


def test_keep_and_recompute_differ():
  """`keep` continues with keys and values of the old weights; `recompute` replaces them."""
  kept, recomputed = begun_engine(), begun_engine()
  kept.swap(weights_of(seed=1), 1)
  parts = {c.request.uid: c for c in recomputed.abort()}
  recomputed.swap(weights_of(seed=1), 1)
  for part in parts.values():
    recomputed.add(part.rest())
  a, b = run(kept), {uid: parts[uid].then(c) for uid, c in run(recomputed).items()}
  assert any(abs(a[uid].logp[5] - b[uid].logp[5]) > 1e-3 for uid in a)


@SOME
def test_given_tokens_count_as_context_not_as_completion(memory):
  """A second turn has the log-probs that teacher forcing through an equal cache gives."""
  rng = np.random.default_rng(5)
  engine = engine_of(memory)
  for request in requests():
    given = rng.integers(0, 259, 3 + request.uid % 8).astype(np.int32)
    engine.add(dataclasses.replace(request, given=given, max_tokens=10))
  trajectories = [Trajectory.of(c) for c in run(engine).values()]
  assert all(t.mask.sum() == 10 and t.mask[-10:].all() for t in trajectories)
  again = replay(config_of(memory), weights_of(memory), trajectories)
  assert len(flipped([t.sampler_logp for t in trajectories], again)) <= FLIPPED.get(memory, 0)


# --- the queue ---------------------------------------------------------------------------------------------------------


def test_requests_that_come_later_change_no_completion():
  engine = engine_of(asked=requests(group=3)[:4])
  engine.dispatch()
  found = {c.request.uid: c for c in engine.collect()}
  for request in requests(group=3)[4:]:
    engine.add(request)
  found |= run(engine)
  assert set(found) == set(uninterrupted())
  assert not differing(found)


def test_running_rows_wait_for_at_most_one_prefill(monkeypatch):
  calls = []
  for name in ('prefill', 'decode'):
    function = getattr(decode, name)
    monkeypatch.setattr(decode, name, OnMesh(lambda *args, f=function, name=name, **by: calls.append(name) or f(*args, **by)))
  engine = engine_of(asked=requests()[:1])
  engine.dispatch()
  engine.collect()
  calls.clear()
  rng = np.random.default_rng(1)
  for uid in range(5):  # three prompts a prefill
    engine.add(Request(uid, uid, rng.integers(0, 259, 5).astype(np.int32), C))
  for _ in range(3):
    engine.dispatch()
    engine.collect()
  assert calls == ['prefill', 'decode', 'prefill', 'decode', 'decode']


def test_samples_of_a_prompt_share_its_prefill():
  engine = engine_of(asked=requests())
  engine.dispatch()
  engine.collect()
  assert engine.usage.prefills == 1


def test_later_samples_of_a_prompt_share_its_prefill():
  rng = np.random.default_rng(3)
  engine = engine_of()
  for prompt in range(4):
    tokens = rng.integers(0, 259, 5).astype(np.int32)
    for sample in range(5):
      engine.add(Request(5 * prompt + sample, prompt, tokens, 3 + (5 * sample + prompt) % 7))
  assert len(run(engine)) == 20
  assert engine.usage.prefills <= 4


def test_a_prefill_runs_after_the_caches_of_the_last_one_are_freed(monkeypatch):
  function, kept, alive = decode.prefill, [], []

  def prefill(*args):
    alive.append(sum(array() is not None for array in kept))
    found = function(*args)
    kept.extend(map(weakref.ref, jax.tree.leaves(found.cache)))
    return found

  monkeypatch.setattr(decode, 'prefill', OnMesh(prefill))
  engine, rng = engine_of(), np.random.default_rng(1)
  for uid in range(9):  # three prompts a prefill
    engine.add(Request(uid, uid, rng.integers(0, 259, 5).astype(np.int32), C))
  with no_collections():
    run(engine)
  assert len(alive) > 2
  assert set(alive) == {0}


def test_new_weights_prefill_a_prompt_again():
  engine, request = engine_of(), requests(max_tokens=5)[0]
  for version in (1, 2):
    for uid in (100, 101):
      engine.add(dataclasses.replace(request, uid=uid))
      run(engine)
    assert engine.usage.prefills == version
    engine.swap(weights_of(), version)


def test_abort_frees_a_row_and_changes_no_other():
  engine = engine_of(asked=requests(group=3))
  engine.dispatch()
  engine.collect()
  running, waiting = engine.abort([100, 122])
  assert (running.request.uid, len(running.tokens), waiting.request.uid, len(waiting.tokens)) == (100, 5, 122, 0)
  done = run(engine)
  assert set(done) == set(uninterrupted()) - {100, 122}
  assert not differing(done)


def test_abort_during_a_chunk_takes_effect_after_it():
  engine = engine_of(asked=requests(group=3)[:7])
  engine.dispatch()
  engine.collect()
  engine.dispatch()
  (aborted,) = engine.abort([100])
  assert aborted.tokens.tolist() == uninterrupted()[100].tokens[:5].tolist()
  assert not engine.abort([100])
  assert engine.load == 7  # its row is not free yet
  engine.wait(60.0)
  assert engine.ready
  assert not engine.collect()
  assert engine.load == 6
  done = run(engine)
  assert set(done) == {101, 102, 110, 111, 112, 120}
  assert not differing(done)


def test_an_fp8_cache_without_scales_is_refused():
  with pytest.raises(ValueError, match=r'^weights\.scales = None: expected the scales of the FP8 cache'):
    Engine(config_of('fp8'), weights_of('fp8')._replace(scales=None))


def test_a_wait_ends_after_its_time_or_for_a_late_chunk_when_it_is_over(monkeypatch):
  """A thread that waits without end for a device that hangs is noticed by the watchdog."""
  engine = engine_of(asked=requests(group=3)[:1])
  engine.dispatch()
  looks = []

  def ready(chunk):
    looks.append(chunk)
    return len(looks) % 5 == 0

  monkeypatch.setattr(Chunk, 'ready', property(ready))
  engine.wait(0.0)
  assert len(looks) == 1
  monkeypatch.setattr('sprl.sampler.engine.LATE', -1.0)
  engine.wait(0.0)
  assert len(looks) == 5


def test_another_attempt_draws_other_tokens():
  found = run(engine_of(asked=[dataclasses.replace(request, attempt=1) for request in requests()]))
  for uid, completion in found.items():
    assert completion.tokens.tolist() != uninterrupted()[uid].tokens.tolist()


def test_given_tokens_count_towards_max_tokens():
  with pytest.raises(SettingsError, match=r'config\.sampling\.max_tokens = 24: request 100 .*24 tokens after 3 given'):
    engine_of(asked=[dataclasses.replace(requests()[0], given=np.zeros(3, np.int32))])


# --- usage -------------------------------------------------------------------------------------------------------------


def test_usage_counts_row_steps_and_tokens():
  limits = [1, 5, 9, 13]  # one token at insertion, then 0, 1, 2 and 3 chunks of 4
  engine = engine_of(asked=[dataclasses.replace(request, max_tokens=n) for request, n in zip(requests(), limits)])
  run(engine)
  usage = engine.usage
  assert (usage.chunks, usage.steps, usage.tokens, usage.first, usage.prefills) == (3, 12, 24, 4, 1)
  assert usage.metrics(engine.capacity)['engine/occupancy'] == 24 / (12 * 6)
  assert 0 <= usage.host_overhead <= 1


@pytest.fixture
def clock(monkeypatch):
  """A clock of engines that each test sets."""
  clock = ManualClock()
  for module in ('engine', 'running'):
    monkeypatch.setattr(f'sprl.sampler.{module}.time', SimpleNamespace(perf_counter=clock))
  clock.time = 1.0
  return clock


def test_usage_counts_the_time_of_the_host_but_not_of_the_learner(clock):
  engine = engine_of(asked=requests()[:1])
  engine.dispatch()
  engine.collect()
  clock.time += 3.0  # the host looks at the tokens
  engine.dispatch()
  engine.collect()
  assert engine.usage.busy == 3.0
  engine.unload()
  clock.time += 5.0  # an update
  engine.swap(weights_of(), 1)
  engine.dispatch()
  clock.time += 1.0
  engine.collect()
  assert engine.usage.busy == 4.0


@pytest.mark.parametrize('all_of_them', [True, False])
def test_usage_counts_no_time_after_the_last_request_is_aborted(all_of_them, clock):
  [request] = requests()[:1]
  engine = engine_of(asked=[request])
  engine.dispatch()
  engine.abort(None if all_of_them else [request.uid])
  engine.collect()
  before = engine.usage.busy
  clock.time += 5.0
  engine.add(request)
  engine.dispatch()
  clock.time += 1.0
  engine.collect()
  assert engine.usage.busy - before == 1.0
