"""Attention of packed rows for NVIDIA Hopper, in Pallas Mosaic GPU: forward pass, and a backward pass without atomic sums.

A program computes 128 queries of one head, or in the pass for dk and dv 128 keys of one kv head. Two warpgroups multiply for 64
of them each. A third warpgroup makes the copy engine (TMA) fetch blocks in advance. Each query sees two stretches of keys
(sprl/kernels/packed_attention.py). `_spans` reduces them to two ranges of blocks that a program visits: one for prefixes and one
for the queries' own segments. Most blocks are visible to all queries of the program and need no mask. In the other blocks, a
warpgroup compares the indices of the keys with the stretches of its queries.

    forward    scores [64 q, 128 s] = q @ k^T;  running maximum and sum of each query;  out += exp2(scores - maximum) @ v
    dq         p = exp2((q @ k^T - lse) * factor);  ds = p * (dout @ v^T - delta);  dq += ds @ k
    dk, dv     transposed scores [64 s, 64 q]; a program visits the blocks of queries that see its keys, for all heads of a group

`delta` is the sum of dout * out for each query. Exponentials have base 2: the factor of the scores includes log2(e).
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from sprl.kernels.lowering import lowered_once

ROWS = 64  # rows of a warpgroup's products: queries, or keys in the pass for dk and dv
WARPGROUPS = 2  # warpgroups that multiply; another one copies
BLOCK = WARPGROUPS * ROWS  # rows of a program
KEYS = 128  # keys per stage in the forward pass
KEYS_BACK = 64  # keys per stage in the pass for dq
QUERIES_BACK = {64: 64, 128: 32}  # head width -> queries per stage in the pass for dk and dv; more would spill registers
STAGES, STAGES_BACK = 2, 3
LEAST = -1e30  # start of the running maximum instead of -inf, because -inf - -inf is nan
NOWHERE = 2**30  # larger than every index: the first key of a query that sees none

Shape = jax.ShapeDtypeStruct
MATRIX = plgpu.Layout.WGMMA  # the layout of the tensor core's results
FIELDS = 4  # numbers that describe a query's stretches, in the order of `_stretches`


def obstacle(q: Array | Shape, k: Array | Shape) -> str | None:
  """Return why the kernels cannot take queries and keys of these shapes and dtypes, or None if they can."""
  if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16:
    return f'queries are {q.dtype} and keys {k.dtype}, not bfloat16'
  if q.shape[-1] not in QUERIES_BACK:
    return f'heads are {q.shape[-1]} wide, not one of {", ".join(map(str, QUERIES_BACK))}'
  return None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def packed_attention(
  q: Float[Array, 'B T H D'], k: Float[Array, 'B S K D'], v: Float[Array, 'B S K D'], visible: Any, interpret: Any = None
) -> Float[Array, 'B T H D']:
  """Return softmax attention of each query over its visible keys, with gradients for q, k and v.

  `visible` is a `sprl.kernels.packed_attention.Visible`. `interpret=plgpu.InterpretGPUParams()` runs the kernels on a CPU.
  """
  return _forward(q, k, v, visible, interpret)[0]


@lowered_once('interpret')
def _forward(q, k, v, visible, interpret):
  """Return the output and the residuals of the backward pass.

  The last residual is each query's log-sum-exp [B, H, T rounded up to BLOCK]. It is divided by the factor of the scores, so that
  exp2((q @ k^T - lse) * factor) is the softmax weight.
  """
  (B, T, H, D), group = q.shape, q.shape[2] // k.shape[2]
  stretches = _stretches(visible)
  queries, (k_whole, v_whole) = _padded(q), map(_padded, (k, v))

  def hopper_packed_attention(q_ref, k_ref, v_ref, seen_ref, spans_ref, out_ref, lse_ref, q_s, k_s, v_s, p_s, lse_s, **barriers):
    warpgroup, b, h, first, rows = _place(spans_ref)
    steps, block = _walk(spans_ref, b, first)

    def fetch(n, stage, came, free):
      keys, head = pl.ds(block(n) * KEYS, KEYS), lax.div(h, jnp.int32(group))
      for x_ref, x_s, which in ((k_ref, k_s, 'k'), (v_ref, v_s, 'v')):
        free(which)
        plgpu.copy_gmem_to_smem(x_ref.at[b, keys, head], x_s.at[stage], came(which))

    def multiply(took, done):
      held = partial(_operand, p_s, warpgroup)
      plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_s.at[warpgroup], barriers['q_came'].at[warpgroup])
      stretch = [_per_row(seen_ref.at[b, field, rows]) for field in range(FIELDS)]
      plgpu.barrier_wait(barriers['q_came'].at[warpgroup])

      def step(n, carry):
        acc, top, total = carry
        stage, at = lax.rem(n, jnp.int32(STAGES)), block(n) * KEYS
        took('k', n)
        scores = _product(q_s.at[warpgroup], k_s.at[stage].T, _filled((ROWS, KEYS), 0.0), interpret) * _score_factor(D)
        done('k', n)
        whole = _all_visible(spans_ref, b, first, at, KEYS)
        scores = _masked(scores, whole, partial(_indices, at, scores, 1), *(partial(_down, x, scores) for x in stretch))
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        p, shrink = jnp.exp2(scores - _down(new_top, scores)), jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(p, axis=1)
        took('v', n)
        acc = _product(held(p), v_s.at[stage], acc * _down(shrink, acc), interpret)
        done('v', n)
        return acc, new_top, total

      start = _filled((ROWS, D), 0.0), _filled((ROWS,), LEAST), _filled((ROWS,), 0.0)
      acc, top, total = lax.fori_loop(0, steps, step, start)
      total = jnp.maximum(total, 1e-30)
      q_s.at[warpgroup][...] = (acc / _down(total, acc)).astype(q_s.dtype)
      lse_s.at[warpgroup][...] = (top + jnp.log(total) * math.log2(math.e)) * (1 / _score_factor(D))
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(q_s.at[warpgroup], out_ref.at[b, rows, h])
      plgpu.copy_smem_to_gmem(lse_s.at[warpgroup], lse_ref.at[b, h, rows])
      plgpu.wait_smem_to_gmem(0)

    _divide(warpgroup, steps, STAGES, fetch, multiply, barriers)

  out, lse = _call(
    hopper_packed_attention,
    (H, stretches.shape[2] // BLOCK, B),
    [Shape(queries.shape, q.dtype), Shape((B, H, stretches.shape[2]), jnp.float32)],
    {
      'q_s': _tiled((WARPGROUPS, ROWS, D)),
      'k_s': _tiled((STAGES, KEYS, D)),
      'v_s': _tiled((STAGES, KEYS, D)),
      'p_s': _tiled((WARPGROUPS, ROWS, KEYS)) if interpret else None,
      'lse_s': plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
      'q_came': plgpu.Barrier(num_barriers=WARPGROUPS),
    },
    ('k', 'v'),
    STAGES,
    interpret,
  )(queries, k_whole, v_whole, stretches, _spans(stretches, BLOCK, KEYS))
  out = out[:, :T]
  return out, (q, k, v, visible, out, lse)


def _backward(interpret, saved, dout):
  q, k, v, visible, out, lse = saved
  stretches = _stretches(visible)
  delta = jnp.einsum('bthd,bthd->bht', out, dout, preferred_element_type=jnp.float32)
  delta = jnp.pad(delta, ((0, 0), (0, 0), (0, lse.shape[2] - delta.shape[2])))
  arrays = *map(_padded, (q, k, v, dout.astype(q.dtype))), lse, delta
  dq = _gradient_of_queries(arrays, stretches, interpret)
  dk, dv = _gradients_of_keys(arrays, stretches, _viewers(visible), visible.window, interpret)
  return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]], None


packed_attention.defvjp(_forward, _backward)


@lowered_once('interpret')
def _gradient_of_queries(arrays, stretches, interpret):
  q, k, *_ = arrays
  (B, _, H, D), group = q.shape, q.shape[2] // k.shape[2]

  def hopper_packed_attention_dq(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, seen_ref, spans_ref, dq_ref, q_s, dout_s, k_s, v_s, p_s, **barriers
  ):
    warpgroup, b, h, first, rows = _place(spans_ref)
    steps, block = _walk(spans_ref, b, first)

    def fetch(n, stage, came, free):
      keys, head = pl.ds(block(n) * KEYS_BACK, KEYS_BACK), lax.div(h, jnp.int32(group))
      free('kv')
      plgpu.copy_gmem_to_smem(k_ref.at[b, keys, head], k_s.at[stage], came('kv'))
      plgpu.copy_gmem_to_smem(v_ref.at[b, keys, head], v_s.at[stage], came('kv'))

    def multiply(took, done):
      held, shape = partial(_operand, p_s, warpgroup), (ROWS, KEYS_BACK)
      for x_ref, x_s in ((q_ref, q_s), (dout_ref, dout_s)):
        plgpu.copy_gmem_to_smem(x_ref.at[b, rows, h], x_s.at[warpgroup], barriers['q_came'].at[warpgroup])
      stretch = [_per_row(seen_ref.at[b, field, rows]) for field in range(FIELDS)]
      lse, delta = (_per_row(x_ref.at[b, h, rows]) for x_ref in (lse_ref, delta_ref))
      plgpu.barrier_wait(barriers['q_came'].at[warpgroup])

      def step(n, acc):
        stage, at = lax.rem(n, jnp.int32(STAGES_BACK)), block(n) * KEYS_BACK
        took('kv', n)
        scores = _product(q_s.at[warpgroup], k_s.at[stage].T, -_down(lse, shape), interpret)
        whole = _all_visible(spans_ref, b, first, at, KEYS_BACK)
        scores = _masked(scores, whole, partial(_indices, at, scores, 1), *(partial(_down, x, scores) for x in stretch))
        p = jnp.exp2(scores * _score_factor(D))
        ds = p * _product(dout_s.at[warpgroup], v_s.at[stage].T, -_down(delta, shape), interpret)
        acc = _product(held(ds), k_s.at[stage], acc, interpret)
        done('kv', n)
        return acc

      acc = lax.fori_loop(0, steps, step, _filled((ROWS, D), 0.0))
      q_s.at[warpgroup][...] = (acc * D**-0.5).astype(q_s.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(q_s.at[warpgroup], dq_ref.at[b, rows, h])
      plgpu.wait_smem_to_gmem(0)

    _divide(warpgroup, steps, STAGES_BACK, fetch, multiply, barriers)

  return _call(
    hopper_packed_attention_dq,
    (H, stretches.shape[2] // BLOCK, B),
    Shape(q.shape, q.dtype),
    {
      'q_s': _tiled((WARPGROUPS, ROWS, D)),
      'dout_s': _tiled((WARPGROUPS, ROWS, D)),
      'k_s': _tiled((STAGES_BACK, KEYS_BACK, D)),
      'v_s': _tiled((STAGES_BACK, KEYS_BACK, D)),
      'p_s': _tiled((WARPGROUPS, ROWS, KEYS_BACK)) if interpret else None,
      'q_came': plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
    },
    ('kv',),
    STAGES_BACK,
    interpret,
    copies=2,
  )(*arrays, stretches, _spans(stretches, BLOCK, KEYS_BACK))


@lowered_once('window', 'interpret')
def _gradients_of_keys(arrays, stretches, viewers, window, interpret):
  q, k, *_ = arrays
  (B, S, K, D), group = k.shape, q.shape[2] // k.shape[2]
  queries = QUERIES_BACK[D]

  def hopper_packed_attention_dkv(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, seen_ref, spans_ref, blocks_ref, dk_ref, dv_ref, k_s, v_s, q_s, dout_s,
    p_s, **barriers,
  ):  # fmt: skip
    warpgroup, b, kv, first, rows = _place(blocks_ref)
    start, end = blocks_ref[b, first, 0], blocks_ref[b, first, 1]
    count = end - start
    steps = group * count

    def block(n):
      """Return the query head and the number of the block of queries of step n."""
      return kv * group + lax.div(n, lax.max(count, jnp.int32(1))), start + lax.rem(n, lax.max(count, jnp.int32(1)))

    def fetch(n, stage, came, free):
      h, i = block(n)
      free('q')
      for x_ref, x_s in ((q_ref, q_s), (dout_ref, dout_s)):
        plgpu.copy_gmem_to_smem(x_ref.at[b, pl.ds(i * queries, queries), h], x_s.at[stage], came('q'))

    def multiply(took, done):
      held, shape = partial(_operand, p_s, warpgroup), (ROWS, queries)
      for x_ref, x_s in ((k_ref, k_s), (v_ref, v_s)):
        plgpu.copy_gmem_to_smem(x_ref.at[b, rows, kv], x_s.at[warpgroup], barriers['k_came'].at[warpgroup])
      plgpu.barrier_wait(barriers['k_came'].at[warpgroup])
      at = first * BLOCK + warpgroup * ROWS
      behind, viewer, last, *position = (_per_row(seen_ref.at[b, field, rows]) for field in range(seen_ref.shape[1]))

      def step(n, carry):
        dk, dv = carry
        (h, i), stage = block(n), lax.rem(n, jnp.int32(STAGES_BACK))
        here = pl.ds(i * queries, queries)
        lse, delta = (_per_column(x_ref.at[b, h, here]) for x_ref in (lse_ref, delta_ref))
        took('q', n)
        scores = _product(k_s.at[warpgroup], q_s.at[stage].T, -_across(lse, shape), interpret)
        whole = _all_visible(spans_ref, b, i, at, ROWS)
        number, key = partial(_indices, i * queries, scores, 1), partial(_indices, at, scores, 0)
        bounds = (partial(_down, x, scores) for x in (behind, viewer, last))

        def in_window():
          return _across(_per_column(seen_ref.at[b, 3, here]), scores) < _down(position[0], scores) + window

        scores = _masked(scores, whole, number, key, *bounds, also=in_window if window is not None else None)
        p = jnp.exp2(scores * _score_factor(D))
        dv = _product(held(p), dout_s.at[stage], dv, interpret)
        ds = p * _product(v_s.at[warpgroup], dout_s.at[stage].T, -_across(delta, shape), interpret)
        dk = _product(held(ds), q_s.at[stage], dk, interpret)
        done('q', n)
        return dk, dv

      dk, dv = lax.fori_loop(0, steps, step, (_filled((ROWS, D), 0.0), _filled((ROWS, D), 0.0)))
      k_s.at[warpgroup][...] = (dk * D**-0.5).astype(k_s.dtype)
      v_s.at[warpgroup][...] = dv.astype(v_s.dtype)
      plgpu.commit_smem()
      for x_s, x_ref in ((k_s, dk_ref), (v_s, dv_ref)):
        plgpu.copy_smem_to_gmem(x_s.at[warpgroup], x_ref.at[b, rows, kv])
      plgpu.wait_smem_to_gmem(0)

    _divide(warpgroup, steps, STAGES_BACK, fetch, multiply, barriers)

  spans = _spans(stretches, queries, BLOCK)
  blocks = _viewing_blocks(spans, -(-S // BLOCK))
  return _call(
    hopper_packed_attention_dkv,
    (K, blocks.shape[1], B),
    [Shape(k.shape, k.dtype)] * 2,
    {
      'k_s': _tiled((WARPGROUPS, ROWS, D), queries),
      'v_s': _tiled((WARPGROUPS, ROWS, D), queries),
      'q_s': _tiled((STAGES_BACK, queries, D), queries),
      'dout_s': _tiled((STAGES_BACK, queries, D), queries),
      'p_s': _tiled((WARPGROUPS, ROWS, queries), queries) if interpret else None,
      'k_came': plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
    },
    ('q',),
    STAGES_BACK,
    interpret,
    copies=2,
  )(*arrays, viewers, spans, blocks)


# --- which blocks a program visits -----------------------------------------------------------------------------------


def _padded(x):
  """Pad tokens to whole tiles of 8: Mosaic (jax 0.12) does not clip the copy engine's tiles."""
  return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0)))


