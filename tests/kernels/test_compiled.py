"""Kernels compiled for an H200 on a machine without one: no spilled registers, no copy of the cache, bounded memory.

Skipped with a reason if sprl/planning/aot.py finds no compiler.
"""

import dataclasses
import re
from collections import Counter
from functools import partial

import append_shapes
import jax
import jax.numpy as jnp
import pytest
from kernel_resources import CASES, EXPERTS, FP8, MODELS, attention

from sprl.cache.compaction import row_bytes
from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import Cache, Quant, Sampling
from sprl.kernels import hopper_append, hopper_eviction, hopper_quantise
from sprl.kernels.block_matmul import block_matmul
from sprl.kernels.decode_attention import decode_attention
from sprl.kernels.eviction import compact
from sprl.kernels.hopper_block_matmul import obstacle
from sprl.kernels.packed_attention import Visible, packed_attention
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.models.moe import ACTIVATIONS, blocks, mixture
from sprl.planning.aot import compile_for_h200, missing
from sprl.quant import fp8
from sprl.quant.block import quantise
from sprl.sampler import decode
from sprl.sampler.weights import sampler_weights

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def quick(case):
  """Return whether the default tests compile a case. The slow tests compile the others."""
  match case.kernel:
    case 'decode_attention':
      return 'B 64' in case.shape and ('share' in case.shape) == ('S 640' in case.shape)
    case 'grouped_matmul' | 'grouped_matmul_back' | 'grouped_outer':
      return case.shape.startswith('gate') and case.shape.endswith((' 64x8', ' 4096x8'))
    case 'block_matmul':
      fused = case.shape.startswith(('qkv', 'gate_up', 'down'))
      return case.model == 'Qwen2.5-1.5B' and fused and not case.shape.endswith((' 1', ' 512'))
    case 'packed_attention' | 'codes' | 'gated_codes' | 'normalised' | 'normalised_codes':  # other tests below compile these
      return False
    case _:
      return case.model == 'Qwen2.5-1.5B' and case.dtype != 'float32'


def check(case):
  compiled = case.compile()
  assert len(compiled.kernels) == (3 if case.kernel == 'packed_attention' else 1)
  assert all(kernel.spills == 0 for kernel in compiled.kernels)
  assert compiled.temporary <= case.bound


@pytest.mark.parametrize('case', [case for case in CASES if quick(case)], ids=str)
def test_no_spills_and_little_temporary_memory(case):
  check(case)


@pytest.mark.slow
@pytest.mark.parametrize('case', [case for case in CASES if not quick(case)], ids=str)
def test_no_spills_at_any_shape(case):
  check(case)


@pytest.mark.parametrize(
  ('D', 'dtype'), [(80, 'bfloat16'), (96, 'bfloat16'), (96, 'float8_e4m3fn'), (256, 'bfloat16'), (256, 'float8_e4m3fn')]
)
def test_attention_compiles_at_head_widths_that_fill_no_tile(D, dtype):
  """With second codes if the cache is FP8."""
  B, K, G, S = 64, 2, 3, 648
  shape, scale = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((), jnp.float32)
  cache = shape((B, K, S, D), dtype)
  second = (shape((B, K * G, 16), jnp.bfloat16), shape((B, K, S, 16), dtype)) if dtype == 'float8_e4m3fn' else None
  compiled = compile_for_h200(
    partial(decode_attention, kernels='mosaic_gpu'),
    shape((B, K * G, D), jnp.bfloat16),
    cache,
    cache,
    shape((B,), jnp.int32),
    (scale, scale),
    second,
  )
  [kernel] = compiled.kernels
  assert kernel.spills == 0


