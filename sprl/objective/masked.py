"""The words that this room's formulas are written in: the bounded exponential, and statistics under a mask.

Values outside a mask may be anything, also nan: they are replaced before they meet arithmetic. A statistic of nothing is 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LIMIT = 20.0  # |log ratio| above which its exponential is that of the limit: exp(20) = 4.9e8, whose square float32 still holds


def bounded(log_ratio: Float[Array, '*n']) -> Float[Array, '*n']:
  """SAFE(x) of the specs: a log ratio clamped to +-20."""
  return jnp.clip(log_ratio, -LIMIT, LIMIT)


def bounded_exp(log_ratio: Float[Array, '*n']) -> Float[Array, '*n']:
  """exp(SAFE(x)): finite for every x but nan."""
  return jnp.exp(bounded(log_ratio))


def k3(log_ratio: Float[Array, '*n']) -> Float[Array, '*n']:
  """e^u - u - 1 at u = SAFE(log_ratio), never negative."""
  u = bounded(log_ratio)
  return jnp.expm1(u) - u  # exp(u) - 1 loses every digit of the small u of a healthy run


def total(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T'], axis: int | None = None) -> Float[Array, '...']:
  """Sum of x where the mask is set."""
  return jnp.where(mask, x, 0).sum(axis)


def mean(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T'], axis: int | None = None) -> Float[Array, '...']:
  """Mean of x where the mask is set: mm(x) of the specs, or with axis=1 the row means ms(x)."""
  return total(x, mask, axis) / jnp.maximum(mask.sum(axis), 1)


def std(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T'], ddof: int = 0) -> Float[Array, '']:
  """Standard deviation of x where the mask is set."""
  return jnp.sqrt(total((x - mean(x, mask)) ** 2, mask) / jnp.maximum(mask.sum() - ddof, 1))


def largest(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T']) -> Float[Array, '']:
  """Largest x where the mask is set."""
  return jnp.where(mask.any(), jnp.where(mask, x, -jnp.inf).max(), 0)


def smallest(x: Float[Array, 'B *T'], mask: Bool[Array, 'B *T']) -> Float[Array, '']:
  """Smallest x where the mask is set."""
  return -largest(-x, mask)


def share(event: Bool[Array, 'B *T'], mask: Bool[Array, 'B *T']) -> Float[Array, '']:
  """Fraction of the masked positions at which the event holds."""
  return mean(event.astype(float), mask)


def quantile(x: Float[Array, 'B T'], mask: Bool[Array, 'B T'], q: tuple[float, ...]) -> Float[Array, ' Q']:
  """Quantiles of x where the mask is set, linear between neighbours."""
  return jnp.where(mask.any(), jnp.nanquantile(jnp.where(mask, x, jnp.nan), jnp.asarray(q, x.dtype)), 0)


def runs(mask: Bool[Array, 'B T']) -> Int[Array, 'B T']:
  """The number, from 1 in each row, of the contiguous run that a masked position belongs to.

  mask 0 1 1 0 0 1 -> runs 0 1 1 1 1 2: positions outside the mask carry the number of the run before them.
  """
  before = jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]
  return jnp.cumsum(mask & ~before, axis=1)


def run_mean(x: Float[Array, 'B T'], mask: Bool[Array, 'B T']) -> Float[Array, 'B T']:
  """Each position's x replaced by the mean over its contiguous run."""
  run = runs(mask)
  most = mask.shape[1] // 2 + 2  # at most every second position starts a run; number 0 comes before the first

  def sums(values):
    return jax.vmap(lambda v, i: jax.ops.segment_sum(v, i, most))(values, run)

  means = sums(jnp.where(mask, x, 0)) / jnp.maximum(sums(mask.astype(x.dtype)), 1)
  return jnp.take_along_axis(means, run, axis=1)
