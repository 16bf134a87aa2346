"""Bytes on one device: train state, update, sampler weights, and the sequences of a rollout.

Arrays that stay in memory are counted one by one, from the functions that describe them to JAX. Arrays that exist for a moment
are estimated from the structure of the program; `benchmarks/plan_check.py` compares the estimate with XLA's compiler.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sprl.cache.kv_cache import KVCache
from sprl.cache.layout import CacheLayout, cache_layout
from sprl.config import Cache, Quant, Run
from sprl.kernels import grouped_matmul, hopper_packed_attention
from sprl.kernels.attention import QUERY_CHUNK
from sprl.kernels.linear_logprob import positions_at_once
from sprl.kernels.support import filtered, record_format
from sprl.learner.batch import Shape
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.moe import blocks
from sprl.models.routing import route_dtype
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.programs import abstract_copies, abstract_sampler_weights, abstract_weights, accelerator_dtype, train_state
from sprl.sampler.buckets import prompt_buckets
from sprl.sampler.decode import no_routes
from sprl.sampler.weights import SamplerWeights
from sprl.sharding.transfer import HOST

FLOAT32 = INT32 = 4  # bytes
# Arrays alive at once in the backward pass of a layer, found in XLA's live ranges of updates compiled for H200s.
MLP = 5  # as wide as the MLP
STREAM = 8  # as wide as the model
SCORES = 3  # float32 scores of reference attention
OVERLAP = 1.75  # on a mesh: the weight gradients of the layer above may still wait for their products
MARGIN = 1.05  # XLA's temporary memory over the bytes alive in it: arrays of many sizes leave gaps
INPUTS_SPLIT = ('q', 'k', 'v', 'gate', 'up')  # linears that fsdp splits along their inputs


def size(tree: Any) -> int:
  """Number of elements in the arrays of a tree."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def nbytes(tree: Any) -> int:
  """Bytes of the arrays of a tree."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def local[T](tree: T) -> T:
  """Return the part of each array that one device holds. Leaves are ShapeDtypeStruct with shardings."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree)


def local_weights(config: ModelConfig, axes: MeshAxes, dtype: Any) -> transformer.Params:
  """The part of the network's weights that one device holds."""
  return local(abstract_weights(config, jnp.dtype(dtype), axes.mesh(config)))


def mlp_widths(config: ModelConfig, tensor: int) -> list[int]:
  """Width on one device of each layer's dense MLP, or of its shared expert; 0 for a layer with neither."""
  mixed = config.experts
  return [
    (mixed.shared_width if mixed and layer in mixed.layers else config.intermediate_size) // tensor
    for layer in range(config.num_layers)
  ]


def experts(params: transformer.Params) -> list[Any]:
  """The experts of each layer; an empty dict for a layer without."""
  return [layer['mlp'].get('experts', {}) for layer in transformer.layers(params)]


# --- the update ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateMemory:
  """Bytes that an update holds on a device at its peak."""

  parameters: int  # master weights
  optimiser: int  # moments on the device
  host: int  # moments in the host's memory (`optimizer.offload`); not part of `total`
  reference: int  # the frozen model of a KL term
  copies: int  # of the weights that products multiply: in FP8 (`quant.learner`), or in the compute dtype
  gradients: int  # float32: the sum over microbatches, and the vocabulary's of the current microbatch
  activations: int  # estimate of all other temporary arrays, and what the batches record of each token

  @property
  def state(self) -> int:
    """Bytes held between updates too."""
    return self.parameters + self.optimiser + self.reference

  @property
  def total(self) -> int:
    """Bytes at the peak."""
    return self.state + self.copies + self.gradients + self.activations


