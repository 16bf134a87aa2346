"""Reshard arrays from layouts over 4 host devices to layouts over 2, 3 or 4 devices, and restore one. Prints JSON."""

import itertools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sprl.io.checkpoint import Checkpoints
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
  kind = kinds[(i + i // len(targets)) % len(kinds)]
  tree = {'x': jax.device_put(jnp.asarray(x % 8, kind), source), 'scale': jnp.float32(3)}
  with jax.transfer_guard_device_to_host('disallow_explicit'):
    moved = reshard(tree, jax.tree.map(lambda a, t=target: t if a.ndim else NamedSharding(t.mesh, P()), tree))
  different += [i for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(moved)) if not np.array_equal(*map(np.asarray, (a, b)))]
  wrong_place += [] if moved['x'].sharding.is_equivalent_to(target, 2) else [i]

with tempfile.TemporaryDirectory() as folder:  # a checkpoint of one layout, restored onto another
  checkpoints = Checkpoints(Path(folder), 1)
  checkpoints.save(1, {'x': jax.device_put(x, sources[2])}, {})
  checkpoints.wait()
  restored = checkpoints.restore({'x': jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=targets[4])})
  assert restored is not None
  kept = {'placed': restored.arrays['x'].sharding == targets[4], 'equal': bool(np.array_equal(restored.arrays['x'], x))}
print(json.dumps({'pairs': len(pairs), 'different': different, 'wrong_place': wrong_place, 'restored': kept}))
