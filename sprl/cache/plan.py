"""What stays the same of a cache: its sizes, its format, and the settings by which it forgets."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from sprl.cache.scores import METHODS, window
from sprl.kernels.rope import Rope
from sprl.settings import Cache, Kernels


@dataclass(frozen=True)
class CachePlan:
  """The static part of a KVCache; hashable, so that a new plan is a new compilation and nothing else is."""

  settings: Cache
  layers: int  # L
  kv_heads: int  # K
  heads: int  # H
  head_dim: int  # D
  rope: Rope
  prompt: int  # P: tokens of the longest prompt
  positions: int  # tokens of the longest sequence
  dtype: Any  # what is computed in
  storage: Any  # what keys and values are held in
  fp8_queries: bool = False  # queries go through FP8 too
  key_bias: bool = False  # keys' biases are kept out of FP8
  record: bool = False  # write down when each token is evicted
  routes: tuple[int, int, int] | None = None  # write down routes: (layers with experts, experts a token goes through, experts)
  kernels: Kernels = 'auto'  # what attends, and multiplies by experts

  @property
  def sparse(self) -> bool:
    """Whether anything can be evicted."""
    return self.settings.budget > 0

  @property
  def fp8(self) -> bool:
    """Whether keys and values are held in FP8."""
    return self.storage == jnp.float8_e4m3fn

  def evicts(self, layer: int) -> bool:
    """Whether this layer forgets."""
    return self.sparse and layer >= self.settings.dense_layers

  def slots(self, layer: int) -> int:
    """S of a layer: the whole sequence, or max(prompt, budget) + interval where that is less (sparse_rollouts 4)."""
    if not self.evicts(layer):
      return self.positions
    return min(self.positions, max(self.prompt, self.settings.budget) + self.settings.interval)

  @property
  def window(self) -> int:
    """The newest tokens that are always kept."""
    return window(self.settings)

  @property
  def queries(self) -> int:
    """How many of the newest queries are remembered."""
    return self.window if self.sparse and METHODS[self.settings.method].queries else 0

  @property
  def carries(self) -> bool:
    """Whether the method keeps a number a slot."""
    return self.sparse and METHODS[self.settings.method].carries

  @property
  def accumulates(self) -> bool:
    """Whether that number grows by every step's attention."""
    return self.sparse and METHODS[self.settings.method].accumulates

  @property
  def initial(self) -> float:
    """A new token's number: 0 where attention is summed up, -1 (no history yet) where importances are."""
    return 0.0 if self.accumulates else -1.0

  def bytes(self, rows: int) -> int:
    """What the keys and values of so many rows take on the devices, without what eviction keeps beside them."""
    itemsize = jnp.dtype(self.storage).itemsize
    return 2 * rows * self.kv_heads * self.head_dim * itemsize * sum(self.slots(layer) for layer in range(self.layers))

  def dense_bytes(self, rows: int) -> int:
    """What they would take in the compute dtype, were nothing ever forgotten."""
    return 2 * rows * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize * self.positions * self.layers


def never_evicts(cache: Cache, prompt: int, completion: int) -> str | None:
  """Why a cache that has a budget will not evict anything; None where it may."""
  if not cache.budget:
    return None
  steps = completion - 1  # that take a token in: of the last one only its draw is wanted
  if cache.budget >= prompt + steps:
    return f'config.cache.budget = {cache.budget} never evicts: at most {prompt + steps} tokens are ever in the cache'
  last = steps // cache.interval * cache.interval
  if cache.trigger_scope == 'row' and (last == 0 or cache.budget >= prompt + last):
    return (
      f'config.cache.interval = {cache.interval} never evicts with config.cache.budget = {cache.budget}: completions of at most '
      f'{completion} tokens are looked at after {last} steps for the last time'
    )
  return None
