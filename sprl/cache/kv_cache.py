"""The sampler's memory: a fixed number of key and value slots for each row, evicted to a budget and held in FP8 if asked.

Dense, sparse and FP8 are the same cache under another CachePlan. A forward pass goes

    cache = cache.expecting(count)             # so many real tokens a row will come
    hidden, cache = forward(..., cache)        # every layer writes them, compresses where due, and attends
    cache = cache.advance()                    # now they are part of it
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.cache.evict import compress
from sprl.cache.key_bias import KeyBias
from sprl.cache.layer import Layer
from sprl.cache.plan import CachePlan
from sprl.cache.scales import Scales
from sprl.kernels.attention import attention, attention_share
from sprl.kernels.decode_attention import decode_attention
from sprl.kernels.rope import rotate, turns
from sprl.parallel.rules import is_names, local, shard
from sprl.quant import fp8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
  """The layers' slots, and how far each row has come.

  Keys are held rotated at their true positions (but see `positions` of the settings). One array a layer: under donation a
  decode step then writes in place, where a stacked array would be copied.
  """

  layers: tuple[Layer, ...]
  length: Int[Array, ' B']  # occupied slots of the layers that evict; the others hold all tokens seen
  seen: Int[Array, ' B']  # tokens taken in, which is the next one's position
  count: Int[Array, ' B']  # decode steps that the trigger counts
  expected: Int[Array, ' B']  # real tokens of the forward pass under way
  saturated: Int[Array, 'B K']  # numbers of the row's keys and values that FP8 had to clamp
  scales: Scales | None  # of FP8 storage
  bias: KeyBias | None  # what keys hold beside their FP8 codes
  chosen: Int[Array, 'B N'] | None  # scope global: the slots that the first evicting layer kept
  plan: CachePlan = dataclasses.field(metadata={'static': True})

  @classmethod
  def empty(cls, plan: CachePlan, rows: int, slots: int | None = None, scales: Scales | None = None, bias=None) -> 'KVCache':
    """A cache with no tokens in it; `slots` of every layer where they are not the plan's."""
    zeros = jnp.zeros(rows, jnp.int32)
    shared = plan.sparse and plan.settings.scope == 'global'
    return cls(
      layers=tuple(Layer.empty(plan, i, rows, slots or plan.slots(i)) for i in range(plan.layers)),
      length=zeros,
      seen=zeros + 0,
      count=zeros + 0,
      expected=zeros + 0,
      saturated=jnp.zeros((rows, plan.kv_heads), jnp.int32),
      scales=scales if plan.fp8 else None,
      bias=bias if plan.key_bias else None,
      chosen=jnp.zeros((rows, plan.settings.budget), jnp.int32) if shared else None,
      plan=plan,
    )

  @staticmethod
  def bytes(plan: CachePlan, rows: int) -> int:
    """All that so many rows take on the devices: keys, values, what eviction keeps beside them, FP8's scales and key biases."""

    def made():
      scales = Scales(*(jnp.ones(plan.layers) for _ in range(3)))
      bias = KeyBias.of(plan, (jnp.zeros(plan.kv_heads * plan.head_dim),) * plan.layers) if plan.key_bias else None
      return KVCache.empty(plan, rows, scales=scales, bias=bias)

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(made)))

  # --- around a forward pass -----------------------------------------------------------------------------------------

  def expecting(self, count: Int[Array, ' B']) -> 'KVCache':
    """The cache before a forward pass in which the first `count` tokens of each row are real, and the others padding."""
    return dataclasses.replace(self, expected=count)

  @property
  def due(self) -> Bool[Array, ' B']:
    """The rows that this decode step compresses."""
    settings = self.plan.settings
    if not self.plan.sparse:
      return jnp.zeros(self.length.shape, bool)
    at_interval = (self.count + 1) % settings.interval == 0
    if settings.trigger_scope == 'batch':  # its counter starts again with every admission: a row may fill up before it rings
      at_interval |= self.length + 1 >= self.plan.slots(settings.dense_layers)
    return (self.expected > 0) & at_interval & (self.length + 1 > settings.budget)

  @property
  def attended(self) -> Int[Array, ' B']:
    """Slots that this decode step's query sees, its own token's included."""
    if self.plan.settings.when == 'before':
      return jnp.where(self.due, self.plan.settings.budget, self.length + 1)
    return self.length + 1

  def advance(self, decoding: bool = False) -> 'KVCache':
    """The cache after the forward pass, with the tokens expected in it. Padding, written beyond them, is no part of it.

    `decoding`: they count as decode steps, of which the last compresses where it is due.
    """
    settings, seen, length = self.plan.settings, self.seen + self.expected, self.length + self.expected
    steps = jnp.max(self.expected) if settings.trigger_scope == 'batch' else self.expected
    count = self.count + steps if decoding else self.count
    cache = self
    if decoding and self.plan.sparse:
      if settings.when == 'after':
        cache = self._compress_all(seen)
      length = jnp.where(self.due, settings.budget, length)
    return dataclasses.replace(cache, seen=seen, length=length, count=count, expected=jnp.zeros_like(seen))

  def fork(self, other: 'KVCache', parent: Int[Array, ' B'], take: Bool[Array, ' B']) -> 'KVCache':
    """This cache with row b replaced by row parent[b] of `other` (with as many slots or fewer) where take[b]."""
    initial = {'position': -1, 'carried': self.plan.initial}

    def rows(path, mine, theirs, parent, take):
      pad = [(0, 0), *((0, m - t) for m, t in zip(mine.shape[1:], theirs.shape[1:]))]
      chosen = jnp.pad(theirs, pad, constant_values=initial.get(path[-1].name, 0))[parent]
      return jnp.where(take.reshape(-1, *[1] * (mine.ndim - 1)), chosen, mine)

    def layers(mine, theirs, parent, take):
      return jax.tree_util.tree_map_with_path(partial(rows, parent=parent, take=take), mine, theirs)

    def row(mine, theirs):
      theirs = shard(theirs, *[None] * theirs.ndim)[parent]
      return jnp.where(take.reshape(-1, *[1] * (mine.ndim - 1)), theirs, mine)

    # A row may start from any prompt: the prompts' keys and values go to all devices that have rows, theirs of the heads to each.
    mine, theirs = (tuple(layer.axes for layer in cache.layers) for cache in (self, other))
    theirs = jax.tree.map(lambda names: (None, *names[1:]), theirs, is_leaf=is_names)
    batch = self.plan.settings.trigger_scope == 'batch'
    return dataclasses.replace(
      self,
      layers=local(layers, (mine, theirs, ('rows',), ('rows',)), mine)(self.layers, other.layers, parent, take),
      length=row(self.length, other.length),
      seen=row(self.seen, other.seen),
      count=jnp.where(jnp.any(take), 0, self.count) if batch else row(self.count, other.count),
      saturated=row(self.saturated, other.saturated),
    )

  def rescaled(self, scales: Scales, bias: KeyBias | None = None) -> 'KVCache':
    """The same keys and values, to FP8's precision, under the scales (and key biases) of other weights."""
    if self.scales is None:
      return self
    layers = []
    for i, held in enumerate(self.layers):
      k, v = fp8.decast(held.keys, self.scales.k[i]), fp8.decast(held.values, self.scales.v[i])
      if self.bias is not None and bias is not None:
        at = held.positions
        k = k + self.bias.at(i, at) - bias.at(i, at)
      k, v = fp8.to_bytes(fp8.cast(k, scales.k[i])), fp8.to_bytes(fp8.cast(v, scales.v[i]))
      layers.append(dataclasses.replace(held, k=k, v=v))
    return dataclasses.replace(self, layers=tuple(layers), scales=scales, bias=bias)

  # --- in a forward pass ---------------------------------------------------------------------------------------------

  def attend(
    self, layer: int, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
  ) -> tuple[Float[Array, 'B T H D'], 'KVCache']:
    """New token t of row b goes to slot n[b] + t and sees the slots up to its own; T > 1 never compresses."""
    alone, heads = self._only(layer), ('rows', None, 'kv_heads', None)
    axes = alone.axes
    out, seen = local(partial(_attend, layer), (axes, heads, heads, heads), (heads, axes))(alone, q, k, v)
    return out, self._with(layer, seen.layers[layer], saturated=seen.saturated, chosen=seen.chosen)

  def _written(self, layer, q, k, v):
    """The cache with the new tokens' keys and values behind the row's, and the slots they went to."""
    T, held, plan = k.shape[1], self.layers[layer], self.plan
    evicts = plan.evicts(layer)
    slot = (self.length if evicts else self.seen)[:, None] + jnp.arange(T)
    positions = self.seen[:, None] + jnp.arange(T)
    real = jnp.arange(T) < self.expected[:, None]
    if plan.settings.positions == 'in_cache':
      k = self._turned(k, -positions)
    saturated = self.saturated
    if self.scales is not None:
      if self.bias is not None:
        k = k.astype(jnp.float32) - self.bias.of_tokens(layer, positions)
      k_scale, v_scale = self.scales.k[layer], self.scales.v[layer]
      for x, scale in ((k, k_scale), (v, v_scale)):
        saturated = saturated + jnp.sum(fp8.saturated(x, scale) & real[..., None, None], axis=(1, 3), dtype=jnp.int32)
      k, v = fp8.to_bytes(fp8.cast(k, k_scale)), fp8.to_bytes(fp8.cast(v, v_scale))
    rows = jnp.arange(k.shape[0])[:, None]

    def write(store, new):
      return store.at[rows, :, slot].set(new.astype(store.dtype), mode='drop')

    new = dataclasses.replace(held, k=write(held.k, k), v=write(held.v, v))
    if held.position is not None:
      new = dataclasses.replace(new, position=write(held.position, jnp.broadcast_to(positions[..., None], k.shape[:3])))
    if held.queries is not None:
      new = dataclasses.replace(new, queries=self._remembered(held.queries, q))
    return self._with(layer, new, saturated=saturated), slot

  def _remembered(self, ring, q):
    """The newest queries: that of position p lies at p % A."""
    newest = (self.seen + self.expected - 1)[:, None]
    place = newest - (newest - jnp.arange(ring.shape[2])) % ring.shape[2] - self.seen[:, None]  # of the new ones; below 0: old
    new = jnp.take_along_axis(jnp.swapaxes(q, 1, 2), jnp.maximum(place, 0)[:, None, :, None], axis=2)
    return jnp.where((place >= 0)[:, None, :, None], new.astype(ring.dtype), ring)

  def _prefill(self, layer, q, slot):
    held, plan = self.layers[layer], self.plan
    k, v = jnp.swapaxes(held.keys, 1, 2), jnp.swapaxes(held.values, 1, 2)
    if self.scales is not None:
      k, v = (fp8.decast(x, scale[layer]) for x, scale in ((k, self.scales.k), (v, self.scales.v)))
      if self.bias is not None:
        k = k + self.bias.of_tokens(layer, jnp.arange(k.shape[1])[None])
      k, v = k.astype(q.dtype), v.astype(q.dtype)
    if plan.settings.positions == 'in_cache':
      k = self._turned(k, jnp.arange(k.shape[1])[None])
      q = self._turned(q, slot - self.seen[:, None] - jnp.arange(q.shape[1]))
    allowed = (jnp.arange(k.shape[1]) <= slot[:, :, None])[:, None]
    if held.carried is not None and plan.accumulates:
      real = jnp.arange(q.shape[1]) < self.expected[:, None]
      held = dataclasses.replace(held, carried=held.carried + attention_share(q, k, allowed, real))
    return attention(q, k, v, allowed, kernels=plan.kernels), self._with(layer, held)

  def _decode(self, layer, q):
    held, plan = self.layers[layer], self.plan
    evicts = plan.evicts(layer)
    length = self.attended if evicts else self.seen + 1
    k, scales, bias = held.keys, None, None
    if self.scales is not None:
      scales = self.scales.k[layer], self.scales.v[layer]
    if self.bias is not None:
      bias = self._bias_scores(layer, q)
    if plan.settings.positions == 'in_cache':
      slots = jnp.arange(k.shape[2])[None]
      meant = k if scales is None else fp8.decast(k, scales[0])
      k = jnp.swapaxes(self._turned(jnp.swapaxes(meant, 1, 2).astype(q.dtype), slots), 1, 2)
      q = self._turned(q[:, None], (length - 1 - self.seen)[:, None])[:, 0]
      scales = None if scales is None else (jnp.ones(()), scales[1])
    accumulates = held.carried is not None and plan.accumulates
    found = decode_attention(q, k, held.values, length, scales, bias, accumulates, plan.kernels)
    if held.carried is not None and found.share is not None:
      held = dataclasses.replace(held, carried=held.carried + jnp.where((self.expected > 0)[:, None, None], found.share, 0))
    return found.out[:, None], self._with(layer, held)

  def _bias_scores(self, layer, q):
    """q . R_p b for every slot, b the layer's key bias and p the slot's position."""
    assert self.bias is not None
    held = self.layers[layer]
    q = q.reshape(q.shape[0], held.k.shape[1], -1, q.shape[-1])
    return self.bias.scores(layer, q, held.position)[..., : held.k.shape[2]]  # of a layer that evicts nothing slots are positions

  def _turned(self, x, positions):
    """Heads [B, T, N, D] turned on by `positions`, without YaRN's scale, which they hold already."""
    rope = dataclasses.replace(self.plan.rope, attention_factor=1.0)
    return rotate(x, turns(jnp.broadcast_to(positions, x.shape[:2]), self.plan.head_dim, rope))

  def _compress(self, layer, due, now, gone):
    """The cache with this layer of the rows that are due compressed."""
    first = layer == self.plan.settings.dense_layers
    held, chosen = compress(
      self.plan,
      self.layers[layer],
      due,
      self.length + 1,
      now,
      gone,
      None if self.scales is None else self.scales.k[layer],
      None if self.bias is None else partial(self.bias.at, layer),
      self.chosen,
      choose=first or self.chosen is None,
    )
    return self._with(layer, held, chosen=chosen)

  def _compress_all(self, gone):
    def compressed(alone, gone):
      return alone._compress(layer, alone.due, alone.seen, gone)

    cache = self
    for layer in range(self.plan.settings.dense_layers, self.plan.layers):
      alone = cache._only(layer)
      seen = local(compressed, (alone.axes, ('rows',)), alone.axes)(alone, gone)
      cache = cache._with(layer, seen.layers[layer], chosen=seen.chosen)
    return cache

  # --- on a mesh -----------------------------------------------------------------------------------------------------

  @property
  def axes(self) -> 'KVCache':
    """The names of its arrays' axes: rows and kv heads are split, and what is known of each lies with it."""
    row: Any = ('rows',)
    others: dict[str, Any] = {
      'saturated': ('rows', 'kv_heads'),
      'scales': None if self.scales is None else jax.tree.map(lambda x: (None,), self.scales),
    }
    return dataclasses.replace(
      self,
      layers=tuple(None if layer is None else layer.axes for layer in self.layers),
      **dict.fromkeys(('length', 'seen', 'count', 'expected'), row),
      **others,
      bias=None if self.bias is None else self.bias.axes,
      chosen=None if self.chosen is None else ('rows', None),
    )

  def _only(self, layer: int) -> 'KVCache':
    """The cache with one of its layers alone."""
    layers = tuple(x if i == layer else None for i, x in enumerate(self.layers))
    return dataclasses.replace(self, layers=layers, bias=None if self.bias is None else self.bias.only(layer))

  def _with(self, layer: int, held: Layer, **changes: Any) -> 'KVCache':
    return dataclasses.replace(self, layers=(*self.layers[:layer], held, *self.layers[layer + 1 :]), **changes)


def _attend(layer: int, cache: KVCache, q, k, v):
  """`KVCache.attend` of rows and kv heads that need no others."""
  plan = cache.plan
  if plan.fp8_queries and cache.scales is not None:
    q = fp8.fake(q, cache.scales.q[layer])
  written, slot = cache._written(layer, q, k, v)
  if q.shape[1] > 1:
    return written._prefill(layer, q, slot)
  if plan.evicts(layer) and plan.settings.when == 'before':
    written = written._compress(layer, cache.due, cache.seen, cache.seen)
  return written._decode(layer, q[:, 0])
