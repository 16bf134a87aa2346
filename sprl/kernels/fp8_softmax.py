"""Softmax weights rounded to e4m3 for their product with FP8 values (docs/methods/fp8.md, FP8 attention probabilities).

    weights = exp2(scores - origin(max(scores)))       # scores in base 2; the largest weight is about 2^8
    out     = rounded(weights) @ values / sum(weights)

The sum is of the unrounded weights. FlashAttention-3 rounds the same way, but uses the maximum itself as the origin. Here the
origin is a whole number. A kernel that finds a larger score in a later block then rescales its sums by a power of two, which
commutes with rounding. So the split into blocks changes only subnormal rounded weights, which are below about 2^-14 of the
largest.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

LOG2E = math.log2(math.e)
ROOM = 8  # the largest weight is between 2^7.5 and 2^8.5 = 362, and e4m3 ends at 448


def origin(largest: Float[Array, '*S']) -> Float[Array, '*S']:
  """Return the base-2 score whose weight is 1, from the largest base-2 score of a row. It is a whole number."""
  return lax.round(largest, lax.RoundingMethod.TO_NEAREST_EVEN) - ROOM


def rounded(weights: Float32[Array, '*S']) -> Float32[Array, '*S']:
  """Return weights from 0 to 448 rounded to the nearest e4m3, ties to even.

  For x in [2^e, 2^(e+1)) the spacing of float32 at 2^(e+20) is the spacing of e4m3 at x, so adding 2^(e+20) rounds x. This is
  plain arithmetic, not a cast: XLA may remove a cast to e4m3 and back, and a kernel would need a register layout for e4m3.
  """
  bits = lax.bitcast_convert_type(weights, jnp.int32)
  exponent = jnp.maximum(bits & 0x7F800000, 121 << 23)  # below 2^-6, the smallest normal, the spacing is constant
  shift = lax.bitcast_convert_type(exponent + (20 << 23), jnp.float32)
  return (weights + shift) - shift
