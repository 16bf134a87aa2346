"""What a compiled program sends between devices, read off its HLO: which collectives, how large, how deep within loops.

    found = collectives(jitted.lower(...).compile().as_text())

The text is that of one device's program (SPMD), so shapes are a device's own. A loop's body counts once, whatever its trips.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
_BITS = {'pred': 8, 'bf16': 16, 'c64': 64, 'c128': 128}  # others tell theirs: f32, s8, u4, f8e4m3fn

_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) \(.*\{$')
_COLLECTIVE = re.compile(rf'= (.*?) ({"|".join(KINDS)})(?:-start)?\(')
_ARRAY = re.compile(r'\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]')
_CALLED = re.compile(r'(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')


@dataclass(frozen=True)
class Collective:
  """One instruction."""

  kind: str  # of KINDS
  arrays: tuple[int, ...]  # bytes of each of its results on one device; of a reduce-scatter, of what goes in
  devices: int  # that take part in it together
  depth: int  # loops around it
  dtypes: tuple[str, ...]  # of the arrays in it, in HLO's names
  name: str  # what JAX called the operation that it came of

  @property
  def bytes(self) -> int:
    """Of all its results."""
    return sum(self.arrays)

  @property
  def moved(self) -> float:
    """Bytes that a device sends, where devices pass parts on in a ring."""
    share = (self.devices - 1) / self.devices
    return {'all-reduce': 2 * share, 'collective-permute': 1.0, 'collective-broadcast': 1.0}.get(self.kind, share) * self.bytes


def collectives(text: str) -> list[Collective]:
  """The collectives of a compiled program, in the order of its text; those among one device alone are none."""
  computation, inside, entry = '', {}, ''
  lines: dict[str, list[str]] = {}
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      computation = match[1]
      entry = computation if line.startswith('ENTRY') else entry
      lines[computation] = []
    elif computation:
      lines[computation].append(line)
  for caller, body in lines.items():
    for line in body:
      called = [(name, role in ('body', 'condition')) for role, name in _CALLED.findall(line)]
      called += [(name.strip().lstrip('%'), False) for names in _BRANCHES.findall(line) for name in names.split(',')]
      for name, loop in called:
        inside.setdefault(name, set()).add((caller, loop))
  return [
    found
    for computation, body in lines.items()
    for line in body
    if (match := _COLLECTIVE.search(line)) and (found := _read(line, match, _depth(computation, inside, entry))).devices > 1
  ]


def by_kind(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
  """Of each kind: how many (`count`), their results' `bytes` and what a device sends of them (`moved`)."""
  table: dict[str, dict[str, float]] = {}
  for each in found:
    row = table.setdefault(each.kind, {'count': 0.0, 'bytes': 0.0, 'moved': 0.0})
    row['count'] += 1
    row['bytes'] += each.bytes
    row['moved'] += each.moved
  return table


def _depth(computation: str, inside: Mapping[str, set[tuple[str, bool]]], entry: str) -> int:
  """The loops around a computation; of several callers, the most."""
  callers = inside.get(computation, set())
  return max((_depth(caller, inside, entry) + loop for caller, loop in callers), default=0)


def _read(line: str, match: re.Match, depth: int) -> Collective:
  kind, arrays = match[2], _ARRAY.findall(match[1])
  sizes = [math.prod(int(n) for n in dims.split(',') if n) * _bits(dtype) // 8 for dtype, dims in arrays]
  if f'{kind}-start(' in line and match[1].startswith('(('):  # ((what goes in), what comes out): as many of each
    sizes, arrays = sizes[len(sizes) // 2 :], arrays[len(arrays) // 2 :]
  elif f'{kind}-start(' in line and kind != 'all-reduce':  # (what goes in, what comes out, ...): the larger half is meant
    sizes, arrays = [max(sizes)], arrays[:1]
  devices = _devices(line)
  name = re.search(r'op_name="([^"]*)"', line)
  parts = devices if kind == 'reduce-scatter' else 1
  dtypes = tuple(sorted({dtype for dtype, _ in arrays}))
  return Collective(kind, tuple(size * parts for size in sizes), devices, depth, dtypes, name[1] if name else '')


def _bits(dtype: str) -> int:
  return _BITS.get(dtype) or int(re.search(r'\d+', dtype)[0])  # pyright: ignore[reportOptionalSubscript]


def _devices(line: str) -> int:
  """The size of a replica group, in any of the ways that HLO writes one; of a permute 2, or 1 where nothing moves."""
  if pairs := re.search(r'source_target_pairs=\{(.*?)\}\}', line):
    ends = re.findall(r'(\d+),(\d+)', pairs[1])
    return 2 if any(a != b for a, b in ends) else 1
  if mesh := re.search(r'replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}', line):  # mesh['a'=4,'b'=2] {'a'}
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    # 'a':(2)4 is a part of axis a, four devices of it
    return math.prod(int(part[2]) if part[2] else sizes[part[1]] for part in re.finditer(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
  if iota := re.search(r'replica_groups=\[(\d+),(\d+)\]<=', line):  # [groups,devices]<=[...]
    return int(iota[2])
  if groups := re.search(r'replica_groups=\{\{([\d,]*)\}', line):  # {{0,1},{2,3}}
    return len(groups[1].split(','))
  raise ValueError(f'a collective whose replica groups are written in another way: {line.strip()}')
