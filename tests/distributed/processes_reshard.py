"""One process of two with four devices each: moves arrays from two devices of each process to the other two. Prints JSON."""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sprl.distributed.process_group import join
from sprl.sharding.reshard import complete_per_process, reshard
from sprl.sharding.transfer import place


def laid(numbers, shape, spec):
  devices = np.array([jax.devices()[n] for n in numbers]).reshape(shape)
  return NamedSharding(Mesh(devices, ('a', 'b'), axis_types=(AxisType.Auto,) * 2), spec)


with join() as team:
  specs = P(), P('a'), P('b', 'a'), P(None, ('a', 'b')), P(None, 'b')
  sources = [laid((0, 1, 4, 5), shape, spec) for shape in ((2, 2), (4, 1)) for spec in specs]
  targets = [laid((2, 3, 6, 7), shape, spec) for shape in ((2, 2), (1, 4)) for spec in specs]
  x = np.arange(24 * 12, dtype=np.float32).reshape(24, 12) % 8
  wrong, pairs, most = [], list(itertools.product(sources, targets)), 0.0
  for n, (source, target) in enumerate(pairs):
    for kind in (jnp.float32, jnp.float8_e4m3fn):
      whole = x.astype(kind)
      [held] = place([whole], [source])
      with jax.transfer_guard_device_to_host('disallow_explicit'):
        moved = reshard({'x': held}, {'x': target})['x']
      found = [np.array_equal(np.asarray(s.data), whole[s.index]) for s in moved.addressable_shards]
      if found != [True, True] or not moved.sharding.is_equivalent_to(target, 2) or moved.dtype != kind:
        wrong.append((n, str(kind)))
      near = complete_per_process(held)
      if near is not held:
        most = max(most, *(shard.data.nbytes / whole.nbytes for shard in near.addressable_shards))
  told = {'process': team.process, 'pairs': len(pairs), 'wrong': wrong, 'most': most}
  print(json.dumps(told), flush=True)
  sys.exit(team.leave(0))
