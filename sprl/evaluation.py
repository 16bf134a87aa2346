"""Held-out evaluation: pass@k and avg@k with confidence intervals, and samples to read."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sprl.acting import HeldOut
from sprl.cache.scales import Scales
from sprl.io.scores import interval, pass_at_k
from sprl.models.transformer import Params
from sprl.parallel.team import ALONE, Team
from sprl.policy import Policy
from sprl.rollout import collect
from sprl.rollout.agreed import AgreedEngine
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.sources import Apart, prompts
from sprl.sampler import calibrate
from sprl.sampler.slots import Slots
from sprl.settings import DENSE, UNQUANTISED, Rollout, Run

FIRST_UID = 1 << 30  # evaluation's sequences are numbered apart from training's


def evaluate(
  run: Run,
  policy: Policy,
  params: Params,
  held_out: HeldOut,
  shown: int = 16,
  scales: Scales | None = None,
  stopped: Callable[[], Any] = lambda: False,
  team: Team = ALONE,
) -> dict[str, Any]:
  """What is held out, the same with the same random numbers each time; nothing where `stopped` comes to say so meanwhile.

  `run.eval.memory` says whether it is answered with a dense, unquantised sampler or as rollouts are; the latter's cache
  takes `scales`, or where there are none those found on the prompts.

  metrics    scalars for the log; eval/avg@k with eval/low and eval/high, its 95 % interval
  intervals  (mean, low, high) of avg@k, the mean score, and of pass@1 and pass@k, the chances that one, or any of k samples,
             gets full marks; each problem's samples are averaged first
  samples    rows of `shown` completions
  """
  settings = run.eval
  k, count = settings.samples, held_out.count
  limit = settings.max_tokens or run.sampling.max_tokens
  sampling = replace(run.sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=0, min_p=0.0, max_tokens=limit)
  rows = min(run.sampling.rows or run.rollout.prompts * run.rollout.group, count * k)
  as_sampled = settings.memory == 'sampler'
  cache, quant = (run.cache, run.quant) if as_sampled else (DENSE, UNQUANTISED)
  plan = policy.plan(sampling, cache, quant)
  engine = policy.engine(sampling, plan, rows, min(run.rollout.prompts, -(-rows // k)), run.seed)
  source, first = Apart(held_out.source(limit), FIRST_UID // k), FIRST_UID // k
  if plan.fp8 and scales is None:
    some = prompts(source, first, min(count, engine.prefill))
    scales = calibrate.scales_of_prompts(policy.graphdef, plan, params, some, engine.prefill, quant)
  slots = Slots(engine, policy.serve(params, quant, scales))
  scheduler = Scheduler(
    [AgreedEngine(slots, team)],
    held_out.workers,
    source,
    Rollout(prompts=count, group=k),
    time.perf_counter,
    groups=count,
    first=first,
  )
  groups = scheduler.batch(stopped)
  if groups is None:
    return {}
  trajectories = [t for group in groups for t in group.trajectories]

  score = np.array([t.reward for t in trajectories]).reshape(count, k)
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
      'eval/problems': float(count),
      'eval/samples': float(k),
      'eval/length_mean': float(np.mean([t.mask.sum() for t in trajectories])),
      'eval/truncated': float(np.mean([t.finish == 'length' for t in trajectories])),
      'eval/ungraded': float(sum(t.status != 'ok' for t in trajectories)),
    },
    'intervals': intervals,
    'samples': collect.sample_rows(trajectories, source.answer, policy.tokenizer, shown),
  }
