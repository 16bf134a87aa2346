"""Checks of gpu_check.py that time whole programs with random weights: decode steps and updates."""

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_check_bench import BF16, GENERATED, TOY, Bench, Row, config_of, failed, judged
from kernel_resources import MODELS

from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import DENSE, UNQUANTISED, Cache, Correction, Loss, Optimizer, Quant, Sampling
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.sampler import decode
from sprl.sampler.weights import SamplerWeights, sampler_weights
from sprl.types import LogProbs, Trajectory


def check_decode_step(bench: Bench) -> Iterator[Row]:
  """Time decode steps at each context length, eviction included, against their bytes and products."""
  sparse = bench.sizes(Cache(budget=512, interval=128, method='rkv'), Cache(budget=24, interval=8, window=4, method='rkv'))
  kv8, both = Quant(sampler='kv8'), Quant(sampler='w8a8_kv8', arithmetic='blockwise')
  modes = {
    'bf16': (DENSE, UNQUANTISED),
    'sparse w8a8_kv8': (sparse, both),
    'w8a8_kv8': (DENSE, both),
    'sparse': (sparse, UNQUANTISED),
    'kv8': (DENSE, kv8),
  }
  short, long = bench.sizes((4096, 16384), (64, 96))
  models = bench.sizes(('Qwen2.5-7B', 'Qwen2.5-1.5B'), ('toy',))
  first = [(name, short, ('bf16', 'sparse w8a8_kv8')) for name in models]  # rows with targets come first
  later = [(name, tokens, tuple(modes)) for tokens in (short, long) for name in models]
  dense: dict[tuple[str, int], Row] = {}
  done = set()
  for name, tokens, wanted in (*first, *later):
    config, params = config_of(name), None
    for mode in wanted:
      if (name, tokens, mode) in done:
        continue
      done.add((name, tokens, mode))
      cache, quant = modes[mode]
      if params is None:
        params = jax.jit(partial(transformer.init_params, config, dtype=BF16))(jax.random.key(0))
      try:
        row = decode_step(bench, config, params, cache, quant, tokens)
      except Exception as error:
        yield failed('decode step', f'{name} {mode} S {tokens}', error)
        continue
      dense |= {(name, tokens): row} if mode == 'bf16' else {}
      asked = {}
      if tokens == short and row['rows'] == bench.sizes(256, 2):
        asked = {'share of bytes': 0.7} | ({'times dense bf16': 3.0} if mode == 'sparse w8a8_kv8' else {})
      row = beside_dense(row, dense.get((name, tokens)), asked)
      yield {'check': 'decode step', 'case': f'{name} {mode} S {tokens} B {row.pop("rows")}', **row}
  if 'generate' in bench.torch:
    name, rows, prompt, new = GENERATED
    case = f'{name} B {rows} after {prompt}, {new} new'
    yield {'check': "transformers' generate", 'case': case, 'tokens/s': bench.torch['generate']}


def beside_dense(row: Row, dense: Row | None, asked: dict[str, float]) -> Row:
  """Return a decode row with its gain over dense bfloat16, judged. A gain at another batch size is reported, not judged."""
  if dense is not None:
    row = row | {'times dense bf16': row['tokens/s'] / dense['tokens/s']}
    if dense['rows'] != row['rows']:
      row |= {'note': f'dense bf16 has B {dense["rows"]}'}
      asked = {column: least for column, least in asked.items() if column != 'times dense bf16'}
  return judged(row, asked) if asked else row


