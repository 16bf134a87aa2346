"""Key biases kept out of FP8 (docs/methods/fp8.md, eq. 9 and 10).

A key of Qwen2 at position p is R_p (W x + b). The cache stores R_p W x in FP8. R_p b depends on the position only and is added
back exactly. The rounding error of an FP8 number is relative to the number: with a bias of 100, it would exceed the part that
depends on the token.

All layers, heads and rows share one small table of cosines and sines by position. Where keys are needed, R_p b is computed for
the slots. Attention needs only q . R_p b. For a plane with bias (a, b) rotated by p, and a query (q1, q2),

    q1 (a cos p - b sin p) + q2 (b cos p + a sin p) = (q1 a + q2 b) cos p + (q2 a - q1 b) sin p

so each query is combined with the bias once, then multiplied with rows of the table: with all rows, or with the slots' rows if
those are fewer numbers.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sprl.cache.layout import CacheLayout
from sprl.kernels.rope import Rope, rotate, turns


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyBias:
  """The float32 biases of the layers' keys, and the rotation of each position."""

  layers: tuple[Float[Array, 'K D'] | None, ...]  # None: a layer that was left out by `only`
  cos: Float[Array, 'T D/2']
  sin: Float[Array, 'T D/2']

  @classmethod
  def of(cls, layout: CacheLayout, biases: tuple[Float[Array, ' KD'], ...]) -> 'KeyBias':
    """Return the key biases of a model, given each layer's bias vector."""
    all_positions = turns(jnp.arange(layout.positions)[None], layout.head_dim, layout.rope)
    layers = tuple(b.astype(jnp.float32).reshape(-1, layout.head_dim) for b in biases)
    return cls(layers, all_positions.cos[0, :, 1], all_positions.sin[0, :, 1])

  @property
  def axes(self) -> 'KeyBias':
    """The axis names of its arrays. A head's bias is on the devices of its keys."""
    whole: Any = (None, None)
    layers: Any = tuple(None if b is None else ('kv_heads', None) for b in self.layers)
    return KeyBias(layers, whole, whole)

  def only(self, layer: int) -> 'KeyBias':
    """Return a copy with the bias of one layer."""
    return replace(self, layers=tuple(b if i == layer else None for i, b in enumerate(self.layers)))

  def at(self, layer: int, position: Int[Array, '*B K S']) -> Float[Array, '*B K S D']:
    """Return R_p b of a layer's heads at these positions. The result at a negative position is arbitrary."""
    bias, place = self.layers[layer], jnp.maximum(position, 0)
    assert bias is not None
    a, b = jnp.split(bias[:, None], 2, axis=-1)
    cos, sin = self.cos[place], self.sin[place]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  def of_tokens(self, layer: int, positions: Int[Array, 'B T']) -> Float[Array, 'B T K D']:
    """Return R_p b of tokens, whose heads all have the same position."""
    bias = self.layers[layer]
    assert bias is not None
    return jnp.swapaxes(self.at(layer, jnp.repeat(positions[:, None], bias.shape[0], axis=1)), 1, 2)

  def scores(self, layer: int, q: Float[Array, 'B K G D'], position: Int[Array, 'B K S'] | None) -> Float[Array, 'B K G S']:
    """Return q . R_p b in float32, of each query with the position p of every slot (None: with every position in turn)."""
    bias = self.layers[layer]
    assert bias is not None
    (a, b), (q1, q2) = jnp.split(bias[:, None], 2, axis=-1), jnp.split(q.astype(jnp.float32), 2, axis=-1)
    combined = jnp.concatenate([q1 * a + q2 * b, q2 * a - q1 * b], axis=-1)
    place = None if position is None else jnp.maximum(position, 0)
    if place is not None and q.shape[2] * len(self.cos) > q.shape[3] * place.shape[2]:  # the slots' rows are fewer numbers
      rows = jnp.concatenate([self.cos[place], self.sin[place]], axis=-1)
      return jnp.einsum('bkgd,bksd->bkgs', combined, rows, precision='highest')
    table = jnp.concatenate([self.cos, self.sin], axis=-1)
    everywhere = jnp.einsum('bkgd,td->bkgt', combined, table, precision='highest')
    return everywhere if place is None else jnp.take_along_axis(everywhere, place[:, :, None], axis=-1)


def rotated_biases(biases: tuple[Float[Array, ' KD'], ...], positions: Int[Array, 'B T'], head_dim: int, rope: Rope):
  """Return R_p b of each layer's key bias for tokens at these positions, a tuple of [B, T, K, D] in float32."""
  angles = turns(positions, head_dim, rope)
  shape = (*positions.shape, -1, head_dim)
  return tuple(
    rotate(jnp.broadcast_to(b.astype(jnp.float32).reshape(-1, head_dim), (*shape[:2], b.size // head_dim, head_dim)), angles)
    for b in biases
  )
