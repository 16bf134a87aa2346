"""Data sets of text on the Hugging Face hub or on disk: find the files of a split, and turn their columns into problems.

`config.task.path` is one of

    a file                 one split, `train`
    a folder               train.jsonl, train-00000-of-00004.parquet, data/train-*.parquet, train/*.arrow (`save_to_disk`), ...
    a hub name             openai/gsm8k:main, with the name of a configuration after the colon if there are several

`config.task.columns` maps prompt (or messages), answer and solution to

    a column               'question', or 'reward_model.ground_truth' of a column of dictionaries
    a template             '{question}\\n\\nHint: {hint}'
    a pattern              'answer ~ ####\\\\s*(.+)': the last match in a column, or its first group
    ''                     nothing: for answers that the grader does not need

A key without an entry reads the column with its own name. A conversation (`messages`, or a `prompt` that is a list) may end with
a message of the assistant. That message is the solution, and also the answer, if the data set has no columns for them.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sprl.config import SettingsError, Task
from sprl.foreign import expanded
from sprl.tasks.jsonl import check_messages, is_text
from sprl.tasks.selection import ABSENT, at, parse_split, selected
from sprl.tasks.tables import ENDINGS, Table

log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r'([\w.-]+/[\w.-]+|[\w-]+)(?::([\w.-]+))?')
_REVISIONS = (None, 'refs/convert/parquet')  # the second: data sets in other formats, as the hub converts them
_SHARD = re.compile(r'[-_.](\d+)(-of-\d+)?(-[0-9a-f]{6,})?$')  # what follows the split in the name of one of its files
_SPLITS = ('train', 'test', 'validation', 'valid', 'val', 'dev', 'eval')


def rows(task: Task, split: str) -> Iterator[dict[str, Any]]:
  """Yield the problems of a split as {id, prompt or messages, answer, row}; `extra` has a solution if there is one.

  Raises SettingsError if the data set, the split or a column does not exist, a file is damaged, or no row is left.
  """
  name = parse_split(split).name
  stem = (task.path or '').rstrip('/').rpartition('/')[2]
  for i, (where, row) in selected(task, split, lambda name: Table(_files(task, name))):
    yield {'id': f'{stem}/{name}/{i}', **problem_of(where, row, task), 'row': row}


# --- the files of a split --------------------------------------------------------------------------------------------


def _files(task: Task, split: str) -> tuple[Path, ...]:
  path = expanded(task.path or '')
  if path.is_file():
    if path.suffix not in ENDINGS:
      raise SettingsError(f'config.task.path = {task.path!r}: expected a file that ends in one of {", ".join(ENDINGS)}')
    return tuple(path for _ in _found(task, split, [f'train{path.suffix}']))
  if path.is_dir():
    return tuple(path / name for name in _found(task, split, _listed(path)))
  return _from_hub(task, split)


def _listed(folder: Path) -> list[str]:
  return [str(path.relative_to(folder).as_posix()) for path in folder.rglob('*') if path.is_file()]


def _found(task: Task, split: str, names: Sequence[str], config: str | None = None, hub: bool = False) -> list[str]:
  """Return the files of the split. Raises SettingsError if there are none, or if they are in several folders."""
  by_split = files_by_split(names, config)
  if split not in by_split:
    other = 'train' if 'train' in by_split else min(by_split, default='')
    whole = f"; another split can serve, such as '{other}', or a part of one, such as '{other}[95%:]'" if other else ''
    there = ', '.join(sorted(by_split)) or f'no files that end in {", ".join(ENDINGS)} and are named after a split'
    of = f' of {config}' if config else ''
    raise SettingsError(f'config.task.splits has {split!r}: expected a split{of} of {task.path}, which has {there}{whole}')
  folders = sorted({str(PurePosixPath(name).parent) for name in by_split[split]})
  if len(folders) > 1:
    one = f'the path of one of them, such as {task.path}/{folders[0]}'
    if hub:
      one = f'a configuration after a colon, such as {task.path}:{PurePosixPath(folders[0]).parts[0]}'
    several = f'{len(folders)} folders have files of the split {split}: {", ".join(folders)}'
    raise SettingsError(f'config.task.path = {task.path!r}: {several}; expected {one}')
  formats = sorted({PurePosixPath(name).suffix for name in by_split[split]})
  if len(formats) > 1:
    several = f'files of the split {split} end in {" and in ".join(formats)}'
    raise SettingsError(
      f'config.task.path = {task.path!r}: {several}; expected one format, or the path of a file or folder on disk'
    )
  for stem, (parts, there) in _counted(by_split[split]).items():
    if len(there) < parts:
      raise SettingsError(
        f'config.task.path = {task.path!r}: the split {split} has {len(there)} of the {parts} files {stem}-...-of-{parts:05}: '
        'expected all; was a copy or a download interrupted?'
      )
  return by_split[split]


def _counted(names: Iterable[str]) -> dict[str, tuple[int, set[str]]]:
  """Return how many parts there should be and which there are, for names such as train-00000-of-00004.parquet."""
  found: dict[str, tuple[int, set[str]]] = {}
  for name in names:
    stem = PurePosixPath(name).stem
    if (part := _SHARD.search(stem)) and part[2]:
      found.setdefault(stem[: part.start()], (int(part[2].removeprefix('-of-')), set()))[1].add(part[1])
  return found


def files_by_split(names: Sequence[str], config: str | None = None) -> dict[str, list[str]]:
  """Return the data files of each split, sorted. `names` are the paths of all files of a folder.

  The name of a split is in the names of its files (train.jsonl, train-00000-of-00004.parquet) or is the name of their folder
  (train/0000.parquet). With `config`, only files below a folder of that name count. If files of a split are at several depths,
  only those nearest to the top count.

  A data set without splits becomes the split `train`, for example a single file with another name, or the files
  data-00000-of-00001.arrow of `datasets`. The cache files of `datasets` are left out. A number without a count (train-1.jsonl) is
  that of a part if the parts are numbered from 0 or 1; aime_2023.jsonl and aime_2024.jsonl are two splits.
  """
  found: dict[str, list[str]] = {}
  whole = _numbered_otherwise(names)
  for name in sorted(names):
    path = PurePosixPath(name)
    if path.suffix not in ENDINGS or path.name.startswith(('cache-', '.')):
      continue
    if path.suffix == '.json' and path.stem in ('state', 'dataset_info', 'dataset_infos', 'dataset_dict'):
      continue
    if config is not None and config not in path.parts[:-1]:
      continue
    folder = path.parent.name
    split = path.stem if path.stem in whole else _SHARD.sub('', path.stem)
    if split in ('', 'data', 'part', 'shard') or path.stem.isdigit():
      split = folder if folder not in ('', 'data', config) else 'train'
    found.setdefault(split, []).append(name)
  if len(found) == 1 and not any(word in split for split in found for word in _SPLITS):
    found = {'train': found.popitem()[1]}
  nearest = {split: min(name.count('/') for name in files) for split, files in found.items()}
  return {split: [name for name in files if name.count('/') == nearest[split]] for split, files in found.items()}


def _numbered_otherwise(names: Sequence[str]) -> set[str]:
  """Return the stems without a split's name that end in a number which is not that of a part: the least one is above 1."""
  stems = {PurePosixPath(name).stem for name in names}
  numbers: dict[str, dict[str, int]] = {}
  for stem in stems:
    if (found := _SHARD.search(stem)) and not found[2] and not any(word in stem for word in _SPLITS):
      numbers.setdefault(stem[: found.start()], {})[stem] = int(found[1])
  return {stem for of in numbers.values() if min(of.values()) > 1 for stem in of}


