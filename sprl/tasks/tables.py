"""Rows of data files: parquet, arrow, JSON lines and JSON arrays.

A row is a dict of all columns. With it comes its place, such as `folder/train.jsonl:17`, for messages. pyarrow is imported only
to read its own formats, so that a run on JSON needs no wheel of 45 MB.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sprl.config import SettingsError

ENDINGS = ('.parquet', '.jsonl', '.json', '.arrow')
_AT_ONCE = 1024  # rows of a parquet file that are read at a time

Line = tuple[str, dict[str, Any]]  # (place, row)


@dataclass(frozen=True)
class Table:
  """The rows of some files, one file after another. Each iteration reads them again.

  Raises SettingsError for a damaged file. The message names it.
  """

  files: tuple[Path, ...]

  def __len__(self) -> int:
    count = 0
    for path in self.files:
      with _reading(path):
        count += _count(path)
    return count

  def __iter__(self) -> Iterator[Line]:
    for path in self.files:
      with _reading(path):
        yield from _rows(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
  """Turn the errors of reading a file into SettingsError.

  pyarrow raises errors of many types for damaged files, and for values that Python cannot hold, such as dates after 9999.
  """
  try:
    yield
  except SettingsError:
    raise
  except Exception as error:
    reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]
    raise SettingsError(f'{path}: cannot be read: {reason}; expected an intact {path.suffix[1:]} file') from error


def _count(path: Path) -> int:
  match path.suffix:
    case '.parquet':
      return _parquet(path).metadata.num_rows
    case '.arrow':
      return sum(batch.num_rows for batch in _arrow_batches(path))
  return sum(1 for _ in _rows(path))


def _rows(path: Path) -> Iterator[Line]:
  match path.suffix:
    case '.parquet':
      batches = _parquet(path).iter_batches(_AT_ONCE)
    case '.arrow':
      batches = _arrow_batches(path)
    case _:
      return ((f'{path}:{number}', row) for number, row in (_array(path) if _is_array(path) else lines(path)))
  rows = (row for batch in batches for row in batch.to_pylist())
  return ((f'{path}:{i}', row) for i, row in enumerate(rows))


def _parquet(path: Path) -> Any:
  from pyarrow import parquet

  return parquet.ParquetFile(path)


def _arrow_batches(path: Path) -> Iterator[Any]:
  """Yield the batches of an arrow file, in the stream format that `datasets` writes or in the file format."""
  import pyarrow
  from pyarrow import ipc

  with pyarrow.memory_map(str(path)) as source:
    if source.read(6) == b'ARROW1':
      reader = ipc.open_file(source)
      batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
      source.seek(0)
      batches = iter(ipc.open_stream(source))
    for batch in batches:
      batch.validate(full=True)  # nothing else checks the places that a damaged file names
      yield batch


def _is_array(path: Path) -> bool:
  if path.suffix != '.json':
    return False
  with open(path, 'rb') as file:
    return file.read(64).lstrip(b'\xef\xbb\xbf \t\r\n')[:1] == b'['


def _array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
  for i, row in enumerate(json.loads(path.read_text(encoding='utf-8-sig'))):
    if not isinstance(row, dict):
      raise SettingsError(f'{path}:{i}: expected a JSON object, got {type(row).__name__}')
    try:
      check_text(row)
    except ValueError as error:
      raise SettingsError(f'{path}:{i}: not JSON in UTF-8: {error}') from error
    yield i, row


def check_text(row: Any) -> None:
  """Raise ValueError for half a surrogate pair, which is valid JSON, but which UTF-8 cannot encode."""
  json.dumps(row, ensure_ascii=False).encode()


def lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yield (line number, object) of a JSONL file, from line 1; blank lines are skipped.

  Raises SettingsError, with file and line, for a line that is not a JSON object in UTF-8.
  """
  with open(path, 'rb') as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      try:
        value = json.loads(line.decode('utf-8-sig'))
        if b'\\u' in line:
          check_text(value)
      except (ValueError, RecursionError) as error:
        raise SettingsError(f'{path}:{number}: not JSON in UTF-8: {error}') from error
      if not isinstance(value, dict):
        raise SettingsError(f'{path}:{number}: expected a JSON object, got {type(value).__name__}')
      yield number, value


def plain(value: Any) -> Any:
  """Return a value as JSON can hold it.

  Numbers and arrays of numpy become those of Python, sets sorted lists, bytes base64 text, dates and other objects their text.
  """
  if isinstance(value, np.datetime64 | np.timedelta64):
    return str(value)
  if isinstance(value, np.generic):
    value = value.item()
  match value:
    case None | bool() | int() | float() | str():
      return value
    case Mapping():
      return {str(key): plain(each) for key, each in value.items()}
    case list() | tuple():
      return [plain(each) for each in value]
    case set() | frozenset():
      return sorted(map(plain, value), key=repr)  # the order of a set is another one in each process
    case bytes():
      return base64.b64encode(value).decode()
  if hasattr(value, 'isoformat'):
    return value.isoformat()
  if isinstance(value, np.ndarray) and value.dtype.kind in 'mM':  # times, of which `tolist` may make integers
    value = value.astype(str)
  listed = value.tolist() if hasattr(value, 'tolist') else value
  return str(value) if type(listed) is type(value) else plain(listed)
