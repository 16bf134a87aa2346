"""The sampler's jitted functions: prefill prompts, insert them into rows, decode a chunk of tokens.

A row is one sequence that is being generated. Its state stays on the device between chunks:

    prompts = prefill(graphdef, layout, weights, tokens, lengths)   # [P, bucket] distinct prompts, each read once
    state = insert(weights, state, prompts, new_rows, ...)          # rows start on a prompt; their first token is drawn
    state = decode(graphdef, weights, state, ..., steps)            # up to `steps` tokens a row
    news = news_since(state, since, known, steps)                   # the tokens drawn since: what the host fetches
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer

from sprl.cache.attend import CachedAttention
from sprl.cache.compaction import rows_at_once
from sprl.cache.key_bias import KeyBias
from sprl.cache.kv_cache import KVCache, Step
from sprl.cache.layout import CacheLayout
from sprl.cache.row_blocks import first_rows, put_rows, replace_rows, take_rows
from sprl.config import Sampling
from sprl.kernels.support import RecordFormat
from sprl.models import transformer
from sprl.models.routing import MISSING, route_dtype
from sprl.quant.dot import rows_dot
from sprl.sampler.draw import draw, uniforms
from sprl.sampler.weights import SamplerWeights
from sprl.sharding.rules import OnMesh, is_names, local, parts, shard, tie_to_iteration

ROW_MULTIPLE = 8  # a block of rows that are due has a multiple of this: kernels that quantise activations take no others


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
  """The state of B rows. A row's newest token is drawn and recorded, but not yet in its cache."""

  cache: KVCache
  seed: Array  # random key of the run
  uid: Int[Array, ' B']
  attempt: Int[Array, ' B']
  limit: Int[Array, ' B']  # maximum number of completion tokens
  count: Int[Array, ' B']  # completion tokens drawn so far
  done: Bool[Array, ' B']
  tokens: Int[Array, 'B C']  # the completion
  logp: Float[Array, 'B C']  # log-prob of the token under the distribution that drew it
  attended: Int[Array, 'B C']  # cache slots attended, including the query's own
  routes: Int[Array, 'B T M k'] | None = None  # experts of the token at each position; MISSING where no token is yet
  support: Integer[Array, 'B R W'] | None = None  # of the last R tokens, t in column t mod R (sprl/kernels/support.py)

  @property
  def axes(self) -> 'DecodeState':
    """The names of the arrays' axes."""
    names: dict[str, Any] = {
      field: None if x is None else ('rows', *[None] * (x.ndim - 1)) for field, x in vars(self).items() if field != 'cache'
    }
    return DecodeState(**names | {'cache': self.cache.axes, 'seed': None if self.seed is None else ()})

  def block(self, rows: Int[Array, ' R']) -> 'DecodeState':
    """Return a view of some rows: its cache has the layers of all rows. On a mesh each device numbers its own rows.

    Row numbers out of bounds fill up the block. `with_block` drops what is written to them.
    """
    mine = self._row_state
    part = local(take_rows, (mine.axes, ('rows',)), mine.axes)(mine, rows)
    return dataclasses.replace(part, seed=self.seed, cache=part.cache.on_layers_of(self.cache, rows))

  def with_block(self, part: 'DecodeState') -> 'DecodeState':
    """Return this state with the rows and the layers of a block."""
    mine, names = self._row_state, ('rows',)
    put = local(put_rows, (mine.axes, names, mine.axes), mine.axes)
    whole = put(mine, part.cache.block, part._row_state)
    return dataclasses.replace(whole, seed=self.seed, cache=whole.cache.on_layers_of(part.cache, None))

  @property
  def _row_state(self):
    """The arrays that have an entry for each row, without the layers of the cache."""
    return dataclasses.replace(self, seed=cast(Any, None), cache=self.cache.row_state)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompts:
  """Prefilled prompts: their cache, and the hidden state that predicts the first completion token."""

  cache: KVCache
  hidden: Float[Array, 'P E']
  routes: Int[Array, 'P T M k'] | None = None  # as in DecodeState


class NewRows(NamedTuple):
  """The requests that start on rows. Row b starts on prompt `parent[b]`; a row with parent -1 continues unchanged."""

  parent: Int[Array | np.ndarray, ' B']
  uid: Int[Array | np.ndarray, ' B']
  attempt: Int[Array | np.ndarray, ' B']
  limit: Int[Array | np.ndarray, ' B']  # the largest number of completion tokens


def empty_cache(layout: CacheLayout, weights: SamplerWeights, rows: int, slots: int | None = None) -> KVCache:
  """Return a cache without tokens, with the scales and key biases of the weights. `slots` replaces the layout's slots."""
  return KVCache.empty(layout, rows, slots, weights.scales, _biases(layout, weights))


