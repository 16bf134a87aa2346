"""Attention of one new token per row against the slots of its cache."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Attended(NamedTuple):
  """What a query found."""

  out: Float[Array, 'B H D']
  share: Float[Array, 'B K S']  # each slot's probability, averaged over the group; 0 on empty slots


def decode_attention(
  q: Float[Array, 'B H D'],
  k: Float[Array, 'B K S D'],
  v: Float[Array, 'B K S D'],
  length: Int[Array, ' B'],
  scales: tuple[Float[Array, ''], Float[Array, '']] | None = None,
  bias: Float[Array, 'B K G S'] | None = None,
) -> Attended:
  """Softmax attention over slots 0..length-1 of each row; the G = H/K queries of a group share one read of its slots.

  Keys and values may be FP8 codes: exact in q's dtype, and multiplied by `scales` (of k, of v) only in the scores and the output.
  `bias` is added to the unscaled scores q . k.
  """
  B, H, D = q.shape
  K, S = k.shape[1:3]
  k_scale, v_scale = (1.0, None) if scales is None else scales
  grouped = q.reshape(B, K, H // K, D)
  scores = jnp.einsum('bkgd,bksd->bkgs', grouped, k.astype(q.dtype), preferred_element_type=jnp.float32)
  scores = scores * (k_scale * D**-0.5)
  if bias is not None:
    scores = scores + bias * D**-0.5
  scores = jnp.where(jnp.arange(S) < length[:, None, None, None], scores, -jnp.inf)
  weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
  weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  out = jnp.einsum('bkgs,bksd->bkgd', weights.astype(q.dtype), v.astype(q.dtype))
  out = out if v_scale is None else (out * v_scale).astype(q.dtype)
  return Attended(out.reshape(B, H, D), jnp.mean(weights, axis=2))
