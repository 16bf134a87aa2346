"""Attention with a mask: each query attends to the keys that it allows. JAX computes it on every device.

Packed rows and prompts have a form of their own, without a mask: sprl/kernels/packed_attention.py. The mask is for keys in no
order: the ring of a sliding window.

The reference has its own backward pass. The forward pass keeps one number per query, the log of its normaliser, from which the
backward pass recomputes the weights. Scores and masks exist for one chunk of queries at a time, in either direction. Heads come
first and the queries of a group are stacked, so every product is one batched matrix product without a transposition.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sprl.kernels.fp8_softmax import LOG2E, origin, rounded

QUERY_CHUNK = 1024  # queries whose [Q, S] scores exist at one time
LOWEST = -1e30  # the score of a masked key


def attention(
  q: Float[Array, 'B T H D'],
  k: Float[Array, 'B S K D'],
  v: Float[Array, 'B S K D'],
  allowed: Bool[Array, 'B #K T S'],
  fp8_softmax: bool = False,
) -> Float[Array, 'B T H D']:
  """Softmax attention with grouped heads; scores and softmax are float32. A query with no allowed key gives zeros.

  `allowed` is one mask for all kv heads ([B, 1, T, S]) or one for each. `fp8_softmax` rounds the softmax weights to e4m3
  (sprl/kernels/fp8_softmax.py), which has no gradient.
  """
  return by_chunks(_given, q, k, v, allowed, None, fp8_softmax)


def _given(allowed, _, keys):
  return allowed


def by_chunks(
  allowed: Callable[[Any, Any, int], Bool[Array, 'B #K Q S']],
  q: Float[Array, 'B T H D'],
  k: Float[Array, 'B S K D'],
  v: Float[Array, 'B S K D'],
  of_queries: Any,
  of_keys: Any,
  fp8_softmax: bool = False,
) -> Float[Array, 'B T H D']:
  """Compute attention whose mask is made for one chunk of queries at a time: allowed(queries, keys, S).

  `of_queries` is a tree of arrays [B, T] or [B, #K, T, S], cut into chunks along T and padded with zeros; `of_keys` is any tree.
  """
  B, T, H, D = q.shape
  grouped = jnp.moveaxis(q.reshape(B, T, k.shape[2], -1, D), 1, 3)
  attend = _attend_fp8_softmax if fp8_softmax else _attend
  out = attend(allowed, grouped, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), of_queries, of_keys)
  return jnp.moveaxis(out, 3, 1).reshape(B, T, H, D)


def _attend_fp8_softmax(allowed, q, k, v, of_queries, of_keys):
  def chunk(_, queries):
    scores = _scores(queries[0], k, allowed(queries[1], of_keys, k.shape[2]))
    top = jnp.maximum(origin(jnp.max(scores, axis=-1, keepdims=True) * LOG2E) / LOG2E, LOWEST / 2)
    weights = jnp.exp(scores - top)
    sums = jnp.einsum('bkgts,bksd->bkgtd', rounded(weights).astype(v.dtype), v, preferred_element_type=jnp.float32)
    return None, ((sums / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)).astype(q.dtype),)

  return _joined(q, jax.lax.scan(chunk, None, (_chunks(q, 3), _of_queries(of_queries)))[1])[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(allowed, q, k, v, of_queries, of_keys):
  """Attend: queries [B, K, G, T, D], keys and values [B, K, S, D] -> [B, K, G, T, D]."""
  return _forward(allowed, q, k, v, of_queries, of_keys)[0]


def _forward(allowed, q, k, v, of_queries, of_keys):
  values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)  # the product also sums the weights

  def chunk(_, queries):
    scores = _scores(queries[0], k, allowed(queries[1], of_keys, k.shape[2]))
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST / 2)  # above LOWEST, so that masked keys get weight 0
    weights = jnp.exp(scores - top).astype(v.dtype)
    out = jnp.einsum('bkgts,bksd->bkgtd', weights, values, preferred_element_type=jnp.float32)
    total = jnp.maximum(out[..., -1:], 1e-30)
    return None, ((out[..., :-1] / total).astype(q.dtype), (top + jnp.log(total))[..., 0])

  out, lse = _joined(q, jax.lax.scan(chunk, None, (_chunks(q, 3), _of_queries(of_queries)))[1])
  return out, (q, k, v, of_queries, of_keys, out, lse)


def _backward(allowed, saved, dout):
  q, k, v, of_queries, of_keys, out, lse = saved
  scale = q.shape[-1] ** -0.5

  def chunk(sums, queries):
    q, mine, out, lse, dout = queries
    weights = jnp.exp(_scores(q, k, allowed(mine, of_keys, k.shape[2])) - lse[..., None])
    shared = jnp.sum(out.astype(jnp.float32) * dout, axis=-1, keepdims=True)
    dweights = jnp.einsum('bkgtd,bksd->bkgts', dout, v, preferred_element_type=jnp.float32)
    dscores = (weights * (dweights - shared) * scale).astype(q.dtype)
    dv = jnp.einsum('bkgts,bkgtd->bksd', weights.astype(v.dtype), dout, preferred_element_type=jnp.float32)
    dk = jnp.einsum('bkgts,bkgtd->bksd', dscores, q, preferred_element_type=jnp.float32)
    return (sums[0] + dk, sums[1] + dv), (jnp.einsum('bkgts,bksd->bkgtd', dscores, k),)

  start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  queries = (_chunks(q, 3), _of_queries(of_queries), _chunks(out, 3), _chunks(lse, 3), _chunks(dout, 3))
  (dk, dv), dq = jax.lax.scan(chunk, start, queries)
  return *_joined(q, dq), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


def _scores(q, k, allowed):
  scores = jnp.einsum('bkgtd,bksd->bkgts', q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
  return jnp.where(allowed[:, :, None], scores, LOWEST)


def attention_share(
  allowed: Callable[[Any, Any, int], Bool[Array, 'B #K Q S']],
  q: Float[Array, 'B T H D'],
  k: Float[Array, 'B S K D'],
  of_queries: Any,
  real: Bool[Array, 'B T'],
) -> Float[Array, 'B K S']:
  """Return the attention probability of each key, averaged over the heads of a group and summed over the `real` queries.

  The mask is made for one chunk of queries at a time: allowed(of_queries, None, S), as in `by_chunks`.
  """
  B, T, _, D = q.shape
  queries = jnp.moveaxis(q.reshape(B, T, k.shape[2], -1, D), 1, 3)

  def chunk(total, queries):
    q, mine, real = queries
    weights = jax.nn.softmax(_scores(q, jnp.swapaxes(k, 1, 2), allowed(mine, None, k.shape[1])), axis=-1)
    return total + jnp.einsum('bkgts,bt->bks', weights, real.astype(jnp.float32)) / weights.shape[2], None

  start = jnp.zeros((B, k.shape[2], k.shape[1]))
  return jax.lax.scan(chunk, start, (_chunks(queries, 3), _of_queries(of_queries), _chunks(real, 1)))[0]


def _of_queries(tree):
  """Cut arrays [B, T] and [B, #K, T, S] into chunks of queries."""
  return jax.tree.map(lambda x: _chunks(x, 1 if x.ndim == 2 else 2), tree)


def _chunks(x, axis):
  """Cut axis T into chunks, padded at the end: [..., T, ...] -> [chunks, ..., Q, ...]."""
  size = min(QUERY_CHUNK, x.shape[axis])
  x = jnp.pad(x, [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)])
  return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _joined(q, chunks):
  """Join the chunked results of q's queries: [chunks, B, K, G, Q, ...] -> [B, K, G, T, ...]."""
  return [jnp.moveaxis(x, 0, 3).reshape(*q.shape[:3], -1, *x.shape[5:])[:, :, :, : q.shape[3]] for x in chunks]
