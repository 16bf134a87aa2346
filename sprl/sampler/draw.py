"""From logits to a token and the log-prob of the distribution that it was really drawn from."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sprl.settings import Sampling

BLOCK = 256  # vocabulary entries a block of the two-level search


def draw(
  logits: Float[Array, 'B V'], uniform: Float[Array, 'B 2'], sampling: Sampling
) -> tuple[Int[Array, ' B'], Float[Array, ' B']]:
  """One token a row and its log-prob under the processed distribution (after temperature and filters), float32.

  Greedy at temperature 0: that distribution has all its mass on one token, whose log-prob is 0.
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
  """What `draw` would report, had it drawn these tokens."""
  if sampling.temperature == 0:
    return jnp.zeros(logits.shape[0])
  logp = jax.nn.log_softmax(process(logits, sampling))
  return jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0]


def process(logits: Float[Array, 'B V'], sampling: Sampling) -> Float[Array, 'B V']:
  """Logits over the temperature, then -inf on what top-k, top-p and min-p leave out, in that order; ties at top-k stay."""
  logits = logits.astype(jnp.float32) / sampling.temperature
  if 0 < sampling.top_k < logits.shape[-1]:
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
  """The two random numbers of the token at `position` of sequence `uid`: the same whatever row, batch or chunk it is drawn in,
  and the same for a sequence that was aborted and goes on. Another attempt at it has others."""

  def one(uid, attempt, position):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(seed, uid), attempt), position)
    return jax.random.uniform(key, (2,))

  return jax.vmap(one)(uid, attempt, position)


def _inverse_cdf(mass, uniform):
  """A token with probability proportional to its mass, and the total mass: a block by one number, a token in it by the other.

  Two short cumulative sums read the row once; one over the whole vocabulary costs several times as much.
  """
  B, V = mass.shape
  blocks = jnp.pad(mass, ((0, 0), (0, -V % BLOCK))).reshape(B, -1, BLOCK)
  block, total = _pick(jnp.sum(blocks, axis=-1), uniform[:, 0])
  inside, _ = _pick(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
  return jnp.minimum(block * BLOCK + inside, V - 1), total  # of logits that are not numbers, still a token


def _pick(mass, uniform):
  """The first index with mass whose cumulative mass exceeds uniform * total.

  Mass is asked for by itself: XLA adds long rows up in a tree, where a cumulative sum may grow by rounding at an entry of 0.
  """
  cumulative = jnp.cumsum(mass, axis=-1)
  total = cumulative[:, -1]
  threshold = jnp.minimum(uniform, 1 - 1e-6) * total  # rounding must not carry the threshold up to the total itself
  beyond = (cumulative > threshold[:, None]) & (mass > 0)
  index = jnp.arange(mass.shape[1], dtype=jnp.int32)
  return jnp.min(jnp.where(beyond, index, mass.shape[1] - 1), axis=-1), total
