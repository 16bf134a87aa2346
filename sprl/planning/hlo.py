"""Read the text of a compiled program (HLO): its computations, their instructions, and the bytes that an instruction moves.

    module = parse(compiled.text)
    for instruction in module.entry.instructions.values():
      print(instruction.name, moved(module, instruction))

The bytes of a fusion follow from its computation. If only slices or gathers read an array, the elements that they read count. If
an update or a scatter overwrites an array in place, the elements that it writes count.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

_BITS = {'pred': 8, 'bf16': 16, 'c64': 64, 'c128': 128, 'token': 0, 'opaque': 0}  # other names contain their bits: f32, f8e4m3fn
_ARRAY = re.compile(r'\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,]*)\]')
_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
_LINE = re.compile(r'^\s+(ROOT )?%([\w.\-]+) = (.*)$')
_NAME = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(r'\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')

# Operations that read at most as many elements of their first operand as their result has.
_SLICES = ('dynamic-slice', 'slice', 'gather')
_UPDATES = ('dynamic-update-slice', 'scatter')
_WHOLE = ('reduce', 'reduce-window', 'dot', 'sort', 'custom-call', 'broadcast', 'concatenate', 'pad', 'iota')


class Shape(NamedTuple):
  """The dtype and the dimensions of an array."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Number of bytes."""
    return self.size * (_BITS[self.dtype] if self.dtype in _BITS else int(re.findall(r'\d+', self.dtype)[0])) // 8


@dataclass(frozen=True)
class Instruction:
  """An instruction of a computation."""

  name: str
  shapes: tuple[Shape, ...]  # of the result; several for a tuple
  opcode: str
  operands: tuple[str, ...]  # names
  argument: str  # the text between the parentheses
  attributes: str  # the text after the closing parenthesis
  is_tuple: bool = False

  @property
  def bytes(self) -> int:
    """Bytes of the result."""
    return sum(shape.bytes for shape in self.shapes)

  @property
  def size(self) -> int:
    """Elements of the result."""
    return sum(shape.size for shape in self.shapes)

  @property
  def op_name(self) -> str:
    """JAX's name of the operation: its scopes, then its primitive; '' if XLA added the instruction."""
    return self._find(r'op_name="([^"]*)"')

  @property
  def target(self) -> str:
    """The function that a custom call calls; '' for other instructions."""
    return self._find(r'custom_call_target="([^"]*)"')

  @property
  def trip_count(self) -> int | None:
    """The number of iterations of a loop, if XLA knows it."""
    found = self._find(r'"known_trip_count":\{"n":"(\d+)"\}')
    return int(found) if found else None

  @property
  def index(self) -> int:
    """The number of a parameter, or of the element that a get-tuple-element takes."""
    return int(self.argument) if self.opcode == 'parameter' else int(self._find(r'\bindex=(\d+)'))

  @property
  def body(self) -> str:
    """The name of a loop's body."""
    return self._find(r'\bbody=%?([\w.\-]+)')

  @property
  def called(self) -> tuple[str, ...]:
    """The names of the computations that the instruction calls."""
    names = [name for _, name in _CALLED.findall(self.attributes)]
    names += [each.strip().lstrip('%') for group in _BRANCHES.findall(self.attributes) for each in group.split(',')]
    return tuple(names)

  @property
  def aliased(self) -> tuple[tuple[int, int], ...]:
    """Pairs (result, operand) of a custom call that share memory."""
    text = self._find(r'output_to_operand_aliasing=\{(.*?\)\})')
    return tuple((int(out or 0), int(operand)) for out, operand in re.findall(r'\{(\d*)\}: \((\d+)', text))

  def _find(self, pattern: str) -> str:
    match = re.search(pattern, self.attributes)
    return match[1] if match else ''


@dataclass(frozen=True)
class Computation:
  """A named list of instructions, in the order of their execution."""

  name: str
  instructions: dict[str, Instruction] = field(default_factory=dict)
  roots: list[str] = field(default_factory=list)  # the name of the root instruction

  @property
  def root(self) -> Instruction:
    """The instruction whose result is the result of the computation."""
    return self.instructions[self.roots[0]]

  @cached_property
  def parameters(self) -> tuple[Instruction, ...]:
    """The parameters, in order."""
    return tuple(sorted((i for i in self.instructions.values() if i.opcode == 'parameter'), key=lambda i: i.index))

  @cached_property
  def users(self) -> Mapping[str, list[tuple[Instruction, int]]]:
    """The instructions that read each instruction, with the operand's number."""
    found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
    for each in self.instructions.values():
      for number, name in enumerate(each.operands):
        if name in found:
          found[name].append((each, number))
    return found


