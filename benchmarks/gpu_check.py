"""Are the kernels right on this GPU, and how near to its limits? One command, under 8 minutes on an H100 or H200.

    python benchmarks/gpu_check.py --save                 # results/gpu_check_NVIDIA_H200.json, say
    python benchmarks/gpu_check.py --only attention,decode_step
    python benchmarks/gpu_check.py --rehearse             # toy sizes in the GPU interpreter, on any machine

1. ceilings: what the device copies and multiplies at best, measured
2. parity: every kernel against its reference, on random numbers
3. time of each kernel at real models' shapes, as a share of those ceilings, beside XLA's, cuDNN's and cuBLAS's
4. a decode step of Qwen2.5-1.5B and 7B with random weights, against the time that its bytes and products need
5. an update of Qwen2.5-1.5B on packed rows of 4,096 tokens: model FLOP per second, over the matrix rate

A check that fails is a line of the table, by name; the others go on. None begins after LIMIT seconds.
"""

import argparse
import dataclasses
import re
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import report
from device_timing import Ceilings, ceilings, seconds
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_resources import EXPERTS, MODELS, Model

from sprl.cache.scales import Scales
from sprl.kernels import block_matmul, decode_attention, eviction, hopper_block_matmul, hopper_decode_attention, hopper_eviction
from sprl.kernels.cost import Cost
from sprl.learner.packing import Shape, pack
from sprl.learner.state import TrainState, make_optimizer
from sprl.learner.update import Computation, make_update
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.moe import blocks
from sprl.quant.block import quantise, quantise_groups
from sprl.sampler import decode
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.served import serve
from sprl.settings import DENSE, UNQUANTISED, Cache, Correction, Loss, Optimizer, Quant, Sampling
from sprl.trajectory import Trajectory

LIMIT = 420
BF16, FP8 = jnp.dtype('bfloat16'), jnp.dtype('float8_e4m3fn')
KERNELS = (
  (hopper_decode_attention, 'decode_attention'),
  (hopper_block_matmul, 'block_matmul'),
  (hopper_block_matmul, 'grouped_matmul'),
  (hopper_eviction, 'compact'),
  (hopper_eviction, 'similarity'),
)
TOY = Model(4, 2, 128, 256, 384)
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Bench:
  """What checks are run with."""

  rehearse: bool
  ceilings: Ceilings

  def sizes(self, real: Any, toy: Any) -> Any:
    """The sizes to take."""
    return toy if self.rehearse else real

  def timed(self, name: str, case: str, kernel: Callable, make: Callable, least: Cost, peers=None, moving=0, fp8=False) -> Row:
    """The kernel's line: its time, beside the time that its bytes and operations need at the least, and beside its peers'."""
    rate = (self.ceilings.fp8 or 2 * self.ceilings.bf16) if fp8 else self.ceilings.bf16
    least_seconds = max(least.bytes / self.ceilings.copy, least.flops / rate)
    time_of = partial(seconds, make=make, moving=moving, **({'runs': 1, 'launches': 1, 'inputs': 2} if self.rehearse else {}))
    ours = time_of(kernel)
    row = {'check': name, 'case': case, 'us': 1e6 * ours, 'share of ceiling': least_seconds / ours}
    row |= {'GB/s': least.bytes / ours / 1e9, 'TFLOP/s': least.flops / ours / 1e12}
    for peer, call in (peers or {}).items():
      try:
        row[f'{peer} us'] = 1e6 * time_of(call)
      except Exception as error:  # a library that cannot: said, and no reason to stop
        row['note'] = f'{row.get("note", "")} {peer}: {type(error).__name__}'.strip()
    others = [row[f'{peer} us'] for peer in peers or {} if f'{peer} us' in row]
    return row | ({'times best peer': min(others) / row['us']} if others else {})


# --- parity ------------------------------------------------------------------------------------------------------------


