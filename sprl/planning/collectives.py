"""The collectives of a compiled program, read from its HLO: their kinds, sizes, and the loops around them.

    found = collectives(jitted.lower(...).compile().as_text())

The text is the program of one device (SPMD), so shapes are those of one device. A collective in a loop is found once.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
_BITS = {'pred': 8, 'bf16': 16, 'c64': 64, 'c128': 128}  # other names contain their bits: f32, s8, u4, f8e4m3fn

_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) \(.*\{$')
_COLLECTIVE = re.compile(rf'= (.*?) ({"|".join(KINDS)})(-start)?\(')
_ARRAY = re.compile(r'\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]')
_CALLED = re.compile(r'(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')


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
  computation, callers = '', {}  # callers: computation -> [(the computation that calls it, whether as a loop)]
  lines: list[tuple[str, str]] = []
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      computation = match[1]
    called = [(name, role in ('body', 'condition')) for role, name in _CALLED.findall(line)]
    called += [(name.strip().lstrip('%'), False) for names in _BRANCHES.findall(line) for name in names.split(',')]
    for name, loop in called:
      callers.setdefault(name, set()).add((computation, loop))
    if match := _COLLECTIVE.search(line):
      lines.append((computation, line))
  found = [_read(line, _depth(computation, callers)) for computation, line in lines]
  return [each for each in found if each.devices > 1]


def _depth(computation: str, callers: Mapping[str, set[tuple[str, bool]]]) -> int:
  """Number of loops around a computation; the largest, if it has several callers."""
  return max((_depth(caller, callers) + loop for caller, loop in callers.get(computation, ())), default=0)


def _read(line: str, depth: int) -> Collective:
  result, kind, start = _COLLECTIVE.search(line).groups()  # pyright: ignore[reportOptionalMemberAccess]
  sizes = [math.prod(int(n) for n in dims.split(',') if n) * _bits(dtype) // 8 for dtype, dims in _ARRAY.findall(result)]
  if start and result.startswith('(('):  # ((inputs), outputs)
    sizes = sizes[len(sizes) // 2 :]
  elif start and kind != 'all-reduce':  # (input, output, ...): the larger is the whole array
    sizes = [max(sizes)]
  devices = _group(line)
  name = re.search(r'op_name="([^"]*)"', line)
  parts = devices if kind == 'reduce-scatter' else 1
  return Collective(kind, tuple(size * parts for size in sizes), devices, depth, name[1] if name else '')


def _bits(dtype: str) -> int:
  return _BITS.get(dtype) or int(re.search(r'\d+', dtype)[0])  # pyright: ignore[reportOptionalSubscript]


def _group(line: str) -> int:
  """Number of devices in a replica group; 2 for a permutation, or 1 if it moves nothing. Raises ValueError."""
  if pairs := re.search(r'source_target_pairs=\{(.*?)\}\}', line):
    return 2 if any(a != b for a, b in re.findall(r'(\d+),(\d+)', pairs[1])) else 1
  if mesh := re.search(r'replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}', line):  # mesh['a'=4,'b'=2] {'a'}; 'a':(2)4 is 4 of axis a
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
  if iota := re.search(r'replica_groups=\[\d+,(\d+)\]<=', line):  # [groups,devices]<=[...]
    return int(iota[1])
  if groups := re.search(r'replica_groups=\{\{([\d,]*)\}', line):  # {{0,1},{2,3}}
    return len(groups[1].split(','))
  raise ValueError(f'found a collective with replica groups in an unknown form: {line.strip()}')