def _stretches(visible):
  """Return low, gap, start and end of each query [B, 4, T rounded up to BLOCK].

  The query sees key s if low <= s < gap or start <= s < end, where low <= gap <= start <= end. Padding sees no key.
  """
  seen = visible.narrowed()
  own, prefix = seen.start < seen.end, seen.prefix_start < seen.prefix_end
  low = jnp.where(prefix, seen.prefix_start, jnp.where(own, seen.start, NOWHERE))
  gap = jnp.where(prefix, seen.prefix_end, low)
  start = jnp.where(own, seen.start, gap)
  return _stacked([low, gap, start, jnp.where(own, seen.end, start)], NOWHERE)


def _viewers(visible):
  """Return the queries that see each key, ignoring the window: [B, 3 or 4, T rounded up to BLOCK].

  Queries of the key's segment see it from the key's own index up to field 0, the end of that segment. Queries of segments that
  continue it see it from field 1 up to field 2. Field 3, which exists only with a window, is the token's position.
  """
  (B, T), rows = visible.start.shape, jnp.arange(visible.start.shape[0])[:, None]
  at, own = jnp.arange(T), visible.start < visible.end
  prefix = jnp.where(visible.prefix_start < visible.prefix_end, visible.prefix_start, T)

  def of_segment(first, empty):  # the first token identifies a segment
    return jnp.take_along_axis(first, jnp.where(own, visible.start, T), axis=1, mode='fill', fill_value=empty)

  none = jnp.zeros((B, T), jnp.int32)
  behind = of_segment(none.at[rows, visible.start].max(at + 1, mode='drop'), 0)
  last = jnp.maximum(behind, of_segment(none.at[rows, prefix].max(at + 1, mode='drop'), 0))
  first = jnp.minimum(last, of_segment((none + NOWHERE).at[rows, prefix].min(at, mode='drop'), 0))
  fields = [behind, jnp.maximum(behind, first), last]
  return _stacked([*fields, visible.positions] if visible.window is not None else fields, 0)


