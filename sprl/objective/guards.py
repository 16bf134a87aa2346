"""When the metrics say that a run is broken, or unwell (fp8_rollouts 5 and 7, sparse_rollouts 8).

Predicates on one step's metrics: the trainer raises on `sentinels` and logs `warnings`.
"""

import math
from collections.abc import Mapping

# metric -> (lowest, highest) of a healthy run
HEALTHY: dict[str, tuple[float, float]] = {
  'rollout_corr/rollout_is_mean': (0.5, 2.0),
  'rollout_corr/rollout_is_eff_sample_size': (0.3, math.inf),
  'rollout_corr/rollout_is_std': (0.0, 1.0),
  'rollout_corr/kl': (-0.1, 0.1),
  'rollout_corr/chi2_token': (-math.inf, 1.0),
  'rollout_corr/token_mult_prob_error': (0.0, 1.05),
  'sparse/agreement_p05': (0.86, math.inf),
}


MAX_SATURATION = 1e-4  # of the FP8 cache's numbers


def sentinels(metrics: Mapping[str, float], capped_steps: int = 0, weighted: bool = True) -> list[str]:
  """Why the run must stop, one sentence each; empty: go on.

  `capped_steps`: how many steps in a row, this one included, every response ran into the length limit.
  `weighted`: whether the correction's weight is all that accounts for who sampled (losses.weighted).
  """
  reasons = [
    f'{name} = {value}: a log-prob of the sampler or the learner is not finite'
    for name, value in metrics.items()
    if name.startswith(('rollout_corr/', 'sparse/', 'fp8/')) and not math.isfinite(value)
  ]
  kl = metrics.get('rollout_corr/kl', 0.0)
  if math.isfinite(kl) and abs(kl) > 1.0:
    reasons.append(f'rollout_corr/kl = {kl:.3g}, beyond 1.0: sampler and learner are different policies (typical: 0.001 to 0.03)')
  saturation = metrics.get('fp8/kv_saturation', 0.0)
  if saturation > MAX_SATURATION:
    reasons.append(
      f'fp8/kv_saturation = {saturation:.3g}, beyond {MAX_SATURATION:g}: keys or values outgrew the scales of the FP8 cache '
      "(config.quant.kv_scale, kv_margin; or config.quant.sampler = 'w8a8' leaves the cache as it is)"
    )
  if metrics.get('async/stale_tokens', 0) > 0 and weighted and metrics.get('rollout_corr/corrected_fraction') == 0:
    reasons.append(
      'tokens were sampled by older weights, ratios are to what the learner itself has scored, and every weight is exactly 1: '
      'nothing corrects for it '
      "(config.correction.level = 'token', or config.correction.mode = 'bypass', divides by the log-probs that sampled)"
    )
  if capped_steps >= 2:
    reasons.append(f'every response hit the length limit for {capped_steps} steps in a row: the policy does not end its answers')
  return reasons


def warnings(metrics: Mapping[str, float]) -> dict[str, str]:
  """Which metrics have left their healthy range: a sentence for each by its name."""
  return {
    name: f'{name} = {metrics[name]:.4g}, outside {low:g} to {high:g}'
    for name, (low, high) in HEALTHY.items()
    if name in metrics and not low <= metrics[name] <= high
  }
