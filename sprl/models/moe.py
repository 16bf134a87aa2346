"""Mixture of experts: each token uses the few MLPs that its router chooses. No token is dropped.

    probabilities [N, X]  ->  chosen [N, k], gates [N, k]  ->  sum over k of gate * expert(x)

The N * k assignments are sorted by expert into blocks of C rows. An expert gets as many blocks as it needs, so only the
products that are needed are computed. Worked example, three tokens, two of three experts each, C = 2:

    chosen    0 2   2 0   2 1
    blocks    expert 0: tokens 0, 1     expert 1: token 2, nothing     expert 2: tokens 0, 1     expert 2: token 2, nothing

Where a grouped kernel runs (`runs`: bfloat16 on a Hopper GPU), each product of the mixture is one kernel call over all blocks,
forward and backward. Temporary memory then covers all blocks: n * C rows, at most N * k + X * C. The forward pass holds the
inputs [n, C, E] and two products [n, C, F]. The backward pass adds the rows of dy and four arrays [n, C, F], and casts float32
weights as a whole. FP8 codes take the same path, with an FP8 kernel or its reference; their backward pass multiplies the numbers
that the codes stand for.
Elsewhere a loop runs over the filled blocks and holds the activations of one block at a time, forward and backward.

`jax.lax.ragged_dot` would be one line, but on CPUs and GPUs XLA turns it into a masked product for every expert;
benchmarks/mixture.py measures both. Compiled for an H200, its first product of 4,096 tokens through 8 of 128 experts, 2,048 wide,
takes 16 GiB of temporaries.

On a mesh each device of the `expert` axis has some of the experts, and each of `tensor` a part of every expert's F. One
all-gather over `expert` brings tokens to their experts. With 8 of 128 experts on 8 devices, a token has experts on five or six
devices, so sending it only to those would save little and would need room for the worst case. The outputs of each device's
experts are summed by a reduce-scatter that leaves each device its own tokens. Experts are gathered over fsdp like other
weights, and never over `expert`.

    x [N/8, E] -> all-gather -> [N, E] -> own experts -> [N, E] -> reduce-scatter -> [N/8, E]

Letters: N tokens, k experts of a token, X experts, E model width, F expert width, n blocks of C rows, M = N * k assignments.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from sprl.config import UNQUANTISED, Kernels, Quant, SettingsError
from sprl.kernels.grouped_matmul import grouped_matmul, grouped_outer, runs
from sprl.models.config import ModelConfig
from sprl.models.families import Activation
from sprl.quant import fp8
from sprl.quant.block import FORMATS, BlockScaled, Emulated
from sprl.quant.dot import StraightThrough, dot, grouped_dot, operand, values
from sprl.quant.joined import Joined, Within
from sprl.sharding.rules import KEPT, all_gather, axis_index, local, parts, psum, psum_scatter, splits_over

Weights = dict[str, Any]  # gate and up [X, F, E], down [X, E, F]: arrays, quantised or StraightThrough weights
AXES = {'gate': ('expert', 'mlp', 'embed'), 'up': ('expert', 'mlp', 'embed'), 'down': ('expert', 'embed', 'mlp')}
ROUTER = 'router', 'embed'
ROWS = 'rows', None
BLOCKS = 8, 128  # fewest and most rows of a block


class Blocks(NamedTuple):
  """The assignments of each block. There are n blocks of C rows, of which the first `used` are filled."""

  assignment: Int[Array, 'n C']  # index of the row's assignment; M: an empty row
  expert: Int[Array, ' n']  # expert of each block
  used: Int[Array, '']
  place: Int[Array, ' M']  # row of each assignment among all n * C; n * C: its expert is on another device


def probabilities(x: Float[Array, '*B E'], router: Float[Array, 'X E'] | StraightThrough) -> Float32[Array, '*B X']:
  """Return the router's distribution over all experts."""
  return jax.nn.softmax(dot(x, router, ROUTER).astype(jnp.float32))


def top_experts(probabilities: Float32[Array, 'B T X'], count: int) -> Int[Array, 'B T k']:
  """Return the `count` most likely experts of each token. `local`, because XLA would gather all rows for a top-k."""
  return local(lambda here: jax.lax.top_k(here, count)[1], ((*ROWS, None),), (*ROWS, None))(probabilities)


