"""Stop strings against a search in the whole text after every token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sprl.sampler.stop_strings import INCOMPLETE, StopStrings

# Tokens of one or more bytes. Some are parts of characters, some end one character and begin the next.
VOCABULARY = [
  b'a',
  b'b',
  b' ',
  b'\n',
  b'aa',
  b' b',
  b'ab\n',
  b'\xe7',
  b'\xb5',
  b'\x82',
  b'\x82\xe3',
  b'\x82\x8f',
  b'\xe7\xb5\x82',
]


def decoded(ids):
  return b''.join(VOCABULARY[i] for i in ids).decode(errors='replace')


def without_first_space(ids):
  return decoded(ids).removeprefix(' ')


def with_byte_fallback(ids):
  """Decode as Llama 2's tokenizer: a run of single bytes is text if it is valid UTF-8, else each byte is U+FFFD."""
  text, run = '', b''
  for token in [*(VOCABULARY[i] for i in ids), b'']:
    if len(token) == 1 and token >= b'\x80':
      run += token
      continue
    try:
      text += run.decode()
    except UnicodeDecodeError:
      text += len(run) * INCOMPLETE
    text, run = text + token.decode(errors='replace'), b''
  return text


def whole_search(stop, ids, text):
  """Return the number of tokens up to the first stop string, by the text of every prefix."""
  return next((n for n in range(1, len(ids) + 1) if any(s in text(ids[:n]) for s in stop)), None)


@pytest.mark.parametrize('text', [decoded, without_first_space, with_byte_fallback])
@given(
  ids=st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40),
  stop=st.lists(st.sampled_from(['aab', 'b\n', ' ', 'b a', '終わ', '終', 'わ', 'a終']), min_size=1, max_size=2),
  chunk=st.integers(1, 7),
)
def test_the_first_stop_string_is_found_where_a_whole_search_finds_it(text, ids, stop, chunk):
  found, search = None, StopStrings(stop, text)
  for seen in [*range(chunk, len(ids), chunk), len(ids)]:
    if found is None:
      found = search.cut(ids[:seen], (seen - 1) % chunk + 1 if seen else 0)
  assert found == whole_search(stop, ids, text)


@pytest.mark.parametrize('chunk', range(1, 9))
def test_a_character_in_a_run_of_bytes_is_found_where_it_ends(chunk):
  one, other = [7, 8, 9], [7, 8, 9]  # 終 as three bytes
  ids = [0, *one, *other, *one, 1, 2]
  search, found = StopStrings(('a終終',), with_byte_fallback), None
  for seen in [*range(chunk, len(ids), chunk), len(ids)]:
    found = found or search.cut(ids[:seen], (seen - 1) % chunk + 1)
  assert found == 7


def test_tokens_that_cannot_end_a_stop_string_are_decoded_once():
  calls = []

  def text(ids):
    calls.append(list(ids))
    return decoded(ids)

  search = StopStrings(('b\n',), text)
  for n in range(4, 41, 4):
    assert search.cut([0, 2, 5, 5] * (n // 4), 4) is None
  assert sorted(calls) == [[0, 0], [2, 2], [5, 5]]
