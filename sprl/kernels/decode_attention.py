"""Attention of one new token per row over the slots of its cache: the reference, and the choice of kernel."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sprl.config import Kernels
from sprl.kernels.cost import Cost
from sprl.kernels.e4m3 import numbers
from sprl.kernels.fp8_softmax import LOG2E, origin, rounded
from sprl.kernels.platform import chosen


class Attended(NamedTuple):
  """The result of decode attention."""

  out: Float[Array, 'B H D']
  share: Float[Array, 'B K S'] | None  # attention probability of each slot, averaged over the group; 0 on empty slots
  lse: Float[Array, 'B H']  # natural log of the sum of exp(score); -inf for a row of length 0


def decode_attention(
  q: Float[Array, 'B H D'],
  k: Float[Array, 'B K S D'],
  v: Float[Array, 'B K S D'],
  length: Int[Array, ' B'],
  scales: tuple[Float[Array, ''], Float[Array, '']] | None = None,
  second: tuple[Float[Array, 'B H W'], Float[Array, 'B K S W']] | None = None,
  share: bool = True,
  fp8_softmax: bool = False,
  kernels: Kernels = 'auto',
) -> Attended:
  """Softmax attention over slots 0..length-1 of each row. The G = H/K queries of a group share one read of its slots.

  Keys and values may be FP8 codes, which are exact in q's dtype; `scales` (of k, of v) multiply the scores and the output.
  `second` has W further coordinates of the queries and the keys: the second codes of keys. Their products are added to q . k
  before the scale. A row of length 0 gives zeros.
  With `share`, the result includes the attention probability of each slot. `fp8_softmax` rounds the weights of the product with
  the values to e4m3 (sprl/kernels/fp8_softmax.py); `share` and `lse` are of the unrounded weights.
  """
  if not chosen('decode attention', kernels, lambda: _obstacle(q, k, v, second, share)):
    return reference(q, k, v, length, scales, second, share, fp8_softmax)
  from sprl.kernels import hopper_decode_attention  # imported here: Mosaic takes a second to import

  one = jnp.ones((), jnp.float32)
  scales = scales or (one, one)
  out, lse, shares = hopper_decode_attention.decode_attention(q, k, v, length, scales, second, share, fp8_softmax)
  return Attended(out, shares, lse)


def reference(
  q: Float[Array, 'B H D'],
  k: Float[Array, 'B K S D'],
  v: Float[Array, 'B K S D'],
  length: Int[Array, ' B'],
  scales: tuple[Float[Array, ''], Float[Array, '']] | None = None,
  second: tuple[Float[Array, 'B H W'], Float[Array, 'B K S W']] | None = None,
  share: bool = True,
  fp8_softmax: bool = False,
) -> Attended:
  """Compute `decode_attention` in jnp."""
  B, H, D = q.shape
  K, S = k.shape[1:3]
  k_scale, v_scale = (1.0, None) if scales is None else scales
  grouped, v = q.reshape(B, K, H // K, D), numbers(v, q.dtype)
  scores = jnp.einsum('bkgd,bksd->bkgs', grouped, numbers(k, q.dtype), preferred_element_type=jnp.float32)
  if second is not None:
    further, codes = second[0].reshape(B, K, H // K, -1), numbers(second[1], q.dtype)
    scores = scores + jnp.einsum('bkgw,bksw->bkgs', further, codes, preferred_element_type=jnp.float32)
  scores = scores * (k_scale * D**-0.5)
  scores = jnp.where(jnp.arange(S) < length[:, None, None, None], scores, -jnp.inf)
  top = jnp.max(scores, axis=-1, keepdims=True)
  if fp8_softmax:
    top = origin(top * LOG2E) / LOG2E
  top = jnp.maximum(top, jnp.finfo(jnp.float32).min)  # finite for a row of length 0 too
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)  # at least 1, from the largest score; 0 for a row of length 0
  probabilities = weights / jnp.maximum(total, 1)
  if fp8_softmax:
    sums = jnp.einsum('bkgs,bksd->bkgd', rounded(weights).astype(q.dtype), v, preferred_element_type=jnp.float32)
    out = sums / jnp.maximum(total, 1)
  else:
    out = jnp.einsum('bkgs,bksd->bkgd', probabilities.astype(q.dtype), v)
  out = (out if v_scale is None else out * v_scale).astype(q.dtype)
  lse = (top + jnp.log(total)).reshape(B, H)
  return Attended(out.reshape(B, H, D), jnp.mean(probabilities, axis=2) if share else None, lse)


def cost(B: int, H: int, K: int, S: int, D: int, dtype: Any, share: bool = False, second: int = 0) -> Cost:
  """Return the cost of rows with all S slots occupied, in a cache of `dtype`; queries and outputs are bfloat16.

  `second` is the number W of second codes of a key.
  """
  cache = B * K * S * (2 * D + second) * jnp.dtype(dtype).itemsize
  beside = 2 * B * H * (2 * D + second) + 4 * B * H + (4 * B * K * S if share else 0)
  return Cost(cache + beside, 2 * B * H * S * (2 * D + second))


def _obstacle(q, k, v, second, share) -> str | None:
  if k.dtype != v.dtype:
    return f'keys are {k.dtype} and values {v.dtype}'
  from sprl.kernels import hopper_decode_attention

  return hopper_decode_attention.obstacle(q, k, second, share)