def gates(probabilities: Float32[Array, '*B X'], chosen: Int[Array, '*B k'], normalised: bool) -> Float32[Array, '*B k']:
  """Return the weights of the chosen experts: their probabilities, through which gradients reach the router.

  `normalised`: the weights of a token sum to 1.
  """
  weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
  return weights / jnp.sum(weights, axis=-1, keepdims=True) if normalised else weights


def mixture(
  weights: Weights,
  x: Float[Array, 'N E'],
  chosen: Int[Array, 'N k'],
  gates: Float32[Array, 'N k'],
  kernels: Kernels = 'auto',
) -> Float[Array, 'N E']:
  """Return the sum over k of gate * expert(x), summed in float32, in x's dtype.

  An index outside of 0..X-1 adds nothing: each device numbers its own experts from 0 and ignores the others. Quantised and
  StraightThrough weights are multiplied as in `dot`. `kernels` selects the implementation of the products.
  """
  return _mixture(weights, x, chosen, gates, kernels)


def blocks(chosen: Int[Array, 'N k'], experts: int) -> Blocks:
  """Sort the assignments into blocks. C is about an expert's share of them, which gives few blocks and few empty rows."""
  N, k = chosen.shape
  M, (least, most) = N * k, BLOCKS
  C = min(max(1 << max(M // experts - 1, 0).bit_length(), least), most)
  n = M // C + min(experts, M)  # each expert has at most one block that is not full
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


ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_tanh': partial(jax.nn.gelu, approximate=True)}


def gated(gate: Float[Array, '*B F'], up: Float[Array, '*B F'], activation: Activation = 'silu') -> Float[Array, '*B F']:
  """Return activation(gate) * up, computed in float32."""

  @jax.checkpoint  # saves the inputs, not the float32 intermediates, which are cheap to recompute
  def product(gate, up):
    return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)

  return product(gate, up)


def _expert(weights: Weights, x: Float[Array, '*B C E'], gate: Float32[Array, '*B C'], product=dot) -> Float[Array, '*B C E']:
  """Return the gated output of one expert for its tokens."""
  first = weights['gate']
  if isinstance(first, Joined):
    gate_of_x, up_of_x = first.split(product(x, first.weight))
  else:
    gate_of_x, up_of_x = product(x, first), product(x, weights['up'])
  out = product(gated(gate_of_x, up_of_x), weights['down'])
  return (out.astype(jnp.float32) * gate[..., None]).astype(x.dtype)


# The gates are applied inside and the backward pass recomputes each block, so nothing between x and the sum is saved.
@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mixture(weights: Weights, x, chosen, gates, kernels: Kernels):
  spread, weights = splits_over('rows', len(x), by='expert'), _multiplied(weights)

  def own(weights, *rows):
    weights, (x, chosen, gates) = _together(weights, rows, spread)
    return _back(_summed_blocks(weights, x, gates, _own_blocks(weights, chosen), kernels), spread)

  return local(own, (_names(weights), ROWS, ROWS, ROWS), ROWS, KEPT)(weights, x, chosen, gates)


def _forward(weights, x, chosen, gates, kernels):
  return _mixture(weights, x, chosen, gates, kernels), (weights, x, chosen, gates)


def _backward(kernels, saved, dy):
  weights, x, chosen, gates = saved
  spread, multiplied = splits_over('rows', len(x), by='expert'), _multiplied(weights)
  if parts('rows', len(x)) < parts('rows', 0):  # 0 rows divide by every axis
    raise ValueError(f'{len(x)} tokens; a gradient needs a multiple of {parts("rows", 0)}, the devices that split rows')

  def own(kept, *rows):
    weights, (x, chosen, gates, dy) = _together(kept, rows, spread)
    dweights, dx, dgates = _gradients(weights, x, gates, dy, _own_blocks(weights, chosen), kernels)
    for name, w in kept.items():
      axis = AXES[name].index('embed')
      here = jax.tree.leaves(w)[0].shape[axis]
      of_rows = psum_scatter(dweights[name], 'embed', axis) if here < x.shape[-1] else psum(dweights[name], 'embed')
      dweights[name] = psum(of_rows, 'copies').astype(dtypes[name])
    return dweights, _back(dx, spread), _back(dgates, spread)

  dtypes = {name: jax.tree.leaves(w)[0].dtype for name, w in weights.items()}  # of master weights: they are the first leaves
  ins = _names(multiplied), ROWS, ROWS, ROWS, ROWS
  dweights, dx, dgates = local(own, ins, (AXES, ROWS, ROWS), KEPT)(multiplied, x, chosen, gates, dy)
  for name, w in weights.items():
    if isinstance(w, StraightThrough):
      dweights[name] = replace(w, w=dweights[name], copy=None)  # None: no gradient
  return dweights, dx, None, dgates


_mixture.defvjp(_forward, _backward)


def _multiplied(weights: Weights) -> Weights:
  """Return the weights that products use: the copies of StraightThrough weights."""
  return {name: w.copy if isinstance(w, StraightThrough) else w for name, w in weights.items()}


# --- experts on a mesh -----------------------------------------------------------------------------------------------


def check_split(config: ModelConfig, expert: int, tensor: int, where: str, quant: Quant = UNQUANTISED) -> None:
  """Raise SettingsError if the mesh axes `expert` and `tensor` cannot split the model's experts.

  `where` is the name of the setting that describes the mesh. A device's part of an expert must consist of whole FP8 blocks,
  because a block's scale comes from its largest number.
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
  part, block = experts.width // tensor, max(FORMATS[quant.format][:2])
  if tensor > 1 and part % block and 'w8a8' in quant.sampler and not AXES.keys() <= set(quant.skip_names):
    raise SettingsError(
      f"{where}: tensor = {tensor} gives a device {part} of an expert's width {experts.width}; expected a multiple of {block}, "
      f'a block of config.quant.format = {quant.format!r}, if experts are FP8'
    )


def _names(weights: Weights) -> Weights:
  """Return the axis names of plain or quantised weights. Scales are not split along E, because experts use all of it."""

  def of(w, names):
    match w:
      case Joined():
        return replace(w, weight=of(w.weight, names))
      case Within():
        return w
      case BlockScaled():
        return replace(w, codes=names, scale=tuple(None if name == 'embed' else name for name in names))
      case Emulated():
        return replace(w, values=names)
    return names

  return {name: of(w, AXES[name]) for name, w in weights.items()}


def _together(weights: Weights, rows, spread: bool):
  """Return a device's experts, gathered over fsdp, and with `spread` the tokens of all devices of the `expert` axis."""
  x = rows[0]

  def whole(w, names):
    if 'embed' not in names or w.shape[names.index('embed')] == x.shape[-1]:
      return w
    codes = w.dtype == jnp.float8_e4m3fn
    sent = fp8.to_bytes(w) if codes else w.astype(x.dtype)  # cast before the gather, which then moves fewer bytes
    sent = all_gather(sent, 'embed', names.index('embed'))
    return fp8.from_bytes(sent) if codes else sent

  return jax.tree.map(whole, weights, _names(weights)), [all_gather(each, 'expert', 0) if spread else each for each in rows]


def _own_blocks(weights: Weights, chosen) -> Blocks:
  X = _count(weights)
  return blocks(chosen - axis_index('expert') * X, X)


def _back(y, spread: bool):
  """Sum the outputs of all devices' experts, and of all parts of them, for a device's own tokens."""
  return psum(psum_scatter(y, 'expert', 0) if spread else psum(y, 'expert'), 'mlp')


# --- experts on one device -------------------------------------------------------------------------------------------


def _at_once(weights: Weights, x, blocks: Blocks, kernels: Kernels) -> bool:
  """Return whether all blocks are multiplied in one call. FP8 codes always are, by the kernel or its reference."""
  C = blocks.assignment.shape[1]
  each = [w.weight if isinstance(w, Joined) else w for w in weights.values() if not isinstance(w, Within)]
  return all(isinstance(w, BlockScaled) or runs(jax.tree.leaves(w)[0].shape, x.dtype, C, kernels) for w in each)


def _summed_blocks(weights: Weights, x, gates, blocks: Blocks, kernels: Kernels):
  """Return the sum of these experts' gated outputs for each token."""

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
  """Return the gradients of the weights (float32), of x and of the gates."""

  def body(i, carry):
    dx, dgates, dweights = carry
    expert, *inputs = _block(i, weights, x, gates, blocks)
    cotangent = _rows(dy, _at(blocks.assignment, i) // gates.shape[1])
    new, *rest = jax.vjp(_expert, {name: _with_gradient(w) for name, w in expert.items()}, *inputs)[1](cotangent)
    new = {name: d.w if isinstance(d, StraightThrough) else d for name, d in new.items()}
    e = blocks.expert[i]
    dweights = jax.tree.map(lambda sums, d: _set(sums, e, _at(sums, e) + d), dweights, new)
    return *(_set(sums, i, d) for sums, d in zip((dx, dgates), rest)), dweights

  if _at_once(weights, x, blocks, kernels):
    return _gradients_at_once(weights, x, gates, dy, blocks, kernels)
  shape, sums = blocks.assignment.shape, {name: jnp.zeros(jax.tree.leaves(w)[0].shape) for name, w in weights.items()}
  start = jnp.zeros((*shape, x.shape[-1]), x.dtype), jnp.zeros(shape), sums
  dx, dgates, dweights = jax.lax.fori_loop(0, blocks.used, body, start)
  return dweights, _summed(dx, blocks, x), _rows(dgates.reshape(-1), blocks.place).reshape(gates.shape)


def _gradients_at_once(weights: Weights, x, gates, dy, blocks: Blocks, kernels: Kernels):
  """Return `_gradients`, with all blocks in one call.

  The output that a gate multiplies is not recomputed: the gate's gradient is also h . (down^T dy).
  """
  product = partial(grouped_dot, expert=blocks.expert, used=blocks.used, kernels=kernels)
  back = partial(grouped_matmul, expert=blocks.expert, used=blocks.used, back=True, kernels=kernels)
  outer = partial(grouped_outer, expert=blocks.expert, used=blocks.used, experts=_count(weights), kernels=kernels)
  tokens, gate = blocks.assignment // gates.shape[1], _rows(gates.reshape(-1), blocks.assignment)[..., None]
  inputs, cotangent = _rows(x, tokens), _rows(dy, tokens)
  w = {name: values(each, x.dtype) for name, each in weights.items()}
  hidden, pull = jax.vjp(gated, product(inputs, weights['gate']), product(inputs, weights['up']))
  ungated = back(cotangent, w['down']).astype(jnp.float32)
  dgate, dup = pull((gate * ungated).astype(x.dtype))
  hidden = operand(hidden, weights['down'])
  dweights = {
    'gate': outer(dgate, operand(inputs, weights['gate'])),
    'up': outer(dup, operand(inputs, weights['up'])),
    'down': outer(cotangent, (gate * hidden).astype(x.dtype)),
  }
  dx = back(dgate, w['gate']) + back(dup, w['up'])
  dgates = jnp.sum(hidden * ungated, axis=-1)
  # Without the barrier XLA continues with dx and delays the weights' gradients, which keeps the blocks of all layers alive.
  dweights, dx = jax.lax.optimization_barrier((dweights, dx))
  return dweights, _summed(dx, blocks, x), _rows(dgates.reshape(-1), blocks.place).reshape(gates.shape)


def _with_gradient(w):
  """Return one expert's weight so that it has a float32 gradient. Products use the copy, so any master weight will do."""
  exact = not isinstance(w, BlockScaled | Emulated) and w.dtype == jnp.float32
  return w if exact else StraightThrough(jnp.zeros(jax.tree.leaves(w)[0].shape), w)


def _block(i, weights, x, gates, blocks: Blocks):
  """Return the weights of block i's expert, and the tokens and gates of its rows (0 in empty rows)."""
  rows = _at(blocks.assignment, i)
  return _of_expert(weights, blocks.expert[i]), _rows(x, rows // gates.shape[1]), _rows(gates.reshape(-1), rows)


def _rows(x, rows):
  return jnp.take(x, rows, axis=0, mode='fill', fill_value=0)


def _summed(y, blocks: Blocks, x):
  """Return each token's sum over its k rows of the blocks."""
  rows = _rows(y.reshape(-1, x.shape[-1]), blocks.place).reshape(len(x), -1, x.shape[-1])
  return jnp.sum(rows, axis=1, dtype=jnp.float32).astype(x.dtype)


def _of_expert(weights: Weights, expert: Int[Array, '']) -> Weights:
  """Return one expert's weights. FP8 codes are moved as bytes, see `fp8.to_bytes`."""

  def leaf(w):
    return fp8.from_bytes(_at(fp8.to_bytes(w), expert)) if w.dtype == jnp.float8_e4m3fn else _at(w, expert)

  return jax.tree.map(leaf, weights)


def _at(x, i):
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _set(x, i, value):
  return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), i, 0)


def _count(weights: Weights) -> int:
  return jax.tree.leaves(weights)[0].shape[0]
