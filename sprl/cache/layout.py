"""The static description of a KV cache: its sizes, its number formats and its eviction settings."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from sprl.cache.eviction import eviction_window, method
from sprl.config import Cache, Kernels, Quant, SettingsError
from sprl.kernels.rope import Rope
from sprl.models.config import ModelConfig

TWICE = 8  # planes of a head whose coordinates have two FP8 codes: the least that a tensor core multiplies at a time


@dataclass(frozen=True)
class CacheLayout:
  """The static part of a KVCache. It is hashable, and a new layout compiles new programs."""

  settings: Cache
  layers: int  # L
  kv_heads: int  # K
  heads: int  # H
  head_dim: int  # D
  rope: Rope
  prompt: int  # tokens of the longest prompt
  positions: int  # tokens of the longest sequence
  dtype: Any  # compute dtype
  storage: Any  # dtype of stored keys and values
  fp8_queries: bool = False  # round queries to FP8 too
  fp8_softmax: bool = False  # round softmax weights to FP8 too
  key_bias: bool = False  # store keys so that their biases cost no precision in FP8 (sprl/cache/key_bias.py)
  record: bool = False  # record when each token is evicted
  routes: tuple[int, int, int] | None = None  # to record routes: layers with experts, experts of a token, experts of a layer
  kernels: Kernels = 'auto'  # implementation of attention, eviction and the experts' products
  sliding_windows: tuple[int | None, ...] = ()  # of each layer; None: a query sees all tokens; (): no layer has a window

  @property
  def sparse(self) -> bool:
    """Whether the cache evicts."""
    return self.settings.budget is not None

  @property
  def fp8(self) -> bool:
    """Whether keys and values are stored in FP8."""
    return self.storage == jnp.float8_e4m3fn

  @property
  def budget(self) -> int:
    """Tokens that a compression keeps. The layout must be sparse."""
    assert self.settings.budget is not None, 'a dense cache has no budget'
    return self.settings.budget

  @property
  def second_codes(self) -> int:
    """W, the coordinates of a key that have a second FP8 code."""
    return 2 * min(TWICE, self.head_dim // 2) if self.key_bias else 0

  def sliding_window(self, layer: int) -> int | None:
    """Return the newest tokens that a query of the layer sees, its own included; None: all tokens."""
    return self.sliding_windows[layer] if self.sliding_windows else None

  @property
  def forgets(self) -> bool:
    """Whether a new token may take the place of an older one: an eviction, or a full ring, cannot be undone."""
    return self.sparse or any(sliding is not None for sliding in self.sliding_windows)

  @property
  def full_layers(self) -> tuple[int, ...]:
    """The layers without a sliding window. Only they evict."""
    return tuple(layer for layer in range(self.layers) if self.sliding_window(layer) is None)

  def slots_of(self, layer: int, slots: int | None = None) -> int:
    """Return the slots of a layer, where `slots` is the number of a full layer; None: the layout's.

    A layer with a sliding window has a ring of its window (sprl/cache/ring.py). A cache with fewer slots than the layout's never
    holds more tokens than slots, so its rings need no more.
    """
    slots, sliding = slots or self.slots, self.sliding_window(layer)
    return slots if sliding is None else min(sliding, slots if slots < self.slots else self.positions)

  @property
  def slots(self) -> int:
    """S, the slots of each full layer: the longest sequence, or less if the cache evicts (docs/methods/sparse.md, eq. 5)."""
    # A compression is due `interval` steps after the previous one, and comes after the current token is written.
    return min(self.positions, self.budget + self.settings.interval) if self.sparse else self.positions

  @property
  def window(self) -> int:
    """The number of newest tokens that a compression always keeps."""
    return eviction_window(self.settings)

  @property
  def queries(self) -> int:
    """The number of newest queries that are stored for the eviction method."""
    return self.window if self.sparse and method(self.settings.method).queries else 0

  @property
  def carries(self) -> bool:
    """Whether the eviction method stores a number for each slot."""
    return self.sparse and (method(self.settings.method).carries or self.accumulates)

  @property
  def accumulates(self) -> bool:
    """Whether the stored number grows by each step's attention probabilities."""
    return self.sparse and method(self.settings.method).accumulates

  @property
  def initial_carried(self) -> float:
    """The stored number of a new token: 0 for a sum of probabilities, -1 (no history yet) otherwise."""
    return 0.0 if self.accumulates else -1.0

  def kv_bytes(self, rows: int) -> int:
    """Bytes of the keys and values of `rows` sequences, without the arrays that eviction adds."""
    slots = sum(self.slots_of(layer) for layer in range(self.layers))
    pair = 2 * self.head_dim * jnp.dtype(self.storage).itemsize + self.second_codes
    return rows * self.kv_heads * pair * slots

  def dense_bytes(self, rows: int) -> int:
    """Bytes of the keys and values of `rows` sequences in a dense cache of the compute dtype."""
    slots = sum(min(self.sliding_window(layer) or self.positions, self.positions) for layer in range(self.layers))
    return 2 * rows * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize * slots


