"""The collectives of a compiled program, read from its HLO: their kinds, sizes, and the loops around them.

    found = collectives(jitted.lower(...).compile().as_text())

The text is the program of one device (SPMD), so shapes are those of one device. A collective in a loop is found once.
"""

import math
import re
from dataclasses import dataclass

from sprl.planning.hlo import Instruction, Module, parse

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')


@dataclass(frozen=True)
class Collective:
  """One collective instruction."""

  kind: str  # one of KINDS
  arrays: tuple[int, ...]  # bytes on one device of each result, or of each input of a reduce-scatter
  devices: int  # in one group
  depth: int  # loops around it
  name: str  # JAX's name of the operation

  @property
  def bytes(self) -> int:
    """Bytes of all arrays."""
    return sum(self.arrays)

  @property
  def moved(self) -> float:
    """Bytes that one device sends in a ring."""
    share = (self.devices - 1) / self.devices
    return {'all-reduce': 2 * share, 'collective-permute': 1.0, 'collective-broadcast': 1.0}.get(self.kind, share) * self.bytes


def collectives(text: str) -> list[Collective]:
  """Return the collectives of a compiled program between at least two devices, in the order of its text."""
  module = parse(text)
  depths = _depths(module)
  found = [
    _read(each, depths[computation.name])
    for computation in module.computations.values()
    for each in computation.instructions.values()
    if each.opcode.removesuffix('-start') in KINDS
  ]
  return [each for each in found if each.devices > 1]


def _depths(module: Module) -> dict[str, int]:
  """Return the number of loops around each computation; the largest number, if it has several callers."""
  depths = dict.fromkeys(module.computations, 0)
  for computation in reversed(module.computations.values()):  # the text defines a computation before its callers
    for each in computation.instructions.values():
      for name in each.called:
        depths[name] = max(depths.get(name, 0), depths[computation.name] + (each.opcode == 'while'))
  return depths


def _read(instruction: Instruction, depth: int) -> Collective:
  kind, inputs, shapes = instruction.opcode.removesuffix('-start'), len(instruction.operands), instruction.shapes
  if kind != instruction.opcode and len(shapes) > inputs:  # the result of a start may have the inputs before the outputs
    shapes = shapes[inputs : 2 * inputs]
  devices = _group(instruction.attributes)
  parts = devices if kind == 'reduce-scatter' else 1
  return Collective(kind, tuple(shape.bytes * parts for shape in shapes), devices, depth, instruction.op_name)


def _group(attributes: str) -> int:
  """Return the number of devices in a replica group; 2 for a permutation, or 1 if it moves nothing. Raises ValueError."""
  if pairs := re.search(r'source_target_pairs=\{(.*?)\}\}', attributes):
    return 2 if any(a != b for a, b in re.findall(r'(\d+),(\d+)', pairs[1])) else 1
  # mesh['a'=4,'b'=2] {'a'}; 'a':(2)4 is 4 of axis a
  if mesh := re.search(r'replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}', attributes):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
  if iota := re.search(r'replica_groups=\[\d+,(\d+)\]<=', attributes):  # [groups,devices]<=[...]
    return int(iota[1])
  if groups := re.search(r'replica_groups=\{\{([\d,]*)\}', attributes):  # {{0,1},{2,3}}
    return len(groups[1].split(','))
  raise ValueError(f'found a collective with replica groups in an unknown form: {attributes.strip()}')
