"""Operations, bytes of memory and bytes between devices of decoding and of an update, and a lower bound on their time.

A part takes the longer of two times: products at the device's matrix rate, and bytes at the memory bandwidth. Bytes to other
devices take their own time at the speed of the link, and a program may send them while it computes. The bound is the
longer of the sum of the parts' times and the time of all that is sent. Only a device can tell how much slower a program is.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from sprl.cache.layout import CacheLayout
from sprl.config import Run
from sprl.kernels import decode_attention
from sprl.learner.batch import Shape, Tokens
from sprl.learner.update import needs_old_logprobs
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.sequence import kv_copies
from sprl.planning.devices import Device
from sprl.planning.memory import FLOAT32, RolloutMemory, UpdateMemory, experts, kernel_attends, local_weights, mlp_widths, size
from sprl.planning.mesh_axes import NAMES, MeshAxes
from sprl.planning.programs import accelerator_dtype
from sprl.sampler.weights import multiplies_codes


@dataclass(frozen=True)
class Part:
  """Work between two points where the computation waits; or collectives of one kind along a mesh axis."""

  name: str
  flops: int = 0
  bytes: int = 0  # read and written, each array once
  fp8: int = 0  # of the flops, those of FP8 products, which GPUs do twice as fast as those of bfloat16
  sent: int = 0  # bytes to other devices
  axis: str = ''  # of the mesh, along which they are sent


@dataclass(frozen=True)
class Work:
  """Work of one device, for `tokens` tokens of all devices together."""

  tokens: int
  flops: int
  bytes: int
  sent: int
  seconds: float  # lower bound
  parts: tuple[Part, ...]

  @classmethod
  def of(cls, parts: tuple[Part, ...], tokens: int, device: Device, axes: MeshAxes, dtype: Any) -> 'Work':
    """The sum of the parts, with products in `dtype`."""
    rate = device.bfloat16 if jnp.dtype(dtype).itemsize == 2 else device.float32
    computing = sum(max((part.flops - part.fp8 / 2) / rate, part.bytes / device.bandwidth) for part in parts)
    sending = sum(part.sent / link_speed(device, axes, part.axis) for part in parts)
    flops, bytes_, sent = (sum(getattr(part, name) for part in parts) for name in ('flops', 'bytes', 'sent'))
    return cls(tokens, flops, bytes_, sent, max(computing, sending), parts)

  @property
  def tokens_per_second(self) -> float:
    """Upper bound of the throughput of all devices together."""
    return self.tokens / self.seconds


def link_speed(device: Device, axes: MeshAxes, axis: str) -> float:
  """Return the bytes/s along an axis: network speed if the axis and the axes inside it span several nodes, else link speed."""
  inside = NAMES[NAMES.index(axis) :] if axis else ()
  return device.link if math.prod(getattr(axes, name) for name in inside) <= device.node else device.network


def ring(axes: MeshAxes, kind: str, axis: str, whole: int) -> Part:
  """Collectives in rings of n devices, each of which sends (n - 1) / n of the `whole` bytes; an all-reduce sends that twice."""
  n = getattr(axes, axis)
  return Part(kind, sent=(2 if kind == 'all-reduce' else 1) * whole * (n - 1) // n, axis=axis)


def linear_weights(config: ModelConfig, axes: MeshAxes) -> int:
  """Weights of the layers' linears that a token meets on a device: its shard over tensor, and of experts the chosen ones only.

  With experts split over n devices, each device sends its tokens to the others: it multiplies as much as with all experts.
  """
  held = local_weights(config, MeshAxes(tensor=axes.tensor), jnp.float32)
  share = config.experts.per_token / config.experts.count if config.experts else 1.0
  leaves = jax.tree_util.tree_flatten_with_path(transformer.layers(held))[0]
  return round(sum(size(w) * (share if len(w.shape) == 3 else 1) for path, w in leaves if path[-1].key == 'kernel'))


def _kernel_on_codes(run: Run, format: str) -> bool:
  """Whether a GPU kernel multiplies the FP8 codes of the linears of sampler or learner, in the `format` of run.quant."""
  return 'w8a8' in format and run.model.kernels == 'mosaic_gpu' and multiplies_codes(run.quant, run.model.kernels)


# --- decoding --------------------------------------------------------------------------------------------------------


def attended(layout: CacheLayout, sliding_window: int | None = None) -> float:
  """Mean number of slots that a decode step attends to in a layer, over the longest completion of the longest prompt."""
  if sliding_window is not None:
    seen = range(layout.prompt + 1, layout.positions + 1)
    return sum(min(tokens, sliding_window) for tokens in seen) / len(seen)
  length, total = min(layout.prompt, layout.budget) if layout.sparse else layout.prompt, 0
  steps = layout.positions - layout.prompt
  for step in range(1, steps + 1):
    length += 1
    if layout.sparse and step % layout.settings.interval == 0 and length > layout.budget:
      length = layout.budget
    total += length
  return total / steps


def decode_work(
  config: ModelConfig, run: Run, layout: CacheLayout, held: RolloutMemory, rows: int, axes: MeshAxes, device: Device
) -> Work:
  """One decode step of `rows` sequences on each device, which holds the sampler weights of `held`.

  Of the experts, it reads those that a token chooses, if tokens choose independently and all experts equally often. Layers are
  gathered over fsdp, embeddings and head are not: there the rows of the batch are (`transformer.Transformer`, `decode.logits`).
  """
  dtype, E, L, t = accelerator_dtype(run), config.hidden_size, config.num_layers, axes.tensor
  (H, K), b, head = axes.heads(config), dtype.itemsize, config.vocab_size * E // t
  held_head = b * head // axes.fsdp
  table = 0 if config.tie_embeddings else held_head  # a step reads a few of its rows only
  flops = moved = 0  # of attention
  for window, count in Counter(layout.sliding_window(layer) for layer in range(L)).items():
    slots = round(attended(layout, window))
    cost = decode_attention.cost(rows, H, K, slots, config.head_dim, layout.storage, second=layout.second_codes)
    flops, moved = flops + count * cost.flops, moved + count * cost.bytes
  hidden, mixed, layers = b * rows * E, config.experts, held.weights - held.probe - table - held_head
  routed = len(mixed.layers) * hidden * axes.expert if mixed else 0
  unread = held.experts * (1 - mixed.per_token / mixed.count) ** (rows * axes.expert) if mixed else 0
  linears = 2 * linear_weights(config, axes) * rows
  parts = (
    Part(
      'products with weights',
      linears,
      round((layers - unread) * axes.fsdp),
      fp8=linears if _kernel_on_codes(run, run.quant.sampler) else 0,
    ),
    Part('attention', flops, moved),
    Part('head and draw', 2 * head * rows, held_head + 3 * FLOAT32 * rows * config.vocab_size // t),
    ring(axes, 'all-reduce', 'tensor', 2 * L * hidden),
    ring(axes, 'all-gather', 'fsdp', layers * axes.fsdp),
    ring(axes, 'all-gather', 'expert', routed),
    ring(axes, 'reduce-scatter', 'expert', routed),
  )
  return Work.of(parts, rows * axes.rows, device, axes, dtype)


# --- the update ------------------------------------------------------------------------------------------------------


def visible_keys(config: ModelConfig, run: Run, shape: Shape) -> float:
  """Return the mean number of keys that a token of a sequence sees, with prompts and completions of the greatest length."""
  P, C, m = run.sampling.max_prompt, shape.columns, _together(run, shape)
  of_prompt, of_completion = _pairs(config, P, C)
  return (of_prompt + m * of_completion) / (P + m * C)


def _pairs(config: ModelConfig, P: int, C: int) -> tuple[float, float]:
  """Return the pairs of tokens that attention compares, means over the layers: of a prompt, and of its completion."""

  def of_first(n: int) -> float:
    windows = config.sliding_windows or (None,)
    return sum(n * n / 2 if w is None or n <= w else w * n - w * w / 2 for w in windows) / len(windows)

  return of_first(P), of_first(P + C) - of_first(P)


def _together(run: Run, shape: Shape) -> int:
  """Return the completions of the greatest length that share one copy of their prompt."""
  room = (shape.tokens - run.sampling.max_prompt) // shape.columns
  return max(1, min(run.rollout.group * run.branches, room)) if run.packing.share_prefix else 1


def longest(config: ModelConfig, run: Run, shape: Shape) -> Tokens:
  """Return the tokens of a step whose prompts and completions have the greatest length. The rows may end in padding."""
  P, C, sequences = run.sampling.max_prompt, shape.columns, run.optimizer.minibatches * shape.sequences
  group = run.rollout.group * run.branches
  prompts = sequences // group * math.ceil(group / _together(run, shape))  # copies
  of_prompt, of_completion = _pairs(config, P, C)
  return Tokens(prompts * P + sequences * C, round(prompts * of_prompt + sequences * of_completion), sequences * C)


def update_work(
  config: ModelConfig, run: Run, shape: Shape, tokens: Tokens, memory: UpdateMemory, axes: MeshAxes, device: Device
) -> Work:
  """All updates of a step and the scoring before them. The kernel of attention compares the pairs of `tokens` only."""
  o, dtype, L, E, T, t = run.optimizer, accelerator_dtype(run), config.num_layers, config.hidden_size, shape.tokens, axes.tensor
  (H, K), D, b, mixed, micros = axes.heads(config), config.head_dim, dtype.itemsize, config.experts, shape.micros
  held = local_weights(config, axes, run.model.param_dtype)
  stack, head = transformer.layers(held), config.vocab_size * E // t
  N = math.ceil(shape.rows / axes.rows) * T * micros // axes.sequence  # tokens of a minibatch on a device
  scored = math.ceil(shape.sequences * shape.columns / (axes.rows * axes.sequence))

  # Counted in forward passes: an update is a forward pass, the gradients of inputs and of weights, and the recomputation.
  # Attention is two products forward and seven backward in the kernels, which compute two of them twice, or five.
  old = needs_old_logprobs(run.correction, o.updates) or run.model.router_replay == 'R2'
  updates, scorings = o.updates, o.minibatches * (old + (run.loss.kl_coef > 0))
  again = updates * (run.model.remat == 'layer')
  passes, of_head = 3 * updates + again + scorings, 4 * updates + scorings
  kernel = kernel_attends(config, run, not run.masked_learner)
  of_attention = updates * (2 + (7 if kernel else 5) + 2 * (run.model.remat != 'none')) + 2 * scorings
  rows = o.minibatches * shape.micros * shape.rows
  pairs = (tokens.pairs if kernel else rows * T * T) / (o.minibatches * axes.rows * axes.sequence)  # of a minibatch, on a device
  linears = 2 * linear_weights(config, axes) * N
  # The FP8 kernel runs in forward passes, also in those of the recomputation.
  codes = _kernel_on_codes(run, run.quant.learner)
  F = sum(mlp_widths(config, t)) + (len(mixed.layers) * mixed.per_token * mixed.width // t if mixed else 0)
  width = L * (4 * E + 2 * H * D + 2 * K * D) + 3 * F  # elements that a token's products read and write, in all layers
  summed, stepped = 2 * micros * FLOAT32 * size(held), 2 * (memory.parameters + memory.optimiser + memory.host)

  # The recomputation stops before the last product of each MLP; experts gather their weights themselves. Devices with the same
  # weights sum the layers' gradients in every microbatch (`rules.prefetch_barrier`), and the vocabulary's once.
  layers, vocabulary = size(stack), size(held) - size(stack)  # elements on a device
  leaves = jax.tree_util.tree_flatten_with_path(stack)[0]
  repeated = sum(size(w) for path, w in leaves if not {'down', 'experts'} & {getattr(key, 'key', None) for key in path})
  forward, backward = (updates + scorings) * layers + again * repeated, updates * layers  # the gradients of weights read none
  gathered = forward + backward
  read = (1 if codes else b) * forward + b * backward  # at least: without copies they are read in their own dtype
  own = layers - size(experts(held))  # experts have no copies along their axis
  hidden = b * N * E
  routed = len(mixed.layers) * hidden * axes.expert if mixed else 0
  summed_copies = updates * FLOAT32 * (micros * layers + vocabulary)
  # Queries, keys and values to whole rows, and outputs back (sprl/models/sequence.py); hidden states to the scored positions.
  exchanged = L * N * b * D * 2 * (H + K * kv_copies(K, axes.sequence))
  exchanges = 2 * updates + updates * (run.model.remat != 'none') + scorings
  parts = (
    Part(
      'products with weights',
      linears * passes,
      micros * read * axes.fsdp + passes * N * b * width,
      fp8=linears * (passes - 2 * updates) if codes else 0,
    ),
    Part('attention', round(2 * L * pairs * H * D * of_attention), passes * L * N * b * 2 * (H + K) * D),
    Part('head', 2 * head * scored * of_head, of_head * b * (micros * head + scored * E)),
    Part('gradients and optimiser', 0, updates * (summed + stepped)),
    ring(axes, 'all-gather', 'fsdp', micros * b * gathered * axes.fsdp),
    ring(axes, 'reduce-scatter', 'fsdp', updates * micros * FLOAT32 * layers * axes.fsdp),
    ring(axes, 'all-reduce', 'data', summed_copies),
    ring(axes, 'all-reduce', 'sequence', summed_copies),
    ring(axes, 'all-to-all', 'sequence', exchanges * exchanged),
    ring(axes, 'all-gather', 'sequence', (updates + scorings) * hidden * axes.sequence),
    ring(axes, 'reduce-scatter', 'sequence', updates * hidden * axes.sequence),
    ring(axes, 'all-reduce', 'expert', updates * FLOAT32 * (micros * own + vocabulary)),
    ring(axes, 'all-reduce', 'tensor', L * (4 * updates + again + 2 * scorings) * hidden),
    ring(axes, 'all-gather', 'expert', (3 * updates + scorings) * routed),  # tokens; backward they go with their gradients
    ring(axes, 'reduce-scatter', 'expert', (2 * updates + scorings) * routed),
  )
  return Work.of(parts, axes.rows * axes.sequence * N * o.minibatches, device, axes, dtype)
