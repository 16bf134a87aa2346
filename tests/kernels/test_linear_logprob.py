"""Log-probs and entropies in chunks against whole logits in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.kernels.linear_logprob import linear_logprob, reference
from sprl.kernels.support import pack_mask

T, E, V = 13, 6, 31
slow = pytest.mark.slow


@pytest.fixture(scope='module')
def inputs():
  rng = np.random.default_rng(0)
  hidden, head = rng.normal(size=(T, E)).astype(np.float32), rng.normal(size=(V, E)).astype(np.float32)
  return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(rng.integers(0, V, T).astype(np.int32))


EVERYTHING = np.ones((T, V), bool)


def supports(target):
  """Return random sets of tokens [T, V], each with its target, and the two forms of their record: ids and a bit mask."""
  kept = np.random.default_rng(2).random((T, V)) < 0.3
  kept[np.arange(T), target] = True
  ids = np.full((T, V), -1, np.int32)
  for t in range(T):
    found = np.flatnonzero(kept[t])[::-1]
    ids[t, : len(found)] = found
  return kept, {'ids': jnp.asarray(ids), 'mask': pack_mask(jnp.asarray(kept))}


def by_hand(hidden, head, target, temperature, kept=EVERYTHING):
  """Return float64 log-probs and entropies over the kept tokens [T, V]."""
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
  logp, entropy = np.zeros((2, T))
  for t in range(T):
    p = {v: np.exp(logits[t, v]) for v in np.flatnonzero(kept[t])}
    p = {v: each / sum(p.values()) for v, each in p.items()}
    logp[t], entropy[t] = np.log(p[int(target[t])]), -sum(each * np.log(each) for each in p.values())
  return logp, entropy


def gradient_by_hand(hidden, head, target, temperature, of_logp, of_entropy, kept=EVERYTHING):
  """Return the float64 gradient of sum(of_logp * logp + of_entropy * entropy) over the kept tokens, term by term."""
  hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
  mass = np.exp(hidden @ head.T / temperature) * kept
  p = mass / mass.sum(axis=1, keepdims=True)
  d = np.zeros((T, V))
  for t in range(T):
    among = np.flatnonzero(kept[t])
    for v in among:
      d[t, v] += of_logp[t] * ((v == target[t]) - p[t, v])
      # entropy = -sum_u p_u log p_u;  d p_u / d logit_v = p_u ((u == v) - p_v)
      d[t, v] -= of_entropy[t] * sum(p[t, u] * ((u == v) - p[t, v]) * (np.log(p[t, u]) + 1) for u in among)
  return d @ head / temperature, d.T @ hidden / temperature


def test_uniform_logits_by_hand():
  logp, entropy = linear_logprob(jnp.zeros((2, 3)), jnp.ones((4, 3)), jnp.array([0, 3]))
  np.testing.assert_allclose(logp, [-np.log(4)] * 2, rtol=1e-6)
  np.testing.assert_allclose(entropy, [np.log(4)] * 2, rtol=1e-6)


@pytest.mark.parametrize(
  ('temperature', 'chunk'),
  [(0.6, 4), (1.0, 256), *(pytest.param(1.0, chunk, marks=slow) for chunk in (1, 5, 13))],  # 4 and 5 do not divide 13
)
def test_values_match_float64(inputs, chunk, temperature):
  expected = by_hand(*inputs, temperature)
  chunked = jax.jit(linear_logprob, static_argnums=(3, 4))(*inputs, temperature, chunk)
  for got in (chunked, jax.jit(reference, static_argnums=3)(*inputs, temperature)):
    for a, b in zip(got, expected):
      np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(('temperature', 'chunk'), [(0.6, 4), pytest.param(1.0, 13, marks=slow)])
def test_gradients_match_float64(inputs, chunk, temperature):
  hidden, head, target = inputs
  rng = np.random.default_rng(1)
  of_logp, of_entropy = (rng.normal(size=T).astype(np.float32) for _ in range(2))

  def total(hidden, head):
    logp, entropy = linear_logprob(hidden, head, target, temperature, chunk)
    return jnp.sum(of_logp * logp + of_entropy * entropy)

  expected = gradient_by_hand(hidden, head, np.asarray(target), temperature, of_logp, of_entropy)
  for a, b in zip(jax.jit(jax.grad(total, (0, 1)))(hidden, head), expected):
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize('form', ['ids', 'mask'])
def test_over_a_support_values_and_gradients_match_float64(inputs, form):
  """Central differences of the float64 oracle confirm its gradient."""
  hidden, head, target = inputs
  kept, records = supports(np.asarray(target))
  rng = np.random.default_rng(1)
  of_logp, of_entropy = (rng.normal(size=T).astype(np.float32) for _ in range(2))

  def total(hidden, head):
    logp, entropy = linear_logprob(hidden, head, target, 0.6, 4, support=records[form])
    return jnp.sum(of_logp * logp + of_entropy * entropy), (logp, entropy)

  gradient, values = jax.jit(jax.grad(total, (0, 1), has_aux=True))(hidden, head)
  for got in (values, reference(hidden, head, target, 0.6, records[form])):
    for a, b in zip(got, by_hand(hidden, head, target, 0.6, kept)):
      np.testing.assert_allclose(a, b, atol=2e-5)
  expected = gradient_by_hand(hidden, head, np.asarray(target), 0.6, of_logp, of_entropy, kept)
  for a, b in zip(gradient, expected):
    np.testing.assert_allclose(a, b, atol=2e-5)

  weights = np.asarray(head, np.float64)
  for v, e in ((0, 0), (7, 3), (30, 5)):
    moved = [weights.copy(), weights.copy()]
    moved[0][v, e] += 1e-5
    moved[1][v, e] -= 1e-5
    up, down = (sum(w @ x for w, x in zip((of_logp, of_entropy), by_hand(hidden, m, target, 0.6, kept))) for m in moved)
    np.testing.assert_allclose(expected[1][v, e], (up - down) / 2e-5, atol=1e-6)


def test_tokens_outside_every_support_have_no_gradient(inputs):
  hidden, head, target = inputs
  kept, _ = supports(np.asarray(target))
  unused = np.isin(np.arange(V), [1, 30])
  assert not np.isin(target, [1, 30]).any()
  kept[:, unused] = False
  record = pack_mask(jnp.asarray(kept))
  gradient = np.asarray(jax.jit(jax.grad(lambda w: jnp.sum(linear_logprob(hidden, w, target, support=record)[0])))(head))
  assert not np.any(gradient[unused])
  assert np.all(np.any(gradient[~unused], axis=1))


def test_a_support_of_one_token_has_log_prob_0_and_no_gradient(inputs):
  hidden, head, target = inputs
  alone = jnp.stack([target, jnp.full(T, -1)], axis=1).astype(jnp.int32)
  logp, entropy = linear_logprob(hidden, head, target, chunk=4, support=alone)
  np.testing.assert_allclose(logp, np.zeros(T), atol=1e-6)
  np.testing.assert_allclose(entropy, np.zeros(T), atol=1e-6)
  gradient = jax.grad(lambda h: sum(jnp.sum(x) for x in linear_logprob(h, head, target, chunk=4, support=alone)))(hidden)
  np.testing.assert_allclose(gradient, np.zeros((T, E)), atol=1e-5)


def test_chunks_beyond_count_are_skipped(inputs):
  hidden, head, target = inputs
  chunked = jax.jit(linear_logprob, static_argnums=(3, 4))
  logp, entropy = chunked(hidden, head, target, 1.0, 4, jnp.int32(6))  # two chunks of four
  whole = chunked(hidden, head, target, 1.0, 4, jnp.int32(T))
  for part, full in zip((logp, entropy), whole):
    np.testing.assert_array_equal(part[:8], full[:8])
    assert not np.any(part[8:])
  grads = jax.jit(jax.grad(lambda h: jnp.sum(linear_logprob(h, head, target, 1.0, 4, jnp.int32(6))[0])))(hidden)
  assert np.all(np.any(grads[:8], axis=1))
  assert not np.any(grads[8:])

  assert not any(np.any(x) for x in chunked(hidden, head, target, 1.0, 4, jnp.int32(0)))


def test_distant_logits_do_not_overflow():
  hidden, head = jnp.array([[300.0]]), jnp.array([[1.0], [-1.0], [0.5]])
  logp, entropy = linear_logprob(hidden, head, jnp.array([2]))
  np.testing.assert_allclose(logp, [-150.0], rtol=1e-6)
  np.testing.assert_allclose(entropy, [0.0], atol=1e-6)


def test_float32_weights_keep_a_float32_gradient(inputs):
  hidden, head, target = inputs
  narrow = hidden.astype(jnp.bfloat16)
  logp = linear_logprob(narrow, head, target)[0]
  assert logp.dtype == jnp.float32
  expected = reference(narrow, head.astype(jnp.bfloat16), target)[0]
  np.testing.assert_allclose(logp, expected, atol=1e-4)
  grads = jax.grad(lambda *x: jnp.sum(linear_logprob(*x, target)[0]), (0, 1))(narrow, head)
  assert (grads[0].dtype, grads[1].dtype) == (jnp.bfloat16, jnp.float32)


def test_no_array_holds_more_than_a_chunk_of_logits():
  T, V, chunk = 512, 4099, 16
  shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((T, 8), jnp.float32), ((V, 8), jnp.float32), ((T,), jnp.int32))]
  step = jax.value_and_grad(lambda h, w, t: sum(x.sum() for x in partial(linear_logprob, chunk=chunk)(h, w, t)), (0, 1))
  compiled = jax.jit(step).lower(*shapes).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < T * V * 4 / 8
