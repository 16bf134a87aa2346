"""Data sets: JSON lines, JSON arrays, parquet and arrow files with random rows and damaged bytes, read with random settings.

A data set gives at least one problem, whose texts UTF-8 can encode and whose columns JSON can hold; or it is refused by an error
that names a file or a setting.
"""

import contextlib
import datetime
import decimal
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import values
from pyarrow import ipc, parquet

from sprl.config import Run, SettingsError, Task, to_dict
from sprl.config_reader import resolve
from sprl.tasks import in_memory, problems

SECONDS = 20.0
COLUMNS = ('prompt', 'answer', 'solution', 'messages', 'level', 'question', 'meta', 'id')
TALK = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 3?'}, {'role': 'assistant', 'content': '5'}]


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  yield SimpleNamespace(scratch=folder / 'data')


# --- rows --------------------------------------------------------------------------------------------------------------


def cell(rng: random.Random, column: str) -> Any:
  """Return a value of a column, mostly of the kind that belongs there."""
  if rng.random() < 0.02:
    return values.value(rng, 2, lone=True)
  match column:
    case 'level' if rng.random() < 0.1:
      return values.number(rng)
    case 'level':
      return rng.choice((1, 5, 2.5, None, 'easy', True))
    case 'messages':
      return values.changed_json(rng, TALK) if rng.random() < 0.1 else TALK[: rng.randint(2, 3)]
    case 'meta':
      return {'answer': rng.choice(('5', 5, None)), 'level': rng.randint(1, 3)}
    case 'question' | 'answer' if rng.random() < 0.5:
      return f'Think. {rng.randint(0, 9)} #### {rng.randint(0, 9)}'
  return (
    f'{rng.randint(0, 9)} + {rng.randint(0, 9)} =' if rng.random() < 0.8 else rng.choice((values.text(rng), rng.randint(0, 99)))
  )


def json_rows(rng: random.Random) -> list[Any]:
  columns = ['prompt', 'answer', *rng.sample(COLUMNS, rng.randint(0, 3))]
  if rng.random() < 0.3:
    columns = ['messages', 'answer']
  rows: list[Any] = [{column: cell(rng, column) for column in columns} for _ in range(rng.choice((0, 1, 2, 3, 6)))]
  if rng.random() < 0.05:
    rows.insert(0, values.value(rng, 1))
  return rows


def table(rng: random.Random) -> pyarrow.Table:
  """Return a table of arrow with columns of any type."""
  count = rng.choice((0, 1, 2, 5))
  kinds = {
    pyarrow.string(): lambda: rng.choice(('1 + 1 =', 'a', '', 'é🙂', '7')), pyarrow.int64(): lambda: rng.randint(-5, 5),
    pyarrow.float32(): rng.random, pyarrow.bool_(): lambda: rng.random() < 0.5, pyarrow.binary(): lambda: rng.randbytes(3),
    pyarrow.timestamp('s'): lambda: datetime.datetime(2020, 1, 1), pyarrow.date32(): lambda: datetime.date(2020, 1, 1),
    pyarrow.timestamp('ns', tz='Mars/Base'): lambda: 1, pyarrow.timestamp('s', tz='UTC'): lambda: rng.choice((1, 10**14)),
    pyarrow.duration('ns'): lambda: 7, pyarrow.time64('ns'): lambda: 123,
    pyarrow.decimal128(9, 2): lambda: decimal.Decimal('1.25'), pyarrow.list_(pyarrow.int8()): lambda: [1, None],
    pyarrow.struct([('role', pyarrow.string()), ('content', pyarrow.string())]): lambda: {'role': 'user', 'content': 'x'},
    pyarrow.list_(pyarrow.struct([('role', pyarrow.string()), ('content', pyarrow.string())])): lambda: TALK[:2],
    pyarrow.map_(pyarrow.string(), pyarrow.int64()): lambda: [('a', 1)], pyarrow.null(): lambda: None,
    pyarrow.dictionary(pyarrow.int8(), pyarrow.string()): lambda: 'a', pyarrow.uint64(): lambda: 2**64 - 1,
  }  # fmt: skip
  names = ['prompt', 'answer', *rng.sample(COLUMNS, 2)]
  arrays = []
  for name in names:
    kind = pyarrow.string() if name in ('prompt', 'answer') and rng.random() < 0.9 else rng.choice(list(kinds))
    cells = [None if rng.random() < 0.03 else kinds[kind]() for _ in range(count)]
    arrays.append(pyarrow.array(cells, kind))
  return pyarrow.table(arrays, names=names)


