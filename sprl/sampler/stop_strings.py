"""Find stop strings in a growing completion without decoding most of its tokens.

The last character of a stop string comes from a new token. Few tokens of a vocabulary contain that character, so most chunks need
no text. Each token id is decoded once per run to find whether a stop string can end in it. If one can, the new tokens are decoded
together with as many earlier tokens as the longest stop string can have.
"""

from collections.abc import Callable, Sequence

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

  def cut(self, ids: Sequence[int], new: int) -> int | None:
    """Return the number of tokens up to the end of the first stop string, or None if the text contains none.

    The last `new` tokens of `ids` are new. The text of the tokens before them contains no stop string.
    """
    if new <= 0 or not any(map(self._can_end, ids[-new:])):
      return None
    start = max(len(ids) - new - self._longest, 0)
    if not self._in(ids[start:]):
      return None
    low, high = len(ids) - new + 1, len(ids)  # a longer prefix contains the text of a shorter one, so bisect
    while low < high:
      middle = (low + high) // 2
      if self._in(ids[start:middle]):
        high = middle
      else:
        low = middle + 1
    return low

  def _in(self, ids: Sequence[int]) -> bool:
    text = self._text(ids)
    return any(s in text for s in self._stop)

  def _can_end(self, token: int) -> bool:
    if (known := self._ends.get(token)) is None:
      text = self._text([token, token])  # twice, because a decoder may drop a space before the first token
      # A token with a part of a character may complete a character that earlier tokens began.
      known = self._ends[token] = not text or INCOMPLETE in text or any(s[-1] in text for s in self._stop)
    return known
