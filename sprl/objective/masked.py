"""Bounded ratios and statistics under a mask: the building blocks of the formulas in this package.

Values outside a mask may be anything, NaN included: they are replaced before any arithmetic, because 0 * NaN is NaN. A
statistic of nothing is 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SMALL = 0.02  # |log ratio| below which the series of k3 is accurate to the rounding of float32
LIMIT = 20.0  # bound on |log ratio|: exp(20) = 4.9e8, and float32 still holds its square


def bounded(log_ratio: Float[Array, '*n']) -> Float[Array, '*n']:
  """Clamp a log ratio to +-20: S(x) of docs/methods/losses.md, eq. 2."""
  return jnp.clip(log_ratio, -LIMIT, LIMIT)


def bounded_exp(log_ratio: Float[Array, '*n']) -> Float[Array, '*n']:
  """Return exp(S(log_ratio)): finite for every input but NaN."""
  return jnp.exp(bounded(log_ratio))


@jax.custom_jvp
def k3(log_ratio: Float[Array, '*n']) -> Float[Array, '*n']:
  """Return e^u - 1 - u at u = S(log_ratio), never negative (docs/methods/losses.md, eq. 3).

  Differences would lose the digits of a small u, as in a healthy run: the value is a series there, and the derivative expm1(u).
  """
  u = bounded(log_ratio)
  return jnp.where(jnp.abs(u) < SMALL, u * u * (1 / 2 + u * (1 / 6 + u / 24)), jnp.expm1(u) - u)


@k3.defjvp
def _k3_jvp(primals, tangents):
  (log_ratio,), (along,) = primals, tangents
  u = bounded(log_ratio)
  return k3(log_ratio), jnp.where(jnp.abs(log_ratio) < LIMIT, jnp.expm1(u), 0) * along


def total(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T'], axis: int | None = None) -> Float[Array, '...']:
  """Sum x where the mask is set, over all axes or over one."""
  return jnp.where(mask, x, 0).sum(axis)


def mean(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T'], axis: int | None = None) -> Float[Array, '...']:
  """Average x where the mask is set, over all axes or, with axis=1, over each row."""
  return total(x, mask, axis) / jnp.maximum(mask.sum(axis), 1)


def std(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T']) -> Float[Array, '']:
  """Return the standard deviation (ddof 0) of x where the mask is set."""
  return jnp.sqrt(total((x - mean(x, mask)) ** 2, mask) / jnp.maximum(mask.sum(), 1))


def largest(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T']) -> Float[Array, '']:
  """Return the largest x where the mask is set."""
  return jnp.where(mask.any(), jnp.where(mask, x, -jnp.inf).max(), 0)


def share(event: Bool[Array, 'B *T'], mask: Bool[Array, 'B *T']) -> Float[Array, '']:
  """Return the fraction of the masked positions at which the event holds."""
  return mean(event.astype(float), mask)


def quantile(x: Float[Array, 'B T'], mask: Bool[Array, 'B T'], q: float) -> Float[Array, '']:
  """Return quantile q in [0, 1] of x where the mask is set, linear between neighbours. NaN if one of these is NaN."""
  found = jnp.nanquantile(jnp.where(mask, x, jnp.nan), jnp.asarray(q, x.dtype))
  return jnp.where((mask & jnp.isnan(x)).any(), jnp.nan, jnp.where(mask.any(), found, 0))


def runs(mask: Bool[Array, 'B T']) -> Int[Array, 'B T']:
  """Number the contiguous runs of masked positions, from 1 in each row.

  A position outside the mask carries the number of the run before it: mask 0 1 1 0 0 1 gives 0 1 1 1 1 2.
  """
  before = jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]
  return jnp.cumsum(mask & ~before, axis=1)


def run_mean(x: Float[Array, 'B T'], mask: Bool[Array, 'B T']) -> Float[Array, 'B T']:
  """Replace each x by the mean over the contiguous run of its position."""
  run = runs(mask)
  numbers = mask.shape[1] // 2 + 2  # at most every second position starts a run, and number 0 precedes the first

  def sums(values):
    return jax.vmap(lambda v, i: jax.ops.segment_sum(v, i, numbers))(values, run)

  means = sums(jnp.where(mask, x, 0)) / jnp.maximum(sums(mask.astype(x.dtype)), 1)
  return jnp.take_along_axis(means, run, axis=1)
