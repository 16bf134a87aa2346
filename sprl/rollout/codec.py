"""A conversation as ids, without encoding anything twice (async_rollouts 6).

What the model wrote stays as it wrote it. Between one answer and the next stands what the chat template writes there: the end of
the answer's turn, the environment's messages, the beginning of the next answer. Those ids are found once for each turn, from a
conversation in which a mark stands for the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sprl.io.tokenizer import Tokenizer, TokenizerError

MARK = '\x02answer\x03'  # no template writes this


@dataclass(frozen=True)
class ChatCodec:
  """Messages through the tokenizer's chat template, after a `system` message if there is one.

  Raises TokenizerError where the template cannot continue a conversation.
  """

  tokenizer: Tokenizer
  system: str | None = None

  def __post_init__(self):
    self._between([{'role': 'user', 'content': 'go on'}])

  def opening(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids up to where the first answer begins."""
    return self.tokenizer.chat([*self._first(), *messages])

  def reply(self, messages: Sequence[Mapping[str, str]], answer: Sequence[int]) -> list[int]:
    """The ids between an answer and the next. An answer that ended its turn itself is not ended again."""
    ids = self.tokenizer.encode(self._between(messages))
    return ids[1:] if ids and answer and answer[-1] == ids[0] else ids

  def text(self, ids: Sequence[int]) -> str:
    """What an answer says."""
    return self.tokenizer.decode(ids, skip_special=True)

  def _first(self) -> list[Mapping[str, str]]:
    return [] if self.system is None else [{'role': 'system', 'content': self.system}]

  def _between(self, messages: Sequence[Mapping[str, str]]) -> str:
    start = [*self._first(), {'role': 'user', 'content': '.'}, {'role': 'assistant', 'content': MARK}]
    parts = self.tokenizer.render([*start, *messages]).split(MARK)
    if len(parts) != 2:
      raise TokenizerError(
        f'{self.tokenizer.folder}: the chat template writes an earlier answer {len(parts) - 1} times, expected once'
      )
    return parts[1]


@dataclass(frozen=True)
class PlainCodec:
  """Texts as they are, a line each, for models without a chat template."""

  tokenizer: Tokenizer

  def opening(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids up to where the first answer begins."""
    return self.tokenizer.encode(''.join(m['content'] + '\n' for m in messages))

  def reply(self, messages: Sequence[Mapping[str, str]], answer: Sequence[int]) -> list[int]:
    """The ids between an answer and the next."""
    return self.tokenizer.encode('\n' + ''.join(m['content'] + '\n' for m in messages))

  def text(self, ids: Sequence[int]) -> str:
    """What an answer says."""
    return self.tokenizer.decode(ids, skip_special=True)
