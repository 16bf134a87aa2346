"""Numbers of e4m3 codes. XLA's CPU backend has a conversion too, which takes several times as long."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sprl.kernels.platform import on_accelerator


def numbers(codes: Float[Array, '*S'], dtype=jnp.float32) -> Float[Array, '*S']:
  """Return the codes' numbers in `dtype`; an array that is not e4m3 is only cast.

  The seven bits below the sign, as the upper exponent and mantissa bits of a float16, are the number times 2^-8: the exponents
  of float16 are 8 higher. The smallest numbers are denormal in both formats. CPUs widen float16 in one instruction.
  """
  if codes.dtype != jnp.float8_e4m3fn or on_accelerator():
    return codes.astype(dtype)
  code = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16)
  half = jax.lax.bitcast_convert_type((code << 7) & ~0x4000, jnp.float16)  # the shift leaves the sign in the two highest bits
  nan = code & 127 == 127
  return jnp.where(nan, jnp.nan, half.astype(jnp.float32) * 256).astype(dtype)
