"""Call a jitted function with arrays on its mesh, on other devices, and on no mesh. Prints the outcomes as JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sprl.sharding.rules import OnMesh


def mesh(first, count):
  return Mesh(np.array(jax.devices()[first : first + count]), ('fsdp',), axis_types=(AxisType.Auto,))


def on(which):
  return jax.device_put(jnp.arange(8.0), NamedSharding(which, P('fsdp')))


@OnMesh
@jax.jit
def total(x):
  return jnp.sum(x)


def outcome(function, x):
  try:
    return float(function(x))
  except ValueError as error:
    return str(error)


four, others = mesh(0, 4), mesh(4, 4)
print(
  json.dumps(
    {
      'its mesh': outcome(total.on(four), on(four)),
      'host array': outcome(total.on(four), np.arange(8.0)),
      'other devices': outcome(total.on(four), on(others)),
      'fewer devices': outcome(total.on(four), on(mesh(0, 2))),
      'no mesh': outcome(total, on(four)),
    }
  )
)
