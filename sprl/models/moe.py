"""A mixture of experts: each token goes through the few MLPs that its router chooses, and none is dropped.

    probabilities [N, X]  ->  chosen [N, k], gates [N, k]  ->  sum over k of gate * expert(x)

The N * k assignments are laid, expert by expert, into blocks of C rows, of which an expert gets as many as it needs. The products
that are asked for are done, and no others. Worked example, three tokens, two of three experts each, C = 2:

    chosen    0 2   2 0   2 1
    blocks    expert 0: tokens 0, 1     expert 1: token 2, nothing     expert 2: tokens 0, 1     expert 2: token 2, nothing

Where a kernel multiplies all blocks together (`runs`: bfloat16 on a Hopper GPU), each product of the mixture is one call of it,
forwards and backwards. What all blocks hold is there at one time then, of n * C rows, which are up to N * k + X * C: the inputs
[n, C, E] and two products of them [n, C, F]; backwards the rows of dy too, and four arrays [n, C, F]; and weights that are kept
in float32 are cast whole. So are FP8 codes multiplied, by a kernel of their own or its reference, and have no backward pass.
Elsewhere a loop runs over the blocks that are filled, and holds one block's activations at a time, forwards and backwards.

`jax.lax.ragged_dot` would be the one-line way, but XLA makes a masked product for every expert of it, on CPUs and GPUs alike:
benchmarks/mixture.py measures both. Compiled for an H200, its first product of 4,096 tokens through 8 of 128 experts, 2,048 wide,
takes 16 GiB of temporaries.

On a mesh each device of the `expert` axis has some of the experts, and each of `tensor` a part of every one's F. Tokens go to
their experts by one all-gather over `expert`: of 8 experts in 128 on 8 devices a token has some on five or six of them, so that
sending it to those alone would save little, and would need room for as many tokens as might come. What each device's experts
say comes back as a sum, of which a device gets its own tokens' part. Experts are gathered over fsdp as other weights are, and
over `expert` never.

    x [N/8, E] -> all-gather -> [N, E] -> own experts -> [N, E] -> reduce-scatter -> [N/8, E]
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from sprl.kernels.grouped_matmul import grouped_matmul, grouped_outer, runs
from sprl.models.config import ModelConfig
from sprl.parallel.rules import KEPT, apart, joined, local, number, parts, summed, total
from sprl.quant import fp8
from sprl.quant.block import FORMATS, BlockScaled, Emulated
from sprl.quant.dot import dot, grouped_dot
from sprl.settings import UNQUANTISED, Kernels, Quant, SettingsError

Weights = dict[str, Any]  # gate and up [X, F, E], down [X, E, F]: arrays, or quantised weights with a leading axis X
AXES = {'gate': ('expert', 'mlp', 'embed'), 'up': ('expert', 'mlp', 'embed'), 'down': ('expert', 'embed', 'mlp')}
ROUTER = 'router', 'embed'
ROWS = 'rows', None
BLOCKS = 8, 128  # rows of a block, at least and at most


class Blocks(NamedTuple):
  """Which assignments each block holds. There are n blocks of C rows, the first `used` of them filled."""

  assignment: Int[Array, 'n C']  # into the N * k; N * k where the row is empty
  expert: Int[Array, ' n']
  used: Int[Array, '']
  place: Int[Array, ' M']  # of each assignment, the row among all n * C; n * C where its expert is not here


def probabilities(x: Float[Array, '*B E'], router: Float[Array, 'X E']) -> Float32[Array, '*B X']:
  """The router's distribution over all experts."""
  return jax.nn.softmax(dot(x, router, ROUTER).astype(jnp.float32))


def likeliest(probabilities: Float32[Array, 'B T X'], count: int) -> Int[Array, 'B T k']:
  """So many experts of each token; found where its row lies, as XLA would gather all rows for it."""
  return local(lambda here: jax.lax.top_k(here, count)[1], ((*ROWS, None),), (*ROWS, None))(probabilities)


def gates(probabilities: Float32[Array, '*B X'], chosen: Int[Array, '*B k'], normalised: bool) -> Float32[Array, '*B k']:
  """The weights of the chosen experts: their probabilities among all, which are what a gradient reaches the router by."""
  weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
  return weights / jnp.sum(weights, axis=-1, keepdims=True) if normalised else weights


def mixture(
  weights: Weights,
  x: Float[Array, 'N E'],
  chosen: Int[Array, 'N k'],
  gates: Float32[Array, 'N k'],
  kernels: Kernels = 'auto',
) -> Float[Array, 'N E']:
  """The sum of the chosen experts' outputs by their gates, in float32 over k, in x's dtype.

  A number that is none of these X experts' adds nothing: of experts that lie on several devices, each sees its own from 0 on.
  Quantised weights are multiplied as `dot` does, and not differentiated. `kernels`: what multiplies.
  """
  return _mixture(weights, x, chosen, gates, kernels)


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


