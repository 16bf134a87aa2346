"""Attention of the learner and of prefill: every query against every key that a mask allows, with its own backward pass.

The forward pass keeps one number a query (the log of its normaliser) and the backward pass recomputes the weights from it, so
that no [T, S] array of a layer outlives the layer, in either direction. Heads come first and the queries of a group are
stacked, which makes every product one batched matrix product without a transposition.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

QUERY_CHUNK = 1024  # queries whose [Q, S] scores exist at one time
LOWEST = -1e30  # the score of what may not be seen


def attention(
  q: Float[Array, 'B T H D'], k: Float[Array, 'B S K D'], v: Float[Array, 'B S K D'], allowed: Bool[Array, 'B #K T S']
) -> Float[Array, 'B T H D']:
  """Softmax attention with grouped heads, scores and softmax in float32. Queries with nothing allowed give zeros.

  `allowed` is one mask for all kv heads ([B, 1, T, S]) or one for each.
  """
  B, T, H, D = q.shape
  grouped = q.reshape(B, T, k.shape[2], -1, D)
  out = _attend(jnp.moveaxis(grouped, 1, 3), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), allowed)
  return jnp.moveaxis(out, 3, 1).reshape(B, T, H, D)


@jax.custom_vjp
def _attend(q, k, v, allowed):
  """[B, K, G, T, D] queries, [B, K, S, D] keys and values -> [B, K, G, T, D]."""
  return _forward(q, k, v, allowed)[0]


def _forward(q, k, v, allowed):
  values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)  # the weights' sum comes with the product

  def chunk(_, queries):
    q, allowed = queries
    scores = _scores(q, k, allowed)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST / 2)  # above what may not be seen: its weight is 0
    weights = jnp.exp(scores - top).astype(v.dtype)
    out = jnp.einsum('bkgts,bksd->bkgtd', weights, values, preferred_element_type=jnp.float32)
    total = jnp.maximum(out[..., -1:], 1e-30)
    return None, ((out[..., :-1] / total).astype(q.dtype), (top + jnp.log(total))[..., 0])

  out, lse = _joined(q, jax.lax.scan(chunk, None, (_chunks(q, 3), _chunks(allowed, 2)))[1])
  return out, (q, k, v, allowed, out, lse)


def _backward(saved, dout):
  q, k, v, allowed, out, lse = saved
  scale = q.shape[-1] ** -0.5

  def chunk(sums, queries):
    q, allowed, out, lse, dout = queries
    weights = jnp.exp(_scores(q, k, allowed) - lse[..., None])
    shared = jnp.sum(out.astype(jnp.float32) * dout, axis=-1, keepdims=True)
    dweights = jnp.einsum('bkgtd,bksd->bkgts', dout, v, preferred_element_type=jnp.float32)
    dscores = (weights * (dweights - shared) * scale).astype(q.dtype)
    dv = jnp.einsum('bkgts,bkgtd->bksd', weights.astype(v.dtype), dout, preferred_element_type=jnp.float32)
    dk = jnp.einsum('bkgts,bkgtd->bksd', dscores, q, preferred_element_type=jnp.float32)
    return (sums[0] + dk, sums[1] + dv), (jnp.einsum('bkgts,bksd->bkgtd', dscores, k),)

  start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  queries = (_chunks(q, 3), _chunks(allowed, 2), _chunks(out, 3), _chunks(lse, 3), _chunks(dout, 3))
  (dk, dv), dq = jax.lax.scan(chunk, start, queries)
  return *_joined(q, dq), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _scores(q, k, allowed):
  scores = jnp.einsum('bkgtd,bksd->bkgts', q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
  return jnp.where(allowed[:, :, None], scores, LOWEST)


def attention_share(
  q: Float[Array, 'B T H D'], k: Float[Array, 'B S K D'], allowed: Bool[Array, 'B #K T S'], real: Bool[Array, 'B T']
) -> Float[Array, 'B K S']:
  """The probability that each key gets, averaged over the queries of a group and summed over the `real` queries."""
  B, T, _, D = q.shape
  queries = jnp.moveaxis(q.reshape(B, T, k.shape[2], -1, D), 1, 3)

  def chunk(total, queries):
    q, allowed, real = queries
    weights = jax.nn.softmax(_scores(q, jnp.swapaxes(k, 1, 2), allowed), axis=-1)
    return total + jnp.einsum('bkgts,bt->bks', weights, real.astype(jnp.float32)) / weights.shape[2], None

  start = jnp.zeros((B, k.shape[2], k.shape[1]))
  return jax.lax.scan(chunk, start, (_chunks(queries, 3), _chunks(allowed, 2), _chunks(real, 1)))[0]


def _chunks(x, axis):
  """[..., T, ...] -> [chunks, ..., Q, ...] with axis T padded to whole chunks."""
  size = min(QUERY_CHUNK, x.shape[axis])
  x = jnp.pad(x, [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)])
  return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _joined(q, chunks):
  """Chunked results of q's queries, [chunks, B, K, G, Q, ...], as [B, K, G, T, ...]."""
  return [jnp.moveaxis(x, 0, 3).reshape(*q.shape[:3], -1, *x.shape[5:])[:, :, :, : q.shape[3]] for x in chunks]
