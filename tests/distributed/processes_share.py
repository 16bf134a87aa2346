"""One process of two: prints its share of weights, arrays and problems as JSON. Arguments: model folder, folder of problems."""

import json
import sys
import weakref
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from sprl.config import Mesh, Task
from sprl.distributed.process_group import join
from sprl.io import huggingface
from sprl.learner.optimizer import left_out
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.rollout.broadcast import BroadcastProblems
from sprl.sharding.mesh import make_mesh
from sprl.sharding.reshard import reshard
from sprl.sharding.rules import shardings
from sprl.sharding.transfer import fetch, park, place
from sprl.tasks import jsonl, problems

with join() as team:
  folder = Path(sys.argv[1])
  config = ModelConfig.read(folder)
  mesh = make_mesh(Mesh(), heads=(config.num_heads, config.num_kv_heads))
  laid = shardings(mesh, transformer.logical_axes(config), transformer.abstract_params(config))
  read, inner = [], huggingface._read

  def counting(stored, dtype, index):
    part = inner(stored, dtype, index)
    read.append(part.nbytes)
    return part

  huggingface._read = counting
  params = huggingface.load_params(folder, config, laid)
  held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)

  x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))
  with jax.transfer_guard('disallow'):
    [placed] = place([x], [rows])
    parked = park(placed)
    doubled = fetch({'x': jax.jit(lambda a: 2 * a)(placed)})['x']
  again = parked.back()
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  schedule = optax.ScaleByScheduleState(count=place(np.int32(3), everywhere))
  # `device_put` would compare the number of all processes, on all devices: rollout devices would take part.
  with jax.transfer_guard('disallow'), patch.object(multihost_utils, 'assert_equal', side_effect=AssertionError):
    [after] = left_out((schedule,), 2)

  halves = [jax.sharding.Mesh(np.array([jax.devices()[n] for n in numbers]), 'a') for numbers in ((0, 2), (1, 3))]
  ours, theirs = (jax.sharding.NamedSharding(half, jax.sharding.PartitionSpec('a')) for half in halves)
  [held_in_part] = place([x], [ours])
  with jax.transfer_guard_device_to_host('disallow_explicit'):
    moved = reshard({'x': held_in_part}, {'x': theirs})['x']

  made, understood = [], jsonl.problem

  class Row(dict):
    pass

  def noted(*line):
    row = Row(understood(*line))
    made.append(weakref.ref(row))
    return row

  jsonl.problem = noted
  ours = problems.load(Task(kind='jsonl', path=sys.argv[2]), 'train', team.process, team.processes)
  lines = [int(row['answer']) for row in (ref() for ref in made) if row is not None]
  found = {
    'devices': [jax.local_device_count(), jax.device_count()],
    'read': sum(read),
    'held': held,
    'whole': sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    'embed': float(jnp.sum(params['embed'])),
    'rows': sorted(float(shard.data[0, 0]) / 3 for shard in placed.addressable_shards),
    'parked': sum(part.nbytes for part in parked.parts.values()),
    'doubled': bool(np.array_equal(doubled, 2 * x)),
    'back': bool(np.array_equal(fetch(again), x)) and again.sharding == placed.sharding,
    'moved': [moved.sharding == theirs, all(np.array_equal(np.asarray(s.data), x[s.index]) for s in moved.addressable_shards)],
    'lines': lines,
    'left_out': int(fetch(after.count)),
    'problems': [problem.answer for problem in map(BroadcastProblems(ours, team).__getitem__, range(len(ours)))],
    'decided': team.broadcast('who', lambda: team.process),
  }
  print(json.dumps({'process': team.process, **found}), flush=True)
  sys.exit(team.leave(0))
