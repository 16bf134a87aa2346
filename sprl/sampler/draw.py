"""From logits to a token, to its log-prob under the distribution that it was drawn from, and to that distribution's support."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from sprl.config import Sampling
from sprl.kernels.support import RecordFormat, mask_of_ids, pack_mask, support_mask

BLOCK = 256  # vocabulary entries in a block of the two-level search


class Drawn(NamedTuple):
  """One token of each row."""

  token: Int[Array, ' B']
  logp: Float[Array, ' B']  # float32, after temperature and filters
  support: Integer[Array, 'B W'] | None  # the tokens that the filters kept (sprl/kernels/support.py), if recorded


class Candidates(NamedTuple):
  """The tokens that may be drawn: the top_k most likely, or all."""

  logits: Float[Array, 'B N']  # after temperature; -inf: excluded by a filter
  ids: Int[Array, 'B N'] | None  # their tokens; None: token n is candidate n


def draw(
  logits: Float[Array, 'B V'], uniform: Float[Array, 'B 2'], sampling: Sampling, record: RecordFormat | None = None
) -> Drawn:
  """Draw one token per row, with its log-prob and, in the form `record`, its support.

  `uniform` holds two random numbers per row in [0, 1). At temperature 0 the likeliest token is taken; its log-prob is 0, and it
  has no support.
  """
  if sampling.temperature == 0:
    return Drawn(jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.zeros(logits.shape[0]), None)
  found = candidates(logits, sampling)
  top = jnp.max(found.logits, axis=-1)
  mass = jnp.exp(found.logits - top[:, None])
  index, total = _inverse_cdf(mass, uniform)
  token = index if found.ids is None else _at(found.ids, index)
  support = None if record is None else support_record(found, logits.shape[1], record)
  return Drawn(token, _at(found.logits, index) - top - jnp.log(total), support)


def candidates(logits: Float[Array, 'B V'], sampling: Sampling) -> Candidates:
  """Divide logits by the temperature and exclude tokens by top-k, top-p and min-p, in this order.

  Exactly top_k tokens pass top-k: of tokens that tie with the k-th largest logit, those with the smallest ids. Tokens that tie
  with the last token of top-p stay.
  """
  logits, ids = logits.astype(jnp.float32) / sampling.temperature, None
  if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
    logits, ids = jax.lax.top_k(logits, sampling.top_k)
  if sampling.top_p < 1:
    ordered = logits if ids is not None else -jnp.sort(-logits, axis=-1)
    p = jax.nn.softmax(ordered)
    kept = jnp.cumsum(p, axis=-1) - p < sampling.top_p  # the mass before a token decides, so the first always stays
    lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits < lowest, -jnp.inf, logits)
  if sampling.min_p > 0:
    top = jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where(logits < top + jnp.log(sampling.min_p), -jnp.inf, logits)
  return Candidates(logits, ids)


def support_record(found: Candidates, vocab: int, form: RecordFormat) -> Integer[Array, 'B W']:
  """Return the candidates that no filter excludes, as a record."""
  kept = found.logits > -jnp.inf
  if found.ids is None:
    return pack_mask(kept)
  ids = jnp.where(kept, found.ids, -1)
  return ids if form.dtype == jnp.int32 else pack_mask(mask_of_ids(ids, vocab))


def logp_of(
  logits: Float[Array, 'B V'], token: Int[Array, ' B'], sampling: Sampling, support: Integer[Array, 'B W'] | None = None
) -> Float[Array, ' B']:
  """Return the log-probs that `draw` reports when it draws `token` from these supports; None: from the whole vocabulary.

  A token outside its support has -inf.
  """
  if sampling.temperature == 0:
    return jnp.zeros(logits.shape[0])
  logits = logits.astype(jnp.float32) / sampling.temperature
  if support is not None:
    logits = jnp.where(support_mask(support, logits.shape[1]), logits, -jnp.inf)
  return _at(jax.nn.log_softmax(logits), token)


def _at(x, index):
  return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


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
