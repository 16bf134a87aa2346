"""Block-scaled FP8 product in Triton, through jax-triton: the alternative to sprl/kernels/hopper_block_matmul.py.

A program computes a tile of weight rows by tokens. As in the Mosaic kernel, weights are the rows of the tensor core product, so a
few tokens waste no rows. The partial product of each block starts from zero. If tiles are few, several programs split the blocks
of a tile:

    partial [rows, tokens] = w8 [rows, 128] @ x8 [tokens, 128]^T
    sum                   += partial * (sx [tokens] * sw)          the rows lie in one block, so sw is one number

Requires jax-triton, from the dependency group `bench`. tests/kernels/test_triton_peer.py compiles it for an H200 without a GPU.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax._src.interpreters import partial_eval

# jax-triton 0.4.1 registers a rule that keeps calls with unused results. Its signature is jax 0.11's; jax 0.12 cannot call it.
partial_eval.dce_rules.pop(jax_triton.triton_lib.triton_kernel_call_p, None)

BLOCK = 128  # features that share a scale; rows of a weight block
MULTIPROCESSORS = 132  # of an H100 or H200
PART = 4  # fewest blocks of a split
PATCH = 16  # token tiles of a patch
PTX = 86  # Triton's default is its assembler's newest version, which XLA's assembler may not read


@dataclass(frozen=True)
class Launch:
  """The launch parameters of a shape."""

  rows: int  # weight rows of a tile
  tokens: int  # tokens of a tile
  tiles: tuple[int, int, int]  # numbers of tiles along weight rows and tokens, and of splits along blocks
  depth: int  # blocks of a split
  warps: int
  stages: int


def launch(M: int, N: int, K: int) -> Launch:
  """Return the launch parameters for M tokens and weights [N, K]."""
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
  """Sum a tile over the blocks of a split; the grid is [across * along, splits]."""
  C: tl.constexpr = (K + BLOCK - 1) // BLOCK
  # Concurrent programs work on a patch of tiles, whose weights and tokens stay in the L2 cache.
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
    if K % BLOCK:  # a compile-time condition
      w_in = w_in & (feature[None, :] < K - c * BLOCK)
      x_in = x_in & (feature[:, None] < K - c * BLOCK)
    w = tl.load(w_at + c * BLOCK, mask=w_in, other=0.0)
    x = tl.load(x_at + c * BLOCK, mask=x_in, other=0.0)
    scale = tl.load(sx_ref + token * C + c, mask=token < M, other=0.0) * tl.load(sw_ref + first_row // BLOCK * C + c)
    total += tl.dot(w, x) * scale[None, :]
  y_at = y_ref + (split * M + token[:, None]).to(tl.int64) * N + row[None, :]
  tl.store(y_at, tl.trans(total).to(y_ref.dtype.element_ty), mask=(token[:, None] < M) & (row[None, :] < N))


def constants(plan: Launch, M: int, N: int, K: int) -> dict[str, int]:
  """Return the compile-time arguments of the kernel."""
  across, along, _ = plan.tiles
  tile = {'across': across, 'along': along, 'rows': plan.rows, 'tokens': plan.tokens, 'depth': plan.depth}
  return {'M': M, 'N': N, 'K': K, **tile, 'BLOCK': BLOCK, 'PATCH': PATCH}


def block_matmul(x: jax.Array, x_scale: jax.Array, w: jax.Array, w_scale: jax.Array) -> jax.Array:
  """Return x [M, K] @ w [N, K]^T in bfloat16: e4m3 codes, scales [M, C] and [R, C]. See sprl/kernels/block_matmul.py."""
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
