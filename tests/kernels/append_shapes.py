"""Arguments of the kernel that appends a decode step's tokens, as shapes."""

import jax
import jax.numpy as jnp

from sprl.cache.scales import Scales
from sprl.kernels.append import CodeForm, Projected
from sprl.kernels.rope import Turns


def arguments(H, K, D, dtype):
  """Return (x, stored, slot, position, code), with biases, norms, evicted slots and a ring of queries.

  A cache of 'uint8' has FP8 codes, second codes and counts. A 'bfloat16' one goes with a product in parts.
  """
  B, S, shape = 64, 640, jax.ShapeDtypeStruct
  numbers = [shape((heads * D,), jnp.bfloat16) for heads in (H, K, K)]
  angles = shape((B, 1, 2, D // 2), jnp.float32)
  parts, of_parts = (1, jnp.bfloat16) if dtype == 'uint8' else (4, jnp.float32)
  scale, product = shape((D,), jnp.bfloat16), shape((parts, B, (H + 2 * K) * D), of_parts)
  x = Projected(product, (numbers[0], numbers[1], numbers[2]), (scale, scale), Turns(angles, angles), 1e-6, 1.0)
  stored = {name: shape((B, K, S, D), dtype) for name in ('k', 'v')}
  stored |= {'position': shape((B, K, S), jnp.int32), 'queries': shape((B, H, 8, D), jnp.bfloat16)}
  code = None
  if dtype == 'uint8':
    stored |= {'second': shape((B, K, S, 16), jnp.uint8)}
    stored |= {'saturated': shape((B, K), jnp.int32), 'saturated_queries': shape((B, H), jnp.int32)}
    scales = Scales(*[shape((2,), jnp.float32)] * 3)
    code = CodeForm(scales, shape((K, D), jnp.float32), shape((K, 16), jnp.int32), shape((), jnp.int32), queries=True, finer=16.0)
  ints = shape((B,), jnp.int32)
  return x, stored, ints, ints, code
