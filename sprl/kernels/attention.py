"""Attention of the learner and of prefill: every query against every key that a mask allows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

QUERY_CHUNK = 1024  # queries whose [Q, T] scores exist at one time


def attention(
  q: Float[Array, 'B T H D'], k: Float[Array, 'B S K D'], v: Float[Array, 'B S K D'], allowed: Bool[Array, 'B T S']
) -> Float[Array, 'B T H D']:
  """Softmax attention with grouped heads, scores and softmax in float32. Rows with nothing allowed give zeros.

  Long inputs go through in chunks of queries, recomputed in the backward pass, so that [T, S] scores never exist whole.
  """
  T = q.shape[1]
  if T <= QUERY_CHUNK:
    return _attend(q, k, v, allowed)
  chunks = -(-T // QUERY_CHUNK)

  def split(x):  # [B, T, ...] -> [chunks, B, Q, ...]
    x = jnp.pad(x, ((0, 0), (0, chunks * QUERY_CHUNK - T)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], chunks, QUERY_CHUNK, *x.shape[2:]), 1, 0)

  out = jax.lax.map(jax.checkpoint(lambda c: _attend(c[0], k, v, c[1])), (split(q), split(allowed)))
  return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :T]


def _attend(q, k, v, allowed):
  B, T, H, D = q.shape
  K = k.shape[2]
  q = q.reshape(B, T, K, H // K, D)
  scores = jnp.einsum('btkgd,bskd->bkgts', q, k, preferred_element_type=jnp.float32) * D**-0.5
  allowed = allowed[:, None, None]
  scores = jnp.where(allowed, scores, -1e30)
  weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.where(allowed, weights, 0.0)
  weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
  out = jnp.einsum('bkgts,bskd->btkgd', weights.astype(q.dtype), v)
  return out.reshape(B, T, H, D)
