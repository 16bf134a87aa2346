"""The sampler's jitted functions: prefill prompts, admit them to rows, decode a chunk of steps.

A row is one sequence being generated. Its state never leaves the device between chunks:

    prompts = prefill(served, tokens, lengths)            # [P, bucket] distinct prompts, each read once
    state   = admit(served, state, prompts, ...)          # rows start as copies of a prompt's cache, first token drawn
    state   = decode(served, state)                       # up to `chunk` tokens a row; stops early when all are done
    news    = read(state, counts)                         # what was drawn since: the host's one look
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from sprl.cache.key_bias import KeyBias
from sprl.cache.kv_cache import KVCache
from sprl.cache.plan import CachePlan
from sprl.models import transformer
from sprl.models.routing import MISSING, Routed, record_dtype
from sprl.parallel.rules import OnMesh, anew, is_names, local, shard
from sprl.sampler.draw import draw, uniforms
from sprl.sampler.served import Served
from sprl.settings import Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
  """The rows being decoded. A row's newest token is drawn and recorded, but not yet in its cache."""

  cache: KVCache
  seed: Array  # random key of the run
  uid: Int[Array, ' B']
  attempt: Int[Array, ' B']
  limit: Int[Array, ' B']  # completion tokens allowed
  count: Int[Array, ' B']  # completion tokens drawn
  done: Bool[Array, ' B']
  tokens: Int[Array, 'B C']
  logp: Float[Array, 'B C']  # of the distribution drawn from
  kept: Int[Array, 'B C']  # slots attended, the query's own included
  routes: Int[Array, 'B T M k'] | None = None  # by position, the experts that its token went through; MISSING where none is yet

  @property
  def axes(self) -> 'Rows':
    """The names of its arrays' axes."""
    names: dict[str, Any] = {
      field: None if x is None else ('rows', *[None] * (x.ndim - 1)) for field, x in vars(self).items() if field != 'cache'
    }
    return Rows(**names | {'cache': self.cache.axes, 'seed': ()})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompts:
  """Prefilled prompts: their cache, and the hidden state that predicts their first completion token."""

  cache: KVCache
  hidden: Float[Array, 'P E']
  routes: Int[Array, 'P T M k'] | None = None  # as in Rows


def empty_cache(plan: CachePlan, served: Served, rows: int, slots: int | None = None) -> KVCache:
  """A cache with no tokens in it, with the scales and key biases that the weights come with."""
  return KVCache.empty(plan, rows, slots, served.scales, _biases(plan, served))


def _biases(plan, served):
  return KeyBias.of(plan, transformer.key_biases(served.params)) if plan.key_bias else None


@OnMesh
@partial(jax.jit, static_argnames=('plan', 'rows', 'max_tokens'))
def empty_rows(plan: CachePlan, served: Served, rows: int, max_tokens: int, seed: Array) -> Rows:
  """Rows with nothing to do: all done."""
  ints = jnp.zeros(rows, jnp.int32)
  made = Rows(
    cache=empty_cache(plan, served, rows),
    seed=seed,
    uid=ints,
    attempt=ints + 0,
    limit=ints + 0,
    count=ints + 0,
    done=jnp.ones(rows, bool),
    tokens=jnp.zeros((rows, max_tokens), jnp.int32),
    logp=jnp.zeros((rows, max_tokens)),
    kept=jnp.zeros((rows, max_tokens), jnp.int32),
    routes=_no_routes(plan, rows),
  )
  return _at_home(made)


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'plan'))
def prefill(
  graphdef: nnx.GraphDef,
  plan: CachePlan,
  served: Served,
  tokens: Int[Array, 'P T'],
  lengths: Int[Array, ' P'],
  given: Int[Array, 'P N'] | None = None,
  counts: Int[Array, ' P'] | None = None,
) -> Prompts:
  """Right-padded prompts through the network once. Padding is written beyond each length, where nothing looks.

  `given`, of which `counts` tokens are real, follows the prompts and is taken in as decoding would have: with the compressions
  of a cache that evicts.
  """
  P, T = tokens.shape
  cache = empty_cache(plan, served, P, T if given is None else None).expecting(lengths)
  positions = jnp.broadcast_to(jnp.arange(T), (P, T))
  hidden, cache, routes = _pass(graphdef, served, tokens, positions, cache)
  last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
  prompts = Prompts(cache.advance(), last, _noted(_no_routes(plan, P), routes, positions[:, 0], lengths))
  return prompts if given is None or counts is None else _continued(graphdef, plan, served, prompts, given, counts)


