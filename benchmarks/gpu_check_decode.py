"""The parts `decode` and `decode_whole` of gpu_check.py: the time of decode steps, and the time that reading their bytes takes.

Weights are random. The difference between a model of 4 and one of 8 layers is the time of 4 layers, from which the time of all
layers follows. These two compile several times faster than the whole model, which the part `decode_whole` times.

Caches hold random keys and values, and rows have the lengths that they have in an engine. The engine starts sequences only
between two chunks of steps, so a row is due for compression only in the last step of a chunk. `plain us` is the time of a step in
chunks in which no row is due. `us` is the mean over an interval, in which every row is compressed once.
"""

import dataclasses
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from gpu_check_bench import BF16, GENERATED, Bench, Case, Row, Rows, config_of, judged

from sprl.cache.kv_cache import KVCache
from sprl.cache.layer import LayerCache
from sprl.cache.layout import CacheLayout, cache_layout
from sprl.cache.scales import Scales
from sprl.config import DENSE, UNQUANTISED, Cache, Quant, Sampling
from sprl.kernels.platform import on_gpu
from sprl.models import transformer
from sprl.quant import fp8
from sprl.sampler import decode
from sprl.sampler.weights import SamplerWeights, sampler_weights

LAYERS = (4, 8)
SCALE = 0.05  # of the FP8 cache: e4m3 holds up to 448, so numbers up to 22 are not clamped


class Mode(NamedTuple):
  """How a model decodes."""

  cache: Cache
  quant: Quant


def modes(bench: Bench) -> dict[str, Mode]:
  """Return the modes by name, the most important ones first."""
  sparse = bench.sizes(Cache(budget=512, interval=128, method='rkv'), Cache(budget=24, interval=8, window=4, method='rkv'))
  both = Quant(sampler='w8a8_kv8', arithmetic='blockwise')
  return {
    'bf16': Mode(DENSE, UNQUANTISED),
    'sparse w8a8_kv8': Mode(sparse, both),
    'sparse': Mode(sparse, UNQUANTISED),
    'w8a8_kv8': Mode(DENSE, both),
    'kv8': Mode(DENSE, Quant(sampler='kv8')),
  }


def check_decode(bench: Bench) -> Iterator[Case]:
  """Time decode steps with 4 and with 8 layers. A quarter of the difference is the time of a layer."""
  tokens = bench.sizes(4096, 64)
  for name in bench.sizes(('Qwen2.5-7B', 'Qwen2.5-1.5B'), ('toy',)):
    for mode in bench.sizes(tuple(modes(bench))[:4], tuple(modes(bench))[:2]):
      for layers in bench.sizes(LAYERS, (1, 2)):
        yield Case('decode', layers_case(name, mode, tokens, layers), partial(few_layers, bench, name, mode, tokens, layers))


def layers_case(name: str, mode: str, tokens: int, layers: int) -> str:
  """Return the name of a case of `check_decode`."""
  return f'{name} {mode} S {tokens} L {layers}'


def few_layers(bench: Bench, name: str, mode: str, tokens: int, layers: int, before: Rows) -> Row:
  """Time a model with few layers. The result of the deeper one adds the time of a layer, and that of all layers."""
  less = bench.sizes(LAYERS, (1, 2))[0]
  row = steps_of(bench, name, mode, tokens, layers)
  shorter = before.get(('decode', layers_case(name, mode, tokens, less)), {})
  if layers == less or 'us' not in shorter or shorter['B'] != row['B']:
    return row
  slope = {column: (row[column] - shorter[column]) / (layers - less) for column in ('us', 'plain us', 'GB')}
  more = config_of(name).num_layers - layers
  row |= {
    'us a layer': slope['us'], 'plain us a layer': slope['plain us'], 'us all layers': row['us'] + more * slope['us'],
    'share of bytes': slope['GB'] / bench.ceilings.copy * 1e15 / slope['plain us'],
  }  # fmt: skip
  return beside_dense(row, before.get(('decode', layers_case(name, 'bf16', tokens, layers))), 'us all layers', goals(name, mode))


