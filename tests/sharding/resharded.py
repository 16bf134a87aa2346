"""Reshard arrays of three dtypes from layouts over 4 host devices to layouts over 2, 3 or 4 devices. Prints JSON."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sprl.sharding.reshard import reshard


def mesh(first, *shape):
  devices = np.array(jax.devices()[first : first + int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, ('a', 'b'), axis_types=(AxisType.Auto,) * 2)


sources = [NamedSharding(mesh(0, 2, 2), s) for s in (P(), P('a'), P('a', 'b'), P(None, ('a', 'b')))]
targets = [NamedSharding(mesh(4, *shape), s) for shape in ((2, 1), (1, 3), (2, 2)) for s in (P(), P('a', 'b'), P(('a', 'b')))]
targets += [NamedSharding(mesh(4, 1, 4), P('b', 'a')), NamedSharding(mesh(2, 2, 2), P('a', 'b')), sources[2]]
x = np.arange(24 * 12, dtype=np.float32).reshape(24, 12)
kinds = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)

different, wrong_place = [], []
pairs = list(itertools.product(sources, targets))
for i, (source, target) in enumerate(pairs):
  tree = {str(i): jax.device_put(jnp.asarray(x % 8, kind), source) for i, kind in enumerate(kinds)} | {'scale': jnp.float32(3)}
  with jax.transfer_guard_device_to_host('disallow_explicit'):
    moved = reshard(tree, jax.tree.map(lambda a, t=target: t if a.ndim else NamedSharding(t.mesh, P()), tree))
  different += [i for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(moved)) if not np.array_equal(*map(np.asarray, (a, b)))]
  wrong_place += [i for name in '012' if not moved[name].sharding.is_equivalent_to(target, 2)]
print(json.dumps({'pairs': len(pairs), 'different': different, 'wrong_place': wrong_place}))