@dataclass(frozen=True)
class Module:
  """A program."""

  computations: dict[str, Computation]
  entry: Computation

  @cached_property
  def instructions(self) -> dict[str, Instruction]:
    """All instructions, by name. Names are unique in a program."""
    return {name: each for computation in self.computations.values() for name, each in computation.instructions.items()}

  @cached_property
  def home(self) -> dict[str, Computation]:
    """The computation of each instruction."""
    return {name: computation for computation in self.computations.values() for name in computation.instructions}

  def fused(self, instruction: Instruction) -> Computation | None:
    """The computation of a fusion; None for other instructions."""
    return self.computations[instruction.called[0]] if instruction.opcode == 'fusion' else None

  def inner(self, instruction: Instruction, opcode: str) -> list[Instruction]:
    """The instructions of this opcode that an instruction executes: itself, or those of its fusion."""
    fused = self.fused(instruction)
    return [i for i in (fused.instructions.values() if fused else (instruction,)) if i.opcode == opcode]

  def operands(self, instruction: Instruction) -> list[Instruction]:
    """The instructions that the operands name."""
    return [self.instructions[name] for name in instruction.operands]


def parse(text: str) -> Module:
  """Return the program of an HLO text. Raises ValueError if the text has no entry computation."""
  computations: dict[str, Computation] = {}
  current = entry = None
  for line in text.splitlines():
    if match := _HEAD.match(line):
      current = computations[match[2]] = Computation(match[2])
      entry = current if match[1] else entry
    elif current is not None and (match := _LINE.match(line)):
      current.instructions[match[2]] = _instruction(match[2], match[3])
      if match[1]:
        current.roots.append(match[2])
  if entry is None:
    raise ValueError('found no ENTRY in the text: expected the HLO of a compiled program')
  return Module(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
  is_tuple = text.startswith('(')
  end = _closing(text, 0) + 1 if is_tuple else text.index(' ')
  shapes = tuple(Shape(kind, tuple(int(n) for n in dims.split(',') if n)) for kind, dims in _ARRAY.findall(text[:end]))
  opened = text.index('(', end)
  closed = _closing(text, opened)
  opcode, argument = text[end:opened].strip(), text[opened + 1 : closed]
  operands = tuple(_NAME.findall(argument)) if opcode not in ('constant', 'parameter') else ()
  return Instruction(name, shapes, opcode, operands, argument, text[closed + 1 :], is_tuple)


def _closing(text: str, opened: int) -> int:
  """Return the position of the parenthesis that closes the one at `opened`."""
  depth = 0
  for match in re.compile(r'[()]').finditer(text, opened):
    depth += 1 if match[0] == '(' else -1
    if depth == 0:
      return match.start()
  raise ValueError(f'found a parenthesis without an end in {text[:200]!r}')


class Moved(NamedTuple):
  """Bytes that an instruction reads and writes."""

  read: int
  written: int

  @property
  def total(self) -> int:
    """Bytes read and written."""
    return self.read + self.written


def moved(module: Module, instruction: Instruction) -> Moved:
  """Return the bytes that an instruction reads and writes.

  Each operand and each result counts once, without the elements that the instruction does not touch.
  """
  operands = module.operands(instruction)
  if fused := module.fused(instruction):
    shares = _shares(fused)
    read = sum(round(shares[inner.name] * inner.bytes) for inner in fused.parameters)
    return Moved(read, _written(fused, fused.root))
  if instruction.opcode in _SLICES:
    return Moved(instruction.bytes + sum(each.bytes for each in operands[1:]), instruction.bytes)
  if instruction.opcode in _UPDATES:
    updates = _updates(instruction, module.instructions)
    return Moved(updates + sum(each.bytes for each in operands[1:] if each.size < 4096), updates)
  kept = instruction.aliased  # a custom call may update a part of such an array; the caller must add that part
  read = sum(each.bytes for number, each in enumerate(operands) if number not in {operand for _, operand in kept})
  written = sum(shape.bytes for number, shape in enumerate(instruction.shapes) if number not in {out for out, _ in kept})
  return Moved(read, written)


def _shares(fused: Computation) -> dict[str, float]:
  """Return the share of each value's elements that the instructions of a fusion read."""
  shares: dict[str, float] = {}
  for value in reversed(fused.instructions.values()):  # an instruction comes after its operands
    uses = (_use(value, user, number, shares[user.name]) for user, number in fused.users[value.name])
    shares[value.name] = 1.0 if value.name == fused.root.name else min(1.0, sum(uses))
  return shares


def _use(value: Instruction, user: Instruction, number: int, share: float) -> float:
  """Return the share of a value that one user reads to compute `share` of its result."""
  if user.opcode in _UPDATES and number == 0:
    return 0.0  # in place
  if user.opcode in _SLICES and number == 0:
    return share * user.size / value.size
  elementwise = user.opcode not in (*_WHOLE, *_SLICES, *_UPDATES) and user.size >= value.size
  return share if elementwise else float(share > 0)


def _written(fused: Computation, root: Instruction) -> int:
  """Return the bytes that a fusion writes as the value `root`."""
  if root.opcode == 'tuple':
    return sum(_written(fused, fused.instructions[name]) for name in root.operands)
  if root.opcode in _UPDATES:
    return _updates(root, fused.instructions)
  if root.opcode in ('bitcast', 'reshape') and root.operands:
    return _written(fused, fused.instructions[root.operands[0]])
  return root.bytes


def _updates(instruction: Instruction, named: Mapping[str, Instruction]) -> int:
  """Return the bytes of the elements that an update writes."""
  if instruction.opcode == 'dynamic-update-slice':
    return named[instruction.operands[1]].bytes
  count = (len(instruction.operands) - 1) // 2  # scatter(arrays, indices, updates)
  return sum(named[name].bytes for name in instruction.operands[count + 1 :])


class Product(NamedTuple):
  """A matrix product: `batch` products of [M, K] and [N, K]."""

  M: int
  N: int
  K: int
  batch: int = 1

  @property
  def flops(self) -> int:
    """Operations."""
    return 2 * self.batch * self.M * self.N * self.K


def product(module: Module, dot: Instruction) -> Product:
  """Return the sizes of a `dot`. M is the smaller side: the tokens, if there are fewer tokens than rows of the weight."""
  left, right = (module.instructions[name].shapes[0].dims for name in dot.operands)
  batch = math.prod(left[i] for i in _dims(dot, 'lhs_batch_dims'))
  K = math.prod(left[i] for i in _dims(dot, 'lhs_contracting_dims'))
  M, N = (math.prod(dims) // (batch * K) for dims in (left, right))
  return Product(min(M, N), max(M, N), K, batch)


def _dims(dot: Instruction, name: str) -> list[int]:
  match = re.search(rf'\b{name}=\{{([\d,]*)\}}', dot.attributes)
  return [int(n) for n in match[1].split(',') if n] if match else []


def invariant(body: Computation) -> set[str]:
  """Return the names of the values of a loop's body that are equal in every iteration: the body returns them unchanged."""
  root, elements = body.root, {i.name: i for i in body.instructions.values() if i.opcode == 'get-tuple-element'}
  passed = {name for number, name in enumerate(root.operands) if name in elements and elements[name].index == number}
  kept = {elements[name].index for name in passed} if root.opcode == 'tuple' else set()
  argument = body.parameters[0].name
  found = {name for name, i in elements.items() if i.operands[0] == argument and i.index in kept}
  for each in body.instructions.values():  # views of these values
    if each.opcode == 'bitcast' and each.operands[0] in found:
      found.add(each.name)
  return found


class Prepared(NamedTuple):
  """Work that a loop repeats in every iteration on arrays that no iteration changes, such as weights."""

  launched: tuple[Instruction, ...]  # launches that only convert, concatenate or copy such arrays
  fused: tuple[Instruction, ...]  # conversions and concatenations of such arrays inside of products


def prepared(module: Module, body: Computation, least: int = 65536) -> Prepared:
  """Return the work of a loop's body on invariant arrays of at least `least` bytes, which could be done once, before the loop."""
  constant, launched, fused = invariant(body), [], []
  for each in body.instructions.values():
    if each.opcode in ('bitcast', 'tuple', 'get-tuple-element', 'parameter', 'while', 'conditional', 'custom-call'):
      continue
    inside = module.fused(each)
    shares = _shares(inside) if inside else {}
    whole = [not inside or shares[inner.name] == 1 for inner in inside.parameters] if inside else [True] * len(each.operands)
    large = [number for number, operand in enumerate(module.operands(each)) if operand.bytes >= least]
    fixed = [number for number in large if each.operands[number] in constant and whole[number]]
    if module.inner(each, 'dot'):
      weights = {inside.parameters[number].name for number in fixed} if inside else set()
      fused += (
        [i for i in inside.instructions.values() if i.opcode in ('convert', 'concatenate') and weights & {*i.operands}]
        if inside
        else []
      )
    elif fixed and fixed == large and each.bytes >= least:
      launched.append(each)
  return Prepared(tuple(launched), tuple(fused))