def _from_hub(task: Task, split: str) -> tuple[Path, ...]:
  """Download the files of a split into the hub's cache, and return them. If the hub cannot be reached, use only its cache."""
  name = _HUB_NAME.fullmatch(task.path or '')
  if name is None:
    raise SettingsError(
      f'config.task.path = {task.path!r}: no such file or folder; expected one, or a hub name such as openai/gsm8k:main'
    )
  repository, config = name.groups()
  import huggingface_hub  # slow to import, and not needed for folders

  def fetched(revision: str | None) -> tuple[Path, ...]:
    there = huggingface_hub.HfApi().list_repo_files(repository, repo_type='dataset', revision=revision)
    if not files_by_split(there, config):
      return ()
    wanted = _found(task, split, there, config, hub=True)
    folder = huggingface_hub.snapshot_download(repository, repo_type='dataset', revision=revision, allow_patterns=wanted)
    return tuple(Path(folder) / each for each in wanted)

  try:
    for revision in _REVISIONS:
      if files := fetched(revision):
        return files
  except SettingsError:
    raise
  except Exception as error:  # the hub's client raises errors of several libraries
    for folder in _cached(huggingface_hub.snapshot_download, repository):
      if files_by_split(listed := _listed(folder), config):
        with contextlib.suppress(SettingsError):  # the cache has only the splits that were used; the hub may have others
          found = _found(task, split, listed, config, hub=True)
          log.warning('%s: read from the cache, because the hub gives an error (%s: %s)', task.path, type(error).__name__, error)
          return tuple(folder / each for each in found)
    raise SettingsError(
      f'config.task.path = {task.path!r}: no such file or folder, and the Hugging Face hub does not provide it '
      f'({type(error).__name__}: {error})'
    ) from error
  of = f' in a folder {config}' if config else ''
  raise SettingsError(f'config.task.path = {task.path!r}: expected a data set with files that end in {", ".join(ENDINGS)}{of}')


