"""Bytes of one device: the train state, what an update computes beside it, the weights as served, and the rows of a rollout.

What lies in memory for long is counted array by array, from the same functions that make the arrays. What exists for a
moment only is estimated from the program's structure and held against XLA's compiler: benchmarks/plan_check.py.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sprl.cache.kv_cache import KVCache
from sprl.cache.plan import CachePlan
from sprl.kernels import attention, grouped_matmul
from sprl.kernels.attention import QUERY_CHUNK
from sprl.learner.packing import Shape
from sprl.learner.state import make_optimizer
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.moe import blocks
from sprl.parallel.rules import shardings
from sprl.planning import layout
from sprl.planning.layout import Axes, ceil, heads, nbytes, shards, size, widths
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.engine import prompt_buckets
from sprl.sampler.served import Served, linear_kernels, serve, served_axes
from sprl.settings import Cache, Quant, Run

FLOAT32 = 4  # bytes
SCORES = 3  # float32 arrays of a chunk's attention scores that the backward pass holds at one time
MLP = 6  # arrays of its width that the backward pass of an MLP holds at one time
STREAM = 2  # float32 arrays of the model's width, likewise: the stream and its gradient
INPUTS_SPLIT = ('q', 'k', 'v', 'gate', 'up')  # linears that fsdp splits along their inputs
GAPS = 1.1  # XLA's arena over what is alive in it at the worst moment: arrays of many sizes leave gaps


@dataclass(frozen=True)
class Update:
  """What an update holds on a device at its worst moment. Bytes."""

  parameters: int  # master weights
  optimiser: int  # moments; with `optimizer.offload` those that stay on the device
  host: int  # and those that lie in the host's memory beside it, and are no part of `total`
  reference: int  # the frozen model that a KL term compares with
  gradients: int  # float32: the sum over microbatches, and the vocabulary's of the microbatch at hand
  activations: int  # of a microbatch: layers' inputs, buffers, one layer's scores, and the gaps between them

  @property
  def state(self) -> int:
    """What is there between updates too."""
    return self.parameters + self.optimiser + self.reference

  @property
  def total(self) -> int:
    """All of it."""
    return self.state + self.gradients + self.activations


def update(config: ModelConfig, run: Run, shape: Shape, axes: Axes) -> Update:
  """The update of a run whose batches are packed to `shape`, split by rows."""
  held = shards(config, axes, jnp.dtype(run.model.param_dtype))
  dtype = compute_dtype(run)
  gradients = FLOAT32 * (size(held) + size(held['head' if 'head' in held else 'embed']))
  rows = ceil(shape.rows, axes.rows)
  alive = gradients + _activations(config, run, rows, shape.tokens, axes)
  alive += _turned(config, run, axes) if axes.fsdp > 1 else 0
  optimiser, host = _optimiser_bytes(config, run, held)
  return Update(
    parameters=nbytes(held),
    optimiser=optimiser,
    host=host,
    reference=nbytes(shards(config, axes, dtype)) if run.loss.kl_coef > 0 else 0,
    gradients=gradients,
    activations=round(GAPS * alive) - gradients,
  )


def _optimiser_bytes(config: ModelConfig, run: Run, held) -> tuple[int, int]:
  """(on the device, in the host's memory): moments lie where their weights do, or beside them; what has another shape is on every
  device."""
  optimizer, host = make_optimizer(run.optimizer, 1), 0
  whole = transformer.abstract_params(config, run.model.param_dtype)
  state = jax.eval_shape(optimizer.init, whole)

  def placed(leaf, w, shard):
    nonlocal host
    if leaf.shape != w.shape:
      return leaf
    moment = jax.ShapeDtypeStruct(shard.shape, leaf.dtype)
    if not run.optimizer.offload:
      return moment
    host += nbytes(moment)
    return None

  return nbytes(optax.tree_map_params(optimizer, placed, state, whole, held)), host


def _activations(config: ModelConfig, run: Run, rows: int, T: int, axes: Axes) -> int:
  """What is alive beside the gradients at the worst moment of a microbatch: the backward pass is at the head, or in a layer.

  Every layer's input is kept until it has gone through that layer, whose gradients may then wait for being added to the sum.

  At the head its part of the vocabulary is there in the compute dtype, with a chunk's logits and their gradient; fsdp splits it
  further, and has it meet the rows of all, forward and back, in float32. At a layer XLA has laid out the buffers that every
  layer's attention will write its outputs, and the gradients of keys and values, into, and the mask twice; there is the stream
  and its gradient in float32, and the most of three: one layer's scores for a chunk of queries, its MLP's products and their
  gradients, what its experts need. Attention by a library has neither buffers nor scores, and the mask in the compute dtype too.
  Weights that fsdp splits are gathered for that layer and the next.
  """
  L, E, D, b, tensor = config.num_layers, config.hidden_size, config.head_dim, compute_dtype(run).itemsize, axes.tensor
  (H, K), F, V = heads(config, tensor), widths(config, tensor), config.vocab_size // tensor
  # Elements a token, of a layer and of its MLP's width: inputs; inputs and products with weights; what autodiff keeps by itself.
  kept, of_width = {
    'layer': (E, 0), 'dots': (3 * E + H * D + 2 * K * D, 2), 'none': (4 * E + 2 * H * D + 2 * K * D, 3),
  }[run.model.remat]  # fmt: skip
  library = by_library(config, run, T, run.cache.masked_learner)
  buffers = 0 if library else 2 * b * H * D + 2 * FLOAT32 * K * D
  scores = rows * T * (b * T if library else FLOAT32 * SCORES * H * min(QUERY_CHUNK, T))
  experts = _experts(config, run, rows * T, axes, backward=True) + _expert_gradients(config, axes) if config.experts else 0
  products = rows * T * b * MLP * max(F)
  at_layer = rows * T * (L * buffers + 2 * T + STREAM * FLOAT32 * E) + max(scores, products, experts)
  at_layer += _gathered(config, run, axes) if axes.fsdp > 1 else 0
  at_head = b * ceil(V, axes.fsdp) * E + 2 * FLOAT32 * V * run.packing.score_chunk
  at_head += 2 * FLOAT32 * axes.fsdp * rows * T * E if axes.fsdp > 1 else 0
  inputs = rows * T * b * (L * kept + of_width * sum(F))
  return max(inputs + at_head, max(inputs, _waiting(config, axes)) + at_layer)


def by_library(config: ModelConfig, run: Run, T: int, masked: bool) -> bool:
  """Whether attention within rows of T tokens is a library's, where `config.model.kernels` says that kernels run; `masked`: what
  each kv head may see is its own."""
  H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
  q, k = (jax.ShapeDtypeStruct((1, T, heads, D), compute_dtype(run)) for heads in (H, K))
  allowed = jax.ShapeDtypeStruct((1, K if masked else 1, T, T), jnp.bool)
  return run.model.kernels == 'mosaic_gpu' and attention.obstacle(q, k, allowed) is None


def _experts(config: ModelConfig, run: Run, tokens: int, axes: Axes, backward: bool = False) -> int:
  """A mixture's tokens, met by those of all devices that share its experts out, and a row of some block for each of their
  assignments.

  Kernels take all blocks together: their inputs and the products of gate and up; backwards the gradients of all these. The loop
  has but what comes out, and those rows again, token by token, to be summed.
  """
  experts, dtype = config.experts, compute_dtype(run)
  assert experts is not None
  E, F = config.hidden_size, experts.width // axes.tensor
  chosen = jax.ShapeDtypeStruct((tokens * axes.expert, experts.chosen), jnp.int32)
  laid = jax.eval_shape(partial(blocks, experts=experts.count // axes.expert), chosen)
  held = laid.assignment.size * E + chosen.size * E
  if run.model.kernels == 'mosaic_gpu' and grouped_matmul.obstacle((F, E), dtype, laid.assignment.shape[1]) is None:
    held = laid.assignment.size * (2 * E + 4 * F if backward else E + 2 * F)
  return dtype.itemsize * (2 * chosen.shape[0] * E + held)


def _expert_gradients(config: ModelConfig, axes: Axes) -> int:
  """Of the mixture at hand, for all the rows that its weights are gathered for."""
  return max(map(nbytes, layout.experts(shards(config, dataclasses.replace(axes, data=1, fsdp=1), jnp.float32))))


def _gathered(config: ModelConfig, run: Run, axes: Axes) -> int:
  """The weights of two neighbouring layers, the largest, whole but for what tensor splits, in the compute dtype."""
  whole = shards(config, dataclasses.replace(axes, data=1, fsdp=1), compute_dtype(run))
  each = [nbytes(layer) for layer in transformer.layers(whole)]
  return max(map(sum, zip(each, [*each[1:], 0])))


def _turned(config: ModelConfig, run: Run, axes: Axes) -> int:
  """Master weights that fsdp splits along their inputs, turned over before the loop over microbatches, as XLA gathers along the
  first axis."""
  held = transformer.layers(shards(config, axes, jnp.dtype(run.model.param_dtype)))
  leaves = jax.tree_util.tree_flatten_with_path(held)[0]
  return nbytes([w for path, w in leaves if path[-2].key in INPUTS_SPLIT and path[-1].key == 'kernel'])


def _waiting(config: ModelConfig, axes: Axes) -> int:
  """Layers' gradients of a microbatch that are there beside the sum over microbatches: those that fsdp has scattered, which XLA
  adds later; without it those of experts, which a kernel or a loop makes. Others are added where they are made."""
  held = shards(config, axes, jnp.float32)
  return nbytes(transformer.layers(held) if axes.fsdp > 1 else layout.experts(held))


# --- rollouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollouts:
  """What sampling holds on a device. Bytes."""

  weights: int  # as served
  biases: int  # of keys, kept out of FP8
  prefill: int  # prompts that are prefilled together, and the pass that does it
  row: int  # a sequence: keys, values, what eviction keeps beside them, its tokens, its logits

  def total(self, rows: int) -> int:
    """With so many rows on the device."""
    return self.weights + self.biases + self.prefill + rows * self.row


def memory_plan(config: ModelConfig, run: Run, cache: Cache, quant: Quant) -> CachePlan:
  """The memory of a sequence. Raises SettingsError where the model or the prompts leave it no room."""
  prompt, completion = prompt_buckets(run.sampling)[-1], run.sampling.max_tokens
  return cache_plan(config, cache, quant, prompt, completion, compute_dtype(run), record=cache.masked_learner)


def kv_bytes(plan: CachePlan, H: int, K: int) -> int:
  """Bytes on a device of one sequence's memory, all that eviction keeps beside keys and values included; of so many heads."""
  local = dataclasses.replace(plan, heads=H, kv_heads=K)
  return KVCache.bytes(local, 2) - KVCache.bytes(local, 1)


def rollouts(config: ModelConfig, run: Run, cache: Cache, quant: Quant, prompts: int, axes: Axes) -> Rollouts:
  """Rollouts whose rows, and `prompts` that are prefilled together, are split over the devices."""
  plan, (H, K) = memory_plan(config, run, cache, quant), heads(config, axes.tensor)
  weights = served_bytes(config, run, quant, axes)
  biases = FLOAT32 * plan.head_dim * (plan.layers * K + plan.positions) if plan.key_bias else 0
  together = ceil(prompts, axes.rows)
  row = kv_bytes(plan, H, K)
  # The prompts' own cache has as many slots as the bucket; no layer of it is larger than the plan's.
  prefilled = together * kv_bytes(dataclasses.replace(plan, positions=plan.prompt), H, K)
  b = compute_dtype(run).itemsize
  scores = b * plan.prompt if by_library(config, run, plan.prompt, False) else FLOAT32 * 2 * H * min(QUERY_CHUNK, plan.prompt)
  wide = scores + b * (2 * config.hidden_size + 2 * max(widths(config, axes.tensor)))
  passing = together * plan.prompt * wide + (_experts(config, run, together * plan.prompt, axes) if config.experts else 0)
  drawn = FLOAT32 * (3 * run.sampling.max_tokens + config.vocab_size // axes.tensor)
  return Rollouts(weights, biases, prefilled + passing, row + drawn)


def served_bytes(config: ModelConfig, run: Run, quant: Quant, axes: Axes) -> int:
  """The weights as served, which are arrays of their own also where the master weights are of their dtype; bytes of a device."""
  whole = transformer.abstract_params(config, run.model.param_dtype)
  held = shards(config, axes, run.model.param_dtype)
  served = _served(whole, config, run, quant, axes)

  def part(w: Any, shard: Any, form: Any) -> int:
    return nbytes(form) * math.prod(shard.shape) // math.prod(w.shape)

  parts = jax.tree.map(part, whole, held, served.params)  # at each weight the tree of its served form
  return sum(jax.tree.leaves(parts)) + _probe_bytes(served, config, axes)


def probe_bytes(config: ModelConfig, run: Run, quant: Quant, axes: Axes) -> int:
  """Of the weights as served, the codes that are kept to be compared with the next: no decode step uses them."""
  whole = transformer.abstract_params(config, run.model.param_dtype)
  return _probe_bytes(_served(whole, config, run, quant, axes), config, axes)


def _served(whole: transformer.Params, config: ModelConfig, run: Run, quant: Quant, axes: Axes) -> Served:
  """The weights as served, whole; by the reference where the mesh cuts them within their blocks of scales."""
  cut = linear_kernels(config, quant, 'auto', (axes.mesh(config),)) == 'reference'
  kernels = 'reference' if cut else run.model.kernels
  return jax.eval_shape(partial(serve, dtype=compute_dtype(run), quant=quant, kernels=kernels), whole)


def _probe_bytes(served: Served, config: ModelConfig, axes: Axes) -> int:
  places = shardings(axes.mesh(config), served_axes(served, config).probe, served.probe)
  return nbytes(jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(place.shard_shape(x.shape), x.dtype), served.probe, places))


def most_rows(capacity: float, state: int, each: Rollouts) -> int:
  """Rows that fit on a device that holds `state` bytes of a learner (0: none is there); below 0 where not even the weights do."""
  return math.floor((capacity - state - each.total(0)) / each.row)


def compute_dtype(run: Run):
  """What is multiplied on an accelerator: `auto` is bfloat16."""
  return jnp.dtype('bfloat16' if run.model.dtype == 'auto' else run.model.dtype)
