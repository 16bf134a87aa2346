"""Replay: the sampler's own path over tokens that are given.

The same prefill, the same cache with the same evictions and quantisers, step by step; only the token is looked up where
sampling draws one. Under the settings that sampled a trajectory it gives the recorded log-probs back, and under others what
those would have said of the same tokens, which is how a mismatch is traced to its cause (sprl/ledger.py).

Arrays have the shapes that they had: as many rows, and prompts read in batches like the one that each was read in. A product
of another shape may be summed in another order, and the last digit of a number can decide which FP8 code it gets: a deviation
of 1e-6 comes out as one of 1e-2 and, where scores are close, as another eviction.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sprl.cache.kv_cache import KVCache
from sprl.cache.plan import CachePlan
from sprl.parallel.rules import OnMesh, shard
from sprl.parallel.transfer import fetch
from sprl.sampler.decode import Prompts, empty_cache, predict, prefill, take_in
from sprl.sampler.draw import logp_of
from sprl.sampler.engine import Engine, prompt_buckets
from sprl.sampler.served import Served
from sprl.sampler.slots import padded
from sprl.settings import Sampling, SettingsError
from sprl.trajectory import Trajectory


def replay(engine: Engine, served: Served, trajectories: Sequence[Trajectory]) -> list[Float[np.ndarray, ' _']]:
  """The sampler's log-probs of the trajectories' tokens, 0 where the model wrote nothing.

  With the engine and weights that sampled them, the recorded ones: to 1e-5 in float32, but for what was given behind a prompt
  (a conversation's history, an interrupted request), of which the engine takes in several tokens at a time.

  Raises SettingsError where evictions depend on the batch that a sequence shared (config.cache.trigger_scope = 'batch').
  """
  plan, B, C = engine.plan, engine.rows, engine.sampling.max_tokens
  if plan.sparse and plan.settings.trigger_scope == 'batch':
    raise SettingsError(
      "config.cache.trigger_scope = 'batch': expected 'row' to replay a sequence, whose evictions must be its own"
    )
  results = []
  for part in batched(trajectories, B):
    state = _nothing(plan, served, B)
    for (together, bucket), rows in _read_alike(engine, part).items():
      for prompts in batched(rows, together):
        parent = np.full(B, -1, np.int32)
        for i, prompt in enumerate(prompts):
          parent[rows[prompt]] = i
        tokens = padded([np.frombuffer(prompt, np.int32) for prompt in prompts], together, bucket)
        state = _begun(*state, prefill(engine.graphdef, plan, served, *tokens), parent)
    completions = padded([t.completion for t in part], B, C)
    logp, _ = _replay(engine.graphdef, engine.sampling, served, *state, *completions)
    results += [t.per_token(row) for t, row in zip(part, fetch(logp))]
  return results


def _read_alike(engine: Engine, trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], dict[bytes, list[int]]]:
  """The rows that begin with each prompt, by the shape of the batch that the prompt is to be read in.

  A batch that was wider than any prompt had read more than prompts.
  """
  buckets = prompt_buckets(engine.sampling)
  alike: dict[tuple[int, int], dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
  for row, t in enumerate(trajectories):
    shape = t.prefilled
    if shape is None or shape[1] not in buckets:
      shape = engine.prefill, next(b for b in buckets if b >= t.prompt_length)
    alike[shape][t.tokens[: t.prompt_length].astype(np.int32).tobytes()].append(row)
  return alike


@OnMesh
@partial(jax.jit, static_argnames=('plan', 'rows'))
def _nothing(plan: CachePlan, served: Served, rows: int) -> tuple[KVCache, Float[Array, 'B E']]:
  return empty_cache(plan, served, rows), jnp.zeros((rows, served.head.shape[1]), plan.dtype)


@OnMesh
@partial(jax.jit, donate_argnames=('cache', 'hidden'))
def _begun(
  cache: KVCache, hidden: Float[Array, 'B E'], prompts: Prompts, parent: Int[Array, ' B']
) -> tuple[KVCache, Float[Array, 'B E']]:
  """Row b on prompt parent[b], and the hidden state that predicts what follows; rows with parent -1 as they are."""
  new, parent = parent >= 0, jnp.maximum(parent, 0)
  theirs = shard(shard(prompts.hidden, None, None)[parent], 'rows', None)
  return cache.fork(prompts.cache, parent, new), jnp.where(new[:, None], theirs, hidden)


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'sampling'), donate_argnames='cache')
def _replay(
  graphdef: nnx.GraphDef,
  sampling: Sampling,
  served: Served,
  cache: KVCache,
  hidden: Float[Array, 'B E'],
  completions: Int[Array, 'B C'],
  counts: Int[Array, ' B'],
) -> tuple[Float[Array, 'B C'], KVCache]:
  """Log-probs of the completions' tokens, 0 behind each row's count; and the cache, written in place."""

  def step(i, carry):
    cache, hidden, logp = carry
    token = completions[:, i]
    logp = logp.at[:, i].set(jnp.where(i < counts, logp_of(predict(served, hidden), token, sampling), 0))
    hidden, _, cache, _ = take_in(graphdef, served, cache, token, i + 1 < counts)
    return cache, hidden, logp

  cache, _, logp = jax.lax.fori_loop(0, jnp.max(counts), step, (cache, hidden, jnp.zeros(completions.shape)))
  return logp, cache
