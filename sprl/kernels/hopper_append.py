"""Append a decode step's tokens to the cache of a layer on NVIDIA Hopper, in Pallas Mosaic GPU.

One launch takes the joined product of q, k and v to rotated queries, and to keys and values in their slots of the cache:

    1. sum of the product's parts, bias, norm of each head, rotation; each is rounded to bfloat16, as the network rounds it
    2. queries: rounded to FP8 if the cache asks for it, and stored in the ring of newest queries
    3. keys: centred, cast to FP8, and the second codes of some coordinates (sprl/cache/key_bias.py); values: cast to FP8
    4. counts of the numbers that FP8 clamps

A row has two programs: one for its queries, one for its keys and values. The two halves of a head are separate arrays with the
same layout: the coordinates i and i + D/2, which are rotated together, are in one thread. The 32 lanes of a warp hold a half, so
sums over a head stay within a warp.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int

from sprl.kernels.append import CodeForm, Projected
from sprl.kernels.hopper_quantise import LANE, MAX, Shape, dealt, store
from sprl.kernels.lowering import lowered_once

WIDTHS = (128, 256)  # of a head: a half fills the lanes of a warp with pairs, which FP8 casts need
MOST = 64  # most heads of a row: 64 registers of a thread hold the two halves of the queries
FP8 = jnp.float8_e4m3fn


def obstacle(product: Shape, k: Array | Shape) -> str | None:
  """Return why the kernel cannot append the product [B, N] to keys [B, K, S, D], or None if it can."""
  D = k.shape[-1]
  if product.dtype != jnp.bfloat16:
    return f'activations are {product.dtype}, not bfloat16'
  if k.dtype not in (jnp.bfloat16, jnp.uint8):
    return f'the cache is {k.dtype}, neither bfloat16 nor bytes of float8_e4m3fn'
  if D not in WIDTHS:
    return f'heads are {D} wide: expected {" or ".join(map(str, WIDTHS))}'
  if product.shape[-1] > MOST * D:
    return f'a token has {product.shape[-1] // D} heads: expected at most {MOST}'
  return None


@lowered_once('interpret')
def append(
  x: Projected,
  stored: Mapping[str, Array],
  slot: Int[Array, ' B'],
  position: Int[Array, ' B'],
  code: CodeForm | None,
  interpret: Any = None,
) -> tuple[BFloat16[Array, 'B H D'], dict[str, Array]]:
  """Return the queries, and `stored` with the tokens of rows whose slot is less than S.

  `sprl.kernels.append.append` describes the arguments. `interpret=plgpu.InterpretGPUParams()` runs the kernel on a CPU.
  """
  B, K, S, D = stored['k'].shape
  H, P = x.product.shape[-1] // D - 2 * K, D // 2
  halves = lambda a: a.reshape(*a.shape[:-1], -1, 2, P)  # noqa: E731
  refs = {name: jax.new_ref(a.reshape(*a.shape[:-1], 2, P) if name in ('k', 'v', 'queries') else a) for name, a in stored.items()}
  given = {
    'x': halves(x.product),
    'cos': x.turns.cos.reshape(B, 2, P),
    'sin': x.turns.sin.reshape(B, 2, P),
    'bias': None if x.bias is None else tuple(map(halves, x.bias)),
    'norm': None if x.norm is None else tuple(w.reshape(2, P) for w in x.norm),
    'slot': slot,
    'position': position,
    'scales': None if code is None else code.scales,
    'layer': None if code is None else jnp.reshape(code.layer, 1),
    'mean': None if code is None or code.mean is None else code.mean.reshape(K, 2, P),
    'twice': None if code is None else code.twice,
  }

  def hopper_append(given, stores, q_ref):  # the program's name in profiles
    row = lax.axis_index('row')
    _token(x, code, row, (H, K, S), given, stores, q_ref.at[row])

  q = plgpu.kernel(
    hopper_append,
    out_type=Shape((B, H, 2, P), jnp.bfloat16),
    grid=(B, 2),
    grid_names=('row', 'part'),
    compiler_params=LANE,
    interpret=interpret,
  )(given, refs)
  return q.reshape(B, H, D), {name: jax.freeze(ref).reshape(stored[name].shape) for name, ref in refs.items()}


def _token(x: Projected, code: CodeForm | None, row, sizes, given, stores, q_ref):
  (H, K, S), P = sizes, q_ref.shape[-1]
  slot, position = given['slot'][row], given['position'][row]
  cos, sin = (given[name].at[row] for name in ('cos', 'sin'))

  def numbers(which, first, layout):
    """Return the two halves of heads from `first` on, with their bias: float32 [heads, P], rounded to bfloat16."""
    product, heads = given['x'], layout_heads[which]

    def added_up(half):
      one, *more = (_load(product.at[part, row, pl.ds(first, heads), half], layout) for part in range(product.shape[0]))
      return _rounded(sum(more, one)) if more else one

    found = [added_up(half) for half in (0, 1)]
    if given['bias'] is not None:
      bias = [_rounded(_load(given['bias'][which].at[:, half], layout)) for half in (0, 1)]
      found = [_rounded(a + b) for a, b in zip(found, bias, strict=True)]
    return found

  def turned(which, first, layout, scale=1.0):
    """Return the two halves of heads after norm and rotation."""
    found = numbers(which, first, layout)
    if given['norm'] is not None:
      mean = sum(jnp.sum(a * a, axis=1) for a in found) / (2 * P)
      factor = _spread(lax.rsqrt(mean + x.eps), 0, found[0], layout)
      weight = [_spread(_load(given['norm'][which].at[half], layout.reduce(0)), 1, found[0], layout) for half in (0, 1)]
      found = [_rounded(a * factor * w) for a, w in zip(found, weight, strict=True)]
    c, s = ([_spread(_load(ref.at[half], layout.reduce(0)), 1, found[0], layout) for half in (0, 1)] for ref in (cos, sin))
    found = [found[half] * c[half] + found[1 - half] * s[half] for half in (0, 1)]
    return [_rounded(a if scale == 1 else a * scale) for a in found]

  layout_heads = (H, K, K)

  def queries():
    layout = dealt(H, P)
    q = turned(0, 0, layout, x.query_scale)
    if code is not None and code.queries:
      scale = given['scales'].q[given['layer'][0]]

      @pl.when(slot < S)
      def _():
        _count(stores['saturated_queries'].at[row], [(q, scale)], layout)

      q = [_rounded(_cast(a, scale).astype(jnp.float32) * scale) for a in q]
    for half in (0, 1):
      store(q_ref.at[:, half], q[half].astype(jnp.bfloat16))
    if 'queries' in stores:
      ring = stores['queries']

      @pl.when(slot < S)
      def _():
        place = lax.rem(position, jnp.int32(ring.shape[2]))
        for half in (0, 1):
          store(ring.at[row, :, place, half], q[half].astype(jnp.bfloat16))

  def pair():
    layout = dealt(K, P)
    k, v = turned(1, H, layout), numbers(2, H + K, layout)
    if 'position' in stores:
      store(stores['position'].at[row, :, slot], plgpu.layout_cast(lax.broadcast(position, (K,)), layout.reduce(1)))
    if code is None:
      for name, found in (('k', k), ('v', v)):
        for half in (0, 1):
          store(stores[name].at[row, :, slot, half], found[half].astype(jnp.bfloat16))
      return
    layer = given['layer'][0]
    scales = given['scales'].k[layer], given['scales'].v[layer]
    if given['mean'] is not None:
      k = [a - _load(given['mean'].at[:, half], layout) for half, a in enumerate(k)]
    _count(stores['saturated'].at[row], [(k, scales[0]), (v, scales[1])], layout)
    for name, found, scale in zip(('k', 'v'), (k, v), scales, strict=True):
      codes = [_cast(a, scale) for a in found]
      for half in (0, 1):
        store(stores[name].at[row, :, slot, half], lax.bitcast_convert_type(codes[half], jnp.uint8))
      if name == 'k' and given['twice'] is not None:
        lost = [a / scale - b.astype(jnp.float32) for a, b in zip(k, codes, strict=True)]
        _second(lost, given['twice'], stores['second'].at[row, :, slot], code.finer, layout)

  lax.cond(lax.axis_index('part') == 0, queries, lambda: pl.when(slot < S)(pair))


def _second(lost, twice_ref, second_ref, finer, layout):
  """Store the second codes [K, W] of rounding errors: two halves [K, P]. Coordinate w + W/2 is in the second half, P after w."""
  column = plgpu.broadcasted_iota(jnp.int32, lost[0].shape, 1, layout=layout)
  W = twice_ref.shape[1]
  for w in range(W // 2):
    here = column == _spread(_load(twice_ref.at[:, w], layout.reduce(1), None), 0, lost[0], layout)
    for half in (0, 1):
      picked = jnp.sum(jnp.where(here, lost[half], 0.0), axis=1)
      store(second_ref.at[:, w + half * (W // 2)], lax.bitcast_convert_type(_cast(picked, 1 / finer), jnp.uint8))


def _count(ref, pairs, layout):
  """Add to ref [heads] how many numbers of each head FP8 clamps. A pair is two halves [heads, P] and their scale."""
  over = [jnp.where(jnp.abs(a / scale) > MAX, 1.0, 0.0) for halves, scale in pairs for a in halves]
  clamped = jnp.sum(sum(over[1:], over[0]), axis=1).astype(jnp.int32)
  store(ref, _load(ref, layout.reduce(1), None) + clamped)


def _cast(x, scale):
  """Return the e4m3 nearest to x / scale (sprl/quant/fp8.py)."""
  return jnp.clip(x / scale, -MAX, MAX).astype(FP8)


def _rounded(x):
  return x.astype(jnp.bfloat16).astype(jnp.float32)


def _load(ref, layout, dtype: Any = jnp.float32):
  found = plgpu.load(ref, layout=layout, optimized=False)
  return found if dtype is None else found.astype(dtype)


def _spread(x, axis, like, layout):
  """Repeat x, which has this axis of [heads, P], along the other one."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, like.shape, [axis]), layout)
