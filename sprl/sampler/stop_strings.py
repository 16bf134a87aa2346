"""Find stop strings in the text of a completion that grows, without decoding most of its tokens.

The last character of a stop string comes from a new token. Few tokens of a vocabulary have that character, so most chunks need no
text: each token is decoded once in a run, to find out whether a stop string can end in it. Otherwise the new tokens are decoded
together with as many tokens before them as the longest stop string can have.
"""

from collections.abc import Callable, Sequence

INCOMPLETE = '\ufffd'  # stands in a text for bytes that are no character


class StopStrings:
  """The stop strings of an engine.

  Args:
    stop: the strings; none may be empty.
    text: decodes token ids. Bytes that are no character give U+FFFD or no text.
  """

  def __init__(self, stop: Sequence[str], text: Callable[[Sequence[int]], str]):
    self._stop, self._text = tuple(stop), text
    self._longest = max((len(s.encode()) for s in stop), default=0)  # in tokens too: a token is at least one byte
    self._ends: dict[int, bool] = {}  # by token id: whether a stop string can end in the token

  def cut(self, ids: Sequence[int], new: int) -> int | None:
    """Return the number of tokens up to the end of the first stop string; None if the text contains none.

    The last `new` tokens are new. The text of the tokens before them contains no stop string.
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
      # A token with a part of a character may complete one that other tokens began.
      known = self._ends[token] = not text or INCOMPLETE in text or any(s[-1] in text for s in self._stop)
    return known
