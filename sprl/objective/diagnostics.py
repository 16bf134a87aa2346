"""How far the sampler is from the learner, and the learner from where it started: metrics that are logged always.

`mismatch` is fp8_rollouts 5 (`rollout_corr/...`) and sparse_rollouts 8 (`sparse/...`); `policy_metrics` is the update's own
drift (async_rollouts 10). Every metric is a finite scalar, also for rows and batches in which the model wrote nothing;
a log-prob that is not finite does show, for the sentinels (guards.py) to stop the run.

KL alone misses some collapses for hundreds of steps: read the effective sample size, chi2, the largest |log rho| and the
5th percentile of the agreement beside it.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sprl.objective import masked
from sprl.objective.correction import Corrected, catastrophic, rejection_limits
from sprl.objective.losses import Facts
from sprl.objective.masked import bounded, bounded_exp, k3, largest, mean, quantile, share, smallest, std
from sprl.settings import Correction

Metrics = dict[str, Float[Array, '']]
USUAL_VETO = 1e-4  # what counts as catastrophic where no veto is set


def mismatch(
  old_logp: Float[Array, 'B T'],
  sampler_logp: Float[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  advantage: Float[Array, 'B T'],
  reward: Float[Array, ' B'],
  corrected: Corrected,
  settings: Correction,
) -> Metrics:
  """The sampler against the learner before the update; `corrected` is what `correct` made of the same log-probs."""
  old, roll = (jnp.where(mask, x, 0) for x in (old_logp, sampler_logp))
  advantage = jnp.where(mask, advantage, 0)
  corr = {
    **_perplexities(old, roll, mask),
    **_divergences(old, roll, mask),
    **_probabilities(old, roll, mask),
    'adv_signed_bias': _ratio(mean(advantage * (old - roll), mask), mean(jnp.abs(advantage), mask)),
    # Of the tokens that survive, those weighted other than 1 (1 where none does): a rejection corrects nothing of what it leaves.
    'corrected_fraction': jnp.where(corrected.mask.any(), share(corrected.applied != 1, corrected.mask), 1),
    **_weights(corrected, mask, settings),
    **_rejections(corrected, mask, settings),
    **_vetoes(old - roll, mask, settings),
  }
  sparse = _sparse(old - roll, mask, reward, corrected, settings)
  return {f'rollout_corr/{k}': v for k, v in corr.items()} | {f'sparse/{k}': v for k, v in sparse.items()}


def effective_sample_size(w: Float[Array, 'B T'], mask: Bool[Array, 'B T']) -> Float[Array, '']:
  """1 / mean((w / mean w)^2), in (0, 1]: the share of the tokens that equal weights would need for the same variance."""
  return _ratio(mean(w, mask) ** 2, mean(w**2, mask))


def _perplexities(old, roll, mask):
  rows = mask.any(axis=1)
  of_old, of_roll = (-mean(x, mask, axis=1) for x in (old, roll))  # log-perplexity of each row
  delta = of_old - of_roll
  return {
    'training_ppl': mean(bounded_exp(of_old), rows),
    'rollout_ppl': mean(bounded_exp(of_roll), rows),
    'training_log_ppl': mean(of_old, rows),
    'rollout_log_ppl': mean(of_roll, rows),
    'log_ppl_diff': mean(delta, rows),
    'log_ppl_abs_diff': mean(jnp.abs(delta), rows),
    'log_ppl_diff_max': largest(delta, rows),
    'log_ppl_diff_min': smallest(delta, rows),
    'ppl_ratio': mean(bounded_exp(delta), rows),  # mean of exp, not exp of mean
  }


def _divergences(old, roll, mask):
  log_rho = old - roll
  rows = mask.any(axis=1)
  log_m = jnp.logaddexp(old, roll) - jnp.log(2.0)  # of the even mixture of the two policies
  size = jnp.abs(log_rho)
  return {
    'kl': mean(-log_rho, mask),
    'k3_kl': mean(k3(log_rho), mask),
    'chi2_token': jnp.where(mask.any(), mean(bounded_exp(log_rho) ** 2, mask) - 1, 0),
    'chi2_seq': jnp.where(mask.any(), mean(jnp.exp(2 * bounded(masked.total(log_rho, mask, axis=1))), rows) - 1, 0),
    'token_mult_prob_error': mean(bounded_exp(size), mask),
    'gen_kl_error': mean(k3(log_rho), mask),
    'policy_kl_error': mean(k3(-log_rho), mask),
    'js_divergence_error': mean((k3(old - log_m) + k3(roll - log_m)) / 2, mask),
    'abs_dlogp_mean': mean(size, mask),
    'abs_dlogp_p99': quantile(size, mask, (0.99,))[0],
    'abs_dlogp_max': largest(size, mask),
  }


def _probabilities(old, roll, mask):
  p, q = jnp.exp(old), jnp.exp(roll)
  dp, dq = p - mean(p, mask), q - mean(q, mask)
  return {
    'probs_diff_valid': mask.any().astype(p.dtype),  # 0: there was no token to compare
    'probs_diff_max': largest(p - q, mask),
    'probs_diff_mean': mean(p - q, mask),
    'probs_diff_std': std(p - q, mask),
    'probs_pearson': _ratio(mean(dp * dq, mask), jnp.sqrt(mean(dp**2, mask)) * jnp.sqrt(mean(dq**2, mask))),
  }


def _weights(corrected, mask, settings):
  rows = mask.any(axis=1)
  low = settings.floor if settings.weight in ('clip', 'icepop') else 1 / settings.cap
  within = jnp.clip(corrected.raw, 0, settings.cap)
  row = mean(corrected.applied, mask, axis=1)
  raw_row = mean(corrected.raw, mask, axis=1)
  metrics = {
    'mean': mean(corrected.applied, mask),
    'min': smallest(corrected.applied, mask),
    'max': largest(corrected.applied, mask),
    'raw_min': smallest(corrected.raw, mask),
    'raw_max': largest(corrected.raw, mask),
    'std': std(within, mask),
    'eff_sample_size': effective_sample_size(within, mask),
    'ratio_fraction_high': share(corrected.raw > settings.cap, mask),
    'ratio_fraction_low': share(corrected.raw < low, mask),
    'seq_mean': mean(row, rows),
    'seq_std': std(row, rows, ddof=1),
    'seq_max': largest(row, rows),
    'seq_min': smallest(row, rows),
    'seq_max_deviation': largest(jnp.abs(row - 1), rows),
    'seq_fraction_high': share(raw_row > settings.cap, rows),
    'seq_fraction_low': share(raw_row < low, rows),
    'batch_norm_factor': mean(corrected.norm, rows),
  }
  if settings.weight == 'icepop':
    metrics['oob_ratio'] = share((corrected.raw < low) | (corrected.raw > settings.cap), mask)
  return {f'rollout_is_{name}': value for name, value in metrics.items()}


def _rejections(corrected, mask, settings):
  """Of every option its statistic (log rho for k1), how much of it lies beyond each bound, and what it took out."""
  rows = mask.any(axis=1)
  metrics = _masked_fractions(mask & ~corrected.mask, mask)
  for option, (low, high) in rejection_limits(settings).items():
    x, keep = corrected.rejections[option]
    per_row = x.ndim == 1
    where = rows if per_row else mask
    row = x if per_row else mean(x, mask, axis=1)
    of_option = {
      'mean': mean(x, where),
      'max': largest(x, where),
      'min': smallest(x, where),
      'std': std(jnp.clip(x, low, high), where),
      'fraction_high': share(x > high, where),
      'fraction_low': share(x < low, where),
      'seq_mean': mean(row, rows),
      'seq_std': std(row, rows, ddof=1),
      'seq_max': largest(row, rows),
      'seq_min': smallest(row, rows),
      'seq_max_deviation': largest(jnp.abs(row), rows),
      'seq_fraction_high': share(row > high, rows),
      'seq_fraction_low': share(row < low, rows),
      **_masked_fractions(mask & ~(keep[:, None] if per_row else keep), mask),
    }
    metrics |= {f'{option}_{name}': value for name, value in of_option.items()}
  return {f'rollout_rs_{name}': value for name, value in metrics.items()}


def _masked_fractions(rejected, mask):
  return {'masked_fraction': share(rejected, mask), 'seq_masked_fraction': share(rejected.any(axis=1), mask.any(axis=1))}


def _vetoes(log_rho, mask, settings):
  vetoed = catastrophic(log_rho, mask, settings.veto).any(axis=1)
  return {
    'veto_fraction': share(vetoed, mask.any(axis=1)),
    'catastrophic_token_fraction': share(catastrophic(log_rho, mask, settings.veto or USUAL_VETO), mask),
    'catastrophic_sequence_fraction': share(
      catastrophic(log_rho, mask, settings.veto or USUAL_VETO).any(axis=1), mask.any(axis=1)
    ),
  }


def _sparse(log_rho, mask, reward, corrected, settings):
  xi = bounded_exp(log_rho)
  agreement = jnp.exp(-jnp.abs(log_rho))
  rows = mask.any(axis=1)
  vetoed = catastrophic(log_rho, mask, settings.veto).any(axis=1)
  length = mask.sum(axis=1).astype(xi.dtype)
  xi_p05, xi_p50, xi_p95 = quantile(xi, mask, (0.05, 0.5, 0.95))
  return {
    **_vetoes(log_rho, mask, settings),
    'masked_token_fraction': share(~corrected.mask, mask),
    'xi_mean': mean(xi, mask),
    'xi_p05': xi_p05,
    'xi_p50': xi_p50,
    'xi_p95': xi_p95,
    'xi_max': largest(xi, mask),
    'ess': effective_sample_size(jnp.minimum(xi, settings.cap), mask),
    'k3_kl': mean(k3(log_rho), mask),
    'kl': mean(-log_rho, mask),
    'agreement_mean': mean(agreement, mask),
    'agreement_p05': quantile(agreement, mask, (0.05,))[0],
    'response_length_vetoed': mean(length, rows & vetoed),
    'response_length_kept': mean(length, rows & ~vetoed),
    'reward_vetoed': mean(reward, rows & vetoed),
    'reward_kept': mean(reward, rows & ~vetoed),
  }


# --- the update ------------------------------------------------------------------------------------------------------


def policy_sums(facts: Facts, mask: Bool[Array, 'B T']) -> Metrics:
  """Sums over a microbatch's tokens, which add up over microbatches, for `policy_metrics`."""
  r = bounded_exp(facts.log_ratio)
  terms = {
    'tokens': jnp.ones_like(r),
    'r': r,
    'r2': r**2,
    'deviation': jnp.abs(r - 1),
    'kl': -facts.log_ratio,
    'k3': k3(facts.log_ratio),
    'clipped': facts.clipped.astype(r.dtype),
  }
  return {name: masked.total(x, mask) for name, x in terms.items()}


