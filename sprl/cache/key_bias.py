"""What a cache of biased keys keeps beside its FP8 codes (fp8_rollouts 3): each layer's bias, and the turns of all positions.

A key of Qwen2 at position p is R_p (W x + b). Its codes hold R_p W x, and R_p b, which is the same whatever the token, is added
back exactly. An FP8 number's error is relative to the number: a bias of 100 would drown what the token says.

What is held for all positions is one small table that layers, heads and rows share. Where keys are wanted, R_p b is made for the
slots that there are. Where attention wants q . R_p b, none is: of a plane with bias (a, b) turned by p, and a query (q1, q2),

    q1 (a cos p - b sin p) + q2 (b cos p + a sin p) = (q1 a + q2 b) cos p + (q2 a - q1 b) sin p

so that each query meets the table's rows, once it has met the bias: all of them, where the scores hold less than the slots' rows.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sprl.cache.plan import CachePlan
from sprl.kernels.rope import turns


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyBias:
  """The biases of the layers' keys, float32, and by how much each position turns them."""

  layers: tuple[Float[Array, 'K D'] | None, ...]  # None: not looked at here
  cos: Float[Array, 'P D/2']
  sin: Float[Array, 'P D/2']

  @classmethod
  def of(cls, plan: CachePlan, biases: tuple[Float[Array, ' KD'], ...]) -> 'KeyBias':
    """Of a model with these biases in its layers."""
    all_positions = turns(jnp.arange(plan.positions)[None], plan.head_dim, plan.rope)
    layers = tuple(b.astype(jnp.float32).reshape(-1, plan.head_dim) for b in biases)
    return cls(layers, all_positions.cos[0, :, 1], all_positions.sin[0, :, 1])

  @property
  def axes(self) -> 'KeyBias':
    """The names of its arrays' axes: a head's bias lies with its keys."""
    whole: Any = (None, None)
    layers: Any = tuple(None if b is None else ('kv_heads', None) for b in self.layers)
    return KeyBias(layers, whole, whole)

  def only(self, layer: int) -> 'KeyBias':
    """With the bias of one layer alone."""
    return replace(self, layers=tuple(b if i == layer else None for i, b in enumerate(self.layers)))

  def at(self, layer: int, position: Int[Array, '*B K S']) -> Float[Array, '*B K S D']:
    """R_p b of a layer's heads at these positions; those below 0 mean nothing."""
    bias, place = self.layers[layer], jnp.maximum(position, 0)
    assert bias is not None
    a, b = jnp.split(bias[:, None], 2, axis=-1)
    cos, sin = self.cos[place], self.sin[place]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  def scores(self, layer: int, q: Float[Array, 'B K G D'], position: Int[Array, 'B K S'] | None) -> Float[Array, 'B K G S']:
    """q . R_p b of each query with every slot's position p; None: with all positions. In float32 throughout, on every device."""
    bias = self.layers[layer]
    assert bias is not None
    (a, b), (q1, q2) = jnp.split(bias[:, None], 2, axis=-1), jnp.split(q.astype(jnp.float32), 2, axis=-1)
    met = jnp.concatenate([q1 * a + q2 * b, q2 * a - q1 * b], axis=-1)
    place = None if position is None else jnp.maximum(position, 0)
    if place is not None and q.shape[2] * len(self.cos) > q.shape[3] * place.shape[2]:  # the slots' rows of the table are less
      rows = jnp.concatenate([self.cos[place], self.sin[place]], axis=-1)
      return jnp.einsum('bkgd,bksd->bkgs', met, rows, precision='highest')
    everywhere = jnp.einsum('bkgd,pd->bkgp', met, jnp.concatenate([self.cos, self.sin], axis=-1), precision='highest')
    return everywhere if place is None else jnp.take_along_axis(everywhere, place[:, :, None], axis=-1)

  def of_tokens(self, layer: int, positions: Int[Array, 'B T']) -> Float[Array, 'B T K D']:
    """R_p b of tokens, all heads of which stand at one position."""
    bias = self.layers[layer]
    assert bias is not None
    return jnp.swapaxes(self.at(layer, jnp.repeat(positions[:, None], bias.shape[0], axis=1)), 1, 2)
