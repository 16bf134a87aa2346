"""Held-out evaluation: pass@k and avg@k with confidence intervals, and samples to read."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sprl.cache.scales import Scales
from sprl.config import DENSE, UNQUANTISED, Rollout, Run
from sprl.distributed.team import ALONE, Team
from sprl.io.pass_at_k import interval, pass_at_k
from sprl.model import Model
from sprl.models.transformer import Params
from sprl.rollout import collect
from sprl.rollout.prompts import OffsetSource, prompts
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.setup import EvalSet, on_all_processes
from sprl.sampler import calibrate
from sprl.sampler.engine import Engine

FIRST_UID = 1 << 30  # uids of evaluation begin here, so that they differ from those of training


def evaluate(
  run: Run,
  model: Model,
  params: Params,
  held_out: EvalSet,
  shown: int = 16,
  scales: Scales | None = None,
  stopped: Callable[[], Any] = lambda: False,
  team: Team = ALONE,
) -> dict[str, Any]:
  """Answer the held-out groups. Every call uses the same groups and random numbers.

  Args:
    run: the settings. `eval.memory` decides between a dense, unquantised sampler and the rollouts' own.
    model: a model without weights.
    params: its weights.
    held_out: the groups and their workers.
    shown: rows in `samples`.
    scales: of an FP8 cache under `eval.memory = 'sampler'`. None: found on the first prompts.
    stopped: evaluation ends without a result once this is true.
    team: the processes of the run.

  Returns:
    metrics    scalars for the log: eval/avg@k with eval/low and eval/high, its 95 % interval, and others
    intervals  (mean, low, high) of avg@k (the mean score) and of pass@1 and pass@k (the probability that one sample, or any of k,
               scores 1); the samples of a problem are averaged first. With several rewards, the first one scores
    samples    rows of `shown` completions

    An empty dict if `stopped` ended the evaluation.
  """
  settings = run.eval
  k, count = settings.samples, held_out.count
  limit = settings.max_tokens or run.sampling.max_tokens
  sampling = replace(
    run.sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=None, min_p=0.0, max_tokens=limit
  )
  rows = min(run.sampling.rows or run.rollout.prompts * run.rollout.group, count * k)
  as_sampled = settings.memory == 'sampler'
  cache, quant = (run.cache, run.quant) if as_sampled else (DENSE, UNQUANTISED)
  layout = model.cache_layout(sampling, cache, quant)
  config = model.engine_config(sampling, layout, rows, min(run.rollout.prompts, -(-rows // k)), run.seed)
  source, first = OffsetSource(held_out.source, FIRST_UID // k), FIRST_UID // k
  if layout.fp8 and scales is None:
    some = prompts(source, first, min(count, config.prefill))
    found = calibrate.amax_of_prompts(model.graphdef, layout, params, some, config.prefill, quant, model.mesh)
    scales = calibrate.scales((found,), quant, layout.layers)
  engine = Engine(config, model.sampler_weights(params, quant, scales))
  scheduler = Scheduler(
    on_all_processes(team, [engine]),
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

  score = np.array([t.score for t in trajectories]).reshape(count, k)
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
      **collect.reward_parts(trajectories, 'eval/reward'),
      **{f'eval/{name}': used for name, used in collect.grading_costs(trajectories).items()},
    },
    'intervals': intervals,
    'samples': collect.sample_rows(trajectories, source.answer, model.tokenizer, shown),
  }
