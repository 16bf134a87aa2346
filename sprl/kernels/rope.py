"""Rotary position embedding: the four variants that a config.json can name, computed as `transformers` does.

A head of width D has D/2 planes. Plane i holds the coordinates i and i + D/2 (the half-split convention) and is rotated by
`position * inv_freq[i]`. The variants differ in `inv_freq`; YaRN also scales the rotated vectors:

  default  inv_freq[i] = theta ** (-2i / D)                                                  RoFormer, arXiv 2104.09864
  linear   every frequency divided by `factor`                                               arXiv 2306.15595
  llama3   low frequencies divided by `factor`, high ones kept, a smooth step between         Llama 3.1
  yarn     as llama3, with bounds in rotations over the original context, and a scale         arXiv 2309.00071
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rope:
  """The rotary settings of a model. Comments give the names in config.json where they differ."""

  kind: Literal['default', 'linear', 'llama3', 'yarn'] = 'default'  # rope_type
  theta: float = 10_000.0  # rope_theta
  factor: float = 1.0  # length of the context over the original one
  original_positions: int = 0  # original_max_position_embeddings, llama3 and yarn
  low_freq_factor: float = 1.0  # llama3: planes with fewer rotations over the original context are slowed
  high_freq_factor: float = 4.0  # llama3: planes with more rotations are kept
  beta_fast: float = 32.0  # yarn: its two bounds, in rotations
  beta_slow: float = 1.0
  truncate: bool = True  # yarn: round the bounds outwards to whole planes
  attention_factor: float | None = None  # yarn: the scale; None: derived from factor and the two below
  mscale: float = 0.0  # yarn: 0 if config.json has none
  mscale_all_dim: float = 0.0


def frequencies(rope: Rope, head_dim: int) -> tuple[Float[np.ndarray, ' P'], float]:
  """Return the angle per position of each of the P = D/2 planes (float32, radians), and the scale of cosine and sine."""
  # Computed in float32 step by step, as the checkpoints were trained; float64 rounded once gives other numbers.
  inv_freq = np.float32(1) / np.float32(rope.theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
  match rope.kind:
    case 'default':
      return inv_freq, 1.0
    case 'linear':
      return inv_freq / np.float32(rope.factor), 1.0
    case 'llama3':
      return _llama3(rope, inv_freq), 1.0
    case 'yarn':
      kept = 1 - _ramp(*_yarn_bounds(rope, head_dim), head_dim // 2)
      return inv_freq / np.float32(rope.factor) * (1 - kept) + inv_freq * kept, _yarn_scale(rope)


class Turns(NamedTuple):
  """Cosine and sine of each token's rotation, one row for each half of a head; the first row of `sin` is negated."""

  cos: Float[Array, 'B T 2 D/2']
  sin: Float[Array, 'B T 2 D/2']


def turns(positions: Int[Array, 'B T'], head_dim: int, rope: Rope) -> Turns:
  """Return the rotations of the tokens, float32, for all layers.

  A barrier keeps XLA from recomputing the cosines in every layer.
  """
  inv_freq, scale = frequencies(rope, head_dim)
  angle = positions[..., None].astype(jnp.float32) * inv_freq
  cos, sin = scale * jnp.cos(angle), scale * jnp.sin(angle)
  return jax.lax.optimization_barrier(Turns(jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)))


def rotate(x: Float[Array, 'B T N D'], turns: Turns, scale: float = 1.0) -> Float[Array, 'B T N D']:
  """Rotate every head of `x` to its token's position and multiply it by `scale`. Computes in float32 and returns x's dtype.

  (a, b) -> (a cos - b sin, b cos + a sin), written as one expression over both halves, so that it compiles to one loop.
  """
  halves = x.reshape(*x.shape[:-1], 2, -1).astype(jnp.float32)
  turned = halves * turns.cos[:, :, None] + jnp.flip(halves, axis=-2) * turns.sin[:, :, None]
  turned = turned if scale == 1 else turned * scale
  return turned.astype(x.dtype).reshape(x.shape)


def _llama3(rope: Rope, inv_freq: np.ndarray) -> np.ndarray:
  turns = rope.original_positions * inv_freq / np.float32(2 * math.pi)  # rotations of each plane over the original context
  smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
  kept = np.clip(smooth, 0, 1).astype(np.float32)
  return (1 - kept) * inv_freq / np.float32(rope.factor) + kept * inv_freq


def _yarn_bounds(rope: Rope, head_dim: int) -> tuple[float, float]:
  """Return the planes that make beta_fast and beta_slow rotations over the original context. Earlier planes are kept."""

  def plane(turns):
    return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

  low, high = plane(rope.beta_fast), plane(rope.beta_slow)
  if rope.truncate:
    low, high = float(math.floor(low)), float(math.ceil(high))
  return max(low, 0.0), min(high, head_dim - 1.0)


def _ramp(low: float, high: float, planes: int) -> np.ndarray:
  width = high - low or 0.001  # equal bounds make a step
  return np.clip((np.arange(planes, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)


def _yarn_scale(rope: Rope) -> float:
  def magnitude(mscale: float) -> float:
    return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

  if rope.attention_factor is not None:
    return rope.attention_factor
  if rope.mscale and rope.mscale_all_dim:
    return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
  return magnitude(1.0)
