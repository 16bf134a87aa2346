"""Rounding to bfloat16 that a compiler keeps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def to_bfloat16(x: Float[Array, '*shape']) -> Float32[Array, '*shape']:
  """Return x rounded to bfloat16, in float32.

  XLA for GPUs leaves out a cast to bfloat16 and back, because it may compute with more precision than a program asks for.
  """
  return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
