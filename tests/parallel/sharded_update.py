"""On 8 devices: the shardings that the rules give, and two updates on the mesh beside two on one device. Prints JSON."""

import json
import logging
import sys
import types
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import small

from sprl.learner.packing import Shape, pack
from sprl.learner.state import TrainState, make_optimizer
from sprl.learner.update import Computation, make_update
from sprl.models import transformer
from sprl.parallel.mesh import make_mesh, param_shardings, replicated
from sprl.policy import abstract_state
from sprl.settings import Correction, Lora, Loss, Mesh, Optimizer

config, params = small.model(num_hidden_layers=1, vocab_size=257)
mesh = make_mesh(Mesh(data=-1, fsdp=2, tensor=2))
shardings = param_shardings(mesh, transformer.logical_axes(config), transformer.abstract_params(config))
batch, _ = pack(
  small.rollouts([(5, 3), (4, 6)], (6, 3), vocab=257), np.array([1, -1, 0.5, -2], np.float32), Shape(2, 1, 32, 4, 6), True
)
optimizer = make_optimizer(Optimizer(name='sgd', learning_rate=0.1, clip_norm=0.0), 10)
computation = Computation(Correction(), Loss(), 1.0, jnp.dtype('float32'), 8, 'none')


class Compilations(logging.Handler):
  """Counts what JAX compiles."""

  count = 0

  def emit(self, record):
    self.count += record.getMessage().startswith('Compiling jit(_update)')


def train(create, params, batch):
  """(weights, metrics, how often the update was compiled) after two updates."""
  update = make_update(transformer.graph(config), optimizer, computation)
  logging.getLogger('jax').addHandler(seen := Compilations())
  with jax.log_compiles():
    state = create(params)
    for _ in range(2):
      state, metrics = update(state, batch, None, None)
  return state.params, jax.device_get(metrics), seen.count


create = partial(TrainState.create, optimizer=optimizer)
alone, metrics_alone, _ = train(create, jax.tree.map(jnp.copy, params), jax.device_put(batch, jax.devices()[0]))
policy = types.SimpleNamespace(
  config=config, param_dtype=jnp.float32, lora=Lora(), shardings=shardings, replicated=replicated(mesh)
)
places = jax.tree.map(lambda a: a.sharding, abstract_state(policy, optimizer))
create = jax.jit(create, out_shardings=places)
together, metrics_together, compiled = train(create, jax.device_put(params, shardings), jax.device_put(batch, replicated(mesh)))
layer = together['layers'][0]
weights = {
  'embed': together['embed'],
  'head': together['head']['kernel'],
  'q': layer['attention']['q']['kernel'],
  'o': layer['attention']['o']['kernel'],
  'down': layer['mlp']['down']['kernel'],
  'norm': together['norm']['scale'],
}
print(
  json.dumps(
    {
      'mesh': dict(mesh.shape),
      'shards': {name: list(w.addressable_shards[0].data.shape) for name, w in weights.items()},
      'as_given': all(jax.tree.leaves(jax.tree.map(lambda w, s: w.sharding.is_equivalent_to(s, w.ndim), together, shardings))),
      'compiled': compiled,
      'moved': max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(jax.device_get(alone)))),
      'apart': max(
        float(np.abs(a - b).max()) for a, b in zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (alone, together)))
      ),
      'metrics_apart': {
        name: float(abs(metrics_alone[name] - metrics_together[name])) for name in ('update/loss', 'update/grad_norm')
      },
    }
  )
)