def decode_step(bench: Bench, config: ModelConfig, params: Any, cache: Cache, quant: Quant, tokens: int) -> Row:
  """Time decode steps of one model, cache and quantisation; return the row."""
  steps = cache.interval if cache.budget else bench.sizes(32, 4)
  prompt = bench.sizes(512, 24)
  layout = cache_layout(config, cache, quant, prompt, tokens - prompt, BF16)
  weights = (
    sampler_weights(params, BF16, quant) if 'w8a8' in quant.sampler else SamplerWeights(params)
  )  # jit would copy unquantised weights
  if layout.fp8:
    weights = weights._replace(scales=Scales(*(jnp.full(config.num_layers, 0.05) for _ in range(3))))
  ours = [*jax.tree.leaves(weights.params['layers']), weights.head]
  weight_bytes = sum(w.size * w.dtype.itemsize for w in ours)
  rows = bench.sizes(256, 2)
  usable = 0.85 * memory()
  while rows > 1 and 1.1 * layout.bytes(rows) > usable - held(params, weights):
    rows //= 2
  sampling = Sampling(max_tokens=3 * steps + 1, max_prompt=prompt)
  state = decode.empty_state(layout, weights, rows, 3 * steps + 1, jax.random.key(0))
  seen = jnp.full(rows, tokens - 3 * steps - 2)
  since = jnp.arange(rows) % cache.interval  # steps since the last compression; at every step some rows are due
  cache_now = dataclasses.replace(
    state.cache,
    seen=seen,
    length=cache.budget + since if cache.budget else seen + 0,  # + 0 makes a separate buffer, because the state is donated
    decoded=since,
  )
  state = dataclasses.replace(
    state, cache=cache_now, done=jnp.zeros(rows, bool), limit=jnp.full(rows, 10 * steps), count=jnp.ones(rows, jnp.int32)
  )
  run = partial(decode.decode, transformer.graph(config), sampling=sampling, stop_ids=(), steps=steps)
  state = jax.block_until_ready(run(weights, state))
  start = time.perf_counter()
  state = jax.block_until_ready(run(weights, state))
  step = (time.perf_counter() - start) / steps
  attended = float(jnp.mean(state.kept[:, steps : 2 * steps]))
  keys = layout.bytes(rows) / layout.slots * attended
  layers = sum(w.size for w in ours)
  rate = (bench.ceilings.fp8 or 2 * bench.ceilings.bf16) if 'w8a8' in quant.sampler else bench.ceilings.bf16
  least = max(weight_bytes / bench.ceilings.copy, 2 * rows * layers / rate) + keys / bench.ceilings.copy
  bandwidth = (weight_bytes + keys) / bench.ceilings.copy
  return {
    'rows': rows, 'us': 1e6 * step, 'tokens/s': rows / step, 'share of ceiling': least / step, 'share of bytes': bandwidth / step,
    'most rows (estimated)': int(rows * (usable - held(weights)) / (1.1 * layout.bytes(rows))),  # without the learner
  }  # fmt: skip


def held(*trees: Any) -> int:
  """Return the bytes of the arrays in device memory; a shared buffer counts once."""
  return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree.leaves(trees)}.values())


def memory() -> int:
  """Return the bytes of the device's memory."""
  return (jax.devices()[0].memory_stats() or {}).get('bytes_limit', 64 * 2**30)


def check_update(bench: Bench) -> Iterator[Row]:
  """Time whole updates: model FLOP per second, without recomputation, over the matrix rate."""
  name = bench.sizes('Qwen2.5-1.5B', 'toy')
  config = config_of(name)
  T, sequences = bench.sizes((4096, 4), (64, 2))
  rng = np.random.default_rng(0)
  trajectories = [trajectory(rng, i, T // 8, T - T // 8, config.vocab_size) for i in range(sequences)]
  batch, _ = pack(trajectories, rng.normal(size=sequences), Shape(sequences, 1, T, sequences, T - T // 8), share_prefix=False)
  params = jax.jit(partial(transformer.init_params, config))(jax.random.key(0))
  optimizer = make_optimizer(Optimizer(), 10)
  state = TrainState.create(params, optimizer)
  computation = UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, BF16, bench.sizes(1024, 16)), 'layer')
  update = make_update(transformer.graph(config), optimizer, computation)
  batch = jax.device_put(batch)
  del params
  times = []
  for _ in range(3):
    start = time.perf_counter()
    state, metrics = update(state, batch, LogProbs(sampler=batch.sampler_logp))
    jax.block_until_ready((state, metrics))
    times.append(time.perf_counter() - start)
  H, K, D, E, F = MODELS.get(name, TOY)
  matrices = config.num_layers * (E * D * (2 * H + 2 * K) + 3 * E * F) + config.vocab_size * E
  flops = sequences * (6 * matrices * T + 6 * config.num_layers * H * D * T * T)  # causal attention: half of 12 H D T^2
  row = {
    'check': 'update', 'case': f'{name} {sequences} x {T} tokens', 'us': 1e6 * times[-1], 'TFLOP/s': flops / times[-1] / 1e12,
    'tokens/s': sequences * T / times[-1], 'share of ceiling': flops / times[-1] / bench.ceilings.bf16,
  }  # fmt: skip
  yield judged(row, {'share of ceiling': 0.4})


def trajectory(rng: np.random.Generator, uid: int, prompt: int, new: int, vocabulary: int) -> Trajectory:
  """Return a trajectory of random tokens."""
  mask = np.arange(prompt + new) >= prompt
  return Trajectory(
    uid=uid,
    group=uid,
    tokens=rng.integers(0, vocabulary, prompt + new).astype(np.int32),
    mask=mask,
    sampler_logp=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
    version=np.where(mask, 0, -1).astype(np.int32),
    kept=np.where(mask, np.arange(prompt + new), 0).astype(np.int32),
    prompt_length=prompt,
    finish='length',
    reward=float(uid % 2),
  )
