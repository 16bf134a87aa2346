"""The part `launches` of gpu_check.py: what a launch costs, and what it costs that a loop asks the host whether to go on.

These are constants of the static model of a step (gpu_static_model.py). The launches do next to nothing, so the time is theirs.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from device_timing import seconds
from gpu_check_bench import Bench, Case, Row, Rows

COUNT = 256  # launches of a program, and iterations of a loop


def check_launches(bench: Bench) -> Iterator[Case]:
  """Time launches one after another, and the iterations of loops whose number is known or is not."""
  cases: dict[str, Callable] = {'launch': chain, 'iteration, counted': counted, 'iteration, asked': asked}
  for case, call in cases.items():
    yield Case('launches', case, partial(each, bench, call))


def each(bench: Bench, call: Callable, before: Rows) -> Row:
  """Return the microseconds of one launch or iteration, from the time that one more of them takes."""
  few, many = (
    seconds(partial(call, count), lambda key: (jax.random.normal(key, (128,)),), runs=bench.sizes(5, 1), launches=1, inputs=2)
    for count in (COUNT // 2, COUNT)
  )
  return {'us': 1e6 * (many - few) / (COUNT - COUNT // 2)}


def chain(count: int, x: jax.Array) -> jax.Array:
  """Add 1 so often, each time in a launch of its own: the barrier keeps XLA from fusing them."""
  for _ in range(count):
    x = jax.lax.optimization_barrier(x + 1)
  return x


def counted(count: int, x: jax.Array) -> jax.Array:
  """Add 1 in a loop whose number of iterations XLA knows."""
  return jax.lax.fori_loop(0, count, lambda i, x: x + 1, x)


def asked(count: int, x: jax.Array) -> jax.Array:
  """Add 1 in a loop that ends when the data say so. The host reads the answer before each iteration."""
  return jax.lax.while_loop(
    lambda carry: (carry[0] < count) & (jnp.max(carry[1]) < jnp.inf), lambda carry: (carry[0] + 1, carry[1] + 1), (0, x)
  )[1]