def _stacked(fields, padding):
  """Return fields [B, T] as one array, with T rounded up to BLOCK."""
  x = jnp.stack(fields, axis=1).astype(jnp.int32)
  return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % BLOCK)), constant_values=padding)


def _spans(stretches, queries, keys):
  """Return two ranges of blocks and two ranges of keys for each block of queries [B, T / queries, 8]. Ends are exclusive.

  0, 1; 2, 3    blocks of keys to visit: for the prefixes, then for the queries' own segments
  4, 5; 6, 7    keys that all queries of the block see: in their own segment, then in their prefix
  """
  blocks = stretches.reshape(*stretches.shape[:2], -1, queries)
  low, gap, start, end = (blocks[:, field] for field in range(FIELDS))

  def hull(first, behind):
    some = first < behind
    least, most = jnp.where(some, first, NOWHERE).min(axis=-1), jnp.where(some, behind, 0).max(axis=-1)
    return jnp.where(least < most, least // keys, 0), jnp.where(least < most, -(-most // keys), 0)

  own, prefix = hull(start, end), hull(low, gap)
  # Ranges that touch become one, so that no block is visited twice.
  touch = (own[0] <= prefix[1]) & (prefix[0] < prefix[1]) & (own[0] < own[1])
  own = jnp.where(touch, jnp.minimum(own[0], prefix[0]), own[0]), jnp.where(touch, jnp.maximum(own[1], prefix[1]), own[1])
  prefix = prefix[0], jnp.where(touch, prefix[0], prefix[1])
  seen = start.max(axis=-1), end.min(axis=-1), low.max(axis=-1), gap.min(axis=-1)
  return jnp.stack([*prefix, *own, *seen], axis=-1).astype(jnp.int32)


def _viewing_blocks(spans, blocks):
  """Return the range of blocks of queries that visit each block of keys, end exclusive: [B, blocks, 2]."""
  block, at = jnp.arange(blocks)[:, None], jnp.arange(spans.shape[1])
  first, last, own, end = (spans[:, None, :, field] for field in range(4))
  visits = ((first <= block) & (block < last)) | ((own <= block) & (block < end))
  behind = jnp.where(visits, at + 1, 0).max(axis=-1)
  return jnp.stack([jnp.minimum(jnp.where(visits, at, NOWHERE).min(axis=-1), behind), behind], axis=-1).astype(jnp.int32)


def _walk(spans_ref, b, i):
  """Return the number of steps of a program, and a function that maps a step to its block of keys."""
  first, last, own, end = (spans_ref[b, i, field] for field in range(4))
  before = last - first
  return before + end - own, lambda n: jnp.where(n < before, first + n, own + n - before)


def _all_visible(spans_ref, b, i, key, count):
  """Return whether all queries of block i see the `count` keys that start at index `key`."""
  start, end, prefix_start, prefix_end = (spans_ref[b, i, field] for field in range(4, 8))
  return ((start <= key) & (key + count <= end)) | ((prefix_start <= key) & (key + count <= prefix_end))


# --- a program -------------------------------------------------------------------------------------------------------


def _call(kernel, grid, out, scratch, operands, stages, interpret, copies=1):
  """Return the kernel call. Each name in `operands` gets barriers for its stages; `copies` copies fill a stage."""
  for name in operands:
    scratch[f'{name}_filled'] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    scratch[f'{name}_free'] = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
  return plgpu.kernel(
    kernel,
    out_type=out,
    scratch_types=scratch,
    grid=grid,
    grid_names=('head', 'block', 'row'),
    num_threads=WARPGROUPS + 1,
    thread_name='warpgroup',
    compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
  )


def _place(blocks_ref):
  """Return the warpgroup, row of the batch, head, block of the program, and the warpgroup's rows in the block.

  The last blocks of a row start first, because they have the most keys.
  """
  warpgroup, block = lax.axis_index('warpgroup'), blocks_ref.shape[1] - 1 - lax.axis_index('block')
  ours = lax.min(warpgroup, jnp.int32(WARPGROUPS - 1))  # the copying warpgroup has no rows
  return warpgroup, lax.axis_index('row'), lax.axis_index('head'), block, pl.ds(block * BLOCK + ours * ROWS, ROWS)


def _divide(warpgroup, steps, stages, fetch, multiply, barriers):
  """Divide a program's work: one warpgroup fetches the operands of all steps into the ring of stages, the others multiply.

  fetch(n, stage, came, free)   copies the operands of step n to `stage`
      free(name)                  waits until the stage is free
      came(name)                  returns the barrier that the copies signal
  multiply(took, done)          computes all steps
      took(name, n)               waits for the operand of step n
      done(name, n)               frees the operand's stage
  """
  names = [name.removesuffix('_free') for name in barriers if name.endswith('_free')]
  stage_of = partial(lax.rem, y=jnp.int32(stages))

  def wait_free(name, n):
    plgpu.barrier_wait(barriers[f'{name}_free'].at[stage_of(n)])

  def copy():
    def step(n, _):
      stage = stage_of(n)
      fetch(
        n,
        stage,
        lambda name: barriers[f'{name}_filled'].at[stage],
        lambda name: pl.when(n >= stages)(lambda: wait_free(name, n)),
      )

    plgpu.set_max_registers(24, action='decrease')
    lax.fori_loop(0, steps, step, None)
    last = lax.max(jnp.int32(0), steps - stages)
    lax.fori_loop(last, steps, lambda n, _: [wait_free(name, n) for name in names] and None, None)

  def work():
    plgpu.set_max_registers(240, action='increase')
    multiply(
      lambda name, n: plgpu.barrier_wait(barriers[f'{name}_filled'].at[stage_of(n)]),
      lambda name, n: plgpu.barrier_arrive(barriers[f'{name}_free'].at[stage_of(n)]),
    )

  lax.cond(warpgroup == WARPGROUPS, copy, work)


def _masked(scores, whole, number, low, gap, start, end, also=None):
  """Return the scores where low <= number < gap or start <= number < end, else -inf. Requires low <= gap <= start <= end.

  `whole` says that all scores are visible. `also`, if given, is a further condition. `number` and all later arguments are
  functions that return arrays of the scores' shape, so that a whole block computes none of them.
  """

  def mask(scores):
    # The barriers force one comparison at a time: the predicates of two would spill registers.
    n = number()
    scores = lax.optimization_barrier(jnp.where(n >= low(), scores, -jnp.inf))
    hidden = (n - gap()).astype(jnp.uint32) < (start() - gap()).astype(jnp.uint32)  # gap <= n < start
    scores = lax.optimization_barrier(jnp.where(hidden, -jnp.inf, scores))
    scores = jnp.where(n < end(), scores, -jnp.inf)
    return scores if also is None else jnp.where(also(), lax.optimization_barrier(scores), -jnp.inf)

  return lax.cond(whole, lambda scores: scores, mask, scores)


def _indices(first, like, axis):
  return plgpu.broadcasted_iota(jnp.int32, like.shape, axis, layout=MATRIX) + first


def _product(a, b, total, interpret) -> Any:
  """Return total + a @ b in float32. `a` is in shared memory or in registers, `b` in shared memory."""
  if interpret:
    return total + pl.run_scoped(partial(_multiplied, a, b), plgpu.WGMMAAccumulatorRef(total.shape, jnp.float32))
  return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.WGMMAAccumulatorRef.init(total))


