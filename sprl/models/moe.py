"""A mixture of experts: each token goes through the few MLPs that its router chooses, and none is dropped.

    probabilities [N, X]  ->  chosen [N, k], gates [N, k]  ->  sum over k of gate * expert(x)

The N * k assignments are laid, expert by expert, into blocks of C rows, of which an expert gets as many as it needs; a loop runs
over the blocks that are filled. It does the products that are asked for and no others, and holds one block's activations at a
time, forwards and backwards. Worked example, three tokens, two of three experts each, C = 2:

    chosen    0 2   2 0   2 1
    blocks    expert 0: tokens 0, 1     expert 1: token 2, nothing     expert 2: tokens 0, 1     expert 2: token 2, nothing

`jax.lax.ragged_dot` would be the one-line way, but XLA makes a masked product for every expert of it, on CPUs and GPUs alike:
benchmarks/mixture.py measures both. Compiled for an H200, its first product of 4,096 tokens through 8 of 128 experts, 2,048 wide,
takes 16 GiB of temporaries.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from sprl.quant import fp8
from sprl.quant.dot import dot

Weights = dict[str, Any]  # gate and up [X, F, E], down [X, E, F]: arrays, or quantised weights with a leading axis X
BLOCKS = 8, 128  # rows of a block, at least and at most


class Blocks(NamedTuple):
  """Which assignments each block holds. There are n blocks of C rows, the first `used` of them filled."""

  assignment: Int[Array, 'n C']  # into the N * k; N * k where the row is empty
  expert: Int[Array, ' n']
  used: Int[Array, '']
  place: Int[Array, ' M']  # of each assignment, the row among all n * C; n * C where its expert is not here


def probabilities(x: Float[Array, '*B E'], router: Float[Array, 'X E']) -> Float32[Array, '*B X']:
  """The router's distribution over all experts."""
  return jax.nn.softmax(dot(x, router).astype(jnp.float32))


def gates(probabilities: Float32[Array, '*B X'], chosen: Int[Array, '*B k'], normalised: bool) -> Float32[Array, '*B k']:
  """The weights of the chosen experts: their probabilities among all, which are what a gradient reaches the router by."""
  weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
  return weights / jnp.sum(weights, axis=-1, keepdims=True) if normalised else weights


def mixture(
  weights: Weights, x: Float[Array, 'N E'], chosen: Int[Array, 'N k'], gates: Float32[Array, 'N k']
) -> Float[Array, 'N E']:
  """The sum of the chosen experts' outputs by their gates, in float32 over k, in x's dtype.

  A number that is none of these X experts' adds nothing: of experts that lie on several devices, each sees its own from 0 on.
  Quantised weights are multiplied as `dot` does, and not differentiated.
  """
  return _mixture(weights, x, gates, blocks(chosen, _count(weights)))


