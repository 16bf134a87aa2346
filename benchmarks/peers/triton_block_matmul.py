"""The block-scaled FP8 product in Triton, through jax-triton: the other candidate beside sprl/kernels/hopper_block_matmul.py.

A program has a tile of weights' rows and of tokens. As in the Mosaic kernel weights are the rows of a tensor core product, so few
tokens waste none; each block's partial product starts from zero; and where tiles are few, programs share the blocks of each:

    partial [rows, tokens] = w8 [rows, 128] @ x8 [tokens, 128]^T
    sum                   += partial * (sx [tokens] * sw)          rows are of one block: one number of sw for all of them

Needs jax-triton, which the extra `cuda` brings; tests/kernels/test_triton_peer.py compiles it for an H200 that is not here.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax._src.interpreters import partial_eval

# jax-triton 0.4.1 would keep calls whose results nobody reads, by a rule of jax 0.11's form, which jax 0.12 cannot call.
partial_eval.dce_rules.pop(jax_triton.triton_lib.triton_kernel_call_p, None)

BLOCK = 128  # features that share a scale, and rows of a weight's block
MULTIPROCESSORS = 132
PART = 4  # blocks that a split has at least
PATCH = 16  # tiles of tokens
PTX = 86  # Triton would write its own assembler's newest, which XLA's may not read


@dataclass(frozen=True)
class Launch:
  """How the kernel is laid out for a shape."""

  rows: int  # weights' of a tile
  tokens: int  # of a tile
  tiles: tuple[int, int, int]  # along the weights' rows, the tokens and (splits) the blocks
  depth: int  # blocks that a tile sums up
  warps: int
  stages: int


def launch(M: int, N: int, K: int) -> Launch:
  """The layout for M tokens and weights [N, K]."""
  tokens = min(128, max(16, triton.next_power_of_2(M)))
  rows, warps, stages = (64, 4, 6) if tokens <= 64 else (128, 8, 4)
  across, along, blocks = triton.cdiv(N, rows), triton.cdiv(M, tokens), triton.cdiv(K, BLOCK)
  depth = triton.cdiv(blocks, max(1, min(MULTIPROCESSORS // (across * along), blocks // PART)))
  return Launch(rows, tokens, (across, along, triton.cdiv(blocks, depth)), depth, warps, stages)


@triton.jit
def triton_block_matmul(
  x_ref,  # [M, K]
  sx_ref,  # [M, C]
  w_ref,  # [N, K]
  sw_ref,  # [R, C]
  y_ref,  # [splits, M, N]
  M: tl.constexpr,
  N: tl.constexpr,
  K: tl.constexpr,
  across: tl.constexpr,
  along: tl.constexpr,
  rows: tl.constexpr,
  tokens: tl.constexpr,
  depth: tl.constexpr,
  BLOCK: tl.constexpr,
  PATCH: tl.constexpr,
):
  """A tile's sum over the blocks of a split; programs are [across * along, splits]."""
  C: tl.constexpr = (K + BLOCK - 1) // BLOCK
  # Programs that run side by side work on a patch of tiles, of few weights and few tokens, which stay in the L2 cache.
  patch, within = tl.program_id(0) // (PATCH * across), tl.program_id(0) % (PATCH * across)
  high = tl.minimum(along - patch * PATCH, PATCH)
  first_row = within // high * rows
  row = first_row + tl.arange(0, rows)
  token = (patch * PATCH + within % high) * tokens + tl.arange(0, tokens)
  feature = tl.arange(0, BLOCK)
  w_at = w_ref + row[:, None].to(tl.int64) * K + feature[None, :]
  x_at = x_ref + token[None, :].to(tl.int64) * K + feature[:, None]
  split = tl.program_id(1)
  total = tl.full((rows, tokens), 0.0, tl.float32)
  for c in range(split * depth, tl.minimum(split * depth + depth, C)):
    w_in, x_in = row[:, None] < N, token[None, :] < M
    if K % BLOCK:  # known when it is compiled
      w_in = w_in & (feature[None, :] < K - c * BLOCK)
      x_in = x_in & (feature[:, None] < K - c * BLOCK)
    w = tl.load(w_at + c * BLOCK, mask=w_in, other=0.0)
    x = tl.load(x_at + c * BLOCK, mask=x_in, other=0.0)
    scale = tl.load(sx_ref + token * C + c, mask=token < M, other=0.0) * tl.load(sw_ref + first_row // BLOCK * C + c)
    total += tl.dot(w, x) * scale[None, :]
  y_at = y_ref + (split * M + token[:, None]).to(tl.int64) * N + row[None, :]
  tl.store(y_at, tl.trans(total).to(y_ref.dtype.element_ty), mask=(token[:, None] < M) & (row[None, :] < N))


def constants(plan: Launch, M: int, N: int, K: int) -> dict[str, int]:
  """The kernel's arguments that are known when it is compiled."""
  across, along, _ = plan.tiles
  tile = {'across': across, 'along': along, 'rows': plan.rows, 'tokens': plan.tokens, 'depth': plan.depth}
  return {'M': M, 'N': N, 'K': K, **tile, 'BLOCK': BLOCK, 'PATCH': PATCH}


def block_matmul(x: jax.Array, x_scale: jax.Array, w: jax.Array, w_scale: jax.Array) -> jax.Array:
  """x [M, K] @ w [N, K]^T of e4m3 codes, with scales [M, C] and [R, C], in bfloat16; see sprl/kernels/block_matmul.py."""
  (M, K), N = x.shape, len(w)
  plan = launch(M, N, K)
  across, along, splits = plan.tiles
  y = jax_triton.triton_call(
    x,
    x_scale,
    w,
    w_scale,
    kernel=triton_block_matmul,
    name='triton_block_matmul',
    out_type=jax.ShapeDtypeStruct((splits, M, N), jnp.bfloat16 if splits == 1 else jnp.float32),
    grid=(across * along, splits),
    num_warps=plan.warps,
    num_stages=plan.stages,
    backend_options={'ptx_version': PTX},
    **constants(plan, M, N, K),
  )
  return y[0] if splits == 1 else jnp.sum(y, axis=0).astype(jnp.bfloat16)