def cache_layout(
  config: ModelConfig,
  cache: Cache,
  quant: Quant,
  prompt: int,
  completion: int,
  dtype: Any,
  record: bool = False,
  kernels: Kernels = 'auto',
  routes: bool = False,
) -> CacheLayout:
  """Return the layout of a model's cache.

  `prompt` and `completion` are the most tokens of each, `dtype` is the compute dtype. `record` stores when each token is evicted,
  `routes` stores the experts of each token.

  Raises SettingsError if the budget or the window does not fit the method or the prompts, or if no layer of the model can evict.
  """
  if cache.budget is not None:
    if config.sliding_windows and None not in config.sliding_windows:
      raise SettingsError(
        f'config.cache.budget = {cache.budget}: expected None: every layer of the model has a sliding window and evicts nothing'
      )
    cache = _fitted(cache, cache.budget, prompt, completion)
  fp8, experts = 'kv8' in quant.sampler, config.experts
  return CacheLayout(
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
    fp8_softmax=fp8 and quant.softmax == 'fp8',
    key_bias=fp8 and config.qkv_bias,
    record=record,
    kernels=kernels,
    routes=(len(experts.layers), experts.per_token, experts.count) if routes and experts else None,
    sliding_windows=config.sliding_windows,
  )


def _fitted(cache: Cache, budget: int, prompt: int, completion: int) -> Cache:
  """Return the settings with an explicit window and a budget of at most the longest sequence."""
  a = eviction_window(cache)
  sinks = cache.streaming.sinks if cache.method == 'streaming' else 0
  if budget <= a + sinks:
    kept = f'the window of {a} newest tokens' + (f' and {sinks} sinks' if sinks else '')
    raise SettingsError(f'config.cache.budget = {budget}: expected more than {a + sinks}, {kept}')
  budget = min(budget, prompt + completion)
  return replace(cache, budget=budget, window=min(a, budget - 1))


def never_evicts(cache: Cache, prompt: int, completion: int) -> str | None:
  """Return the reason why a budget never evicts anything, or None if it can.

  `prompt` and `completion` are the most tokens of each.
  """
  if cache.budget is None or cache.budget < prompt:  # a longer prompt is compressed when it is read
    return None
  steps = completion - 1  # the last token is drawn and never enters the cache
  if cache.budget >= prompt + steps:
    return f'config.cache.budget = {cache.budget} never evicts: the cache never holds more than {prompt + steps} tokens'
  last = steps // cache.interval * cache.interval
  if last == 0 or cache.budget >= prompt + last:
    return (
      f'config.cache.interval = {cache.interval} never evicts with config.cache.budget = {cache.budget}: the cache is compressed '
      f'every {cache.interval} decode steps, and none of these finds more than the budget in a completion of {completion} tokens'
    )
  return None
