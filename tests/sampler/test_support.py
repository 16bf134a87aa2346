"""Top-k, top-p and min-p: with equal weights, the learner's log-probs over the recorded tokens equal the sampler's."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from tiny_engine import ROWS, SAMPLING, C, engine_config, network, requests, weights

from sprl.config import Cache, Sampling, SettingsError
from sprl.kernels.support import MOST_WORDS, mask_of_ids, pack_mask, record_format, support_mask
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig, score
from sprl.models import transformer
from sprl.sampler.draw import candidates, draw, support_record
from sprl.sampler.engine import Engine, generate
from sprl.sampler.replay import replay
from sprl.types import Trajectory

V, TOLERANCE = 259, 1e-4
FILTERS = {
  'top-k, as ids': {'top_k': 6},
  'top-p and top-k, as ids': {'top_k': 8, 'top_p': 0.7},
  'top-p and top-k, as a mask': {'top_k': 40, 'top_p': 0.7},
  'min-p, as a mask': {'min_p': 0.1},
}


def filtered(name):
  """Return the tiny engine's config with these filters."""
  return dataclasses.replace(engine_config(), sampling=dataclasses.replace(SAMPLING, **FILTERS[name]), record_support=True)


@cache
def sampled(name):
  return generate(filtered(name), weights(), requests())


@cache
def learner_logp(name, recorded=True):
  """Return the learner's log-probs [B, C] of the trajectories, packed into rows that share prompts."""
  trajectories = sampled(name) if recorded else [dataclasses.replace(t, support=None) for t in sampled(name)]
  batch, _ = pack(trajectories, np.ones(6, np.float32), Shape(micros=3, rows=1, tokens=64, sequences=6, columns=C), True)
  config, params = network()
  forward = ForwardConfig(SAMPLING.temperature, jnp.dtype('float32'), 16)
  return np.asarray(score(transformer.graph(config), params, jax.device_put(batch), forward))


def recorded_logp(name):
  return small.rectangle(sampled(name), [t.sampler_logp for t in sampled(name)], C)


# --- equal weights, equal log-probs ------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', FILTERS)
def test_the_learner_has_the_log_probs_of_the_sampler(name):
  trajectories = sampled(name)
  assert all(t.support.shape[0] == t.mask.sum() == C for t in trajectories)
  assert {t.support.dtype.name for t in trajectories} == {'int32' if name.endswith('ids') else 'uint32'}
  np.testing.assert_allclose(learner_logp(name), recorded_logp(name), atol=TOLERANCE)


@pytest.mark.parametrize('name', FILTERS)
def test_without_the_record_equal_weights_differ(name):
  """The defect that the record removes: the log-prob over the whole vocabulary is smaller for every token."""
  gap = learner_logp(name, recorded=False) - recorded_logp(name)
  assert np.mean(gap) < -0.1


@pytest.mark.parametrize('name', FILTERS)
def test_a_replay_has_the_log_probs_of_the_sampler(name):
  for logp, t in zip(replay(filtered(name), weights(), sampled(name)), sampled(name)):
    np.testing.assert_allclose(logp, t.sampler_logp, atol=TOLERANCE)


@pytest.mark.parametrize('name', FILTERS)
def test_a_drawn_token_is_in_its_support(name):
  for t in sampled(name):
    kept = np.asarray(support_mask(jnp.asarray(t.support), V))
    assert kept[np.arange(C), t.tokens[t.mask]].all()
    assert (kept.sum(axis=1) <= filtered(name).sampling.top_k if 'top-k' in name else kept.sum(axis=1) < V).all()


@pytest.mark.parametrize('name', ['top-k, as ids', 'min-p, as a mask'])
def test_an_interrupted_request_keeps_the_records_of_both_parts(name):
  engine = Engine(filtered(name), weights())
  for request in requests():
    engine.add(request)
  for _ in range(2):
    engine.dispatch()
    engine.collect()
  parts = {part.request.uid: part for part in engine.abort()}
  assert {len(part.tokens) for part in parts.values()} == {9}  # the first token, and two chunks of four
  for part in parts.values():
    engine.add(part.rest())
  later = []
  while engine.load:
    engine.dispatch()
    later += engine.collect()
  whole = {t.uid: t for t in sampled(name)}
  for rest in later:
    joined = Trajectory.of(parts[rest.request.uid].then(rest))
    np.testing.assert_array_equal(joined.tokens, whole[joined.uid].tokens)
    np.testing.assert_array_equal(joined.support, whole[joined.uid].support)


def test_a_request_without_tokens_has_an_empty_record():
  engine = Engine(filtered('top-k, as ids'), weights())
  engine.add(requests()[0])
  (part,) = engine.abort()
  assert part.support.shape == (0, 6)
  assert part.support.dtype == np.int32


def test_without_filters_nothing_is_recorded():
  config = dataclasses.replace(engine_config(), record_support=True)
  engine = Engine(config, weights())
  engine.add(requests()[0])
  engine.dispatch()
  assert engine._state.support is None
  assert 'support' not in engine._chunks[0].news
  (part,) = engine.abort()
  assert part.support is None


def test_the_state_holds_the_records_of_one_chunk_only():
  engine = Engine(filtered('top-k, as ids'), weights())
  engine.add(requests()[0])
  engine.dispatch()
  assert engine._state.support.shape == (ROWS, SAMPLING.chunk + 1, 6)


