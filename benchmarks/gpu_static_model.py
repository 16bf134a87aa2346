"""Predict the time of a compiled program's launches on an H200, from bytes, operations and counts.

The assumptions are the constants below, with their sources where they have one, and those of sprl/kernels/launch_model.py, which
also predicts the time of FP8 products. A measurement should replace each constant.

Launches run one after the other. A launch takes START inside a CUDA graph, or LAUNCH outside, plus the time of its work. This is
mostly the longest of three times: to move its bytes, to multiply whole waves of tiles, and to issue the instructions of its
kernel. Attention has a model of its own (sprl/kernels/attention_launch.py). Outside of CUDA graphs, the device waits for the host
before a branch, and before each iteration of a loop whose trip count XLA does not know.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sprl.kernels import attention_launch, eviction, launch_model
from sprl.kernels.attention_launch import BLOCK, Loop
from sprl.kernels.hopper_eviction import BLOCK as KEYS
from sprl.kernels.launch_model import BF16, CLOCK, FETCH, FILL, FP8, LAUNCH, MEMORY, MULTIPROCESSORS, SHARED, SPLITS
from sprl.planning.aot import Kernel
from sprl.planning.hlo import Instruction, Module, Product, Shape, moved, product
from sprl.planning.thunks import QUIET, Thunk

# --- assumptions -----------------------------------------------------------------------------------------------------
# "estimate" as a source: derived from published measurements of H100s and H200s when an earlier commit was reviewed.
FLOAT32 = 55e12  # FLOP/s of float32 products at highest precision, without tensor cores; data sheet: 67e12
TF32 = 380e12  # FLOP/s of float32 products at default precision; data sheet: 494e12
START = 0.8e-6  # seconds from one launch to the next inside a CUDA graph (outside: LAUNCH); measured on an H200
GRAPH = 2.5e-6  # seconds to start a CUDA graph; NVIDIA blog, constant-time launch for straight-line CUDA graphs
HOST_READ = 11.5e-6  # seconds that the device idles while the host reads a loop's or a branch's predicate; measured on an H200
STREAMED = 0.9  # share of MEMORY that products and kernels without a model of their own reach; estimate: 0.85 to 0.9
MOVED = 0.55  # share of MEMORY of `hopper_compact`; estimate: 0.50 to 0.65
COMPARED = 0.1  # share of BF16 of `hopper_similarity` if its machine code is not known; estimate: bound by its other instructions
ISSUED = 0.7  # share of the schedulers' cycles that issue, with several thread blocks on a multiprocessor; a guess
SLOW = {'conversion': 2, 'special': 8, 'shared load': 4, 'shared store': 4}  # cycles to issue a warp's instruction; a guess
WAIT = {'barrier': 30, 'matrix wait': 60}  # cycles until a warp continues; a guess
DEPENDENT = 2  # cycles from one instruction of a warp to the next, on average; a guess
REGISTERS = 65536  # registers of a multiprocessor; CUDA programming guide
# Tiles [M, N] of cuBLAS's bfloat16 kernels; profiles of cuBLAS 12 on Hopper
TILES = tuple(itertools.product((64, 128, 256), (64, 128, 256)))[:-1]


class Context(NamedTuple):
  """Facts about a case that the text of its program does not contain."""

  rows: int  # sequences, B
  slots: int  # S of the cache
  length: float  # mean number of occupied slots
  kernels: Mapping[str, Kernel]  # Mosaic's reports of the kernels that this program calls, by name
  experts_used: float = 1.0  # share of the experts that at least one row of a step chooses
  filled: float = 1.0  # share of a block's rows that are due for compression, for the last block may have empty places


@dataclass(frozen=True)
class Work:
  """One launch, or the sum of several."""

  launches: float = 0
  outside_graphs: float = 0  # launches outside of CUDA graphs
  graphs: float = 0  # CUDA graphs started
  host_reads: float = 0  # times that the device waits until the host has read a predicate
  bytes: float = 0
  products: float = 0  # seconds of matrix products with weights
  attention: float = 0  # seconds of the attention kernel
  rest: float = 0  # seconds of other launches
  excess: float = 0  # seconds of products at peak rates, less those to read their weights, where this is positive

  @property
  def overhead(self) -> float:
    """Seconds of launches and waiting."""
    launches = (self.launches - self.outside_graphs) * START + self.outside_graphs * LAUNCH
    return launches + self.graphs * GRAPH + self.host_reads * HOST_READ

  @property
  def seconds(self) -> float:
    """Seconds in total."""
    return self.overhead + self.products + self.attention + self.rest

  def plus(self, other: 'Work', times: float = 1) -> 'Work':
    """Return self + times * other."""
    return Work(*(mine + times * theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


# --- products --------------------------------------------------------------------------------------------------------


class Tiling(NamedTuple):
  """How the thread blocks of a product share its work."""

  name: str
  wave_use: float  # share of the multiprocessors that work, on average
  partial: float  # bytes of partial sums, written and read
  seconds: float


def tiled(M: int, N: int, K: int, batch: int, size: int, rate: float, traffic: float) -> Tiling:
  """Return the fastest tiling that a library has for `batch` products of M tokens and weights [N, K].

  An element has `size` bytes. Pairs of thread blocks share the larger operand. `traffic` is the number of bytes that the launch
  moves, without partial sums.
  """

  def seconds(m, n, split) -> Tiling:
    blocks = -(-M // m) * -(-N // n) * batch * split
    waves = -(-blocks // MULTIPROCESSORS)
    depth = -(-K // split)
    tile = max(2 * m * n * depth * MULTIPROCESSORS / rate, (max(m, n) / 2 + min(m, n)) * depth * size / FETCH)
    partial = 2 * 4 * split * batch * M * N if split > 1 else 0
    took = max(waves * tile, (traffic + partial) / (MEMORY * STREAMED)) + (START if split > 1 else 0)
    return Tiling(f'{m}x{n}' + f'/{split}' * (split > 1), blocks / (waves * MULTIPROCESSORS), partial, took)

  splits = SPLITS if batch == 1 else (1,)  # with a batch, XLA has already split the sum
  return min(
    (seconds(*tile, split) for tile in TILES for split in splits if split == 1 or 512 * split <= K), key=lambda t: t.seconds
  )


def fp8_tiled(M: int, N: int, K: int) -> Tiling:
  """Return the tiling of `hopper_block_matmul` for M tokens and weights [N, K], and the time that its launch model predicts.

  The start and the first copy are left out, and the bytes take as long as in `tiled`. FP8 and bfloat16 are then comparable.
  """
  plan = launch_model.launch(M, N, K)
  working = launch_model.seconds(plan, M, N, K) - LAUNCH - FILL
  least = (N * K + M * K + 2 * M * N) / (MEMORY * STREAMED)
  name = f'{plan.rows}x{plan.tokens}' + f'/{plan.splits}' * (plan.splits > 1)
  return Tiling(name, plan.wave_use, 2 * plan.partial_bytes, max(working, least))


def excess(sizes: Product, size: int, rate: float) -> float:
  """Return by how many seconds a product's operations at `rate` take longer than its weights, which have `size` bytes each."""
  M, N, K, batch = sizes
  return max(0.0, 2 * batch * M * N * K / rate - batch * N * K * size / MEMORY)


