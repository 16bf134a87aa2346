"""Hidden states and a vocabulary to log-probs and entropies, without a [T, V] array of logits.

Positions go through the head in chunks. The backward pass recomputes each chunk's logits from the saved log-normalisers, so at
no time do more than `chunk` rows of logits exist. At temperature t the distribution is softmax(h @ W / t).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def linear_logprob(
  hidden: Float[Array, 'T E'],
  head: Float[Array, 'V E'],
  target: Int[Array, ' T'],
  temperature: float = 1.0,
  chunk: int = 256,
  count: Int[Array, ''] | None = None,
) -> tuple[Float[Array, ' T'], Float[Array, ' T']]:
  """log softmax(hidden @ head^T / temperature)[target] and the distribution's entropy, both float32, differentiable.

  Where `count` is given, only the chunks that hold the first `count` positions are computed; the rest come out as zeros.
  """
  T = hidden.shape[0]
  chunk = min(chunk, T)
  pad = -T % chunk
  hidden = jnp.pad(hidden, ((0, pad), (0, 0)))
  target = jnp.pad(target, (0, pad))
  chunks = jnp.asarray((T if count is None else count) + chunk - 1, jnp.int32) // chunk
  logp, entropy = _chunked(hidden, head, target, chunks, temperature, chunk)
  return logp[:T], entropy[:T]


def reference(hidden, head, target, temperature=1.0):
  """The same from whole logits: the definition, for tests."""
  logp = jax.nn.log_softmax(hidden.astype(jnp.float32) @ head.astype(jnp.float32).T / temperature)
  return jnp.take_along_axis(logp, target[:, None], 1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _logits(hidden, head, temperature):
  return jax.lax.dot_general(hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) / temperature


def _rows(i, chunk, *arrays):
  return [jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk) for x in arrays]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked(hidden, head, target, chunks, temperature, chunk):
  return _forward(hidden, head, target, chunks, temperature, chunk)[0]


def _forward(hidden, head, target, chunks, temperature, chunk):
  narrow = head.astype(hidden.dtype)

  def body(i, out):
    h, t = _rows(i, chunk, hidden, target)
    logits = _logits(h, narrow, temperature)
    top = jnp.max(logits, axis=-1)
    exp = jnp.exp(logits - top[:, None])
    total = jnp.sum(exp, axis=-1)
    lse = top + jnp.log(total)
    entropy = lse - jnp.sum(exp * logits, axis=-1) / total
    logp = jnp.take_along_axis(logits, t[:, None], 1)[:, 0] - lse
    return [jax.lax.dynamic_update_slice_in_dim(x, new, i * chunk, 0) for x, new in zip(out, (logp, entropy, lse))]

  logp, entropy, lse = jax.lax.fori_loop(0, chunks, body, [jnp.zeros(hidden.shape[0])] * 3)
  return (logp, entropy), (hidden, head, target, chunks, lse, entropy)


def _backward(temperature, chunk, saved, cotangents):
  hidden, head, target, chunks, lse, entropy = saved
  narrow = head.astype(hidden.dtype)

  def body(i, carry):
    dhidden, dhead = carry
    h, t, z, ent, dlogp, dent = _rows(i, chunk, hidden, target, lse, entropy, *cotangents)
    logp = _logits(h, narrow, temperature) - z[:, None]
    # d logp[t] / d logits = onehot - p ;  d entropy / d logits = -p (log p + entropy)
    d = -jnp.exp(logp) * (dlogp[:, None] + dent[:, None] * (logp + ent[:, None]))
    d = (d.at[jnp.arange(chunk), t].add(dlogp) / temperature).astype(h.dtype)
    dhead = dhead + jax.lax.dot_general(d, h, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.dynamic_update_slice_in_dim(dhidden, d @ narrow, i * chunk, 0), dhead

  start = jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32)
  dhidden, dhead = jax.lax.fori_loop(0, chunks, body, start)
  return dhidden, dhead.astype(head.dtype), None, None


_chunked.defvjp(_forward, _backward)
