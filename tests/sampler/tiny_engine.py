"""One small engine for all tests of engines, so that each program compiles once."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import small

from sprl.cache.layout import cache_layout
from sprl.cache.scales import from_amax, with_margin
from sprl.config import UNQUANTISED, Cache, Sampling
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.types import Request

C = 24  # tokens of a completion
ROWS = 6
SAMPLING = Sampling(temperature=0.9, max_tokens=C, max_prompt=12, prompt_buckets=(12,), chunk=4)


def text(ids):
  return ''.join(chr(ord('a') + i % 26) for i in ids)


@cache
def network(seed=0, layers=1):
  """Return (config, params). Another seed gives other weights."""
  config, params = small.model('qwen2', num_hidden_layers=layers)
  if seed:
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda w: w + 0.05 * rng.normal(size=w.shape).astype(np.float32), params)
  return config, params


@cache
def weights(quant=UNQUANTISED, seed=0, layers=1):
  config, params = network(seed, layers)
  made = sampler_weights(params, jnp.dtype('float32'), quant)
  if 'kv8' in quant.sampler:
    amax = np.full((3, config.num_layers), 6.0 + seed, np.float32)
    made = made._replace(scales=from_amax(amax, with_margin(1.05)))
  return made


@cache
def engine_config(settings=Cache(), quant=UNQUANTISED, layers=1):  # noqa: B008
  config = network(0, layers)[0]
  layout = cache_layout(config, settings, quant, 12, C, 'float32')
  return EngineConfig(config, SAMPLING, layout, ROWS, prefill=3, seed=0, stop_ids=(), text=text)


def requests(group=2, max_tokens=C):
  """Return requests of three prompts. A larger group contains the requests of a smaller group."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in (4, 9, 6)]
  return [Request(100 + 10 * g + k, g, prompt, max_tokens) for g, prompt in enumerate(prompts) for k in range(group)]
