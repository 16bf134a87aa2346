"""Attention of the learner and of prefill: each query attends to the keys that a mask allows. On GPUs cuDNN computes it.

cuDNN takes the mask of packed rows, shared prompts included, as one bias for all heads, [B, 1, T, S] in bfloat16. It needs no
other array of that size.

The reference has its own backward pass. The forward pass keeps one number per query, the log of its normaliser, from which the
backward pass recomputes the weights. No [T, S] array outlives its layer in either direction. Heads come first and the queries of
a group are stacked, so every product is one batched matrix product without a transposition.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sprl.config import Kernels
from sprl.kernels.cost import Cost
from sprl.kernels.fp8_softmax import LOG2E, origin, rounded
from sprl.kernels.platform import chosen

QUERY_CHUNK = 1024  # queries whose [Q, S] scores exist at one time
LOWEST = -1e30  # the score of a masked key


def attention(
  q: Float[Array, 'B T H D'],
  k: Float[Array, 'B S K D'],
  v: Float[Array, 'B S K D'],
  allowed: Bool[Array, 'B #K T S'],
  causal: bool = False,
  fp8_softmax: bool = False,
  kernels: Kernels = 'auto',
) -> Float[Array, 'B T H D']:
  """Softmax attention with grouped heads; scores and softmax are float32. A query with no allowed key gives zeros.

  `allowed` is one mask for all kv heads ([B, 1, T, S]) or one for each. `causal` promises that no query t sees a key beyond t,
  which halves the work of the library. `fp8_softmax` rounds the softmax weights to e4m3 (sprl/kernels/fp8_softmax.py), which no
  library does and which has no gradient.
  """
  unrounded = 'cuDNN does not round the softmax weights to FP8' if fp8_softmax else None
  if chosen('attention of whole rows', kernels, lambda: unrounded or obstacle(q, k, allowed), library='cuDNN'):
    return by_library(q, k, v, allowed, causal)
  return reference_fp8_softmax(q, k, v, allowed) if fp8_softmax else reference(q, k, v, allowed)


def by_library(
  q: Float[Array, 'B T H D'],
  k: Float[Array, 'B S K D'],
  v: Float[Array, 'B S K D'],
  allowed: Bool[Array, 'B 1 T S'],
  causal: bool = False,
  implementation: Literal['cudnn', 'xla'] = 'cudnn',
) -> Float[Array, 'B T H D']:
  """Compute `attention` by `jax.nn.dot_product_attention`, with one mask for all heads."""
  out = jax.nn.dot_product_attention(q, k, v, mask=allowed, is_causal=causal, implementation=implementation)
  # For a query with no allowed key the library averages all values.
  return jnp.where(jnp.any(allowed[:, 0], axis=-1)[..., None, None], out, 0).astype(q.dtype)


def obstacle(q: Any, k: Any, allowed: Any) -> str | None:
  """Return why cuDNN cannot compute attention or its gradient for these shapes and dtypes, or None if it can."""
  (_, T, _, D), S = q.shape, k.shape[1]
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    return f'queries are {q.dtype}'
  if allowed.shape[1] != 1:
    return 'kv heads have masks of their own'
  if D % 8 or D > 128:
    return f'heads are {D} wide'
  if T % 2 or S % 2:
    return f'{T} queries and {S} keys are not both even'
  return None


def cost(B: int, T: int, H: int, K: int, D: int, backward: bool = False) -> Cost:
  """Return the cost of B rows, each one segment of T tokens, in bfloat16; with `backward`, of both passes.

  The forward pass has two products of T^2 / 2 pairs per head and moves q, k, v and the output. The backward pass has five
  products and moves these again, the output's gradient, and three gradients.
  """
  of_q, of_k = 2 * B * T * H * D, 2 * B * T * K * D
  if not backward:
    return Cost(2 * of_q + 2 * of_k, 2 * B * H * T * T * D)
  return Cost(6 * of_q + 6 * of_k, 7 * B * H * T * T * D)


def reference(
  q: Float[Array, 'B T H D'], k: Float[Array, 'B S K D'], v: Float[Array, 'B S K D'], allowed: Bool[Array, 'B #K T S']
) -> Float[Array, 'B T H D']:
  """Compute `attention` in jnp."""
  B, T, H, D = q.shape
  grouped = q.reshape(B, T, k.shape[2], -1, D)
  out = _attend(jnp.moveaxis(grouped, 1, 3), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), allowed)
  return jnp.moveaxis(out, 3, 1).reshape(B, T, H, D)


def reference_fp8_softmax(
  q: Float[Array, 'B T H D'], k: Float[Array, 'B S K D'], v: Float[Array, 'B S K D'], allowed: Bool[Array, 'B #K T S']
) -> Float[Array, 'B T H D']:
  """Compute `attention` with `fp8_softmax` in jnp. Rounding has no useful gradient."""
  B, T, H, D = q.shape
  queries, k, v = jnp.moveaxis(q.reshape(B, T, k.shape[2], -1, D), 1, 3), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

  def chunk(_, queries):
    scores = _scores(queries[0], k, queries[1])
    top = jnp.maximum(origin(jnp.max(scores, axis=-1, keepdims=True) * LOG2E) / LOG2E, LOWEST / 2)
    weights = jnp.exp(scores - top)
    sums = jnp.einsum('bkgts,bksd->bkgtd', rounded(weights).astype(v.dtype), v, preferred_element_type=jnp.float32)
    return None, ((sums / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)).astype(q.dtype),)

  [out] = _joined(queries, jax.lax.scan(chunk, None, (_chunks(queries, 3), _chunks(allowed, 2)))[1])
  return jnp.moveaxis(out, 3, 1).reshape(B, T, H, D)


@jax.custom_vjp
def _attend(q, k, v, allowed):
  """Attend: queries [B, K, G, T, D], keys and values [B, K, S, D] -> [B, K, G, T, D]."""
  return _forward(q, k, v, allowed)[0]


def _forward(q, k, v, allowed):
  values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)  # the product also sums the weights

  def chunk(_, queries):
    q, allowed = queries
    scores = _scores(q, k, allowed)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST / 2)  # above LOWEST, so that masked keys get weight 0
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
  """Return the attention probability of each key, averaged over the heads of a group and summed over the `real` queries."""
  B, T, _, D = q.shape
  queries = jnp.moveaxis(q.reshape(B, T, k.shape[2], -1, D), 1, 3)

  def chunk(total, queries):
    q, allowed, real = queries
    weights = jax.nn.softmax(_scores(q, jnp.swapaxes(k, 1, 2), allowed), axis=-1)
    return total + jnp.einsum('bkgts,bt->bks', weights, real.astype(jnp.float32)) / weights.shape[2], None

  start = jnp.zeros((B, k.shape[2], k.shape[1]))
  return jax.lax.scan(chunk, start, (_chunks(queries, 3), _chunks(allowed, 2), _chunks(real, 1)))[0]


def _chunks(x, axis):
  """Cut axis T into chunks, padded at the end: [..., T, ...] -> [chunks, ..., Q, ...]."""
  size = min(QUERY_CHUNK, x.shape[axis])
  x = jnp.pad(x, [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)])
  return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _joined(q, chunks):
  """Join the chunked results of q's queries: [chunks, B, K, G, Q, ...] -> [B, K, G, T, ...]."""
  return [jnp.moveaxis(x, 0, 3).reshape(*q.shape[:3], -1, *x.shape[5:])[:, :, :, : q.shape[3]] for x in chunks]
