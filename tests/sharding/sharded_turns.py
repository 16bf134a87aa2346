"""Conversations on a mesh of 8 host devices, with and without kept caches, and the collectives of the store. Prints JSON."""

import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import small

from sprl.cache.layout import cache_layout
from sprl.cache.scales import from_amax, with_margin
from sprl.config import Cache, Mesh, Quant, Sampling
from sprl.models import transformer
from sprl.sampler import decode, kept
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.sharding.mesh import make_mesh
from sprl.sharding.rules import shardings
from sprl.types import Request

FLOAT32, QUANT = jnp.dtype('float32'), Quant(sampler='kv8')
ROWS, TURNS, LAYERS = 8, 3, 1
SAMPLING = Sampling(max_tokens=32, max_prompt=8, prompt_buckets=(8,), chunk=5)

config, params = small.model('qwen3_moe', num_hidden_layers=LAYERS, vocab_size=264, num_experts=8, moe_intermediate_size=64)
heads = config.num_heads, config.num_kv_heads
mesh = make_mesh(Mesh(2, 2, 2, 1), jax.devices()[:8], heads, 'rollout')
params = jax.device_put(jax.device_get(params), shardings(mesh, transformer.logical_axes(config), params))
weights = sampler_weights(params, FLOAT32, QUANT, config=config, mesh=mesh, from_mesh=mesh)
weights = weights._replace(scales=from_amax(np.full((3, LAYERS), 6.0, np.float32), with_margin(1.05)))
cache = Cache(budget=10, interval=3, window=2, method='rkv')
layout = cache_layout(config, cache, QUANT, SAMPLING.max_prompt, SAMPLING.max_tokens, FLOAT32, routes=True)
settings = EngineConfig(config, SAMPLING, layout, ROWS, 4, 0, (), lambda ids: '', mesh)


class Compilations(logging.Handler):
  """Counts the compilations that JAX logs."""

  count = 0

  def emit(self, record):
    self.count += record.getMessage().startswith('Compiling')


def talk(reuse, first):
  """Return the completions of each turn of four conversations, by (turn, uid), and the engine's metrics."""
  rng, engine, found = np.random.default_rng(0), Engine(settings, weights), {}
  texts = {first + i: (rng.integers(0, 260, 4 + i).astype(np.int32), np.zeros(0, np.int32)) for i in range(4)}
  for turn in range(TURNS):
    for uid, (prompt, given) in texts.items():
      engine.add(Request(uid, uid, prompt, 5, given, keep=reuse, continues=(uid, 0) if reuse and turn else None))
    while engine.load:
      engine.dispatch()
      for c in engine.collect():
        uid, reply = c.request.uid, rng.integers(0, 260, 3).astype(np.int32)
        texts[uid] = texts[uid][0], np.concatenate([texts[uid][1], c.tokens, reply]).astype(np.int32)
        found[turn, uid - first] = c
  return found, engine.usage.metrics(ROWS)


def gathered(lowered):
  """Return the largest number of elements that an all-gather of the program returns, 0 without one."""
  shapes = re.findall(r'= \w+\[([\d,]*)\]\S* all-gather', lowered.compile().as_text())
  return max([int(np.prod([int(n) for n in shape.split(',') if n])) for shape in shapes], default=0)


plain, _ = talk(False, 0)
reused, metrics = talk(True, 0)
logging.getLogger('jax').addHandler(seen := Compilations())
with jax.log_compiles():
  talk(True, 100)
logging.getLogger('jax').removeHandler(seen)
state = decode.empty_state.on(mesh)(layout, weights, ROWS, SAMPLING.max_tokens, jax.random.key(0))
store = kept.empty_store.on(mesh)(layout, weights, ROWS)
some = np.zeros((3, 4), np.int32)
k = store.cache.layers[0].k
print(
  json.dumps(
    {
      'tokens': all(np.array_equal(plain[at].tokens, reused[at].tokens) for at in plain),
      'attended': all(np.array_equal(plain[at].attended, reused[at].attended) for at in plain),
      'routes': all(np.array_equal(plain[at].routes, reused[at].routes) for at in plain),
      'apart': max(float(np.abs(plain[at].logp - reused[at].logp).max()) for at in plain),
      'compiled_again': seen.count,
      'hits': metrics['engine/prefix_hits'],
      'part': [list(k.shape), list(k.addressable_shards[0].data.shape)],
      'gathered': gathered(kept.store_rows.on(mesh).lower(store, state, *some)),
      'row': int(np.prod(k.shape[1:])),
    }
  )
)
