"""One process of several: joins the others, and prints the sum over all devices of what each process has put on its own."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sprl.parallel.processes import initialize

initialize()
mesh = jax.make_mesh((jax.device_count(),), ('all',), axis_types=(jax.sharding.AxisType.Auto,))
mine = [jax.device_put(jnp.full((1,), 10.0 ** jax.process_index()), device) for device in jax.local_devices()]
numbers = jax.make_array_from_single_device_arrays((jax.device_count(),), NamedSharding(mesh, PartitionSpec('all')), mine)
total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(numbers)
print(f'process {jax.process_index()} of {jax.process_count()}: {float(total):g}', flush=True)