@pytest.mark.parametrize(
  ('rows', 'outputs', 'programs'),
  [(256, 'bf16[1024,7,128]', 3), (128, 'bf16[512,7,128]', 2), (16, 'bf16[64,7,128]', 2)],
  ids=['more', 'many', 'few'],
)
def test_attention_is_one_launch(rows, outputs, programs):
  """The kernel writes scaled bfloat16 outputs, also if programs share rows: nothing is left to merge or to convert."""
  shape, scale = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((), jnp.float32)
  cache, second = shape((rows, 4, 4096, 128), FP8), (shape((rows, 28, 16), jnp.bfloat16), shape((rows, 4, 4096, 16), FP8))

  def attend(*arguments):
    return decode_attention(*arguments, share=False, kernels='mosaic_gpu').out

  arguments = shape((rows, 28, 128), jnp.bfloat16), cache, cache, shape((rows,), jnp.int32), (scale, scale), second
  compiled = compile_for_h200(attend, *arguments)
  [kernel] = compiled.kernels
  assert kernel.spills == 0
  assert kernel.shared <= (228 // programs - 1) * 1024  # the programs share a multiprocessor's memory
  assert kernel.registers * 128 * programs <= 65536  # and its registers
  [call] = re.findall(r'= \((\w+\[[\d,]+\]).* custom-call\(.*hopper_decode_attention/mpmd_map', compiled.text)
  assert call == outputs
  after = compiled.text[compiled.text.index('hopper_decode_attention/mpmd_map') :]
  assert ' fusion(' not in after


@pytest.mark.parametrize(('D', 'S', 'share'), [(128, 4608, False), (64, 640, True)])
def test_attention_with_an_fp8_softmax_compiles_without_spills(D, S, share):
  B, K, G = 64, 4, 7
  shape, scale = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((), jnp.float32)
  cache = shape((B, K, S, D), FP8)
  attend = partial(decode_attention, share=share, fp8_softmax=True, kernels='mosaic_gpu')
  queries, length = shape((B, K * G, D), jnp.bfloat16), shape((B,), jnp.int32)
  [kernel] = compile_for_h200(attend, queries, cache, cache, length, (scale, scale)).kernels
  assert kernel.spills == 0


@pytest.mark.parametrize(
  ('M', 'N', 'K'),
  [
    *[(M, *weights) for M in (16, 256) for weights in ((40, 256), (576, 80), (192, 1536))],
    *[(M, 256, 1024) for M in (5, 12, 300)],  # no other case pads to these shapes; a process compiles each program once
  ],
)
def test_products_compile_at_sizes_that_fill_no_tile(M, N, K):
  """The kernel compiles if `obstacle` is None: any number of tokens, and weights smaller than a tile or of whole tiles."""
  assert obstacle(jax.ShapeDtypeStruct((N, K), FP8), jnp.bfloat16, 128, 128) is None
  C, shape = -(-K // 128), jax.ShapeDtypeStruct
  tokens, weights = (shape((M, K), FP8), shape((M, C), jnp.float32)), (shape((N, K), FP8), shape((-(-N // 128), C), jnp.float32))
  multiply = partial(block_matmul, rows=128, group=128, dtype=jnp.dtype('bfloat16'), kernels='mosaic_gpu')
  [kernel] = compile_for_h200(multiply, *tokens, *weights).kernels
  assert kernel.spills == 0


@pytest.mark.parametrize(
  ('H', 'K', 'D', 'dtype'),
  [
    (28, 4, 128, 'uint8'),
    (32, 8, 128, 'bfloat16'),
    pytest.param(48, 8, 128, 'uint8', marks=pytest.mark.slow),
    pytest.param(8, 4, 256, 'uint8', marks=pytest.mark.slow),
    pytest.param(12, 2, 128, 'bfloat16', marks=pytest.mark.slow),
    pytest.param(4, 1, 256, 'bfloat16', marks=pytest.mark.slow),
    pytest.param(9, 3, 128, 'uint8', marks=pytest.mark.slow),
  ],
)
def test_an_append_is_in_place_and_compiles_without_spills(H, K, D, dtype):
  """With biases, norms, evicted slots and a ring of queries. FP8 has second codes and counts, and bfloat16 a product in parts."""
  x, stored, slot, position, code = append_shapes.arguments(H, K, D, dtype)
  compiled = compile_for_h200(hopper_append.append, x, stored, slot, position, code, donate=(1,))
  [kernel] = compiled.kernels
  assert kernel.spills == 0
  assert compiled.temporary <= 1024
  assert compiled.aliased == sum(a.size * a.dtype.itemsize for a in stored.values())


def test_the_compiler_keeps_roundings_to_bfloat16():
  """It leaves out a cast to bfloat16 and back. Then low parts of float32 keys are 0, and FP8 codes those of float32 weights."""
  F, compare = jax.ShapeDtypeStruct, partial(hopper_eviction.similarity, threshold=0.5, nearest_of_none=0)
  weights = compile_for_h200(lambda w: quantise(w, 'float32').scale, F((256, 256), jnp.float32))
  keys = compile_for_h200(compare, F((2, 2, 128, 64), jnp.float32), F((2,), jnp.int32))
  for compiled in (weights, keys):
    assert re.search(r'reduce-precision\(.*exponent_bits=8, mantissa_bits=7', compiled.text)
  assert not re.search(r'subtract\((%\S+), \1\)', keys.text)


@pytest.mark.parametrize('dtype', ['bfloat16', 'uint8'])
@pytest.mark.parametrize('D', [64, 80, 96, 256])
def test_compaction_is_in_place_at_any_head_width(D, dtype):
  shape, cache = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((64, 2, 640, D), dtype)
  move = partial(compact, kernels='mosaic_gpu')
  kept = shape((64,), jnp.int32), shape((64, 2, 500), jnp.int32)
  compiled = compile_for_h200(move, cache, cache, *kept, donate=(0, 1))
  [kernel] = compiled.kernels
  assert kernel.spills == 0
  assert compiled.temporary <= 1024
  assert compiled.aliased == compiled.outputs - 16  # all but the two pointers of the tuple of outputs


def compile_mixture(tokens, dtype, gradient):
  """Return (compiled experts of a layer of Qwen3-30B-A3B, or their gradients; number of rows in all blocks)."""
  (*_, E, F), (X, k) = MODELS['Qwen3-30B-A3B'], EXPERTS['Qwen3-30B-A3B']
  shape = jax.ShapeDtypeStruct
  weights = {'gate': shape((X, F, E), dtype), 'up': shape((X, F, E), dtype), 'down': shape((X, E, F), dtype)}
  x, chosen, gates = shape((tokens, E), jnp.bfloat16), shape((tokens, k), jnp.int32), shape((tokens, k), jnp.float32)

  def gradients(weights, x, chosen, gates, dy):
    return jax.vjp(lambda *moved: mixture(moved[0], moved[1], chosen, moved[2]), weights, x, gates)[1](dy)

  routed = weights, x, chosen, gates
  compiled = compile_for_h200(gradients, *routed, x) if gradient else compile_for_h200(mixture, *routed)
  return compiled, jax.eval_shape(partial(blocks, experts=X), chosen).assignment.size


def calls(compiled):
  """Count the calls of each kernel for products of experts."""
  return Counter(re.findall(r'hopper_(grouped_\w+)/mpmd_map"', compiled.text))


@pytest.mark.parametrize('tokens', [64, 4096])
def test_a_mixture_compiles_to_three_products_without_a_loop_over_blocks(tokens):
  compiled, rows = compile_mixture(tokens, jnp.bfloat16, gradient=False)
  assert calls(compiled) == {'grouped_matmul': 3}
  assert ' while(' not in compiled.text
  assert all(kernel.spills == 0 for kernel in compiled.kernels)
  model = MODELS['Qwen3-30B-A3B']
  assert compiled.temporary <= 2 * rows * (model.hidden + 2 * model.ffn) + 2**23  # rows of tokens and two products


def test_gradients_of_a_mixture_compile_to_eight_products_without_a_loop():
  compiled, rows = compile_mixture(4096, jnp.float32, gradient=True)
  assert calls(compiled) == {'grouped_matmul': 2, 'grouped_matmul_back': 3, 'grouped_outer': 3}
  assert ' while(' not in compiled.text
  assert all(kernel.spills == 0 for kernel in compiled.kernels)
  model = MODELS['Qwen3-30B-A3B']
  summed = 4096 * EXPERTS['Qwen3-30B-A3B'][1] * model.hidden  # dx of each token and expert, before the sum over experts
  assert compiled.temporary <= 2 * (rows * (2 * model.hidden + 4 * model.ffn) + summed) + 2**23  # tokens, dy, four products


def test_a_cache_stored_as_bytes_is_not_copied():
  case = attention('Qwen2.5-7B', 64, 640, FP8)
  q, cache, _, length, scales = case.arguments
  held = jax.ShapeDtypeStruct(cache.shape, jnp.uint8)

  def attend(q, k, v, length, scales):
    return decode_attention(q, fp8.from_bytes(k), fp8.from_bytes(v), length, scales, share=False, kernels='mosaic_gpu').out

  assert compile_for_h200(attend, q, held, held, length, scales).temporary <= case.bound


@pytest.mark.parametrize(
  ('model', 'rows', 'T', 'window'),
  [
    ('Qwen2.5-1.5B', 1, 131072, None),
    ('Qwen2.5-0.5B', 2, 4096, None),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (('Qwen2.5-7B', 1, 8192, None), ('Qwen2.5-1.5B', 1, 4096, 1024), ('Qwen2.5-0.5B', 1, 4104, 512))
    ),
  ],
)
def test_packed_attention_and_its_gradients_make_no_array_of_pairs(model, rows, T, window):
  """Memory is linear in the row: log-sum-exps, delta, the output, the stretches of queries and keys."""
  H, K, D, *_ = MODELS[model]
  q, k = (jax.ShapeDtypeStruct((rows, T, heads, D), jnp.bfloat16) for heads in (H, K))
  ids = jax.ShapeDtypeStruct((rows, T), jnp.int32)

  def both(q, k, v, segments, prefixes, positions, dout):
    visible = Visible.in_rows(segments, prefixes)
    visible = visible if window is None else visible.within(window, positions)
    out, back = jax.vjp(lambda *x: packed_attention(*x, visible), q, k, v)
    return out, back(dout)

  compiled = compile_for_h200(both, q, k, k, ids, ids, ids, q)
  names = {kernel.name.removeprefix('hopper_packed_attention') for kernel in compiled.kernels}
  assert names == {'', '_dq', '_dkv'}
  assert all(kernel.spills == 0 for kernel in compiled.kernels)
  padded = 128 * -(-T // 128)
  assert not re.findall(rf'\[(?:[\d,]+,)?(?:{T}|{padded}),(?:{T}|{padded})[\],]', compiled.text)
  assert compiled.temporary <= 2 * rows * T * H * D * (T % 8 > 0) + 4 * rows * padded * (2 * H + 32) + 2**20


DENSE, H2O = Cache(), Cache(budget=512, interval=128, window=16, method='h2o')
RKV = Cache(budget=512, interval=128, method='rkv')


def abstract_sampler(sampler, cache, key_bias=False, **sizes):
  """Return (config, cache layout, abstract sampler weights) of two layers with the heads of Qwen2.5-7B, changed by `sizes`."""
  heads = {'num_attention_heads': 28, 'num_key_value_heads': 4, 'head_dim': 128}
  config = tiny('qwen2', num_hidden_layers=2, **(heads | sizes))
  quant = Quant(sampler=sampler, arithmetic='blockwise')
  layout = cache_layout(config, cache, quant, 512, 1536, jnp.bfloat16, kernels='mosaic_gpu')
  layout = dataclasses.replace(layout, key_bias=key_bias)
  weights = jax.eval_shape(
    partial(sampler_weights, dtype=jnp.dtype(jnp.bfloat16), quant=quant), transformer.abstract_params(config)
  )
  if layout.fp8:
    weights = weights._replace(scales=Scales(*[jax.ShapeDtypeStruct((2,), jnp.float32)] * 3))
  return config, layout, weights


def compile_decode_loop(sampler, cache, **sizes):
  """Return (compiled decode steps, dtype and shape of a layer's keys, the most bytes of temporary memory)."""
  rows, (config, layout, weights) = 64, abstract_sampler(sampler, cache, **sizes)
  seed = jax.eval_shape(lambda: jax.random.key(0))
  state = jax.eval_shape(partial(decode.empty_state, layout, rows=rows, max_tokens=64), weights, seed=seed)
  steps = partial(decode.decode, transformer.graph(config), sampling=Sampling(), stop_ids=(), steps=16, fixed=True)
  held = 'u8' if layout.fp8 else 'bf16'
  keys = f'{held}[{rows},4,{layout.slots},{layout.head_dim}]'
  # Rows that are due take a step in blocks. Two layers have a small cache, so the least number of rows is more than its share.
  due = decode.due_at_once(layout, rows, 16) * row_bytes(layout, layout.slots) if layout.sparse else 0
  return compile_for_h200(steps, weights, state, donate=(1,)), keys, 0.08 * layout.kv_bytes(rows) + due


@pytest.mark.parametrize(
  ('sampler', 'cache', 'D', 'kernels'),
  [
    pytest.param('none', DENSE, 128, {'decode_attention'}, id='dense'),
    pytest.param('kv8', H2O, 128, {'decode_attention', 'compact'}, id='h2o FP8'),
    pytest.param('none', RKV, 128, {'decode_attention', 'compact', 'similarity'}, id='rkv'),
    pytest.param('kv8', DENSE, 128, {'decode_attention'}, id='dense FP8', marks=pytest.mark.slow),
    pytest.param('none', H2O, 128, {'decode_attention', 'compact'}, id='h2o', marks=pytest.mark.slow),
    pytest.param('kv8', RKV, 128, {'decode_attention', 'compact', 'similarity'}, id='rkv FP8', marks=pytest.mark.slow),
    pytest.param('kv8', H2O, 64, {'decode_attention', 'compact'}, id='h2o FP8, heads of 64', marks=pytest.mark.slow),
    pytest.param('none', RKV, 64, {'decode_attention', 'compact', 'similarity'}, id='rkv, heads of 64', marks=pytest.mark.slow),
  ],
)
def test_the_decode_loop_updates_the_cache_in_place(sampler, cache, D, kernels):
  """Decode steps write and compact the cache without a copy. Rows that are due are copied in blocks."""
  compiled, keys, most = compile_decode_loop(sampler, cache, head_dim=D)
  assert {name for name in ('decode_attention', 'compact', 'similarity') if f'hopper_{name}' in compiled.text} == kernels
  assert all(kernel.spills == 0 for kernel in compiled.kernels)
  assert compiled.temporary <= most
  bodies = 2 if cache.budget else 1  # plain steps, and the blocks of rows that are due, which are written back
  lines = compiled.text.splitlines()
  made = [line for line in lines if re.search(rf'= {re.escape(keys)}|= {re.escape(halves(keys))}', line)]
  scattered = [line for line in made if ' fusion(' in line and re.search(r'/attention/(\S*/)?scatter', line)]
  appended = [line for line in lines if ' custom-call(' in line and 'hopper_append/' in line]
  # Blocks of rows do not use the kernel. There XLA rotates, quantises and scatters the new keys (and values) of a layer in one
  # fusion, in place.
  written = bodies - 1 if D == 128 else bodies
  assert (len(appended), len(scattered)) == (2 if D == 128 else 0, 2 * 2 * written)
  assert not [line for line in made if ' copy(' in line or ' copy-start(' in line]


def halves(keys):
  """Return the shape of a layer's keys as the kernel sees them that appends: each head in two halves."""
  *sizes, D = keys.removesuffix(']').split(',')
  return ','.join([*sizes, '2', str(int(D) // 2)]) + ']'


@pytest.mark.parametrize('cache', [DENSE, H2O], ids=['dense', 'h2o'])
def test_a_chunk_asks_the_host_nothing_in_plain_steps(cache):
  """The number of plain steps is known to XLA, and no loop is in their loop. One loop over rows that are due has all layers."""
  compiled, *_ = compile_decode_loop('none', cache)
  text = compiled.text
  loops = [line for line in text.splitlines() if ' while(' in line]
  counted = [line for line in loops if 'known_trip_count' in line]
  assert [re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', line) for line in counted] == [['16']]
  assert len(loops) - len(counted) == (1 if cache.budget else 0)
  body = text[text.index(f'\n{re.findall(r"body=(%[^,]+)", counted[0])[0]} ') :]
  body = body[: body.index('\n}')]
  assert ' while(' not in body
  assert not [name for name in re.findall(r'op_name="([^"]*)"', body) if '/compress/' in name]


@pytest.mark.parametrize(('sampler', 'cache'), [('none', DENSE), ('kv8', RKV)], ids=['dense', 'rkv FP8'])
def test_an_insert_writes_the_new_rows_only(sampler, cache):
  """A loop over blocks of new rows scatters them to each array, in place. Nothing else reads or writes the cache."""
  rows, (config, layout, weights) = 64, abstract_sampler(sampler, cache)
  shape, graph = jax.ShapeDtypeStruct, transformer.graph(config)
  seed = jax.eval_shape(lambda: jax.random.key(0))
  state = jax.eval_shape(partial(decode.empty_state, layout, rows=rows, max_tokens=64), weights, seed=seed)
  prompts = jax.eval_shape(partial(decode.prefill, graph, layout), weights, shape((4, 256), jnp.int32), shape((4,), jnp.int32))
  insert = partial(decode.insert, sampling=Sampling(), stop_ids=())
  new = decode.NewRows(*[shape((rows,), jnp.int32)] * 4)
  compiled = compile_for_h200(insert, weights, state, prompts, new, donate=(1,))
  keys = f'{"u8" if layout.fp8 else "bf16"}[{rows},4,{layout.slots},{layout.head_dim}]'
  made = [line for line in compiled.text.splitlines() if f'= {keys}' in line.replace('{3,2,1,0}', '')]
  written = [line for line in made if not re.search(r' (parameter|get-tuple-element|scatter)\(', line)]
  assert len(written) == 2 * 2
  assert all(' fusion(' in line and 'while/body/scatter"' in line for line in written)
  assert compiled.temporary < layout.kv_bytes(1)


@pytest.mark.parametrize('cache', [H2O, pytest.param(DENSE, marks=pytest.mark.slow)], ids=['h2o', 'dense'])
def test_second_codes_of_keys_are_written_and_moved_in_place(cache):
  """The default for Qwen2: one more array that the append of a layer writes, no array of keys as numbers, and no copy."""
  compiled, keys, most = compile_decode_loop('kv8', cache, key_bias=True)
  assert all(kernel.spills == 0 for kernel in compiled.kernels)
  assert compiled.temporary <= most
  assert keys.replace('u8', 'f32') not in compiled.text
  second = keys.replace(',128]', ',16]')
  made = [line for line in compiled.text.splitlines() if f'= {second}' in line.replace('{3,2,1,0}', '')]
  assert not [line for line in made if ' copy(' in line or ' copy-start(' in line]
  appended = [line for line in compiled.text.splitlines() if ' custom-call(' in line and 'hopper_append/' in line]
  assert len([line for line in appended if second in line.partition(' custom-call(')[0]]) == 2  # a layer of plain steps each
  queries = re.findall(r'= f16\[64,28,(\d+)\]\S* fusion', compiled.text)
  assert queries == ['192'] * 2  # both factors of the scores are cast in one launch


def test_a_layer_has_four_products_and_a_kernel_before_each_that_quantises():
  """q, k and v are one product, and gate and up another. Two kernels normalise and quantise, one does so with the activation.
  Nothing else stands between them and the products: XLA makes no codes and lays out no scales."""
  compiled, *_ = compile_decode_loop('w8a8_kv8', DENSE, hidden_size=1024, intermediate_size=2048)
  body = compiled.text[compiled.text.index('\n%region_0') :]
  called = Counter(re.findall(r' custom-call\(.*/hopper_(\w*codes|block_matmul)/mpmd_map"', body))
  assert called == {'normalised_codes': 2 * 2, 'codes': 2, 'gated_codes': 2, 'block_matmul': 2 * 4}
  made = re.findall(r'^ +%[\w.]+ = (\w+\[[\d,]+\])\S* fusion\(', body, re.MULTILINE)
  widths = 1024, 2048, 3584  # of the activations that products read
  assert not [x for x in made if x in [f'{dtype}[64,{M}]' for M in widths for dtype in ('u8', 'f8e4m3fn')]]
  assert not [x for x in made if x in [form for M in widths for form in (f'f32[64,{M // 128}]', f'f32[{M // 128},64]')]]
  assert all(kernel.spills == 0 for kernel in compiled.kernels)


@pytest.mark.parametrize('M', [2816, 8192])  # groups for two warps; the widest tokens
def test_quantisation_compiles_without_spills(M):
  shape = jax.ShapeDtypeStruct
  x, scale = shape((256, M), jnp.bfloat16), shape((M,), jnp.bfloat16)
  for activate in ACTIVATIONS.values():
    [kernel] = compile_for_h200(partial(hopper_quantise.gated_codes, activate=activate), x).kernels
    assert kernel.spills == 0
  [kernel] = compile_for_h200(hopper_quantise.codes, x).kernels
  assert kernel.spills == 0

  def normalised(x, scale, added):
    return hopper_quantise.normalised_codes(x, scale, 1e-6, added)

  for added in (None, x):
    [kernel] = compile_for_h200(normalised, x, scale, added).kernels
    assert kernel.spills == 0
  parts = shape((8, 256, M), jnp.float32)
  [kernel] = compile_for_h200(partial(hopper_quantise.normalised, eps=1e-6), x, parts, scale).kernels
  assert kernel.spills == 0


@pytest.mark.parametrize('sampler', ['none', 'kv8', 'w8a8_kv8'])
def test_a_prefill_uses_the_kernel_and_three_arrays_of_all_heads(sampler):
  """The three arrays are projected heads, rotated heads and outputs. With FP8, jax 0.11.2 needs an array of codes too; jax 0.12
  reuses the others' memory. There are no scores and no second cache."""
  config, layout, weights = abstract_sampler(sampler, RKV)
  shape, P, T = jax.ShapeDtypeStruct, 16, 512

  def prefill(weights, tokens, lengths):
    return decode.prefill(transformer.graph(config), layout, weights, tokens, lengths)

  compiled = compile_for_h200(prefill, weights, shape((P, T), jnp.int32), shape((P,), jnp.int32))
  called = [line for line in compiled.text.splitlines() if ' custom-call(' in line and 'hopper_packed_attention/' in line]
  assert len(called) == 2
  heads = layout.heads + 2 * layout.kv_heads
  codes = P * T * heads * layout.head_dim if layout.fp8 else 0
  assert compiled.temporary <= 2 * P * T * 3 * heads * layout.head_dim + 4 * P * T * layout.heads + codes + 2**20
  quantised = {'hopper_block_matmul', 'hopper_normalised_codes', 'hopper_codes', 'hopper_gated_codes'}
  products = quantised if sampler == 'w8a8_kv8' else set()
  assert {kernel.name for kernel in compiled.kernels} <= {'hopper_packed_attention', *products}
  assert all(kernel.spills == 0 for kernel in compiled.kernels)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason='XLA of jax 0.11 ignores the barrier (docs/limits.md)')
@pytest.mark.parametrize('kernels', ['reference', 'mosaic_gpu'])
def test_one_layer_at_a_time_holds_a_prompt_longer_than_the_budget(kernels):
  """Without the barrier behind a prompt's compression, XLA would hold the whole prompt in all layers."""
  temporary = []
  for layers in (2, 6):
    config = tiny('llama', num_hidden_layers=layers, head_dim=64)
    params = jax.eval_shape(lambda config=config: transformer.init_params(config, jax.random.key(0)))
    weights = jax.eval_shape(lambda params: sampler_weights(params, jnp.dtype('bfloat16')), params)
    layout = cache_layout(config, Cache(budget=96, interval=32), Quant(), 1024, 1024, 'bfloat16', kernels=kernels)
    prompts, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 1024), (8,)))
    compiled = compile_for_h200(partial(decode.prefill, transformer.graph(config), layout), weights, prompts, lengths)
    temporary.append(compiled.temporary)
    assert compiled.outputs < 1.1 * layout.kv_bytes(8)
  whole = 2 * 2 * 8 * 1024 * layout.kv_heads * layout.head_dim  # bytes of the keys and values of the prompts in a layer
  assert temporary[1] - temporary[0] < 0.5 * 4 * whole
