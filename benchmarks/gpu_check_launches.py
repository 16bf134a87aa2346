"""The part `launches` of gpu_check.py: the time of a kernel launch, and of iterations of two loops.

`launch` gives START of gpu_static_model.py, or LAUNCH if XLA uses no CUDA graphs. The host reads the condition of one loop before
each iteration: `iteration, host reads` less `iteration, counted` gives HOST_READ (docs/first_gpu.md). Each launch or iteration
adds 1 to 128 numbers, which takes almost no time. The condition that the host reads includes a maximum of these numbers.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from device_timing import LEAST, seconds
from gpu_check_bench import Bench, Case, Row, Rows

COUNT = 256  # launches of a program, and iterations of a loop


def check_launches(bench: Bench) -> Iterator[Case]:
  """Time launches one after another, and iterations of loops whose trip count XLA knows or does not know."""
  cases: dict[str, Callable] = {'launch': chain, 'iteration, counted': counted, 'iteration, host reads': host_reads}
  for case, call in cases.items():
    yield Case('launches', case, partial(each, bench, call))


def each(bench: Bench, call: Callable, before: Rows) -> Row:
  """Return the microseconds of a launch or iteration: COUNT of them less COUNT / 2, divided by COUNT / 2."""
  few, many = (
    seconds(
      partial(call, count), lambda key: (jax.random.normal(key, (128,)),), 0, *bench.sizes((5, LEAST), (1, 0)), inputs=2, calls=2
    )
    for count in (COUNT // 2, COUNT)
  )
  return {'us': 1e6 * (many - few) / (COUNT - COUNT // 2)}


def chain(count: int, x: jax.Array) -> jax.Array:
  """Add 1 `count` times, each time in its own launch: the barrier stops XLA from fusing the additions."""
  for _ in range(count):
    x = jax.lax.optimization_barrier(x + 1)
  return x


def counted(count: int, x: jax.Array) -> jax.Array:
  """Add 1 in a loop whose trip count XLA knows."""
  return jax.lax.fori_loop(0, count, lambda i, x: x + 1, x)


def host_reads(count: int, x: jax.Array) -> jax.Array:
  """Add 1 in a loop whose end depends on the data. The host reads the loop's condition before each iteration."""
  return jax.lax.while_loop(
    lambda carry: (carry[0] < count) & (jnp.max(carry[1]) < jnp.inf), lambda carry: (carry[0] + 1, carry[1] + 1), (0, x)
  )[1]
