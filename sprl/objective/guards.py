"""Guards: checks of the metrics of one step.

`sentinels` returns the reasons to stop a run, and the loop raises them. `warnings` returns the metrics outside their healthy
range, and the loop logs them. Ranges and reasons: docs/methods/losses.md, Health ranges and Stop conditions.
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
  'fp8/kv_saturation': (0.0, 1e-4),
  'fp8/query_saturation': (0.0, 1e-4),
}

SATURATED = {  # fraction of the numbers that FP8 clamped -> cause of a large one
  'fp8/kv_saturation': 'keys or values exceed the scales of the FP8 cache',
  'fp8/query_saturation': 'queries exceed their FP8 scales',
}
MAX_KL = 1.0  # nats per token
MAX_CAPPED_STEPS = 2


def sentinels(
  metrics: Mapping[str, float], capped_steps: int = 0, weighted: bool = True, frozen_scales: bool = False
) -> list[str]:
  """Return the reasons to stop the run, one sentence each. An empty list means that the run continues.

  `capped_steps` counts the latest consecutive steps, this one included, in which every response hit the length limit.
  `weighted` says whether the correction's weight alone corrects for the sampler (`losses.weighted`).
  `frozen_scales` says that saturation is expected, because scales are those of step 0: `warnings` reports it.
  """
  reasons = [
    f'{name} = {value}: a log-prob of the sampler or the learner is not finite'
    for name, value in metrics.items()
    if name.startswith(('rollout_corr/', 'sparse/', 'fp8/')) and not math.isfinite(value)
  ]
  kl = metrics.get('rollout_corr/kl', 0.0)
  if math.isfinite(kl) and abs(kl) > MAX_KL:
    reasons.append(
      f'rollout_corr/kl = {kl:.3g}, beyond {MAX_KL}: sampler and learner are different policies (typical: 0.001 to 0.03)'
    )
  for name, cause in SATURATED.items():
    value, most = metrics.get(name, 0.0), HEALTHY[name][1]
    if value > most and not frozen_scales:
      reasons.append(
        f'{name} = {value:.3g}, beyond {most:g}: {cause} '
        "(set config.quant.kv_scale; config.quant.sampler = 'w8a8' keeps the cache in the compute dtype)"
      )
  if metrics.get('async/stale_tokens', 0) > 0 and weighted and metrics.get('rollout_corr/corrected_fraction') == 0:
    reasons.append(
      'older weights sampled some tokens, but every weight is exactly 1 and the ratio is to the log-probs of the learner: '
      "nothing corrects for the staleness (set config.correction.level = 'token', or config.correction.mode = 'bypass', whose "
      'ratio is to the log-probs of the sampler)'
    )
  if capped_steps >= MAX_CAPPED_STEPS:
    reasons.append(f'every response hit the length limit for {capped_steps} steps in a row: the policy does not end its answers')
  return reasons


def warnings(metrics: Mapping[str, float]) -> dict[str, str]:
  """Return a sentence for each metric outside its healthy range, by the name of the metric.

  A run that saturates FP8 goes on only with frozen scales, so the sentence names these as the cause.
  """
  stale = ": the scales of step 0 are out of date (config.quant.kv_scale = 'frozen')"
  return {
    name: f'{name} = {metrics[name]:.4g}, outside {low:g} to {high:g}{stale if name in SATURATED else ""}'
    for name, (low, high) in HEALTHY.items()
    if name in metrics and not low <= metrics[name] <= high
  }