def _biases(layout, weights):
  return KeyBias.of(layout, transformer.key_biases(weights.params)) if layout.key_bias else None


@OnMesh
@partial(jax.jit, static_argnames=('layout', 'rows', 'max_tokens', 'support', 'chunk'))
def empty_state(
  layout: CacheLayout,
  weights: SamplerWeights,
  rows: int,
  max_tokens: int,
  seed: Array,
  support: RecordFormat | None = None,
  chunk: int = 0,
) -> DecodeState:
  """Return the state of `rows` rows without requests: all are done. A completion has at most `max_tokens` tokens.

  With `support`, the state records in this form the supports of the tokens that a row draws between two calls of `news_since`: at
  most one in `insert` and `chunk` in `decode`.
  """
  ints = jnp.zeros(rows, jnp.int32)
  state = DecodeState(
    cache=empty_cache(layout, weights, rows),
    seed=seed,
    uid=ints,
    attempt=ints + 0,
    limit=ints + 0,
    count=ints + 0,
    done=jnp.ones(rows, bool),
    tokens=jnp.zeros((rows, max_tokens), jnp.int32),
    logp=jnp.zeros((rows, max_tokens)),
    attended=jnp.zeros((rows, max_tokens), jnp.int32),
    routes=no_routes(layout, rows),
    support=None if support is None else jnp.zeros((rows, chunk + 1, support.words), support.dtype),
  )
  return _sharded(state)


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'layout'))
def prefill(
  graphdef: nnx.GraphDef,
  layout: CacheLayout,
  weights: SamplerWeights,
  tokens: Int[Array, 'P T'],
  lengths: Int[Array, ' P'],
  given: Int[Array, 'P N'] | None = None,
  counts: Int[Array, ' P'] | None = None,
) -> Prompts:
  """Read right-padded prompts of `lengths` tokens in one forward pass.

  A prompt longer than the budget is compressed layer by layer, after its queries have attended to all of it. Therefore only one
  layer at a time holds the whole prompt, and the prompts' caches have no more slots than the rows that start on them.

  `given` are tokens that follow the prompts: earlier turns, or tokens that an aborted request had drawn. `counts` are their
  numbers. They are read as decode steps would read them, so a cache that evicts compresses at the same tokens.

  Padding is written after each row's length, where no query attends.
  """
  P, T = tokens.shape
  cache = empty_cache(layout, weights, P, T if given is None else max(T, layout.slots))
  positions = jnp.broadcast_to(jnp.arange(T), (P, T))
  hidden, cache, routes = _pass(graphdef, weights, tokens, positions, cache, Step(lengths))
  last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
  prompts = Prompts(cache, last, _record_routes(no_routes(layout, P), routes, positions[:, 0], lengths))
  return prompts if given is None or counts is None else read_given(graphdef, layout, weights, prompts, given, counts)


def read_given(
  graphdef: nnx.GraphDef,
  layout: CacheLayout,
  weights: SamplerWeights,
  prompts: Prompts,
  given: Int[Array, 'P N'],
  counts: Int[Array, ' P'],
) -> Prompts:
  """Read the first `counts` given tokens of each row, after the tokens that its cache already has.

  A dense cache reads them in one forward pass. A cache that evicts only grows until the step of its next compression. It reads
  the tokens before that step in one forward pass. It reads the token of that step as a decode step, which compresses. Rows may be
  at different steps of their interval.
  """
  interval, N = layout.settings.interval, given.shape[1]
  width = min(interval - 1, N) if layout.sparse else N
  given = jnp.pad(given, ((0, 0), (0, max(width, 1))))

  def more(carry):
    return jnp.any(carry[0] < counts)

  def stretch(carry):
    done, prompts = carry
    cache, hidden, routes = prompts.cache, prompts.hidden, prompts.routes
    if width:
      tokens = jnp.take_along_axis(given, done[:, None] + jnp.arange(width), axis=1)
      real = counts - done
      if layout.sparse:
        real = jnp.minimum(real, interval - 1 - cache.decoded % interval)  # the step after these compresses
      positions = cache.seen[:, None] + jnp.arange(width)
      seen = cache.seen
      new, cache, taken = _pass(graphdef, weights, tokens, positions, cache, Step(real, decoding=True, compresses=False))
      routes = _record_routes(routes, taken, seen, real)
      newest = jnp.take_along_axis(new, jnp.maximum(real - 1, 0)[:, None, None], axis=1)[:, 0]
      hidden = jnp.where((real > 0)[:, None], newest, hidden)
      done = done + real
    if layout.sparse:
      active = (done < counts) & ((cache.decoded + 1) % interval == 0)
      token = jnp.take_along_axis(given, done[:, None], axis=1)[:, 0]
      seen = cache.seen
      newest, _, cache, taken = decode_step(graphdef, weights, cache, token, active)
      routes = _record_routes(routes, taken, seen, active)
      hidden = jnp.where(active[:, None], newest, hidden)
      done = done + active
    return done, Prompts(cache, hidden, routes)

  start = jnp.zeros_like(counts), prompts
  return jax.lax.while_loop(more, stretch, start)[1] if layout.sparse else stretch(start)[1]


