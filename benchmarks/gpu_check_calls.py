"""Calls that are checked for parity and timed by gpu_check.py: random arguments, quantisation, and the product in Triton."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gpu_check_bench import BF16, FP8, Bench
from kernel_resources import Model

from sprl.cache.key_bias import FINER, KeyBias
from sprl.cache.scales import Scales
from sprl.kernels import hopper_quantise
from sprl.kernels.append import CodeForm, Projected
from sprl.kernels.hopper_decode_attention import SECOND
from sprl.kernels.packed_attention import Visible
from sprl.kernels.rope import Rope, turns
from sprl.kernels.rounding import to_bfloat16
from sprl.models.moe import ACTIVATIONS, blocks
from sprl.quant import fp8
from sprl.quant.block import quantise, quantise_groups

EPSILON = 1e-6  # of norms, as in Qwen2.5


def attention_inputs(model: Model, B: int, S: int, dtype: Any, key: jax.Array, length: Any = None) -> tuple[Any, ...]:
  """Return random arguments of decode attention."""
  H, K, D, _, _ = model
  q, k, v = jax.random.split(key, 3)
  scales = (jnp.float32(1.7), jnp.float32(0.3)) if dtype == FP8 else (jnp.float32(1), jnp.float32(1))
  cache = [jax.random.normal(each, (B, K, S, D), BF16).astype(dtype) for each in (k, v)]
  full = jnp.full(B, S, jnp.int32) if length is None else jnp.asarray(length, jnp.int32)
  return jax.random.normal(q, (B, H, D), BF16), *cache, full, scales


def twice_coded_inputs(model: Model, B: int, S: int, dtype: Any, key: jax.Array, length: Any) -> tuple[Any, ...]:
  """Return random arguments of decode attention with second codes, whose effect on scores is as large as that of first codes."""
  H, K, D, _, _ = model
  q, k = jax.random.split(jax.random.fold_in(key, 1))
  queries = (D / SECOND) ** 0.5 * jax.random.normal(q, (B, H, SECOND))
  second = queries.astype(BF16), jax.random.normal(k, (B, K, S, SECOND), BF16).astype(dtype)
  return *attention_inputs(model, B, S, dtype, key, length), second


def linear_inputs(M: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Return random arguments of a block-scaled product."""
  x, w = jax.random.split(key)
  weights = quantise(jax.random.normal(w, (N, K), BF16), 'float32')
  return *quantise_groups(jax.random.normal(x, (M, K), BF16), 'float32'), weights.codes, weights.scale


