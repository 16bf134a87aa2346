"""LoRA (arXiv 2106.09685): the network stays as it is, and what is trained beside it are two thin matrices a linear.

    y = x W^T + alpha / rank * (x A^T) B^T,   A [rank, in] uniform in +-1 / sqrt(in),   B [out, rank] 0

The adapters are a params tree of their own, {'layers': {0: {'attention': {'q': {'a': A, 'b': B}, ...: it alone has gradients
and moments, and is what a checkpoint holds. `Base.under` joins it to the frozen weights: a params tree like any other, in which
the kernel of an adapted linear is a `LowRank` (sprl/quant/dot.py).
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.transformer import Params
from sprl.parallel.transfer import fetch
from sprl.quant.dot import LowRank
from sprl.settings import LINEARS, Lora, SettingsError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Base:
  """The frozen weights, in the compute dtype."""

  params: Params
  scale: float = field(metadata={'static': True})  # alpha / rank
  fingerprint: str = field(default='', metadata={'static': True})  # of the weights, by which adapters know theirs

  def under(self, adapters: Params) -> Params:
    """The network with these adapters on it; nothing is copied."""
    return _joined(self.params, adapters, self.scale)


def network(trained: Params, base: Base | None) -> Params:
  """The network's weights: those that are trained themselves, or the frozen ones under them."""
  return trained if base is None else base.under(trained)


def _joined(frozen: dict[Any, Any], adapters: dict[Any, Any], scale: float) -> dict[Any, Any]:
  if 'a' in adapters:
    return {**frozen, 'kernel': LowRank(frozen['kernel'], adapters['a'], adapters['b'], scale)}
  return {**frozen, **{key: _joined(frozen[key], inner, scale) for key, inner in adapters.items()}}


# --- shapes, axes, values --------------------------------------------------------------------------------------------


def abstract_adapters(config: ModelConfig, lora: Lora, dtype=jnp.float32) -> Params:
  """The adapters' shapes as a nested dict of ShapeDtypeStruct.

  Raises SettingsError where a target is no linear of every layer's attention or MLP.
  """

  def pair(kernel):
    (outputs, inputs), rank = kernel.shape, lora.rank
    return {'a': jax.ShapeDtypeStruct((rank, inputs), dtype), 'b': jax.ShapeDtypeStruct((outputs, rank), dtype)}

  return _of_targets(transformer.abstract_params(config), lora, pair)


def adapter_axes(config: ModelConfig, lora: Lora) -> Params:
  """The name of each axis of each adapter, in the same tree: the rank is an axis of its own, the others are the kernel's."""
  return _of_targets(transformer.logical_axes(config), lora, lambda axes: {'a': ('rank', axes[1]), 'b': (axes[0], 'rank')})


def init_adapters(config: ModelConfig, lora: Lora, key: Array, dtype=jnp.float32) -> Params:
  """Adapters that change nothing yet."""
  leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_adapters(config, lora, dtype))

  def init(path, leaf, key):
    bound = leaf.shape[1] ** -0.5 if path[-1].key == 'a' else 0.0
    return jax.random.uniform(key, leaf.shape, dtype, -bound, bound)

  return tree.unflatten([init(path, leaf, k) for (path, leaf), k in zip(leaves, jax.random.split(key, len(leaves)))])


def _of_targets(params: Params, lora: Lora, pair) -> Params:
  """`pair` of each targeted kernel, in the params' tree without the rest."""
  adapters = {}
  for i, layer in params['layers'].items():
    parts = {part: dict(_linears(layer[part])) for part in ('attention', 'mlp')}
    there = [name for linears in parts.values() for name in linears]
    if unknown := [name for name in lora.targets if name not in there]:
      raise SettingsError(
        f'config.lora.targets = {lora.targets}: layer {i} of this model has no linear {unknown[0]!r}; it has {", ".join(there)}'
      )
    chosen = {part: {n: pair(w) for n, w in linears.items() if n in lora.targets} for part, linears in parts.items()}
    adapters[i] = {part: linears for part, linears in chosen.items() if linears}
  return {'layers': adapters}


def _linears(part: Params) -> Iterator[tuple[str, jax.ShapeDtypeStruct | tuple[str, ...]]]:
  """(name, kernel or its axes' names) of a block's linears."""
  for name, leaf in part.items():
    kernel = leaf.get('kernel', ()) if isinstance(leaf, dict) else ()
    if name in LINEARS and len(getattr(kernel, 'shape', kernel)) == 2:
      yield name, kernel


# --- which weights they are ------------------------------------------------------------------------------------------


def fingerprint(params: Params) -> str:
  """Eight digits that other weights would not have, on any mesh and in any dtype that they may have been loaded in."""
  return f'{zlib.crc32(fetch(_sums(params)).tobytes()):08x}'


@jax.jit
def _sums(params):
  """Of each leaf, in bfloat16, the sum of its numbers' bits: whole numbers, whose order of summation does not matter."""

  def total(w):
    return jnp.sum(jax.lax.bitcast_convert_type(w.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32), dtype=jnp.uint32)

  return jnp.stack([total(w) for w in jax.tree.leaves(params)])