def _multiplied(a, b, acc):
  plgpu.wgmma(acc, a, b)
  return acc[...]


def _operand(p_s, warpgroup, x):
  """Return x as the left operand of a product.

  The operand is in registers, except in the interpreter, which supports operands in shared memory only.
  """
  if p_s is None:
    return x.astype(jnp.bfloat16)
  p_s.at[warpgroup][...] = x.astype(jnp.bfloat16)
  plgpu.commit_smem()
  return p_s.at[warpgroup]


def _score_factor(D):
  return D**-0.5 * math.log2(math.e)


def _per_row(ref):
  return plgpu.load(ref, layout=MATRIX.reduce(1), optimized=False)


def _per_column(ref):
  return plgpu.load(ref, layout=MATRIX.reduce(0), optimized=False)


def _down(per_row, like):
  return lax.broadcast_in_dim(per_row, getattr(like, 'shape', like), [0])


def _across(per_column, like):
  return lax.broadcast_in_dim(per_column, getattr(like, 'shape', like), [1])


def _filled(shape, value):
  return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), MATRIX if len(shape) == 2 else MATRIX.reduce(1))


def _tiled(shape, columns=64):
  """Return shared memory in swizzled tiles of 8 rows, the layout that both the copy engine and the tensor core read.

  One operation of the tensor core sums `columns` terms, so both operands of a product need tiles of equal width.
  """
  tiles = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)  # pyright: ignore[reportAbstractUsage]
  return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiles)
