"""The check `parity` of gpu_check.py: every kernel against its reference on random numbers."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu_check_bench import BF16, FP8, TOY, Bench, Case, Row, Rows
from gpu_check_calls import (
  append_inputs,
  append_reference,
  attention_inputs,
  bf16_expert_inputs,
  compaction_inputs,
  expert_inputs,
  in_float32,
  linear_inputs,
  norm_inputs,
  norm_kernel,
  norm_reference,
  packed_inputs,
  quantisations,
  triton_candidate,
  twice_coded_inputs,
  with_gradients,
)
from kernel_resources import MODELS

from sprl.kernels import block_matmul, decode_attention, eviction, grouped_matmul, hopper_append, linear_logprob, packed_attention
from sprl.quant import fp8


class Comparison(NamedTuple):
  """A kernel and its reference."""

  check: str
  case: str
  make: Callable[[jax.Array], tuple[Any, ...]]  # random key -> arguments of both
  kernel: Callable[..., dict]  # returns outputs by name
  reference: Callable[..., dict]
  bound: float  # on the relative error of each output


def check_parity(bench: Bench) -> Iterator[Case]:
  """Compare every kernel with its reference: first each kernel once, then the other shapes and types."""
  for each in each_kernel_once_first(comparisons(bench)):
    yield Case(each.check, each.case, partial(compared, each))


def each_kernel_once_first(given: Iterable[Comparison]) -> Iterator[Comparison]:
  """Yield the first comparison of every kernel, then the second of every kernel, and so on."""
  by_kernel: dict[str, list[Comparison]] = {}
  for each in given:
    by_kernel.setdefault(each.check, []).append(each)
  for turn in itertools.zip_longest(*by_kernel.values()):
    yield from (each for each in turn if each is not None)


def compared(each: Comparison, before: Rows) -> Row:
  """Run a comparison; return the largest error of its outputs, and whether all are within the bound."""
  arguments = jax.jit(each.make)(jax.random.key(7))
  found = jax.jit(each.kernel)(*arguments)
  with jax.default_matmul_precision('highest'):
    expected = jax.jit(each.reference)(*arguments)
  errors = {name: relative_error(found[name], x) for name, x in expected.items()}
  worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
  right = errors[worst] <= each.bound
  return {'output': worst, 'error': errors[worst], 'status': 'ok' if right else f'WRONG: beyond {each.bound:g}'}


def relative_error(found: Any, expected: Any) -> float:
  """Return the norm of the error over the norm of the expected array."""
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def comparisons(bench: Bench) -> Iterator[Comparison]:
  """Yield all comparisons."""
  yield from attention_comparisons(bench)
  yield from matmul_comparisons(bench)
  yield from quantise_comparisons(bench)
  yield from norm_comparisons(bench)
  yield from append_comparisons(bench)
  yield from eviction_comparisons(bench)
  yield from row_comparisons(bench)
  yield logprob_comparison(bench)


def attention_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Yield decode attention with rows of all lengths, one of them empty: with shares, split slots, second codes, FP8 softmax."""

  def outputs(attend):
    def call(*inputs):
      out, share, lse = attend(*inputs)
      found = {'out': out, 'sum': jnp.exp(lse)}  # sum of exponentials; 0 for an empty row, whose lse is -inf
      return found if share is None else found | {'share': share}

    return call

  for model, S in bench.sizes([(MODELS['Qwen2.5-0.5B'], 640), (MODELS['Qwen2.5-7B'], 1000)], [(TOY, 72)]):
    lengths = [0, 1, 63, 64, 65, S // 2, S - 1, S]
    for dtype, variant, softmax in (
      (BF16, 'share', False), (FP8, 'share', False), (BF16, 'split', False), (FP8, 'second codes', False),
      (FP8, 'second codes', True),
    ):  # fmt: skip
      make, share = twice_coded_inputs if variant == 'second codes' else attention_inputs, variant == 'share'
      yield Comparison(
        'parity attention',
        f'D {model.width} G {model.queries // model.kv} S {S} {dtype} {variant}{" fp8 softmax" * softmax}',
        partial(make, model, len(lengths), S, dtype, length=lengths),
        outputs(partial(decode_attention.decode_attention, share=share, fp8_softmax=softmax, kernels='mosaic_gpu')),
        outputs(lambda *x, form=(share, softmax): decode_attention.reference(*in_float32(x), share=form[0], fp8_softmax=form[1])),
        0.01,
      )


def matmul_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Yield block-scaled products of one weight and of experts, and bfloat16 products of experts."""
  blocked = {'rows': 128, 'group': 128}
  shapes = bench.sizes([(1, 256, 896), (16, 1536, 1536), (64, 3584, 18944), (300, 3584, 3584), (4096, 4864, 896)], [(9, 64, 384)])
  ours = partial(block_matmul.block_matmul, **blocked, dtype=BF16, kernels='mosaic_gpu')
  for name, multiply in {'block_matmul': ours, **triton_candidate(bench)}.items():
    for M, N, K in shapes if multiply is ours else shapes[2:4]:  # the Triton candidate: one shape with few tokens, one with many
      yield Comparison(
        f'parity {name}',
        f'{M}x{N}x{K}',
        partial(linear_inputs, M, N, K),
        lambda *x, multiply=multiply: {'y': multiply(*x)},
        lambda *x: {'y': block_matmul.reference(*x, **blocked, dtype=jnp.float32)},
        0.005,
      )

  def used_tiles(multiply):
    def call(x, x_scale, w, w_scale, expert, used):
      y = multiply(x, x_scale, w, w_scale, expert, used, **blocked)
      return {'y': jnp.where((jnp.arange(len(x)) < used)[:, None, None], y, 0)}

    return call

  for X, chosen, tokens, N, K in bench.sizes([(128, 8, 64, 768, 2048), (128, 8, 4096, 2048, 768)], [(4, 2, 9, 64, 384)]):
    yield Comparison(
      'parity grouped_matmul',
      f'{tokens}x{chosen} of {X} {N}x{K}',
      partial(expert_inputs, X, chosen, tokens, N, K),
      used_tiles(partial(block_matmul.grouped_matmul, dtype=BF16, kernels='mosaic_gpu')),
      used_tiles(partial(block_matmul.grouped_reference, dtype=jnp.float32)),
      0.005,
    )

  def experts(matmul, outer):  # the product, and the gradients for tokens and weights
    def call(x, dy, w, expert, used):
      here = (jnp.arange(len(x)) < used)[:, None, None]
      y, dx = matmul(x, w, expert, used), matmul(dy, w, expert, used, back=True)
      return {'y': jnp.where(here, y, 0), 'dx': jnp.where(here, dx, 0), 'dw': outer(dy, x, expert, used, len(w))}

    return call

  by_kernel = [partial(each, kernels='mosaic_gpu') for each in (grouped_matmul.grouped_matmul, grouped_matmul.grouped_outer)]
  by_loop = experts(grouped_matmul.grouped_reference, grouped_matmul.outer_reference)
  for X, chosen, tokens, N, K in bench.sizes([(128, 8, 64, 768, 2048), (128, 8, 4096, 2048, 768)], [(4, 2, 9, 64, 192)]):
    yield Comparison(
      'parity grouped_matmul bf16',
      f'{tokens}x{chosen} of {X} {N}x{K}',
      partial(bf16_expert_inputs, X, chosen, tokens, N, K),
      experts(*by_kernel),
      lambda *inputs: by_loop(*in_float32(inputs)),
      0.005,
    )


def quantise_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Yield the quantisation of tokens: alone, behind a norm and behind a gated activation."""

  def outputs(quantise):
    def call(*inputs):
      codes, scale, *total = quantise(*inputs)
      found = {'values': codes.astype(jnp.float32) * jnp.repeat(scale, 128, axis=1), 'scale': scale}
      return found | dict(zip(('sum',), total))

    return call

  for first, each in quantisations().items():
    for T, M in bench.sizes([(256, 3584), (64, 2816)], [(8, 256)]):  # 28 groups, which four warps share, and 22, which two share
      # The order of a sum can move a norm to the next bfloat16 number, and its value to the next code: a step of 1/8 or 1/16.
      yield Comparison(
        f'parity quantise {first}', f'{T}x{M}', partial(each.make, T, M), outputs(each.kernel), outputs(each.reference), 2e-3
      )


def norm_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Yield the norm of a sum, whose second term is in parts."""

  def outputs(norm):
    return lambda *inputs: dict(zip(('normed', 'sum'), norm(*inputs), strict=True))

  for T, M, parts in bench.sizes([(256, 3584, 2), (64, 1536, 4)], [(8, 256, 2)]):
    make = partial(norm_inputs, T, M, parts)
    yield Comparison('parity norm', f'{T}x{M} of {parts}', make, outputs(norm_kernel), outputs(norm_reference), 2e-3)


def append_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Yield the append of a token per row. Caches of few slots: a wrong number, or one in a wrong slot, is a large error."""

  def outputs(append):
    def call(stored, x, *others):
      q, after = append(x, stored, *others)
      numbers = {name: fp8.from_bytes(a).astype(jnp.float32) if a.dtype == jnp.uint8 else a for name, a in after.items()}
      return {'q': q} | numbers

    return call

  for model, dtype in itertools.product(bench.sizes([MODELS['Qwen2.5-7B'], MODELS['Qwen3-8B']], [TOY]), (BF16, FP8)):
    B = bench.sizes(64, 3)
    yield Comparison(
      'parity append',
      f'H {model.queries} K {model.kv} {dtype}',
      partial(append_inputs, model, B, 8, dtype),
      outputs(hopper_append.append),
      outputs(lambda x, stored, *others: append_reference(stored, x, *others)),
      0.005,
    )


def eviction_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Yield compaction, which must be bit-identical, and the comparison of keys."""
  B, S, N = bench.sizes((16, 640, 512), (2, 40, 24))

  def front(move):
    return lambda *inputs: {name: x[:, :, :N] for name, x in zip(('k', 'v'), move(*inputs))}

  models = bench.sizes([MODELS['Qwen2.5-0.5B'], MODELS['Qwen2.5-7B']], [TOY])
  for model, dtype in itertools.product(models, (BF16, FP8)):
    yield Comparison(
      'parity compact',
      f'D {model.width} S {S} N {N} {dtype}',
      partial(compaction_inputs, model, B, S, N, dtype),
      front(partial(eviction.compact, kernels='mosaic_gpu')),
      front(eviction.compact_reference),
      0,
    )

  model = models[-1]

  def keys(key):  # cosines near 0.5; later rows have more occupied slots
    return jax.random.normal(key, (B, model.kv, S, model.width), BF16) + 1, jnp.arange(B) * S // max(B - 1, 1)

  def occupied(compare):
    one = partial(compare, threshold=0.5, nearest_of_none=0)
    return lambda k, n: {'sums': jnp.where((jnp.arange(S) < n[:, None])[:, None], jax.vmap(one)(k, n), 0)}

  # Rounding can move a cosine across the threshold. This changes one of several hundred terms of a sum.
  kernel = partial(eviction.similarity, kernels='mosaic_gpu')
  yield Comparison('parity similarity', f'S {S}', keys, occupied(kernel), occupied(eviction.similarity_reference), 1e-3)

  def biased(key):  # float32 keys that a large bias makes similar: cosines differ from 1 by what a bfloat16 number cannot hold
    k = jax.random.normal(key, (B, model.kv, S, model.width))
    return k.at[..., :8].add(jnp.linspace(30, 200, 8)), jnp.full(B, S)

  def distances(compare):
    one = partial(compare, threshold=2.0, nearest_of_none=-1)
    return lambda k, n: {'distances': S - 1 - jax.vmap(one)(k, n)}

  reference = distances(eviction.similarity_reference)
  yield Comparison('parity similarity', f'S {S} float32', biased, distances(kernel), reference, 1e-2)


def row_comparisons(bench: Bench) -> Iterator[Comparison]:
  """Yield attention of packed rows, with gradients."""

  def outputs(attend):
    return lambda *inputs: dict(zip(('out', 'dq', 'dk', 'dv'), with_gradients(attend)(*inputs)))

  for name in bench.sizes(('Qwen2.5-0.5B', 'Qwen2.5-7B'), ('toy',)):
    model, T = MODELS.get(name, TOY), bench.sizes(1024, 64)
    yield Comparison(
      'parity rows',
      f'D {model.width} G {model.queries // model.kv} T {T}',
      partial(packed_inputs, model, 2, T),
      outputs(partial(packed_attention.packed_attention, kernels='mosaic_gpu')),
      lambda *inputs: outputs(packed_attention.reference)(*in_float32(inputs)),
      0.01,
    )


def logprob_comparison(bench: Bench) -> Comparison:
  """Return the comparison of the chunked log-probs and entropies of the learner's head with those of float32 logits."""
  T, V, E = bench.sizes((1024, 151936, 1536), (9, 50, 64))

  def make(key):
    hidden, head, target = jax.random.split(key, 3)
    return (
      jax.random.normal(hidden, (T, E), BF16),
      2 * E**-0.5 * jax.random.normal(head, (V, E), BF16),
      jax.random.randint(target, (T,), 0, V),
    )

  def outputs(of):
    return lambda *inputs: dict(zip(('log-prob', 'entropy'), of(*inputs)))

  kernel, reference = outputs(linear_logprob.linear_logprob), outputs(linear_logprob.reference)
  return Comparison('parity linear_logprob', f'{T}x{V}x{E}', make, kernel, reference, 1e-4)
