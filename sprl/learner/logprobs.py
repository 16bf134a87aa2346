"""Scoring: the log-prob of every sampled token under given weights, from packed rows to [B, C] arrays."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from sprl.config import UNQUANTISED, Kernels, Quant, Remat, Run
from sprl.kernels.linear_logprob import linear_logprob
from sprl.learner.batch import TrainBatch
from sprl.learner.copies import Copies, copies_of, with_copies
from sprl.models import transformer
from sprl.models.attention import Attention, EvictedAttention, PackedAttention
from sprl.models.routing import MISSING, Routing
from sprl.models.transformer import Params
from sprl.quant.dot import StraightThrough, plain, values
from sprl.sharding.rules import OnMesh, shard, tie_to_iteration


@dataclass(frozen=True)
class ForwardConfig:
  """Static, hashable settings of the learner's forward pass."""

  temperature: float  # sampling temperature, by which logits are divided, as the sampler's are
  dtype: Any  # compute dtype
  chunk: int | None  # positions whose logits exist at one time; None: `positions_at_once`
  kernels: Kernels = 'auto'  # of attention, of the experts' products and of FP8 linears
  quant: Quant = UNQUANTISED  # the linears' format, as that of a sampler (`Quant.in_learner`)

  @classmethod
  def of(cls, run: Run, dtype: Any) -> 'ForwardConfig':
    """Return the settings of a run that computes in `dtype`."""
    return cls(run.sampling.temperature, dtype, run.packing.score_chunk, run.model.kernels, run.quant.in_learner)


def copies_for(params: Params, batch: TrainBatch, config: ForwardConfig) -> Copies:
  """Return the copies of the weights that the microbatches of this batch multiply, made before the loop over them.

  A batch with room for one microbatch has no copies in the compute dtype: they would save little, and take memory.
  """
  return copies_of(params, config.quant, config.dtype, config.kernels, cast=batch.tokens.shape[0] > 1)


def micro_logprobs(
  graphdef: nnx.GraphDef,
  params: Params,
  batch: TrainBatch,
  i: Int[Array, ''] | int,
  config: ForwardConfig,
  remat: Remat = 'none',
) -> tuple[Float[Array, 'B C'], Float[Array, 'B C'], Routing]:
  """Return log-probs and entropies (nats) of the tokens of microbatch i, and the routing of all its tokens.

  Both are [B, C] arrays of the whole batch, 0 at the tokens of other microbatches. They are of the policy at the sampling
  temperature, over the tokens that the sampler's filters kept (docs/methods/losses.md, Notation, and eq. 31). `remat` says what
  the backward pass recomputes.
  """
  whole = (shard(x[i], 'rows', None) for x in (batch.segments, batch.prefixes, batch.positions))
  segments, prefixes, positions = whole  # of all tokens of a row, which attention compares
  attention: Attention = PackedAttention.of(segments, prefixes, config.kernels, positions)
  if batch.evicted is not None:
    attention = EvictedAttention(attention, positions, batch.evicted[i])
  out = transformer.forward(
    graphdef, params, batch.tokens[i], batch.positions[i], attention, dtype=config.dtype, remat=remat, kernels=config.kernels,
    routes=None if batch.routes is None else batch.routes[i], mask=batch.segments[i] > 0,
  )  # fmt: skip
  with jax.named_scope('head'):
    S, N = batch.predictor.shape[1:]
    parts = batch.scored.shape[1]  # Q of each row shard: as many as devices share a row
    of_shard = shard(out.hidden, 'rows', None, None).reshape(S, N, -1)
    predictors = jnp.take_along_axis(of_shard, batch.predictor[i, :, :, None], axis=1)
    predictors = _in_parts(shard(predictors, 'rows', 'tokens', None), parts)
    head = transformer.head_weight(params)
    scored = linear_logprob(
      predictors, plain(head), _in_parts(batch.target[i], parts), temperature=config.temperature, chunk=config.chunk,
      count=batch.scored[i], support=None if batch.support is None else _in_parts(batch.support[i], parts),
      narrow=values(head.copy, config.dtype) if isinstance(head, StraightThrough) else None,
    )  # fmt: skip
  here = batch.mask & (batch.micro == i)[:, None]
  logp, entropy = (jnp.where(here, shard(x, None, None).reshape(-1)[batch.place], 0.0) for x in scored)
  return logp, entropy, out.routing


def _in_parts(x: Shaped[Array, 'S N *D'], parts: int) -> Shaped[Array, 'P n *D']:
  """Return the scored positions of each row shard as those of its Q parts, the first parts of all shards first."""
  of_shards = x.reshape(len(x), parts // len(x), -1, *x.shape[2:])
  return jnp.swapaxes(of_shards, 0, 1).reshape(parts, -1, *x.shape[2:])


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'config'))
def score(graphdef: nnx.GraphDef, params: Params, batch: TrainBatch, config: ForwardConfig) -> Float[Array, 'B C']:
  """Return the log-probs of all tokens of the batch under `params`: the old policy's, or the reference model's."""
  micro = _scorer(graphdef, params, batch, config)
  return jax.lax.fori_loop(0, batch.used, lambda i, logp: logp + micro(i)[0], jnp.zeros(batch.mask.shape))


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'config'))
def score_and_route(
  graphdef: nnx.GraphDef, params: Params, batch: TrainBatch, config: ForwardConfig
) -> tuple[Float[Array, 'B C'], Int[Array, 'A R T M k']]:
  """Return the log-probs of all tokens under `params`, and the k experts of each token in each of the M layers with experts."""
  micro = _scorer(graphdef, params, batch, config)

  def body(i, carry):
    logp, routes = carry
    new, _, routing = micro(i)
    return logp + new, routes.at[i].set(routing.routes)

  like = jax.eval_shape(micro, jnp.int32(0))[2].routes
  routes = jnp.full((batch.tokens.shape[0], *like.shape), MISSING, like.dtype)
  return jax.lax.fori_loop(0, batch.used, body, (jnp.zeros(batch.mask.shape), routes))


def _scorer(graphdef, params, batch, config):
  """Return the function i -> `micro_logprobs` of microbatch i. Its copies of the weights are made once."""
  params = with_copies(params, copies_for(params, batch, config))
  return lambda i: micro_logprobs(graphdef, tie_to_iteration(params, i), batch, i, config)
