"""Processes that broadcast and compute in turns, until process 1 sleeps in its turn."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sprl.distributed.process_group import join
from sprl.sharding.rules import OnMesh


def turn_of_process_1(turn: int) -> None:
  if turn == 3:
    time.sleep(120)


with join(patience=4.0) as team:
  mesh = Mesh(np.array(jax.devices()), 'x')
  split = NamedSharding(mesh, PartitionSpec('x'))
  rows = jax.make_array_from_callback((team.processes,), split, lambda i: np.ones(1, np.float32))
  total = OnMesh(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec())), mesh)
  for turn in range(1000):
    team.broadcast('turn', lambda turn=turn: turn)
    if team.process == 1:
      turn_of_process_1(turn)
    print(turn, float(total(rows)), flush=True)
