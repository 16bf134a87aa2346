"""Kept caches: what a row held when its request ended, for the request that goes on from there.

The turns of a conversation are requests whose tokens extend each other. A later turn starts from the keys and values of the turn
before, evicted or in FP8 as they are, and reads only the new tokens:

    kept.keep(state, ended)                 # copies rows of the decode state to places of the store, before they become free
    prompts = kept.go_on(..., requests)     # takes their caches out of the store and reads the tokens that are new

The store is one KVCache with a row for each place. It stays on the devices of the decode state, and is split in the same way. All
decisions follow from the order of the calls, so the processes of a run take the same ones.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import batched
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from sprl.cache.kv_cache import KVCache
from sprl.cache.layout import CacheLayout
from sprl.models.routing import MISSING
from sprl.sampler.buckets import bucket, padded
from sprl.sampler.decode import DecodeState, Prompts, empty_cache, no_routes, read_given, rescaled
from sprl.sampler.weights import SamplerWeights
from sprl.sharding.rules import OnMesh, is_names, shard
from sprl.sharding.transfer import home
from sprl.types import Request

# --- on the devices ----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Store:
  """The caches of N sequences that do not run."""

  cache: KVCache
  routes: Int[Array, 'N T M k'] | None = None  # experts of the token at each position, if the layout records them

  @property
  def axes(self) -> 'Store':
    """The names of the arrays' axes."""
    names: Any = None if self.routes is None else ('rows', None, None, None)
    return Store(self.cache.axes, names)


def _sharded(store: Store) -> Store:
  return jax.tree.map(lambda names, x: shard(x, *names), store.axes, store, is_leaf=is_names)


@OnMesh
@partial(jax.jit, static_argnames=('layout', 'places'))
def empty_store(layout: CacheLayout, weights: SamplerWeights, places: int) -> Store:
  """Return a store without tokens, with the scales and key biases of the weights."""
  return _sharded(Store(empty_cache(layout, weights, places), no_routes(layout, places)))


@OnMesh
@partial(jax.jit, donate_argnames='store')
def store_rows(
  store: Store, state: DecodeState, rows: Int[Array, ' P'], places: Int[Array, ' P'], seen: Int[Array, ' P']
) -> Store:
  """Copy rows of the decode state to places of the store, each with its first `seen` tokens. `store` is donated.

  Only a dense cache may have read more than `seen` tokens. A place beyond the last means: do not store.
  """
  cache = state.cache.rows(rows)
  if not cache.layout.sparse:
    cache = replace(cache, length=seen, seen=seen)
  routes = store.routes
  if routes is not None and state.routes is not None:
    read = jnp.arange(routes.shape[1]) < seen[:, None]
    routes = routes.at[places].set(jnp.where(read[:, :, None, None], state.routes[rows], MISSING), mode='drop')
  return _sharded(Store(store.cache.with_rows(places, cache), routes))


@OnMesh
@partial(jax.jit, static_argnames='graphdef')
def read_behind(
  graphdef: nnx.GraphDef,
  weights: SamplerWeights,
  store: Store,
  places: Int[Array, ' P'],
  tokens: Int[Array, 'P N'],
  counts: Int[Array, ' P'],
) -> Prompts:
  """Read the first `counts` tokens after the caches of these places. Returns the state that rows start from."""
  layout = store.cache.layout
  hidden = jnp.zeros((places.shape[0], weights.head.shape[1]), layout.dtype)
  prompts = Prompts(store.cache.rows(places), hidden, None if store.routes is None else store.routes[places])
  return read_given(graphdef, layout, weights, prompts, tokens, counts)


@OnMesh
@partial(jax.jit, donate_argnames='store')
def rescale(store: Store, weights: SamplerWeights) -> Store:
  """Convert an FP8 store to the scales and key biases of other weights. `store` is donated."""
  return replace(store, cache=rescaled(store.cache, weights))


# --- on the host -------------------------------------------------------------------------------------------------------


class _Sequence(NamedTuple):
  """A sequence whose cache is kept."""

  place: int
  prompt: int  # tokens of its prompt: an evicting cache reads the tokens behind them as decode steps
  tokens: Int[np.ndarray, ' T']  # all of them; the cache holds all but the newest


class Ended(NamedTuple):
  """A request that ended, and whose cache is to be kept."""

  row: int
  request: Request
  tokens: Int[np.ndarray, ' C']  # that it drew, at least one


