"""Chunks with a fixed number of steps (for GPUs) against chunks that end when all rows are done."""

import dataclasses
import math
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import ROWS, SAMPLING, C, engine_config, requests, weights

from sprl.config import Cache, ModelSettings, Quant, Run
from sprl.model import Model
from sprl.models import transformer
from sprl.sampler import decode
from sprl.sampler.engine import Engine, generate
from sprl.types import Request

CHUNK = SAMPLING.chunk
DENSE, H2O = Cache(), Cache(method='h2o', budget=10, interval=CHUNK, window=3)
NESTED = Cache(method='gkv', budget=8, interval=6, window=2)  # two periods a chunk
EVERY = Cache(method='streaming', budget=8, interval=3, window=2)  # every step may compress


TWO_AT_ONCE = jax.jit(decode.decode.jitted.__wrapped__, static_argnames=('graphdef', 'sampling', 'stop_ids', 'steps', 'fixed'))


def states(settings, quant, fixed):
  """Return the states of four rows after each of four chunks. Row 2 ends within a chunk and starts again.

  Rows that are due take their step two at a time in fixed chunks, so three rows take two blocks.
  """
  config = engine_config(settings, quant)
  layout = dataclasses.replace(config.layout, record=config.layout.sparse)
  graph, w = transformer.graph(config.model), weights(quant)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 259, (3, 12)), jnp.int32)
  prompts = decode.prefill(graph, layout, w, tokens, jnp.array([4, 12, 9], jnp.int32))
  state, seen = decode.empty_state(layout, w, 4, C, jax.random.key(0)), []
  for parent, limit in (([0, 1, 2, -1], [C, 15, 7, 0]), ([-1, -1, 0, -1], [0, 0, C, 0])):
    new = decode.NewRows(jnp.array(parent), uid=jnp.arange(4), attempt=jnp.zeros(4, jnp.int32), limit=jnp.array(limit))
    state = decode.insert(w, state, prompts, new, SAMPLING, ())
    for _ in range(2):
      with mock.patch.object(decode, 'ROW_MULTIPLE', 2):
        state = (TWO_AT_ONCE if fixed else decode.decode)(graph, w, state, SAMPLING, (), CHUNK, fixed)
      seen.append(jax.device_get(dataclasses.replace(state, seed=jnp.zeros(1))))
  return seen


@pytest.mark.parametrize(
  ('settings', 'quant'),
  [
    pytest.param(DENSE, Quant(), marks=pytest.mark.slow),
    (H2O, Quant()),
    pytest.param(NESTED, Quant(), marks=pytest.mark.slow),
    pytest.param(EVERY, Quant(), marks=pytest.mark.slow),
    pytest.param(H2O, Quant(sampler='kv8'), marks=pytest.mark.slow),
  ],
  ids=['dense', 'one period a chunk', 'two periods a chunk', 'every step', 'fp8'],
)
def test_both_forms_of_a_chunk_give_equal_states(settings, quant):
  """Rows that start on prompts never wait, so the states are equal after every chunk."""
  compressed = 0
  for free, fixed in zip(states(settings, quant, False), states(settings, quant, True)):
    for name in ('tokens', 'attended', 'count', 'done'):
      np.testing.assert_array_equal(getattr(fixed, name), getattr(free, name), err_msg=name)
    np.testing.assert_allclose(fixed.logp, free.logp, atol=1e-5)
    for name in ('length', 'seen', 'decoded', 'saturated', 'saturated_queries'):
      np.testing.assert_array_equal(getattr(fixed.cache, name), getattr(free.cache, name), err_msg=name)
    for mine, theirs in zip(fixed.cache.layers, free.cache.layers):
      for b, n in enumerate(free.cache.length):
        for name in ('k', 'v', 'position', 'carried'):
          if (expected := getattr(theirs, name)) is not None:
            np.testing.assert_allclose(getattr(mine, name)[b, :, :n], expected[b, :, :n], atol=1e-5, err_msg=name)
      if theirs.evicted is not None:
        np.testing.assert_array_equal(mine.evicted, theirs.evicted)
        compressed += np.unique(theirs.evicted).size - 1
  assert not settings.budget or compressed > 4


@cache
def interrupted(settings):
  """Return requests that continue after 1 to 6 given tokens, which are phases 1 to 3, 0 to 2 of a chunk."""
  return [
    Request(r.uid, r.group, r.prompt, C - n, given=t.completion[:n], resumed=n)
    for n, (r, t) in enumerate(zip(requests(), generate(engine_config(settings), weights(), requests())), start=1)
  ]


@pytest.mark.parametrize('settings', [H2O, pytest.param(NESTED, marks=pytest.mark.slow)], ids=['one period', 'two periods'])
def test_rows_behind_given_tokens_wait_for_their_step_and_draw_the_same(settings):
  config, asked = engine_config(settings), interrupted(settings)
  fixed = dataclasses.replace(config, fixed_chunks=True)
  for t, expected in zip(generate(fixed, weights(), asked), generate(config, weights(), asked)):
    for name in ('tokens', 'attended', 'version', 'finish'):
      np.testing.assert_array_equal(getattr(t, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(t.sampler_logp, expected.sampler_logp, atol=1e-5)
  engine, period = Engine(fixed, weights()), math.gcd(CHUNK, settings.interval)
  for request in asked:
    engine.add(request)
  for chunk in range(3):
    engine.dispatch()
    engine.collect()
    for n, request in enumerate(asked, start=1):
      drawn = 1 + CHUNK * (chunk + 1) - n % period  # `insert` draws one; the row then waits for step n mod P, once
      assert len(engine.partial(request.uid)) == drawn


def test_a_block_has_room_for_twice_the_rows_that_are_due_together_on_average():
  layout = dataclasses.replace(engine_config(H2O).layout, settings=dataclasses.replace(H2O, interval=128), kernels='reference')
  with mock.patch.object(decode, 'rows_at_once', return_value=95):
    assert [decode.due_at_once(layout, rows, 16) for rows in (8, 64, 256, 1024)] == [8, 16, 64, 88]


def test_usage_counts_the_steps_of_fixed_chunks():
  """Two rows draw 5 tokens: one in `insert`, four in one chunk. A third draws 2, in a chunk that goes on without it."""
  fixed = dataclasses.replace(engine_config(), fixed_chunks=True)
  engine = Engine(fixed, weights())
  for request, limit in zip(requests(), (5, 5, 2)):
    engine.add(dataclasses.replace(request, max_tokens=limit))
  while engine.load:
    engine.dispatch()
    engine.collect()
  assert (engine.usage.chunks, engine.usage.steps, engine.usage.tokens) == (1, CHUNK, 4 + 4 + 1)
  engine.add(dataclasses.replace(requests()[0], max_tokens=3))
  while engine.load:
    engine.dispatch()
    engine.collect()
  assert engine.usage.steps == 2 * CHUNK
  assert engine.usage.metrics(ROWS)['engine/occupancy'] == 11 / (2 * CHUNK * ROWS)


@pytest.mark.parametrize('gpu', [False, True])
def test_engines_on_gpus_and_only_they_have_fixed_chunks(gpu, monkeypatch):
  run = Run(model=ModelSettings(path='random:tiny'))
  model = Model.open(run)
  layout = model.cache_layout(run.sampling, run.cache, run.quant)
  monkeypatch.setattr('sprl.model.on_gpu', lambda: gpu)
  assert model.engine_config(run.sampling, layout, rows=4, prefill=2, seed=0).fixed_chunks == gpu
