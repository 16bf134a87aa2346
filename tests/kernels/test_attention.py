"""Attention with a mask, against loops over heads and queries in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sprl.kernels import attention as attention_module
from sprl.kernels.attention import attention, attention_share

slow = pytest.mark.slow
# Tests with equal shapes share a compilation. A test that changes QUERY_CHUNK needs its own jit.
JITTED = jax.jit(attention)


def weights_by_hand(q, k, allowed):
  """Return float64 weights [B, T, H, S], one query at a time over its allowed keys."""
  B, T, H, D = q.shape
  S, K = k.shape[1:3]
  allowed = np.broadcast_to(allowed, (B, K, T, S))
  weights = np.zeros((B, T, H, S))
  for b, t, h in np.ndindex(B, T, H):
    head = h // (H // K)
    seen = np.flatnonzero(allowed[b, head, t])
    if len(seen):
      score = k[b, seen, head].astype(np.float64) @ q[b, t, h] / np.sqrt(D)
      weight = np.exp(score - score.max())
      weights[b, t, h, seen] = weight / weight.sum()
  return weights


def by_hand(q, k, v, allowed):
  """Return the float64 output [B, T, H, D]."""
  B, T, H, D = q.shape
  weights, group = weights_by_hand(q, k, allowed), H // k.shape[2]
  out = np.zeros((B, T, H, D))
  for b, t, h in np.ndindex(B, T, H):
    seen = np.flatnonzero(weights[b, t, h])
    out[b, t, h] = weights[b, t, h, seen] @ v[b, seen, h // group].astype(np.float64)
  return out


def random_arguments(B=2, T=7, S=9, H=4, K=2, D=6, seed=0, masks=1):
  rng = np.random.default_rng(seed)
  q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((B, T, H, D), (B, S, K, D), (B, S, K, D)))
  allowed = rng.random((B, masks, T, S)) < 0.5
  allowed[:, :, 0], allowed[:, :, 0, 3] = False, True
  allowed[0, :, 2] = False
  return q, k, v, allowed


@pytest.mark.parametrize(
  ('H', 'K', 'masks'), [(4, 2, 1), (6, 3, 3), *(pytest.param(*case, marks=slow) for case in ((4, 4, 1), (3, 1, 1), (4, 2, 2)))]
)
def test_attention_matches_float64(H, K, masks):
  q, k, v, allowed = random_arguments(H=H, K=K, masks=masks)
  np.testing.assert_allclose(JITTED(q, k, v, allowed), by_hand(q, k, v, allowed), atol=2e-6)


@pytest.mark.parametrize('chunk', [1024, 3])  # 3: a shorter last chunk
def test_fp8_softmax_matches_float64(monkeypatch, chunk):
  """ml_dtypes rounds unnormalised weights, of which the largest is 2^8 up to half a power of two; their sum is not rounded."""
  monkeypatch.setattr(attention_module, 'QUERY_CHUNK', chunk)
  q, k, v, allowed = random_arguments()
  exact, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
  for b, t, h in np.ndindex(*q.shape[:3]):
    seen = np.flatnonzero(allowed[b, 0, t])
    if len(seen):
      score = np.log2(np.e) * k[b, seen, h // group].astype(np.float64) @ q[b, t, h] / np.sqrt(q.shape[3])
      weight = 2.0 ** (score - np.round(score.max()) + 8)
      codes = weight.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
      exact[b, t, h] = codes / weight.sum() @ v[b, seen, h // group].astype(np.float64)
  np.testing.assert_allclose(jax.jit(partial(attention, fp8_softmax=True))(q, k, v, allowed), exact, atol=2e-6)
  assert np.abs(by_hand(q, k, v, allowed) - exact).max() > 0.01  # rounding shows


def test_query_with_one_key_returns_its_value():
  q, k, v, allowed = random_arguments()
  out = JITTED(q, k, v, allowed)
  v = np.repeat(v, 2, axis=2)
  np.testing.assert_allclose(out[:, 0], v[:, 3], atol=1e-6)


def test_query_without_keys_gives_zeros_and_no_gradient():
  q, k, v, allowed = map(jnp.asarray, random_arguments())

  @jax.jit
  @partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
  def loss(q, k, v):
    out = attention(q, k, v, allowed)
    return 1e3 * jnp.sum(out**2), out

  (_, out), grads = loss(q, k, v)
  assert not np.any(out[0, 2])
  assert all(np.isfinite(g).all() for g in grads)
  assert not np.any(grads[0][0, 2])


def test_huge_masked_keys_change_nothing():
  q, k, v, allowed = random_arguments()
  allowed[..., 5] = False
  changed_k, changed_v = k.copy(), v.copy()
  changed_k[:, 5], changed_v[:, 5] = 1e6, -1e6
  np.testing.assert_array_equal(JITTED(q, k, v, allowed), JITTED(q, changed_k, changed_v, allowed))


@pytest.mark.parametrize(('T', 'masks'), [(11, 2), *(pytest.param(*case, marks=slow) for case in ((8, 1), (8, 2), (11, 1)))])
def test_chunks_leave_outputs_and_gradients_equal(monkeypatch, T, masks):
  q, k, v, allowed = map(jnp.asarray, random_arguments(T=T, S=T, masks=masks))

  def outputs(q, k, v):
    out, back = jax.vjp(lambda *x: attention(*x, allowed), q, k, v)
    return (out, *back(jnp.sin(out)))

  whole = jax.jit(outputs)(q, k, v)
  monkeypatch.setattr(attention_module, 'QUERY_CHUNK', 4)
  for a, b in zip(whole, jax.jit(lambda *x: outputs(*x))(q, k, v)):
    np.testing.assert_allclose(a, b, atol=1e-5)


def by_definition(q, k, v, allowed):
  """Return attention by its definition, in whole arrays, for automatic differentiation. Every query needs a key."""
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum('bthd,bshd->bhts', q, k) / jnp.sqrt(q.shape[-1])
  return jnp.einsum(
    'bhts,bshd->bthd',
    jax.nn.softmax(jnp.where(jnp.repeat(allowed, scores.shape[1] // allowed.shape[1], axis=1), scores, -jnp.inf)),
    v,
  )


GRADIENTS = [(4, 2, jnp.float32, 1e-5), (4, 2, jnp.bfloat16, 5e-2)]
MORE_GRADIENTS = [(chunk, 1, *dtype) for chunk in (1024, 4) for dtype in ((jnp.float32, 1e-5), (jnp.bfloat16, 5e-2))]


@pytest.mark.parametrize(
  ('chunk', 'masks', 'dtype', 'atol'), [*GRADIENTS, *(pytest.param(*case, marks=slow) for case in MORE_GRADIENTS)]
)
def test_gradients_match_the_definition(monkeypatch, dtype, atol, chunk, masks):
  monkeypatch.setattr(attention_module, 'QUERY_CHUNK', chunk)
  q, k, v, allowed = random_arguments(H=6, K=2, masks=masks)
  allowed[..., 1] = True
  cotangent = np.random.default_rng(3).normal(size=q.shape).astype(np.float32)

  @partial(jax.jit, static_argnums=0)
  def gradients(function, cotangent, *qkv):
    return jax.vjp(lambda *x: function(*x, jnp.asarray(allowed)), *qkv)[1](cotangent)

  exact = gradients(by_definition, cotangent, q, k, v)
  grads = gradients(attention, *(jnp.asarray(x, dtype) for x in (cotangent, q, k, v)))
  for grad, expected in zip(grads, exact):
    assert grad.dtype == dtype
    np.testing.assert_allclose(grad.astype(jnp.float32), expected, atol=atol)


def test_backward_pass_saves_no_array_of_scores():
  B, T, H, D = 1, 64, 4, 8
  x, allowed = jax.ShapeDtypeStruct((B, T, H, D), jnp.float32), jnp.ones((B, 1, T, T), bool)
  back = jax.eval_shape(lambda q, k, v: jax.vjp(lambda *x: attention(*x, allowed), q, k, v)[1], x, x, x)
  assert max(leaf.size for leaf in jax.tree.leaves(back) if leaf.dtype != bool) == B * T * H * D


def test_chunks_never_hold_all_scores():
  T = attention_module.QUERY_CHUNK + 64
  x, allowed = jax.ShapeDtypeStruct((1, T, 1, 4), jnp.float32), jax.ShapeDtypeStruct((1, 1, T, T), bool)
  text = jax.jit(attention).lower(x, x, x, allowed).as_text()
  assert f'{attention_module.QUERY_CHUNK}x{T}xf32' in text
  assert f'{T}x{T}xf32' not in text


@pytest.mark.parametrize(
  ('chunk', 'H', 'masks'), [(1024, 4, 1), (4, 6, 2), *(pytest.param(*case, marks=slow) for case in ((4, 4, 1), (1024, 6, 2)))]
)
def test_attention_share_sums_the_real_queries(monkeypatch, H, masks, chunk):
  monkeypatch.setattr(attention_module, 'QUERY_CHUNK', chunk)
  q, k, _, allowed = random_arguments(H=H, masks=masks)
  allowed[..., 1] = True  # every real query has a key
  real = np.arange(7) < np.array([[4], [7]])
  q[0, 4:] = 1e3  # padding
  share = jax.jit(lambda *x: attention_share(lambda mine, _, keys: mine, *x))(q, k, allowed, real)
  weights = weights_by_hand(q, k, allowed) * real[:, :, None, None]
  expected = weights.reshape(2, 7, 2, H // 2, 9).mean(axis=3).sum(axis=1)
  np.testing.assert_allclose(share, expected, atol=2e-6)
  np.testing.assert_allclose(np.asarray(share).sum(axis=-1), np.broadcast_to([[4.0], [7.0]], (2, 2)), rtol=1e-5)
