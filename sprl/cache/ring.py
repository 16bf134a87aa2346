"""The ring of a layer with a sliding window: it holds the newest `window` tokens, the token at position p in slot p % window.

A query sees the newest `window` tokens, its own included, so a new token overwrites one that no later query sees. Nothing is ever
evicted. If no sequence of the cache can fill the window, the ring has fewer slots than the window and never wraps.

Worked example with a window of 4, after 6 tokens: slots 0..3 hold positions 4 5 2 3.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def positions(seen: Int[Array, ' B'], slots: int, window: int) -> Int[Array, 'B S']:
  """Return the position of each slot's token after `seen` tokens of each row; negative: the slot is empty."""
  newest = seen[:, None] - 1
  return newest - (newest - jnp.arange(slots)) % window


def write(
  held: Shaped[Array, 'B K S D'], new: Shaped[Array, 'B T K D'], seen: Int[Array, ' B'], count: Int[Array, ' B'], window: int
) -> Shaped[Array, 'B K S D']:
  """Return the ring with each row's first `count` new tokens, which follow the `seen` tokens already read.

  If there are more than `window` new tokens, only the newest are written. Padding after the first `count` tokens is not written.
  """
  B, T, S = *new.shape[:2], held.shape[2]
  token = jnp.arange(T)
  last = (token < count[:, None]) & (token >= count[:, None] - window)
  slot = jnp.where(last, (seen[:, None] + token) % window, S)  # out of bounds: dropped
  return held.at[jnp.arange(B)[:, None], :, slot].set(new.astype(held.dtype), mode='drop')
