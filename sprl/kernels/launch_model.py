"""A model of the time of block-scaled FP8 products on a Hopper GPU. It chooses the launch for a shape.

A launch cuts the product y [M, N] of M tokens and weights [N, K] into tiles, each a number of weight rows times a number of
tokens. It may also split the sum over K. The programs that share a sum form a cluster. They exchange float32 partial sums through
the L2 cache, without a second launch. In the wide layout, programs of neighbouring tiles may form a cluster instead. If two of
them multiply the same weights, or the same tokens, each fetches half of them for both.

The time of a launch is the larger of the first two times, plus the third:

    memory          bytes that the call must move / MEMORY
    multiprocessor  steps of the busiest one x the slowest of: tensor core, copies from L2, a warpgroup's chain of dependent work
    not overlapped  the launch, the first copy and the last write (LAUNCH, FILL), the exchange of partial sums (MEET)

The best bfloat16 product of a library has the same model, with more bytes, a slower tensor core and larger tiles.

CLUSTERS, MEMORY and BF16 were measured on an H200. FP8, MEET, PRODUCT and STEP were fitted to the times of 136 launches on it: if
3.5 us are added to each prediction, the rms error is 14 % (benchmarks/launch_sweep.py). The other constants are numbers of data
sheets or assumptions.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

BLOCK = 128  # features per scale and per stage; also weight rows per scale
ROWS = 64  # rows of a tensor core product
LINE = 32  # numbers of 4 bytes in 128 bytes, the least that the copy engine moves
MULTIPROCESSORS = 132
SHARED = (227 * 1024, 113 * 1024, 75 * 1024)  # bytes of shared memory per program if a multiprocessor holds one, two or three
OVERHEAD = 1024  # bytes of shared memory for barriers and alignment
STAGES = 8  # maximum number of stages of a program

NARROW = 8, 16, 32, 64  # tokens of a tile of the narrow layout
WIDE = 128  # tokens of a tile of the wide layout
SPLITS = 1, 2, 4, 8  # programs that share a sum
TOGETHER = (1, 1), (2, 1), (1, 2), (2, 2)  # programs of a cluster without split sums: along the rows and along the tokens
# Clusters that run at the same time, by size, as an H200 reports them (cudaOccupancyMaxActiveClusters). A cluster lies in one
# group of multiprocessors. The groups of another device may have other sizes: one cluster too many takes a second round.
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}
DEPTH = 2  # minimum number of blocks of K per split
# (tiles per multiprocessor, terms): a sum is split while it has fewer tiles than this, into parts of at least this many terms.
PARTS = (0.8, 256), (1.5, 1025)
TERMS = 32  # the number of terms of a part is a multiple of this

MEMORY = 4.2e12  # bytes/s that a copy reaches (data sheet: 4.8e12)
L2 = 6.5e12  # bytes/s from the L2 cache to all multiprocessors: published measurements of H100 give 5.5e12 to 7e12
FETCH = 75e9  # bytes/s into one multiprocessor: two thirds of its port of 64 bytes a clock
FP8 = 0.98e15  # operations/s of the kernel's tensor core products (cuBLAS: 1.3e15; data sheet: 1.98e15)
BF16 = 0.7e15  # operations/s that cuBLAS reaches (data sheet: 0.99e15)
CLOCK = 1.755e9  # clocks/s
LAUNCH = 2.5e-6  # seconds of a launch outside of a CUDA graph
FILL = 1.5e-6  # seconds of the first copy and the last write of a program
LATENCY = 1e-6  # seconds from the start of a copy to its end, in a busy device
MEET = 2.5e-6  # seconds for the programs of a cluster to write partial sums, wait and read
# Clocks of a warpgroup. A product of 64 rows x 128 features takes 2 clocks per token on the tensor core. Its promotion to float32
# takes half a clock per token on the other units.
PRODUCT = 110  # latency of a product and of its promotion
STEP = 368  # barriers and scales of a step


@dataclass(frozen=True)
class Launch:
  """The launch parameters of a block-scaled product."""

  warpgroups: int  # warpgroups that multiply; with two, a third one copies
  products: int  # products of 64 rows of weights per warpgroup and stage
  tokens: int  # tokens of a tile
  stages: int
  tiles: tuple[int, int, int]  # number of tiles along the weights' rows, the tokens and the blocks (splits)
  depth: int  # blocks of K that a tile sums
  together: tuple[int, int]  # tiles of a cluster along the rows (same tokens) and along the tokens (same weights)
  clusters: int

  @property
  def rows(self) -> int:
    """Rows of weights of a tile."""
    return self.warpgroups * self.products * ROWS

  @property
  def splits(self) -> int:
    """Number of programs that share a sum."""
    return self.tiles[2]

  @property
  def cluster(self) -> int:
    """Number of programs of a cluster."""
    return self.together[0] * self.together[1] * self.splits

  @property
  def resident(self) -> int:
    """Number of programs that a multiprocessor holds at the same time."""
    across, along, splits = self.tiles
    return min(len(SHARED), -(-across * along * splits // MULTIPROCESSORS)) if self.warpgroups == 1 else 1

  @property
  def share(self) -> int:
    """Tokens of a tile for which one program adds up and writes the partial sums."""
    return self.tokens if self.splits == 1 else max(8, self.tokens // self.splits)

  @property
  def turns(self) -> int:
    """Number of tiles that the busiest multiprocessor computes."""
    across, along, _ = self.tiles
    groups = -(-across // self.together[0]) * -(-along // self.together[1])
    return -(-groups // CLUSTERS[self.cluster])

  @property
  def wave_use(self) -> float:
    """Fraction of the multiprocessors' time that is spent on tiles, if all tiles take the same time."""
    across, along, splits = self.tiles
    return across * along * splits / (MULTIPROCESSORS * self.turns)

  @property
  def partial_bytes(self) -> int:
    """Bytes of float32 partial sums."""
    across, along, splits = self.tiles
    return 4 * splits * across * self.rows * along * self.tokens if splits > 1 else 0