class Matmul(NamedTuple):
  """A matrix product of the compiled program, with its predicted time."""

  name: str  # layer and linear, as in `layer0/mlp`
  sizes: Product
  kind: str  # bf16, fp8, float32
  tiling: Tiling


# --- launches --------------------------------------------------------------------------------------------------------


def scope(instruction: Instruction) -> str:
  """Return the place of an operation in the network, such as `layer0/mlp`: its name without loops and primitive."""
  loops = ('while', 'body', 'cond', 'closed_call', 'eval_jaxpr')
  parts = [part for part in instruction.op_name.split('/') if part not in loops and not part.startswith('hopper_')]
  return '/'.join(parts[1:-1])


def launch(module: Module, instruction: Instruction, context: Context) -> tuple[Work, Matmul | None]:
  """Return the work of one launch without the time to start it, and the matrix product if the launch is one."""
  traffic = moved(module, instruction).total
  if instruction.opcode == 'custom-call' and 'hopper_' in instruction.op_name:
    return _kernel(module, instruction, context, traffic)
  if 'gemm' in instruction.target or 'matmul' in instruction.target:
    (left, right), out = (module.instructions[name].shapes[0] for name in instruction.operands[:2]), instruction.shapes[0]
    K = round(math.sqrt(left.size * right.size / out.size))
    M, N = sorted((left.size // K, right.size // K))
    return _product(instruction, Product(M, N, K), left, '', traffic)
  for dot in module.inner(instruction, 'dot'):
    of = module.instructions[dot.operands[0]].shapes[0]
    return _product(instruction, product(module, dot), of, dot.attributes, traffic)
  return Work(bytes=traffic, rest=traffic / MEMORY), None


def _product(instruction, sizes, of: Shape, attributes, traffic):
  size = of.bytes // of.size
  kind, rate = {1: ('fp8', FP8), 2: ('bf16', BF16), 4: ('float32', FLOAT32 if 'highest' in attributes else TF32)}[size]
  tiling = tiled(sizes.M, sizes.N, sizes.K, sizes.batch, size, rate, traffic)
  work = Work(bytes=traffic + tiling.partial, products=tiling.seconds, excess=excess(sizes, size, rate))
  return work, Matmul(scope(instruction), sizes, kind, tiling)


def _kernel(module, instruction, context, traffic):
  """Return the work of a Mosaic kernel, by its name. A kernel without a rule reads its operands and writes its results once."""
  operands = [each.shapes[0] for each in module.operands(instruction)]
  name = next(part for part in instruction.op_name.split('/') if part.startswith('hopper_'))
  match name:
    case 'hopper_decode_attention':
      return attention(operands, instruction.shapes, context), None
    case 'hopper_block_matmul':
      (M, K), N = operands[0].dims, operands[2].dims[0]
      tiling = fp8_tiled(M, N, K)
      partial, sizes = tiling.partial / 2, Product(M, N, K)  # the other half is in `traffic`, as results
      work = Work(bytes=traffic + partial, products=tiling.seconds, excess=excess(sizes, 1, FP8))
      return work, Matmul(scope(instruction), sizes, 'fp8', tiling)
    case 'hopper_grouped_block_matmul' | 'hopper_grouped_matmul':
      weights = max(shape.bytes for shape in operands)
      traffic += (context.experts_used - 1) * weights
      return Work(bytes=traffic, products=traffic / (MEMORY * STREAMED)), None
    case 'hopper_append':  # of the arrays that it updates in place, it writes one slot
      written = sum(shape.bytes / context.slots for shape in instruction.shapes if context.slots in shape.dims)
      return Work(bytes=traffic + written, rest=(traffic + written) / (MEMORY * STREAMED)), None
    case 'hopper_compact':
      kept = next(shape for shape in operands[3:] if len(shape.dims) == 2)
      D = operands[0].dims[-1]
      least = eviction.compact_cost(
        1, kept.dims[0], kept.dims[1], D, 'uint8' if operands[0].dtype in ('u8', 'f8e4m3fn') else 'bfloat16'
      )
      return Work(bytes=context.filled * least.bytes, rest=context.filled * least.bytes / (MEMORY * MOVED)), None
    case 'hopper_similarity':
      return similarity(operands, context, traffic), None
  return Work(bytes=traffic, rest=traffic / (MEMORY * STREAMED)), None


def attention(operands: Sequence[Shape], results: Sequence[Shape], context: Context) -> Work:
  """Return the work of decode attention. It moves the occupied slots of the cache, and its other operands and results."""
  occupied, cache = context.length / context.slots, operands[1]
  traffic, stored = 0.0, 0.0
  for shape in operands:
    slots = context.slots in shape.dims
    traffic += shape.bytes * (occupied if slots else 1)
    stored += shape.bytes / shape.dims[0] / context.slots * BLOCK if slots else 0
  (N, S, D), second = cache.dims, sum(context.slots in shape.dims for shape in operands) > 2
  share = any(len(shape.dims) == 2 and shape.dims[-1] >= S for shape in results)
  plan = attention_launch.launch(N, S, D, 'float8_e4m3fn' if cache.dtype == 'f8e4m3fn' else 'bfloat16', share, second)
  # Results of 4 or 5 dimensions are partial. A team with one row (a kv head of a sequence) per member writes none of them if its
  # rows have equal lengths.
  traffic += sum(shape.bytes for shape in results if len(shape.dims) < 4 or plan.rows < plan.members)
  kernel = context.kernels.get('hopper_decode_attention')
  timed = kernel is not None and kernel.sass is not None and kernel.sass.loop
  loop = kernel_loop(kernel) if kernel is not None and timed else Loop(2, 0.0, 0.0)
  lengths = [math.ceil(context.length)] * N
  return Work(bytes=traffic, attention=attention_launch.seconds(plan, lengths, traffic, stored, loop))


def similarity(operands: Sequence[Shape], context: Context, traffic: float) -> Work:
  """Return the work of comparing the keys of due rows: the loop of `hopper_similarity` compares 64 keys with 64 others."""
  (entries, S, D), traffic = operands[0].dims[-3:], context.filled * traffic
  kernel = context.kernels.get('hopper_similarity')
  if kernel is not None and kernel.sass is not None and kernel.sass.loop:
    working = loop_seconds(kernel, context.filled * entries * math.ceil(S / KEYS) ** 2)
  else:
    working = 2 * context.filled * entries * S * S * D / (COMPARED * BF16)
  return Work(bytes=traffic, rest=max(traffic / MEMORY, working))


def loop_seconds(kernel: Kernel, iterations: float) -> float:
  """Return the least seconds in which all multiprocessors together run a kernel's main loop `iterations` times."""
  loop = kernel_loop(kernel)
  return iterations * max(loop.issue, loop.chain / loop.resident) / MULTIPROCESSORS


def kernel_loop(kernel: Kernel) -> Loop:
  """Return the resident thread blocks, and two lower bounds of the seconds of an iteration of a kernel's main loop.

  The bounds are the time in which the four schedulers of a multiprocessor issue, and the latency of dependent instructions.
  """
  assert kernel.sass is not None, 'the caller checks it'
  loop, warps = kernel.sass.loop, kernel.threads / 32
  issue = sum(times * SLOW.get(kind, 1) for kind, times in loop.items()) * warps / 4 / ISSUED
  resident = max(1, min(SHARED[0] // max(1, kernel.shared + 1024), REGISTERS // (kernel.registers * kernel.threads)))
  latency = sum(times * (DEPENDENT + WAIT.get(kind, 0)) for kind, times in loop.items())
  return Loop(resident, issue / CLOCK, latency / CLOCK)


# --- programs --------------------------------------------------------------------------------------------------------


@dataclass
class Walk:
  """Sums the work of a list of thunks.

  `due` is the share of the rows that compress their cache. Loops over due rows process this share of all rows. A conditional
  takes `due` times its longest branch, plus 1 - `due` times its shortest.
  """

  module: Module
  context: Context
  due: float = 0.0
  matmuls: list[Matmul] = field(default_factory=list)

  def work(self, thunks: Sequence[Thunk], graph: bool = False) -> Work:
    """Return the work of thunks that run one after the other."""
    total = Work()
    for thunk in thunks:
      total = total.plus(self._one(thunk, graph))
    return total

  def _one(self, thunk: Thunk, graph: bool) -> Work:
    match thunk.kind:
      case 'CommandBuffer':
        return self.work(thunk.inside, True).plus(Work(graphs=not graph))
      case 'While':
        times, filled = self.iterations(thunk)
        return replace(self, context=self.context._replace(filled=filled)).loop(thunk, times, graph)
      case 'Conditional':
        branches = sorted((self.work(each, graph) for each in thunk.lists.values()), key=lambda work: work.seconds)
        taken = branches[0].plus(branches[0], -self.due).plus(branches[-1], self.due) if branches else Work()
        return taken if graph else taken.plus(Work(host_reads=1))
      case kind if kind in QUIET:
        return self.work(thunk.inside, graph)
    one = Work(launches=1, outside_graphs=not graph)
    instruction = self.module.instructions.get(thunk.name)
    if instruction is None:  # a copy that XLA adds
      return one
    work, found = launch(self.module, instruction, self.context)
    if thunk.kind in ('Copy', 'Memzero', 'Memset32BitValue') and instruction.opcode != 'copy':
      work = Work(bytes=2 * instruction.bytes, rest=2 * instruction.bytes / MEMORY)  # of an instruction with several thunks
    self.matmuls += [found] if found else []
    return one.plus(work)

  def loop(self, thunk: Thunk, times: float, graph: bool = False) -> Work:
    """Return the work of a loop: its iterations, and the condition that ends it."""
    return self._condition(thunk, graph).plus(self.iteration(thunk, graph), times)

  def iteration(self, thunk: Thunk, graph: bool = False) -> Work:
    """Return the work of one iteration of a loop, with its condition."""
    return self.work(thunk.lists.get('body', []), graph).plus(self._condition(thunk, graph))

  def _condition(self, thunk: Thunk, graph: bool) -> Work:
    """Return the work of a loop's condition: nothing if XLA knows the trip count or the loop is in a CUDA graph."""
    if graph or self.module.instructions[thunk.name].trip_count is not None:
      return Work()
    return self.work(thunk.lists.get('condition', []), graph).plus(Work(host_reads=1))

  def iterations(self, thunk: Thunk) -> tuple[int, float]:
    """Return (trip count, 1), or for a loop over due rows: the number of blocks, and the share of their rows that are due."""
    instruction = self.module.instructions[thunk.name]
    if instruction.trip_count is not None:
      return instruction.trip_count, 1.0
    body = self.module.computations[instruction.body]
    moves = [each for each in body.instructions.values() if 'hopper_compact' in each.op_name and each.opcode == 'custom-call']
    blocks = [self.module.instructions[name].shapes[0] for each in moves for name in each.operands]
    rows = [shape.size for shape in blocks if shape.dtype == 's32' and len(shape.dims) == 1]
    due = self.due * self.context.rows
    if due == 0:
      return 0, 1.0
    if not rows:
      raise ValueError(f'{thunk.name}: a loop of unknown trip count without a hopper_compact that takes the indices of due rows')
    times = math.ceil(due / rows[0])
    return times, due / (times * rows[0])


def decode_loop(module: Module, thunks: Sequence[Thunk]) -> Thunk:
  """Return the loop over decode steps: of the outermost loops with a known trip count, the one with the most thunks.

  Rows that compress their caches take their step in another loop. Raises ValueError if no outermost loop has a known trip count.
  """

  def size(thunk: Thunk) -> int:
    return 1 + sum(map(size, thunk.inside))

  loops = [thunk for thunk in _outermost(thunks) if thunk.kind == 'While']
  found = [thunk for thunk in loops if module.instructions[thunk.name].trip_count is not None]
  if not found:
    raise ValueError('no outermost loop has a known trip count; expected the loop over decode steps')
  return max(found, key=size)


def _outermost(thunks: Sequence[Thunk]) -> list[Thunk]:
  return [
    each
    for thunk in thunks
    for each in ([thunk] if thunk.kind not in ('CommandBuffer', 'Sequential') else _outermost(thunk.inside))
  ]


def at_depth(few: Any, more: Any, layers: tuple[int, int], depth: int) -> Any:
  """Extrapolate from programs of two numbers of layers to one of `depth` layers, along the line through both."""
  slope = (depth - layers[0]) / (layers[1] - layers[0])
  if isinstance(few, Work):
    return few.plus(few, -slope).plus(more, slope)
  return few + slope * (more - few)