def _continued(graphdef, plan, served, prompts, given, counts):
  """The prompts with what is given behind them, an interval at a time.

  Between two compressions a cache only grows: all of an interval's tokens but the last go through the network together, and
  the last as a decode step, which compresses.
  """
  interval = plan.settings.interval
  given = jnp.pad(given, ((0, 0), (0, interval)))

  def more(carry):
    return carry[0] < jnp.max(counts)

  def stretch(carry):
    done, prompts = carry
    cache, hidden, routes = prompts.cache, prompts.hidden, prompts.routes
    if interval > 1:
      tokens = jax.lax.dynamic_slice_in_dim(given, done, interval - 1, axis=1)
      real = jnp.clip(counts - done, 0, interval - 1)
      positions = cache.seen[:, None] + jnp.arange(interval - 1)
      new, cache, taken = _pass(graphdef, served, tokens, positions, cache.expecting(real))
      routes = _noted(routes, taken, cache.seen, real)
      cache = cache.advance(decoding=True)
      newest = jnp.take_along_axis(new, jnp.maximum(real - 1, 0)[:, None, None], axis=1)[:, 0]
      hidden = jnp.where((real > 0)[:, None], newest, hidden)
    active = counts >= done + interval
    token = jax.lax.dynamic_slice_in_dim(given, done + interval - 1, 1, axis=1)[:, 0]
    seen = cache.seen
    newest, _, cache, taken = take_in(graphdef, served, cache, token, active)
    routes = _noted(routes, taken, seen, active)
    return done + interval, Prompts(cache, jnp.where(active[:, None], newest, hidden), routes)

  return jax.lax.while_loop(more, stretch, (jnp.int32(0), prompts))[1]


def started(
  graphdef: nnx.GraphDef, plan: CachePlan, served: Served, tokens: Int[Array, 'B T'], lengths: Int[Array, ' B']
) -> tuple[KVCache, Float[Array, 'B E']]:
  """A cache of the plan's slots with a prompt in each row, and the hidden states that predict what follows."""
  prompts = prefill(graphdef, plan, served, tokens, lengths)
  rows = jnp.arange(tokens.shape[0])
  return empty_cache(plan, served, tokens.shape[0]).fork(prompts.cache, rows, jnp.ones(rows.shape, bool)), prompts.hidden


@OnMesh
@partial(jax.jit, static_argnames=('sampling', 'stop_ids'), donate_argnames='rows')
def admit(
  served: Served,
  rows: Rows,
  prompts: Prompts,
  parent: Int[Array, ' B'],
  uid: Int[Array, ' B'],
  attempt: Int[Array, ' B'],
  limit: Int[Array, ' B'],
  sampling: Sampling,
  stop_ids: tuple[int, ...],
) -> Rows:
  """Row b starts request uid[b] on prompt parent[b], its first token drawn; rows with parent -1 go on as they are."""
  new = parent >= 0
  parent = jnp.maximum(parent, 0)
  rows = dataclasses.replace(
    rows,
    cache=rows.cache.fork(prompts.cache, parent, new),
    uid=jnp.where(new, uid, rows.uid),
    attempt=jnp.where(new, attempt, rows.attempt),
    limit=jnp.where(new, limit, rows.limit),
    count=jnp.where(new, 0, rows.count),
    done=jnp.where(new, limit <= 0, rows.done),
    routes=jax.tree.map(
      lambda mine, theirs: jnp.where(new[:, None, None, None], theirs[parent], mine), rows.routes, prompts.routes
    ),
  )
  hidden = shard(shard(prompts.hidden, None, None)[parent], 'rows', None)
  return _draw_into(rows, served, hidden, new & ~rows.done, rows.cache.length, sampling, stop_ids)


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'sampling', 'stop_ids', 'steps'), donate_argnames='rows')
def decode(graphdef: nnx.GraphDef, served: Served, rows: Rows, sampling: Sampling, stop_ids: tuple[int, ...], steps: int) -> Rows:
  """Up to `steps` more tokens for every row that is not done."""

  def unfinished(carry):
    step, rows = carry
    return (step < steps) & ~jnp.all(rows.done)

  def advance(carry):
    step, rows = carry
    active = ~rows.done
    newest = jnp.take_along_axis(rows.tokens, jnp.maximum(rows.count - 1, 0)[:, None], axis=1)[:, 0]
    hidden, attended, cache, routes = take_in(graphdef, anew(served, step), rows.cache, newest, active)
    rows = dataclasses.replace(rows, cache=cache, routes=_noted(rows.routes, routes, rows.cache.seen, active))
    return step + 1, _draw_into(rows, served, hidden, active, attended, sampling, stop_ids)

  return jax.lax.while_loop(unfinished, advance, (0, rows))[1]