class KeptCaches:
  """The kept caches of an engine.

  Args:
    layout: of the engine's cache.
    places: the most caches that are kept at once. If all places are taken, the oldest cache that no waiting request continues is
      dropped.
    mesh: of the engine.
  """

  def __init__(self, layout: CacheLayout, places: int, mesh: Mesh | None):
    self._layout, self._places, self._mesh = layout, places, mesh
    self._sequences: dict[tuple[int, int], _Sequence] = {}  # by key, in the order of keeping
    self._store: Store | None = None  # created for the first cache

  def __len__(self) -> int:
    return len(self._sequences)

  def keep(
    self,
    weights: SamplerWeights,
    state: DecodeState,
    ended: Sequence[Ended],
    awaited: Collection[tuple[int, int] | None],
    together: int,
  ) -> None:
    """Keep the caches of rows whose requests ended, as long as there are places. At most `together` are copied at once.

    `awaited` are the keys that waiting requests continue. These caches are not dropped.
    """
    for each in ended:
      self._sequences.pop(each.request.key, None)
    taken = {sequence.place for sequence in self._sequences.values()}
    unused = [place for place in range(self._places) if place not in taken]
    droppable = [key for key in self._sequences if key not in awaited]
    stored = ended[: len(unused) + len(droppable)]
    if not stored:
      return
    if self._store is None:
      with jax.default_device(home(weights.head.sharding)):
        self._store = empty_store.on(self._mesh)(self._layout, weights, self._places)
    free = iter(unused + [self._sequences.pop(key).place for key in droppable[: max(len(stored) - len(unused), 0)]])
    for some in batched(stored, together):
      rows, places, seen = np.array([(0, self._places, 0)] * (1 if len(some) == 1 else together), np.int32).T.copy()
      for i, (row, request, tokens) in enumerate(some):
        text = np.concatenate([request.prompt, request.given, tokens]).astype(np.int32)
        rows[i], places[i], seen[i] = row, next(free), len(text) - 1
        self._sequences[request.key] = _Sequence(int(places[i]), len(request.prompt), text)
      self._store = store_rows.on(self._mesh)(self._store, state, rows, places, seen)

  def extended_by(self, request: Request) -> bool:
    """Whether a request continues a kept cache, and its tokens begin with those of the cache."""
    known = None if request.continues is None else self._sequences.get(request.continues)
    if known is None or known.prompt != len(request.prompt) or len(known.tokens) > request.start:
      return False
    text = np.concatenate([request.prompt, request.given])
    return np.array_equal(text[: len(known.tokens)], known.tokens)

  def go_on(
    self, graphdef: nnx.GraphDef, weights: SamplerWeights, requests: Sequence[Request], together: int, buckets: Sequence[int]
  ) -> tuple[Prompts, int]:
    """Take the caches that these requests continue out of the store, and read the requests' other tokens.

    `together` is the number of sequences that the program is compiled for, `buckets` the numbers of tokens, ascending.

    Returns the state that rows start from, in the order of the requests, and the number of tokens that were not read again.
    """
    assert self._store is not None, 'no cache is kept'
    known = [self._sequences.pop(request.continues) for request in requests if request.continues is not None]
    held = [len(sequence.tokens) - 1 for sequence in known]
    new = [np.concatenate([r.prompt, r.given])[n:] for r, n in zip(requests, held, strict=True)]
    tokens, counts = padded(new, together, bucket(buckets, max(map(len, new))))
    places = np.pad(np.array([sequence.place for sequence in known], np.int32), (0, together - len(known)))
    return read_behind.on(self._mesh)(graphdef, weights, self._store, places, tokens, counts), sum(held)

  def forget(self, uids: Collection[int] | None = None) -> None:
    """Drop the caches of these sequences, or all."""
    self._sequences = {key: s for key, s in self._sequences.items() if uids is not None and key[0] not in uids}

  def swap(self, weights: SamplerWeights) -> None:
    """Convert the caches to the FP8 scales of other weights, if they have any."""
    if weights.scales is not None and self._store is not None:
      self._store = rescale.on(self._mesh)(self._store, weights) if self._sequences else None

  def unload(self) -> None:
    """Free the memory if no cache is kept."""
    if not self._sequences:
      self._store = None