def off(found: Any, expected: Any) -> float:
  """The relative error of an array, by norms."""
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def parity(name: str, case: str, error: float, bound: float) -> Row:
  """The line of a comparison."""
  return {'check': name, 'case': case, 'error': error, 'status': 'ok' if error <= bound else f'WRONG: beyond {bound:g}'}


def attention_inputs(model: Model, B: int, S: int, dtype: Any, key: jax.Array, length: Any = None) -> tuple[Any, ...]:
  """Random arguments of decode attention."""
  H, K, D, _, _ = model
  q, k, v = jax.random.split(key, 3)
  scale = jnp.float32(1)
  cache = [jax.random.normal(each, (B, K, S, D), BF16).astype(dtype) for each in (k, v)]
  full = jnp.full(B, S, jnp.int32) if length is None else jnp.asarray(length, jnp.int32)
  return jax.random.normal(q, (B, H, D), BF16), *cache, full, (scale, scale)


def linear_inputs(M: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Random arguments of a block-scaled product."""
  x, w = jax.random.split(key)
  weights = quantise(jax.random.normal(w, (N, K), BF16), 'float32')
  return *quantise_groups(jax.random.normal(x, (M, K), BF16), 'float32'), weights.codes, weights.scale


def expert_inputs(X: int, chosen: int, tokens: int, N: int, K: int, key: jax.Array) -> tuple[Any, ...]:
  """Random arguments of the experts' product: each token goes through so many of X."""
  route, x, w = jax.random.split(key, 3)
  laid = blocks(jax.lax.top_k(jax.random.uniform(route, (tokens, X)), chosen)[1], X)
  rows = jnp.take(jax.random.normal(x, (tokens, K), BF16), laid.assignment // chosen, axis=0, mode='fill', fill_value=0)
  weights = quantise(jax.random.normal(w, (X, N, K), BF16), 'float32')
  return *quantise_groups(rows, 'float32'), weights.codes, weights.scale, laid.expert, laid.used


def compaction_inputs(model: Model, B: int, S: int, N: int, dtype: Any, key: jax.Array) -> tuple[Any, ...]:
  """Random arguments of compaction: ascending slots."""
  k, v, order = jax.random.split(key, 3)
  _, K, D, _, _ = model
  cache = [jax.random.normal(each, (B, K, S, D), BF16) for each in (k, v)]
  if dtype == FP8:
    cache = [jax.lax.bitcast_convert_type(x.astype(FP8), jnp.uint8) for x in cache]
  keep = jnp.sort(jnp.argsort(jax.random.uniform(order, (B, K, S)))[..., :N], axis=-1).astype(jnp.int32)
  return *cache, jnp.arange(B), keep


def check_parity(bench: Bench) -> Iterator[Row]:
  """Every kernel against its reference."""
  key = jax.random.key(7)
  for model, S in bench.sizes([(MODELS['Qwen2.5-0.5B'], 640), (MODELS['Qwen2.5-7B'], 1000)], [(TOY, 72)]):
    lengths = [0, 1, 63, 64, 65, S // 2, S - 1, S]
    for dtype in (BF16, FP8):
      q, k, v, length, scales = attention_inputs(model, len(lengths), S, dtype, key, lengths)
      found = decode_attention.decode_attention(q, k, v, length, scales, kernels='mosaic_gpu')
      q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
      with jax.default_matmul_precision('highest'):
        expected = decode_attention.reference(q32, k32, v32, length, scales)
      error = max(off(a, b) for a, b in ((found.out, expected.out), (found.share, expected.share)))
      yield parity('parity attention', f'D {model.width} G {model.queries // model.kv} S {S} {dtype}', error, 0.01)
  for M, N, K in bench.sizes(
    [(1, 256, 896), (16, 1536, 1536), (64, 3584, 18944), (300, 3584, 3584), (4096, 4864, 896)], [(9, 72, 400)]
  ):
    x, x_scale, w, w_scale = jax.jit(partial(linear_inputs, M, N, K))(key)
    found = block_matmul.block_matmul(x, x_scale, w, w_scale, 128, 128, BF16, 'mosaic_gpu')
    expected = block_matmul.reference(x, x_scale, w, w_scale, 128, 128, jnp.float32)
    yield parity('parity block_matmul', f'{M}x{N}x{K}', off(found, expected), 0.005)
  for X, chosen, tokens, N, K in bench.sizes([(128, 8, 64, 768, 2048), (128, 8, 4096, 2048, 768)], [(4, 2, 9, 72, 400)]):
    x, x_scale, w, w_scale, expert, used = jax.jit(partial(expert_inputs, X, chosen, tokens, N, K))(key)
    found = block_matmul.grouped_matmul(x, x_scale, w, w_scale, expert, used, 128, 128, BF16, 'mosaic_gpu')
    expected = block_matmul.grouped_reference(x, x_scale, w, w_scale, expert, used, 128, 128, jnp.float32)
    error = off(*(jnp.where((jnp.arange(len(x)) < used)[:, None, None], y, 0) for y in (found, expected)))
    yield parity('parity grouped_matmul', f'{tokens}x{chosen} of {X} {N}x{K}', error, 0.005)
  model = bench.sizes(MODELS['Qwen2.5-7B'], TOY)
  B, S, N = bench.sizes((16, 640, 512), (2, 40, 24))
  for dtype in (BF16, FP8):
    k, v, rows, keep = jax.jit(partial(compaction_inputs, model, B, S, N, dtype))(key)
    expected = eviction.compact_reference(k, v, rows, keep)
    found = jax.jit(partial(eviction.compact, ordered=True, kernels='mosaic_gpu'))(k, v, rows, keep)
    wrong = sum(int(jnp.sum(a[:, :, :N] != b[:, :, :N])) for a, b in zip(found, expected))
    yield parity('parity compact', f'S {S} N {N} {dtype}', wrong, 0)
  n = jnp.arange(B) * S // max(B - 1, 1)
  keys = jax.random.normal(key, (B, model.kv, S, model.width), BF16) + 1  # cosines about a half
  with jax.default_matmul_precision('highest'):
    expected = jax.vmap(partial(eviction.similarity_reference, threshold=0.5, nearest_of_none=0))(keys, n)
  found = jax.vmap(partial(eviction.similarity, threshold=0.5, nearest_of_none=0, kernels='mosaic_gpu'))(keys, n)
  occupied = (jnp.arange(S) < n[:, None])[:, None]
  # A cosine next to the threshold may fall on its other side: one of some hundreds in a sum.
  yield parity('parity similarity', f'S {S}', off(jnp.where(occupied, found, 0), jnp.where(occupied, expected, 0)), 1e-3)


# --- the kernels' time -------------------------------------------------------------------------------------------------


def check_attention(bench: Bench) -> Iterator[Row]:
  """Decode attention beside XLA's and cuDNN's, which know no FP8."""

  def library(implementation):
    def attend(q, k, v, length, scales):
      k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
      return jax.nn.dot_product_attention(
        q[:, None], k, v, query_seq_lengths=jnp.ones_like(length), key_value_seq_lengths=length, implementation=implementation
      )

    return attend

  cases = [('Qwen2.5-7B', 256, 640), ('Qwen2.5-7B', 256, 4096), ('Qwen2.5-1.5B', 256, 4096), ('Qwen3-8B', 64, 4096)]
  for name, B, S in bench.sizes(cases, [('toy', 2, 64)]):
    model = MODELS.get(name, TOY)
    H, K, D, _, _ = model
    for dtype, share in ((BF16, False), (FP8, False), (BF16, True)):
      yield bench.timed(
        'decode_attention',
        f'{name} B {B} S {S} {dtype}{" share" * share}',
        partial(decode_attention.decode_attention, share=share, kernels='mosaic_gpu'),
        partial(attention_inputs, model, B, S, dtype),
        decode_attention.cost(B, H, K, S, D, dtype, share),
        {'xla': library('xla'), 'cudnn': library('cudnn')} if dtype == BF16 and not share else None,
      )


def check_matmul(bench: Bench) -> Iterator[Row]:
  """Block-scaled products, of codes at hand, beside cuBLAS's of the same numbers in bfloat16; and quantising the tokens."""

  def bf16(x, x_scale, w, w_scale):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))

  cases = [('Qwen2.5-7B', name, M) for M in (16, 64, 256, 1024, 8192) for name in ('gate', 'down')]
  cases += [('Qwen2.5-7B', 'q', 64), ('Qwen2.5-1.5B', 'gate', 64), ('Qwen2.5-1.5B', 'down', 64)]
  for name, linear, M in bench.sizes(cases, [('toy', 'q', 5)]):
    N, K = MODELS.get(name, TOY).linears[linear]
    make = partial(linear_inputs, M, N, K)

    def wide(key, M=M, N=N, K=K):
      x, w = jax.random.split(key)
      return jax.random.normal(x, (M, K), BF16), None, jax.random.normal(w, (N, K), BF16), None

    multiply = partial(block_matmul.block_matmul, rows=128, group=128, dtype=BF16, kernels='mosaic_gpu')
    row = bench.timed('block_matmul', f'{name} {linear} M {M}', multiply, make, block_matmul.cost(M, N, K), fp8=True)
    theirs = bench.timed('', '', bf16, wide, block_matmul.cost(M, N, K))
    yield row | {'bf16 us': theirs['us'], 'times best peer': theirs['us'] / row['us']}
  name = 'Qwen3-30B-A3B'
  for linear, tokens in bench.sizes([(linear, M) for M in (64, 256, 4096) for linear in ('gate', 'down')], [('gate', 5)]):
    (N, K), (X, chosen) = bench.sizes((MODELS[name].linears[linear], EXPERTS[name]), ((72, 256), (4, 2)))
    least = block_matmul.grouped_cost(tokens * chosen, min(X, tokens * chosen), N, K)
    multiply = partial(block_matmul.grouped_matmul, rows=128, group=128, dtype=BF16, kernels='mosaic_gpu')
    case, make = f'{name} {linear} M {tokens}x{chosen} of {X}', partial(expert_inputs, X, chosen, tokens, N, K)
    yield bench.timed('grouped_matmul', case, multiply, make, least, fp8=True)
  for M, K in bench.sizes([(64, 3584), (8192, 3584)], [(4, 256)]):
    yield bench.timed(
      'quantise tokens',
      f'{M}x{K}',
      partial(quantise_groups, format='float32'),
      lambda key, M=M, K=K: (jax.random.normal(key, (M, K), BF16),),
      Cost(M * K * 3 + M * K // 32, 0),
    )


def check_eviction(bench: Bench) -> Iterator[Row]:
  """Compaction and comparison of keys beside their references."""
  name, B, S, N = bench.sizes(('Qwen2.5-7B', 256, 640, 512), ('toy', 2, 40, 24))
  model = MODELS.get(name, TOY)
  _, K, D, _, _ = model

  def moved(call):  # returns what it was given in place, for the next call
    return lambda k, v, rows, keep: tuple(call(k, v, rows, keep))

  for dtype in (BF16, FP8):
    yield bench.timed(
      'compact',
      f'{name} B {B} S {S} N {N} {dtype}',
      moved(partial(eviction.compact, ordered=True, kernels='mosaic_gpu')),
      partial(compaction_inputs, model, B, S, N, dtype),
      eviction.compact_cost(B, K, N, D, dtype),
      {'reference': moved(eviction.compact_reference)},
      moving=2,
    )
  B = bench.sizes(32, 2)
  compare = partial(eviction.similarity, threshold=0.5, nearest_of_none=0)
  yield bench.timed(
    'similarity',
    f'{name} B {B} S {S}',
    jax.vmap(partial(compare, kernels='mosaic_gpu')),
    lambda key: (jax.random.normal(key, (B, K, S, D), BF16) + 1, jnp.full(B, S)),
    eviction.similarity_cost(B, K, S, D),
    {'reference': jax.vmap(partial(compare, kernels='reference'))},
  )


def check_append(bench: Bench) -> Iterator[Row]:
  """Writing a token's keys in place, which XLA does in one program."""
  name, B, S = bench.sizes(('Qwen2.5-7B', 256, 4096), ('toy', 2, 40))
  _, K, D, _, _ = MODELS.get(name, TOY)

  def append(k, new, slot):
    return (k.at[jnp.arange(B)[:, None], :, slot[:, None]].set(new[:, None], mode='drop'),)

  def make(key):
    return jnp.zeros((B, K, S, D), BF16), jax.random.normal(key, (B, K, D), BF16), jax.random.randint(key, (B,), 0, S)

  yield bench.timed('append (XLA)', f'{name} B {B}', append, make, Cost(4 * B * K * D, 0), moving=1)


# --- whole programs ----------------------------------------------------------------------------------------------------


def config_of(name: str) -> ModelConfig:
  """A model's config, with true shapes."""
  layers, vocabulary = {'Qwen2.5-1.5B': (28, 151936), 'Qwen2.5-7B': (28, 152064)}.get(name, (2, 512))
  H, K, D, E, F = MODELS.get(name, TOY)
  return ModelConfig.from_json(
    {
      'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'vocab_size': vocabulary, 'hidden_size': E,
      'intermediate_size': F, 'num_hidden_layers': layers, 'num_attention_heads': H, 'num_key_value_heads': K, 'head_dim': D,
      'max_position_embeddings': 32768, 'rms_norm_eps': 1e-6, 'rope_theta': 1e6, 'tie_word_embeddings': name == 'Qwen2.5-1.5B',
      'hidden_act': 'silu', 'eos_token_id': 0,
    }
  )  # fmt: skip


def memory() -> int:
  """Bytes of the device's memory."""
  return (jax.devices()[0].memory_stats() or {}).get('bytes_limit', 64 * 2**30)


def check_decode_step(bench: Bench) -> Iterator[Row]:
  """Seconds of a step of all rows at a context of `tokens`, eviction included, against its bytes and products."""
  tokens, sparse = bench.sizes(
    (4096, Cache(budget=512, interval=128, method='rkv')), (64, Cache(budget=24, interval=8, window=4, method='rkv'))
  )
  kv8, both = Quant(sampler='kv8', key_bias=False), Quant(sampler='w8a8_kv8', key_bias=False, arithmetic='blockwise')
  modes = {
    'bf16': (DENSE, UNQUANTISED),
    'sparse w8a8_kv8': (sparse, both),
    'w8a8_kv8': (DENSE, both),
    'sparse': (sparse, UNQUANTISED),
    'kv8': (DENSE, kv8),
  }
  for name in bench.sizes(('Qwen2.5-7B', 'Qwen2.5-1.5B'), ('toy',)):
    config = config_of(name)
    params = jax.jit(partial(transformer.init_params, config, dtype=BF16))(jax.random.key(0))
    dense: Row = {}
    for mode, (cache, quant) in modes.items():
      try:
        row = decode_step(bench, config, params, cache, quant, tokens)
      except Exception as error:
        traceback.print_exc()
        yield {'check': 'decode step', 'case': f'{name} {mode}', 'status': f'FAILED: {type(error).__name__}'}
        continue
      dense = row if mode == 'bf16' else dense
      row |= {'times dense bf16': row['tokens/s'] / dense['tokens/s']} if dense else {}
      yield {'check': 'decode step', 'case': f'{name} {mode} B {row.pop("rows")}', **row}


def decode_step(bench: Bench, config: ModelConfig, params: Any, cache: Cache, quant: Quant, tokens: int) -> Row:
  """The line of one way of decoding."""
  steps = cache.interval if cache.budget else bench.sizes(32, 4)
  prompt = bench.sizes(512, 24)
  plan = cache_plan(config, cache, quant, prompt, tokens - prompt, BF16)
  served = serve(params, BF16, quant)
  if plan.fp8:
    served = served._replace(scales=Scales(*(jnp.full(config.num_layers, 0.05) for _ in range(3))))
  ours = [*jax.tree.leaves(served.params['layers']), served.head]
  weights = sum(w.size * w.dtype.itemsize for w in ours)
  rows = bench.sizes(256, 2)
  room = 0.85 * memory() - weights - sum(w.size * w.dtype.itemsize for w in jax.tree.leaves(params))
  while rows > 1 and 1.1 * plan.bytes(rows) > room:
    rows //= 2
  sampling = Sampling(max_tokens=3 * steps + 1, max_prompt=prompt)
  state = decode.empty_rows(plan, served, rows, 3 * steps + 1, jax.random.key(0))
  seen = jnp.full(rows, tokens - 3 * steps - 2)
  since = jnp.arange(rows) % cache.interval  # the last compression: at every step some rows are due
  held = dataclasses.replace(
    state.cache,
    seen=seen,
    length=cache.budget + since if cache.budget else seen + 0,  # donated: a buffer of its own
    count=since,
  )
  state = dataclasses.replace(
    state, cache=held, done=jnp.zeros(rows, bool), limit=jnp.full(rows, 10 * steps), count=jnp.ones(rows, jnp.int32)
  )
  run = partial(decode.decode, transformer.graph(config), sampling=sampling, stop_ids=(), steps=steps)
  state = jax.block_until_ready(run(served, state))
  start = time.perf_counter()
  state = jax.block_until_ready(run(served, state))
  step = (time.perf_counter() - start) / steps
  attended = float(jnp.mean(state.kept[:, steps : 2 * steps]))
  keys = plan.bytes(rows) / sum(plan.slots(layer) for layer in range(plan.layers)) * plan.layers * attended
  layers = sum(w.size for w in ours)
  rate = (bench.ceilings.fp8 or 2 * bench.ceilings.bf16) if 'w8a8' in quant.sampler else bench.ceilings.bf16
  least = max(weights / bench.ceilings.copy, 2 * rows * layers / rate) + keys / bench.ceilings.copy
  bandwidth = (weights + keys) / bench.ceilings.copy
  return {
    'rows': rows, 'us': 1e6 * step, 'tokens/s': rows / step, 'share of ceiling': least / step, 'share of bytes': bandwidth / step,
    'most rows': int(rows * room / (1.1 * plan.bytes(rows))),
  }  # fmt: skip


def check_update(bench: Bench) -> Iterator[Row]:
  """Model FLOP a second of whole updates (no recomputation counted), over the matrix rate."""
  name = bench.sizes('Qwen2.5-1.5B', 'toy')
  config = config_of(name)
  T, sequences = bench.sizes((4096, 4), (64, 2))
  rng = np.random.default_rng(0)
  trajectories = [trajectory(rng, i, T // 8, T - T // 8, config.vocab_size) for i in range(sequences)]
  batch, _ = pack(trajectories, rng.normal(size=sequences), Shape(sequences, 1, T, sequences, T - T // 8), share_prefix=False)
  params = jax.jit(partial(transformer.init_params, config))(jax.random.key(0))
  optimizer = make_optimizer(Optimizer(), 10)
  state = TrainState.create(params, optimizer)
  computation = Computation(Correction(), Loss(), 1.0, BF16, bench.sizes(1024, 16), 'layer')
  update = make_update(transformer.graph(config), optimizer, computation)
  batch = jax.device_put(batch)
  del params
  times = []
  for _ in range(3):
    start = time.perf_counter()
    state, metrics = update(state, batch, None, None)
    jax.block_until_ready((state, metrics))
    times.append(time.perf_counter() - start)
  H, K, D, E, F = MODELS.get(name, TOY)
  matrices = config.num_layers * (E * D * (2 * H + 2 * K) + 3 * E * F) + config.vocab_size * E
  flops = sequences * (6 * matrices * T + 6 * config.num_layers * H * D * T * T)  # half of T^2 is seen: 12 / 2
  yield {
    'check': 'update', 'case': f'{name} {sequences} x {T} tokens', 'us': 1e6 * times[-1], 'TFLOP/s': flops / times[-1] / 1e12,
    'tokens/s': sequences * T / times[-1], 'share of ceiling': flops / times[-1] / bench.ceilings.bf16,
  }  # fmt: skip


def trajectory(rng: np.random.Generator, uid: int, prompt: int, new: int, vocabulary: int) -> Trajectory:
  """Random tokens."""
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


# --- all of it ---------------------------------------------------------------------------------------------------------

CHECKS = {
  'parity': check_parity,
  'attention': check_attention,
  'matmul': check_matmul,
  'eviction': check_eviction,
  'append': check_append,
  'update': check_update,
  'decode_step': check_decode_step,
}


def run(bench: Bench, names: list[str], until: float) -> Iterator[Row]:
  """The lines of these checks; those that fail or find no time left say so."""
  for name in names:
    if time.monotonic() > until:
      yield {'check': name, 'case': '', 'status': 'not begun: out of time'}
      continue
    start = time.monotonic()
    try:
      for row in CHECKS[name](bench):
        print(
          '  '.join(f'{key} {value:.4g}' if isinstance(value, float) else f'{value}' for key, value in row.items()), flush=True
        )
        yield {'status': 'ok', **row}
        if time.monotonic() > until:
          yield {'check': name, 'case': 'the rest of it', 'status': 'out of time'}
          break
    except Exception as error:
      traceback.print_exc()
      yield {
        'check': name,
        'case': '',
        'status': f'FAILED: {type(error).__name__}',
      }
    print(f'{name}: {time.monotonic() - start:.0f} s', flush=True)
    jax.clear_caches()


def interpreted() -> None:
  """Lets the kernels run in Pallas's GPU interpreter."""
  for module, name in KERNELS:
    setattr(module, name, partial(getattr(module, name), interpret=plgpu.InterpretGPUParams()))


def main() -> None:
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--rehearse', action='store_true', help='toy sizes in the interpreter')
  parser.add_argument('--only', default=','.join(CHECKS), help='checks, separated by commas')
  parser.add_argument('--limit', type=float, default=LIMIT, help='seconds after which no check begins')
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/gpu_check_DEVICE.json')
  args = parser.parse_args()
  until = time.monotonic() + args.limit
  if args.rehearse:
    interpreted()
  elif jax.default_backend() != 'gpu':
    raise SystemExit('no GPU here; --rehearse runs the script without one')
  found = ceilings(args.rehearse)
  print(found, flush=True)
  rows = list(run(Bench(args.rehearse, found), args.only.split(','), until))
  between = dict.fromkeys(key for row in rows for key in row if key not in ('check', 'case', 'status'))
  columns = ['check', 'case', *between, 'status']
  table = [{column: row.get(column) for column in columns} for row in rows]
  bad = [row for row in rows if row['status'] != 'ok']
  device = re.sub(r'\W+', '_', jax.devices()[0].device_kind)
  result = {'device': device, **found._asdict(), 'checks': len(rows), 'bad': [f'{row["check"]} {row["case"]}' for row in bad]}
  report(f'gpu_check_{device}', table, result, args.save)


if __name__ == '__main__':
  main()
