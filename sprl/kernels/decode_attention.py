"""Attention of one new token per row against the slots of its cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def decode_attention(
  q: Float[Array, 'B H D'], k: Float[Array, 'B K S D'], v: Float[Array, 'B K S D'], length: Int[Array, ' B']
) -> Float[Array, 'B H D']:
  """Softmax attention over slots 0..length-1 of each row; the G = H/K queries of a group share one read of its slots."""
  B, H, D = q.shape
  K, S = k.shape[1:3]
  scores = jnp.einsum('bkgd,bksd->bkgs', q.reshape(B, K, H // K, D), k, preferred_element_type=jnp.float32) * D**-0.5
  scores = jnp.where(jnp.arange(S) < length[:, None, None, None], scores, -jnp.inf)
  weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
  weights = (weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(v.dtype)
  return jnp.einsum('bkgs,bksd->bkgd', weights, v).reshape(B, H, D)
