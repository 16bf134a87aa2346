"""Replay: the sampler's log-probs of tokens that are given.

Replay runs the sampler's own prefill and decode steps, with the same cache, evictions and quantisation. Only the token is looked
up where sampling draws one. Under the settings that sampled a trajectory it returns the recorded log-probs. Under other settings
it returns their log-probs of the same tokens, which traces a mismatch to its cause (sprl/ledger.py).

Arrays have the shapes that they had during sampling: the same number of rows, and prefill batches of the recorded shapes. XLA
may sum a product of another shape in another order, and the last digit of a number can decide its FP8 code. A deviation of 1e-6
then becomes one of 1e-2, or another eviction if two scores are close.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from sprl.cache.kv_cache import KVCache
from sprl.cache.layout import CacheLayout
from sprl.config import Sampling
from sprl.sampler.buckets import bucket, padded, prompt_buckets
from sprl.sampler.decode import Prompts, decode_step, empty_cache, logits, prefill
from sprl.sampler.draw import logp_of
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import SamplerWeights
from sprl.sharding.rules import OnMesh, shard
from sprl.sharding.transfer import fetch
from sprl.types import Trajectory


def replay(config: EngineConfig, weights: SamplerWeights, trajectories: Sequence[Trajectory]) -> list[Float[np.ndarray, ' _']]:
  """Return the sampler's log-probs of each trajectory's tokens; 0 where the model wrote nothing.

  With the config and weights that sampled them these are the recorded log-probs, to 1e-5 in float32. The exception is a
  trajectory with given tokens (turns of a conversation, an interrupted request): the engine reads several of those at a time.
  All log-probs are of the recorded supports. Without a record they are of the whole vocabulary.
  """
  layout, B, C = config.layout, config.rows, config.sampling.max_tokens
  empty, fill, insert, score = (f.on(config.mesh) for f in (_empty, prefill, _insert, _replay))
  results = []
  for part in batched(trajectories, B):
    state = empty(layout, weights, B)
    for (together, width), rows in _by_prefill_shape(config, part).items():
      for prompts in batched(rows, together):
        parent = np.full(B, -1, np.int32)
        for i, prompt in enumerate(prompts):
          parent[rows[prompt]] = i
        tokens = padded([np.frombuffer(prompt, np.int32) for prompt in prompts], together, width)
        state = insert(*state, fill(config.graphdef, layout, weights, *tokens), parent)
    tokens, counts = padded([t.completion for t in part], B, C)
    supports = _supports(part, B, C)
    logp, _ = score(config.graphdef, config.sampling, weights, *state, tokens=tokens, counts=counts, supports=supports)
    results += [t.per_token(row) for t, row in zip(part, fetch(logp))]
  return results


def _by_prefill_shape(config: EngineConfig, trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], dict[bytes, list[int]]]:
  """Return, for each shape of a prefill batch, its prompts, and for each prompt the rows that start with it.

  The recorded shape is used unless its bucket is wider than any prompt's: that batch also read given tokens.
  """
  buckets = prompt_buckets(config.sampling)
  by_shape: dict[tuple[int, int], dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
  for row, t in enumerate(trajectories):
    shape = t.prefilled
    if shape is None or shape[1] not in buckets:
      shape = config.prefill, bucket(buckets, t.prompt_length)
    by_shape[shape][t.tokens[: t.prompt_length].astype(np.int32).tobytes()].append(row)
  return by_shape


def _supports(trajectories: Sequence[Trajectory], B: int, C: int) -> Integer[np.ndarray, 'B C W'] | None:
  """Return the recorded supports of the tokens of each completion; None if there are none. Other tokens have arbitrary values."""
  first = trajectories[0].support
  if first is None:
    return None
  supports = np.zeros((B, C, first.shape[1]), first.dtype)
  for row, t in zip(supports, trajectories):
    row[np.flatnonzero(t.mask[t.prompt_length :])] = t.support
  return supports


@OnMesh
@partial(jax.jit, static_argnames=('layout', 'rows'))
def _empty(layout: CacheLayout, weights: SamplerWeights, rows: int) -> tuple[KVCache, Float[Array, 'B E']]:
  return empty_cache(layout, weights, rows), jnp.zeros((rows, weights.head.shape[1]), layout.dtype)


@OnMesh
@partial(jax.jit, donate_argnames=('cache', 'hidden'))
def _insert(
  cache: KVCache, hidden: Float[Array, 'B E'], prompts: Prompts, parent: Int[Array, ' B']
) -> tuple[KVCache, Float[Array, 'B E']]:
  """Start row b on prompt parent[b], with the hidden state that predicts its next token. Rows with parent -1 stay unchanged."""
  new, parent = parent >= 0, jnp.maximum(parent, 0)
  theirs = shard(shard(prompts.hidden, None, None)[parent], 'rows', None)
  return cache.fork(prompts.cache, parent, new), jnp.where(new[:, None], theirs, hidden)


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'sampling'), donate_argnames='cache')
def _replay(
  graphdef: nnx.GraphDef,
  sampling: Sampling,
  weights: SamplerWeights,
  cache: KVCache,
  hidden: Float[Array, 'B E'],
  *,
  tokens: Int[Array, 'B C'],
  counts: Int[Array, ' B'],
  supports: Integer[Array, 'B C W'] | None = None,
) -> tuple[Float[Array, 'B C'], KVCache]:
  """Return the log-probs of the first `counts` tokens of each row, 0 behind them, and the cache. The cache is donated."""

  def step(i, carry):
    cache, hidden, logp = carry
    token = tokens[:, i]
    support = None if supports is None else supports[:, i]
    logp = logp.at[:, i].set(jnp.where(i < counts, logp_of(logits(weights, hidden), token, sampling, support), 0))
    hidden, _, cache, _ = decode_step(graphdef, weights, cache, token, i + 1 < counts)
    return cache, hidden, logp

  cache, _, logp = jax.lax.fori_loop(0, jnp.max(counts), step, (cache, hidden, jnp.zeros(tokens.shape)))
  return logp, cache
