"""From logits to a token, and to its log-prob under the distribution that it was drawn from."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sprl.config import Sampling

BLOCK = 256  # vocabulary entries in a block of the two-level search


def draw(
  logits: Float[Array, 'B V'], uniform: Float[Array, 'B 2'], sampling: Sampling
) -> tuple[Int[Array, ' B'], Float[Array, ' B']]:
  """Draw one token per row. Returns the tokens and their float32 log-probs after temperature and filters.

  `uniform` holds two random numbers per row in [0, 1). At temperature 0 the likeliest token is taken; its log-prob is 0.
  """
  if sampling.temperature == 0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.zeros(logits.shape[0])
  logits = process(logits, sampling)
  top = jnp.max(logits, axis=-1)
  mass = jnp.exp(logits - top[:, None])
  token, total = _inverse_cdf(mass, uniform)
  chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
  return token, chosen - top - jnp.log(total)


def logp_of(logits: Float[Array, 'B V'], token: Int[Array, ' B'], sampling: Sampling) -> Float[Array, ' B']:
  """Return the log-probs that `draw` reports when it draws `token`; -inf for a token that the filters exclude."""
  if sampling.temperature == 0:
    return jnp.zeros(logits.shape[0])
  logp = jax.nn.log_softmax(process(logits, sampling))
  return jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0]


def process(logits: Float[Array, 'B V'], sampling: Sampling) -> Float[Array, 'B V']:
  """Divide logits by the temperature, then set tokens to -inf that top-k, top-p and min-p exclude, in this order.

  Tokens that tie with the k-th largest logit stay.
  """
  logits = logits.astype(jnp.float32) / sampling.temperature
  if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
    lowest = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
    logits = jnp.where(logits < lowest, -jnp.inf, logits)
  if sampling.top_p < 1:
    ordered = -jnp.sort(-logits, axis=-1)
    p = jax.nn.softmax(ordered)
    kept = jnp.cumsum(p, axis=-1) - p < sampling.top_p  # the mass before a token decides, so the first always stays
    lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits < lowest, -jnp.inf, logits)
  if sampling.min_p > 0:
    top = jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where(logits < top + jnp.log(sampling.min_p), -jnp.inf, logits)
  return logits


def uniforms(seed: Array, uid: Int[Array, ' B'], attempt: Int[Array, ' B'], position: Int[Array, ' B']) -> Float[Array, 'B 2']:
  """Return the two random numbers, in [0, 1), for the token at `position` of attempt `attempt` of sequence `uid`.

  They depend on nothing else: not on the row, the batch or the chunk, and not on whether the sequence was aborted and continued.
  """

  def one(uid, attempt, position):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(seed, uid), attempt), position)
    return jax.random.uniform(key, (2,))

  return jax.vmap(one)(uid, attempt, position)


def _inverse_cdf(mass, uniform):
  """Draw a token with probability proportional to its mass. Returns the token and the row's total mass.

  The first random number picks a block, the second a token in it. Two short cumulative sums read the row once; one cumulative
  sum over the whole vocabulary costs several times as much.
  """
  B, V = mass.shape
  blocks = jnp.pad(mass, ((0, 0), (0, -V % BLOCK))).reshape(B, -1, BLOCK)
  block, total = _pick(jnp.sum(blocks, axis=-1), uniform[:, 0])
  inside, _ = _pick(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
  return jnp.minimum(block * BLOCK + inside, V - 1), total  # a valid token even if the logits are NaN


def _pick(mass, uniform):
  """Return the first index with mass whose cumulative mass exceeds uniform * total, and the total.

  The test `mass > 0` is needed: XLA sums long rows in a tree, so the cumulative sum can grow by rounding at an entry of 0.
  """
  cumulative = jnp.cumsum(mass, axis=-1)
  total = cumulative[:, -1]
  threshold = jnp.minimum(uniform, 1 - 1e-6) * total  # rounding must not raise the threshold to the total itself
  beyond = (cumulative > threshold[:, None]) & (mass > 0)
  index = jnp.arange(mass.shape[1], dtype=jnp.int32)
  return jnp.min(jnp.where(beyond, index, mass.shape[1] - 1), axis=-1), total
