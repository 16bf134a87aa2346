"""Metrics of the mismatch between sampler and learner, and of the drift of the update (docs/methods/losses.md, eq. 35 to 43).

`mismatch` gives `rollout_corr/...` and `sparse/...`, `policy_metrics` gives `policy/...`. Every metric is a finite scalar, also
for rows and batches in which the model wrote nothing. A log-prob that is not finite does show, so that the guards stop the run.

KL alone misses some collapses for hundreds of steps. Also read the effective sample size, chi2, the largest |log rho| and the
5th percentile of the agreement.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sprl.config import Correction
from sprl.objective import masked
from sprl.objective.correction import Survivors, TokenWeights, catastrophic
from sprl.objective.losses import TokenRatios
from sprl.objective.masked import bounded, bounded_exp, k3, largest, mean, quantile, share, std
from sprl.types import LogProbs

Metrics = dict[str, Float[Array, '']]
DEFAULT_VETO = 1e-4  # bound on rho of the catastrophic metrics where no veto is set
ESS_CAP = 2.0  # of `sparse/ess`: one cap for all settings, so that arms with other caps compare


def mismatch(
  logprobs: LogProbs,
  settings: Correction,
  *,
  mask: Bool[Array, 'B T'],
  advantage: Float[Array, 'B T'],
  weights: TokenWeights,
  survivors: Survivors,
) -> Metrics:
  """Compare `logprobs.old` with `logprobs.sampler` over the tokens in `mask`, which the model wrote.

  `weights` and `survivors` are what `weigh` and `reject` return for the same log-probs; in bypass mode the weights of
  `reinforce` are of the current policy. Means are over tokens, or over rows with a token. Log ratios and KL estimates are in
  nats.

  rollout_corr/
    kl, k3_kl                    mean of -log rho, and of k3(log rho) (eq. 37)
    policy_kl_error              mean of k3(-log rho) (eq. 38)
    js_divergence_error          Jensen-Shannon divergence (eq. 39)
    chi2_token, chi2_seq         mean of rho^2, minus 1, for tokens and for sequences (eq. 36)
    token_mult_prob_error        mean of exp |log rho| (eq. 40)
    abs_dlogp_mean, _p99, _max   |log rho|
    ppl_ratio                    perplexity of `old` over that of `sampler`, mean over rows (eq. 41)
    probs_pearson                correlation of the two probabilities
    adv_signed_bias              mean of log rho weighted by the advantage, over mean |advantage| (eq. 42)
    corrected_fraction           surviving tokens with a weight other than 1; 1 if none survives (eq. 43)
    rollout_is_mean              mean of the bounded weight
    rollout_is_std, rollout_is_eff_sample_size        of the weight clipped to [0, cap]; icepop: as it is applied (eq. 35)
    rollout_is_ratio_fraction_high, _low              weights above the cap; below the floor, or 1 / cap without one
    rollout_rs_masked_fraction, rollout_rs_seq_masked_fraction   rejected tokens, and rows with a rejected token
    rollout_rs_OPTION_mean, rollout_rs_OPTION_masked_fraction    statistic and rejected tokens of each rejection option
  sparse/
    agreement_mean, _p05         exp(-|log rho|) (eq. 40)
    ess                          effective sample size of rho clipped to 2, with any correction (eq. 35)
    veto_fraction                rows that the veto rejects
    catastrophic_sequence_fraction   rows with a token below the veto, or below 1e-4 where no veto is set
  """
  if logprobs.old is None:
    raise ValueError('LogProbs.old = None: the mismatch compares it with LogProbs.sampler')
  old, sampler = (jnp.where(mask, x, 0) for x in (logprobs.old, logprobs.sampler))
  advantage = jnp.where(mask, advantage, 0)
  log_rho = old - sampler
  corr = {
    **_divergences(old, sampler, mask),
    'adv_signed_bias': _ratio(mean(advantage * log_rho, mask), mean(jnp.abs(advantage), mask)),
    # Surviving tokens only: a rejection corrects nothing of the tokens that it keeps.
    'corrected_fraction': jnp.where(survivors.mask.any(), share(weights.applied != 1, survivors.mask), 1),
    **_weights(weights, mask, settings),
    **_rejections(survivors, mask),
  }
  sparse = _agreement(log_rho, mask, settings)
  return {f'rollout_corr/{k}': v for k, v in corr.items()} | {f'sparse/{k}': v for k, v in sparse.items()}


def effective_sample_size(w: Float[Array, 'B T'], mask: Bool[Array, 'B T']) -> Float[Array, '']:
  """Return (mean w)^2 / mean(w^2), in (0, 1] (eq. 35): the share of the tokens that equal weights would need."""
  return _ratio(mean(w, mask) ** 2, mean(w**2, mask))


def _divergences(old, sampler, mask):
  log_rho = old - sampler
  rows = mask.any(axis=1)
  log_m = jnp.logaddexp(old, sampler) - jnp.log(2.0)  # of the even mixture of the two policies
  size = jnp.abs(log_rho)
  row_gap = mean(sampler, mask, axis=1) - mean(old, mask, axis=1)
  p, q = jnp.exp(old), jnp.exp(sampler)
  dp, dq = p - mean(p, mask), q - mean(q, mask)
  return {
    'kl': mean(-log_rho, mask),
    'k3_kl': mean(k3(log_rho), mask),
    'policy_kl_error': mean(k3(-log_rho), mask),
    'js_divergence_error': mean((k3(old - log_m) + k3(sampler - log_m)) / 2, mask),
    'chi2_token': jnp.where(mask.any(), mean(bounded_exp(log_rho) ** 2, mask) - 1, 0),
    'chi2_seq': jnp.where(mask.any(), mean(jnp.exp(2 * bounded(masked.total(log_rho, mask, axis=1))), rows) - 1, 0),
    'token_mult_prob_error': mean(bounded_exp(size), mask),
    'abs_dlogp_mean': mean(size, mask),
    'abs_dlogp_p99': quantile(size, mask, 0.99),
    'abs_dlogp_max': largest(size, mask),
    'ppl_ratio': mean(bounded_exp(row_gap), rows),  # the mean of exponentials, not the exponential of the mean
    'probs_pearson': _ratio(mean(dp * dq, mask), jnp.sqrt(mean(dp**2, mask)) * jnp.sqrt(mean(dq**2, mask))),
  }


def _weights(weights, mask, settings):
  low = settings.floor if settings.weight in ('clip', 'icepop') else 1 / settings.cap
  zeroed = settings.weight == 'icepop' and settings.level is not None
  within = weights.applied if zeroed else jnp.clip(weights.raw, 0, settings.cap)
  return {
    'rollout_is_mean': mean(weights.applied, mask),
    'rollout_is_std': std(within, mask),
    'rollout_is_eff_sample_size': effective_sample_size(within, mask),
    'rollout_is_ratio_fraction_high': share(weights.raw > settings.cap, mask),
    'rollout_is_ratio_fraction_low': share(weights.raw < low, mask),
  }


def _rejections(survivors, mask):
  rejected = mask & ~survivors.mask
  metrics = {
    'rollout_rs_masked_fraction': share(rejected, mask),
    'rollout_rs_seq_masked_fraction': share(rejected.any(axis=1), mask.any(axis=1)),
  }
  for option, (statistic, keep) in survivors.rejections.items():
    per_row = keep.ndim == 1
    metrics[f'rollout_rs_{option}_mean'] = mean(statistic, mask.any(axis=1) if per_row else mask)
    metrics[f'rollout_rs_{option}_masked_fraction'] = share(~(keep[:, None] if per_row else keep) & mask, mask)
  return metrics


def _agreement(log_rho, mask, settings):
  agreement = jnp.exp(-jnp.abs(log_rho))
  rows = mask.any(axis=1)
  vetoed = jnp.zeros_like(mask) if settings.veto is None else catastrophic(log_rho, mask, settings.veto)
  catastrophes = catastrophic(log_rho, mask, settings.veto or DEFAULT_VETO)
  return {
    'agreement_mean': mean(agreement, mask),
    'agreement_p05': quantile(agreement, mask, 0.05),
    'ess': effective_sample_size(jnp.minimum(bounded_exp(log_rho), ESS_CAP), mask),
    'veto_fraction': share(vetoed.any(axis=1), rows),
    'catastrophic_sequence_fraction': share(catastrophes.any(axis=1), rows),
  }


# --- the update ------------------------------------------------------------------------------------------------------


def policy_sums(ratios: TokenRatios, mask: Bool[Array, 'B T']) -> Metrics:
  """Sum over the tokens of a microbatch for `policy_metrics`. The sums of microbatches add up."""
  r = bounded_exp(ratios.log_ratio)
  terms = {
    'tokens': jnp.ones_like(r),
    'r': r,
    'r2': r**2,
    'deviation': jnp.abs(r - 1),
    'kl': -ratios.log_ratio,
    'k3': k3(ratios.log_ratio),
    'clipped': ratios.clipped.astype(r.dtype),
  }
  return {name: masked.total(x, mask) for name, x in terms.items()}


def policy_metrics(sums: Metrics) -> Metrics:
  """Return means over tokens of the ratio r that the loss used, from `policy_sums` of the whole batch.

  policy/
    ratio_mean, ratio_deviation   r and |r - 1|
    kl, k3_kl                     KL estimates between the denominator of r and the current policy, in nats
    ess                           effective sample size of r
    clip_fraction                 tokens on whose loss a bound took effect
  """
  n = sums['tokens']
  return {
    'policy/ratio_mean': _ratio(sums['r'], n),
    'policy/ratio_deviation': _ratio(sums['deviation'], n),
    'policy/kl': _ratio(sums['kl'], n),
    'policy/k3_kl': _ratio(sums['k3'], n),
    'policy/ess': _ratio(sums['r'] ** 2, n * sums['r2']),
    'policy/clip_fraction': _ratio(sums['clipped'], n),
  }


def _ratio(a, b):
  """Return a / b, and 0 where b is 0."""
  return a / jnp.where(b == 0, 1, b) * (b != 0)
