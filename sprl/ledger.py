"""The mismatch ledger: the mismatch of sampler and learner, split by cause (docs/methods/ledger.md).

The mismatch of a token is log pi_learner - log pi_sampler, the log of its correction ratio (docs/methods/losses.md, eq. 1). Its
name in the results is `gap`. For a few trajectories of a step, the ledger scores their tokens again and splits the gap:

1. Four parts are differences along the path from the learner to a dense, unquantised replay (sprl/sampler/replay.py):

    routing       the learner with the rollout's experts (router replay R3), against the experts that its router chooses
    staleness     the learner with the newest weights, against the learner with the weights that sampled
    learner_fp8   the learner with its linears in FP8 (quant.learner), against the learner in the compute dtype
    numerics      the learner's path (packed rows, one pass), against the sampler's (a cache, token by token)

2. The sampler's own causes are switches: `weights` (linears in FP8), `kv` (keys, values and perhaps queries and softmax weights
   in FP8) and `eviction`. The ledger replays every subset of the active switches. The part of a cause is its Shapley value: the
   effect of its switch, averaged over all orders in which the switches can be turned on.
3. `reproduction` is the replay with all switches on, minus the recorded log-probs. It should be rounding error only. A larger
   value means that the recorded log-probs are not those of the sampler that the settings describe.

The parts sum to the gap, token by token. `interaction` is not a part. It is the effect of all switches together, minus the sum
of their effects alone; `interaction_A_B` is the pair's share of it. `unreplayed` is the mismatch without router replay. Router
replay removes the effect of the other causes on the choice of experts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise
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
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.replay import replay
from sprl.sharding.rules import row_shards, token_shards
from sprl.sharding.transfer import fetch, park
from sprl.types import Trajectory


@dataclass(frozen=True)
class ReplaySettings:
  """The settings of a replay. The defaults are the dense, unquantised sampler."""

  linears: Quant = UNQUANTISED
  kv: Quant = UNQUANTISED
  cache: Cache = DENSE


# Switch -> function that gives a replay the run's settings of this cause. It changes nothing if the run does not have the cause.
SWITCHES: dict[str, Callable[[ReplaySettings, Run], ReplaySettings]] = {
  'weights': lambda given, run: replace(given, linears=run.quant) if 'w8a8' in run.quant.sampler else given,
  'kv': lambda given, run: replace(given, kv=run.quant) if 'kv8' in run.quant.sampler else given,
  'eviction': lambda given, run: replace(given, cache=run.cache) if run.cache.budget else given,
}
PARTS = ('routing', 'staleness', 'learner_fp8', 'numerics', *SWITCHES, 'reproduction')  # they sum to the gap
GROUPS = 2  # groups of a step that are replayed
EDGES = (-10.0, -3.0, -1.0, -0.3, -0.1, -0.03, -0.01, -0.003, -0.001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

Causes = frozenset[str]  # the switches that are on
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
  """Return the mismatch of each of the N tokens that the model wrote (`gap`), its PARTS, and the interactions, in nats.

  `engine` sampled the trajectories. `params` are the learner's weights. `sampled_with` are the weights that sampled, None if they
  are `params`. `scales` are the scales of the FP8 cache. The result has `interaction_A_B` for each pair of active switches, and
  `unreplayed` with router replay R3.
  """
  sampler_params = params if sampled_with is None else sampled_with

  def dense(weights: Params, run: Run = run) -> Float[np.ndarray, ' N']:
    unrouted = [replace(t, routes=None) for t in trajectories]
    return written(learner_logprobs(run, model, weights, unrouted), trajectories)

  newest = dense(params)
  stale = newest if sampled_with is None else dense(sampled_with)
  unquantised, learner = stale, newest
  if run.quant.learner != 'none':
    unquantised = dense(sampler_params, replace(run, quant=replace(run.quant, learner='none')))
  if trajectories[0].routes is not None:
    learner = written(learner_logprobs(run, model, params, trajectories), trajectories)
  replayed = replays(run, model, engine, trajectories, sampler_params, scales)
  plain, everything = replayed[frozenset()], max(replayed, key=len)
  recorded = np.concatenate([t.sampler_logp[t.mask] for t in trajectories])

  # From the learner to the plain replay. Each entry removes one difference, which becomes its part.
  path = [('', learner), ('routing', newest), ('staleness', stale), ('learner_fp8', unquantised), ('numerics', plain)]
  parts = {name: before - after for (_, before), (name, after) in pairwise(path)}
  effects = {on: plain - logp for on, logp in replayed.items()}
  parts |= {name: np.zeros_like(plain) for name in SWITCHES} | shapley(effects)
  parts['reproduction'] = replayed[everything] - recorded
  alone = np.sum([effects[frozenset({name})] for name in SWITCHES if name in everything], axis=0)
  pairs = {'_'.join(name for name in SWITCHES if name in pair): x for pair, x in interactions(effects).items()}
  entries = {'gap': learner - recorded, **parts, 'interaction': effects[everything] - alone}
  entries |= {f'interaction_{pair}': x for pair, x in pairs.items()}
  return entries if learner is newest else entries | {'unreplayed': entries['gap'] - parts['routing']}


def replays(
  run: Run,
  model: Model,
  engine: EngineConfig,
  trajectories: Sequence[Trajectory],
  params: Params,
  scales: Scales | None,
) -> dict[Causes, Float[np.ndarray, ' N']]:
  """Return the sampler's log-probs of the N written tokens, in nats, under each subset of the run's active switches."""
  active = [name for name in SWITCHES if switched(run, frozenset({name})) != ReplaySettings()]
  settings = {on: switched(run, on) for on in subsets(active)}

  def with_linears(linears: Quant) -> dict[Causes, Float[np.ndarray, ' N']]:
    weights, found = model.sampler_weights(params, linears, scales), {}
    for on, given in settings.items():
      if given.linears == linears:
        layout = model.cache_layout(run.sampling, given.cache, given.kv)
        # As many rows as the engine has, for the same order of summation. If a row is larger than the engine's, there are
        # at most as many rows as trajectories, to limit the memory.
        rows = engine.rows if layout.kv_bytes(1) <= engine.layout.kv_bytes(1) else min(engine.rows, len(trajectories))
        config = replace(engine, layout=layout, rows=rows, mesh=model.sampler_mesh)
        found[on] = written(replay(config, weights, trajectories), trajectories)
    return found

  # One format of the weights at a time, so that only one copy of the sampler weights exists.
  found = {}
  for linears in dict.fromkeys(given.linears for given in settings.values()):
    found |= with_linears(linears)
  return {on: found[on] for on in settings}


def switched(run: Run, on: Causes) -> ReplaySettings:
  """Return the settings of a replay with these switches on."""
  given = ReplaySettings()
  for name, switch in SWITCHES.items():
    given = switch(given, run) if name in on else given
  return given


def learner_logprobs(run: Run, model: Model, params: Params, trajectories: Sequence[Trajectory]) -> TokenLogProbs:
  """Return the learner's log-probs of the trajectories' tokens, by its own path: packed rows, one pass, recorded experts."""
  groups = len({t.group for t in trajectories})
  rollout = Rollout(groups, len(trajectories) // groups)
  sizes = shape(run.sampling, rollout, run.packing, 1, row_shards(model.mesh), parts=token_shards(model.mesh))
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
  """Return `older` with a copy of this version on the host, without the versions that have left the staleness window.

  Returns {} if no later ledger may need this version: then it needs no older one either.
  """
  if not may_need(version, run):
    return {}
  newest = {version: (jax.tree.map(park, params), scales)}  # a copy, because the update overwrites the arrays
  return {v: kept for v, kept in older.items() if v >= version - math.ceil(run.rollout.async_ratio)} | newest


def of_one_version(trajectories: Sequence[Trajectory], count: int) -> tuple[int, list[Trajectory]]:
  """Return the version that sampled the most whole groups alone, and at most `count` trajectories of these groups.

  Of versions with equally many groups it is the oldest. The newest one with such groups would make the staleness of a step with
  one fresh group 0. If several versions sampled every group, return the newest version and the first trajectories. The effect of
  the older versions is then in the reproduction error.
  """
  groups: dict[int, list[Trajectory]] = {}
  for t in trajectories:
    groups.setdefault(t.group, []).append(t)
  pure: dict[int, list[list[Trajectory]]] = {}
  for group in groups.values():
    versions = {int(v) for t in group for v in t.version[t.mask]}
    if len(versions) == 1:
      pure.setdefault(versions.pop(), []).append(group)
  if not pure:
    return max(int(t.version.max()) for t in trajectories), list(trajectories[:count])
  version = max(pure, key=lambda version: (len(pure[version]), -version))
  return version, list(chain(*pure[version]))[:count]


# --- Shapley values --------------------------------------------------------------------------------------------------


def subsets(names: Sequence[str]) -> list[Causes]:
  """Return all subsets, from the empty one to all names."""
  return [frozenset(on) for size in range(len(names) + 1) for on in combinations(names, size)]


def shapley(values: Mapping[Causes, Float[np.ndarray, ' N']]) -> dict[str, Float[np.ndarray, ' N']]:
  """Return the Shapley value of each cause, in float64 (docs/methods/ledger.md, eq. 3; Shapley 1953).

  `values` has the effect of every subset of the causes. The results sum to values[all causes] - values[no cause].
  """
  dividends, causes = _dividends(values), max(values, key=len)
  return {name: np.sum([x / len(on) for on, x in dividends.items() if name in on], axis=0) for name in causes}


def interactions(values: Mapping[Causes, Float[np.ndarray, ' N']]) -> dict[Causes, Float[np.ndarray, ' N']]:
  """Return the Shapley-Taylor interaction of each pair of causes (docs/methods/ledger.md, eq. 5; arXiv 1902.05622).

  `values` has the effect of every subset of the causes. The results sum to the effect of all causes minus the effects of each
  cause alone.
  """
  dividends, pairs = _dividends(values), [on for on in values if len(on) == 2]
  shares = {pair: [x / math.comb(len(on), 2) for on, x in dividends.items() if pair <= on] for pair in pairs}
  return {pair: np.sum(x, axis=0) for pair, x in shares.items()}


def _dividends(values: Mapping[Causes, Float[np.ndarray, ' N']]) -> dict[Causes, Float[np.ndarray, ' N']]:
  """Return, for each subset, the effect that none of its own subsets has (docs/methods/ledger.md, eq. 2)."""
  signed = {on: [(-1.0) ** len(on - of) * x.astype(np.float64) for of, x in values.items() if of <= on] for on in values}
  return {on: np.sum(x, axis=0) for on, x in signed.items()}


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
  """Return the token counts of the mismatch and of each part between EDGES. The first and the last bin are open."""
  edges = (-np.inf, *EDGES, np.inf)
  return {'edges': list(EDGES), 'histograms': {name: np.histogram(x, edges)[0].tolist() for name, x in entries.items()}}
