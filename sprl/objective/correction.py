"""Correcting for the gap between the sampler and the learner (fp8_rollouts 4, sparse_rollouts 3).

The sampler evicts, quantises or runs ahead, so a token was drawn from pi_sampler and not from pi_old, the learner's dense
policy before the update. With log rho = old_logp - sampler_logp:

  1. weights   w = rho of the token, its segment or its sequence; truncated, clipped or zeroed (icepop); perhaps divided
               by their mean over all the tokens that the model wrote, rejected ones too. They never touch the mask.
  2. rejection takes tokens or whole sequences out of the mask. It never touches the weights.

Nothing here carries a gradient. The formulas do not care where the gap comes from.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.objective import masked
from sprl.objective.masked import bounded, bounded_exp, k3
from sprl.settings import ARMS, Correction, SettingsError, rejection_bounds


class Rejection(NamedTuple):
  """What one rejection option measured and decided: per token, or per sequence."""

  statistic: Float[Array, 'B *T']  # log rho (k1) or its k2, k3; summed, averaged or maximised over a row by sequence options
  keep: Bool[Array, 'B *T']


class Corrected(NamedTuple):
  """Weights and mask for the loss, and what the diagnostics tell of how they came about. Detached."""

  weight: Float[Array, 'B T']  # w as it multiplies the loss; 0 where the model wrote nothing
  mask: Bool[Array, 'B T']  # the tokens that survive every rejection
  keep: Bool[Array, ' B']  # sequences that pass the rules on whole sequences: veto, error, seq_* options
  raw: Float[Array, 'B T']  # the weight before its bounds (at level `off`: the tokens' rho)
  applied: Float[Array, 'B T']  # the weight after its bounds, before normalisation
  norm: Float[Array, ' B']  # the mean that each sequence's weights were divided by
  rejections: dict[str, Rejection]


def correct(
  old_logp: Float[Array, 'B T'],
  sampler_logp: Float[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  settings: Correction,
  micro: Int[Array, ' B'] | None = None,
) -> Corrected:
  """Weights and surviving tokens of a batch.

  `micro` numbers each sequence's microbatch (0..B-1) for norm_scope = micro; ValueError where it is missing.
  In bypass mode with the reinforce loss, old_logp is the log-prob under the weights being trained.
  """
  old_logp, sampler_logp = (jax.lax.stop_gradient(jnp.where(mask, x, 0)) for x in (old_logp, sampler_logp))
  log_rho = old_logp - sampler_logp
  raw = jnp.where(mask, bounded_exp(pooled(log_rho, mask, settings.level)), 0)
  applied = _limited(raw, settings) if settings.level != 'off' else mask.astype(raw.dtype)
  applied = jnp.where(jnp.isfinite(applied), applied, 0)
  norm = _mean_weight(applied, mask, settings, micro)

  rejections = {}
  for option, (low, high) in rejection_limits(settings).items():
    statistic = _statistic(option, log_rho, mask)
    rejections[option] = Rejection(statistic, (low <= statistic) & (statistic <= high))
  keep = jnp.ones(mask.shape[0], bool)
  survive = mask
  for rejection in rejections.values():
    if rejection.keep.ndim == 1:
      keep &= rejection.keep
    else:
      survive &= rejection.keep
  if settings.veto > 0:
    keep &= ~catastrophic(log_rho, mask, settings.veto).any(axis=1)
  if settings.max_sequence_error > 0:
    keep &= masked.mean(bounded_exp(jnp.abs(log_rho)), mask, axis=1) <= settings.max_sequence_error
  if settings.token_mask:
    rho = bounded_exp(log_rho)
    survive &= (settings.mask_low <= rho) & (rho <= settings.mask_high)
  if settings.max_prob_diff > 0:
    survive &= jnp.abs(jnp.exp(old_logp) - jnp.exp(sampler_logp)) <= settings.max_prob_diff
  return Corrected(applied / norm[:, None], survive & keep[:, None], keep, raw, applied, norm, rejections)


def rejection_limits(settings: Correction) -> dict[str, tuple[float, float]]:
  """Each rejection option's bounds in the units of its statistic: logarithms of those on rho for k1."""

  def limit(option, bound):
    return bound if not option.endswith('k1') else math.log(bound) if bound > 0 else -math.inf

  return {option: (limit(option, low), limit(option, high)) for option, (low, high) in rejection_bounds(settings).items()}


def catastrophic(log_rho: Float[Array, 'B T'], mask: Bool[Array, 'B T'], veto: float) -> Bool[Array, 'B T']:
  """The tokens that the sampler drew and the learner all but excludes: unclamped rho < veto."""
  return mask & (log_rho < jnp.log(veto))


