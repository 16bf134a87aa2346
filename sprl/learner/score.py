"""Dense scoring: the log-prob of every sampled token under given weights, from packed rows to rectangles."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sprl.kernels.linear_logprob import linear_logprob
from sprl.learner.packing import TrainBatch
from sprl.models import transformer
from sprl.models.memory import CausalMemory, EvictedMemory, Memory
from sprl.models.routing import MISSING, Routed
from sprl.models.transformer import Params
from sprl.parallel.rules import OnMesh, anew, shard
from sprl.settings import Kernels, Remat


def micro_logprobs(
  graphdef: nnx.GraphDef,
  params: Params,
  batch: TrainBatch,
  i: Int[Array, ''] | int,
  temperature: float,
  dtype,
  chunk: int,
  remat: Remat = 'none',
  kernels: Kernels = 'auto',
) -> tuple[Float[Array, 'B C'], Float[Array, 'B C'], Routed]:
  """Log-probs and entropies of microbatch i's tokens, in their cells of the rectangle, other cells 0; and who went where.

  Logits are divided by the sampling temperature, as the sampler's were.
  """
  memory: Memory = CausalMemory.of(batch.segments[i], batch.prefixes[i], kernels)
  if batch.evicted is not None:
    memory = EvictedMemory(memory, batch.positions[i], batch.evicted[i])
  routed = Routed(memory, None if batch.routes is None else batch.routes[i], batch.segments[i] > 0)
  hidden, routed = transformer.forward(graphdef, params, batch.tokens[i], batch.positions[i], routed, dtype, remat, kernels)
  with jax.named_scope('head'):
    S, N = batch.source.shape[1:]
    of_shard = shard(hidden.reshape(S, N, -1), 'rows', None, None)
    predictors = jnp.take_along_axis(of_shard, batch.source[i, :, :, None], axis=1)
    head = transformer.head_weight(params)
    scored = linear_logprob(predictors, head, batch.target[i], temperature, chunk, batch.scored[i])
  here = batch.mask & (batch.micro == i)[:, None]
  logp, entropy = (jnp.where(here, shard(x, None, None).reshape(-1)[batch.place], 0.0) for x in scored)
  return logp, entropy, routed


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'temperature', 'dtype', 'chunk', 'kernels'))
def score(
  graphdef: nnx.GraphDef, params: Params, batch: TrainBatch, temperature: float, dtype, chunk: int, kernels: Kernels = 'auto'
) -> Float[Array, 'B C']:
  """Log-probs of all cells of the batch under `params`: the dense old policy's, or the reference's."""

  def body(i, logp):
    return logp + micro_logprobs(graphdef, anew(params, i), batch, i, temperature, dtype, chunk, kernels=kernels)[0]

  return jax.lax.fori_loop(0, batch.used, body, jnp.zeros(batch.mask.shape))


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'temperature', 'dtype', 'chunk', 'kernels'))
def score_and_route(
  graphdef: nnx.GraphDef, params: Params, batch: TrainBatch, temperature: float, dtype, chunk: int, kernels: Kernels = 'auto'
) -> tuple[Float[Array, 'B C'], Int[Array, 'A R T M k']]:
  """The same of a model with experts, and those that each token went through."""

  def one(i):
    logp, _, routed = micro_logprobs(graphdef, anew(params, i), batch, i, temperature, dtype, chunk, kernels=kernels)
    return logp, routed.routes

  def body(i, carry):
    logp, routes = carry
    new, taken = one(i)
    return logp + new, routes.at[i].set(taken)

  like = jax.eval_shape(lambda: one(jnp.int32(0))[1])
  routes = jnp.full((batch.tokens.shape[0], *like.shape), MISSING, like.dtype)
  return jax.lax.fori_loop(0, batch.used, body, (jnp.zeros(batch.mask.shape), routes))
