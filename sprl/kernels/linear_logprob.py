"""Log-probs and entropies from hidden states and the head, without a [T, V] array of logits.

Positions go through the head in chunks. The backward pass recomputes the logits of each chunk from the saved log-normalisers, so
at most `chunk` rows of logits exist at a time. At temperature t the distribution is softmax(h @ W / t). With supports it is that
distribution over the tokens of the support only, renormalised (sprl/kernels/support.py).

On a mesh, positions come in shards S that lie with their rows, and the vocabulary is split. A chunk of every shard is sent to the
parts of the vocabulary; the vocabulary never moves.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from sprl.kernels.platform import on_accelerator
from sprl.kernels.support import support_mask
from sprl.sharding.rules import parts, shard

EXCLUDED = -1e30  # logit of a token outside the support: its probability is 0, and 0 * logit too, which infinity would make NaN
LOGITS = 5 * 2**28  # bytes of a chunk's float32 logits on an accelerator: 2,048 positions of a vocabulary of 152,064 tokens


def linear_logprob(
  hidden: Float[Array, '*S T E'],
  head: Float[Array, 'V E'],
  target: Int[Array, '*S T'],
  temperature: float = 1.0,
  chunk: int | None = None,
  count: Int[Array, '*S'] | None = None,
  support: Integer[Array, '*S T W'] | None = None,
  narrow: Float[Array, 'V E'] | None = None,
) -> tuple[Float[Array, '*S T'], Float[Array, '*S T']]:
  """Return log softmax(hidden @ head^T / temperature)[target] and the entropy (nats), float32, differentiable.

  With `count`, only chunks that hold one of a shard's first `count` positions are computed; other chunks give zeros. With
  `support`, both are of the distribution over the recorded tokens of each position, of which the target must be one. `chunk` is
  the number of positions whose logits exist at one time; None: `positions_at_once`. `narrow` is the head in the dtype of
  `hidden`, if the caller has it. The gradient goes to `head`.
  """
  *shards, T, E = hidden.shape
  chunk = min(positions_at_once(head.shape[0], on_accelerator()) if chunk is None else chunk, T)
  pad = -T % chunk
  hidden = jnp.pad(hidden.reshape(-1, T, E), ((0, 0), (0, pad), (0, 0)))
  target = jnp.pad(target.reshape(-1, T), ((0, 0), (0, pad)))
  if support is not None:
    support = jnp.pad(support.reshape(-1, T, support.shape[-1]), ((0, 0), (0, pad), (0, 0)))
  counted = T if count is None or chunk == T else jnp.max(count)  # XLA removes a loop over one chunk
  chunks = jnp.asarray(counted + chunk - 1, jnp.int32) // chunk
  narrow = jax.lax.stop_gradient(head).astype(hidden.dtype) if narrow is None else narrow
  heads = shard(head, 'vocab', None), shard(narrow, 'vocab', None)
  found = _chunked(hidden, *heads, target, support, chunks, temperature, chunk)
  logp, entropy = (x[:, :T].reshape(*shards, T) for x in found)
  return logp, entropy


def positions_at_once(vocabulary: int, accelerator: bool) -> int:
  """Return how many positions have logits at one time if nothing else is asked for.

  The backward pass reads and writes the gradient of the whole head once a chunk. On an accelerator this takes little beside the
  products of 2,048 positions; a vocabulary whose float32 logits would be larger than LOGITS has fewer. On a CPU, 256 suffice.
  """
  return max(min(LOGITS // (4 * vocabulary), 2048) // 256 * 256, 256) if accelerator else 256


def reference(hidden, head, target, temperature=1.0, support=None):
  """Compute log-probs and entropies from whole logits: the definition, for tests."""
  logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32).T / temperature
  logp = jax.nn.log_softmax(logits if support is None else jnp.where(support_mask(support, len(head)), logits, EXCLUDED))
  return jnp.take_along_axis(logp, target[:, None], 1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _rows(i, chunk, *arrays):
  """Return chunk i of arrays [S, T, ...], in the sharding of the product with the vocabulary. None stays None."""

  def part(x):
    of_chunk = _at_home(jax.lax.dynamic_slice_in_dim(_at_home(x), i * chunk, chunk, axis=1))
    return shard(of_chunk, 'gathered_scored_rows', *[None] * (x.ndim - 1))

  return jax.tree.map(part, arrays)


def _logits(h, head, temperature, support):
  logits = jax.lax.dot_general(h, head, (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  logits = shard(logits, 'gathered_scored_rows', None, 'vocab') / temperature
  if support is None:
    return logits
  return jnp.where(shard(support_mask(support, head.shape[0]), 'gathered_scored_rows', None, 'vocab'), logits, EXCLUDED)


def _is(target, V):
  """Return a one-hot mask [S, C, V] of the target. An index into a split vocabulary would be sent to all its parts."""
  return target[..., None] == jnp.arange(V, dtype=target.dtype)


def _placed(whole, new, i, chunk):
  return _at_home(jax.lax.dynamic_update_slice_in_dim(whole, _at_home(new), i * chunk, axis=1))


def _at_home(x):
  """Lay [S, ...] out so that each shard lies with its rows."""
  return shard(x, 'scored_rows', *[None] * (x.ndim - 1))


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _chunked(hidden, head, narrow, target, support, chunks, temperature, chunk):
  """Return log-probs and entropies [S, T] of hidden states [S, T, E]; only the first `chunks` chunks are computed.

  Products use `narrow`, the head in the dtype of `hidden`. Their gradient goes to `head`.
  """
  return _forward(hidden, head, narrow, target, support, chunks, temperature, chunk)[0]


def _forward(hidden, head, narrow, target, support, chunks, temperature, chunk):
  def body(i, out):
    h, t, kept = _rows(i, chunk, hidden, target, support)
    logits = _logits(h, narrow, temperature, kept)
    top = jnp.max(logits, axis=-1)
    exp = jnp.exp(logits - top[..., None])
    total = jnp.sum(exp, axis=-1)
    lse = top + jnp.log(total)
    entropy = lse - jnp.sum(exp * logits, axis=-1) / total
    logp = jnp.sum(jnp.where(_is(t, head.shape[0]), logits, 0), axis=-1) - lse
    return [_placed(x, new, i, chunk) for x, new in zip(out, (logp, entropy, lse))]

  logp, entropy, lse = jax.lax.fori_loop(0, chunks, body, [jnp.zeros(hidden.shape[:2])] * 3)
  return (logp, entropy), (hidden, head, narrow, target, support, chunks, lse, entropy)


def _backward(temperature, chunk, saved, cotangents):
  hidden, head, narrow, target, support, chunks, lse, entropy = saved

  def body(i, carry):
    dhidden, dhead = carry
    h, t, kept, z, ent, dlogp, dent = _rows(i, chunk, hidden, target, support, lse, entropy, *cotangents)
    logp = _logits(h, narrow, temperature, kept) - z[..., None]
    # d logp[t] / d logits = onehot - p ;  d entropy / d logits = -p (log p + entropy)
    d = -jnp.exp(logp) * (dlogp[..., None] + dent[..., None] * (logp + ent[..., None]))
    d = ((d + jnp.where(_is(t, head.shape[0]), dlogp[..., None], 0)) / temperature).astype(h.dtype)
    apart = d.reshape(groups, -1, d.shape[-1]), h.reshape(groups, -1, h.shape[-1])
    dhead = dhead + jax.lax.dot_general(*apart, (((1,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return _placed(dhidden, d @ narrow, i, chunk), shard(dhead, 'gathered_scored_rows', 'vocab', None)

  # Each group of rows sums its own gradient. The groups are summed once, after the last chunk.
  groups = parts('gathered_scored_rows', hidden.shape[0])
  start = jnp.zeros_like(hidden), jnp.zeros((groups, *head.shape), jnp.float32)
  dhidden, dhead = jax.lax.fori_loop(0, chunks, body, start)
  return dhidden, shard(jnp.sum(dhead, axis=0), 'vocab', None).astype(head.dtype), None, None, None, None


_chunked.defvjp(_forward, _backward)