def pooled(log_ratio: Float[Array, 'B T'], mask: Bool[Array, 'B T'], level: str) -> Float[Array, 'B T']:
  """A log ratio at a level: the token's own, its segment's or sequence's mean (`geometric`), or its sequence's sum."""
  match level:
    case 'segment':
      return masked.run_mean(log_ratio, mask)
    case 'geometric':
      row = masked.mean(log_ratio, mask, axis=1)
    case 'sequence':
      row = masked.total(log_ratio, mask, axis=1)
    case _:
      return log_ratio
  return jnp.broadcast_to(row[:, None], mask.shape)


def _limited(w, settings):
  match settings.weight:
    case 'truncate':
      return jnp.minimum(w, settings.cap)
    case 'clip':
      return jnp.where(w > 0, jnp.clip(w, settings.floor, settings.cap), 0)  # 0 is a masked position, never a ratio
    case _:  # icepop
      return jnp.where((settings.floor <= w) & (w <= settings.cap), w, 0)


def _mean_weight(applied, mask, settings, micro):
  """The mean weight that each sequence is to be divided by: over tokens, or over sequences where they share one weight."""
  ones = jnp.ones(mask.shape[0], applied.dtype)
  if not settings.normalise:
    return ones
  if settings.level in ('sequence', 'geometric'):
    weight, count = applied.max(axis=1), mask.any(axis=1)
  else:
    weight, count = applied.sum(axis=1), mask.sum(axis=1)
  count = count.astype(weight.dtype)
  if settings.norm_scope == 'global':
    weight, count = weight.sum() * ones, count.sum() * ones
  elif micro is None:
    raise ValueError("correction.norm_scope = 'micro' needs each sequence's microbatch number")
  else:
    weight, count = (jax.ops.segment_sum(x, micro, mask.shape[0])[micro] for x in (weight, count))
  mean = weight / jnp.maximum(count, 1)
  return jnp.where(mean > 1e-8, mean, 1)


def _statistic(option, log_rho, mask):
  """What a rejection option looks at: k1 = log rho, k2 = (log rho)^2 / 2 or k3, of a token or over the tokens of a row."""
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


# --- presets ---------------------------------------------------------------------------------------------------------

_off, _token, _sequence = Correction(level='off'), Correction(level='token'), Correction(level='sequence')
_icepop = replace(_token, weight='icepop', floor=0.5, cap=5.0)


def _bypass(base: Correction) -> Correction:
  return replace(base, mode='bypass')


def _reject(base: Correction, option: str, bounds: str) -> Correction:
  return replace(base, reject=(option,), reject_bounds=(bounds,))


def _geo(base: Correction) -> Correction:
  return _reject(base, 'seq_mean_k1', '0.999_1.001')


def _k3(base: Correction) -> Correction:
  return _reject(base, 'seq_mean_k3', '0.01')


# fp8_rollouts 4.5, sparse_rollouts 3.1, async_rollouts 7. `ppo_clip*` go with loss.variant = ppo, `pg_*` with reinforce.
PRESETS: dict[str, Correction] = {
  'disabled': _off,  # metrics only
  'token_is': _token,  # the default for fp8 rollouts
  'seq_is': _sequence,
  'token_icepop': _icepop,
  'seq_is_rs': _reject(_sequence, 'seq_sum_k1', '0.5_2.0'),  # Seq-MIS
  'geo_rs': _geo(_off),
  'geo_rs_seq_tis': _geo(_sequence),
  'geo_rs_token_tis': _geo(_token),
  'k3_rs': _k3(_off),
  'k3_rs_seq_tis': _k3(_sequence),
  'k3_rs_token_tis': _k3(_token),
  'ppo_clip': _bypass(_off),
  'ppo_clip_geo_rs': _bypass(_geo(_off)),
  'ppo_clip_k3_rs': _bypass(_k3(_off)),
  'pg_is': _bypass(_sequence),
  'pg_token_icepop': _bypass(_icepop),
  'pg_geo_rs': _bypass(_geo(_off)),
  'pg_geo_rs_seq_tis': _bypass(_geo(_sequence)),
  'pg_geo_rs_token_tis': _bypass(_geo(_token)),
  'seq_mask_tis': _reject(replace(_token, cap=1e9), 'seq_mean_k1', '0.999_1.002'),  # NeMo-RL; no rho reaches that cap
  'slime': replace(_token, normalise=True, veto=1e-4),
  **{arm: correction for arm, correction in ARMS.items() if correction is not None},
  'roll': replace(_token, cap=1.2),
  'areal': replace(_token, weight='icepop', floor=0.0, cap=5.0),  # with loss.variant = decoupled_ppo: w above 5 rejected
  'areal_clamp': replace(_token, cap=5.0),  # ... or clamped
}


def preset(name: str) -> Correction:
  """The correction settings that a paper or codebase calls `name`; SettingsError lists the names known."""
  if name not in PRESETS:
    raise SettingsError(f'correction preset {name!r}: expected one of {", ".join(PRESETS)}')
  return PRESETS[name]
