"""Print as JSON the collectives of an update, a decode step and a sync, read from programs compiled for 8 host devices.

Argument: dense or mixture.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import small

from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import Cache, Correction, Loss, Mesh, Optimizer, Quant, Sampling
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.planning.collectives import collectives
from sprl.sampler import decode
from sprl.sampler.weights import sampler_weights, weights_function
from sprl.sharding.mesh import make_mesh
from sprl.sharding.rules import row_shards, shardings

FLOAT32 = jnp.dtype('float32')
DENSE = small.model(num_hidden_layers=1, vocab_size=264)
MIXTURE = small.model('qwen3_moe', num_hidden_layers=1, vocab_size=264, num_experts=16, moe_intermediate_size=48)


def sent(lowered):
  """Return [kind, bytes, devices, loops around it] of each array that a collective produces."""
  return [(c.kind, size, c.devices, c.depth) for c in collectives(lowered.compile().as_text()) for size in c.arrays]


def update(model, mesh):
  (config, params), mesh = model, make_mesh(mesh, heads=(4, 2))
  optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=0.1, clip_norm=None), 10)
  computation = UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, FLOAT32, 8), 'layer')
  state = TrainState.create(jax.device_put(params, shardings(mesh, transformer.logical_axes(config), params)), optimizer)
  trajectories = small.rollouts([(5, 3), (4, 6), (3, 2), (6, 6)], (6, 3, 5, 4), vocab=260)
  batch, _ = pack(trajectories, np.ones(8, np.float32), Shape(2, 8, 16, 8, 6, row_shards(mesh)), True)
  batch = jax.device_put(batch, shardings(mesh, batch.axes, batch))
  return sent(make_update(transformer.graph(config), optimizer, computation, mesh).lower(state, batch, small.unscored(batch)))


def step(model, mesh):
  (config, params), mesh = model, make_mesh(mesh, heads=(4, 2))
  layout = cache_layout(config, Cache(budget=10, interval=3, window=2), Quant(sampler='kv8'), 8, 16, FLOAT32)
  weights = sampler_weights(params, FLOAT32, config=config, mesh=mesh)._replace(scales=Scales(*[jnp.ones(1)] * 3))
  state = decode.empty_state.on(mesh)(layout, weights, 16, 16, jax.random.key(0))
  return sent(decode.decode.on(mesh).lower(transformer.graph(config), weights, state, Sampling(max_tokens=16), (), 5))


def sync(model, learner, rollout):
  (config, params), (learner, rollout) = model, (make_mesh(each, heads=(4, 2)) for each in (learner, rollout))
  held = jax.device_put(params, shardings(learner, transformer.logical_axes(config), params))
  cast = weights_function(jnp.dtype('bfloat16'), Quant(sampler='w8a8'), config=config, mesh=rollout, from_mesh=learner)
  return sent(cast.lower(held))


PROGRAMS = {
  'dense': lambda: {
    'update': update(DENSE, Mesh(data=2, fsdp=2, tensor=2)),
    'decode': step(DENSE, Mesh(data=2, fsdp=1, tensor=4)),
    'sync': sync(DENSE, Mesh(), Mesh(data=2, fsdp=1, tensor=4)),
    'sync from tensor 2': sync(DENSE, Mesh(tensor=2), Mesh(data=2, fsdp=1, tensor=4)),
  },
  'mixture': lambda: {
    'update': update(MIXTURE, Mesh(data=1, fsdp=2, tensor=2, expert=2)),
    'decode': step(MIXTURE, Mesh(data=2, fsdp=1, tensor=1, expert=4)),
    'sync': sync(MIXTURE, Mesh(expert=2), Mesh(data=2, fsdp=1, expert=4)),
  },
}

print(json.dumps(PROGRAMS[sys.argv[1]]()))
