"""Random values, and random changes of bytes, texts and JSON."""

import bisect
import copy
import functools
import json
import math
import random
import re
from typing import Any

TEXTS = (
  '', ' ', 'a', 'None', 'null', 'True', 'nan', 'x' * 300, '0', '-1', '1e400', '../..', '/', '/dev/null', '/no/such/folder',
  'a\nb', '\x00', 'é', '日本', '🙂', 'e\u0301', '\u202e', '\ufeff', '{', '}', '[]', '{{ x }}', '{% for', '%s', '%999999999d',
  '{0}', "'", '"', '\\', '\\u0000', '<eos>', '<bos>', 'https://x', 's3://x/y', 'a:b', 'a=b', '=', ':', ',', '-', '__class__',
  '$HOME', '~', '*', '(',
)  # fmt: skip
LONE = ('\ud800', 'a\udfffb')  # halves of surrogate pairs: JSON can hold them, UTF-8 cannot
DEEP = '@deep'  # begins a text that stands for nested lists: `@deep -3` has three levels fewer than Python's parser accepts
TOO_DEEP = 10_000  # levels above the limit of the parser
INTS = (0, 1, -1, 2, 3, 7, 8, 16, 63, 64, 65, 127, 255, 256, 1000, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-300, 5e-324, 1e300, 1e38, math.pi, math.inf, -math.inf, math.nan)


def text(rng: random.Random, lone: bool = False) -> str:
  """Return a text: an awkward one, or random characters. `lone` allows halves of surrogate pairs."""
  pool = TEXTS + LONE if lone else TEXTS
  if rng.random() < 0.6:
    return rng.choice(pool)
  alphabet = 'ab 01.-_:/=,[](){}<>|"\'\\\n\té日🙂'
  return ''.join(rng.choice(alphabet) for _ in range(rng.randint(0, 12)))


def integer(rng: random.Random) -> int:
  value = rng.choice((*INTS, rng.randint(-5, 40), rng.randint(0, 2**40), 10 ** rng.randint(20, 300)))
  return -value if rng.random() < 0.2 else value


def number(rng: random.Random) -> int | float:
  return integer(rng) if rng.random() < 0.5 else rng.choice((*FLOATS, rng.uniform(-2, 2), rng.lognormvariate(0, 10)))


def scalar(rng: random.Random, lone: bool = False) -> Any:
  return rng.choice((lambda: None, lambda: rng.random() < 0.5, lambda: number(rng), lambda: text(rng, lone)))()


def value(rng: random.Random, depth: int = 3, lone: bool = False) -> Any:
  """Return a value that JSON can hold."""
  kind = rng.random()
  if depth == 0 or kind < 0.6:
    return scalar(rng, lone)
  if kind < 0.8:
    return [value(rng, depth - 1, lone) for _ in range(rng.randint(0, 4))]
  return {text(rng, lone): value(rng, depth - 1, lone) for _ in range(rng.randint(0, 4))}


# --- changes -----------------------------------------------------------------------------------------------------------


def changed_json(rng: random.Random, tree: Any, lone: bool = True) -> Any:
  """Return a copy of a JSON value with one to three changes: of a value, a key or a list."""
  tree = copy.deepcopy(tree)
  for _ in range(rng.choice((1, 1, 2, 3))):
    tree = _changed(rng, tree, lone)
  return tree


def _changed(rng: random.Random, tree: Any, lone: bool) -> Any:
  """Change one node of a tree, in place where it can."""
  if not isinstance(tree, dict | list) or not tree or rng.random() < 0.02:
    return _other(rng, tree, lone)
  keys: Any = list(tree) if isinstance(tree, dict) else range(len(tree))
  key = rng.choice(keys)
  if isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.85:
    tree[key] = _changed(rng, tree[key], lone)
    return tree
  what = rng.random()
  if what < 0.15:
    del tree[key]
  elif what < 0.25 and isinstance(tree, dict):
    tree[rng.choice((text(rng, lone), str(key) + 'x', rng.choice(keys)))] = tree.pop(key)
  elif what < 0.35 and isinstance(tree, dict):
    tree[text(rng, lone)] = value(rng, 2, lone)
  elif what < 0.35:
    tree.insert(key, copy.deepcopy(rng.choice(tree)))
  elif what < 0.45:
    other = rng.choice(keys)
    tree[key], tree[other] = tree[other], tree[key]
  else:
    tree[key] = _other(rng, tree[key], lone)
  return tree


def _other(rng: random.Random, old: Any, lone: bool) -> Any:
  """Return another value for a leaf, often of its type."""
  if rng.random() < 0.3:
    return value(rng, 2, lone)
  match old:
    case bool():
      return not old
    case int():
      return rng.choice((old + 1, old - 1, -old, old * 2, 0, integer(rng)))
    case float():
      return rng.choice((-old, old * 2, 1 / old if old else 1.0, number(rng)))
    case str():
      return rng.choice((old + text(rng, lone), old[: len(old) // 2], old.upper(), text(rng, lone)))
  return rng.choice((None, [], {}, scalar(rng, lone), deep(rng)))


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
  """Return bytes with one to eight changes: of a bit, a byte, a piece, or the length."""
  found = bytearray(data)
  for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
    at = rng.randrange(len(found) + 1) if rng.random() < 0.5 else min(rng.randrange(256), len(found))
    match rng.randrange(7):
      case 0 if at < len(found):
        found[at] ^= 1 << rng.randrange(8)
      case 1 if at < len(found):
        found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, ord('"'), ord('{'), ord('9'), rng.randrange(256)))
      case 2:
        del found[at:]
      case 3:
        del found[at : at + rng.randint(1, 64)]
      case 4:
        found[at:at] = rng.randbytes(rng.randint(1, 16))
      case 5:
        found[at:at] = found[at : at + rng.randint(1, 64)]
      case 6:
        found += rng.randbytes(rng.randint(1, 64))
  return bytes(found)


def changed_text(rng: random.Random, source: str) -> str:
  """Return a text with one to four changes: pieces are deleted, copied, moved or replaced."""
  for _ in range(rng.choice((1, 1, 2, 4))):
    at, size = rng.randrange(len(source) + 1), rng.randint(1, 24)
    piece = source[at : at + size]
    match rng.randrange(4):
      case 0:
        source = source[:at] + source[at + size :]
      case 1:
        source = source[:at] + piece + source[at:]
      case 2:
        to = rng.randrange(len(source) + 1)
        source = source[:to] + piece + source[to:]
      case 3:
        source = source[:at] + text(rng) + source[at + size :]
  return source


def deep(rng: random.Random) -> str:
  """Return a text that stands for nested lists: far too deep, or about as deep as Python's parser accepts.

  Values that the parser accepts can be too deep for code that runs deeper in the call stack, such as a JSON encoder.
  """
  return f'{DEEP} {rng.choice((TOO_DEEP, rng.randint(-40, 5)))}'


@functools.cache
def deepest() -> int:
  """Return the largest number of levels of nested lists that Python's parser accepts here."""
  return bisect.bisect_left(range(1_000_000), True, lo=1, key=lambda depth: not _parses(depth)) - 1


def _parses(depth: int) -> bool:
  try:
    json.loads('[' * depth + ']' * depth)
  except RecursionError:
    return False
  return True


def as_json(tree: Any) -> bytes:
  """Return JSON, with NaN and infinity as Python writes them, and nested lists for the texts of `deep`."""

  def lists(found: re.Match[str]) -> str:
    depth = deepest() + int(found[1])
    return '[' * depth + ']' * depth

  return re.sub(rf'"{DEEP} (-?\d+)"', lists, json.dumps(tree)).encode()
