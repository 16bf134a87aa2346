"""What stays the same of a cache: its sizes, its format, and the settings by which it forgets."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from sprl.cache.scores import METHODS, window
from sprl.models.config import ModelConfig
from sprl.models.rope import Rope
from sprl.settings import Cache, Quant, SettingsError


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


def cache_plan(
  config: ModelConfig, cache: Cache, quant: Quant, prompt: int, completion: int, dtype, record: bool = False
) -> CachePlan:
  """The plan for prompts and completions of at most so many tokens.

  Raises SettingsError: a budget, window or number of dense layers that the method, the prompts or the model leave no room for.
  """
  if cache.budget:
    cache = _with_room(cache, config.num_layers, prompt, completion)
  fp8 = 'kv8' in quant.sampler
  return CachePlan(
    settings=cache,
    layers=config.num_layers,
    kv_heads=config.num_kv_heads,
    heads=config.num_heads,
    head_dim=config.head_dim,
    rope=config.rope,
    prompt=prompt,
    positions=prompt + completion,
    dtype=jnp.dtype(dtype),
    storage=jnp.dtype(jnp.float8_e4m3fn) if fp8 else jnp.dtype(dtype),
    fp8_queries=quant.sampler == 'w8a8_kv8',
    key_bias=fp8 and config.qkv_bias and quant.key_bias and cache.positions == 'absolute',
    record=record,
  )


def _with_room(cache: Cache, layers: int, prompt: int, completion: int) -> Cache:
  """The settings, if prompts and model leave room for them; a budget beyond the longest sequence is no larger than it."""
  a = window(cache)
  streaming = cache.method == 'streaming'
  least = a + (cache.sinks if streaming else 0)
  if cache.budget <= least:
    kept = f'the window of {a} newest tokens' + (f' and {cache.sinks} sinks' if streaming else '')
    raise SettingsError(f'config.cache.budget = {cache.budget}: expected more than {least}, {kept}')
  if cache.window > prompt:
    raise SettingsError(f'config.cache.window = {cache.window}: expected at most {prompt}, the longest prompt bucket')
  if cache.dense_layers >= layers:
    raise SettingsError(
      f'config.cache.dense_layers = {cache.dense_layers}: expected fewer than the {layers} layers of the model; '
      'config.cache.budget = 0 evicts nothing'
    )
  budget = min(cache.budget, prompt + completion)
  return replace(cache, budget=budget, window=min(a, budget - 1))


def never_evicts(cache: Cache, prompt: int, completion: int) -> str | None:
  """Why a cache that has a budget will not evict anything; None where it may."""
  if cache.budget >= prompt + completion:
    return f'config.cache.budget = {cache.budget} never evicts: sequences have at most {prompt + completion} tokens'
  if cache.budget > 0 and cache.trigger == 'row' and cache.interval >= completion:
    return f'config.cache.interval = {cache.interval} never evicts: completions have at most {completion} tokens'
  return None
