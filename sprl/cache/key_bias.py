"""Key biases in an FP8 cache (docs/methods/fp8.md, eq. 9 and 10).

A key of Qwen2 at position p is R_p (W x + b): R_p is the rotation, b the key bias. The rounding error of an FP8 number is
proportional to the number. With a bias of 100, the error would exceed W x, the part that depends on the token. Two measures keep
the bias out of the error:

    1. The cache stores R_p (W x + b) - c, where c is the mean of R_p b over the positions. In a plane that turns slowly, R_p b
       is close to c. Attention needs no c: it adds the same number to all scores of a query, which softmax ignores.
    2. In the planes with the largest remaining biases, each coordinate has a second FP8 code for the first one's rounding error.

A plane of the rotation holds the coordinates i and i + D/2 of a head.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int, UInt8

from sprl.cache.layout import CacheLayout
from sprl.kernels.rope import Rope, frequencies
from sprl.quant import fp8

# The error of a first code is at most 16 scales: half the distance of the two largest codes. 16 times that is below fp8.MAX.
FINER = 16.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyBias:
  """The arrays that an FP8 cache derives from the key biases of each layer. A layer that `only` excludes has None."""

  mean: tuple[Float32[Array, 'K D'] | None, ...]  # c: mean of R_p b over all positions p
  twice: tuple[Int[Array, 'K W'] | None, ...]  # indices of the coordinates with a second code

  @classmethod
  def of(cls, layout: CacheLayout, biases: tuple[Float[Array, ' KD'], ...]) -> 'KeyBias':
    """Return the arrays for a model's key biases, given as one bias vector per layer."""
    cos, sin, left = mean_turn(layout.rope, layout.head_dim, layout.positions)
    means, coordinates = [], []
    for bias in biases:
      a, b = jnp.split(bias.astype(jnp.float32).reshape(-1, layout.head_dim), 2, axis=-1)
      means.append(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))
      plane = jax.lax.top_k(jnp.hypot(a, b) * left, layout.second_codes // 2)[1]
      coordinates.append(jnp.concatenate([plane, plane + layout.head_dim // 2], axis=-1))
    return cls(tuple(means), tuple(coordinates))

  @property
  def axes(self) -> 'KeyBias':
    """The axis names of the arrays. Each head's values are on the devices that hold its keys."""
    names: Any = tuple(None if mean is None else ('kv_heads', None) for mean in self.mean)
    return KeyBias(names, names)

  def only(self, layer: int) -> 'KeyBias':
    """Return a copy that keeps one layer."""
    kept = {name: tuple(x if i == layer else None for i, x in enumerate(getattr(self, name))) for name in ('mean', 'twice')}
    return replace(self, **kept)

  def centred(self, layer: int, k: Float[Array, '*B K D']) -> Float32[Array, '*B K D']:
    """Return keys minus the mean of the rotated bias."""
    mean = self.mean[layer]
    assert mean is not None
    return k.astype(jnp.float32) - mean

  def second(
    self, layer: int, k: Float32[Array, '*B K D'], codes: Float8e4m3fn[Array, '*B K D'], scale: Float[Array, '']
  ) -> Float8e4m3fn[Array, '*B K W']:
    """Return the second codes of centred keys `k`, whose first codes are `codes`.

    They encode the rounding error of the first codes in units of scale / FINER.
    """
    lost = k / scale - codes.astype(jnp.float32)
    return fp8.cast(self._picked(layer, lost), 1 / FINER)

  def queries(self, layer: int, q: Float[Array, 'B H D']) -> Float[Array, 'B H W']:
    """Return the query coordinates to multiply with second codes.

    They are divided by FINER, so that the scale of first codes applies to the products.
    """
    twice = self.twice[layer]
    assert twice is not None
    B, H, D = q.shape
    grouped = jnp.swapaxes(q.reshape(B, twice.shape[0], -1, D), 1, 2)
    return jnp.swapaxes(self._picked(layer, grouped), 1, 2).reshape(B, H, -1) * (1 / FINER)

  def keys(
    self, layer: int, k: Float8e4m3fn[Array, '*B K S D'], second: UInt8[Array, '*B K S W'], scale: Float[Array, '']
  ) -> Float32[Array, '*B K S D']:
    """Return the centred keys that the first and second codes represent."""
    twice = self.twice[layer]
    assert twice is not None
    same = twice[:, :, None] == jnp.arange(k.shape[-1])  # [K, W, D]
    index, has = jnp.argmax(same, axis=1)[:, None], jnp.any(same, axis=1)[:, None]
    finer = fp8.decast(fp8.from_bytes(second), 1 / FINER)
    index = jnp.broadcast_to(index, k.shape)
    return (k.astype(jnp.float32) + jnp.where(has, jnp.take_along_axis(finer, index, axis=-1), 0)) * scale

  def whole(self, layer: int, k: Float32[Array, '*B K S D']) -> Float32[Array, '*B K S D']:
    """Return centred keys plus the mean of the rotated bias."""
    mean = self.mean[layer]
    assert mean is not None
    return k + mean[:, None]

  def _picked(self, layer, x):
    """Return the coordinates that have a second code: [*B, K, D] -> [*B, K, W]."""
    return jnp.take_along_axis(x, jnp.broadcast_to(self.twice[layer], (*x.shape[:-1], self.twice[layer].shape[-1])), axis=-1)


def reach(layout: CacheLayout, biases: tuple[Float[Array, ' KD'], ...]) -> Float32[Array, ' L']:
  """Return, for each layer, an upper bound of the magnitude of R_p b - c at any position: twice the largest norm of a plane of b.

  A larger scale costs no precision, so the bound need not be tight.
  """
  scale = frequencies(layout.rope, layout.head_dim)[1]
  planes = [bias.astype(jnp.float32).reshape(-1, 2, layout.head_dim // 2) for bias in biases]
  return 2 * scale * jnp.stack([jnp.max(jnp.hypot(x[:, 0], x[:, 1])) for x in planes])


def mean_turn(rope: Rope, head_dim: int, positions: int) -> tuple[Float[np.ndarray, ' P'], ...]:
  """Return the mean cosine and sine of each plane over positions 0..T-1, and the share of a rotated vector that varies.

  The share is rms(R_p b - c) / rms(R_p b). It is near 0 for a plane that turns by a small angle, and near 1 for a plane that
  turns many times. With the plane's frequency f, the mean of exp(i f p) is exp(i f (T - 1) / 2) sin(T f / 2) / (T sin(f / 2)).
  """
  frequency, scale = frequencies(rope, head_dim)
  half = np.float64(frequency) / 2
  length = np.where(half == 0, 1, np.sin(positions * half) / (positions * np.sin(np.where(half == 0, 1, half))))
  middle = (positions - 1) * half
  found = scale * length * np.cos(middle), scale * length * np.sin(middle), np.sqrt(np.maximum(1 - length**2, 0))
  return tuple(x.astype(np.float32) for x in found)
