"""Replay: the sampler's own path over tokens that are given.

The same prefill, the same cache with the same evictions and quantisers, step by step; only the token is looked up where
sampling draws one. Under the settings that sampled a trajectory it gives the recorded log-probs back, and under others what
those would have said of the same tokens, which is how a mismatch is traced to its cause (sprl/ledger.py).
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sprl.cache.plan import CachePlan
from sprl.parallel.rules import OnMesh
from sprl.parallel.transfer import fetch
from sprl.sampler.decode import predict, started, take_in
from sprl.sampler.draw import logp_of
from sprl.sampler.engine import Engine, prompt_buckets
from sprl.sampler.served import Served
from sprl.settings import Sampling, SettingsError
from sprl.trajectory import Trajectory


def replay(engine: Engine, served: Served, trajectories: Sequence[Trajectory]) -> list[Float[np.ndarray, ' _']]:
  """The sampler's log-probs of the trajectories' tokens, 0 where the model wrote nothing.

  Raises SettingsError where evictions depend on the batch that a sequence shared (config.cache.trigger_scope = 'batch').
  """
  plan, B, C = engine.plan, min(engine.rows, len(trajectories)), engine.sampling.max_tokens
  if plan.sparse and plan.settings.trigger_scope == 'batch':
    raise SettingsError(
      "config.cache.trigger_scope = 'batch': expected 'row' to replay a sequence, whose evictions must be its own"
    )
  results = []
  for start in range(0, len(trajectories), max(B, 1)):
    part = trajectories[start : start + B]
    longest = max(t.prompt_length for t in part)
    bucket = next(b for b in prompt_buckets(engine.sampling) if b >= longest)
    prompts, lengths = np.zeros((B, bucket), np.int32), np.zeros(B, np.int32)
    completions, counts = np.zeros((B, C), np.int32), np.zeros(B, np.int32)
    for row, t in enumerate(part):
      lengths[row], counts[row] = t.prompt_length, len(t.completion)
      prompts[row, : lengths[row]], completions[row, : counts[row]] = t.tokens[: t.prompt_length], t.completion
    arrays = map(jnp.asarray, (prompts, lengths, completions, counts))
    logp = fetch(_replay(engine.graphdef, plan, engine.sampling, served, *arrays))
    results += [t.per_token(row) for t, row in zip(part, logp)]
  return results


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'plan', 'sampling'))
def _replay(
  graphdef: nnx.GraphDef,
  plan: CachePlan,
  sampling: Sampling,
  served: Served,
  prompts: Int[Array, 'B P'],
  lengths: Int[Array, ' B'],
  completions: Int[Array, 'B C'],
  counts: Int[Array, ' B'],
) -> Float[Array, 'B C']:
  """Log-probs of the completions' tokens; 0 behind each row's count."""
  cache, hidden = started(graphdef, plan, served, prompts, lengths)

  def step(i, carry):
    cache, hidden, logp = carry
    token = completions[:, i]
    logp = logp.at[:, i].set(jnp.where(i < counts, logp_of(predict(served, hidden), token, sampling), 0))
    hidden, _, cache, _ = take_in(graphdef, served, cache, token, i + 1 < counts)
    return cache, hidden, logp

  start = cache, hidden, jnp.zeros(completions.shape)
  return jax.lax.fori_loop(0, jnp.max(counts), step, start)[2]
