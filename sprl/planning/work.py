"""What decoding and an update do on one device: operations, bytes of memory, bytes between devices; and the time at the least.

The time of each part is that of its bound: products at the device's matrix rate or memory at its bandwidth, whichever takes
longer; what goes between devices is added. Nothing is faster than this; how much slower a program is, only a device can tell.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from sprl.cache.plan import CachePlan
from sprl.kernels import decode_attention
from sprl.learner.packing import Shape
from sprl.learner.update import scores_old
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.planning.devices import Device
from sprl.planning.layout import NAMES, Axes, ceil, experts, heads, nbytes, shards, size, widths
from sprl.planning.memory import FLOAT32, Update, by_library, compute_dtype
from sprl.settings import Run


@dataclass(frozen=True)
class Part:
  """Work between two points where everything waits."""

  name: str
  flops: int
  bytes: int  # read and written, each array once


@dataclass(frozen=True)
class Collective:
  """Bytes that a device sends, in all."""

  kind: Literal['all-gather', 'reduce-scatter', 'all-reduce']
  axis: str
  count: int
  bytes: int


@dataclass(frozen=True)
class Work:
  """Of one device, for so many tokens of all devices together."""

  tokens: int
  parts: tuple[Part, ...]
  collectives: tuple[Collective, ...]

  @property
  def flops(self) -> int:
    """Operations."""
    return sum(part.flops for part in self.parts)

  @property
  def bytes(self) -> int:
    """Bytes of its memory."""
    return sum(part.bytes for part in self.parts)

  @property
  def sent(self) -> int:
    """Bytes to other devices."""
    return sum(each.bytes for each in self.collectives)

  def seconds(self, device: Device, axes: Axes, dtype) -> float:
    """The least time."""
    rate = device.bfloat16 if jnp.dtype(dtype).itemsize == 2 else device.float32
    inside = sum(max(part.flops / rate, part.bytes / device.bandwidth) for part in self.parts)
    return inside + sum(each.bytes / speed(device, axes, each.axis) for each in self.collectives)


def speed(device: Device, axes: Axes, axis: str) -> float:
  """Bytes a second along an axis: a network's where it reaches beyond a node. The last axis is that of neighbours."""
  span = 1
  for name in reversed(NAMES):
    span *= getattr(axes, name)
    if name == axis:
      break
  return device.link if span <= device.node else device.network


def matrices(config: ModelConfig, axes: Axes) -> int:
  """Weights of the layers' products that tensor leaves to a device and a token meets; of experts, those that it is sent to.

  Of the tokens that meet `expert` devices each sends its own there: so many that a device has as much to do as with all experts.
  """
  held = shards(config, Axes(tensor=axes.tensor), jnp.float32)
  share = config.experts.chosen / config.experts.count if config.experts else 1.0
  leaves = jax.tree_util.tree_flatten_with_path(transformer.layers(held))[0]
  return round(sum(size(w) * (share if len(w.shape) == 3 else 1) for path, w in leaves if path[-1].key == 'kernel'))


# --- decoding ---------------------------------------------------------------------------------------------------------


def attended(plan: CachePlan, layer: int) -> float:
  """Slots that a decode step attends to in a layer, averaged over the longest completion of the longest prompt."""
  settings, length, total = plan.settings, plan.prompt, 0
  steps = plan.positions - plan.prompt
  for step in range(1, steps + 1):
    length += 1
    due = plan.evicts(layer) and step % settings.interval == 0 and length > settings.budget
    total += settings.budget if due and settings.when == 'before' else length
    length = settings.budget if due else length
  return total / steps


def decode(config: ModelConfig, run: Run, plan: CachePlan, weights: int, rows: int, axes: Axes) -> Work:
  """One decode step with so many rows on the device, which holds `weights` bytes of weights as served."""
  b, E, L, t = compute_dtype(run).itemsize, config.hidden_size, config.num_layers, axes.tensor
  H, K = heads(config, t)
  head = config.vocab_size * E // t
  table = 0 if config.tie_embeddings else b * head // axes.fsdp  # of which a row is looked up, no more
  slots = [round(attended(plan, layer)) for layer in range(L)]
  costs = [decode_attention.cost(rows, H, K, S, config.head_dim, plan.storage, bias=plan.key_bias) for S in slots]
  parts = (
    Part('products with weights', 2 * matrices(config, axes) * rows, weights * axes.fsdp - table - b * head),
    Part('attention', sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs)),
    Part('head and draw', 2 * head * rows, b * head + 3 * FLOAT32 * rows * config.vocab_size // t),
  )
  collectives = (*_reductions(axes, 2 * L, b * rows * E), *_gathers(axes, 1, L, weights), *_met(config, axes, 1, 1, b * rows * E))
  return Work(rows * axes.rows, parts, collectives)


# --- the update -------------------------------------------------------------------------------------------------------


