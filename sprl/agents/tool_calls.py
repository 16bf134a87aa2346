"""Tool calls in the text of a model, by the name of their format.

`hermes` is the form of Hermes and Qwen models:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OPENING = '<tool_call>'  # of hermes
_HERMES = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
  """One call of a function."""

  name: str
  arguments: dict[str, Any]


def hermes(text: str) -> tuple[str, list[ToolCall]]:
  """Return the text before the first call, and the calls. A text with a malformed call has no calls and is returned as it is."""
  blocks = list(_HERMES.finditer(text))
  calls = [_call(block[1]) for block in blocks]
  if not blocks or None in calls:
    return text, []
  return text[: blocks[0].start()].rstrip(), [call for call in calls if call is not None]


def _call(block: str) -> ToolCall | None:
  try:
    written = json.loads(block)
    json.dumps(written, ensure_ascii=False).encode()  # a response cannot hold half a surrogate pair
  except (ValueError, RecursionError):
    return None
  match written:
    case {'name': str() as name, 'arguments': dict() as arguments}:
      return ToolCall(name, arguments)
  return None


def visible(text: str) -> str:
  """Return the part of an unfinished text that belongs to the content of the message, whatever follows."""
  before, found, _ = text.partition(OPENING)
  if not found:
    cut = next((n for n in range(len(OPENING) - 1, 0, -1) if before.endswith(OPENING[:n])), 0)
    before = before[: len(before) - cut]
  return before.rstrip()


PARSERS: dict[str, Callable[[str], tuple[str, list[ToolCall]]]] = {'hermes': hermes}