def take_in(graphdef: nnx.GraphDef, served: Served, cache: KVCache, token: Int[Array, ' B'], active: Bool[Array, ' B']):
  """One decode step: each active row takes its token in.

  Hidden states [B, E] that predict the next, slots seen, the cache, and the token's experts where they are recorded.
  """
  cache = cache.expecting(active.astype(jnp.int32))
  attended = cache.attended
  hidden, cache, routes = _pass(graphdef, served, token[:, None], cache.seen[:, None], cache)
  if cache.plan.sparse and cache.plan.settings.when == 'after':  # or XLA keeps copies for attention that may come later
    hidden, cache = jax.lax.optimization_barrier((hidden, cache))
  return hidden[:, 0], attended, cache.advance(decoding=True), routes


def _pass(graphdef, served, tokens, positions, cache):
  """Hidden states, the cache, and the experts [B, T, M, k] that the tokens went through, where the plan says to record them."""
  plan = cache.plan
  memory = Routed(cache)
  hidden, routed = transformer.forward(graphdef, served.params, tokens, positions, memory, plan.dtype, kernels=plan.kernels)
  return hidden, routed.inner, routed.routes if plan.routes else None


def _no_routes(plan, rows):
  return jnp.full((rows, plan.positions, *plan.routes[:2]), MISSING, record_dtype(plan.routes[2])) if plan.routes else None


def _noted(routes, taken, first, count):
  """The routes with those of each row's first `count` new tokens, which stand at positions from `first` on."""
  if routes is None:
    return None
  step = jnp.arange(taken.shape[1])
  position = jnp.where(step < count[:, None], first[:, None] + step, routes.shape[1])  # out of bounds: dropped
  return routes.at[jnp.arange(len(taken))[:, None], position].set(taken, mode='drop')


def predict(served: Served, hidden: Float[Array, 'B E']) -> Float[Array, 'B V']:
  """Logits, float32, each row's whole on one device.

  A split vocabulary gives each device a part of every row's. They change hands all to all, and each gets some rows whole.
  """
  hidden, head = shard(hidden, 'gathered_rows', None), shard(served.head, 'vocab', None)
  logits = jax.lax.dot_general(hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  return shard(shard(logits, 'gathered_rows', 'vocab'), 'drawn_rows', None)


def _draw_into(rows, served, hidden, active, attended, sampling, stop_ids):
  """Draw one token for the active rows and record it: it ends the row if it is a stop id or the last one allowed."""
  with jax.named_scope('draw'):
    uniform = uniforms(rows.seed, rows.uid, rows.attempt, rows.cache.seen)
    drawn = draw(predict(served, hidden), shard(uniform, 'drawn_rows', None), sampling)
    token, logp = (shard(x, 'rows') for x in drawn)
  column = jnp.where(active, rows.count, rows.tokens.shape[1])  # out of bounds: dropped
  count = rows.count + active
  ended = jnp.isin(token, jnp.array(stop_ids, jnp.int32)) if stop_ids else jnp.zeros_like(active)
  row, cells = ('rows',), ('rows', None)
  record = local(_recorded, (cells, row, row), cells)
  rows = dataclasses.replace(
    rows,
    count=count,
    done=rows.done | (active & (ended | (count >= rows.limit))),
    tokens=record(rows.tokens, column, token),
    logp=record(rows.logp, column, logp),
    kept=record(rows.kept, column, attended),
  )
  return _at_home(rows)


def _at_home(rows: Rows) -> Rows:
  """The rows where their names say; or what is known of them would spread to where their tokens are drawn."""
  return jax.tree.map(lambda names, x: shard(x, *names), rows.axes, rows, is_leaf=is_names)


def _recorded(cells, column, new):
  return cells.at[jnp.arange(len(new)), column].set(new, mode='drop')


@OnMesh
@partial(jax.jit, static_argnames='steps')
def read(rows: Rows, since: Int[Array, ' B'], steps: int) -> dict[str, Array]:
  """What the host looks at between chunks: who is done, and each row's up to `steps` tokens from its `since`-th on."""
  columns = jnp.minimum(since[:, None] + jnp.arange(steps), rows.tokens.shape[1] - 1)
  news = {name: jnp.take_along_axis(getattr(rows, name), columns, axis=1) for name in ('tokens', 'logp', 'kept')}
  news |= {'done': rows.done, 'count': rows.count, 'saturated': jnp.sum(rows.cache.saturated, axis=1)}
  return {name: shard(x, *[None] * x.ndim) for name, x in news.items()}  # whole everywhere: every host looks at all rows


@OnMesh
@partial(jax.jit, donate_argnames='rows')
def rescale(rows: Rows, served: Served) -> Rows:
  """The rows with what their cache holds in FP8 on the scales, and beside the key biases, of other weights."""
  cache = rows.cache
  return (
    rows if served.scales is None else dataclasses.replace(rows, cache=cache.rescaled(served.scales, _biases(cache.plan, served)))
  )


@partial(jax.jit, donate_argnames='rows')
def release(rows: Rows, which: Bool[Array, ' B']) -> Rows:
  """The rows with those of `which` ended."""
  return dataclasses.replace(rows, done=rows.done | which)
