"""Time of calls on a device, and the device's measured limits.

One program makes the call on several inputs that are together larger than any cache, in a loop on the device. The time thus
excludes Python, warm caches and the start of the program. At the start XLA updates the program's CUDA graph, which takes longer
than a short kernel. The median of several runs counts.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

WORK = 4 * 2**30  # bytes of all inputs and their outputs: more than any cache holds
CALLS = 16  # calls of an iteration, if their outputs fit into WORK; an iteration takes some 20 us in addition to them
LEAST = 0.05  # seconds of a run
# Tensor cores multiply e4m3 twice as fast as bfloat16. Below this ratio (1.05e15 FLOP/s on an H200) the library converts e4m3.
FP8_GAIN = 1.5


class Ceilings(NamedTuple):
  """Measured limits of a device."""

  copy: float  # bytes per second; reads and writes both count
  bf16: float  # FLOP per second of a large bfloat16 matrix product
  fp8: float | None  # FLOP per second of a large e4m3 matrix product; None if the device has none

  @property
  def upcast(self) -> bool:
    """Whether the library's e4m3 product is too slow to be one: it converts its operands and multiplies bfloat16."""
    return self.fp8 is not None and self.fp8 < FP8_GAIN * self.bf16

  @property
  def fp8_rate(self) -> float:
    """The rate that e4m3 products are compared with: the measured one, or twice bfloat16's if the library upcasts."""
    return 2 * self.bf16 if self.fp8 is None or self.upcast else self.fp8


def seconds(
  call: Callable,
  make: Callable[[jax.Array], Sequence[Any]],
  moving: int = 0,
  runs: int = 5,
  least: float = LEAST,
  inputs: int = 48,
  calls: int = CALLS,
) -> float:
  """Return the median seconds of call(*make(key)) over up to `inputs` keys. A run takes `least` seconds; 0: one iteration.

  An iteration has `calls` calls at least, if their outputs fit into WORK. The first `moving` arguments are donated: the call may
  reuse their buffers, and must return their replacements.
  """
  shapes = jax.eval_shape(make, jax.random.key(0))
  out = jax.eval_shape(call, *shapes)
  size, of_out = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(each)) for each in ((shapes, out), out))
  count = max(2, min(inputs, WORK // size))
  cycles = max(1, min(-(-calls // count), WORK // (of_out * count))) if least else 1
  made = jax.jit(make)
  arguments = [tuple(made(key)) for key in jax.random.split(jax.random.key(1), count)]
  movers, fixed = [each[:moving] for each in arguments], [each[moving:] for each in arguments]
  del arguments
  looped = jax.jit(loop(call, moving, cycles), donate_argnums=0)

  def timed(state, iterations):
    start = time.perf_counter()
    state = jax.block_until_ready(looped(state, fixed, iterations))
    return state, time.perf_counter() - start

  outs = [] if moving else [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out) for _ in range(cycles * count)]
  state, _ = timed((movers, outs), 1)  # compiles
  state, once = timed(state, 1)
  iterations, times = math.ceil(least / once) or 1, []
  for _ in range(runs):
    state, taken = timed(state, iterations)
    times.append(taken / (iterations * cycles * count))
  return statistics.median(times)


def loop(call: Callable, moving: int, cycles: int) -> Callable:
  """Return a function (state, fixed, iterations) -> state that makes the call `cycles` times on each input, in each iteration.

  The state has the first `moving` arguments of every input, and the outputs of the last iteration if there are none.
  """
  compiled = jax.jit(call)  # lowered once for all inputs

  def run(state, fixed, iterations):
    def iteration(i, state):
      (movers, _), given, outs = state, fixed, []
      for _ in range(cycles):
        movers, given, i = jax.lax.optimization_barrier((movers, given, i))  # a chain: XLA would make equal calls once
        found = [compiled(*m, *f) for m, f in zip(movers, given)]
        movers, outs = (found, []) if moving else (movers, outs + found)
      return movers, outs

    return jax.lax.fori_loop(0, iterations, iteration, state)

  return run


def ceilings(rehearse: bool) -> Ceilings:
  """Measure the rates of a copy and of square matrix products of random numbers."""
  size, side = (2**18, 64) if rehearse else (2**28, 8192)

  def square(dtype):
    return lambda key: [jax.random.normal(k, (side, side)).astype(dtype) for k in jax.random.split(key)]

  def product(out):
    return lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out)

  copied = seconds(lambda x: x + 1, lambda key: (jax.random.normal(key, (size,)),))  # XLA moves bytes in small pieces
  bf16 = seconds(product(jnp.bfloat16), square(jnp.bfloat16))
  try:
    fp8 = 2 * side**3 / seconds(product(jnp.bfloat16), square(jnp.float8_e4m3fn))
  except Exception as error:  # libraries without this product raise different errors
    print(f'no FP8 matrix rate: {type(error).__name__}', flush=True)
    fp8 = None
  return Ceilings(2 * 4 * size / copied, 2 * side**3 / bf16, fp8)
