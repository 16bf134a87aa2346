"""Held-out evaluation: pass@k and avg@k with confidence intervals, and samples to read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sprl.cache.scales import Scales
from sprl.io.scores import interval, pass_at_k
from sprl.models.transformer import Params
from sprl.policy import Policy
from sprl.rollout import collect
from sprl.sampler import calibrate
from sprl.settings import DENSE, UNQUANTISED, Run
from sprl.tasks.grading_pool import GradingPool
from sprl.tasks.problems import Problem

FIRST_UID = 1 << 30  # evaluation's requests are numbered apart from training's


def evaluate(
  run: Run,
  policy: Policy,
  params: Params,
  problems: Sequence[Problem],
  pool: GradingPool,
  shown: int = 16,
  scales: Scales | None = None,
) -> dict[str, Any]:
  """The first `run.eval.problems` held-out problems, the same ones with the same random numbers each time.

  `run.eval.memory` says whether they are answered with a dense, unquantised sampler or as rollouts are; the latter's cache
  takes `scales`, or where there are none those found on the problems' prompts.

  metrics    scalars for the log; eval/avg@k with eval/low and eval/high, its 95 % interval
  intervals  (mean, low, high) of avg@k, the mean score, and of pass@1 and pass@k, the chances that one, or any of k samples,
             gets full marks; each problem's samples are averaged first
  samples    rows of `shown` completions
  """
  settings = run.eval
  k = settings.samples
  asked = problems[: settings.problems]
  limit = settings.max_tokens or run.sampling.max_tokens
  sampling = replace(run.sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=0, min_p=0.0, max_tokens=limit)
  rows = min(run.sampling.rows or run.rollout.prompts * run.rollout.group, len(asked) * k)
  as_sampled = settings.memory == 'sampler'
  cache, quant = (run.cache, run.quant) if as_sampled else (DENSE, UNQUANTISED)
  plan = policy.plan(sampling, cache, quant)
  engine = policy.engine(sampling, plan, rows, min(run.rollout.prompts, -(-rows // k)), run.seed)
  requests = collect.requests(asked, policy.tokenizer, k, limit, FIRST_UID)
  if plan.fp8 and scales is None:
    prompts = [r.prompt for r in requests[::k]]
    scales = calibrate.scales_of_prompts(policy.graphdef, plan, params, prompts, engine.prefill, quant)
  served = policy.serve(params, quant, scales)
  trajectories, counts = collect.grade(engine.generate(served, requests), asked, policy.tokenizer, pool)

  score = np.array([t.reward for t in trajectories]).reshape(len(asked), k)
  right = (score >= 1).sum(axis=1)
  intervals = {f'avg@{k}': interval(score.mean(axis=1))}
  intervals |= {f'pass@{j}': interval(pass_at_k(right, k, j)) for j in (1, k)}
  mean, low, high = intervals[f'avg@{k}']
  return {
    'metrics': {
      'eval/avg@k': mean,
      'eval/low': low,
      'eval/high': high,
      **{f'eval/pass@{j}': intervals[f'pass@{j}'][0] for j in (1, k)},
      'eval/problems': float(len(asked)),
      'eval/samples': float(k),
      'eval/length_mean': float(np.mean([len(t.completion) for t in trajectories])),
      'eval/truncated': float(np.mean([t.finish == 'length' for t in trajectories])),
      'eval/ungraded': len(trajectories) - counts['grading/ok'],
    },
    'intervals': intervals,
    'samples': collect.sample_rows(trajectories, asked, policy.tokenizer, shown),
  }