def file_of(rng: random.Random, kind: str, folder: Path) -> bytes:
  """Return the bytes of a data file."""
  match kind:
    case 'jsonl':
      return b'\n'.join(map(values.as_json, json_rows(rng))) + rng.choice((b'', b'\n', b'\n\n  \n'))
    case 'json':
      return values.as_json(json_rows(rng))
  folder.mkdir(exist_ok=True)
  path, made = folder / 'draft', table(rng)
  if kind == 'parquet':
    parquet.write_table(made, path, compression=rng.choice(('none', 'snappy')), use_dictionary=rng.random() < 0.5)
  else:
    with (ipc.new_stream if rng.random() < 0.5 else ipc.new_file)(path, made.schema) as writer:
      writer.write_table(made)
  return path.read_bytes()


# --- cases -------------------------------------------------------------------------------------------------------------


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  """Return {'name', 'data': of a file, 'task': settings}."""
  kind = rng.choice(('jsonl', 'jsonl', 'jsonl', 'json', 'parquet', 'arrow'))
  data = file_of(rng, kind, world.scratch.parent / 'drafts')
  if data and rng.random() < 0.3:
    data = values.changed_bytes(rng, data)
  task: dict[str, Any] = {'kind': 'jsonl' if kind == 'jsonl' and rng.random() < 0.6 else 'dataset'}
  if rng.random() < 0.3:
    columns = ('level', 'meta.level', 'answer', 'prompt', 'no', 'meta')
    tests = ('>=2', '==1', '!=null', '~^T', '<1e400', "=='5'", '==true', '>x', '~(', '', '>-9')
    task['filters'] = tuple(rng.choice(columns) + rng.choice(tests) for _ in range(rng.choice((1, 1, 2))))
  if rng.random() < 0.3:
    parts = (
      'train[:50%]',
      'train[1:]',
      'train[-1:]',
      'train[5:2]',
      f'train[:{values.integer(rng)}]',
      'train[:' + '9' * 5000 + ']',
      'train[:-100%]',
      'train[',
      'other',
    )
    task['splits'] = (rng.choice(parts), 'train')
  if task['kind'] == 'dataset' and rng.random() < 0.5:
    texts = (
      'question',
      'meta.answer',
      'answer ~ ####\\s*(.+)',
      'answer ~ (',
      '{prompt} {level}',
      '{no}',
      '',
      'no',
      '{{x}}',
      'messages',
      'meta',
    )
    task['columns'] = {
      rng.choice(('prompt', 'answer', 'solution', 'messages')): rng.choice(texts) for _ in range(rng.choice((1, 2)))
    }
  if rng.random() < 0.2:
    task |= {'chat': False} if rng.random() < 0.5 else {'system': values.text(rng), 'suffix': values.text(rng)}
  return {'name': f'train.{kind}', 'data': data, 'task': task}


def check(world: Any, case: dict[str, Any]) -> str:
  shutil.rmtree(world.scratch, ignore_errors=True)
  world.scratch.mkdir()
  (world.scratch / case['name']).write_bytes(case['data'])
  given = to_dict(Run())
  given['model']['path'] = 'm'
  given['task'] |= {'path': str(world.scratch), **case['task']}
  try:
    task = resolve(given).task
    found = problems.load(task, 'train')
    posed = found[:]
  except SettingsError as error:
    assert re.match(rf'config\.[\w.]+|{re.escape(str(world.scratch))}', str(error)), error
    return f'{case["name"]}: refused'
  assert posed
  for problem in posed:
    for text in (
      problem.id,
      problem.prompt,
      problem.answer,
      *(text for m in problem.messages for text in (m['role'], m['content'])),
    ):
      text.encode()
    json.dumps(problem.row)
    assert bool(problem.messages) == task.chat
  in_memory_too(task, [problem.row for problem in posed])
  return f'{case["name"]}: read'


def in_memory_too(task: Task, rows: list[Any]) -> None:
  """Read the rows again as a Python program gives them."""
  try:
    in_memory.load(replace(task, kind='rows'), rows)
  except SettingsError as error:
    assert str(error).startswith('rows'), error
