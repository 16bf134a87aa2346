"""LoRA (arXiv 2106.09685): the network's weights are frozen, and two thin matrices are trained for each adapted linear layer.

    y = x W^T + alpha / rank * (x A^T) B^T,   A [rank, in] uniform in +-1 / sqrt(in),   B [out, rank] 0

The adapters are a separate params tree, {'layers': {0: {'attention': {'q': {'a': A, 'b': B}, ... Only they have gradients
and moments, and only they are in a checkpoint. `Base.under` joins them to the frozen weights. The result is a params tree in
which the kernel of an adapted layer is a `LowRank` (sprl/quant/dot.py).
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sprl.config import LINEARS, Lora, SettingsError
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.transformer import Params
from sprl.quant.dot import LowRank
from sprl.sharding.transfer import fetch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Base:
  """The frozen weights, in the compute dtype."""

  params: Params
  scale: float = field(metadata={'static': True})  # alpha / rank
  fingerprint: str = field(default='', metadata={'static': True})  # identifies the weights that adapters belong to

  def under(self, adapters: Params) -> Params:
    """Return the weights of the network with these adapters. Nothing is copied."""
    return _joined(self.params, adapters, self.scale)


def network(trained: Params, base: Base | None) -> Params:
  """Return the network's weights: `trained`, or with a base the frozen weights under the trained adapters."""
  return trained if base is None else base.under(trained)


def _joined(frozen: dict[Any, Any], adapters: dict[Any, Any], scale: float) -> dict[Any, Any]:
  if 'a' in adapters:
    return {**frozen, 'kernel': LowRank(frozen['kernel'], adapters['a'], adapters['b'], scale)}
  return {**frozen, **{key: _joined(frozen[key], inner, scale) for key, inner in adapters.items()}}


# --- shapes, axes, values --------------------------------------------------------------------------------------------


def abstract_adapters(config: ModelConfig, lora: Lora, dtype=jnp.float32) -> Params:
  """Return the adapters' shapes as a nested dict of ShapeDtypeStruct.

  Raises SettingsError if a layer has no linear with the name of a target.
  """

  def pair(kernel):
    (outputs, inputs), rank = kernel.shape, lora.rank
    return {'a': jax.ShapeDtypeStruct((rank, inputs), dtype), 'b': jax.ShapeDtypeStruct((outputs, rank), dtype)}

  return _of_targets(transformer.abstract_params(config), lora, pair)


def adapter_axes(config: ModelConfig, lora: Lora) -> Params:
  """Return the axis names of each adapter in the same tree. The rank's axis is named `rank`; other axes are the kernel's."""
  return _of_targets(transformer.logical_axes(config), lora, lambda axes: {'a': ('rank', axes[1]), 'b': (axes[0], 'rank')})


def init_adapters(config: ModelConfig, lora: Lora, key: Array, dtype=jnp.float32) -> Params:
  """Return new adapters. They change nothing, because B is 0."""
  leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_adapters(config, lora, dtype))

  def init(path, leaf, key):
    bound = leaf.shape[1] ** -0.5 if path[-1].key == 'a' else 0.0
    return jax.random.uniform(key, leaf.shape, dtype, -bound, bound)

  return tree.unflatten([init(path, leaf, k) for (path, leaf), k in zip(leaves, jax.random.split(key, len(leaves)))])


def _of_targets(params: Params, lora: Lora, pair) -> Params:
  """Return `pair(kernel)` of each targeted kernel, in a tree of the targeted kernels only."""
  adapters = {}
  for i, layer in params['layers'].items():
    parts = {part: dict(_linears(layer[part])) for part in ('attention', 'mlp')}
    there = [name for linears in parts.values() for name in linears]
    if unknown := [name for name in lora.targets if name not in there]:
      raise SettingsError(
        f'config.lora.targets = {lora.targets}: layer {i} has no linear {unknown[0]!r}; expected {", ".join(there)}'
      )
    chosen = {part: {n: pair(w) for n, w in linears.items() if n in lora.targets} for part, linears in parts.items()}
    adapters[i] = {part: linears for part, linears in chosen.items() if linears}
  return {'layers': adapters}


def _linears(part: Params) -> Iterator[tuple[str, jax.ShapeDtypeStruct | tuple[str, ...]]]:
  """Yield (name, kernel or its axis names) of a block's linear layers."""
  for name, leaf in part.items():
    kernel = leaf.get('kernel', ()) if isinstance(leaf, dict) else ()
    if name in LINEARS and len(getattr(kernel, 'shape', kernel)) == 2:
      yield name, kernel


# --- fingerprint -----------------------------------------------------------------------------------------------------

FORM = '2-'  # how fingerprints begin; those of another computation must begin otherwise


def fingerprint(params: Params) -> str:
  """Return FORM and eight hex digits that identify the weights, independent of the mesh and of the dtype they were loaded in."""
  return f'{FORM}{zlib.crc32(fetch(_sums(params)).tobytes()):08x}'


@jax.jit
def _sums(params):
  """Return each leaf's sum of bfloat16 bit patterns, each times a hash of its place.

  Integer sums do not depend on the order of summation. The factors make them depend on the order of the weights.
  """

  def total(w):
    bits = jax.lax.bitcast_convert_type(w.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    place = jnp.zeros(w.shape, jnp.uint32)  # in the flat array
    for axis, size in enumerate(w.shape):
      place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, w.shape, axis)
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # of MurmurHash3
      place = (place ^ (place >> 15)) * jnp.uint32(factor)
    odd = place | 1  # so that a change of one weight always changes the sum
    return jnp.sum(bits * odd, dtype=jnp.uint32)

  return jnp.stack([total(w) for w in jax.tree.leaves(params)])