def update(config: ModelConfig, run: Run, shape: Shape, memory: Update, axes: Axes) -> Work:
  """All updates of a step, with the scoring before them, where every completion has the longest length."""
  o, b, L, E, T, t = run.optimizer, compute_dtype(run).itemsize, config.num_layers, config.hidden_size, shape.tokens, axes.tensor
  (H, K), D, N, F = heads(config, t), config.head_dim, matrices(config, axes), sum(widths(config, t))
  head, remat = config.vocab_size * E // t, run.model.remat
  held = shards(config, axes, run.model.param_dtype)
  whole = nbytes(held) * axes.fsdp  # a device's weights, gathered
  rows = ceil(shape.rows, axes.rows) * shape.micros  # on a device, of a minibatch
  scored = ceil(shape.sequences * shape.columns, axes.rows)
  updates = o.updates
  scorings = o.minibatches * (scores_old(run.correction, updates) + (run.loss.kl_coef > 0))

  # In forward passes: an update goes forward, backward to inputs and weights, and through what it does again. Of attention a
  # forward pass is two products, a backward pass five; a library's leaves out what is above the diagonal.
  passes = updates * (3 + (remat == 'layer')) + scorings
  seen = 0.5 if by_library(config, run, T, run.cache.masked_learner) else 1.0
  of_attention = seen * (updates * (2 + 5 + 2 * (remat != 'none')) + 2 * scorings)
  of_head = 4 * updates + scorings
  F += len(mixed.layers) * mixed.chosen * mixed.width // t if (mixed := config.experts) else 0
  width = L * (4 * E + 2 * H * D + 2 * K * D) + 3 * F  # what a token's products read and write, in all layers
  summed, stepped = 2 * shape.micros * FLOAT32 * size(held), 2 * (memory.parameters + memory.optimiser + memory.host)
  parts = (
    Part('products with weights', 2 * N * rows * T * passes, passes * (shape.micros * whole + rows * T * b * width)),
    Part('attention', round(2 * L * rows * T * T * H * D * of_attention), passes * L * rows * T * b * 4 * H * D),
    Part('head', 2 * head * scored * of_head, of_head * b * (shape.micros * head + scored * E)),
    Part('gradients and optimiser', 0, updates * (summed + stepped)),
  )
  micros = shape.micros
  activations = ceil(shape.rows, axes.rows) * T * E * b
  stack = transformer.layers(held)
  layers, beside = size(stack), size(held) - size(stack)  # weights of fsdp's share; the vocabulary's stay where they are
  again = updates * (remat == 'layer')  # forward passes that are repeated, up to what comes out of an MLP
  met = (2 * updates + scorings) * layers + again * _met_again(stack)
  collectives = (
    *_gathers(axes, micros * (2 * updates + again + scorings), L, b * micros * met),
    *_scatters(axes, micros * updates, L, FLOAT32 * layers * axes.fsdp),
    *_sums(axes, updates * micros, L, FLOAT32 * layers, updates, FLOAT32 * beside),
    *_sums(axes, updates * micros, L, FLOAT32 * (layers - size(experts(held))), updates, FLOAT32 * beside, 'expert'),
    *_reductions(axes, L * micros * (4 * updates + again + 2 * scorings), activations),
    # Tokens go to experts forwards and backwards, and with them their gradients; sums come back forwards and backwards.
    *_met(config, axes, micros * (3 * updates + scorings), micros * (2 * updates + scorings), activations),
  )
  return Work(axes.rows * rows * T * o.minibatches, parts, collectives)


# --- between devices: rings, each of whose members sends (n - 1) / n of what all are to have -------------------------------


def _gathers(axes: Axes, times: int, layers: int, shards: int) -> tuple[Collective, ...]:
  """Weights split over fsdp, gathered a layer at a time; `shards`: the bytes a device has of all that is gathered."""
  if axes.fsdp == 1 or not times:
    return ()
  return (Collective('all-gather', 'fsdp', times * layers, shards * (axes.fsdp - 1)),)


def _met_again(layers: list) -> int:
  """Weights of what is computed again: not the last of an MLP, nor experts, whose gradients gather them themselves."""
  leaves = jax.tree_util.tree_flatten_with_path(layers)[0]
  return sum(size(w) for path, w in leaves if not {'down', 'experts'} & {getattr(key, 'key', None) for key in path})


def _scatters(axes: Axes, times: int, layers: int, whole: int) -> tuple[Collective, ...]:
  """Gradients summed over fsdp, each device keeping its share."""
  if axes.fsdp == 1:
    return ()
  return (Collective('reduce-scatter', 'fsdp', times * layers, times * whole * (axes.fsdp - 1) // axes.fsdp),)


def _sums(
  axes: Axes, micros: int, layers: int, shard: int, updates: int, beside: int, axis: Literal['data', 'expert'] = 'data'
) -> tuple[Collective, ...]:
  """Gradients summed over devices that have rows of their own and the same weights: the layers', of which a device has `shard`
  bytes, in every microbatch (`rules.in_turn`), what is `beside` them once an update."""
  n = getattr(axes, axis)
  if n == 1:
    return ()
  return (Collective('all-reduce', axis, micros * layers + updates, 2 * (micros * shard + updates * beside) * (n - 1) // n),)


def _met(config: ModelConfig, axes: Axes, out: int, back: int, rows: int) -> tuple[Collective, ...]:
  """A device's `rows` bytes of hidden states to all experts `out` times, and as many back; for each layer that has experts."""
  if axes.expert == 1 or config.experts is None:
    return ()
  L, sent = len(config.experts.layers), rows * (axes.expert - 1)
  return (
    Collective('all-gather', 'expert', L * out, L * out * sent),
    Collective('reduce-scatter', 'expert', L * back, L * back * sent),
  )


def _reductions(axes: Axes, times: int, whole: int) -> tuple[Collective, ...]:
  """Outputs of products whose inputs are split over tensor, summed."""
  if axes.tensor == 1:
    return ()
  return (Collective('all-reduce', 'tensor', times, times * 2 * whole * (axes.tensor - 1) // axes.tensor),)
