"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 training and 1,319 test problems of grade-school mathematics.

It is loaded from the Hugging Face hub, or from a local folder of train.jsonl and test.jsonl with the fields `question` and
`answer`. The last line of an answer is `#### ` and the final number.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sprl.config import SettingsError, Task
from sprl.tasks import jsonl

_HUB = 'openai/gsm8k'
_AT_ONCE = 1024  # rows of a parquet file that are read at a time
_HUB_NAME = re.compile(r'[\w.-]+/[\w.-]+')
_LOCAL = 'a local folder that holds train.jsonl and test.jsonl (lines of `question` and `answer`, ending in `#### N`)'


def rows(task: Task, split: str) -> Iterator[dict[str, Any]]:
  """Yield the problems of a split as {id, prompt, answer, extra, row}: `answer` is the number after `####`.

  task.path names a folder or a hub data set, by default openai/gsm8k.

  Raises SettingsError if neither can be loaded, a split is missing, or a problem lacks a field or its final answer.
  """
  name = task.path or _HUB
  folder = Path(name).expanduser()
  if not folder.is_dir():
    folder = _download(name)
  count = 0
  for where, line in _lines(name, folder, split):
    yield _row(where, f'gsm8k/{split}/{count}', line)
    count += 1
  if not count:
    raise SettingsError(f'config.task.path = {name!r}: its {split} split is empty')


def _download(name: str) -> Path:
  """Return the folder of the hub's cache with the files of the data set."""
  if not _HUB_NAME.fullmatch(name):
    raise SettingsError(f'config.task.path = {name!r}: no such folder; expected {_LOCAL}, or a hub name such as {_HUB}')
  try:
    from huggingface_hub import snapshot_download

    patterns = ['*.jsonl', 'main/*.parquet']
    return Path(snapshot_download(name, repo_type='dataset', allow_patterns=patterns))
  except Exception as error:  # the hub's client raises errors of several libraries
    raise SettingsError(
      f'config.task.path = {name!r}: no such folder, and the Hugging Face hub does not provide it '
      f'({type(error).__name__}: {error}); without the hub, expected {_LOCAL}'
    ) from error


def _lines(name: str, folder: Path, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yield (position, row) of a split: from SPLIT.jsonl, or from the hub's main/SPLIT-*.parquet."""
  path = folder / f'{split}.jsonl'
  if path.is_file():
    yield from ((f'{path}:{number}', line) for number, line in jsonl.lines(path))
    return
  tables = sorted(folder.glob(f'main/{split}-*.parquet'))
  if not tables:
    raise SettingsError(f'config.task.path = {name!r}: {folder} has neither {path.name} nor main/{split}-*.parquet')
  try:
    import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise SettingsError(
      f'config.task.path = {name!r}: its parquet files need pyarrow (pip install pyarrow); without it, expected {_LOCAL}'
    ) from error
  for table in tables:
    batches = parquet.ParquetFile(table).iter_batches(_AT_ONCE)
    yield from ((f'{table}:{i}', line) for i, line in enumerate(line for batch in batches for line in batch.to_pylist()))


def _row(where: str, name: str, line: dict[str, Any]) -> dict[str, Any]:
  question, solution = line.get('question'), line.get('answer')
  if not isinstance(question, str) or not isinstance(solution, str):
    raise SettingsError(f'{where}: expected the texts `question` and `answer`, got the keys {", ".join(line) or "(none)"}')
  _, mark, final = solution.rpartition('####')
  if not mark or not final.strip():
    raise SettingsError(f'{where}: answer ends in {solution[-40:]!r}: expected a last line `#### N`')
  return {'id': name, 'prompt': question, 'answer': final.strip(), 'extra': {'solution': solution}, 'row': line}