def update_memory(config: ModelConfig, run: Run, shape: Shape, axes: MeshAxes) -> UpdateMemory:
  """Memory of the update of a minibatch of this shape, whose rows, and tokens of a row, are split over the devices."""
  state = train_state(config, run, axes.mesh(config))
  held = local(state.params)
  host = nbytes(local([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.sharding.memory_kind == HOST]))
  optimiser = nbytes(local(state.opt_state)) - host
  reference = nbytes(local_weights(config, axes, accelerator_dtype(run))) if run.loss.kl_coef > 0 else 0
  gradients = FLOAT32 * (size(held) + size(held['head' if 'head' in held else 'embed']))
  copies = nbytes(local(abstract_copies(config, run, axes.mesh(config), shape.micros)))
  alive = gradients + _activations(config, run, held, math.ceil(shape.rows / axes.rows), shape.tokens, axes, shape.micros > 1)
  activations = round(MARGIN * alive) - gradients
  tokens = run.optimizer.minibatches * shape.micros * math.ceil(shape.rows / axes.rows) * shape.tokens  # of all batches of a step
  activations += tokens * _recorded(config, run, axes)
  return UpdateMemory(nbytes(held), optimiser, host, reference, copies, gradients, activations)


def _recorded(config: ModelConfig, run: Run, axes: MeshAxes) -> int:
  """Bytes that a batch records of a token: what the rollouts' filters kept, the experts to replay, and its evictions."""
  form, mixed = record_format(run.sampling, config.vocab_size), config.experts
  recorded = 0 if form is None else form.bytes // axes.sequence
  if mixed and run.model.router_replay != 'none':
    recorded += len(mixed.layers) * mixed.per_token * route_dtype(mixed.count).itemsize
  if run.masked_learner and run.cache.budget is not None:
    recorded += INT32 * config.num_layers * axes.heads(config)[1]
  return recorded


def _activations(config: ModelConfig, run: Run, held: transformer.Params, rows: int, T: int, axes: MeshAxes, copied: bool) -> int:
  """Bytes alive beside the gradients at the peak of a microbatch, in the backward pass of the head or of a layer.

  1. Throughout: the saved inputs of all layers, which gradients that wait to be added to the sum gradually replace. With fsdp
     the gradients of all layers wait, and the weights that are gathered are also held transposed, because XLA gathers along the
     first axis: the copies in the compute dtype (`copied`), or the master weights. Without it only the experts' gradients wait.
  2. In the head: its shard in the compute dtype if the update has no copy of it, the logits of a chunk in float32, their
     gradients in the compute dtype, and the mask of the tokens that filters kept. With fsdp also the hidden states of all devices
     that share the vocabulary, and their gradients, in float32. With a sequence axis also the hidden states of whole rows, and
     their gradients.
  3. In a layer: the stream, and the largest of the MLP's products, the experts, and the scores of a chunk of queries; on a mesh
     the arrays of OVERLAP layers, or of one layer with the gathered weights of two. The kernel of attention has no scores; the
     reference also has output buffers for every layer.
  """
  L, E, D, b, N = (
    config.num_layers,
    config.hidden_size,
    config.head_dim,
    accelerator_dtype(run).itemsize,
    rows * T // axes.sequence,
  )
  (H, K), F, V = axes.heads(config), mlp_widths(config, axes.tensor), config.vocab_size // axes.tensor
  # Saved for each token: elements of each layer, and multiples of its MLP's width; and the MLP's products that are not saved.
  saved, of_width, products = {
    'layer': (E, 0, MLP), 'dots': (3 * E + H * D + 2 * K * D, 2, 1), 'none': (4 * E + 2 * H * D + 2 * K * D, 3, 1),
  }[run.model.remat]  # fmt: skip
  inputs = b * N * (L * saved + of_width * sum(F))
  waiting, transposed, beside = FLOAT32 * size(experts(held)), 0, 0
  chunk = min(run.packing.score_chunk or positions_at_once(config.vocab_size, accelerator=True), N)
  head = b * math.ceil(V / axes.fsdp) * E * (not copied) + (FLOAT32 + b) * V * chunk
  head += config.vocab_size * chunk * filtered(run.sampling, config.vocab_size)  # one byte, before it is split
  head += 2 * b * rows * T * E * (axes.sequence > 1)
  layer, gathered = b * N * products * max(F), 0
  if not kernel_attends(config, run, not run.masked_learner):
    layer, beside = max(layer, FLOAT32 * N * SCORES * H * min(QUERY_CHUNK, T)), N * L * (2 * b * H * D + 2 * FLOAT32 * K * D)
  whole = local_weights(config, dataclasses.replace(axes, data=1, fsdp=1), accelerator_dtype(run))
  if config.experts:
    layer, beside = max(layer, _experts(config, run, N, axes, backward=True)), beside + FLOAT32 * max(map(size, experts(whole)))
  if axes.fsdp > 1:
    stack = transformer.layers(held)
    leaves = jax.tree_util.tree_flatten_with_path(stack)[0]
    waiting = FLOAT32 * size(stack)
    turned = [w for path, w in leaves if path[-2].key in INPUTS_SPLIT and path[-1].key == 'kernel']
    transposed = b * size(turned) if copied else nbytes(turned)
    head += 2 * FLOAT32 * axes.fsdp * N * E
    each = [nbytes(weights) for weights in transformer.layers(whole)]
    gathered = max(a + b for a, b in zip(each, [*each[1:], 0]))
  layer += b * N * STREAM * E
  layer = max(layer * (OVERLAP if axes.devices > 1 else 1), layer + gathered) + beside
  return transposed + max(inputs, waiting) + max(head, round(layer))


