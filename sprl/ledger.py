"""The mismatch ledger: how much of the gap between sampler and learner is due to what.

The gap of a token is log pi_learner - log pi_sampler, the log of the ratio that corrections weigh it by. Of a few of a step's
trajectories the sampler's path is replayed (sampler/replay.py) with one cause switched on at a time, beginning with a dense
cache in the compute dtype, on today's weights as they are:

    staleness   the learner today, against the learner with the weights that sampled
    numerics    the learner's path (packed rows, one pass) against the sampler's (a cache, token by token), both dense
    weights     linears in FP8
    kv          keys and values (and queries, where they are too) in FP8
    eviction    the cache evicted to its budget
    routing     the learner's tokens through the experts of its own router, against those of the rollout (router replay R3)
    residual    what is left of the gap: the causes' effect on each other, and a recorded log-prob that no replay reproduces

They sum to the gap, token by token. With one cause on, the residual is rounding: a larger one says that the log-probs recorded
are not those of the sampler that the settings describe. Router replay takes out of the gap what the other causes owe to tokens
that go through other experts; `unreplayed` is the gap as it would be without it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from sprl.cache.scales import Scales
from sprl.learner.packing import pack, shape
from sprl.learner.score import score
from sprl.models.transformer import Params
from sprl.parallel.rules import row_shards
from sprl.parallel.transfer import fetch, park
from sprl.policy import Policy
from sprl.sampler.engine import Engine
from sprl.sampler.replay import replay
from sprl.settings import DENSE, UNQUANTISED, Cache, Quant, Rollout, Run
from sprl.trajectory import Trajectory

CAUSES = ('staleness', 'numerics', 'weights', 'kv', 'eviction', 'routing', 'residual')
EDGES = (-10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01, -0.003, -0.001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

Older = dict[int, tuple[Any, Scales | None]]  # by version, trained weights parked, scales that samples may still be of
Logps = list[Float[np.ndarray, ' _']]  # of each trajectory's tokens, 0 where the model wrote nothing


def ledger(
  run: Run,
  policy: Policy,
  engine: Engine,
  params: Params,
  scales: Scales | None,
  trajectories: Sequence[Trajectory],
  sampled_with: Params | None = None,
) -> dict[str, Float[np.ndarray, ' N']]:
  """The gap of each of the N tokens that the model wrote (`gap`), its parts by cause (CAUSES), and where the
  rollout's routes are replayed `unreplayed`.

  `params` are the learner's weights, `sampled_with` those that sampled, where they are others; `scales` are the FP8 cache's.
  """
  sampler_params = params if sampled_with is None else sampled_with

  def replayed(cache: Cache = DENSE, linears: Quant = UNQUANTISED, memory: Quant = UNQUANTISED) -> Logps:
    plan = policy.plan(run.sampling, cache, memory)
    served = policy.serve(sampler_params, linears, scales)
    # As many rows as sampled, for products to be summed alike; where those would take more than the engine's, what is needed.
    rows = engine.rows if plan.bytes(1) <= engine.plan.bytes(1) else min(engine.rows, len(trajectories))
    return replay(replace(engine, plan=plan, rows=rows), served, trajectories)

  def dense(weights: Params) -> Logps:
    return learner_logps(run, policy, weights, [replace(t, routes=None) for t in trajectories])

  learner = dense(params)
  sampler_weights = learner if sampled_with is None else dense(sampled_with)
  plain = replayed()
  alone: dict[str, Callable[[], Logps]] = {
    'weights': lambda: replayed(linears=run.quant) if 'w8a8' in run.quant.sampler else plain,
    'kv': lambda: replayed(memory=run.quant) if 'kv8' in run.quant.sampler else plain,
    'eviction': lambda: replayed(cache=run.cache) if run.cache.budget else plain,
  }

  def flat(logps: Logps) -> Float[np.ndarray, ' N']:
    return np.concatenate([x[t.mask] for x, t in zip(logps, trajectories)])

  routed = learner if trajectories[0].routes is None else learner_logps(run, policy, params, trajectories)
  gap = flat(routed) - np.concatenate([t.sampler_logp[t.mask] for t in trajectories])
  parts = {'staleness': flat(learner) - flat(sampler_weights), 'numerics': flat(sampler_weights) - flat(plain)}
  parts |= {cause: flat(plain) - flat(logps()) for cause, logps in alone.items()}
  parts['routing'] = flat(routed) - flat(learner)
  parts['residual'] = gap - np.sum(list(parts.values()), axis=0)
  return {'gap': gap, **parts} | ({} if routed is learner else {'unreplayed': gap - parts['routing']})


def may_want(version: int, run: Run) -> bool:
  """Whether a step whose mismatch is split may train, later, on what weights of this version sample."""
  every, last = run.ledger.every, version + math.ceil(run.rollout.async_ratio) + 1
  return run.rollout.async_ratio > 0 and every > 0 and last // every > version // every


def with_version(older: Older, version: int, params: Params, scales: Scales | None, run: Run) -> Older:
  """Those of the window's versions, and this one's."""
  newest = {version: (jax.tree.map(park, params), scales)}  # copies: the update writes over its arrays
  return {v: kept for v, kept in older.items() if v >= version - math.ceil(run.rollout.async_ratio)} | newest


def of_one_version(trajectories: Sequence[Trajectory], count: int) -> tuple[int, list[Trajectory]]:
  """(version, whole groups of at most `count` trajectories in all) that weights of one version have sampled; the newest such.

  Where every group is of several versions, the first ones count as the newest's: what the older ones did is in the residual.
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


def learner_logps(run: Run, policy: Policy, params: Params, trajectories: Sequence[Trajectory]) -> Logps:
  """The learner's log-probs of the trajectories' tokens, by its own path: packed rows, one dense pass, recorded routes."""
  groups = len({t.group for t in trajectories})
  rollout = Rollout(groups, len(trajectories) // groups)
  sizes = shape(run.sampling, rollout, run.packing, 1, row_shards(policy.mesh))
  batch, _ = pack(trajectories, np.ones(len(trajectories), np.float32), sizes, run.packing.share_prefix)
  batch = policy.put(batch)
  how = run.sampling.temperature, policy.dtype, run.packing.score_chunk, policy.kernels
  logp = fetch(score(policy.graphdef, params, batch, *how))
  return [t.per_token(row) for t, row in zip(trajectories, logp)]


def scalars(entries: Mapping[str, Float[np.ndarray, ' N']]) -> dict[str, float]:
  """Of the gap and each of its parts: mean, mean size, and the size that one token in a hundred exceeds."""
  metrics = {}
  for name, x in entries.items():
    metrics |= {
      f'ledger/{name}_mean': float(np.mean(x)),
      f'ledger/{name}_abs': float(np.mean(np.abs(x))),
      f'ledger/{name}_p99': float(np.quantile(np.abs(x), 0.99)),
    }
  return metrics


def histograms(entries: Mapping[str, Float[np.ndarray, ' N']]) -> dict[str, Any]:
  """How many tokens of the gap, and of each part, lie between `edges`; the first and last bin are open."""
  edges = (-np.inf, *EDGES, np.inf)
  return {'edges': list(EDGES), 'histograms': {name: np.histogram(x, edges)[0].tolist() for name, x in entries.items()}}
