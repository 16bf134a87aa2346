"""Count the instructions of a GPU kernel's machine code (SASS) by class: in the whole kernel, and in the loop that multiplies.

ptxas compiles the kernel, and nvdisasm prints its code. Both are in NVIDIA's CUDA toolkit; nvdisasm is also in the package
nvidia-cuda-nvdisasm.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# An instruction belongs to the first class whose pattern its name starts with.
CLASSES = {
  'matrix': r'[HQI]G?MMA',
  'matrix wait': r'WARPGROUP',
  'barrier': r'BAR\.|SYNCS|WARPSYNC|MEMBAR|FENCE',
  'bulk copy': r'U?TMA|UBLKCP',
  'shared load': r'LDS',
  'shared store': r'STS|STSM',
  'memory load': r'LDG|LD\.|LDL',
  'memory store': r'STG|ST\.|STL|RED|ATOM',
  'conversion': r'F2F|F2I|I2F|FRND|F2IP|I2FP',
  'special': r'MUFU',
  'float': r'F(ADD|MUL|FMA|SEL|SET|MNMX|CHK)|H(ADD|MUL|FMA|SET|MNMX)2',
}
_NAME = re.compile(r'^(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)')
_CODE = re.compile(r'^\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;')
_LABEL = re.compile(r'^(\.L_x_\d+):')
_TARGET = re.compile(r'`\((\.L_x_\d+)\)')


@dataclass(frozen=True)
class Sass:
  """The number of instructions of a warp, by class: a key of `CLASSES`, or 'other'."""

  total: Counter
  loop: Counter  # one iteration of the innermost loop with matrix instructions; empty if there is none


def tool(name: str) -> str | None:
  """Return the path of one of NVIDIA's programs: on PATH, under /usr/local/cuda*, or in a package. None if it is missing."""
  if found := shutil.which(name):
    return found
  places = sorted(Path('/usr/local').glob(f'cuda*/bin/{name}'))
  try:
    package = importlib.util.find_spec('nvidia.cu13')
  except ModuleNotFoundError:
    package = None
  places += [Path(folder) / 'bin' / name for folder in (package.submodule_search_locations or () if package else ())]
  return next((str(path) for path in places if path.exists()), None)


def missing() -> str | None:
  """Return which programs this machine lacks to read SASS, or None."""
  absent = [name for name in ('ptxas', 'nvdisasm') if tool(name) is None]
  return f'{", ".join(absent)} not found: install the packages nvidia-cuda-nvcc and nvidia-cuda-nvdisasm' if absent else None


def disassemble(ptx: str, arch: str = 'sm_90a') -> str:
  """Return the SASS of a PTX text. Requires that `missing` returns None. Raises CalledProcessError if a program fails."""
  assembler, disassembler = tool('ptxas'), tool('nvdisasm')
  assert assembler is not None, '`missing` must return None'
  assert disassembler is not None, '`missing` must return None'
  with tempfile.TemporaryDirectory() as folder:
    source, binary = Path(folder, 'kernel.ptx'), Path(folder, 'kernel.cubin')
    source.write_text(ptx)
    subprocess.run([assembler, f'-arch={arch}', '-o', binary, source], check=True, capture_output=True)
    return subprocess.run([disassembler, '-c', binary], check=True, capture_output=True, text=True).stdout


def count(text: str) -> Sass:
  """Return the instruction counts of one kernel's SASS."""
  blocks, edges = _blocks(text)
  total = _classes(code for block in blocks for code in block)
  heads = _loops(edges)
  multiplying = [loop for loop in heads.values() if _classes(code for b in loop for code in blocks[b])['matrix']]
  if not multiplying:
    return Sass(total, Counter())
  loop = min(multiplying, key=len)
  spins = {b for other in heads.values() if other < loop for b in other}  # loops that wait for a barrier
  return Sass(total, _classes(code for b in sorted(loop - spins) for code in blocks[b]))


def _classes(codes) -> Counter:
  found: Counter = Counter()
  for code in codes:
    name = _NAME.match(code)
    if name is None or name[1] == 'NOP':
      continue
    found[next((kind for kind, pattern in CLASSES.items() if re.match(pattern, name[1])), 'other')] += 1
  return found


def _blocks(text: str) -> tuple[list[list[str]], list[set[int]]]:
  """Return the basic blocks of a kernel and the successors of each."""
  blocks: list[list[str]] = [[]]
  labels: dict[str, int] = {}
  for line in text.splitlines():
    if match := _LABEL.match(line):
      if blocks[-1]:
        blocks.append([])
      labels[match[1]] = len(blocks) - 1
    elif match := _CODE.match(line):
      blocks[-1].append(match[1])
      if re.search(r'\b(BRA|EXIT|RET|BRX|JMP)\b', match[1]):
        blocks.append([])
  edges = []
  for number, block in enumerate(blocks):
    last = block[-1] if block else ''
    targets = {labels[name] for name in _TARGET.findall(last) if name in labels and 'BRA' in last}
    always = not last.startswith('@') and re.search(r'\b(BRA|EXIT|RET|BRX|JMP)\b', last) and 'P' not in last.split('BRA')[-1][:4]
    edges.append(targets | (set() if always or number + 1 == len(blocks) else {number + 1}))
  return blocks, edges


def _loops(edges: list[set[int]]) -> dict[int, set[int]]:
  """Return the natural loops by their head: the head dominates every block of its loop."""
  before: list[set[int]] = [set() for _ in edges]
  for block, targets in enumerate(edges):
    for target in targets:
      before[target].add(block)
  everything = set(range(len(edges)))
  dominators = [{0}] + [set(everything) for _ in edges[1:]]
  changed = True
  while changed:
    changed = False
    for block in range(1, len(edges)):
      new = {block} | (set.intersection(*(dominators[b] for b in before[block])) if before[block] else set())
      changed |= new != dominators[block]
      dominators[block] = new
  found: dict[int, set[int]] = {}
  for block, targets in enumerate(edges):
    for head in targets & dominators[block]:
      loop, todo = found.setdefault(head, {head}), [block]
      while todo:
        if (b := todo.pop()) not in loop:
          loop.add(b)
          todo += before[b]
  return found