def transposed_inputs(M: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Return `linear_inputs` with transposed scales of tokens, as the quantising kernels write them for the product."""
  x, x_scale, w, w_scale = linear_inputs(M, N, K, key)
  return x, x_scale.T, w, w_scale


def expert_inputs(X: int, chosen: int, tokens: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Return random arguments of the block-scaled product of experts. Each token has `chosen` of X experts."""
  route, x, w = jax.random.split(key, 3)
  grouped = blocks(jax.lax.top_k(jax.random.uniform(route, (tokens, X)), chosen)[1], X)
  rows = jnp.take(jax.random.normal(x, (tokens, K), BF16), grouped.assignment // chosen, axis=0, mode='fill', fill_value=0)
  weights = quantise(jax.random.normal(w, (X, N, K), BF16), 'float32')
  return *quantise_groups(rows, 'float32'), weights.codes, weights.scale, grouped.expert, grouped.used


def bf16_expert_inputs(X: int, chosen: int, tokens: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Return random bfloat16 arguments of the product of experts, whose tokens fill n blocks of T.

  These are x [n, T, K], dy [n, T, N], w [X, N, K], the expert of each block, and the number of blocks in use.
  """
  route, x, dy, w = jax.random.split(key, 4)
  grouped = blocks(jax.lax.top_k(jax.random.uniform(route, (tokens, X)), chosen)[1], X)

  def rows(key, width):
    given = jax.random.normal(key, (tokens, width), BF16)
    return jnp.take(given, grouped.assignment // chosen, axis=0, mode='fill', fill_value=0)

  return rows(x, K), rows(dy, N), jax.random.normal(w, (X, N, K), BF16), grouped.expert, grouped.used


def compaction_inputs(model: Model, B: int, S: int, N: int, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
  """Return random arguments of compaction, with ascending slots."""
  k, v, order = jax.random.split(key, 3)
  _, K, D, _, _ = model
  cache = [jax.random.normal(each, (B, K, S, D), BF16) for each in (k, v)]
  if dtype == FP8:
    cache = [jax.lax.bitcast_convert_type(x.astype(FP8), jnp.uint8) for x in cache]
  keep = jnp.sort(jnp.argsort(jax.random.uniform(order, (B, K, S)))[..., :N], axis=-1).astype(jnp.int32)
  return *cache, jnp.arange(B), keep


def packed_inputs(model: Model, R: int, T: int, key: jax.Array) -> tuple[Any, ...]:
  """Return random arguments of attention on packed rows and its gradients: a prompt and seven completions that share it."""
  H, K, D, _, _ = model
  shapes = ((R, T, H, D), (R, T, K, D), (R, T, K, D), (R, T, H, D))
  q, k, v, dout = (jax.random.normal(each, shape, BF16) for each, shape in zip(jax.random.split(key, 4), shapes))
  segments = jnp.broadcast_to(1 + jnp.arange(T) * 8 // T, (R, T))
  return q, k, v, Visible.in_rows(segments, jnp.where(segments > 1, 1, 0)), dout


def in_float32(arguments: Any) -> Any:
  """Return the arguments with bfloat16 and FP8 arrays in float32, for a reference."""
  return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in (BF16, FP8) else x, arguments)


def with_gradients(attend: Callable) -> Callable:
  """Return a function that computes attention and its gradients."""

  def call(q, k, v, visible, dout):
    out, back = jax.vjp(lambda *x: attend(*x, visible), q, k, v)
    return out, *back(dout)

  return call


class Quantisation(NamedTuple):
  """A kernel that quantises tokens [T, M]."""

  make: Callable[[int, int, jax.Array], tuple[Any, ...]]  # T, M, random key -> arguments
  kernel: Callable  # returns codes and scales
  reference: Callable
  moved: int  # bfloat16 arrays [T, M] that it reads or writes


def quantisations() -> dict[str, Quantisation]:
  """Return the kernels that quantise activations, by the operation that comes first: RMSNorm, a gated activation, or none.

  The kernel with RMSNorm normalises x + added and returns this sum as its third output. The norm or activation is rounded to
  bfloat16 before it is quantised.
  """
  codes = partial(quantise_groups, format='float32')

  def rounded(x):
    return codes(to_bfloat16(x))

  def normalised(x, added, scale):
    wide = to_bfloat16(x.astype(jnp.float32) + added)
    return *rounded(wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + EPSILON) * scale), wide.astype(BF16)

  def gated(x):
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=1)
    return rounded(ACTIVATIONS['silu'](gate) * up)

  def with_weights(T, M, key):
    x, added, scale = jax.random.split(key, 3)
    streams = (jax.random.normal(each, (T, M), BF16) for each in (x, added))
    return *streams, jax.random.uniform(scale, (M,), BF16, 0.5, 2)

  def added_up(x, added, scale):
    return hopper_quantise.normalised_codes(x, scale, EPSILON, added)

  return {
    'alone': Quantisation(lambda T, M, key: (jax.random.normal(key, (T, M), BF16),), hopper_quantise.codes, codes, 1),
    'norm': Quantisation(with_weights, added_up, normalised, 3),
    'gated activation': Quantisation(
      lambda T, M, key: (jax.random.normal(key, (T, 2 * M), BF16),),
      partial(hopper_quantise.gated_codes, activate=ACTIVATIONS['silu']),
      gated,
      2,
    ),
  }


def norm_inputs(T: int, M: int, parts: int, key: jax.Array) -> tuple[Any, ...]:
  """Return random tokens, the parts of a product that is added to them, and the weights of a norm."""
  x, added, scale = jax.random.split(key, 3)
  weights = jax.random.uniform(scale, (M,), BF16, 0.5, 2)
  return jax.random.normal(x, (T, M), BF16), jax.random.normal(added, (parts, T, M), jnp.float32), weights


def norm_kernel(x: Any, added: Any, scale: Any) -> tuple[Any, Any]:
  """Return RMSNorm of x plus the sum of the parts, and this total, by the kernel."""
  return hopper_quantise.normalised(x, added, scale, EPSILON)


def norm_reference(x: Any, added: Any, scale: Any) -> tuple[Any, Any]:
  """Return RMSNorm of x plus the sum of the parts, and this total, by jnp. The sum and the total are rounded to bfloat16."""
  total = to_bfloat16(x.astype(jnp.float32) + to_bfloat16(jnp.sum(added, axis=0)))
  normed = total * jax.lax.rsqrt(jnp.mean(total * total, axis=1, keepdims=True) + EPSILON) * scale
  return normed.astype(BF16), total.astype(BF16)


def append_inputs(model: Model, B: int, S: int, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
  """Return random arguments of the append of a token per row.

  These are the arrays of the cache, the joined product, slot and position of each token, and the form of the codes.

  The heads have biases and norms. An FP8 cache has second codes, and some numbers are clamped. The last row has no token. The
  product is one part in bfloat16, as an FP8 linear gives it, or two in float32.
  """
  H, K, D, _, _ = model
  cache, product, bias, norm, place = jax.random.split(key, 5)
  stored = {name: jax.random.randint(cache, (B, K, S, D), 0, 100, jnp.uint8) for name in ('k', 'v')}
  code = None
  if dtype == FP8:
    planes = jnp.argsort(jax.random.uniform(bias, (K, D // 2)), axis=1)[:, : SECOND // 2]
    mean = jax.random.normal(norm, (K, D))
    scales = Scales(*(jnp.full(1, scale, jnp.float32) for scale in (1, 0.008, 0.008)))
    code = CodeForm(scales, mean, jnp.concatenate([planes, planes + D // 2], axis=1), layer=0, queries=False, finer=FINER)
    stored |= {
      'second': jax.random.randint(cache, (B, K, S, SECOND), 0, 100, jnp.uint8),
      'saturated': jnp.zeros((B, K), jnp.int32),
    }
  else:
    stored = {name: x.astype(dtype) for name, x in stored.items()}
  biases = [jax.random.normal(jax.random.fold_in(bias, i), (n * D,), BF16) for i, n in enumerate((H, K, K))]
  norms = [jax.random.uniform(jax.random.fold_in(norm, i), (D,), BF16, 0.5, 2) for i in range(2)]
  position = jax.random.randint(place, (B,), 0, 32768)
  angles = turns(position[:, None], D, Rope(theta=1e6))
  slot = jnp.where(jnp.arange(B) < B - 1, position % S, S)
  parts, of_parts = (1, BF16) if dtype == FP8 else (2, jnp.float32)
  joined = jax.random.normal(product, (parts, B, (H + 2 * K) * D), of_parts)
  x = Projected(joined, (biases[0], biases[1], biases[2]), (norms[0], norms[1]), angles, EPSILON, 1.0)
  return stored, x, slot, position, code


def append_reference(stored: dict, x: Projected, slot: Any, position: Any, code: CodeForm | None) -> tuple[Any, dict]:
  """Return the queries and updated arrays, computed as the docstring of sprl/kernels/hopper_append.py describes."""
  (B, K, _, D), H = stored['k'].shape, x.product.shape[2] // stored['k'].shape[3] - 2 * stored['k'].shape[1]
  assert x.bias is not None
  assert x.norm is not None
  product = to_bfloat16(jnp.sum(x.product.astype(jnp.float32), axis=0))
  parts = jnp.split(product, [H * D, (H + K) * D], axis=1)
  q, k, v = (to_bfloat16(part + bias).reshape(B, -1, D) for part, bias in zip(parts, x.bias, strict=True))

  def turned(heads, weight):
    normed = to_bfloat16(heads * jax.lax.rsqrt(jnp.mean(heads * heads, axis=2, keepdims=True) + x.eps) * weight)
    halves = normed.reshape(B, -1, 2, D // 2)
    return to_bfloat16(halves * x.turns.cos + jnp.flip(halves, axis=2) * x.turns.sin).reshape(B, -1, D)

  q, k = (turned(heads, weight) for heads, weight in zip((q, k), x.norm, strict=True))
  new = {'k': k.astype(BF16), 'v': v.astype(BF16)}
  if code is not None:
    bias, (_, of_k, of_v) = KeyBias((code.mean,), (code.twice,)), code.scales
    k = bias.centred(0, k)
    first = fp8.cast(k, of_k[0])
    new = {'k': first, 'v': fp8.cast(v, of_v[0]), 'second': bias.second(0, k, first, of_k[0])}
    new = {name: fp8.to_bytes(codes) for name, codes in new.items()}
  after = {name: stored[name].at[jnp.arange(B), :, slot].set(token, mode='drop') for name, token in new.items()}
  if code is not None:
    clamped = sum(fp8.saturated(a, scale[0]).sum(axis=2, dtype=jnp.int32) for a, scale in ((k, of_k), (v, of_v)))
    after['saturated'] = stored['saturated'] + jnp.where(slot < stored['k'].shape[2], 1, 0)[:, None] * clamped
  return q.astype(BF16), after


def triton_candidate(bench: Bench) -> dict[str, Callable]:
  """Return the block-scaled product in Triton by name; empty if it cannot be imported or in a rehearsal."""
  if bench.rehearse:
    return {}
  try:
    from peers.triton_block_matmul import block_matmul as multiply
  except Exception as error:  # not installed, or for another version of jax
    print(f'triton: {type(error).__name__}: {error}', flush=True)
    return {}
  return {'triton': multiply}
