"""The scales of an FP8 cache, renewed after every weight update (fp8_rollouts 3).

    trainer        largest |Q|, |K|, |V| of each layer over the batch just trained on, with a margin; prompts before the first
    running_max    the same, over the last steps
    first_forward  over the first prompts of the rollout, with fixed headroom
    unit           1

What is found belongs to one version of the weights. It is kept as plain numbers, for a checkpoint to hold and a resumed run
to go on with.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sprl.cache.plan import CachePlan
from sprl.cache.scales import FIRST_FORWARD, Scales, from_amax, percentile, rotated_biases, with_margin
from sprl.models import transformer
from sprl.models.memory import CausalMemory, Memory
from sprl.models.transformer import Params
from sprl.parallel.rules import OnMesh, anew
from sprl.parallel.transfer import fetch
from sprl.settings import Quant

UNSEEN = 2.0  # an FP8 number's error does not depend on the scale, so that headroom costs nothing (fp8_rollouts 3)


@runtime_checkable
class PackedRows(Protocol):
  """What is looked at of a training batch (learner.packing.TrainBatch)."""

  tokens: Int[Array, 'A R T']
  positions: Int[Array, 'A R T']
  segments: Int[Array, 'A R T']
  prefixes: Int[Array, 'A R T']
  used: Int[Array, '']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CalibratingMemory:
  """A memory that notes the largest |q|, |k| and |v| of each layer on their way to another."""

  inner: Memory
  amax: Float[Array, '3 L']
  real: Float[Array, 'B T']  # 1 on tokens, 0 on padding, which does not count
  bias: tuple[Float[Array, 'B T K D'], ...] | None = None  # what is not quantised of the keys, a layer each

  @classmethod
  def around(cls, inner: Memory, layers: int, real: Float[Array, 'B T'], bias=None) -> 'CalibratingMemory':
    """The memory `inner`, watched."""
    return cls(inner, jnp.zeros((3, layers)), real, bias)

  def attend(self, layer: int, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']):
    """As the memory watched."""
    stored = k if self.bias is None else k.astype(jnp.float32) - self.bias[layer]
    real = self.real[..., None, None] > 0
    largest = [jnp.max(jnp.where(real, jnp.abs(x.astype(jnp.float32)), 0)) for x in (q, stored, v)]
    out, inner = self.inner.attend(layer, q, k, v)
    return out, dataclasses.replace(self, inner=inner, amax=self.amax.at[:, layer].max(jnp.stack(largest)))


History = tuple[Float[np.ndarray, '3 L'], ...]  # largest |Q|, |K|, |V| of each layer, of the latest look last


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'plan', 'limit'))
def amax(
  graphdef: nnx.GraphDef,
  plan: CachePlan,
  params: Params,
  tokens: Int[Array, 'A R T'],
  positions: Int[Array, 'A R T'],
  segments: Int[Array, 'A R T'],
  prefixes: Int[Array, 'A R T'],
  used: Int[Array, ''],
  limit: int = 0,
) -> Float[Array, '3 L']:
  """The largest |Q|, |K| and |V| of packed rows: the 99.9th percentile over the microbatches used (at most `limit`, 0: all)."""

  def body(i, found):
    bias = None
    if plan.key_bias:
      bias = rotated_biases(transformer.key_biases(params), positions[i], plan.head_dim, plan.rope)
    inner = CausalMemory.of(segments[i], prefixes[i], plan.kernels)
    memory = CalibratingMemory.around(inner, plan.layers, (segments[i] > 0).astype(jnp.float32), bias)
    _, memory = transformer.forward(graphdef, anew(params, i), tokens[i], positions[i], memory, plan.dtype, kernels=plan.kernels)
    return found.at[i].set(memory.amax)

  used = jnp.minimum(used, limit) if limit else used
  found = jax.lax.fori_loop(0, used, body, jnp.zeros((tokens.shape[0], 3, plan.layers)))
  found = percentile(found, used)
  # Held without their rotation, keys have coordinates up to sqrt(2) of those that are looked at here.
  return found.at[1].mul(2**0.5) if plan.settings.positions == 'in_cache' else found


def amax_of_prompts(
  graphdef: nnx.GraphDef, plan: CachePlan, params: Params, prompts: Sequence[Int[np.ndarray, ' _']], rows: int, quant: Quant
) -> Float[Array, '3 L']:
  """The same over the first `rows` of these prompts, each alone in its row.

  With room for completions, which prompts do not show, where the mode brings none of its own.
  """
  T = plan.prompt
  tokens, segments = (np.zeros((1, rows, T), np.int32) for _ in range(2))
  for row, prompt in enumerate(prompts[:rows]):
    tokens[0, row, : len(prompt)], segments[0, row, : len(prompt)] = prompt, 1
  positions = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
  arrays = map(jnp.asarray, (tokens, positions, segments, np.zeros_like(tokens)))
  found = amax(graphdef, plan, params, *arrays, jnp.int32(1))
  return found if quant.kv_scale == 'first_forward' else found * UNSEEN


def scales_of_prompts(
  graphdef: nnx.GraphDef, plan: CachePlan, params: Params, prompts: Sequence[Int[np.ndarray, ' _']], rows: int, quant: Quant
) -> Scales:
  """The scales that follow from the first `rows` of these prompts alone."""
  return scales(remembered((), amax_of_prompts(graphdef, plan, params, prompts, rows, quant), quant), quant, plan.layers)


def amax_of_batch(graphdef: nnx.GraphDef, plan: CachePlan, params: Params, batch: PackedRows, limit: int) -> Float[Array, '3 L']:
  """The same over a training batch; of its microbatches the first `limit`, 0: all."""
  return amax(graphdef, plan, params, batch.tokens, batch.positions, batch.segments, batch.prefixes, batch.used, limit)


def remembered(history: History, found: Float[Array | np.ndarray, '3 L'], quant: Quant) -> History:
  """The history with what was just found; only running_max looks further back."""
  return (*history, np.asarray(fetch(found)))[-(quant.kv_history if quant.kv_scale == 'running_max' else 1) :]


def usable(history: History) -> bool:
  """Whether scales can be made of it: False says that the weights it was found with are broken."""
  return all(bool(np.all(np.isfinite(found))) for found in history)


def scales(history: History, quant: Quant, layers: int) -> Scales:
  """The scales that follow from what was found."""
  if quant.kv_scale == 'unit' or not history:
    return from_amax(np.zeros((3, layers), np.float32), (1.0, 1.0, 1.0))
  largest = np.max(history, axis=0)
  return from_amax(largest, FIRST_FORWARD if quant.kv_scale == 'first_forward' else with_margin(quant.kv_margin))
