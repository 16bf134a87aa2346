"""Held-out evaluation: pass@k and avg@k with confidence intervals, and samples to read."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sprl.cache.scales import Scales
from sprl.config import DENSE, UNQUANTISED, Quant, Rollout, Run, to_dict
from sprl.distributed.team import ALONE, Team
from sprl.io.config_file import config_differences
from sprl.io.pass_at_k import interval, pass_at_k
from sprl.model import Model
from sprl.models.transformer import Params
from sprl.rollout import collect
from sprl.rollout.prompts import OffsetSource, prompts
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.setup import EvalSet, on_all_processes
from sprl.sampler import calibrate
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import SamplerWeights, same_weights
from sprl.types import Trajectory, sequences

FIRST_UID = 1 << 30  # uids of evaluation begin here, so that they differ from those of training


def eval_engine(run: Run, model: Model, held_out: EvalSet) -> tuple[EngineConfig, Quant]:
  """Return the engine that answers the held-out groups, and the number formats of its weights and cache."""
  rows, prefill = at_once(run, [(each.count, each.samples) for each in (held_out, *held_out.more.values())])
  cache, quant = (run.cache, run.quant) if run.eval.memory == 'sampler' else (DENSE, UNQUANTISED)
  sampling = run.eval_sampling
  return model.engine_config(sampling, model.cache_layout(sampling, cache, quant), rows, prefill, run.seed), quant


def at_once(run: Run, sets: Sequence[tuple[int, int | None]]) -> tuple[int, int]:
  """Return the sequences that an evaluation decodes side by side, and the prompts that it prefills together.

  `sets` has the problems and the answers to each (None: eval.samples) of every held-out set; one engine answers them in turn.
  """
  samples = [k or run.eval.samples for _, k in sets]
  rows = min(run.sampling.rows or run.rollout.prompts * run.rollout.group, max(n * k for (n, _), k in zip(sets, samples)))
  return rows, min(run.rollout.prompts, -(-rows // max(samples)))


def evaluate(
  run: Run,
  model: Model,
  params: Params,
  held_out: EvalSet,
  shown: int = 16,
  scales: Scales | None = None,
  synced: SamplerWeights | None = None,
  stopped: Callable[[], Any] = lambda: False,
  team: Team = ALONE,
) -> dict[str, Any]:
  """Answer the held-out groups. Every call uses the same groups and random numbers.

  Args:
    run: the settings. `eval.memory` selects a dense, unquantised sampler or the sampler of the rollouts.
    model: a model without weights.
    params: its weights.
    held_out: the groups and their workers.
    shown: rows in `samples`.
    scales: the scales of an FP8 cache under `eval.memory = 'sampler'`. None: found on the first prompts.
    synced: the sampler weights of the rollouts, used if the evaluation has the same linears. None: made from `params`.
    stopped: evaluation ends without a result once this is true.
    team: the processes of the run.

  Returns:
    metrics    scalars for the log: eval/avg@k with eval/low and eval/high, its 95 % interval unless that is infinite, and others;
               those of another set are named eval/SET/avg@k
    intervals  (mean, low, high) of avg@k (the mean score) and of pass@1 and pass@k (the probability that one sample, or any of k,
               scores 1); the samples of a problem are averaged first. With several rewards, the first one scores
    scores     mean score of each problem, in the order of the problems, for paired comparisons
    numbers    the number of each problem: a conversation that fails is replaced by one with another number
    samples    rows of `shown` completions
    failure    if every reward refuses every answer, by raising or with a result that is no number: why the first; else ''
    how        what decides the scores beside the weights and the rewards (`EvalSet.how`)
    sets       intervals, failure and samples of each other set by name; absent if there is none

    An empty dict if `stopped` ended the evaluation.
  """
  sets = {'': held_out, **held_out.more}
  samples = {name: each.samples or run.eval.samples for name, each in sets.items()}
  config, quant = eval_engine(run, model, held_out)
  layout = config.layout
  if layout.fp8 and scales is None:
    some = prompts(held_out.source, 0, min(held_out.count, config.prefill), held_out.different)
    found = calibrate.amax_of_prompts(model.graphdef, layout, params, some, config.prefill, quant, model.mesh)
    scales = calibrate.scales((found,), quant, layout, params)
  if synced is None or not same_weights(quant, run.quant):
    synced = model.sampler_weights(params, quant)
  engine = Engine(config, synced._replace(scales=scales if layout.fp8 else None))

  results: dict[str, dict[str, Any]] = {}
  for name, each in sets.items():
    source, first = OffsetSource(each.source, FIRST_UID // samples[name]), FIRST_UID // samples[name]
    asked = Rollout(prompts=each.count, group=samples[name])
    scheduler = Scheduler(
      on_all_processes(team, [engine]),
      each.workers,
      source,
      asked,
      time.perf_counter,
      groups=each.count,
      first=first,
      different=each.different or 2 * each.count,  # of an environment that does not tell: no more fail than must succeed
    )
    groups = scheduler.batch(stopped)
    if groups is None:
      return {}
    trajectories = [t for group in groups for t in group.trajectories]
    results[name] = scores(trajectories, len(groups), samples[name])
    results[name]['numbers'] = [group.number - first for group in groups]
    results[name]['samples'] = collect.sample_rows(trajectories, source.answer, model.tokenizer, shown)
  own = results.pop('') | {'how': held_out.how(run)}
  if results:
    for name, result in results.items():
      found = result.pop('metrics')
      own['metrics'] |= {f'eval/{name}/{metric.removeprefix("eval/")}': value for metric, value in found.items()}
    own['sets'] = results
  return own


def differences(before: Mapping[str, Any], after: Mapping[str, Any], sets: bool = True) -> list[str]:
  """Return how two results of `evaluate` were made differently, as `setting: old -> new`; [] if one does not say how.

  Without `sets` only what decides the scores of the first set counts.
  """
  if 'how' not in before or 'how' not in after:  # one of an older version, or none
    return []
  defaults = {'eval': to_dict(Run())['eval']}  # of settings that are newer than `before`
  found = config_differences(before['how']['own'], after['how']['own'], defaults)
  if sets:
    found += [f'eval.sets.{line}' for line in config_differences(before['how']['sets'], after['how']['sets'], {})]
  return found


def refused(t: Trajectory) -> bool:
  """Return whether no reward graded an answer, for a reason that another try would repeat: no time limit, and no crash."""
  return t.status in ('error', 'invalid') and len(t.failed) == len(t.parts)


def scores(trajectories: Sequence[Trajectory], count: int, k: int) -> dict[str, Any]:
  """Return metrics and intervals of `count` problems. `trajectories` are ordered by problem, with `k` for each."""
  score = np.array([t.score for t in trajectories]).reshape(count, k)
  right = (score >= 1).sum(axis=1)
  intervals = {f'avg@{k}': interval(score.mean(axis=1))}
  intervals |= {f'pass@{j}': interval(pass_at_k(right, k, j)) for j in (1, k)}
  mean, low, high = intervals[f'avg@{k}']
  return {
    'metrics': {
      'eval/avg@k': mean,
      **({'eval/low': low, 'eval/high': high} if math.isfinite(low) else {}),
      **{f'eval/pass@{j}': intervals[f'pass@{j}'][0] for j in (1, k)},
      'eval/problems': float(count),
      'eval/samples': float(k),
      'eval/length_mean': float(np.mean([sum(s.mask.sum() for s in sequences(t)) for t in trajectories])),
      'eval/truncated': float(np.mean([t.finish == 'length' for t in trajectories])),
      'eval/ungraded': float(sum(t.status != 'ok' for t in trajectories)),
      **collect.reward_parts(trajectories, 'eval/reward'),
      **{f'eval/{name}': used for name, used in collect.grading_costs(trajectories).items()},
    },
    'intervals': intervals,
    'scores': score.mean(axis=1).tolist(),
    'failure': trajectories[0].reason if all(map(refused, trajectories)) else '',
  }
