"""Conversations as token ids, where no text is encoded twice (docs/methods/async.md, Environments).

The model's tokens stay as they are. Between two answers stands the text that the chat template writes there: the end of the first
answer's turn, the environment's messages, and the beginning of the next answer. These ids are found once per turn, by rendering a
conversation in which a marker stands for the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sprl.io.tokenizer import Tokenizer, TokenizerError

MARK = '\x02answer\x03'  # no chat template writes this


@dataclass(frozen=True)
class ChatCodec:
  """Encodes messages with the tokenizer's chat template, after a `system` message if there is one.

  Raises TokenizerError if the template cannot continue a conversation.
  """

  tokenizer: Tokenizer
  system: str | None = None

  def __post_init__(self):
    self._between([{'role': 'user', 'content': 'go on'}])

  def opening(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """The ids before the first answer. `tools` and `template_args` are those of `Tokenizer.render`."""
    return self.tokenizer.chat([*self._first(), *messages], tools=tools, template_args=template_args)

  def reply(
    self,
    messages: Sequence[Mapping[str, Any]],
    answer: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """The ids between an answer and the next. If the answer has the token that ends its turn, the ids begin after it."""
    ids = self.tokenizer.encode(self._between(messages, tools, template_args))
    return ids[1:] if ids and answer and answer[-1] == ids[0] else ids

  def text(self, ids: Sequence[int]) -> str:
    """The text of an answer, without special tokens."""
    return self.tokenizer.decode(ids, skip_special=True)

  def _first(self) -> list[Mapping[str, Any]]:
    return [] if self.system is None else [{'role': 'system', 'content': self.system}]

  def _between(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
  ) -> str:
    start = [*self._first(), {'role': 'user', 'content': '.'}, {'role': 'assistant', 'content': MARK}]
    parts = self.tokenizer.render([*start, *messages], tools=tools, template_args=template_args).split(MARK)
    if len(parts) != 2:
      raise TokenizerError(
        f'{self.tokenizer.folder}: the chat template writes an earlier answer {len(parts) - 1} times, expected once'
      )
    return parts[1]


@dataclass(frozen=True)
class PlainCodec:
  """Encodes each message as a line of plain text, for models without a chat template."""

  tokenizer: Tokenizer

  def opening(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids before the first answer."""
    return self.tokenizer.prompt(''.join(m['content'] + '\n' for m in messages))

  def reply(self, messages: Sequence[Mapping[str, str]], answer: Sequence[int]) -> list[int]:
    """The ids between an answer and the next."""
    return self.tokenizer.encode('\n' + ''.join(m['content'] + '\n' for m in messages))

  def text(self, ids: Sequence[int]) -> str:
    """The text of an answer, without special tokens."""
    return self.tokenizer.decode(ids, skip_special=True)
