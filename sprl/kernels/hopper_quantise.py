"""Normalise activations and quantise them to FP8 on NVIDIA Hopper, in Pallas Mosaic GPU.

A group is 128 features of a token. The 32 lanes of a warp hold four features each, so the largest value of a group is found
within a warp. A program has four warps and computes:

    normalised         the norm of a sum, for one token [C, 128]; the warps share its C groups and add up their sums of squares
    normalised_codes   the same in FP8
    codes, gated_codes one group of eight tokens [8, 128] in FP8

The codes have the layout that the matrix product reads, and the scales are transposed. Therefore no other program runs between
the two kernels.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Float32

from sprl.kernels.lowering import lowered_once

GROUP = 128  # features that share a scale
WARPS = 4
TOKENS = 8  # tokens per program of `codes` and `gated_codes`
WIDEST = 64  # most groups of a token in `normalised_codes`: 8,192 features, 64 registers of a thread
FP8 = jnp.float8_e4m3fn
MAX, FLOOR = 448.0, 1e-10  # largest e4m3 number; lower bound of a group's amax (sprl/quant/fp8.py)

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
Shape = jax.ShapeDtypeStruct


def obstacle(x: Array | Shape, group: int, pow2: bool, norm: bool = False) -> str | None:
  """Return why the kernels cannot quantise tokens [T, M], or None if they can.

  `norm` says whether a norm comes first.
  """
  T, M = x.shape
  if x.dtype != jnp.bfloat16:
    return f'activations are {x.dtype}, not bfloat16'
  if group != GROUP or pow2:
    return f'a scale is shared by {group} features{" and is a power of two" * pow2}: expected {GROUP} features and any number'
  if M % GROUP or T % TOKENS:
    return f'activations are [{T}, {M}]: expected multiples of {TOKENS} and {GROUP}'
  if norm and (M > WIDEST * GROUP or M % (2 * GROUP)):
    return f'tokens are {M} wide: expected multiples of {2 * GROUP} up to {WIDEST * GROUP}'
  return None


@lowered_once('eps', 'interpret')
def normalised(
  x: BFloat16[Array, 'T M'], added: Float[Array, 'P T M'], scale: Float[Array, ' M'], eps: float, interpret: Any = None
) -> tuple[BFloat16[Array, 'T M'], BFloat16[Array, 'T M']]:
  """Return y / rms(y) * scale, and y: x + the sum of the parts `added`. This sum and y are rounded to bfloat16.

  `interpret=plgpu.InterpretGPUParams()` runs the kernel on a CPU.
  """

  def hopper_normalised(x_ref, added_ref, scale_ref, normed_ref, sum_ref):  # the program's name in profiles
    token = lax.axis_index('token')
    normed_ref[token], sum_ref[token] = _normed(token, x_ref, added_ref, scale_ref, eps)

  normed, total = _by_token(hopper_normalised, x, [added], scale, [Shape(_grouped(x).shape, x.dtype)] * 2, interpret)
  return normed.reshape(x.shape), total.reshape(x.shape)


@lowered_once('eps', 'interpret')
def normalised_codes(
  x: BFloat16[Array, 'T M'],
  scale: Float[Array, ' M'],
  eps: float,
  added: BFloat16[Array, 'T M'] | None = None,
  interpret: Any = None,
) -> tuple[Float8e4m3fn[Array, 'T M'], Float32[Array, 'T C'], BFloat16[Array, 'T M']]:
  """Return codes and scales of y / rms(y) * scale, and y: x, or x + added, rounded to bfloat16.

  The product is rounded to bfloat16 before it is quantised. `interpret=plgpu.InterpretGPUParams()` runs the kernel on a CPU.
  """
  T, C, _ = shape = _grouped(x).shape
  parts = [] if added is None else [added[None]]

  def hopper_normalised_codes(x_ref, *refs):  # the program's name in profiles
    *added_refs, scale_ref, codes_ref, scales_ref = refs[: len(parts) + 3]
    token = lax.axis_index('token')
    normed, total = _normed(token, x_ref, added_refs[0] if added_refs else None, scale_ref, eps)
    for sum_ref in refs[len(parts) + 3 :]:
      sum_ref[token] = total
    codes_ref[token], scales = _quantised(normed, dealt(C, GROUP))
    store(scales_ref.at[:, token], scales)

  outs = [Shape(shape, FP8), Shape((C, T), jnp.float32), *[Shape(shape, x.dtype)] * len(parts)]
  codes, scales, *total = _by_token(hopper_normalised_codes, x, parts, scale, outs, interpret)
  return codes.reshape(x.shape), scales.T, total[0].reshape(x.shape) if total else x


def _grouped(x: Array) -> Array:
  """Return x with groups of features: [..., M] -> [..., C, GROUP]."""
  return x.reshape(*x.shape[:-1], -1, GROUP)


def _by_token(body, x, added, scale, outs, interpret):
  """Run a program for each token."""
  kernel = plgpu.kernel(
    body, out_type=outs, grid=(len(x),), grid_names=('token',), compiler_params=LANE, interpret=interpret
  )  # fmt: skip
  return kernel(_grouped(x), *map(_grouped, added), _grouped(scale))


def _normed(token, x_ref, added_ref, scale_ref, eps):
  """Return y / rms(y) * scale [C, GROUP] of a token in bfloat16, and y: x plus the sum of the parts, if there are any."""
  C = x_ref.shape[1]
  layout = dealt(C, GROUP)

  def load(ref):
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

  total, wide = None, load(x_ref.at[token])
  if added_ref is not None:
    first, *more = (load(added_ref.at[part, token]) for part in range(added_ref.shape[0]))
    added = sum(more, first).astype(jnp.bfloat16)
    total = (wide + added.astype(jnp.float32)).astype(jnp.bfloat16)
    wide = total.astype(jnp.float32)
  mean = jnp.sum(jnp.sum(wide * wide, axis=1)) / (C * GROUP)
  return (wide * lax.rsqrt(mean + eps) * load(scale_ref)).astype(jnp.bfloat16), total


@lowered_once('interpret')
def codes(x: BFloat16[Array, 'T M'], interpret: Any = None) -> tuple[Float8e4m3fn[Array, 'T M'], Float32[Array, 'T C']]:
  """Return codes and scales of x. `interpret=plgpu.InterpretGPUParams()` runs the kernel on a CPU."""
  return _by_group(x, x.shape[1], lambda load: load(0), 'hopper_codes', interpret)


@lowered_once('activate', 'interpret')
def gated_codes(
  x: BFloat16[Array, 'T N'], activate: Callable[[Array], Array], interpret: Any = None
) -> tuple[Float8e4m3fn[Array, 'T M'], Float32[Array, 'T C']]:
  """Return codes and scales of activate(gate) * up, where x is gate [T, M] beside up [T, M].

  The product is rounded to bfloat16 before it is quantised. `interpret=plgpu.InterpretGPUParams()` runs the kernel on a CPU.
  """
  M = x.shape[1] // 2

  def gated(load):
    gate, up = load(0).astype(jnp.float32), load(M // GROUP).astype(jnp.float32)
    return (activate(gate) * up).astype(jnp.bfloat16)

  return _by_group(x, M, gated, 'hopper_gated_codes', interpret)


def _by_group(x, M, values, name, interpret):
  """Quantise `values(load)` [TOKENS, GROUP] for each group, TOKENS tokens at a time.

  `load(c)` reads the group of x that lies c groups after the program's group.
  """
  T, C, layout = len(x), M // GROUP, dealt(TOKENS, GROUP)

  def body(x_ref, codes_ref, scales_ref):
    tokens, group = pl.ds(lax.axis_index('tokens') * TOKENS, TOKENS), lax.axis_index('group')

    def load(further):
      return plgpu.load(x_ref.at[tokens, group + further], layout=layout, optimized=False)

    codes, scales = _quantised(values(load), layout)
    codes_ref[tokens, group] = codes
    store(scales_ref.at[group, tokens], scales)

  body.__name__ = name  # the program's name in profiles
  codes, scales = plgpu.kernel(
    body,
    out_type=[Shape((T, C, GROUP), jnp.float8_e4m3fn), Shape((C, T), jnp.float32)],
    grid=(C, T // TOKENS),  # the last axis is CUDA's x, the only one that may have more than 65,535 programs
    grid_names=('group', 'tokens'),
    compiler_params=LANE,
    interpret=interpret,
  )(x.reshape(T, -1, GROUP))
  return codes.reshape(T, M), scales.T


def _quantised(x: BFloat16[Array, 'R 128'], layout):
  """Return the codes and scales of groups, one a row (docs/methods/fp8.md, eq. 3)."""
  x = x.astype(jnp.float32)
  scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1), FLOOR) / MAX
  scaled = x / plgpu.layout_cast(lax.broadcast_in_dim(scale, x.shape, [0]), layout)
  return jnp.clip(scaled, -MAX, MAX).astype(jnp.float8_e4m3fn), scale


def store(ref: Any, x: Array) -> None:
  """Store a few numbers from any register layout. Plain stores of jax 0.11 take any layout; those of 0.12 do not."""
  if x.size == 1:  # Mosaic stores one number from a scalar only
    ref[(0,) * x.ndim] = jnp.sum(x)
  elif hasattr(plgpu, 'store'):
    plgpu.store(ref, x, optimized=False)
  else:
    ref[...] = x


def dealt(rows: int, width: int) -> Any:
  """Return the register layout of [rows, width]: the lanes of a warp hold a row, and the rows are dealt to the warps.

  If they are not a multiple of four, some warps hold copies.
  """
  warps = math.gcd(rows, WARPS)
  dimensions = () if warps == 1 else (-3,)
  copies = () if warps == WARPS else (plgpu.Replicated(WARPS // warps),)
  return plgpu.Layout.TILED(plgpu.Tiling(((warps, width), (width // 32,))), (*dimensions, *copies), (-2,), -1)
