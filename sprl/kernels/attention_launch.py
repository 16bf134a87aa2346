"""The launch of decode attention on a Hopper GPU, and a model of its time.

A row here is one kv head of one sequence. A team of programs (a cluster) owns a number of rows. A row has parts of equal size.
Each member computes one row, or the members divide the parts of all rows (`shares`). The time of a launch is the sum of

    turns      programs that a multiprocessor runs one after the other: the first copy and the last write of each (FILL)
    meeting    the exchange of partial results, if a team divides its rows (MEET)
    working    the slowest of: bytes at MEMORY, or at what the copies in flight bring per LATENCY; the instructions of all
               programs; and the chain of dependent instructions of the programs that share a multiprocessor, and of the longest

Other programs of the same multiprocessor may hide the start of a program. The model does not count on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from sprl.kernels.launch_model import FILL, LATENCY, MEMORY, MULTIPROCESSORS

QUERIES = 8  # columns of a tensor core product: its minimum, and the largest group that the kernel takes
BLOCK = 64  # slots per step: the tensor core's rows
SECOND = 16  # second codes of a key, if it has any: the inner width of one product
STAGES = 4  # maximum number of blocks in flight
PROGRAMS = 2 * MULTIPROCESSORS  # with fewer rows, every row is divided
TEAM = 4  # programs of a team, unless a row has more
MEMBERS = 8  # maximum number of programs of a team: the largest cluster that every Hopper GPU runs
LEAST = 4  # minimum number of blocks of a part, if every row is divided
LONG = 16  # the same, if a team divides only its long rows
# Programs that share a multiprocessor, bytes of shared memory for each (228 KiB in all, less 1 KiB each), and the fewest stages
# for which that many programs pay off: more programs hide more waiting time, but share the memory for their rings.
SHARED = ((3, 75 * 1024, 3), (2, 113 * 1024, 2), (1, 227 * 1024, 2))
STEP = 1.24e-6  # seconds of a program per FP8 block if two programs share a multiprocessor: measured on an H200
MEET = 1e-6  # seconds for the programs of a team to write partial results, wait and read; an assumption
OVERHEAD = 4096  # upper bound on the bytes of shared memory that Mosaic uses for reductions, barriers and alignment


@dataclass(frozen=True)
class Launch:
  """The kernel's launch parameters for a shape."""

  stages: int  # blocks in flight; 0 if fewer than two fit
  members: int  # programs of a team
  rows: int  # rows of a team: as many as members, or one
  parts: int  # maximum number of parts of a row
  least: int  # minimum number of blocks of a part
  teams: int
  shared: int  # bytes of shared memory per program


def launch(N: int, S: int, D: int, dtype: Any, share: bool, second: bool) -> Launch:
  """Return the launch parameters for N rows of S slots, and heads of width D stored in `dtype`.

  If the rows fill the device, a team shares long rows in bfloat16 only. In FP8 its code needs so many registers (with jax 0.11.2)
  that two programs share a multiprocessor instead of three. Full rows of 4,096 slots then took 31 % longer (docs/kernels.md).
  """
  size, padded = jnp.dtype(dtype).itemsize, up(D, 64)
  stage = BLOCK * (D + padded) * size + (BLOCK * SECOND if second else 0)
  widened = 2 * BLOCK * padded if size == 1 else 0
  scores = 4 * QUERIES * up(S, BLOCK) if share else 0
  fixed = 2 * QUERIES * (padded + SECOND + BLOCK) + widened + scores + OVERHEAD
  fits = [(programs, min(STAGES, (room - fixed) // stage)) for programs, room, least in SHARED if room >= fixed + least * stage]

  def working(fit: tuple[int, int]) -> float:
    programs, _ = fit
    if size > 1:  # bytes bound bfloat16: as many programs as fit
      return 0.0
    return -(-N // (programs * MULTIPROCESSORS)) * max(STEP, programs * stage * MULTIPROCESSORS / MEMORY)

  _, stages = min(fits, key=working, default=(0, 0))
  most = min(PROGRAMS // N, -(-S // (LEAST * BLOCK)))
  parts = next(n for n in (MEMBERS, 4, 2, 1) if n <= max(1, most))
  if share:
    members, rows, parts, least = 1, 1, 1, LEAST
  elif parts > 1:
    members, rows, least = parts, 1, LEAST
  elif S > LONG * BLOCK and size > 1:
    members, rows, parts, least = TEAM, TEAM, TEAM, LONG
  else:
    members, rows, least = 1, 1, LEAST
  return Launch(stages, members, rows, parts, least, -(-N // rows), fixed + stages * stage)


class Loop(NamedTuple):
  """The kernel's loop over blocks, from its machine code."""

  resident: int  # programs that share a multiprocessor
  issue: float  # seconds of a multiprocessor's schedulers per block
  chain: float  # seconds of a program per block, if nothing else runs


def seconds(plan: Launch, lengths: Sequence[int], traffic: float, block: float, loop: Loop) -> float:
  """Return the predicted time of a launch without its start.

  `lengths` are the occupied slots of the rows. The launch moves `traffic` bytes. A block of slots has `block` bytes.
  """
  blocks = [-(-length // BLOCK) for length in lengths]
  blocks += [0] * (plan.teams * plan.rows - len(blocks))
  teams = [blocks[i :: plan.teams] for i in range(plan.teams)]
  work = [shares(plan, team) for team in teams]
  programs, slots = sum(n > 0 for team in work for n in team), MULTIPROCESSORS * loop.resident
  flying = min(programs, slots) * (plan.stages - 1) * block
  working = max(
    traffic / MEMORY,
    traffic * LATENCY / max(1, flying),
    sum(blocks) * loop.issue / MULTIPROCESSORS,
    sum(blocks) * loop.chain / slots,
    max(n for team in work for n in team) * loop.chain,
  )
  return -(-programs // slots) * FILL + MEET * (work != teams) + working


def shares(plan: Launch, blocks: Sequence[int]) -> list[int]:
  """Return the blocks of each member of a team with rows of so many blocks, as the kernel shares them.

  Every member computes one row, unless the team has one row only, or a row has at least twice the mean. Then a member owns the
  parts whose middle lies in its share of all blocks.
  """
  total, members = sum(blocks), plan.members
  if len(blocks) == members and not (max(blocks) > plan.least and max(blocks) * members >= 2 * total):
    return list(blocks)
  found, start = [0] * members, 0
  for n in blocks:
    size = max(plan.least, -(-n // plan.parts))
    for begin in range(0, n, size):
      end = min(begin + size, n)
      found[(2 * start + begin + end) * members // (2 * total)] += end - begin
    start += n
  return found


def up(n: int, multiple: int) -> int:
  """Round n up to a multiple."""
  return -(-n // multiple) * multiple