def _cached(download: Callable[..., str], repository: str) -> Iterator[Path]:
  """Yield the folders of the hub's cache that have files of a data set."""
  for revision in _REVISIONS:
    try:
      folder = download(repository, repo_type='dataset', revision=revision, local_files_only=True)
    except Exception as error:  # nothing is cached, or not all files of the repository, as sprl fetches only those of a split
      folder = getattr(error, 'snapshot_path', None)
    if folder:
      yield Path(folder)


# --- a row and its columns -------------------------------------------------------------------------------------------


def problem_of(where: str, row: Mapping[str, Any], task: Task) -> dict[str, Any]:
  """Return {prompt or messages, answer} of a row, and extra = {solution} if there is one. Raises SettingsError."""
  given = next((name for name in ('prompt', 'messages') if name in task.columns), None)
  asked = given or ('messages' if 'messages' in row and 'prompt' not in row else 'prompt')
  question = _value(where, row, task, asked)
  found: dict[str, Any] = {}
  solution = _value(where, row, task, 'solution') if 'solution' in task.columns or 'solution' in row else None
  if 'solution' not in task.columns and not isinstance(solution, str | int | float):
    solution = None  # the column has another meaning, and no setting names it
  if isinstance(question, list):
    found['messages'], spoken = _conversation(where, question, task)
    solution = spoken if solution is None else solution
    answer = spoken if 'answer' not in task.columns and 'answer' not in row and spoken is not None else ABSENT
  else:
    found['prompt'], answer = _text(where, asked, question), ABSENT
  found['answer'] = _text(where, 'answer', _value(where, row, task, 'answer') if answer is ABSENT else answer)
  if solution is not None:
    found['extra'] = {'solution': _text(where, 'solution', solution)}
  return found


def _conversation(where: str, messages: list[Any], task: Task) -> tuple[list[Any], str | None]:
  """Return the messages without a final one of the assistant, and the text of that one; None if there is none."""
  if not task.chat:
    raise SettingsError(f'{where}: a conversation needs a chat template; expected text as prompt with config.task.chat = False')
  spoken = None
  if len(messages) > 1 and isinstance(messages[-1], dict) and messages[-1].get('role') == 'assistant':
    *messages, last = messages
    spoken = last.get('content')
  check_messages(where, messages)
  return [{'role': m['role'], 'content': m['content']} for m in messages], spoken


def _text(where: str, name: str, value: Any) -> str:
  if not is_text(value):
    kind = 'null' if value is None else value if isinstance(value, float) else type(value).__name__
    without = "; config.task.filters = ('COLUMN!=null',) leaves out rows without a value" if value is None else ''
    raise SettingsError(f'{where}: the {name} is {kind}: expected text or a number{without}')
  return str(value)


def _value(where: str, row: Mapping[str, Any], task: Task, name: str) -> Any:
  """Return the value of `prompt`, `messages`, `answer` or `solution` of a row, through the column map."""
  text = task.columns.get(name, name)
  if not text and name in task.columns:
    return ''
  if (found := at(row, text)) is not ABSENT:
    return found
  column, tilde, pattern = (part.strip() for part in text.partition(' ~ '))
  if tilde:
    return _match(where, name, _shown(where, row, name, column, f' (in the pattern {text!r})'), pattern)
  if '{' in text:
    of = f' (in the template {text!r}, where {{{{ and }}}} stand for braces)'
    return re.sub(
      r'\{\{|\}\}|\{([^{}]+)\}',
      lambda m: _shown(where, row, name, m[1], of) if m[1] else m[0][0],
      text,
    )
  return _column(where, row, name, text)


def _shown(where: str, row: Mapping[str, Any], name: str, column: str, of: str) -> str:
  """Return the text of a column for a template or a pattern. Lists and dictionaries are shown as Python writes them."""
  value = _column(where, row, name, column, of)
  return str(value) if isinstance(value, list | dict) else _text(where, f'column {column} of the {name}', value)


def _column(where: str, row: Mapping[str, Any], name: str, column: str, of: str = '') -> Any:
  found = at(row, column)
  if found is ABSENT:
    there = (', '.join(row) or '(the row is empty)') + (", or '' for no answer" if name == 'answer' else '')
    raise SettingsError(
      f'config.task.columns: {name} reads the column {column!r}, which {where} lacks; expected one of {there}{of}'
    )
  return found


def _match(where: str, name: str, text: str, pattern: str) -> str:
  """Return the last match of a pattern, or its first group, without whitespace around it."""
  try:
    *_, last = [None, *(found for found in re.finditer(pattern, text) if found[min(1, found.re.groups)] is not None)]
  except re.error as error:
    wrong = f'config.task.columns: {name} has the pattern {pattern!r}: expected a regular expression'
    raise SettingsError(f'{wrong}: {error}') from error
  if last is None:
    raise SettingsError(f'{where}: {name} has no match of {pattern!r} in {text[-60:]!r}')
  return last[min(1, last.re.groups)].strip()
