"""Find stop strings in a growing completion without decoding most of its tokens.

The last character of a stop string comes from a new token. Few tokens of a vocabulary contain that character, so most chunks need
no text. Each token id is decoded once per run to find whether a stop string can end in it. If one can, the new tokens are decoded
together with as many earlier tokens as the longest stop string can have.

Decoders with byte fallback (Llama 2, Mistral, Gemma) write a character that is not in the vocabulary as a token for each byte.
They replace all bytes of a run by U+FFFD until the run is valid UTF-8. So a run is decoded from its first byte, and where there
are bytes every prefix is looked at.
"""

from collections.abc import Callable, Sequence

LONGEST_RUN = 256  # bytes that are decoded to find where a run of them begins: text has no longer ones
INCOMPLETE = '\ufffd'  # replaces bytes that are not a character in decoded text


class StopStrings:
  """The stop strings of an engine.

  Args:
    stop: the strings; none may be empty.
    text: function that decodes token ids. It returns U+FFFD or no text for bytes that are not a character.
  """

  def __init__(self, stop: Sequence[str], text: Callable[[Sequence[int]], str]):
    self._stop, self._text = tuple(stop), text
    self._longest = max((len(s.encode()) for s in stop), default=0)  # also bounds the tokens: each has at least one byte
    self._ends: dict[int, bool] = {}  # by token id: whether a stop string can end in the token
    self._parts: dict[int, bool] = {}  # by token id: whether it may be a part of a character

  def cut(self, ids: Sequence[int], new: int) -> int | None:
    """Return the number of tokens up to the end of the first stop string, or None if the text contains none.

    The last `new` tokens of `ids` are new. The text of the tokens before them contains no stop string.
    """
    if new <= 0 or not any(map(self._can_end, ids[-new:])):
      return None
    start = max(len(ids) - new - self._longest, 0)
    furthest = max(start - LONGEST_RUN, 0)
    while start > furthest and self._is_part(ids[start]):
      start -= 1
    first, last = len(ids) - new + 1, len(ids)
    if any(map(self._is_part, ids[start:])):  # the text of a longer prefix may lack characters of a shorter one
      return next((end for end in range(first, last + 1) if self._in(ids[start:end])), None)
    if not self._in(ids[start:]):
      return None
    while first < last:  # a longer prefix contains the text of a shorter one, so bisect
      middle = (first + last) // 2
      if self._in(ids[start:middle]):
        last = middle
      else:
        first = middle + 1
    return first

  def _in(self, ids: Sequence[int]) -> bool:
    text = self._text(ids)
    return any(s in text for s in self._stop)

  def _can_end(self, token: int) -> bool:
    if (known := self._ends.get(token)) is None:
      text = self._text([token, token])  # twice, because a decoder may drop a space before the first token
      self._parts[token] = not text or INCOMPLETE in text
      # A token with a part of a character may complete a character that earlier tokens began.
      known = self._ends[token] = self._parts[token] or any(s[-1] in text for s in self._stop)
    return known

  def _is_part(self, token: int) -> bool:
    self._can_end(token)
    return self._parts[token]
