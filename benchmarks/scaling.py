"""What do more devices send each other? Collectives of the update and of a decode step on 1 to 8 devices, by how they are split.

    python benchmarks/scaling.py --save scaling

Counted in programs compiled for devices of the host, which tells what is sent and by which collective, and nothing of speed.
Strong scaling: the same rows on more devices. Weak scaling: rows grow with the devices. Bytes are those that one device sends
in one microbatch (update) or one step (decode), in a ring; a loop's body counts once. Compute is float32, as XLA's CPU backend
widens what it sends in bfloat16. Gradients are summed whole over fsdp there, where a GPU scatters them as it sums.
"""

import argparse
import os
from dataclasses import replace
from types import SimpleNamespace

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
import numpy as np
from common import report

from sprl.learner.packing import Shape, pack
from sprl.learner.state import make_optimizer
from sprl.learner.update import Computation, make_update
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.parallel.collectives import KINDS, collectives
from sprl.parallel.mesh import make_mesh, replicated
from sprl.parallel.rules import row_shards, shardings
from sprl.policy import abstract_state
from sprl.sampler import decode
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.served import serve
from sprl.settings import DENSE, UNQUANTISED, Correction, Loss, Mesh, Optimizer, Sampling

TOKENS, PROMPT, NEW = 256, 128, 128  # of a packed row; of a sequence
FLOAT32 = jnp.dtype('float32')
SPLITS = {
  'update': {'fsdp': lambda n: Mesh(1, n, 1), 'data': lambda n: Mesh(n, 1, 1), 'tensor': lambda n: Mesh(1, 1, n)},
  'decode': {'data': lambda n: Mesh(n, 1, 1), 'tensor': lambda n: Mesh(1, 1, n)},
}


def main():
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--layers', type=int, default=1)
  parser.add_argument('--rows', type=int, default=8, help='rows of strong scaling; of weak scaling, rows a device')
  parser.add_argument('--devices', default='1,2,4,8', help='several separated by commas')
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()
  # Eight queries to each of two kv heads, so that eight devices share them out.
  config = tiny(
    'qwen2', hidden_size=512, intermediate_size=2560, num_hidden_layers=args.layers, num_attention_heads=16,
    num_key_value_heads=2, head_dim=32, vocab_size=16384,
  )  # fmt: skip
  rows = []
  for program, splits in SPLITS.items():
    for split, mesh_of in splits.items():
      for scaling in ('strong', 'weak'):
        for n in map(int, args.devices.split(',')):
          count = args.rows * (n if scaling == 'weak' else 1)
          rows.append(measured(config, program, split, scaling, n, count, mesh_of(n)))
  weights = sum(w.size for w in jax.tree.leaves(transformer.abstract_params(config)))
  report(args.save or 'scaling', rows, {'weights': weights, 'tokens': TOKENS, 'rows': rows}, save=bool(args.save))


def measured(config, program: str, split: str, scaling: str, n: int, count: int, settings: Mesh) -> dict:
  """A row of the table."""
  mesh = make_mesh(settings, jax.devices()[:n], (config.num_heads, config.num_kv_heads))
  lowered = {'update': lowered_update, 'decode': lowered_decode}[program](config, mesh, count)
  found = [c for c in collectives(lowered.compile().as_text()) if c.depth]  # once an update: the norm of the gradient
  sums = {kind: sum(c.moved for c in found if c.kind == kind) for kind in KINDS}
  return {
    'program': program, 'split': split, 'scaling': scaling, 'devices': n, 'rows': count, 'collectives': len(found),
    'MB sent': sum(sums.values()) / 1e6, **{f'{kind} MB': sums[kind] / 1e6 for kind in KINDS[:5]},
  }  # fmt: skip


def lowered_update(config, mesh, count: int):
  """The update of one microbatch of so many rows, before it is compiled."""
  optimizer = make_optimizer(Optimizer(), 10)
  laid = shardings(mesh, transformer.logical_axes(config), transformer.abstract_params(config))
  policy = SimpleNamespace(config=config, param_dtype=jnp.float32, shardings=laid, replicated=replicated(mesh))
  state = abstract_state(policy, optimizer)  # pyright: ignore[reportArgumentType]
  batch, _ = pack([], np.zeros(0, np.float32), Shape(1, count, TOKENS, count, NEW, row_shards(mesh)), True)
  batch = replace(batch, advantage=np.zeros(count, np.float32), reward=np.zeros(count, np.float32))
  batch = jax.device_put(batch, shardings(mesh, batch.axes, batch))
  computation = Computation(Correction(), Loss(), 1.0, FLOAT32, 256, 'layer')
  return make_update(transformer.graph(config), optimizer, computation).lower(state, batch, None, None)


def lowered_decode(config, mesh, count: int):
  """A decode loop over so many rows, before it is compiled."""
  plan = cache_plan(config, DENSE, UNQUANTISED, PROMPT, NEW, FLOAT32)
  params = transformer.init_params(config, jax.random.key(0), FLOAT32)
  with jax.set_mesh(mesh):
    served = serve(params, FLOAT32, config=config)
  rows = decode.empty_rows(plan, served, count, NEW, jax.random.key(0))
  return decode.decode.lower(transformer.graph(config), served, rows, Sampling(max_tokens=NEW), (), 16)


if __name__ == '__main__':
  main()
