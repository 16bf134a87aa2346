"""The support of a drawn token: the tokens that top-k, top-p and min-p keep, among which it was drawn.

A log-prob under filters depends on the support. The sampler records the support of each drawn token; every other policy then
renormalises over the same tokens. A record has W 32-bit words per token. The dtype shows which of two forms it has:

    int32     token ids, padded with -1; W = top_k, because top-p and min-p only remove ids
    uint32    a bit mask of the vocabulary: bit i of word w is token 32 * w + i; W = V / 32, rounded up

The form with fewer words is used. Without filters there is no record.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer, UInt32

from sprl.config import Sampling, SettingsError

MOST_WORDS = 256  # in a record: 1 KiB per token
BITS = 32  # in a word


class RecordFormat(NamedTuple):
  """The form of a record."""

  words: int  # W
  dtype: Any  # int32: token ids; uint32: a bit mask

  @property
  def bytes(self) -> int:
    """Bytes of the record of one token."""
    return self.words * jnp.dtype(self.dtype).itemsize


def filtered(sampling: Sampling, vocab: int) -> bool:
  """Return whether the settings can exclude a token of a vocabulary of this size."""
  return sampling.top_p < 1 or sampling.min_p > 0 or (sampling.top_k is not None and sampling.top_k < vocab)


def record_format(sampling: Sampling, vocab: int) -> RecordFormat | None:
  """Return the form in which supports are recorded; None without filters.

  Raises SettingsError if a record would need more than MOST_WORDS words.
  """
  if not filtered(sampling, vocab):
    return None
  mask = -(-vocab // BITS)
  found = RecordFormat(mask, jnp.uint32)
  if sampling.top_k is not None and sampling.top_k < mask:
    found = RecordFormat(sampling.top_k, jnp.int32)
  if found.words > MOST_WORDS:
    key = 'top_k' if sampling.top_k is not None else 'top_p' if sampling.top_p < 1 else 'min_p'
    wanted = f'at most {MOST_WORDS}' if key == 'top_k' else f'config.sampling.top_k of at most {MOST_WORDS} beside it'
    raise SettingsError(
      f'config.sampling.{key} = {getattr(sampling, key)!r}: expected {wanted}. Training and the ledger need a record of what '
      f'filters keep: at most {MOST_WORDS} ids, or a mask of a vocabulary of at most {MOST_WORDS * BITS} tokens; '
      f'this model has {vocab}'
    )
  return found


def pack_mask(kept: Bool[Array, '*N V']) -> UInt32[Array, '*N W']:
  """Return the bit masks of supports."""
  *N, V = kept.shape
  bits = jnp.pad(kept, [(0, 0)] * len(N) + [(0, -V % BITS)]).reshape(*N, -1, BITS)
  return jnp.sum(bits.astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def mask_of_ids(ids: Int[Array, '*N W'], vocab: int) -> Bool[Array, '*N V']:
  """Return a mask of the tokens that are among the ids. Negative ids are padding."""

  def one(ids):
    return jnp.zeros(vocab, bool).at[jnp.where(ids < 0, vocab, ids)].set(True, mode='drop')

  return jnp.vectorize(one, signature='(w)->(v)')(ids)


def support_mask(record: Integer[Array, '*N W'], vocab: int) -> Bool[Array, '*N V']:
  """Return a mask of the tokens of each recorded support."""
  if record.dtype == jnp.int32:
    return mask_of_ids(record, vocab)
  bits = (record[..., None] >> jnp.arange(BITS, dtype=jnp.uint32)) & 1
  return bits.reshape(*record.shape[:-1], -1)[..., :vocab] > 0
