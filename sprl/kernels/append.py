"""Append a decode step's tokens to the cache of a layer: the arguments of the kernel, and whether it runs.

The reference is the network's plain JAX code: SelfAttention (sprl/models/transformer.py) splits the product, normalises and
rotates, and the cache (sprl/cache/attend.py) casts and writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sprl.config import Kernels
from sprl.kernels.platform import chosen
from sprl.kernels.rope import Turns


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projected:
  """The joined product of q, k and v of one new token per row, and the biases, norms and rotations to apply to it."""

  product: Float[Array, 'P B N']  # q, k and v, one after the other, in parts whose sum is the product
  bias: tuple[Float[Array, ' _'], Float[Array, ' _'], Float[Array, ' _']] | None  # of q, k and v
  norm: tuple[Float[Array, ' D'], Float[Array, ' D']] | None  # scales of the norms of each head of q and k
  turns: Turns  # rotations of the tokens
  eps: float = field(metadata={'static': True})  # of the norms
  query_scale: float = field(metadata={'static': True})  # factor of the rotated queries

  @property
  def axes(self) -> 'Projected':
    """The axis names of the arrays: only rows are split."""
    rows: Any = {'product': (None, 'rows', None), 'turns': Turns(('rows', None, None, None), ('rows', None, None, None))}  # pyright: ignore[reportArgumentType]
    whole: Any = {name: jax.tree.map(lambda _: (None,), getattr(self, name)) for name in ('bias', 'norm')}
    return Projected(**rows, **whole, eps=self.eps, query_scale=self.query_scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodeForm:
  """How an FP8 cache stores the keys and values of a layer."""

  scales: Any  # of all layers: sprl.cache.scales.Scales
  mean: Float[Array, 'K D'] | None  # the vector that is subtracted from each key (sprl/cache/key_bias.py)
  twice: Int[Array, 'K W'] | None  # the coordinates of keys with a second code: W/2 of the first half, and their partners
  layer: Int[Array, ''] | int  # number of the layer; an array in the kernel, so that all layers share a program
  queries: bool = field(metadata={'static': True})  # whether queries are rounded to FP8 too
  finer: float = field(metadata={'static': True})  # factor by which second codes are finer than first ones


def runs(product: jax.ShapeDtypeStruct, k: Any, kernels: Kernels) -> bool:
  """Return whether the kernel appends the product [B, N] of one token per row to keys [B, K, S, D].

  `kernels` can exclude the kernel but not force it, because the reference appends the shapes that the kernel does not accept.
  """

  def obstacle() -> str | None:
    from sprl.kernels import hopper_append  # imported here: Mosaic takes a second to import

    return hopper_append.obstacle(product, jax.ShapeDtypeStruct(k.shape, jnp.dtype(k.dtype)))

  return kernels != 'reference' and chosen('appended tokens', 'auto', obstacle, local=True)


def append(
  x: Projected, stored: Mapping[str, Array], slot: Int[Array, ' B'], position: Int[Array, ' B'], code: CodeForm | None
) -> tuple[Float[Array, 'B H D'], dict[str, Array]]:
  """Return the rotated queries, and the arrays of a layer with the new keys and values. The kernel must run (`runs`).

  `stored` maps names of LayerCache to arrays, which are updated in place: `k` and `v`, and, if the cache has them, `second`,
  `position` and `queries`. An FP8 cache adds the counts of clamped numbers, saturated [B, K] and saturated_queries [B, H].
  The token of row b is at position[b] of its sequence and goes to slot[b]. A row whose slot is S has no token and
  keeps its arrays.
  `code` says how an FP8 cache stores the numbers; None: the cache is not FP8.
  """
  from sprl.kernels import hopper_append

  return hopper_append.append(x, stored, slot, position, code)
