"""Compare two updates on meshes of 8 host devices with two updates on one device. Prints JSON.

Arguments: HEADS/KVHEADS:DATAxFSDPxTENSOR, one or more. With xEXPERT after it the model is a mixture of experts, and the routes of
some tokens are replayed. With x1xSEQUENCE after it several devices share a row; they may be fewer than 8. :OPTIMIZER after that
selects an entry of OPTIMIZERS, and :FAMILY another family than Llama; the default optimiser is adam.
"""

import dataclasses
import json
import logging
import math
import sys
from functools import partial

import compilation_cache
import jax
import jax.numpy as jnp
import numpy as np
import small

from sprl.config import Correction, Loss, Mesh, Optimizer
from sprl.learner import optimizer as adam
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState, abstract_state
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.models.config import ARCHITECTURES
from sprl.sharding.mesh import make_mesh
from sprl.sharding.rules import row_shards, shardings, token_shards

trajectories = small.rollouts([(5, 3), (4, 6), (3, 2), (6, 6)], (6, 3, 5, 4), vocab=260)
advantage = np.array([1, -1, 0.5, -2, 1, -1, 0.3, 0.2], np.float32)
# Larger than gradients that are rounding errors: Adam would turn these into steps of random sign.
adam.ADAM_EPSILON = 0.01
OPTIMIZERS = {  # name -> settings, and changes of the model
  'adam': (Optimizer(name='adam', learning_rate=0.01), {}),
  # Adafactor factors the moments of matrices with at least 128 rows and columns.
  'adafactor': (Optimizer(name='adafactor', learning_rate=0.01), {'hidden_size': 128, 'intermediate_size': 128}),
}
computation = UpdateConfig(Correction(), Loss(balance_coef=0.1), ForwardConfig(1.0, jnp.dtype('float32'), 8), 'layer')


class Compilations(logging.Handler):
  """Counts what JAX compiles."""

  count = 0

  def emit(self, record):
    self.count += record.getMessage().startswith('Compiling jit(update)')


def packed(config, shards, parts=1):
  """Return the batch: one microbatch of all rows, or with shared rows several of one row a shard."""
  micros, rows = (2, 8) if parts == 1 else (8, shards)
  batch = pack(trajectories, advantage, Shape(micros, rows, 16, 8, 6, shards, parts), True)[0]
  assert batch.used > 1 or parts == 1
  if config.experts is None:
    return batch
  # By token, so that routes do not depend on the place in the batch.
  first = batch.tokens.astype(np.int8) % 8
  routes = np.where(batch.tokens % 3 == 0, np.stack([first, (first + 3) % 8]), -1).transpose(1, 2, 3, 0)[..., None, :]
  return dataclasses.replace(batch, routes=routes)


def train(config, optimizer, create, params, batch, mesh=None):
  """Return state and metrics after two updates, and the number of compilations of the update."""
  update = make_update(transformer.graph(config), optimizer, computation, mesh)
  logging.getLogger('jax').addHandler(seen := Compilations())
  with jax.log_compiles():
    state = create(params)
    for _ in range(2):
      state, metrics = update(state, batch, small.unscored(batch))
  logging.getLogger('jax').removeHandler(seen)
  return state, jax.device_get(metrics), seen.count


def furthest(a, b):
  return max(float(np.abs(x - y).max()) for x, y in both(a, b))


def relatively(a, b):
  """Return the largest difference, relative to each array's largest number."""
  return max(float(np.abs(x - y).max() / max(np.abs(x).max(), 1e-30)) for x, y in both(a, b))


def both(a, b):
  return zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True)


report, alone = {}, {}
for argument in sys.argv[1:]:
  heads, shape, name = [*argument.split(':'), 'adam'][:3]
  H, K = map(int, heads.split('/'))
  experts = shape.count('x') == 3
  family, sizes = ('qwen2_moe', {'num_experts': 8, 'vocab_size': 264}) if experts else ('llama', {'vocab_size': 264})
  family = name if name in ARCHITECTURES else family
  settings, more = OPTIMIZERS.get(name, OPTIMIZERS['adam'])
  config, params = small.model(family, num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=K, **sizes, **more)
  optimizer = make_optimizer(settings, 10)
  create = partial(TrainState.create, optimizer=optimizer)
  model = heads, experts, name
  if model not in alone:
    first, batch = jax.tree.map(jnp.copy, params), jax.device_put(packed(config, 1), jax.devices()[0])
    with compilation_cache.in_use():
      alone[model] = train(config, optimizer, create, first, batch)
  axes = [int(size) for size in shape.split('x')]
  mesh = make_mesh(Mesh(*axes), jax.devices()[: math.prod(axes)], heads=(H, K))
  laid = shardings(mesh, transformer.logical_axes(config), params)
  batch = packed(config, row_shards(mesh), token_shards(mesh))
  batch = jax.device_put(batch, shardings(mesh, batch.axes, batch))
  params = jax.device_put(params, laid)
  places = jax.tree.map(lambda a: a.sharding, abstract_state(params, optimizer))
  state, metrics, compiled = train(config, optimizer, jax.jit(create, out_shardings=places), params, batch, mesh)
  one, together = alone[model][0], state.params
  layer = together['layers'][0]
  weights = {
    'embed': together['embed'],
    'q': layer['attention']['q']['kernel'],
    'k': layer['attention']['k']['kernel'],
    'o': layer['attention']['o']['kernel'],
    'down': layer['mlp'].get('experts', layer['mlp'])['down']['kernel'],
    'norm': together['norm']['scale'],
  }
  report[argument] = {
    'shards': {name: list(w.addressable_shards[0].data.shape) for name, w in weights.items()},
    'as_given': all(jax.tree.leaves(jax.tree.map(lambda w, s: w.sharding.is_equivalent_to(s, w.ndim), together, laid))),
    'compiled': compiled,
    'moved': furthest(params, one.params),
    'apart': furthest(one.params, together),
    'moments_apart': relatively(one.opt_state, state.opt_state),
    'metrics_apart': {
      n: float(abs(value - metrics[n]))
      for n, value in alone[model][1].items()
      if n in ('update/loss', 'update/grad_norm') or n.startswith('moe/')
    },
  }
print(json.dumps(report))
