"""Correction of the mismatch between the sampler and the learner (docs/methods/losses.md, eq. 11 to 20).

The sampler evicts, quantises or runs ahead, so a token is drawn from pi_sampler and not from pi_old, the learner's dense policy
before the update. With log rho = old - sampler:

  1. `weigh`: w = rho of the token, its segment or its sequence; truncated, clipped or zeroed (icepop); optionally divided by
     the mean weight over tokens (levels token and segment) or over sequences (sequence and geometric). Rejected tokens and
     sequences count in the mean.
  2. `reject`: tokens or whole sequences leave the mask. Rejection does not change the weights.

Nothing here carries a gradient. The formulas do not depend on the cause of the mismatch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.config import Correction
from sprl.config_checks import rejection_bounds
from sprl.objective import masked
from sprl.objective.masked import bounded, bounded_exp, k3
from sprl.types import LogProbs


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenWeights:
  """Importance weights of the tokens, and the values before them that diagnostics report. Without gradient."""

  weight: Float[Array, 'B T']  # w as it multiplies the loss; 0 where the model wrote nothing
  raw: Float[Array, 'B T']  # before its bounds; at level None rho of the token
  applied: Float[Array, 'B T']  # after its bounds, before normalisation


class Rejection(NamedTuple):
  """Statistic and decision of one rejection option, per token or per sequence."""

  statistic: Float[Array, 'B *T']  # sigma of eq. 15: k1, k2 or k3 of the clamped log rho, of a token, or over a sequence
  keep: Bool[Array, 'B *T']


class Survivors(NamedTuple):
  """The tokens that survive every rejection, and each rejection option by its name."""

  mask: Bool[Array, 'B T']
  rejections: dict[str, Rejection]


def weigh(
  logprobs: LogProbs, mask: Bool[Array, 'B T'], settings: Correction, micro: Int[Array, ' B'] | None = None
) -> TokenWeights:
  """Return the weights of a batch (eq. 11 to 14): `logprobs.old` against `logprobs.sampler`.

  With the reinforce loss in bypass mode, pass the current log-probs as `old`. `mask` is True on the tokens that the model wrote.
  `micro` is the microbatch of each sequence, for normalise = 'micro': 0 to B - 1, or -1 for a sequence that is left out, whose
  mask is False.

  Raises ValueError if `old` is missing, or `micro` where it is needed.
  """
  raw = jnp.where(mask, bounded_exp(pooled(_log_rho(logprobs, mask), mask, settings.level)), 0)
  applied = _limited(raw, settings) if settings.level is not None else mask.astype(raw.dtype)
  applied = jnp.where(jnp.isfinite(applied), applied, 0)
  return TokenWeights(weight=applied / _mean_weight(applied, mask, settings, micro)[:, None], raw=raw, applied=applied)


def reject(logprobs: LogProbs, mask: Bool[Array, 'B T'], settings: Correction) -> Survivors:
  """Return the tokens of `mask` that survive (eq. 15, 16 and 20): `logprobs.old` against `logprobs.sampler`.

  Raises ValueError if `old` is missing and the settings reject something.
  """
  if not settings.reject and settings.veto is None:
    return Survivors(mask, {})
  log_rho = _log_rho(logprobs, mask)
  rejections, surviving = {}, mask
  for option, (low, high) in rejection_limits(settings).items():
    statistic = _statistic(option, log_rho, mask)
    keep = (low <= statistic) & (statistic <= high)
    rejections[option] = Rejection(statistic, keep)
    surviving &= keep[:, None] if keep.ndim == 1 else keep
  if settings.veto is not None:
    surviving &= ~catastrophic(log_rho, mask, settings.veto).any(axis=1, keepdims=True)
  return Survivors(surviving, rejections)


def _log_rho(logprobs, mask):
  if logprobs.old is None:
    raise ValueError('LogProbs.old = None: a correction compares it with LogProbs.sampler')
  old, sampler = (jax.lax.stop_gradient(jnp.where(mask, x, 0)) for x in (logprobs.old, logprobs.sampler))
  return old - sampler


def rejection_limits(settings: Correction) -> dict[str, tuple[float, float]]:
  """Return (low, high) of each rejection option in the units of its statistic: logarithms for k1, whose bounds are on rho."""

  def limit(option, bound):
    return bound if not option.endswith('k1') else math.log(bound) if bound > 0 else -math.inf

  return {option: (limit(option, low), limit(option, high)) for option, (low, high) in rejection_bounds(settings).items()}


def catastrophic(log_rho: Float[Array, 'B T'], mask: Bool[Array, 'B T'], veto: float) -> Bool[Array, 'B T']:
  """Return the tokens with rho below `veto` (eq. 16; not clamped): far less likely under the old policy than the sampler."""
  return mask & (log_rho < jnp.log(veto))


def pooled(log_ratio: Float[Array, 'B T'], mask: Bool[Array, 'B T'], level: str | None) -> Float[Array, 'B T']:
  """Pool a log ratio at a level (eq. 11).

  `segment` is the mean of the contiguous run, `geometric` the mean of the sequence, `sequence` its sum; `token` and None leave
  the ratio of the token.
  """
  match level:
    case 'segment':
      return masked.run_mean(log_ratio, mask)
    case 'geometric':
      row = masked.mean(log_ratio, mask, axis=1)
    case 'sequence':
      row = masked.total(log_ratio, mask, axis=1)
    case 'token' | None:
      return log_ratio
    case _:
      raise ValueError(f'level = {level!r}: expected token, segment, sequence, geometric or None')
  return jnp.broadcast_to(row[:, None], mask.shape)


def _limited(w, settings):
  """Bound the weight (eq. 13)."""
  match settings.weight:
    case 'truncate':
      return jnp.minimum(w, settings.cap)
    case 'clip':
      return jnp.where(w > 0, jnp.clip(w, settings.floor, settings.cap), 0)  # 0 is a masked position, never a ratio
    case 'icepop':
      return jnp.where((settings.floor <= w) & (w <= settings.cap), w, 0)
    case _:
      raise ValueError(f'config.correction.weight = {settings.weight!r}: it has no function')


def _mean_weight(applied, mask, settings, micro):
  """Return, per sequence, the mean weight to divide by (eq. 14): over tokens, or over sequences at levels of whole sequences."""
  ones = jnp.ones(mask.shape[0], applied.dtype)
  if settings.normalise is None:
    return ones
  if settings.level in ('sequence', 'geometric'):
    weight, count = applied.max(axis=1), mask.any(axis=1)
  else:
    weight, count = applied.sum(axis=1), mask.sum(axis=1)
  count = count.astype(weight.dtype)
  if settings.normalise == 'global':
    weight, count = weight.sum() * ones, count.sum() * ones
  elif micro is None:
    raise ValueError("config.correction.normalise = 'micro': expected the microbatch of each sequence (micro), got None")
  else:
    weight, count = (jax.ops.segment_sum(x, micro, mask.shape[0])[micro] for x in (weight, count))
  mean = weight / jnp.maximum(count, 1)
  return jnp.where(mean > 1e-8, mean, 1)


def _statistic(option, log_rho, mask):
  """Return sigma of a rejection option (eq. 15): k1 = log rho, k2 = (log rho)^2 / 2 or k3, per token or over each row."""
  over, k = option.rsplit('_', 1)
  divergence = {'k1': bounded, 'k2': lambda u: bounded(u) ** 2 / 2, 'k3': k3}[k](log_rho)
  match over:
    case 'token':
      return divergence
    case 'seq_sum':
      return masked.total(divergence, mask, axis=1)
    case 'seq_mean':
      return masked.mean(divergence, mask, axis=1)
    case _:  # seq_max; k2 and k3 are not negative
      return jnp.where(mask, divergence, 0).max(axis=1)