def launch(M: int, N: int, K: int, block: int | None = None) -> Launch:
  """Return the launch that the model predicts to be the fastest for M tokens and weights [N, K].

  With `block`, each of the M / block blocks of tokens has its own weights.
  """
  return min(candidates(M, N, K, block), key=partial(order, M=M, N=N, K=K, block=block))


def order(plan: Launch, M: int, N: int, K: int, block: int | None = None) -> tuple[float, int, int]:
  """Return what launches are compared by: the predicted time, then the number of programs, then the bytes of partial sums."""
  return round(seconds(plan, M, N, K, block), 8), plan.clusters * plan.cluster, plan.partial_bytes


def candidates(M: int, N: int, K: int, block: int | None = None) -> Iterator[Launch]:
  """Yield every launch that the kernel accepts for a shape."""
  if block is None:
    narrow = [tokens for tokens in NARROW if tokens < 2 * M or tokens == NARROW[0]]
    layouts = [*itertools.product((1,), (1, 2), narrow), *([(2, 1, WIDE), (2, 2, WIDE)] if NARROW[-1] < M else [])]
    divisions = [*itertools.product(SPLITS, TOGETHER[:1]), *itertools.product(SPLITS[:1], TOGETHER[1:])]
  else:
    # In the wide layout with experts, two products would spill registers.
    layouts = [(1, products, block) for products in (1, 2)] if block < WIDE else [(2, 1, WIDE)]
    divisions = [(1, (1, 1))]
  for (warpgroups, products, tokens), (splits, together) in itertools.product(layouts, divisions):
    summable = splits == 1 or (DEPTH * splits <= -(-K // BLOCK) and tokens % max(8, tokens // splits) == 0)
    across, along = -(-N // (warpgroups * products * ROWS)), -(-M // tokens)
    dividable = together == (1, 1) or (warpgroups == 2 and across % together[0] == 0 and along % together[1] == 0)
    if summable and dividable:
      yield cut(M, N, K, warpgroups, products, tokens, splits, together)


def cut(
  M: int, N: int, K: int, warpgroups: int, products: int, tokens: int, splits: int = 1, together: tuple[int, int] = (1, 1)
) -> Launch:
  """Return the launch with these tiles, as many stages as fit and as many programs as run at the same time."""
  rows = warpgroups * products * ROWS
  across, along, blocks = -(-N // rows), -(-M // tokens), -(-K // BLOCK)
  groups = across * along // (together[0] * together[1])
  plan = Launch(warpgroups, products, tokens, 0, (across, along, splits), -(-blocks // splits), together, groups)
  room = SHARED[plan.resident - 1] - OVERHEAD - 2 * warpgroups * plan.share * ROWS
  stages = min(STAGES, room // ((rows + tokens) * BLOCK + 4 * -(-tokens // LINE) * LINE))
  return replace(plan, stages=stages, clusters=groups if warpgroups == 1 else min(groups, CLUSTERS[plan.cluster]))


def seconds(plan: Launch, M: int, N: int, K: int, block: int | None = None) -> float:
  """Return the predicted time of the call with this launch.

  With `block`, each of the M / block blocks of tokens has its own weights.
  """
  across, along, splits = plan.tiles
  rows, tokens, resident, turns = plan.rows, plan.tokens, plan.resident, plan.turns
  stage = (rows // plan.together[1] + tokens // plan.together[0]) * BLOCK
  tiles, rate = across * along * splits, min(FETCH, resident * (plan.stages - 1) * stage / LATENCY)
  tensor = turns * plan.depth * 2 * rows * tokens * BLOCK / (FP8 / MULTIPROCESSORS)
  chain = (plan.products * (2.5 * tokens + PRODUCT) + STEP + tokens / 4) / CLOCK
  rounds = -(-turns // resident)
  working = max(tensor, rounds * plan.depth * chain, _copied(plan.depth * stage, tiles, turns, rate))
  weights = N * K * (1 if block is None else M // block)
  least = (weights + M * K + 2 * M * N) / MEMORY
  return LAUNCH + FILL + max(working, least) + rounds * _exchange(resident * rows * tokens, splits, tiles)


def _copied(size: int, tiles: int, turns: int, rate: float) -> float:
  """Return the seconds in which the busiest multiprocessor copies the operands of its tiles, `size` bytes each.

  It copies at `rate`, or at its share of the L2 cache's rate. In the last turn, only multiprocessors with a tile share the cache.
  """
  last = max(1, tiles - (turns - 1) * MULTIPROCESSORS)
  full, rest = (min(rate, L2 / min(busy, MULTIPROCESSORS)) for busy in (tiles, last))
  return (turns - 1) * size / full + size / rest


def _exchange(size: int, splits: int, tiles: int) -> float:
  """Return the seconds in which `splits` programs write their partial sums of a tile and read their shares of it."""
  rate = min(FETCH, L2 / min(tiles, MULTIPROCESSORS))
  return MEET + 2 * (splits - 1) / splits * 4 * size / rate if splits > 1 else 0.0


def bf16_seconds(M: int, N: int, K: int, block: int | None = None) -> float:
  """Return the predicted time of the best bfloat16 product of the same shape.

  The tiles have 64 to 256 rows and 8 to 256 tokens. Pairs of programs share the larger operand. A split sum costs as much as in
  the FP8 kernel. Beyond one tile for each multiprocessor the work is divided evenly, which favours bfloat16.
  """
  depth = 64

  def time(rows, tokens, splits):
    tiles = -(-N // rows) * -(-M // tokens) * splits
    turns, steps = max(1.0, tiles / MULTIPROCESSORS), -(-K // (depth * splits))
    tensor = turns * steps * 2 * rows * tokens * depth / (BF16 / MULTIPROCESSORS)
    stage = 2 * depth * (max(rows, tokens) // (2 if tokens >= 64 else 1) + min(rows, tokens))
    weights = N * K * (1 if block is None else M // block)
    least = 2 * (weights + M * K + M * N) / MEMORY
    copied = turns * steps * stage / min(FETCH, L2 / min(tiles, MULTIPROCESSORS))
    return LAUNCH + FILL + max(tensor, copied, least) + _exchange(rows * tokens, splits, tiles)

  widths = [tokens for tokens in (*NARROW, 128, 256) if tokens < 2 * M or tokens == 8] if block is None else [block]
  splits = SPLITS if block is None else (1,)
  return min(time(*each) for each in itertools.product((64, 128, 256), widths, splits) if each[0] * each[1] <= 128 * 256)


def parts_of_sum(M: int, N: int, K: int) -> int:
  """Return the number of parts in which a library should sum the bfloat16 product [M, N] over K, if a kernel adds the parts.

  Few tiles of 128 x 128 occupy few multiprocessors. Without parts, XLA would split the sum itself, and add the parts in a
  separate launch. XLA splits long sums until there are one and a half tiles per multiprocessor.
  """
  tiles, parts = -(-M // WIDE) * -(-N // BLOCK), 1

  def worth_more() -> bool:
    return any(parts * tiles < MULTIPROCESSORS * enough and K // (2 * parts) >= terms for enough, terms in PARTS)

  while parts < max(SPLITS) and K % (2 * parts * TERMS) == 0 and worth_more():
    parts *= 2
  return parts
