"""Join linears that read the same activations into one weight: one matrix product instead of two or three.

    q [N1, M], k [N2, M], v [N3, M]  ->  [N1 + N2 + N3, M]        x is read and quantised once

The sampler's weights are joined once per sync (sprl/sampler/weights.py). The learner, adapters and checkpoints keep them
separate. A joined weight takes the place of its first linear, and `Within` takes the place of each other linear. The same network
code runs with joined and with separate weights.

A mesh cuts the rows of a joined weight into equal parts. Each part must contain its share of every linear, so the rows are stored
part by part. Worked example with 2 parts, four rows of gate and four rows of up:

    g0 g1 u0 u1 | g2 g3 u2 u3
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from sprl.quant import fp8
from sprl.quant.block import FORMATS, BlockScaled, Emulated
from sprl.sharding.rules import shares

Params = dict[Any, Any]  # nested dict of weights
# The linears that are joined, and the axis name of each one's rows.
GROUPS = {'q': 'heads', 'k': 'kv_heads', 'v': 'kv_heads'}, {'gate': 'mlp', 'up': 'mlp'}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Joined:
  """The weights of several linears as one weight."""

  weight: Float[Array, '*X N M'] | BlockScaled | Emulated  # rows part by part
  sizes: tuple[int, ...] = field(metadata={'static': True})  # rows of each linear
  parts: int = field(metadata={'static': True})

  def split(self, y: Float[Array, '*B N']) -> list[Float[Array, '*B _']]:
    """Return each linear's part of y, a product with the whole weight or with one device's rows of it."""
    return self._cut(y, -1)

  def separated(self) -> list[Any]:
    """Return the weights of the linears, each in its original form."""

    def rows(x):
      codes = x.dtype == jnp.float8_e4m3fn
      found = self._cut(fp8.to_bytes(x) if codes else x, -2)
      return [fp8.from_bytes(each) for each in found] if codes else found

    leaves, form = jax.tree.flatten(self.weight)
    return [form.unflatten(of_linear) for of_linear in zip(*map(rows, leaves), strict=True)]

  def _cut(self, x, axis: int):
    """Split an axis in the order of the weight's rows into one piece per linear.

    The axis may be shorter than the rows: the rows of one device, or one number for each block of rows.
    """
    before, after = x.shape[:axis], x.shape[x.ndim + axis + 1 :]
    total = sum(self.sizes)
    parts = self.parts if axis == -2 else self.parts * x.shape[axis] // total
    rows = x.shape[axis] // parts
    ends = np.cumsum([size * rows // total for size in self.sizes])
    pieces = jnp.split(x.reshape(*before, parts, rows, *after), ends[:-1], axis=len(before) + 1)
    return [piece.reshape(*before, -1, *after) for piece in pieces]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Within:
  """Takes the place of a weight that is part of a Joined weight."""


def join(weights: Sequence[Any], parts: int = 1) -> Joined:
  """Return the weights of several linears as one weight.

  All must have the same form: arrays, or FP8 of one format. No FP8 block may extend over two linears or two parts.
  """

  def rows(*arrays):
    codes = arrays[0].dtype == jnp.float8_e4m3fn
    moved = [fp8.to_bytes(x) if codes else x for x in arrays]
    by_part = [x.reshape(*x.shape[:-2], parts, -1, x.shape[-1]) for x in moved]
    together = jnp.concatenate(by_part, axis=-2).reshape(*arrays[0].shape[:-2], -1, arrays[0].shape[-1])
    return fp8.from_bytes(together) if codes else together

  return Joined(jax.tree.map(rows, *weights), tuple(_rows(w) for w in weights), parts)


def join_all(params: Params, meshes: Iterable[Mesh | AbstractMesh]) -> Params:
  """Return the network's weights, with those linears joined that read the same activations.

  `meshes` are all meshes that multiply these weights. Linears stay separate if they have different formats, if they would share
  FP8 blocks, or if the meshes cut them differently.
  """

  meshes = tuple(meshes)

  def of(names, weights):
    parts = _parts(weights, tuple(names.values()), meshes)
    return weights if parts is None else [join(weights, parts), *[Within()] * (len(weights) - 1)]

  return _in_groups(params, of)


def separated(params: Params) -> Params:
  """Return the network's weights with every joined weight split into its linears."""
  return _in_groups(params, lambda names, weights: weights[0].separated() if isinstance(weights[0], Joined) else weights)


def _parts(weights: list[Any], axes: tuple[str, ...], meshes: tuple[Mesh | AbstractMesh, ...]) -> int | None:
  """Return the number of parts into which every mesh cuts each weight, or None if the weights cannot be joined."""
  cuts = {shares(axis, mesh) for axis in axes for mesh in meshes} or {1}
  if len(cuts) > 1 or len({_form(w) for w in weights}) > 1:
    return None
  parts = cuts.pop()
  block = FORMATS[weights[0].format].rows if isinstance(weights[0], BlockScaled) else 1
  return parts if all(_rows(w) % (parts * block) == 0 for w in weights) else None


def _form(w: Any) -> Any:
  """Return a value that is equal for weights of the same format: their dtypes and static fields."""
  return jax.tree.structure(w), tuple(x.dtype for x in jax.tree.leaves(w))


def _rows(w: Any) -> int:
  return jax.tree.leaves(w)[0].shape[-2]


def _in_groups(params: Params, change: Callable[[dict[str, str], list[Any]], Sequence[Any]]) -> Params:
  """Return the weights with `change` applied to the kernels of each group of linears."""
  params = {name: _in_groups(node, change) if isinstance(node, dict) else node for name, node in params.items()}
  for names in GROUPS:
    if names.keys() <= params.keys():
      kernels = change(names, [params[name]['kernel'] for name in names])
      params |= {name: {**params[name], 'kernel': kernel} for name, kernel in zip(names, kernels, strict=True)}
  return params