@OnMesh
@partial(jax.jit, static_argnames=('sampling', 'stop_ids'), donate_argnames='state')
def insert(
  weights: SamplerWeights,
  state: DecodeState,
  prompts: Prompts,
  new_rows: NewRows,
  sampling: Sampling,
  stop_ids: tuple[int, ...],
) -> DecodeState:
  """Start rows on prefilled prompts and draw their first token. `state` is donated."""
  new = jnp.asarray(new_rows.parent >= 0)
  parent = jnp.maximum(new_rows.parent, 0)
  state = dataclasses.replace(
    state,
    cache=state.cache.fork(prompts.cache, parent, new),
    uid=jnp.where(new, new_rows.uid, state.uid),
    attempt=jnp.where(new, new_rows.attempt, state.attempt),
    limit=jnp.where(new, new_rows.limit, state.limit),
    count=jnp.where(new, 0, state.count),
    done=jnp.where(new, new_rows.limit <= 0, state.done),
    routes=_forked_routes(state.routes, prompts.routes, parent, new),
  )
  hidden = shard(shard(prompts.hidden, None, None)[parent], 'rows', None)
  # The last query of a prompt attended to the whole prompt. After given tokens, the last query was that of a decode step.
  attended = jnp.where(state.cache.decoded > 0, state.cache.length, state.cache.seen)
  return _draw_token(state, weights, hidden, active=new & ~state.done, attended=attended, sampling=sampling, stop_ids=stop_ids)


@OnMesh
@partial(jax.jit, static_argnames=('graphdef', 'sampling', 'stop_ids', 'steps', 'fixed'), donate_argnames='state')
def decode(
  graphdef: nnx.GraphDef,
  weights: SamplerWeights,
  state: DecodeState,
  sampling: Sampling,
  stop_ids: tuple[int, ...],
  steps: int,
  fixed: bool = False,
) -> DecodeState:
  """Draw up to `steps` more tokens for every row that is not done. `state` is donated.

  With `fixed`, the chunk always has `steps` steps. Otherwise it ends when all rows are done. On a GPU this check makes the device
  wait for the host before every step.

  With `fixed` and a cache that evicts, `_decode_in_segments` says which steps a row takes.
  """

  def advance(state, active, **of_step):
    newest = jnp.take_along_axis(state.tokens, jnp.maximum(state.count - 1, 0)[:, None], axis=1)[:, 0]
    tied = tie_to_iteration(weights, state.count)
    hidden, attended, cache, routes = decode_step(graphdef, tied, state.cache, newest, active, **of_step)
    state = dataclasses.replace(state, cache=cache, routes=_record_routes(state.routes, routes, state.cache.seen, active))
    return _draw_token(state, weights, hidden, active=active, attended=attended, sampling=sampling, stop_ids=stop_ids)

  if not fixed:
    return jax.lax.while_loop(
      lambda carry: (carry[0] < steps) & ~jnp.all(carry[1].done),
      lambda carry: (carry[0] + 1, advance(carry[1], ~carry[1].done)),
      (0, state),
    )[1]
  if not state.cache.layout.sparse:
    return jax.lax.fori_loop(0, steps, lambda _, state: advance(state, ~state.done), state)
  return _decode_in_segments(advance, state, steps)


