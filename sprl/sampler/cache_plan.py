"""The memory that a model's rollouts are given: its settings and its sizes, or why it cannot be."""

from dataclasses import replace

import jax.numpy as jnp

from sprl.cache.plan import CachePlan
from sprl.cache.scores import window
from sprl.models.config import ModelConfig
from sprl.settings import Cache, Kernels, Quant, SettingsError


def cache_plan(
  config: ModelConfig,
  cache: Cache,
  quant: Quant,
  prompt: int,
  completion: int,
  dtype,
  record: bool = False,
  kernels: Kernels = 'auto',
  routes: bool = False,
) -> CachePlan:
  """The plan for prompts and completions of at most so many tokens.

  Raises SettingsError: a budget, window or number of dense layers that the method, the prompts or the model leave no room for.
  """
  if cache.budget:
    cache = _with_room(cache, config.num_layers, prompt, completion)
  fp8, experts = 'kv8' in quant.sampler, config.experts
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
    kernels=kernels,
    routes=(len(experts.layers), experts.chosen, experts.count) if routes and experts else None,
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
