"""The mismatch ledger: the mismatch of sampler and learner, split by cause.

The mismatch of a token is log pi_learner - log pi_sampler, the log of its correction ratio (docs/methods/losses.md, eq. 1).
For a few trajectories of a step, the ledger replays the sampler's path (sprl/sampler/replay.py) with one cause at a time. Each
replay is compared with a replay of a dense cache in the compute dtype and the newest weights, unquantised:

    staleness   the learner with the newest weights, against the learner with the weights that sampled
    numerics    the learner's path (packed rows, one pass), against the sampler's (a cache, token by token), both dense
    weights     linears in FP8
    kv          keys and values (and queries, where they are too) in FP8
    eviction    the cache evicted to its budget
    routing     the learner with the experts that its router chooses, against the rollout's experts (router replay R3)
    residual    the remainder: interaction of causes, and recorded log-probs that no replay reproduces

The parts sum to the mismatch, token by token, because the residual is the remainder. With one cause on, the residual is rounding.
A larger residual means that the recorded log-probs are not those of the sampler that the settings describe. In the results the
mismatch is named `gap`. `unreplayed` is the mismatch without router replay, which removes the effect of other causes on the
choice of experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from sprl.cache.scales import Scales
from sprl.config import DENSE, UNQUANTISED, Cache, Quant, Rollout, Run
from sprl.learner.batch import pack, put, shape
from sprl.learner.logprobs import ForwardConfig, score
from sprl.model import Model
from sprl.models.transformer import Params
from sprl.sampler.engine import EngineConfig
from sprl.sampler.replay import replay
from sprl.sharding.rules import row_shards
from sprl.sharding.transfer import fetch, park
from sprl.types import Trajectory

GROUPS = 2  # groups of a step that are replayed
CAUSES = ('staleness', 'numerics', 'weights', 'kv', 'eviction', 'routing', 'residual')
EDGES = (-10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01, -0.003, -0.001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

Older = dict[int, tuple[Any, Scales | None]]  # version -> parked weights of the learner, and scales of the cache
TokenLogProbs = list[Float[np.ndarray, ' _']]  # of each trajectory; 0 where the model wrote nothing


def ledger(
  run: Run,
  model: Model,
  engine: EngineConfig,
  trajectories: Sequence[Trajectory],
  *,
  params: Params,
  scales: Scales | None = None,
  sampled_with: Params | None = None,
) -> dict[str, Float[np.ndarray, ' N']]:
  """Return the mismatch of each of the N tokens that the model wrote (`gap`), and its parts by cause (CAUSES), in nats.

  `engine` sampled the trajectories. `params` are the learner's weights. `sampled_with` are the weights that sampled, None if they
  are `params`. `scales` are the scales of the FP8 cache. With router replay R3 the result has `unreplayed` too.
  """
  sampler_params = params if sampled_with is None else sampled_with

  def replayed(cache: Cache = DENSE, linears: Quant = UNQUANTISED, kv: Quant = UNQUANTISED) -> Float[np.ndarray, ' N']:
    layout = model.cache_layout(run.sampling, cache, kv)
    weights = model.sampler_weights(sampler_params, linears, scales)
    # As many rows as in sampling, for the same order of summation. A cache larger than the engine's has only the rows it needs.
    rows = engine.rows if layout.bytes(1) <= engine.layout.bytes(1) else min(engine.rows, len(trajectories))
    return written(
      replay(replace(engine, layout=layout, rows=rows, mesh=model.sampler_mesh), weights, trajectories), trajectories
    )

  def dense(weights: Params) -> Float[np.ndarray, ' N']:
    unrouted = [replace(t, routes=None) for t in trajectories]
    return written(learner_logprobs(run, model, weights, unrouted), trajectories)

  quant, sampler = run.quant, np.concatenate([t.sampler_logp[t.mask] for t in trajectories])
  newest = dense(params)
  stale = newest if sampled_with is None else dense(sampled_with)
  routed = newest
  if trajectories[0].routes is not None:
    routed = written(learner_logprobs(run, model, params, trajectories), trajectories)
  plain = replayed()
  gap = routed - sampler
  parts = {
    'staleness': newest - stale,
    'numerics': stale - plain,
    'weights': plain - (replayed(linears=quant) if 'w8a8' in quant.sampler else plain),
    'kv': plain - (replayed(kv=quant) if 'kv8' in quant.sampler else plain),
    'eviction': plain - (replayed(cache=run.cache) if run.cache.budget else plain),
    'routing': routed - newest,
  }
  entries = {'gap': gap, **parts, 'residual': gap - np.sum(list(parts.values()), axis=0)}
  return entries if routed is newest else entries | {'unreplayed': gap - parts['routing']}


def learner_logprobs(run: Run, model: Model, params: Params, trajectories: Sequence[Trajectory]) -> TokenLogProbs:
  """Return the learner's log-probs of the trajectories' tokens, by its own path: packed rows, one pass, recorded experts."""
  groups = len({t.group for t in trajectories})
  rollout = Rollout(groups, len(trajectories) // groups)
  sizes = shape(run.sampling, rollout, run.packing, 1, row_shards(model.mesh))
  batch, _ = pack(trajectories, np.ones(len(trajectories), np.float32), sizes, run.packing.share_prefix)
  batch = put(batch, model.mesh)
  logp = fetch(score.on(model.mesh)(model.graphdef, params, batch, ForwardConfig.of(run, model.dtype)))
  return [t.per_token(row) for t, row in zip(trajectories, logp)]


def written(logprobs: TokenLogProbs, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, ' N']:
  """Return the values of the tokens that the model wrote, one trajectory after the other."""
  return np.concatenate([x[t.mask] for x, t in zip(logprobs, trajectories)])


# --- which trajectories, and older weights ---------------------------------------------------------------------------


def may_need(version: int, run: Run) -> bool:
  """Return whether a later step with a ledger may train on samples of weights with this version."""
  every, last = run.ledger.every, version + math.ceil(run.rollout.async_ratio) + 1
  return run.rollout.async_ratio > 0 and every is not None and last // every > version // every


def with_version(older: Older, version: int, params: Params, scales: Scales | None, run: Run) -> Older:
  """Return `older` with a copy of this version on the host, without the versions that have left the staleness window."""
  newest = {version: (jax.tree.map(park, params), scales)}  # a copy, because the update overwrites the arrays
  return {v: kept for v, kept in older.items() if v >= version - math.ceil(run.rollout.async_ratio)} | newest


def of_one_version(trajectories: Sequence[Trajectory], count: int) -> tuple[int, list[Trajectory]]:
  """Return the newest version that sampled whole groups alone, and at most `count` trajectories of these groups.

  Where every group is of several versions, the first groups count as the newest version's: the effect of the older versions is
  then in the residual.
  """
  groups: dict[int, list[Trajectory]] = {}
  for t in trajectories:
    groups.setdefault(t.group, []).append(t)
  pure: dict[int, list[Trajectory]] = {}
  for group in groups.values():
    versions = {int(v) for t in group for v in t.version[t.mask]}
    if len(versions) == 1:
      pure.setdefault(versions.pop(), []).extend(group)
  if not pure:
    return max(int(t.version.max()) for t in trajectories), list(trajectories[:count])
  newest = max(pure)
  return newest, pure[newest][:count]


# --- metrics ---------------------------------------------------------------------------------------------------------


def scalars(entries: Mapping[str, Float[np.ndarray, ' N']]) -> dict[str, float]:
  """Return `ledger/` metrics in nats: mean, mean absolute value and its 99th percentile, of the mismatch and of each part."""
  metrics = {}
  for name, x in entries.items():
    metrics |= {
      f'ledger/{name}_mean': float(np.mean(x)),
      f'ledger/{name}_abs': float(np.mean(np.abs(x))),
      f'ledger/{name}_p99': float(np.quantile(np.abs(x), 0.99)),
    }
  return metrics


def histograms(entries: Mapping[str, Float[np.ndarray, ' N']]) -> dict[str, Any]:
  """Return how many tokens lie between EDGES, by mismatch and by each part. The first and the last bin are open."""
  edges = (-np.inf, *EDGES, np.inf)
  return {'edges': list(EDGES), 'histograms': {name: np.histogram(x, edges)[0].tolist() for name, x in entries.items()}}