def test_an_evicting_cache_records_supports_too():
  """The replay evicts too, so it has the recorded log-probs; the learner's dense log-probs differ, and are finite."""
  sparse = engine_config(Cache(budget=8, interval=4, window=2))
  config = dataclasses.replace(filtered('top-k, as ids'), layout=sparse.layout)
  trajectories = generate(config, weights(), requests())
  assert any(np.any(t.attended[t.mask] < np.flatnonzero(t.mask)) for t in trajectories)  # evicted
  for logp, t in zip(replay(config, weights(), trajectories), trajectories):
    np.testing.assert_allclose(logp, t.sampler_logp, atol=TOLERANCE)
  dense = np.concatenate([x[t.mask] for x, t in zip(replay(filtered('top-k, as ids'), weights(), trajectories), trajectories)])
  recorded = np.concatenate([t.sampler_logp[t.mask] for t in trajectories])
  assert np.isfinite(dense).all()
  assert np.abs(dense - recorded).max() > 0.01


# --- the record --------------------------------------------------------------------------------------------------------


def loop(logits, top_k=None, top_p=1.0, min_p=0.0):
  """Return the kept tokens of one row, one token at a time. Of tied tokens, top-k keeps those with the smallest ids."""
  order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
  kept = order[:top_k]
  mass, before, nucleus = sum(np.exp(logits[i]) for i in kept), 0.0, []
  for i in kept:
    if before < top_p or (nucleus and logits[i] == logits[nucleus[-1]]):
      nucleus.append(i)
    before += np.exp(logits[i]) / mass
  return {i for i in nucleus if np.exp(logits[i] - logits[order[0]]) >= min_p}


@pytest.mark.parametrize(
  'settings',
  [{'top_k': 3}, {'top_k': 30}, {'top_p': 0.6}, {'min_p': 0.2}, {'top_k': 9, 'top_p': 0.8}, {'top_k': 4, 'min_p': 0.3},
   {'top_k': 50, 'top_p': 0.9, 'min_p': 0.05}],
)  # fmt: skip
@pytest.mark.parametrize('tied', [False, True])
def test_recorded_sets_equal_loops(settings, tied):
  rng, size = np.random.default_rng(0), 300
  logits = rng.normal(0, 2, (20, size)).astype(np.float32)
  logits = np.round(2 * logits) / 2 if tied else logits
  sampling = Sampling(**settings)
  form = record_format(sampling, size)
  record = support_record(candidates(jnp.asarray(logits), sampling), size, form)
  assert record.shape == (20, form.words)
  assert record.dtype == form.dtype
  got = np.asarray(support_mask(record, size))
  for row, kept in zip(logits.astype(np.float64), got):
    assert set(np.flatnonzero(kept)) == loop(row, **settings)


def test_ties_with_the_kth_do_not_enlarge_the_set():
  """Five tokens tie with the second: the one with the smallest id stays."""
  logits, sampling = jnp.array([[1.0, 0.0, 3.0, *[2.0] * 5, *[0.0] * 90]]), Sampling(top_k=2)
  drawn = draw(logits, jnp.full((1, 2), 0.9), sampling, record_format(sampling, 98))
  assert drawn.support.tolist() == [[2, 3]]
  assert drawn.token.tolist() == [3]
  np.testing.assert_allclose(drawn.logp, [np.log(1 / (1 + np.e))], rtol=1e-5)


@pytest.mark.parametrize('size', [1, 31, 32, 33, 300])
def test_a_mask_survives_its_record(size):
  mask = np.random.default_rng(size).random((3, 4, size)) < 0.5
  record = np.asarray(pack_mask(jnp.asarray(mask)))
  assert record.shape == (3, 4, -(-size // 32))
  for token in range(size):
    np.testing.assert_array_equal(record[..., token // 32] >> (token % 32) & 1, mask[..., token])
  np.testing.assert_array_equal(support_mask(jnp.asarray(record), size), mask)


def test_ids_become_a_mask_by_literals():
  assert mask_of_ids(jnp.array([[2, 0, -1], [-1, -1, -1]]), 3).tolist() == [[True, False, True], [False] * 3]


@pytest.mark.parametrize(
  ('sampling', 'vocab', 'words', 'dtype'),
  [
    (Sampling(top_k=50), 150_000, 50, 'int32'),
    (Sampling(top_k=256, top_p=0.9), 150_000, 256, 'int32'),
    (Sampling(top_p=0.9), 8192, 256, 'uint32'),
    (Sampling(top_k=5000), 8192, 256, 'uint32'),  # more ids than words of a mask
    (Sampling(min_p=0.1), 33, 2, 'uint32'),
  ],
)
def test_the_shorter_form_is_used(sampling, vocab, words, dtype):
  form = record_format(sampling, vocab)
  assert (form.words, jnp.dtype(form.dtype).name, form.bytes) == (words, dtype, 4 * words)


@pytest.mark.parametrize('sampling', [Sampling(), Sampling(top_k=300), Sampling(temperature=0.5)])
def test_settings_that_exclude_nothing_need_no_record(sampling):
  assert record_format(sampling, 300) is None


@pytest.mark.parametrize(
  ('settings', 'said'),
  [
    ({'top_p': 0.9}, f'config.sampling.top_p = 0.9: expected config.sampling.top_k of at most {MOST_WORDS} beside it'),
    ({'min_p': 0.1}, f'config.sampling.min_p = 0.1: expected config.sampling.top_k of at most {MOST_WORDS} beside it'),
    ({'top_k': 257}, f'config.sampling.top_k = 257: expected at most {MOST_WORDS}'),
    ({'top_k': 300, 'top_p': 0.9}, f'config.sampling.top_k = 300: expected at most {MOST_WORDS}'),
  ],
)
def test_a_set_that_cannot_be_recorded_is_refused(settings, said):
  with pytest.raises(SettingsError) as error:
    record_format(Sampling(**settings), 8193)
  assert said in str(error.value)