def goals(name: str, mode: str) -> dict[str, float]:
  """Return the targets of a result with 256 sequences of 4,096 tokens."""
  if mode == 'bf16':
    return {'share of bytes': 0.85}
  return {'times dense bf16': 3.0 if name == 'Qwen2.5-7B' else 2.5} if mode == 'sparse w8a8_kv8' else {}


def beside_dense(row: Row, dense: Row | None, time: str, asked: dict[str, float]) -> Row:
  """Return a decode row with its tokens per second over those of dense bfloat16, and the verdicts on the targets `asked`.

  `time` is the column with the time of a step. A ratio between different batch sizes is reported without a verdict.
  """
  if dense is not None and time in dense:
    row = row | {'times dense bf16': dense[time] / row[time] * row['B'] / dense['B']}
    if dense['B'] != row['B']:
      row |= {'note': f'dense bf16 has B {dense["B"]}'}
      asked = {column: least for column, least in asked.items() if column != 'times dense bf16'}
  return judged(row, asked) if asked else row


def check_decode_whole(bench: Bench) -> Iterator[Case]:
  """Time decode steps of whole models, first those with targets; then other modes, and 16,384 tokens."""
  short, long = bench.sizes((4096, 16384), (64, 96))
  models = bench.sizes(('Qwen2.5-7B', 'Qwen2.5-1.5B'), ('toy',))
  first = [(name, short, mode) for name in models for mode in ('bf16', 'sparse w8a8_kv8')]
  later = [(name, tokens, mode) for tokens in (short, long) for name in models for mode in modes(bench)]
  for name, tokens, mode in dict.fromkeys([*first, *later]):
    yield Case('decode step', f'{name} {mode} S {tokens}', partial(whole, bench, name, mode, tokens, tokens == short))
  if 'generate' in bench.torch:
    name, rows, prompt, new = GENERATED
    rate = {'tokens/s': bench.torch['generate']}
    yield Case("transformers' generate", f'{name} B {rows} after {prompt}, {new} new', lambda before: rate)


def whole(bench: Bench, name: str, mode: str, tokens: int, has_target: bool, before: Rows) -> Row:
  """Time a whole model."""
  row = steps_of(bench, name, mode, tokens, config_of(name).num_layers)
  row |= {'tokens/s': 1e6 * row['B'] / row['us'], 'share of bytes': row['GB'] / bench.ceilings.copy * 1e15 / row['plain us']}
  asked = goals(name, mode) if has_target and row['B'] == bench.sizes(256, 2) else {}
  return beside_dense(row, before.get(('decode step', f'{name} bf16 S {tokens}')), 'us', asked)


# --- one measurement -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # the cases of one model follow each other
def random_params(name: str, layers: int) -> Any:
  """Return random bfloat16 weights."""
  return jax.jit(partial(transformer.init_params, config_of(name, layers), dtype=BF16))(jax.random.key(0))


def engine_weights(params: Any, quant: Quant, layout: CacheLayout) -> SamplerWeights:
  """Return copies of the weights in the form that the engine multiplies: joined linears, in FP8 if `quant` says so."""
  weights = sampler_weights(params, BF16, quant)
  scales = Scales(*(jnp.full(len(params['layers']), SCALE) for _ in range(3)))
  return weights._replace(scales=scales) if layout.fp8 else weights


