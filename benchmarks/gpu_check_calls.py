"""Calls that are checked for parity and timed by gpu_check.py: random arguments, quantisation, and the product in Triton."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gpu_check_bench import BF16, FP8, Bench
from kernel_resources import Model

from sprl.kernels import hopper_quantise
from sprl.kernels.hopper_decode_attention import SECOND
from sprl.kernels.packed_attention import Visible
from sprl.models.moe import ACTIVATIONS, blocks
from sprl.quant.block import quantise, quantise_groups

EPSILON = 1e-6  # of norms, as in Qwen2.5


def attention_inputs(model: Model, B: int, S: int, dtype: Any, key: jax.Array, length: Any = None) -> tuple[Any, ...]:
  """Return random arguments of decode attention."""
  H, K, D, _, _ = model
  q, k, v = jax.random.split(key, 3)
  scale = jnp.float32(1)
  cache = [jax.random.normal(each, (B, K, S, D), BF16).astype(dtype) for each in (k, v)]
  full = jnp.full(B, S, jnp.int32) if length is None else jnp.asarray(length, jnp.int32)
  return jax.random.normal(q, (B, H, D), BF16), *cache, full, (scale, scale)


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


def expert_inputs(X: int, chosen: int, tokens: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Return random arguments of the block-scaled product of experts. Each token has `chosen` of X experts."""
  route, x, w = jax.random.split(key, 3)
  grouped = blocks(jax.lax.top_k(jax.random.uniform(route, (tokens, X)), chosen)[1], X)
  rows = jnp.take(jax.random.normal(x, (tokens, K), BF16), grouped.assignment // chosen, axis=0, mode='fill', fill_value=0)
  weights = quantise(jax.random.normal(w, (X, N, K), BF16), 'float32')
  return *quantise_groups(rows, 'float32'), weights.codes, weights.scale, grouped.expert, grouped.used


def bf16_expert_inputs(X: int, chosen: int, tokens: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Return random bfloat16 arguments of the product of experts: x [n, T, K], dy [n, T, N], w, and each block's expert."""
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
  read: int  # bfloat16 arrays [T, M] that it reads


def quantisations() -> dict[str, Quantisation]:
  """Return the kernels that quantise activations, by what they compute before: a norm, a gated activation, or nothing.

  The kernels quantise norms and activations that were rounded to bfloat16. In the references `reduce_precision` rounds them,
  because XLA leaves out a cast to bfloat16 and back.
  """
  codes = partial(quantise_groups, format='float32')

  def rounded(x):
    return codes(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))

  def normalised(x, scale):
    wide = x.astype(jnp.float32)
    return rounded(wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + EPSILON) * scale)

  def gated(x):
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=1)
    return rounded(ACTIVATIONS['silu'](gate) * up)

  def with_weights(T, M, key):
    x, scale = jax.random.split(key)
    return jax.random.normal(x, (T, M), BF16), jax.random.uniform(scale, (M,), BF16, 0.5, 2)

  return {
    'alone': Quantisation(lambda T, M, key: (jax.random.normal(key, (T, M), BF16),), hopper_quantise.codes, codes, 1),
    'norm': Quantisation(with_weights, partial(hopper_quantise.normalised_codes, eps=EPSILON), normalised, 1),
    'gated activation': Quantisation(
      lambda T, M, key: (jax.random.normal(key, (T, 2 * M), BF16),),
      partial(hopper_quantise.gated_codes, activate=ACTIVATIONS['silu']),
      gated,
      2,
    ),
  }


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
