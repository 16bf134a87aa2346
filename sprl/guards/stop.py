"""The reasons to stop a run. `hooks.check_step` raises them after a step.

docs/methods/losses.md, Stop conditions, lists them. docs/troubleshooting.md explains the messages.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from sprl.config import Run
from sprl.guards.checks import (
  BYPASS,
  CLIP_NORM,
  HEALTHY,
  LENGTH,
  MATCHING,
  MEANT,
  NO_FP8,
  NO_FP8_CACHE,
  PRECISION,
  RATE,
  SCALES,
  STALENESS,
  STOP,
  TOKEN_LEVEL,
  WARMUP,
  tries,
)

SATURATION = {  # fraction of the numbers that FP8 clamped -> cause of a large one
  'fp8/kv_saturation': 'keys or values exceed the scales of the FP8 cache',
  'fp8/query_saturation': 'queries exceed their FP8 scales',
}
MAX_KL = 1.0  # nats per token
MAX_APART_STEPS = 2  # in a row: a step of few tokens can exceed MAX_KL by chance
MAX_CAPPED_STEPS = 2
MAX_BAD_UPDATES = 3  # in a row


def policies_differ(metrics: Mapping[str, float]) -> bool:
  """Whether the KL of a step is that of two different policies."""
  kl = metrics.get('rollout_corr/kl', 0.0)
  return math.isfinite(kl) and abs(kl) > MAX_KL


class Streaks(NamedTuple):
  """Numbers of consecutive steps, up to the latest one."""

  capped: int = 0  # in which every response hit the length limit
  apart: int = 0  # in which sampler and learner were different policies

  def after(self, metrics: Mapping[str, float]) -> 'Streaks':
    """Return the numbers after one more step."""
    capped = metrics.get('completion/truncated') == 1
    return Streaks(self.capped + 1 if capped else 0, self.apart + 1 if policies_differ(metrics) else 0)


def sentinels(metrics: Mapping[str, float], run: Run, streaks: Streaks) -> list[str]:
  """Return the reasons to stop the run, each with settings to change. An empty list means that the run continues.

  `metrics` are those of the latest step, and `streaks` include this step.
  """
  reasons = [
    f'{name} = {value}: a log-prob of the sampler or the learner is not finite, because the weights diverged. '
    f'{tries((RATE, PRECISION), run)}'
    for name, value in metrics.items()
    if name.startswith(('rollout_corr/', 'sparse/', 'fp8/')) and not math.isfinite(value)
  ]
  if streaks.apart >= MAX_APART_STEPS:
    reasons.append(
      f'rollout_corr/kl = {metrics["rollout_corr/kl"]:.3g}, beyond {MAX_KL} for {streaks.apart} steps in a row: sampler and '
      f'learner are different policies (typical: 0.001 to 0.03). {tries(MATCHING, run)}'
    )
  for name, cause in SATURATION.items():
    value, most = metrics.get(name, 0.0), HEALTHY[name][1]
    if value > most and run.quant.kv_scale != 'frozen':  # frozen scales are out of date on purpose: `warnings` reports them
      reasons.append(f'{name} = {value:.3g}, beyond {most:g}: {cause}. {tries((SCALES, NO_FP8_CACHE, NO_FP8), run)}')
  stale = metrics.get('async/stale_tokens', 0) > 0 and metrics.get('rollout_corr/corrected_fraction') == 0
  if stale and run.loss.weighted(run.correction.mode):
    reasons.append(
      'older weights sampled some tokens, but every weight is exactly 1 and the ratio is to the log-probs of the learner: '
      f'nothing corrects for the staleness. {tries((STALENESS, TOKEN_LEVEL, BYPASS), run)}'
    )
  if streaks.capped >= MAX_CAPPED_STEPS and run.rollout.stop_when_capped:
    reasons.append(
      f'every response hit the length limit for {streaks.capped} steps in a row: the policy does not end its answers. '
      f'{tries((LENGTH, STOP, MEANT), run)}'
    )
  bad = int(metrics.get('update/bad_streak', 0))
  if bad >= MAX_BAD_UPDATES:
    reasons.append(
      f'the gradient of {bad} updates in a row was not finite; the weights are those before these updates. '
      f'{tries((RATE, WARMUP, CLIP_NORM), run)}'
    )
  return reasons