def kernel_attends(config: ModelConfig, run: Run, plain: bool) -> bool:
  """Return whether the kernel computes attention within rows.

  `plain`: neither evictions of each kv head, nor softmax weights in FP8, nor a cache with a ring for a sliding window. The kernel
  has none of these.
  """
  q, k = (
    jax.ShapeDtypeStruct((1, 1, n, config.head_dim), accelerator_dtype(run)) for n in (config.num_heads, config.num_kv_heads)
  )
  return run.model.kernels == 'mosaic_gpu' and plain and hopper_packed_attention.obstacle(q, k) is None


def _experts(config: ModelConfig, run: Run, tokens: int, axes: MeshAxes, backward: bool = False) -> int:
  """Bytes that one mixture layer needs: the tokens of all devices that share its experts, and a row for each assignment.

  Kernels hold all blocks at once: inputs, the products of gate and up, and in the backward pass the gradients of these. The
  loop over blocks holds the outputs of all blocks, and again in token order, to sum them.
  """
  mixed, dtype = config.experts, accelerator_dtype(run)
  assert mixed is not None
  E, F = config.hidden_size, mixed.width // axes.tensor
  chosen = jax.ShapeDtypeStruct((tokens * axes.expert, mixed.per_token), jnp.int32)
  laid = jax.eval_shape(partial(blocks, experts=mixed.count // axes.expert), chosen).assignment
  rows = laid.size * E + chosen.size * E
  if run.model.kernels == 'mosaic_gpu' and grouped_matmul.obstacle((F, E), dtype, laid.shape[1]) is None:
    rows = laid.size * (2 * E + 4 * F if backward else E + 2 * F)
  return dtype.itemsize * (2 * chosen.shape[0] * E + rows)


# --- rollouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutMemory:
  """Bytes that sampling holds on a device."""

  weights: int  # sampler weights, and the biases of keys that an FP8 cache keeps apart
  experts: int  # of these bytes, those of experts
  probe: int  # of them, FP8 codes that are kept to count how many an update changes; no decode step reads them
  prefill: int  # the prompts that are prefilled together, and the estimate of their forward pass
  kept: int  # caches kept between the turns of conversations, if sampling.kept_caches says how many
  row: int  # one sequence: keys, values, records, tokens, logits; and a kept cache if each row has one

  def total(self, rows: int) -> int:
    """Bytes with `rows` sequences on the device."""
    return self.weights + self.prefill + self.kept + rows * self.row


def rollout_cache(config: ModelConfig, run: Run, cache: Cache, quant: Quant) -> CacheLayout:
  """The cache of a sequence. Raises SettingsError if the model or the prompts leave it no room."""
  prompt, completion = prompt_buckets(run.sampling)[-1], run.sampling.max_tokens
  record, routes = run.masked_learner and cache.budget is not None, run.model.router_replay == 'R3'
  return cache_layout(config, cache, quant, prompt, completion, accelerator_dtype(run), record=record, routes=routes)


def kv_bytes(layout: CacheLayout) -> int:
  """Bytes of one sequence in the cache, including what the eviction method stores."""
  return KVCache.bytes(layout, 2) - KVCache.bytes(layout, 1)


def sampler_weight_bytes(config: ModelConfig, run: Run, quant: Quant, axes: MeshAxes) -> int:
  """Bytes of the sampler weights, which are a copy even if they have the dtype of the master weights."""
  return nbytes(_sampler_weights(config, run, quant, axes))


def _sampler_weights(config: ModelConfig, run: Run, quant: Quant, axes: MeshAxes) -> SamplerWeights:
  return local(abstract_sampler_weights(config, run, quant, axes.mesh(config)))


def rollout_memory(config: ModelConfig, run: Run, cache: Cache, quant: Quant, prompts: int, axes: MeshAxes) -> RolloutMemory:
  """Memory of rollouts whose sequences, and the `prompts` that are prefilled together, are split over the devices."""
  layout, (H, K) = rollout_cache(config, run, cache, quant), axes.heads(config)
  part = dataclasses.replace(layout, heads=H, kv_heads=K)
  routes = nbytes(jax.eval_shape(lambda: no_routes(layout, 1)))  # of a sequence
  P, b, together = layout.prompt, accelerator_dtype(run).itemsize, math.ceil(prompts / axes.rows)
  # The prompts' own cache has as many slots as the bucket, but no more than the layout's. Before a layer is compressed, it holds
  # the whole prompt.
  prefilled = together * (kv_bytes(dataclasses.replace(part, positions=P)) + routes)
  if layout.sparse and layout.budget < P:
    dense = dataclasses.replace(cache, budget=None)
    whole_layer = dataclasses.replace(part, positions=P, layers=1, settings=dense, sliding_windows=())
    prefilled += together * kv_bytes(whole_layer)
  plain = not layout.fp8_softmax and not layout.accumulates and not any(layout.sliding_windows)
  scores = 0 if kernel_attends(config, run, plain) else FLOAT32 * 2 * H * min(QUERY_CHUNK, P)
  passing = together * P * (scores + 2 * b * (config.hidden_size + max(mlp_widths(config, axes.tensor))))
  passing += _experts(config, run, together * P, axes) if config.experts else 0
  of_sampler = _sampler_weights(config, run, quant, axes)
  weights = nbytes(of_sampler)
  weights += FLOAT32 * layout.layers * K * (layout.head_dim + layout.second_codes) if layout.key_bias else 0
  drawn = FLOAT32 * (3 * run.sampling.max_tokens + config.vocab_size // axes.tensor)
  if (form := record_format(run.sampling, config.vocab_size)) is not None:
    sorting = 2 * FLOAT32 * config.vocab_size // axes.tensor  # the logits of a row and their tokens, sorted
    drawn += form.bytes * (run.sampling.chunk + 1) + sorting
  row, kept = kv_bytes(part) + routes, 0
  if run.task.kind in ('environment', 'agent'):
    prefilled = max(prefilled, together * row)  # new tokens are read behind copies of kept caches
    asked = run.sampling.kept_caches
    row, kept = (2 * row, 0) if asked is None else (row, math.ceil(asked * run.devices.engines / axes.rows) * row)
  probe = nbytes(of_sampler.probe)
  return RolloutMemory(weights, nbytes(experts(of_sampler.params)), probe, prefilled + passing, kept, row=row + drawn)


def caches_kept(config: ModelConfig, run: Run, axes: MeshAxes) -> int:
  """Bytes of the sequences that stay on a device of the rollouts during an update: with `rollout.sync = keep`, all of them."""
  if run.rollout.sync != 'keep' or run.rollout.async_ratio == 0:
    return 0
  held = rollout_memory(config, run, run.cache, run.quant, run.prefill * run.devices.engines, axes)
  return held.kept + math.ceil(run.rows / axes.rows) * held.row