def blocks(chosen: Int[Array, 'N k'], experts: int) -> Blocks:
  """The assignments in blocks. C is about an expert's share of them: few blocks, of which few are half empty."""
  N, k = chosen.shape
  M, (least, most) = N * k, BLOCKS
  C = min(max(1 << max(M // experts - 1, 0).bit_length(), least), most)
  n = M // C + min(experts, M)  # at most one block of each expert is not full
  flat = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(M)
  sizes = jnp.bincount(flat, length=experts)
  filled = -(-sizes // C)
  order = jnp.argsort(flat)
  expert = flat[order]
  rank = jnp.arange(M) - (jnp.cumsum(sizes) - sizes)[expert]
  row = jnp.where(expert < experts, (jnp.cumsum(filled) - filled)[expert] * C + rank, n * C)
  place = jnp.zeros(M, jnp.int32).at[order].set(row)
  return Blocks(
    assignment=jnp.full(n * C, M, jnp.int32).at[place].set(jnp.arange(M, dtype=jnp.int32), mode='drop').reshape(n, C),
    expert=jnp.sum(jnp.arange(n)[:, None] >= jnp.cumsum(filled)[:-1], axis=1),
    used=jnp.sum(filled),
    place=place,
  )


@jax.checkpoint  # cheap to compute again: the backward pass keeps its inputs, not its float32 intermediates
def gated(gate: Float[Array, '*B M'], up: Float[Array, '*B M']) -> Float[Array, '*B M']:
  """silu(gate) * up, computed in float32."""
  return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _expert(weights: Weights, x: Float[Array, 'C E'], gate: Float32[Array, ' C']) -> Float[Array, 'C E']:
  """What one expert adds to its tokens."""
  out = dot(gated(dot(x, weights['gate']), dot(x, weights['up'])), weights['down'])
  return (out.astype(jnp.float32) * gate[:, None]).astype(x.dtype)


# The gates are in here, and each block is computed again for its gradient, so that nothing between x and the sum is kept.
@jax.custom_vjp
def _mixture(weights: Weights, x, gates, blocks: Blocks):
  def body(i, y):
    expert, *inputs = _block(i, weights, x, gates, blocks)
    return _set(y, i, _expert(expert, *inputs))

  y = jax.lax.fori_loop(0, blocks.used, body, jnp.zeros((*blocks.assignment.shape, x.shape[-1]), x.dtype))
  return _summed(y, blocks, x)


def _forward(weights, x, gates, blocks):
  return _mixture(weights, x, gates, blocks), (weights, x, gates, blocks)


def _backward(saved, dy):
  weights, x, gates, blocks = saved

  def body(i, carry):
    dx, dgates, dweights = carry
    expert, *inputs = _block(i, weights, x, gates, blocks)
    cotangent = _rows(dy, _at(blocks.assignment, i) // gates.shape[1])
    new, *rest = jax.vjp(_expert, expert, *inputs)[1](cotangent)
    e = blocks.expert[i]
    dweights = jax.tree.map(lambda sums, d: _set(sums, e, _at(sums, e) + d), dweights, new)
    return *(_set(sums, i, d) for sums, d in zip((dx, dgates), rest)), dweights

  shape, sums = blocks.assignment.shape, jax.tree.map(partial(jnp.zeros_like, dtype='float32'), weights)
  start = jnp.zeros((*shape, x.shape[-1]), x.dtype), jnp.zeros(shape), sums
  dx, dgates, dweights = jax.lax.fori_loop(0, blocks.used, body, start)
  dweights = jax.tree.map(lambda d, w: d.astype(w.dtype), dweights, weights)
  return dweights, _summed(dx, blocks, x), _rows(dgates.reshape(-1), blocks.place).reshape(gates.shape), None


_mixture.defvjp(_forward, _backward)


def _block(i, weights, x, gates, blocks: Blocks):
  """The weights of block i's expert, and the tokens and gates of its rows; 0 in those that are empty."""
  rows = _at(blocks.assignment, i)
  return _of_expert(weights, blocks.expert[i]), _rows(x, rows // gates.shape[1]), _rows(gates.reshape(-1), rows)


def _rows(x, rows):
  return jnp.take(x, rows, axis=0, mode='fill', fill_value=0)


def _summed(y, blocks: Blocks, x):
  """Each token's sum over its k rows of the blocks."""
  rows = _rows(y.reshape(-1, x.shape[-1]), blocks.place).reshape(len(x), -1, x.shape[-1])
  return jnp.sum(rows, axis=1, dtype=jnp.float32).astype(x.dtype)


def _of_expert(weights: Weights, expert: Int[Array, '']) -> Weights:
  """One expert's weights. FP8 codes are moved as bytes: see `fp8.to_bytes`."""

  def leaf(w):
    return fp8.from_bytes(_at(fp8.to_bytes(w), expert)) if w.dtype == jnp.float8_e4m3fn else _at(w, expert)

  return jax.tree.map(leaf, weights)


def _at(x, i):
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _set(x, i, value):
  return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), i, 0)


def _count(weights: Weights) -> int:
  return jax.tree.leaves(weights)[0].shape[0]
