"""Log-probs and entropies from hidden states and the head, without a [T, V] array of logits.

Positions go through the head in chunks. The backward pass recomputes the logits of each chunk from the saved log-normalisers, so
at most `chunk` rows of logits exist at a time. At temperature t the distribution is softmax(h @ W / t).

On a mesh, positions come in shards S that lie with their rows, and the vocabulary is split. A chunk of every shard is sent to the
parts of the vocabulary; the vocabulary never moves.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sprl.sharding.rules import parts, shard


def linear_logprob(
  hidden: Float[Array, '*S T E'],
  head: Float[Array, 'V E'],
  target: Int[Array, '*S T'],
  temperature: float = 1.0,
  chunk: int = 256,
  count: Int[Array, '*S'] | None = None,
) -> tuple[Float[Array, '*S T'], Float[Array, '*S T']]:
  """Return log softmax(hidden @ head^T / temperature)[target] and the entropy (nats), float32, differentiable.

  With `count`, only chunks that hold one of a shard's first `count` positions are computed; other chunks give zeros.
  """
  *shards, T, E = hidden.shape
  chunk = min(chunk, T)
  pad = -T % chunk
  hidden = jnp.pad(hidden.reshape(-1, T, E), ((0, 0), (0, pad), (0, 0)))
  target = jnp.pad(target.reshape(-1, T), ((0, 0), (0, pad)))
  counted = T if count is None or chunk == T else jnp.max(count)  # XLA removes a loop over one chunk
  chunks = jnp.asarray(counted + chunk - 1, jnp.int32) // chunk
  found = _chunked(hidden, shard(head, 'vocab', None), target, chunks, temperature, chunk)
  logp, entropy = (x[:, :T].reshape(*shards, T) for x in found)
  return logp, entropy


def reference(hidden, head, target, temperature=1.0):
  """Compute log-probs and entropies from whole logits: the definition, for tests."""
  logp = jax.nn.log_softmax(hidden.astype(jnp.float32) @ head.astype(jnp.float32).T / temperature)
  return jnp.take_along_axis(logp, target[:, None], 1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _rows(i, chunk, hidden, *numbers):
  """Return chunk i of the hidden states and of `numbers`, in the sharding of the product with the vocabulary."""
  parts = (jax.lax.dynamic_slice_in_dim(_at_home(x), i * chunk, chunk, axis=1) for x in (hidden, *numbers))
  h, *numbers = map(_at_home, parts)
  return shard(h, 'gathered_rows', None, None), *[shard(x, 'gathered_rows', None) for x in numbers]


def _logits(h, head, temperature):
  logits = jax.lax.dot_general(h, head, (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  return shard(logits, 'gathered_rows', None, 'vocab') / temperature


def _is(target, V):
  """Return a one-hot mask [S, C, V] of the target. An index into a split vocabulary would be sent to all its parts."""
  return target[..., None] == jnp.arange(V, dtype=target.dtype)


def _placed(whole, new, i, chunk):
  return _at_home(jax.lax.dynamic_update_slice_in_dim(whole, _at_home(new), i * chunk, axis=1))


def _at_home(x):
  """Lay [S, ...] out so that each shard lies with its rows."""
  return shard(x, 'rows', *[None] * (x.ndim - 1))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked(hidden, head, target, chunks, temperature, chunk):
  """Return log-probs and entropies [S, T] of hidden states [S, T, E]; only the first `chunks` chunks are computed."""
  return _forward(hidden, head, target, chunks, temperature, chunk)[0]


def _forward(hidden, head, target, chunks, temperature, chunk):
  narrow = head.astype(hidden.dtype)

  def body(i, out):
    h, t = _rows(i, chunk, hidden, target)
    logits = _logits(h, narrow, temperature)
    top = jnp.max(logits, axis=-1)
    exp = jnp.exp(logits - top[..., None])
    total = jnp.sum(exp, axis=-1)
    lse = top + jnp.log(total)
    entropy = lse - jnp.sum(exp * logits, axis=-1) / total
    logp = jnp.sum(jnp.where(_is(t, head.shape[0]), logits, 0), axis=-1) - lse
    return [_placed(x, new, i, chunk) for x, new in zip(out, (logp, entropy, lse))]

  logp, entropy, lse = jax.lax.fori_loop(0, chunks, body, [jnp.zeros(hidden.shape[:2])] * 3)
  return (logp, entropy), (hidden, head, target, chunks, lse, entropy)


def _backward(temperature, chunk, saved, cotangents):
  hidden, head, target, chunks, lse, entropy = saved
  narrow = head.astype(hidden.dtype)

  def body(i, carry):
    dhidden, dhead = carry
    h, t, z, ent, dlogp, dent = _rows(i, chunk, hidden, target, lse, entropy, *cotangents)
    logp = _logits(h, narrow, temperature) - z[..., None]
    # d logp[t] / d logits = onehot - p ;  d entropy / d logits = -p (log p + entropy)
    d = -jnp.exp(logp) * (dlogp[..., None] + dent[..., None] * (logp + ent[..., None]))
    d = ((d + jnp.where(_is(t, head.shape[0]), dlogp[..., None], 0)) / temperature).astype(h.dtype)
    apart = d.reshape(groups, -1, d.shape[-1]), h.reshape(groups, -1, h.shape[-1])
    dhead = dhead + jax.lax.dot_general(*apart, (((1,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return _placed(dhidden, d @ narrow, i, chunk), shard(dhead, 'gathered_rows', 'vocab', None)

  # Each group of rows sums its own gradient. The groups are summed once, after the last chunk.
  groups = parts('gathered_rows', hidden.shape[0])
  start = jnp.zeros_like(hidden), jnp.zeros((groups, *head.shape), jnp.float32)
  dhidden, dhead = jax.lax.fori_loop(0, chunks, body, start)
  return dhidden, shard(jnp.sum(dhead, axis=0), 'vocab', None).astype(head.dtype), None, None


_chunked.defvjp(_forward, _backward)
