"""Scales of an FP8 cache, renewed after every weight update unless they are frozen (docs/methods/fp8.md, eq. 8).

Scales come from the largest |Q|, |K| and |V| of each layer. `quant.kv_scale` names the rule: what they are measured on, and their
headroom. Before the first rollout all rules but `unit` measure prompts. Except for `frozen` the values belong to one version of
the weights. They are host arrays, so a checkpoint can store them.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from sprl.cache.key_bias import KeyBias, reach
from sprl.cache.layout import CacheLayout
from sprl.cache.scales import FIRST_FORWARD, Scales, from_amax, percentile, unit, with_margin
from sprl.config import Quant
from sprl.models import transformer
from sprl.models.attention import Attention, PackedAttention
from sprl.models.transformer import Params
from sprl.sharding.rules import OnMesh, tie_to_iteration
from sprl.sharding.transfer import fetch

MARGIN = 1.05  # headroom above the largest value seen
UNSEEN = 2.0  # headroom for completions that were not seen; it costs no precision (docs/methods/fp8.md, cache scales)


class ScaleRule(NamedTuple):
  """How the scales of the cache are found."""

  measured_on: Literal['batch', 'next prompts', 'first prompts', 'nothing']  # of the largest values; nothing: scales are 1
  steps: int = 1  # latest steps whose largest values count
  unseen: float = UNSEEN  # factor on the largest values of prompts
  divisors: tuple[float, float, float] = with_margin(MARGIN)  # of the largest |Q|, |K| and |V|


RULES: dict[str, ScaleRule] = {
  'learner': ScaleRule('batch'),
  'running_max': ScaleRule('batch', steps=16),
  'first_forward': ScaleRule('next prompts', unseen=1.0, divisors=FIRST_FORWARD),
  'unit': ScaleRule('nothing'),
  'frozen': ScaleRule('first prompts'),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CalibratingAttention:
  """Attention that records the largest |q|, |k| and |v| of each layer and passes them on to another attention object."""

  inner: Attention
  amax: Float[Array, '3 L']
  real: Bool[Array, 'B T']  # False on padding, which does not count
  bias: KeyBias | None = None  # how the cache stores keys; None: without regard to their bias

  @classmethod
  def around(cls, inner: Attention, layers: int, real: Bool[Array, 'B T'], bias=None) -> 'CalibratingAttention':
    """Return a calibrating attention around `inner` that has seen nothing."""
    return cls(inner, jnp.zeros((3, layers)), real, bias)

  def attend(
    self,
    layer: int,
    q: Float[Array, 'B T H D'],
    k: Float[Array, 'B T K D'],
    v: Float[Array, 'B T K D'],
    sliding_window: int | None = None,
  ):
    """Return the output of the inner attention, and this object with the layer's largest values updated."""
    stored = k if self.bias is None else self.bias.centred(layer, k)
    real = self.real[..., None, None]
    largest = [jnp.max(jnp.where(real, jnp.abs(x.astype(jnp.float32)), 0)) for x in (q, stored, v)]
    out, inner = self.inner.attend(layer, q, k, v, sliding_window)
    return out, dataclasses.replace(self, inner=inner, amax=self.amax.at[:, layer].max(jnp.stack(largest)))


_reach = jax.jit(reach, static_argnums=0)
AmaxHistory = tuple[Float[np.ndarray, '3 L'], ...]  # largest |Q|, |K|, |V| of each layer, by step; the newest last


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'layout'))
def amax(
  graphdef: nnx.GraphDef,
  layout: CacheLayout,
  params: Params,
  *,
  tokens: Int[Array, 'A R T'],
  positions: Int[Array, 'A R T'],
  segments: Int[Array, 'A R T'],
  prefixes: Int[Array, 'A R T'],
  used: Int[Array, ''],
) -> Float[Array, '3 L']:
  """Return the largest |Q|, |K| and |V| of each layer: the 99.9th percentile over the microbatches used.

  The arrays are packed rows of A microbatches, of which the first `used` are filled, as in the learner's TrainBatch; segment 0 is
  padding. Keys count as the cache stores them, without the mean of their rotated bias.
  """
  bias = KeyBias.of(layout, transformer.key_biases(params)) if layout.key_bias else None

  def body(i, found):
    inner = PackedAttention.of(segments[i], prefixes[i], layout.kernels, positions[i])
    attention = CalibratingAttention.around(inner, layout.layers, segments[i] > 0, bias)
    weights = tie_to_iteration(params, i)
    out = transformer.forward(graphdef, weights, tokens[i], positions[i], attention, layout.dtype, kernels=layout.kernels)
    return found.at[i].set(out.attention.amax)

  found = jax.lax.fori_loop(0, used, body, jnp.zeros((tokens.shape[0], 3, layout.layers)))
  return percentile(found, used)


def amax_of_prompts(
  graphdef: nnx.GraphDef,
  layout: CacheLayout,
  params: Params,
  prompts: Sequence[Int[np.ndarray, ' _']],
  rows: int,
  quant: Quant,
  mesh: Mesh | None = None,
) -> Float[np.ndarray, '3 L']:
  """Return `amax` of the first `rows` prompts, each alone in its row, on the host; `mesh` holds the weights.

  Of a prompt that is too long for the cache only the first tokens count: rollouts fail for it, and leave its group out.
  The result is multiplied by `ScaleRule.unseen`, because completions may have larger values.
  `scales((amax_of_prompts(...),), quant, layout, params)` are the scales that follow from these prompts alone.
  """
  T = layout.prompt
  tokens, segments = (np.zeros((1, rows, T), np.int32) for _ in range(2))
  for row, prompt in enumerate(prompts[:rows]):
    tokens[0, row, : len(prompt)], segments[0, row, : len(prompt)] = prompt[:T], 1
  positions = np.broadcast_to(np.arange(T, dtype=np.int32), tokens.shape)
  found = amax.on(mesh)(
    graphdef, layout, params, tokens=jnp.asarray(tokens), positions=jnp.asarray(positions), segments=jnp.asarray(segments),
    prefixes=jnp.zeros(tokens.shape, jnp.int32), used=jnp.int32(1),
  )  # fmt: skip
  return np.asarray(fetch(found)) * np.float32(RULES[quant.kv_scale].unseen)


def remember(history: AmaxHistory, found: Float[Array | np.ndarray, '3 L'], quant: Quant) -> AmaxHistory:
  """Return the latest steps of the history with the newest values appended. Values of the first prompts stay for ever."""
  rule = RULES[quant.kv_scale]
  if rule.measured_on == 'first prompts' and history:
    return history
  return (*history, np.asarray(fetch(found)))[-rule.steps :]


def usable(history: AmaxHistory) -> bool:
  """Whether the history can give scales. A value that is not finite means that the weights are broken."""
  return all(bool(np.all(np.isfinite(found))) for found in history)


def scales(history: AmaxHistory, quant: Quant, layout: CacheLayout, params: Params) -> Scales:
  """Return the scales that follow from the history, for the weights `params`; all 1 for `unit` or an empty history.

  What the cache stores of a key bias may be larger at positions that were not measured, so its bound is added. The bound always
  belongs to `params`. The history does not contain it, so the scales of older checkpoints are right too.
  """
  rule = RULES[quant.kv_scale]
  if rule.measured_on == 'nothing' or not history:
    return unit(layout.layers)
  largest = np.max(history, axis=0)
  if layout.key_bias:
    largest[1] += np.asarray(fetch(_reach(layout, transformer.key_biases(params))))
  return from_amax(largest, rule.divisors)
