"""Compare rollouts, calibration, self-check and an update on meshes of up to 8 host devices with one device. Prints JSON.

Arguments: one or more MEMORY:DATAxFSDPxTENSOR, a key of MEMORIES and the mesh of the rollouts. The learner has the same devices,
all along fsdp. If the key starts with `experts`, the model has eight experts, the argument ends with xEXPERT, and the learner
splits the experts into two parts. The key `filtered` samples with top-k, and `masked` with top-p. The key `windows` has a model
of two layers, the first with a sliding window. With the key `fixed` all chunks have the same number of steps.
"""

import json
import logging
import sys
from dataclasses import replace
from functools import partial

import compilation_cache
import jax
import jax.numpy as jnp
import numpy as np
import small

from sprl.cache.layout import cache_layout
from sprl.config import DENSE, UNQUANTISED, Cache, Loss, Mesh, Optimizer, Quant, Sampling
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig, score
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState, abstract_state
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.presets import ARMS
from sprl.sampler import calibrate, decode
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights, self_check
from sprl.sharding.mesh import make_mesh
from sprl.sharding.rules import row_shards, shardings
from sprl.types import LogProbs, Request

FLOAT32 = jnp.dtype('float32')
SPARSE = Cache(budget=10, interval=3, window=2, method='rkv')
MEMORIES = {
  'dense': (DENSE, UNQUANTISED),
  'sparse': (SPARSE, Quant(sampler='w8a8_kv8')),
  'filtered': (SPARSE, Quant(sampler='kv8')),
  'masked': (SPARSE, Quant(sampler='kv8')),
  'experts': (SPARSE, Quant(sampler='w8a8_kv8', format='mxfp8', arithmetic='blockwise')),
  'experts_emulated': (SPARSE, Quant(sampler='w8a8_kv8', format='mxfp8', arithmetic='emulate')),
  'windows': (SPARSE, Quant(sampler='kv8')),
  'fixed': (replace(SPARSE, interval=5), Quant(sampler='kv8')),
  'layer': (Cache(budget=6, interval=3, window=2, method='h2o', scope='layer'), Quant(sampler='kv8')),
}
SAMPLING = Sampling(max_tokens=16, max_prompt=8, prompt_buckets=(8,), chunk=5)
FILTERS = {'filtered': {'top_k': 6, 'top_p': 0.9}, 'masked': {'top_p': 0.8}}

MODELS = {
  'dense': small.model('qwen2', num_hidden_layers=1, vocab_size=264),
  'experts': small.model('qwen3_moe', num_hidden_layers=1, vocab_size=264, num_experts=8, moe_intermediate_size=64),
  'windows': small.model('gemma3_text', num_hidden_layers=2, sliding_window_pattern=2, vocab_size=264),
}
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 260, n).astype(np.int32) for n in (8, 5)]
requests = [Request(2 * g + k, g, prompt, 16 - 3 * k) for g, prompt in enumerate(prompts) for k in range(2)]


class Compilations(logging.Handler):
  """Counts the compilations that JAX logs."""

  count = 0

  def emit(self, record):
    self.count += record.getMessage().startswith('Compiling')


