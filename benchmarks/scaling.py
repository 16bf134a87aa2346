"""How much do devices send each other? Collectives of the update and of a decode step on 1 to 8 devices, by mesh axis.

    python benchmarks/scaling.py --save scaling

The programs of a run are compiled for host devices, and the collectives in them are counted. Counts only; no times. Programs on
the axis `expert` are programs of a mixture of experts; the others are programs of a dense model.

Strong scaling: the same rows on more devices. Weak scaling: rows grow with the devices. Bytes are sent by one device in one
microbatch (update) or one step (decode), in a ring; the body of a loop counts once. Compute is float32, because XLA's CPU backend
sends bfloat16 arrays as float32. It all-reduces gradients over fsdp; a GPU reduce-scatters them.
"""

import argparse
import os

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
from common import report

from sprl.cache.layout import cache_layout
from sprl.config import DENSE, UNQUANTISED, Mesh, ModelSettings, Run, Sampling
from sprl.learner.batch import Shape
from sprl.models import transformer
from sprl.models.config import ModelConfig, tiny
from sprl.planning import programs
from sprl.planning.collectives import KINDS, collectives
from sprl.sharding.mesh import make_mesh
from sprl.sharding.rules import row_shards

TOKENS, PROMPT, NEW = 256, 128, 128  # per packed row; per sequence
RUN = Run(model=ModelSettings(dtype='float32', remat='layer'), sampling=Sampling(max_prompt=PROMPT, max_tokens=NEW))
SPLITS = {'update': ('fsdp', 'data', 'tensor', 'expert'), 'decode': ('data', 'tensor', 'expert')}


def main():
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--layers', type=int, default=1)
  parser.add_argument('--rows', type=int, default=8, help='rows in strong scaling; rows per device in weak scaling')
  parser.add_argument('--devices', default='1,2,4,8', help='several numbers separated by commas')
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()
  # Two kv heads with eight query heads each: eight devices can share them. The mixture has at least two experts per device.
  sizes: dict = {'hidden_size': 512, 'num_hidden_layers': args.layers, 'num_attention_heads': 16, 'head_dim': 32}
  sizes |= {'num_key_value_heads': 2, 'vocab_size': 16384}
  dense = tiny('qwen2', intermediate_size=2560, **sizes)
  mixture = tiny('qwen3_moe', num_experts=16, num_experts_per_tok=2, moe_intermediate_size=320, **sizes)
  rows = []
  for program, splits in SPLITS.items():
    for split in splits:
      for scaling in ('strong', 'weak'):
        for n in map(int, args.devices.split(',')):
          count = args.rows * (n if scaling == 'weak' else 1)
          rows.append(measured(mixture if split == 'expert' else dense, program, split, scaling, n, count))
  weights = {'weights': weights_of(dense), 'weights of the mixture': weights_of(mixture)}
  report(args.save or 'scaling', rows, {**weights, 'tokens': TOKENS, 'rows': rows}, save=bool(args.save))


def weights_of(config: ModelConfig) -> int:
  """Return the number of weights of a model."""
  return sum(w.size for w in jax.tree.leaves(transformer.abstract_params(config)))


def measured(config: ModelConfig, program: str, split: str, scaling: str, n: int, count: int) -> dict:
  """Return the row of `program` with `count` rows on n devices, all of them on the mesh axis `split`."""
  axes = Mesh(**{'data': 1, 'fsdp': 1, 'tensor': 1, split: n})
  mesh = make_mesh(axes, jax.devices()[:n], (config.num_heads, config.num_kv_heads))
  if program == 'update':  # one microbatch
    made = programs.update(config, RUN, Shape(1, count, TOKENS, count, NEW, row_shards(mesh)), mesh)
  else:
    layout = cache_layout(config, DENSE, UNQUANTISED, PROMPT, NEW, jnp.dtype(RUN.model.dtype))
    made = programs.decoding(config, RUN, layout, UNQUANTISED, count, mesh)
  text = made.jitted.lower(*made.arguments, **made.static).compile().as_text()
  found = [c for c in collectives(text) if c.depth]  # without those outside loops: the gradient's norm, once per update
  sums = {kind: sum(c.moved for c in found if c.kind == kind) for kind in KINDS}
  return {
    'program': program, 'split': split, 'scaling': scaling, 'devices': n, 'rows': count, 'collectives': len(found),
    'MB sent': sum(sums.values()) / 1e6, **{f'{kind} MB': sums[kind] / 1e6 for kind in KINDS[:5]},
  }  # fmt: skip


if __name__ == '__main__':
  main()
