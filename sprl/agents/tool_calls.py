"""Tool calls in the text of a model, in the form of Hermes and Qwen models.

A call of add(1, 2), for example:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OPENING = '<tool_call>'
_CALL = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
  """One call of a function."""

  name: str
  arguments: dict[str, Any]


def tool_calls(text: str) -> tuple[str, list[ToolCall]]:
  """Return the text before the first call, and the calls. A text with a malformed call has no calls and is returned as it is."""
  blocks = list(_CALL.finditer(text))
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
  return before(text, [OPENING]).rstrip()


def before(text: str, marks: Sequence[str]) -> str:
  """Return the part of an unfinished text that no mark can be in, whatever follows: its end may begin a mark."""
  begun = [n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])]
  return cut(text, marks)[: len(text) - max(begun, default=0)]


def cut(text: str, marks: Sequence[str]) -> str:
  """Return the part of a text before the first mark."""
  return text[: min([text.index(mark) for mark in marks if mark in text], default=len(text))]