def steps_of(bench: Bench, name: str, mode: str, tokens: int, layers: int) -> Row:
  """Time decode steps of a model; return microseconds, and the bytes that a step must read."""
  config, params, (cache, quant) = config_of(name, layers), random_params(name, layers), modes(bench)[mode]
  chunk, prompt = bench.sizes(Sampling().chunk, 2), bench.sizes(512, 24)
  sparse = cache.budget is not None
  chunks = cache.interval // chunk if sparse else bench.sizes(4, 1)
  plain = min(chunks - 2, 4) if sparse else 0  # chunks without a row that is due
  layout = cache_layout(config, cache, quant, prompt, tokens - prompt, BF16)
  weights = engine_weights(params, quant, layout)
  rows, usable = bench.sizes(256, 2), 0.85 * memory()
  while rows > 1 and 1.1 * layout.kv_bytes(rows) > usable - held(params, weights):
    rows //= 2
  most = chunk * (chunks + plain + 2) + 1
  sampling = Sampling(max_tokens=most, max_prompt=prompt, chunk=chunk)
  state = decode.empty_state(layout, weights, rows, most, jax.random.key(0))
  state = dataclasses.replace(
    state,
    cache=dataclasses.replace(state.cache, layers=tuple(map(filled, state.cache.layers, range(layers)))),
    done=jnp.zeros(rows, bool),
    limit=jnp.full(rows, 10 * most, jnp.int32),
    count=jnp.ones(rows, jnp.int32),
  )
  graph = transformer.graph(config)
  due = partial(decode.due_at_once, cache_layout(config_of(name), cache, quant, prompt, tokens - prompt, BF16))

  def timed(state, chunks, since):
    """Run one chunk, then time `chunks` of them. Return the state and the microseconds of a step."""
    cache_now = at_lengths(state.cache, seen=tokens - most - 1, since=since)
    state = dataclasses.replace(state, cache=cache_now)
    state = jax.block_until_ready(decode.decode(graph, weights, state, sampling, (), chunk, on_gpu()))
    start = time.perf_counter()
    for _ in range(chunks):
      state = decode.decode(graph, weights, state, sampling, (), chunk, on_gpu())
    jax.block_until_ready(state)
    return state, 1e6 * (time.perf_counter() - start) / (chunks * chunk)

  at_once = jnp.zeros(rows, jnp.int32)
  plain_us = None
  # As many rows compress together as in the whole model, which has more memory for it.
  with mock.patch.object(decode, 'due_at_once', lambda _, rows, period: due(rows, period)):
    if plain:
      state, plain_us = timed(state, plain, at_once)
    first = int(state.count[0]) + chunk
    state, us = timed(state, chunks, staggered(rows, cache.interval, chunk) if sparse else at_once)
  attended = float(jnp.mean(state.attended[:, first : first + chunks * chunk]))
  read = layout.kv_bytes(rows) / layout.slots * attended
  read += sum(w.nbytes for w in (*jax.tree.leaves(weights.params['layers']), weights.head))
  return {
    'B': rows, 'us': us, 'plain us': plain_us or us, 'GB': read / 1e9,
    'most rows (estimated)': int(rows * (usable - held(weights)) / (1.1 * layout.kv_bytes(rows))),  # without the learner
  }  # fmt: skip


def staggered(rows: int, interval: int, chunk: int) -> jax.Array:
  """Return the steps of each row since its last compression: multiples of `chunk`, each for equally many rows."""
  return (jnp.arange(rows) % (interval // chunk) * chunk).astype(jnp.int32)


def at_lengths(cache: KVCache, seen: int, since: jax.Array) -> KVCache:
  """Return the cache with all rows after `seen` tokens; if it evicts, row b is `since[b]` steps after its last compression."""
  tokens = jnp.full(since.shape, seen, jnp.int32)
  length = cache.layout.budget + since if cache.layout.sparse else tokens + 0  # + 0 makes a separate buffer: all are donated
  return dataclasses.replace(cache, seen=tokens, length=length, decoded=since + 0)


@partial(jax.jit, donate_argnums=0)
def filled(layer: LayerCache, number: int | jax.Array) -> LayerCache:
  """Return a layer with random content: normal numbers, or their e4m3 codes; positions ascend over the slots.

  A GPU may compress zeros in its memory and multiply them faster. They would also make all softmax weights equal.
  """

  def fill(i, x):
    if x.dtype == jnp.int32:
      return jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
    normal = jax.random.normal(jax.random.fold_in(jax.random.key(number), i), x.shape, BF16)
    return fp8.to_bytes(fp8.cast(normal, jnp.float32(SCALE))) if x.dtype == jnp.uint8 else normal.astype(x.dtype)

  leaves, tree = jax.tree.flatten(layer)
  return jax.tree.unflatten(tree, [fill(i, x) for i, x in enumerate(leaves)])


def held(*trees: Any) -> int:
  """Return the bytes of the arrays in device memory; a shared buffer counts once."""
  return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree.leaves(trees)}.values())


def memory() -> int:
  """Return the bytes of the device's memory."""
  return (jax.devices()[0].memory_stats() or {}).get('bytes_limit', 64 * 2**30)
