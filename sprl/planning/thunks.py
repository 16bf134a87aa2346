"""Read what a compiled program launches, from XLA's dump of the program's thunks.

A thunk is one kernel launch, one copy, or a list of thunks: the body of a loop, a branch, or a command buffer, which XLA runs as
one CUDA graph. The dump has a line for each thunk. Lists are indented:

    002: kWhile [prev=001 (1) | sink        ]
    condition:
        003: kCustomKernel [source | sink] compare ...
      body:
        000: kCommandBuffer [source | sink]
            004: kCustomKernel [source | next=005 (1)] add ...
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_THUNK = re.compile(r'^( *)(\d+): k(\w+)')
_LABEL = re.compile(r'^( *)([\w ]+):\s*$')
_NAMED = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
CONTROL = ('While', 'Conditional', 'CommandBuffer', 'Sequential')  # lists of thunks
QUIET = (*CONTROL, 'WaitForStreams', 'CopyDone')  # kinds that launch nothing themselves


@dataclass(frozen=True)
class Thunk:
  """A kernel launch, a copy, or lists of thunks."""

  kind: str
  name: str  # of its HLO instruction; '' for a command buffer
  lists: dict[str, list['Thunk']] = field(default_factory=dict)  # a loop's `condition` and `body`, branches; '' otherwise

  @property
  def inside(self) -> list['Thunk']:
    """The thunks of all lists."""
    return [thunk for each in self.lists.values() for thunk in each]


def parse(sequence: str, metadata: str) -> list[Thunk]:
  """Return the thunks of a program from XLA's dumps `thunk_sequence_after_thunk_passes` and `thunk_metadata`."""
  names = {number: name for name, number in _NAMED.findall(metadata)}
  top = Thunk('Sequential', '')
  stack: list[tuple[int, Thunk, str]] = [(-1, top, '')]  # (indentation, thunk, label of its list that is being read)
  for line in sequence.splitlines():
    if match := _THUNK.match(line):
      indent = len(match[1])
      while stack[-1][0] >= indent:
        stack.pop()
      _, parent, label = stack[-1]
      thunk = Thunk(match[3], names.get(str(int(match[2])), '') if match[3] != 'CommandBuffer' else '')
      parent.lists.setdefault(label, []).append(thunk)
      stack.append((indent, thunk, ''))
    elif match := _LABEL.match(line):
      if match[2] != 'condition':  # XLA does not indent this label; it follows the line of its loop
        while stack[-1][0] >= len(match[1]):
          stack.pop()
      indent, thunk, _ = stack.pop()
      stack.append((indent, thunk, match[2]))
  return top.lists.get('', [])


def launches(thunks: Sequence[Thunk], nested: bool = False) -> Iterator[tuple[Thunk, bool]]:
  """Yield (thunk, whether it is in a CUDA graph) for each thunk that launches work.

  The bodies of loops and branches are included only with `nested`. The condition of a loop is always included, because it is
  evaluated at least once.
  """
  yield from _launches(thunks, False, nested)


def _launches(thunks, graph, nested):
  for thunk in thunks:
    if thunk.kind not in QUIET:
      yield thunk, graph
    for label, inside in thunk.lists.items():
      if nested or label == 'condition' or thunk.kind in ('CommandBuffer', 'Sequential'):
        yield from _launches(inside, graph or thunk.kind == 'CommandBuffer', nested)


def find(thunks: Sequence[Thunk], kind: str) -> Iterator[tuple[Thunk, bool]]:
  """Yield (thunk, whether it is in a CUDA graph) for each thunk of a kind, also in loops and branches."""
  yield from _find(thunks, kind, False)


def _find(thunks, kind, graph):
  for thunk in thunks:
    if thunk.kind == kind:
      yield thunk, graph
    yield from _find(thunk.inside, kind, graph or thunk.kind == 'CommandBuffer')


def fragments(thunks: Sequence[Thunk]) -> tuple[int, int]:
  """Return (number of CUDA graphs, launches outside of CUDA graphs) of a list, without the bodies of its loops and branches."""
  graphs = sum(thunk.kind == 'CommandBuffer' for thunk in thunks)
  return graphs, sum(not graph for _, graph in launches(thunks))
