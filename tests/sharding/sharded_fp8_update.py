"""Compare the gradients of FP8 updates (quant.learner) on meshes of 8 host devices with those on one device. Prints JSON.

Arguments: FAMILY:DATAxFSDPxTENSOR[xEXPERT]:ARITHMETIC, one or more.
"""

import json
import logging
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import small

from sprl.config import Correction, Loss, Mesh, Optimizer, Quant
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState, abstract_state
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.sharding.mesh import make_mesh
from sprl.sharding.rules import row_shards, shardings

RATE = 100.0  # of plain gradient descent: the step shows the gradient
SIZES = {'llama': {'intermediate_size': 256}, 'qwen2_moe': {'num_experts': 8, 'moe_intermediate_size': 64}}
trajectories = small.rollouts([(5, 3), (4, 6), (3, 2), (6, 6)], (6, 3, 5, 4), vocab=260)
advantage = np.array([1, -1, 0.5, -2, 1, -1, 0.3, 0.2], np.float32)
optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=RATE, clip_norm=None), 10)
create = partial(TrainState.create, optimizer=optimizer)


class Compilations(logging.Handler):
  """Counts what JAX compiles."""

  count = 0

  def emit(self, record):
    self.count += record.getMessage().startswith('Compiling jit(update)')


def packed(shards):
  return pack(trajectories, advantage, Shape(2, 8, 16, 8, 6, shards), True)[0]


def settings(learner, arithmetic, format):
  quant = Quant(learner=learner, arithmetic=arithmetic, format=format).in_learner
  return UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, jnp.dtype('float32'), 8, quant=quant), 'layer')


def gradient(config, params, batch, computation, create=create, mesh=None):
  """Return the gradient of the first update, and how often the update was compiled for two."""
  update = make_update(transformer.graph(config), optimizer, computation, mesh)
  before = jax.device_get(params)
  logging.getLogger('jax').addHandler(seen := Compilations())
  with jax.log_compiles():
    state, _ = update(create(jax.tree.map(jnp.copy, params)), batch, small.unscored(batch))
    after = jax.device_get(state.params)
    update(state, batch, small.unscored(batch))
  logging.getLogger('jax').removeHandler(seen)
  return jax.tree.map(lambda a, b: (a - b) / RATE, before, after), seen.count


def distances(found, expected):
  norm = np.linalg.norm
  return [float(norm(a - b) / norm(b)) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)]


report = {}
for argument in sys.argv[1:]:
  family, shape, arithmetic = argument.split(':')
  format = 'mxfp8' if family == 'qwen2_moe' else 'float32'  # its blocks are so small that a mesh can split these experts
  config, params = small.model(family, num_hidden_layers=1, vocab_size=264, **SIZES[family])
  fp8, plain = (settings(learner, arithmetic, format) for learner in ('w8a8', 'none'))
  batch = jax.device_put(packed(1), jax.devices()[0])
  alone, unrounded = (gradient(config, params, batch, computation)[0] for computation in (fp8, plain))
  mesh = make_mesh(Mesh(*map(int, shape.split('x'))), heads=(config.num_heads, config.num_kv_heads))
  batch = packed(row_shards(mesh))
  batch = jax.device_put(batch, shardings(mesh, batch.axes, batch))
  params = jax.device_put(params, shardings(mesh, transformer.logical_axes(config), params))
  places = jax.tree.map(lambda a: a.sharding, abstract_state(params, optimizer))
  together, compiled = gradient(config, params, batch, fp8, jax.jit(create, out_shardings=places), mesh)
  report[argument] = {
    'compiled': compiled,
    'apart': distances(together, alone),
    'rounding': distances(unrounded, alone),
  }
print(json.dumps(report))