def _expert(weights: Weights, x: Float[Array, '*B C E'], gate: Float32[Array, '*B C'], product=dot) -> Float[Array, '*B C E']:
  """What one expert adds to its tokens."""
  out = product(gated(product(x, weights['gate']), product(x, weights['up'])), weights['down'])
  return (out.astype(jnp.float32) * gate[..., None]).astype(x.dtype)


# The gates are in here, and each block is computed again for its gradient, so that nothing between x and the sum is kept.
@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mixture(weights: Weights, x, chosen, gates, kernels: Kernels):
  spread = apart('rows', len(x), by='expert')

  def own(weights, *rows):
    weights, (x, chosen, gates) = _together(weights, rows, spread)
    return _back(_summed_blocks(weights, x, gates, _own_blocks(weights, chosen), kernels), spread)

  return local(own, (_names(weights), ROWS, ROWS, ROWS), ROWS, KEPT)(weights, x, chosen, gates)


def _forward(weights, x, chosen, gates, kernels):
  return _mixture(weights, x, chosen, gates, kernels), (weights, x, chosen, gates)


def _backward(kernels, saved, dy):
  weights, x, chosen, gates = saved
  spread = apart('rows', len(x), by='expert')
  if parts('rows', len(x)) < parts('rows', 0):  # 0 are split as often as can be
    raise ValueError(f'{len(x)} tokens are no multiple of the devices that share them out, which a gradient needs')

  def own(kept, *rows):
    weights, (x, chosen, gates, dy) = _together(kept, rows, spread)
    dweights, dx, dgates = _gradients(weights, x, gates, dy, _own_blocks(weights, chosen), kernels)
    for name, w in kept.items():
      axis = AXES[name].index('embed')
      of_rows = summed(dweights[name], 'embed', axis) if w.shape[axis] < x.shape[-1] else total(dweights[name], 'embed')
      dweights[name] = total(of_rows, 'copies').astype(w.dtype)
    return dweights, _back(dx, spread), _back(dgates, spread)

  dweights, dx, dgates = local(own, (AXES, ROWS, ROWS, ROWS, ROWS), (AXES, ROWS, ROWS), KEPT)(weights, x, chosen, gates, dy)
  return dweights, dx, None, dgates


_mixture.defvjp(_forward, _backward)


# --- each device with its experts ------------------------------------------------------------------------------------


def check_split(config: ModelConfig, expert: int, tensor: int, where: str, quant: Quant = UNQUANTISED) -> None:
  """Raises SettingsError where the model's experts cannot be split so; `where` names the setting that says how.

  A device's part of an expert must be whole blocks of FP8: a block's scale is that of its largest number.
  """
  experts = config.experts
  if experts is None:
    if expert > 1:
      raise SettingsError(f'{where}: expert = {expert}; expected 1 with a model of family {config.family}, without experts')
    return
  if experts.count % expert:
    raise SettingsError(f'{where}: expert = {expert}; expected a divisor of {experts.count}, the experts of a layer')
  if experts.width % tensor:
    raise SettingsError(f'{where}: tensor = {tensor}; expected a divisor of {experts.width}, the width of an expert')
  part, block = experts.width // tensor, max(FORMATS[quant.format][:3])
  if tensor > 1 and part % block and 'w8a8' in quant.sampler and not AXES.keys() <= set(quant.skip_names):
    raise SettingsError(
      f'{where}: tensor = {tensor} leaves a device {part} of the {experts.width} of an expert; expected a multiple of {block}, '
      f'a block of config.quant.format = {quant.format!r}, where experts are FP8'
    )


def _names(weights: Weights) -> Weights:
  """The names of the axes of weights in whichever form. Scales are not split by their columns of E, which experts use whole."""

  def of(w, names):
    match w:
      case BlockScaled():
        return replace(w, codes=names, scale=tuple(None if name == 'embed' else name for name in names))
      case Emulated():
        return replace(w, values=names)
    return names

  return {name: of(w, AXES[name]) for name, w in weights.items()}


def _together(weights: Weights, rows, spread: bool):
  """A device's experts, whole but for what `tensor` splits, and the tokens of all devices that have the others'."""
  x = rows[0]

  def whole(w, names):
    if 'embed' not in names or w.shape[names.index('embed')] == x.shape[-1]:
      return w
    codes = w.dtype == jnp.float8_e4m3fn
    sent = fp8.to_bytes(w) if codes else w.astype(x.dtype)  # cast first, so that no more is sent than is used
    sent = joined(sent, 'embed', names.index('embed'))
    return fp8.from_bytes(sent) if codes else sent

  return jax.tree.map(whole, weights, _names(weights)), [joined(each, 'expert', 0) if spread else each for each in rows]