def policy_metrics(sums: Metrics) -> Metrics:
  """The update's ratio: its mean, mean |r - 1|, kl and k3 to the ratio's denominator, effective sample size, clip fraction."""
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
  """a / b, and 0 where b is 0."""
  return a / jnp.where(b == 0, 1, b) * (b != 0)


# --- text (host) -----------------------------------------------------------------------------------------------------


def repetition(tokens: Int[np.ndarray, ' C']) -> float:
  """Length of the longest n-gram that occurs twice (overlapping or not) over the completion's length: near 1 in an endless loop.

  A repeated n-gram holds repeated shorter ones, so bisection finds the longest. Grams of 2^k tokens get numbers by pairing
  those of 2^(k-1); one of n tokens is two overlapping ones: n = 7 is the grams of 4 at i and at i + 3. O(C log^2 C).
  """
  length = len(tokens)
  if length < 2:
    return 0.0
  numbers = [np.unique(tokens, return_inverse=True)[1]]
  while 2 ** len(numbers) < length:
    half = 2 ** (len(numbers) - 1)
    numbers.append(np.unique(_pairs(numbers[-1], half, length), return_inverse=True)[1])

  def repeats(n: int) -> bool:
    k = n.bit_length() - 1
    grams = _pairs(numbers[k], n - 2**k, length)
    return len(np.unique(grams)) < len(grams)

  low, high = 0, length - 1  # the longest lies in low..high
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if repeats(middle) else (low, middle - 1)
  return low / length


def _pairs(number, shift, length):
  """One integer for the grams at i and i + shift together, wherever both exist."""
  number = number.astype(np.int64)
  return number[: len(number) - shift] * length + number[shift:]
