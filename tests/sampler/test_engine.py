"""The engine: the same request is the same trajectory in any company, and ends where it should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.models.transformer import graph
from sprl.sampler import decode
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.engine import Engine, prompt_buckets
from sprl.sampler.served import serve
from sprl.sampler.slots import generate
from sprl.settings import Cache, Quant, Sampling, SettingsError
from sprl.trajectory import Request

SAMPLING = Sampling(temperature=0.9, max_tokens=10, max_prompt=12, prompt_buckets=(6, 12), chunk=4)


def text(ids):
  return ''.join(chr(ord('a') + i % 26) for i in ids)


@pytest.fixture(scope='module')
def policy():
  config, params = small.model(num_hidden_layers=1)
  plan = cache_plan(config, Cache(), Quant(), 12, 10, 'float32')
  engine = Engine(config, SAMPLING, plan, rows=6, prefill=3, seed=0, stop_ids=(), text=text)
  return engine, serve(params, jnp.dtype('float32'))


def some(lengths=(4, 9, 6), group=3, max_tokens=10):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in lengths]
  return [Request(100 + g * group + k, g, prompt, max_tokens) for g, prompt in enumerate(prompts) for k in range(group)]


@pytest.fixture(scope='module')
def free(policy):
  """Nine trajectories that nothing stopped, sampled in one go over six rows."""
  engine, served = policy
  return generate(engine, served, some())


def same(a, b):
  assert (a.uid, a.group, a.prompt_length, a.finish) == (b.uid, b.group, b.prompt_length, b.finish)
  for name in ('tokens', 'mask', 'kept', 'version'):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
  np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=1e-5)


def test_a_trajectory_holds_prompt_and_completion_with_their_records(free):
  for request, t in zip(some(), free):
    P = len(request.prompt)
    assert (t.uid, t.group, t.prompt_length, t.finish) == (request.uid, request.group, P, 'length')
    np.testing.assert_array_equal(t.tokens[:P], request.prompt)
    assert len(t.completion) == 10
    np.testing.assert_array_equal(t.mask, [False] * P + [True] * 10)
    assert not np.any(t.sampler_logp[:P])
    assert np.all(t.sampler_logp[P:] < 0)
    np.testing.assert_array_equal(t.version, [-1] * P + [0] * 10)
    # the query that predicts completion token i stands at position P + i - 1 and attends to itself and all before it
    np.testing.assert_array_equal(t.kept, [0] * P + [P + i for i in range(10)])


def test_samples_of_a_prompt_differ(free):
  assert len({t.tokens.tobytes() for t in free}) == len(free)


def test_the_order_of_the_requests_does_not_matter(policy, free):
  engine, served = policy
  for a, b in zip(free, reversed(generate(engine, served, some()[::-1]))):
    same(a, b)


def test_a_request_alone_is_the_same_as_in_company_prompts_prefilled_once_as_prefilled_apart(policy, free):
  engine, served = policy
  for i in (0, 4, 8):
    same(free[i], generate(engine, served, [some()[i]])[0])


def test_rows_are_refilled_and_their_number_does_not_matter(policy, free):
  engine, served = policy
  narrow = dataclasses.replace(engine, rows=2, prefill=1)
  limits = [3, 10, 1, 7, 10, 2, 10, 5, 9]  # rows end at different times, inside chunks
  requests = [dataclasses.replace(r, max_tokens=n) for r, n in zip(some(), limits)]
  for t, n, whole in zip(generate(narrow, served, requests), limits, free):
    assert t.finish == 'length'
    np.testing.assert_array_equal(t.completion, whole.completion[:n])
    np.testing.assert_allclose(t.sampler_logp, whole.sampler_logp[: len(t.tokens)], atol=1e-5)


def test_the_version_of_the_weights_is_recorded(policy):
  engine, served = policy
  t = generate(engine, served, some()[:1], version=7)[0]
  assert set(t.version[t.mask].tolist()) == {7}


def test_no_requests_no_trajectories(policy):
  engine, served = policy
  assert generate(engine, served, []) == []


def test_another_seed_draws_other_tokens(policy, free):
  engine, served = policy
  other = generate(dataclasses.replace(engine, seed=1), served, some())
  assert all(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(free, other))


def test_stop_ids_end_a_completion_and_stay_in_it(policy, free):
  engine, served = policy
  stop = (int(free[0].completion[4]), int(free[5].completion[9]))
  stopping = dataclasses.replace(engine, stop_ids=stop)
  for t, whole in zip(generate(stopping, served, some()), free):
    hits = np.flatnonzero(np.isin(whole.completion, stop))
    n = hits[0] + 1 if len(hits) else 10
    assert t.finish == ('stop' if len(hits) else 'length')
    np.testing.assert_array_equal(t.completion, whole.completion[:n])


def test_stop_strings_end_a_completion_with_the_token_that_completes_them(policy, free):
  engine, served = policy
  spanning = text(free[1].completion[5:7])
  stop = (spanning, text(free[7].completion[2:5]))
  stopping = dataclasses.replace(engine, sampling=dataclasses.replace(SAMPLING, stop=stop))
  stopped = 0
  for t, whole in zip(generate(stopping, served, some()), free):
    ends = [n for n in range(1, 11) if any(s in text(whole.completion[:n]) for s in stop)]
    n = ends[0] if ends else 10
    assert t.finish == ('stop' if ends else 'length')
    np.testing.assert_array_equal(t.completion, whole.completion[:n])
    np.testing.assert_allclose(t.sampler_logp, whole.sampler_logp[: len(t.tokens)], atol=1e-5)
    stopped += bool(ends)
  assert 2 <= stopped < len(free)


@pytest.mark.parametrize(
  ('request_', 'words'),
  [
    (Request(5, 0, np.zeros(13, np.int32), 4), ('max_prompt = 12', 'request 5', '13 tokens')),
    (Request(6, 0, np.zeros(0, np.int32), 4), ('max_prompt = 12', 'request 6', '0 tokens')),
    (Request(7, 0, np.zeros(3, np.int32), 11), ('max_tokens = 10', 'request 7', '11')),
  ],
)
def test_requests_that_do_not_fit_are_refused_by_name(policy, request_, words):
  engine, served = policy
  with pytest.raises(SettingsError) as error:
    generate(engine, served, [request_])
  assert all(word in str(error.value) for word in words)


def test_nothing_compiles_once_each_bucket_has_been_seen(policy, free, caplog):
  engine, served = policy
  jitted = (decode.prefill, decode.admit, decode.decode, decode.release)
  requests = some()
  for length in prompt_buckets(SAMPLING):
    for prompts in ([0], [0, 1]):  # alone, and together with another
      generate(engine, served, [dataclasses.replace(requests[0], uid=i, prompt=np.full(length, i, np.int32)) for i in prompts])
  sizes = [f._cache_size() for f in jitted]
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    generate(engine, served, some(lengths=(1, 12, 5), max_tokens=7))
    generate(engine, served, some(lengths=(2, 3), group=4))
    generate(engine, serve(served.params, jnp.dtype('float32')), requests[:5])
  assert [f._cache_size() for f in jitted] == sizes
  assert not [r.getMessage() for r in caplog.records if 'Compiling' in r.getMessage() and 'serve' not in r.getMessage()]
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
  assert any('Compiling' in r.getMessage() for r in caplog.records)  # the count above can see


def test_decoding_writes_into_the_rows_it_is_given(policy):
  engine, served = policy
  rows = decode.empty_rows(dataclasses.replace(engine.plan, positions=512), served, 6, 10, jax.random.key(0))
  lowered = decode.decode.lower(graph(engine.config), served, rows, SAMPLING, (), 4)
  memory = lowered.compile().memory_analysis()
  cache = sum(layer.k.nbytes + layer.v.nbytes for layer in rows.cache.layers)
  assert memory.alias_size_in_bytes >= cache
  assert memory.temp_size_in_bytes < cache / 4


@pytest.mark.parametrize(
  ('max_prompt', 'buckets'), [(256, (32, 64, 128, 256)), (200, (32, 64, 128, 200)), (32, (32,)), (20, (20,)), (33, (32, 33))]
)
def test_prompt_buckets_double_up_to_the_longest_prompt(max_prompt, buckets):
  assert prompt_buckets(Sampling(max_prompt=max_prompt)) == buckets


def test_prompt_buckets_can_be_given():
  assert prompt_buckets(SAMPLING) == (6, 12)


def test_served_weights_are_the_learner_s_in_the_sampler_s_dtype():
  for family in ('llama', 'qwen2'):
    _, params = small.model(family, num_hidden_layers=1)
    served = serve(params, jnp.dtype('bfloat16'))
    head = params['embed'] if family == 'qwen2' else params['head']['kernel']
    np.testing.assert_array_equal(served.head, head.astype(jnp.bfloat16))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), served.params, params)