def _own_blocks(weights: Weights, chosen) -> Blocks:
  X = _count(weights)
  return blocks(chosen - number('expert') * X, X)


def _back(y, spread: bool):
  """What all devices' experts, and all parts of them, say of a device's own tokens."""
  return total(summed(y, 'expert', 0) if spread else total(y, 'expert'), 'mlp')


# --- one device ------------------------------------------------------------------------------------------------------


def _at_once(weights: Weights, x, blocks: Blocks, kernels: Kernels) -> bool:
  """Whether all blocks are multiplied together. FP8 codes always are, by whatever multiplies them."""
  C = blocks.assignment.shape[1]
  return all(isinstance(w, BlockScaled) or runs(jax.tree.leaves(w)[0].shape, x.dtype, C, kernels) for w in weights.values())


def _summed_blocks(weights: Weights, x, gates, blocks: Blocks, kernels: Kernels):
  """What these experts say of each token."""

  def body(i, y):
    expert, *inputs = _block(i, weights, x, gates, blocks)
    return _set(y, i, _expert(expert, *inputs))

  if _at_once(weights, x, blocks, kernels):
    inputs, gate = _rows(x, blocks.assignment // gates.shape[1]), _rows(gates.reshape(-1), blocks.assignment)
    product = partial(grouped_dot, expert=blocks.expert, used=blocks.used, kernels=kernels)
    return _summed(_expert(weights, inputs, gate, product), blocks, x)
  y = jax.lax.fori_loop(0, blocks.used, body, jnp.zeros((*blocks.assignment.shape, x.shape[-1]), x.dtype))
  return _summed(y, blocks, x)


def _gradients(weights: Weights, x, gates, dy, blocks: Blocks, kernels: Kernels):
  """Of the weights, in float32, of x and of the gates."""

  def body(i, carry):
    dx, dgates, dweights = carry
    expert, *inputs = _block(i, weights, x, gates, blocks)
    cotangent = _rows(dy, _at(blocks.assignment, i) // gates.shape[1])
    new, *rest = jax.vjp(_expert, expert, *inputs)[1](cotangent)
    e = blocks.expert[i]
    dweights = jax.tree.map(lambda sums, d: _set(sums, e, _at(sums, e) + d), dweights, new)
    return *(_set(sums, i, d) for sums, d in zip((dx, dgates), rest)), dweights

  if _at_once(weights, x, blocks, kernels):
    return _gradients_at_once(weights, x, gates, dy, blocks, kernels)
  shape, sums = blocks.assignment.shape, jax.tree.map(partial(jnp.zeros_like, dtype='float32'), weights)
  start = jnp.zeros((*shape, x.shape[-1]), x.dtype), jnp.zeros(shape), sums
  dx, dgates, dweights = jax.lax.fori_loop(0, blocks.used, body, start)
  return dweights, _summed(dx, blocks, x), _rows(dgates.reshape(-1), blocks.place).reshape(gates.shape)


def _gradients_at_once(weights: Weights, x, gates, dy, blocks: Blocks, kernels: Kernels):
  """The same, all blocks together. What a gate multiplies is not computed again: its gradient is h . (down^T dy) as well."""
  product = partial(grouped_matmul, expert=blocks.expert, used=blocks.used, kernels=kernels)
  outer = partial(grouped_outer, expert=blocks.expert, used=blocks.used, experts=_count(weights), kernels=kernels)
  tokens, gate = blocks.assignment // gates.shape[1], _rows(gates.reshape(-1), blocks.assignment)[..., None]
  inputs, cotangent = _rows(x, tokens), _rows(dy, tokens)
  w = jax.tree.map(lambda w: w.astype(x.dtype), weights)
  hidden, pull = jax.vjp(gated, product(inputs, w['gate']), product(inputs, w['up']))
  ungated = product(cotangent, w['down'], back=True).astype(jnp.float32)
  dgate, dup = pull((gate * ungated).astype(x.dtype))
  dweights = {
    'gate': outer(dgate, inputs),
    'up': outer(dup, inputs),
    'down': outer(cotangent, (gate * hidden).astype(x.dtype)),
  }
  dx = product(dgate, w['gate'], back=True) + product(dup, w['up'], back=True)
  dgates = jnp.sum(hidden * ungated, axis=-1)
  # XLA would go on with dx, and put the weights' gradients off: it would keep the blocks of all layers for them.
  dweights, dx = jax.lax.optimization_barrier((dweights, dx))
  return dweights, _summed(dx, blocks, x), _rows(dgates.reshape(-1), blocks.place).reshape(gates.shape)


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
