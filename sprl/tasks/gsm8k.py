"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 training and 1,319 test problems of grade-school mathematics.

It is loaded from the Hugging Face hub, or from a local folder of train.jsonl and test.jsonl with the fields `question` and
`answer`. The last line of an answer is `#### ` and the final number.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sprl.config import SettingsError, Task
from sprl.foreign import expanded
from sprl.tasks.selection import parse_split, selected
from sprl.tasks.tables import Table

_HUB = 'openai/gsm8k'
_HUB_NAME = re.compile(r'[\w.-]+/[\w.-]+')
_LOCAL = 'a local folder that holds train.jsonl and test.jsonl (lines of `question` and `answer`, ending in `#### N`)'


def rows(task: Task, split: str) -> Iterator[dict[str, Any]]:
  """Yield the problems of a split as {id, prompt, answer, extra, row}: `answer` is the number after `####`, `extra` the solution.

  task.path names a folder or a hub data set, by default openai/gsm8k. `split` may be a part, such as `train[:95%]`.

  Raises SettingsError if neither can be loaded, a split is missing, or a problem lacks a field or its final answer.
  """
  name = parse_split(split).name
  for i, (where, line) in selected(task, split, lambda name: _table(task, name)):
    yield {**_row(where, f'gsm8k/{name}/{i}', line), 'row': line}


def _table(task: Task, split: str) -> Table:
  """Return the rows of a split: those of SPLIT.jsonl, or of the hub's main/SPLIT-*.parquet."""
  name = task.path or _HUB
  folder = expanded(name)
  if not folder.is_dir():
    folder = _download(name)
  path = folder / f'{split}.jsonl'
  files = (path,) if path.is_file() else tuple(sorted(folder.glob(f'main/{split}-*.parquet')))
  if not files:
    raise SettingsError(f'config.task.path = {name!r}: {folder} has neither {path.name} nor main/{split}-*.parquet')
  return Table(files)


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


def _row(where: str, name: str, line: dict[str, Any]) -> dict[str, Any]:
  question, solution = line.get('question'), line.get('answer')
  if not isinstance(question, str) or not isinstance(solution, str):
    raise SettingsError(f'{where}: expected the texts `question` and `answer`, got the keys {", ".join(line) or "(none)"}')
  _, mark, final = solution.rpartition('####')
  if not mark or not final.strip():
    raise SettingsError(f'{where}: answer ends in {solution[-40:]!r}: expected a last line `#### N`')
  return {'id': name, 'prompt': question, 'answer': final.strip(), 'extra': {'solution': solution}, 'row': line}
