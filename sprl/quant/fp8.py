"""Casts to and from e4m3 (float8_e4m3fn): 1 sign, 4 exponent and 3 mantissa bits, +-448, no infinity.

No other module depends on the format (docs/methods/fp8.md, the number format).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Float32, UInt8

from sprl.kernels.e4m3 import numbers
from sprl.kernels.fp8_softmax import rounded
from sprl.kernels.platform import on_accelerator

MAX = 448.0
FLOOR = 1e-10  # least amax of a block: without it a block of zeros would give 0 / 0 = nan


def cast(x: Float[Array, '*S'], scale: Float[Array, '...'] | float) -> Float8e4m3fn[Array, '*S']:
  """Return the e4m3 nearest to x / scale, clamped to +-448; nan stays nan (docs/methods/fp8.md, eq. 1)."""
  return _encode(jnp.clip(x.astype(jnp.float32) / scale, -MAX, MAX))


def decast(codes: Float8e4m3fn[Array, '*S'], scale: Float[Array, '...'] | float, dtype=jnp.float32) -> Float[Array, '*S']:
  """Return codes * scale in `dtype`, multiplied in float32 (docs/methods/fp8.md, eq. 1)."""
  return (numbers(codes) * scale).astype(dtype)


def fake(x: Float[Array, '*S'], scale: Float[Array, '...'] | float) -> Float[Array, '*S']:
  """Return x after a round trip through e4m3, in its own dtype: `decast` of `cast`. On CPUs it is faster without the codes."""
  if on_accelerator():
    return decast(cast(x, scale), scale, x.dtype)
  scaled = jnp.clip(x.astype(jnp.float32) / scale, -MAX, MAX)
  return (jnp.copysign(rounded(jnp.abs(scaled)), scaled) * scale).astype(x.dtype)


def to_bytes(codes: Float8e4m3fn[Array, '*S']) -> UInt8[Array, '*S']:
  """Return the codes as bytes, for storing and moving them.

  XLA's CPU backend would widen a whole FP8 array to float16 and narrow it again for every element that is written.
  """
  return jax.lax.bitcast_convert_type(codes, jnp.uint8)


def from_bytes(held: UInt8[Array, '*S']) -> Float8e4m3fn[Array, '*S']:
  """Return the codes that `to_bytes` stored as bytes."""
  return jax.lax.bitcast_convert_type(held, jnp.float8_e4m3fn)


def saturated(x: Float[Array, '*S'], scale: Float[Array, '...'] | float) -> Bool[Array, '*S']:
  """Return where `cast` clamps."""
  return jnp.abs(x.astype(jnp.float32) / scale) > MAX


def pow2(scale: Float32[Array, '*S']) -> Float32[Array, '*S']:
  """Return 2^ceil(log2 scale), clamped to 2^-126 and 2^127 (docs/methods/fp8.md, eq. 5). Exact for powers of two."""
  bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
  exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0)
  return jax.lax.bitcast_convert_type(jnp.clip(exponent, 1, 254) << 23, jnp.float32)


def _encode(x: Float32[Array, '*S']) -> Float8e4m3fn[Array, '*S']:
  """Return x.astype(float8_e4m3fn), rounded to nearest even, for |x| <= 448 or nan.

  Equal to XLA's own cast bit for bit, in a half to a third of its time on CPUs. For |x| in [2^e, 2^(e+1)) the spacing of float32
  at 2^(e+20) is the spacing of e4m3 at x, so adding 2^(e+20) rounds x.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  exponent = jnp.maximum(bits & 0x7F800000, 121 << 23)  # below 2^-6, the smallest normal, the spacing is constant
  summed = jnp.abs(x) + jax.lax.bitcast_convert_type(exponent + (20 << 23), jnp.float32)
  steps = jax.lax.bitcast_convert_type(summed, jnp.int32) & 31  # |x| in spacings; at 16 the sum below carries into the exponent
  code = (((exponent >> 23) - 121) << 3) + steps | (bits >> 24) & 128
  return jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), 127, code).astype(jnp.uint8), jnp.float8_e4m3fn)
