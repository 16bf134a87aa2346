"""Compare three updates of adapters on 8 host devices, with moments in host memory, with one device. Prints JSON."""

import json
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import small

from sprl.config import Correction, Lora, Loss, Mesh, Optimizer
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState, abstract_state
from sprl.learner.update import UpdateConfig, make_update
from sprl.model import abstract_params
from sprl.models import transformer
from sprl.models.lora import Base, init_adapters
from sprl.sampler.weights import sampler_weights
from sprl.sharding.mesh import make_mesh
from sprl.sharding.rules import row_shards, shardings

FLOAT32 = jnp.dtype('float32')
config, params = small.model(num_hidden_layers=1)
lora, scale = Lora(rank=2), 16.0
trajectories, advantage = small.rollouts([(5, 3), (4, 6)], (6, 3)), np.array([1, -1, 0.5, -2], np.float32)


def packed(shards):
  return pack(trajectories, advantage, Shape(1, 4, 32, 4, 6, shards), True)[0]


optimizer = make_optimizer(Optimizer(learning_rate=1e-2), 10)
settings = UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, FLOAT32, 8))
update = make_update(transformer.graph(config), optimizer, settings)
mesh = make_mesh(Mesh(data=-1, fsdp=2, tensor=2), heads=(config.num_heads, config.num_kv_heads))
laid = shardings(mesh, transformer.logical_axes(config), transformer.abstract_params(config))
model = types.SimpleNamespace(config=config, param_dtype=FLOAT32, lora=lora, mesh=mesh, shardings=laid)
places = jax.tree.map(lambda a: a.sharding, abstract_state(abstract_params(model), optimizer, offload=True))
init = partial(init_adapters, config, lora)


def train(adapters, base, batch, update, places=None):
  """Return the state and the sampler weights after three updates."""
  state = TrainState.create(adapters, optimizer, places)
  for _ in range(3):
    state, _ = update(state, batch, small.unscored(batch), base)
  return state, sampler_weights(base.under(state.params), FLOAT32).params


def apart(a, b):
  return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


first = init(jax.random.key(0))
alone, sampler_alone = train(init(jax.random.key(0)), Base(params, scale), packed(1), update)
split = jax.jit(init, out_shardings=places.params)(jax.random.key(0))
begun_apart = apart(first, split)
base, batch = Base(jax.device_put(params, laid), scale), packed(row_shards(mesh))
batch = jax.device_put(batch, shardings(mesh, batch.axes, batch))
together, sampler_together = train(split, base, batch, update.on(mesh), places)
up = together.params['layers'][0]['mlp']['up']
print(
  json.dumps(
    {
      'begun_apart': begun_apart,
      'moved': apart(alone.params, first),
      'apart': apart(alone.params, together.params),
      'sampler_apart': apart(sampler_alone, sampler_together),
      'shards': {name: list(up[name].addressable_shards[0].data.shape) for name in 'ab'},
      'moments': sorted({leaf.sharding.memory_kind for leaf in jax.tree.leaves(together.opt_state) if leaf.ndim}),
    }
  )
)
