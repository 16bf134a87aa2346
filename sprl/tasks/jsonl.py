"""Problems from a folder with a file SPLIT.jsonl for each split of config.task.splits, one problem per line.

{"prompt": "What is 2 + 3?", "answer": "5"}
{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}], "answer": 5}
{"prompt": "What is 2 + 3 + 4?", "answer": "9", "solution": "2 + 3 = 5, and 5 + 4 = 9."}     (for sprl.sft)

A line may have more keys. The grader sees all of them.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sprl.config import SettingsError, Task
from sprl.foreign import expanded
from sprl.tasks.selection import selected
from sprl.tasks.tables import Table

_ROLES = ('system', 'user', 'assistant')


def rows(task: Task, split: str) -> Iterator[dict[str, Any]]:
  """Yield the problems of SPLIT.jsonl in the folder task.path that task.filters keep; `problem` describes them.

  `split` may be a part of a file, such as `train[:95%]`. Raises SettingsError for a missing file, a malformed line (by file and
  line number), a split or filter that cannot be read, a filter on a column that no row has, and if no row is left.
  """
  for _, (where, line) in selected(task, split, lambda name: _table(task, name)):
    try:
      yield problem(where, line, task.chat)
    except SettingsError as error:
      if not {'prompt', 'messages'} & {*line}:
        other = "a file with other columns needs config.task.kind = 'dataset' and config.task.columns"
        raise SettingsError(f'{error}; {other}') from None
      raise


def _table(task: Task, name: str) -> Table:
  path = expanded(task.path or '') / f'{name}.jsonl'
  if not path.is_file():
    expected = 'a folder with a file for each split, such as train.jsonl and test.jsonl'
    one = 'docs/tasks.md says how one file serves for both'
    raise SettingsError(f'config.task.path = {task.path!r}: expected {expected}; {path}: no such file; {one}')
  return Table((path,))


def problem(where: str, line: Mapping[str, Any], chat: bool, default: str | None = None) -> dict[str, Any]:
  """Return the problem of a line: {id, prompt or messages, answer as text, row: the line}, and `extra` if it has a solution.

  `where` names the line, and becomes the id. `default` is the answer of a line without one; None: each line must have one. Raises
  SettingsError, which begins with `where`, for a malformed line.
  """
  if ('prompt' in line) == ('messages' in line):
    raise SettingsError(f'{where}: expected either `prompt` or `messages`, got the keys {", ".join(line) or "(none)"}')
  if (answer := line.get('answer', default)) is None:
    raise SettingsError(f'{where}: no answer: expected text or a number; "answer": "" if the reward needs none')
  row: dict[str, Any] = {'id': where, 'answer': _text(where, 'answer', answer), 'row': line}
  if line.get('solution') is not None:
    row['extra'] = {'solution': _text(where, 'solution', line['solution'])}
  if 'prompt' in line:
    if not isinstance(line['prompt'], str):
      raise SettingsError(f'{where}: prompt = {line["prompt"]!r}: expected text')
    return {**row, 'prompt': line['prompt']}
  if not chat:
    raise SettingsError(f'{where}: `messages` need a chat template; expected `prompt` under config.task.chat = False')
  check_messages(where, line['messages'])
  return {**row, 'messages': line['messages']}


def _text(where: str, name: str, value: Any) -> str:
  plain = value.item() if isinstance(value, np.generic) else value
  if not is_text(plain) or isinstance(plain, bool):
    raise SettingsError(f'{where}: {name} = {value!r}: expected text or a number')
  return str(value)


def is_text(value: Any) -> bool:
  """Return whether a value is text or a finite number."""
  return isinstance(value, str) or (isinstance(value, int | float) and value not in (math.inf, -math.inf) and value == value)


def check_messages(where: str, messages: Any) -> None:
  """Raise SettingsError, with the place, unless the value is a conversation that ends with the user."""
  if not isinstance(messages, list) or not messages:
    raise SettingsError(f'{where}: messages = {messages!r}: expected a list of messages')
  for i, message in enumerate(messages):
    if not isinstance(message, dict) or not isinstance(message.get('content'), str) or message.get('role') not in _ROLES:
      raise SettingsError(f'{where}: messages[{i}] = {message!r}: expected a role of {", ".join(_ROLES)}, and content in text')
  if messages[-1]['role'] != 'user':
    raise SettingsError(f'{where}: messages end with the role {messages[-1]["role"]!r}: expected user')