def step(memory, sizes):
  """Return the results of rollouts, calibration, self-check and an update."""
  config, pretrained = MODELS.get(memory.partition('_')[0], MODELS['dense'])
  graphdef, pretrained, heads = transformer.graph(config), jax.device_get(pretrained), (config.num_heads, config.num_kv_heads)
  devices = jax.devices()[: sizes.data * sizes.fsdp * sizes.tensor * sizes.expert]
  mesh, rollout = make_mesh(Mesh(expert=min(sizes.expert, 2)), devices, heads), make_mesh(sizes, devices, heads, 'rollout')
  cache, quant = MEMORIES[memory]
  axes = transformer.logical_axes(config)
  laid = shardings(mesh, axes, transformer.abstract_params(config))
  params = jax.device_put(pretrained, laid)
  layout = cache_layout(
    config, cache, quant, SAMPLING.max_prompt, SAMPLING.max_tokens, FLOAT32, routes=config.experts is not None
  )
  found = [calibrate.amax_of_prompts(graphdef, layout, params, prompts, 2, quant, mesh)]
  weights = sampler_weights(params, FLOAT32, quant, config=config, mesh=rollout, from_mesh=mesh)
  weights = weights._replace(scales=calibrate.scales((found[0],), quant, layout, params))
  engine = EngineConfig(
    config, replace(SAMPLING, **FILTERS.get(memory, {})), layout, rows=8, prefill=max(2, row_shards(rollout)), seed=0,
    stop_ids=(), text=lambda ids: '', mesh=rollout, record_support=True, fixed_chunks=memory == 'fixed',
  )  # fmt: skip
  trajectories = generate(engine, weights, requests)
  logging.getLogger('jax').addHandler(seen := Compilations())
  with jax.log_compiles():
    again = generate(engine, weights, requests)
  logging.getLogger('jax').removeHandler(seen)
  result = {
    'trajectories': trajectories,
    'again': all(np.array_equal(a.sampler_logp, b.sampler_logp) for a, b in zip(trajectories, again)),
    'compiled_again': seen.count,
    'wrong': self_check(params, weights, FLOAT32, quant, mesh),
    'split': len({str(s.index) for s in jax.tree.leaves(weights.params['layers'][0]['mlp'])[0].addressable_shards}),
  }
  state = decode.empty_state.on(rollout)(layout, weights, 8, SAMPLING.max_tokens, jax.random.key(0))
  result['cache'] = list(state.cache.layers[0].k.addressable_shards[0].data.shape)
  if not layout.sparse:
    return result
  S = row_shards(mesh)
  shape = Shape(2, 1, 40, 4, 16) if S == 1 else Shape(1, S, 40, 4, 16, S)
  batch, _ = pack(trajectories, np.array([1, -1, 0.5, -2], np.float32), shape, share_prefix=True)
  batch = jax.device_put(batch, shardings(mesh, batch.axes, batch))
  rows = {name: getattr(batch, name) for name in ('tokens', 'positions', 'segments', 'prefixes', 'used')}
  found.append(calibrate.amax.on(mesh)(graphdef, layout, params, **rows))
  optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=0.1, clip_norm=None), 10)
  config_of_pass = ForwardConfig(1.0, FLOAT32, 16)
  update = make_update(graphdef, optimizer, UpdateConfig(ARMS['sparse_rl'], Loss(), config_of_pass), mesh)
  places = jax.tree.map(lambda a: a.sharding, abstract_state(params, optimizer))
  state = jax.jit(partial(TrainState.create, optimizer=optimizer), out_shardings=places)(params)
  old = score.on(mesh)(graphdef, params, batch, config_of_pass)
  state, metrics = update(state, batch, LogProbs(sampler=batch.sampler_logp, old=old))
  return result | {'amax': np.stack(found), 'params': state.params, 'loss': float(metrics['update/loss']), 'first': pretrained}


def furthest(a, b):
  return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b))))


def beside(alone, together):
  """Return the results of the mesh and their differences from the results of one device."""
  pairs = list(zip(alone['trajectories'], together['trajectories']))
  same = all(np.array_equal(getattr(a, x), getattr(b, x)) for a, b in pairs for x in ('tokens', 'attended', 'routes', 'support'))
  apart = np.concatenate([np.abs(a.sampler_logp - b.sampler_logp)[a.mask] for a, b in pairs]) if same else np.full(1, np.inf)
  said = {name: together[name] for name in ('again', 'compiled_again', 'wrong', 'split', 'cache')}
  said |= {'same': same, 'logp_apart': [float(x) for x in np.sort(apart)]}
  said['compresses'] = max(int(np.max(t.attended)) for t, _ in pairs) < min(len(t.tokens) for t, _ in pairs)
  if 'params' in together:
    said |= {
      'amax_apart': float(np.max(np.abs(together['amax'] / alone['amax'] - 1))),
      'loss_apart': abs(together['loss'] - alone['loss']),
      'moved': furthest(alone['first'], alone['params']),
      'params_apart': furthest(alone['params'], together['params']),
    }
  return said


report, alone = {}, {}
for argument in sys.argv[1:]:
  memory, _, shape = argument.partition(':')
  if memory not in alone:
    with compilation_cache.in_use():
      alone[memory] = step(memory, Mesh(1, 1, 1))
  report[argument] = beside(alone[memory], step(memory, Mesh(*map(int, shape.split('x')))))
print(json.dumps(report))