def _decode_in_segments(advance: Callable[..., DecodeState], state: DecodeState, steps: int) -> DecodeState:
  """Draw `steps` more tokens for each row of a cache that evicts, in a chunk of fixed length.

  `advance(state, active, **of_step)` takes one step of the active rows; `of_step` are the promises of `Step`.

  A segment has `period` = gcd(steps, interval) steps. A row that has decoded n tokens takes part in step i of a segment only if
  n = i modulo the period, so rows can be due only in the last step. A row that starts on a prompt never waits. A row that starts
  after given tokens or on a kept cache waits once, for at most period - 1 steps. It draws the same tokens, because draws depend
  on positions, not on steps.

  The steps of a segment are plain: their program has no compression. A row that is due skips the last plain step. It takes that
  step after the others, in a block of `due_at_once` rows. One loop over the blocks surrounds all layers: a GPU asks the host
  once, and once more for each block. Work grows with the number of rows that are due. Each block reads the weights.
  """
  period, rows = math.gcd(steps, state.cache.layout.settings.interval), len(state.done)
  mine = rows // parts('rows', rows)  # on each device
  size = due_at_once(state.cache.layout, mine, period)
  first = local(partial(first_rows, size=size), (('rows',),), ('rows',))

  def plain(i, carry):
    state, _ = carry
    active = ~state.done & (state.cache.decoded % period == i)
    due = state.cache.due(Step(active.astype(jnp.int32), decoding=True))
    return advance(state, active & ~due, compresses=False), due

  def segment(_, state):
    state, due = jax.lax.fori_loop(0, period, plain, (state, jnp.zeros(rows, bool)))
    count = state.count

    def waiting(state):
      return due & (state.count == count)

    def compressing(state):
      block = first(waiting(state))
      part = state.block(block)
      return state.with_block(advance(part, block < mine, all_due=True))

    return jax.lax.while_loop(lambda state: jnp.any(waiting(state)), compressing, state)

  return segment(0, state) if period == steps else jax.lax.fori_loop(0, steps // period, segment, state)


def due_at_once(layout: CacheLayout, rows: int, period: int) -> int:
  """Return how many of a device's `rows` rows take a step that compresses at the same time.

  If the rows' compressions are spread evenly over an interval, rows * period / interval are due together. Room for twice as many
  makes one block enough most of the time. Kernels take multiples of ROW_MULTIPLE.
  """
  wanted = -(-2 * rows * period // layout.settings.interval)
  most = min(wanted, rows_at_once(layout, rows, layout.slots))
  return min(rows, max(ROW_MULTIPLE, most // ROW_MULTIPLE * ROW_MULTIPLE))


def decode_step(
  graphdef: nnx.GraphDef,
  weights: SamplerWeights,
  cache: KVCache,
  token: Int[Array, ' B'],
  active: Bool[Array, ' B'],
  compresses: bool = True,
  all_due: bool = False,
) -> tuple[Float[Array, 'B E'], Int[Array, ' B'], KVCache, Int[Array, 'B 1 M k'] | None]:
  """Read one token of each active row. `compresses` and `all_due` are promises of the caller (`Step`).

  Returns the hidden states that predict the next tokens, the number of slots that each query attended to, the cache, and the
  token's experts if the layout records them.
  """
  step = Step(active.astype(jnp.int32), decoding=True, compresses=compresses, all_due=all_due)
  attended = cache.attended(step)
  hidden, cache, routes = _pass(graphdef, weights, token[:, None], cache.seen[:, None], cache, step)
  return hidden[:, 0], attended, cache, routes


def _pass(graphdef, weights, tokens, positions, cache, step):
  """Return hidden states, the cache with the step's tokens, and the tokens' experts [B, T, M, k] if the layout records them."""
  layout = cache.layout
  attention = CachedAttention(cache, step)
  out = transformer.forward(graphdef, weights.params, tokens, positions, attention, layout.dtype, kernels=layout.kernels)
  return out.hidden, out.attention.cache.advance(step), out.routing.routes if layout.routes else None


def no_routes(layout: CacheLayout, rows: int) -> Int[Array, 'B T M k'] | None:
  """Return the experts of rows without tokens; None if the layout does not record them."""
  return jnp.full((rows, layout.positions, *layout.routes[:2]), MISSING, route_dtype(layout.routes[2])) if layout.routes else None


def _forked_routes(mine, theirs, parent, take):
  if mine is None:
    return None
  names = ('rows', None, None, None)
  replaced = partial(replace_rows, empty=lambda _: MISSING)
  return local(replaced, (names, (None,) * 4, ('rows',), ('rows',)), names)(mine, theirs, parent, take)


def _record_routes(routes, taken, first, count):
  """Write the experts of each row's first `count` new tokens, whose positions begin at `first`."""
  if routes is None:
    return None
  step = jnp.arange(taken.shape[1])
  position = jnp.where(step < count[:, None], first[:, None] + step, routes.shape[1])  # out of bounds: dropped
  return routes.at[jnp.arange(len(taken))[:, None], position].set(taken, mode='drop')


def logits(weights: SamplerWeights, hidden: Float[Array, 'B E']) -> Float[Array, 'B V']:
  """Return float32 logits. On a mesh, one device holds all logits of a row, because sampling needs the whole row.

  If the vocabulary is split, each device first computes a part of every row's logits. An all-to-all then gives it some whole
  rows.
  """
  hidden, head = shard(hidden, 'gathered_rows', None), shard(weights.head, 'vocab', None)
  logits = rows_dot(hidden, head, jnp.float32)
  return shard(shard(logits, 'gathered_rows', 'vocab'), 'drawn_rows', None)


def _draw_token(state, weights, hidden, *, active, attended, sampling, stop_ids):
  """Draw and record one token for each active row. A stop id or the last allowed token ends the row."""
  with jax.named_scope('draw'):
    uniform = uniforms(state.seed, state.uid, state.attempt, state.cache.seen)
    form = None if state.support is None else RecordFormat(state.support.shape[2], state.support.dtype)
    drawn = draw(logits(weights, hidden), shard(uniform, 'drawn_rows', None), sampling, form)
    token, logp = shard(drawn.token, 'rows'), shard(drawn.logp, 'rows')
  column = jnp.where(active, state.count, state.tokens.shape[1])  # out of bounds: dropped
  count = state.count + active
  ended = jnp.isin(token, jnp.array(stop_ids, jnp.int32)) if stop_ids else jnp.zeros_like(active)
  row, cells = ('rows',), ('rows', None)
  record = local(_set_column, (cells, row, row), cells)
  state = dataclasses.replace(
    state,
    count=count,
    done=state.done | (active & (ended | (count >= state.limit))),
    tokens=record(state.tokens, column, token),
    logp=record(state.logp, column, logp),
    attended=record(state.attended, column, attended),
  )
  if drawn.support is not None:
    R = state.support.shape[1]
    record = local(_set_column, (('rows', None, None), row, cells), ('rows', None, None))
    support = record(state.support, jnp.where(active, (count - active) % R, R), shard(drawn.support, *cells))
    state = dataclasses.replace(state, support=support)
  return _sharded(state)


def _sharded(state: DecodeState) -> DecodeState:
  """Constrain the state to its named axes. Otherwise XLA propagates the sharding of the drawn tokens to it."""
  return jax.tree.map(lambda names, x: shard(x, *names), state.axes, state, is_leaf=is_names)


def _set_column(cells, column, new):
  return cells.at[jnp.arange(len(new)), column].set(new, mode='drop')


@OnMesh
@partial(jax.jit, static_argnames='steps')
def news_since(state: DecodeState, since: Int[Array, ' B'], known: Int[Array, ' B'], steps: int) -> dict[str, Array]:
  """Return what the host needs between chunks: status and counts of each row, and its newest records.

  `done`, `count`, `saturated` and `saturated_queries` are [B].

  `tokens`, `logp` and `attended` are [B, steps]: up to `steps` completion tokens of row b, from index `known[b]` on, or from
  `since[b]` if `known[b]` is negative. If the state records supports, `support` is [B, steps, W]. In this case `steps` is at most
  R, the number of tokens with a recorded support.
  """
  since = jnp.where(known < 0, since, known)
  columns = jnp.minimum(since[:, None] + jnp.arange(steps), state.tokens.shape[1] - 1)
  news = {name: jnp.take_along_axis(getattr(state, name), columns, axis=1) for name in ('tokens', 'logp', 'attended')}
  if state.support is not None:
    recent = (since[:, None] + jnp.arange(steps)) % state.support.shape[1]
    news['support'] = jnp.take_along_axis(state.support, recent[:, :, None], axis=1)
  news |= {'done': state.done, 'count': state.count}
  news |= {name: jnp.sum(getattr(state.cache, name), axis=1) for name in ('saturated', 'saturated_queries')}
  return {name: shard(x, *[None] * x.ndim) for name, x in news.items()}  # replicated: every host fetches all rows


@OnMesh
@partial(jax.jit, donate_argnames='state')
def rescale(state: DecodeState, weights: SamplerWeights) -> DecodeState:
  """Convert an FP8 cache to the scales and key biases of other weights (docs/methods/fp8.md, eq. 6). `state` is donated."""
  return dataclasses.replace(state, cache=rescaled(state.cache, weights))


def rescaled(cache: KVCache, weights: SamplerWeights) -> KVCache:
  """Return an FP8 cache with the scales and key biases of other weights; return any other cache unchanged."""
  return cache if weights.scales is None else cache.rescaled(weights.scales, _biases(cache.layout, weights))


@OnMesh
@partial(jax.jit, donate_argnames='state')
def release(state: DecodeState, which: Bool[Array, ' B']) -> DecodeState:
  """Mark the rows in `which` as done. `state` is donated."""
  return dataclasses.replace(state, done=state.done | which)
