"""Data sets of files and of the hub: the files of a split, the column map, conversations, and errors."""

import json
import math
import struct
from decimal import Decimal
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pyarrow
import pytest
from pyarrow import ipc, parquet

from sprl.config import SettingsError, Task
from sprl.tasks import problems
from sprl.tasks.dataset import files_by_split

ROWS = [
  {'question': f'{i} + {i}?', 'answer': f'Twice {i}.\n#### {2 * i}', 'level': i, 'source': {'name': 'made', 'page': 10 * i}}
  for i in range(10)
]
COLUMNS = {'prompt': '{question} (page {source.page})', 'answer': r'answer ~ ####\s*(.+)', 'solution': 'answer'}


def write_parquet(path, rows=ROWS):
  path.parent.mkdir(parents=True, exist_ok=True)
  parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  return path


def write_arrow(path, rows=ROWS, form=ipc.new_stream):
  """Write the stream format, as `datasets` does, or the file format."""
  path.parent.mkdir(parents=True, exist_ok=True)
  table = pyarrow.Table.from_pylist(rows)
  with form(str(path), table.schema) as writer:
    writer.write_table(table, max_chunksize=3)
  return path


def write_jsonl(path, rows=ROWS):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text('\n'.join(map(json.dumps, rows)))
  return path


def saved_to_disk(folder):
  """Write the files that `datasets` 5.2 writes for a DatasetDict."""
  for split, rows in (('train', ROWS), ('test', ROWS[:3])):
    write_arrow(folder / split / 'data-00000-of-00002.arrow', rows[:2])
    write_arrow(folder / split / 'data-00001-of-00002.arrow', rows[2:])
    write_arrow(folder / split / 'cache-1234.arrow', rows)  # of an earlier map: not the data
    (folder / split / 'state.json').write_text('{"_data_files": []}')
    (folder / split / 'dataset_info.json').write_text('{}')
  (folder / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')


def two_shards(folder):
  for i in (1, 0):
    write_parquet(folder / f'data/train-0000{i}-of-00002.parquet', ROWS[5 * i : 5 * i + 5])


def load(path, split='train', **settings):
  return problems.load(Task(kind='dataset', path=str(path), **{'columns': COLUMNS} | settings), split)


def refused(path, split='train', **settings):
  """Return the error of a data set that cannot be used."""
  with pytest.raises(SettingsError) as error:
    load(path, split, **settings)
  assert '\n' not in str(error.value)
  return str(error.value)


def asked(found):
  return [(p.prompt, p.answer, p.extra) for p in found]


EXPECTED = [(f'{i} + {i}? (page {10 * i})', str(2 * i), {'solution': f'Twice {i}.\n#### {2 * i}'}) for i in range(10)]


@pytest.mark.parametrize(
  'write',
  [
    lambda folder: write_parquet(folder / 'train.parquet'),
    lambda folder: write_jsonl(folder / 'train.jsonl'),
    lambda folder: (folder / 'train.json').write_text(json.dumps(ROWS)),
    lambda folder: write_jsonl(folder / 'train.json'),
    two_shards,
    lambda folder: write_parquet(folder / 'train/0000.parquet'),
    lambda folder: write_arrow(folder / 'data-00000-of-00001.arrow'),
    lambda folder: write_arrow(folder / 'train.arrow', form=ipc.new_file),
    lambda folder: write_parquet(folder / 'problems.parquet'),
    saved_to_disk,
  ],
)
def test_every_layout_gives_the_same_problems(tmp_path, write):
  write(tmp_path)
  found = load(tmp_path)
  assert asked(found) == EXPECTED
  assert [p.row for p in found] == ROWS
  assert [p.id for p in found][:2] == [f'{tmp_path.name}/train/0', f'{tmp_path.name}/train/1']


def test_a_file_is_the_train_split(tmp_path):
  path = write_parquet(tmp_path / 'test.parquet')
  assert asked(load(path)) == EXPECTED
  assert "config.task.splits has 'test': expected a split of" in (said := refused(path, 'test'))
  assert "which has train; another split can serve, such as 'train', or a part of one, such as 'train[95%:]'" in said


def test_parts_of_a_split_meet_and_filters_come_after_them(tmp_path):
  write_jsonl(tmp_path / 'train.jsonl')
  cut = {'splits': ('train[:75%]', 'train[75%:]')}  # 7.5 rows are rounded to 8
  assert [asked(load(tmp_path, split, **cut)) for split in ('train', 'test')] == [EXPECTED[:8], EXPECTED[8:]]
  assert [p.row['level'] for p in load(tmp_path, splits=('train[:5]', 'train'), filters=('level>=3',))] == [3, 4]
  assert load(tmp_path, splits=('train[-2:]', 'train'))[0].id == f'{tmp_path.name}/train/8'  # the row of the whole split


def test_values_that_json_cannot_hold_become_text(tmp_path):
  row = {
    'prompt': '?',
    'answer': 1.5,
    'when': pyarrow.scalar(0, pyarrow.date32()).as_py(),
    'price': Decimal('1.25'),
    'raw': b'abc',
  }
  write_parquet(tmp_path / 'train.parquet', [row])
  (found,) = load(tmp_path, columns={})
  assert json.loads(json.dumps(found.row)) == found.row
  assert found.row == {'prompt': '?', 'answer': 1.5, 'when': '1970-01-01', 'price': '1.25', 'raw': 'YWJj'}
  assert found.answer == '1.5'


SPOKEN = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': '1 + 1?'},
  {'role': 'assistant', 'content': '2'},
]


def test_a_conversation_ends_at_the_user_and_the_assistant_gives_the_solution(tmp_path):
  write_parquet(tmp_path / 'train.parquet', [{'messages': SPOKEN}])
  (found,) = load(tmp_path, columns={}, suffix=' Briefly.')
  assert found.messages == (SPOKEN[0], {'role': 'user', 'content': '1 + 1? Briefly.'})
  assert (found.answer, found.extra) == ('2', {'solution': '2'})
  write_parquet(tmp_path / 'train.parquet', [{'prompt': SPOKEN[:2], 'reward_model': {'ground_truth': 'two'}}])
  (found,) = load(tmp_path, columns={'answer': 'reward_model.ground_truth'})
  assert (found.messages, found.answer, found.extra) == (tuple(SPOKEN[:2]), 'two', {})
  assert 'config.task.chat = False' in refused(tmp_path, columns={'answer': ''}, chat=False)


def test_a_solution_column_of_another_meaning_is_read_only_if_it_is_named(tmp_path):
  write_jsonl(tmp_path / 'train.jsonl', [{'prompt': 'x', 'answer': '1', 'solution': ['a', 'b']}])
  (found,) = load(tmp_path, columns={})
  assert found.extra == {}
  assert 'the solution is list: expected text or a number' in refused(tmp_path, columns={'solution': 'solution'})


def test_a_template_whose_braces_are_no_columns_is_explained(tmp_path):
  write_jsonl(tmp_path / 'train.jsonl', [{'q': 'x', 'answer': '1'}])
  said = refused(tmp_path, columns={'prompt': r'{q} as \boxed{2}?'})
  assert "reads the column '2'" in said
  assert 'where {{ and }} stand for braces' in said


def test_empty_questions_and_answers_are_counted(tmp_path, caplog):
  rows = [
    {'prompt': ' ', 'answer': '1'},
    {'prompt': 'x', 'answer': ''},
    {'prompt': 'y', 'answer': ''},
    {'prompt': 'z', 'answer': '2'},
  ]
  load(write_jsonl(tmp_path / 'train.jsonl', rows), columns={})
  said = [record.message for record in caplog.records]
  assert [message.partition(' of ')[0] for message in said] == ['1', '2']
  assert said[0].endswith('have an empty question')
  assert said[1].endswith('have an empty answer')
  caplog.clear()
  load(tmp_path, columns={'answer': ''})  # no row has one, as the setting says
  assert 'answer' not in caplog.text


def test_an_answer_that_the_grader_does_not_need_may_be_empty_and_braces_may_be_doubled(tmp_path):
  write_jsonl(tmp_path / 'train.jsonl', [{'q': 'x'}])
  (found,) = load(tmp_path, columns={'prompt': r'{q} as \boxed{{}}?', 'answer': ''})
  assert (found.prompt, found.answer) == (r'x as \boxed{}?', '')


@pytest.mark.parametrize(
  ('columns', 'said'),
  [
    ({'prompt': 'problem'}, "prompt reads the column 'problem', which"),
    ({'prompt': 'question', 'answer': '{solution}'}, "answer reads the column 'solution', which"),
    ({'prompt': 'question', 'answer': r'answer ~ ####('}, "answer has the pattern '####(': expected a regular expression"),
    ({'prompt': 'question', 'answer': r'answer ~ boxed'}, "answer has no match of 'boxed' in"),
    ({'prompt': 'source'}, 'the prompt is dict: expected text or a number'),
    ({'prompt': 'question', 'answer': 'none'}, "the answer is null: expected text or a number; config.task.filters = ('COLUMN"),
    ({'prompt': '{question} {none}', 'answer': ''}, 'the column none of the prompt is null: expected text or a number'),
    ({'prompt': 'question', 'answer': r'none ~ (\w+)'}, 'the column none of the answer is null: expected text or a number'),
    ({'prompt': 'question', 'answer': r'question ~ (\d{9})|5'}, 'answer has no match of'),  # the group has none
    ({'prompt': 'question', 'answer': 'infinite'}, 'the answer is inf: expected text or a number'),
    ({}, "prompt reads the column 'prompt', which"),
  ],
)
def test_columns_that_do_not_fit_are_named(tmp_path, columns, said):
  write_jsonl(tmp_path / 'train.jsonl', [{**ROWS[5], 'none': None, 'infinite': math.inf}])
  assert said in (error := refused(tmp_path, columns=columns))
  assert 'reads the column' not in error or 'expected one of question, answer, level, source, none, infinite' in error


def test_a_missing_split_lists_the_splits_that_are_there(tmp_path):
  saved_to_disk(tmp_path)
  said = refused(tmp_path, 'test', splits=('train', 'dev'))
  assert f"config.task.splits has 'dev': expected a split of {tmp_path}, which has test, train" in said


@pytest.mark.parametrize('name', ['train.parquet', 'train.arrow', 'train.json', 'train.jsonl'])
def test_a_damaged_file_is_named(tmp_path, name):
  (tmp_path / name).write_bytes(b'[PAR1 is not what follows')
  assert f'{tmp_path / name}' in refused(tmp_path)
  whole = write_parquet(tmp_path / 'whole.parquet').read_bytes()
  (tmp_path / name).unlink()
  (tmp_path / 'train.parquet').write_bytes(whole[:-100])
  assert f'{tmp_path / "train.parquet"}: cannot be read' in refused(tmp_path)


@pytest.mark.parametrize(
  ('kind', 'value'),
  [(pyarrow.timestamp('s', tz='UTC'), 10**14), (pyarrow.timestamp('s', tz='Mars/Base'), 1), (pyarrow.date32(), 2**30)],
  ids=['after the year 9999', 'unknown time zone', 'date after the year 9999'],
)
def test_a_value_that_python_cannot_hold_is_refused_with_its_file(tmp_path, kind, value):
  parquet.write_table(pyarrow.table({'prompt': ['x'], 'when': pyarrow.array([value], kind)}), tmp_path / 'train.parquet')
  assert refused(tmp_path).startswith(f'{tmp_path / "train.parquet"}: cannot be read: ')


def test_an_arrow_file_whose_places_are_outside_its_buffers_is_refused(tmp_path):
  made = pyarrow.table({'prompt': pyarrow.array(['ab', 'cd'])})
  offsets = struct.pack('<3i', 0, 2, 4)
  with ipc.new_stream(tmp_path / 'train.arrow', made.schema) as writer:
    writer.write_table(made)
  data = (tmp_path / 'train.arrow').read_bytes()
  assert data.count(offsets) == 1
  (tmp_path / 'train.arrow').write_bytes(data.replace(offsets, struct.pack('<3i', 0, 2**30, 4)))
  assert refused(tmp_path).startswith(f'{tmp_path / "train.arrow"}: cannot be read: ')


def test_half_a_surrogate_pair_in_a_json_array_is_named_by_its_row(tmp_path):
  (tmp_path / 'train.json').write_text(r'[{"prompt": "\ud83d\ude00", "answer": 1}, {"prompt": "\ud800", "answer": 2}]')
  assert refused(tmp_path, columns={}).startswith(f'{tmp_path / "train.json"}:1: not JSON in UTF-8')


def test_paths_that_are_no_data_set_are_refused(tmp_path):
  (tmp_path / 'readme.txt').write_text('')
  assert 'expected a file that ends in one of .parquet' in refused(tmp_path / 'readme.txt')
  assert 'which has no files that end in .parquet' in refused(tmp_path)
  assert 'no such file or folder; expected one, or a hub name' in refused('/no/such/folder')


def test_splits_are_read_from_names_of_files_and_folders():
  names = ['README.md', 'main/train-00000-of-00001.parquet', 'main/test-00000-of-00001.parquet', 'socratic/train-00000.parquet']
  assert files_by_split(names, 'main') == {'train': [names[1]], 'test': [names[2]]}
  assert files_by_split(['data/train_sft-00000-of-00002-a1b2c3d4.parquet', 'data/test_sft-00000-of-00001.parquet']) == {
    'train_sft': ['data/train_sft-00000-of-00002-a1b2c3d4.parquet'],
    'test_sft': ['data/test_sft-00000-of-00001.parquet'],
  }
  assert files_by_split(['main/train/0000.parquet', 'main/train/0001.parquet'], 'main') == {
    'train': ['main/train/0000.parquet', 'main/train/0001.parquet']
  }
  assert files_by_split(['data/dapo-math-17k.parquet']) == {'train': ['data/dapo-math-17k.parquet']}
  assert files_by_split(['part-1.jsonl', 'part-2.jsonl']) == {'train': ['part-1.jsonl', 'part-2.jsonl']}
  years = ['aime_2023.jsonl', 'aime_2024.jsonl']
  assert files_by_split(years) == {name.removesuffix('.jsonl'): [name] for name in years}


def test_files_of_two_formats_are_not_read_both(tmp_path):
  write_jsonl(tmp_path / 'train.jsonl')
  write_parquet(tmp_path / 'train.parquet')
  assert 'files of the split train end in .jsonl and in .parquet; expected one format' in refused(tmp_path)
  assert asked(load(tmp_path / 'train.jsonl')) == EXPECTED


# --- the hub ---------------------------------------------------------------------------------------------------------


def hub(monkeypatch, folder, revisions):
  """Replace the hub's client by one that serves `folder`. `revisions` maps a revision to its files. Returns what it is asked."""
  said = []

  def list_repo_files(name, *, repo_type, revision):
    said.append((name, repo_type, revision))
    return revisions[revision]

  def download(name, *, repo_type, revision=None, allow_patterns=None, local_files_only=False):
    said.append((name, repo_type, revision, allow_patterns, local_files_only))
    return str(folder)

  monkeypatch.setattr(huggingface_hub, 'HfApi', lambda: SimpleNamespace(list_repo_files=list_repo_files))
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  return said


def test_only_the_files_of_the_split_are_downloaded(monkeypatch, tmp_path):
  wanted = 'main/train-00000-of-00001.parquet'
  write_parquet(tmp_path / wanted)
  said = hub(monkeypatch, tmp_path, {None: [wanted, 'main/test-00000-of-00001.parquet', 'socratic/train-00000-of-00001.parquet']})
  assert asked(load('openai/gsm8k:main')) == EXPECTED
  assert said == [('openai/gsm8k', 'dataset', None), ('openai/gsm8k', 'dataset', None, [wanted], False)]
  said = refused('openai/gsm8k')
  assert '2 folders have files of the split train: main, socratic; expected a configuration after a colon, such as ' in said
  assert said.endswith('openai/gsm8k:main')


def test_files_of_several_folders_are_not_mixed(tmp_path):
  for name in ('easy', 'hard'):
    write_jsonl(tmp_path / name / 'train.jsonl')
  assert (
    f'2 folders have files of the split train: easy, hard; expected the path of one of them, such as {tmp_path}/easy'
    in refused(tmp_path)
  )
  assert asked(load(tmp_path / 'easy')) == EXPECTED
  write_jsonl(tmp_path / 'train.jsonl', ROWS[:1])
  assert asked(load(tmp_path)) == EXPECTED[:1]  # the nearest file


def test_a_data_set_of_another_format_is_read_from_the_hubs_conversion(monkeypatch, tmp_path):
  wanted = 'default/train/0000.parquet'
  write_parquet(tmp_path / wanted)
  said = hub(monkeypatch, tmp_path, {None: ['train.csv'], 'refs/convert/parquet': [wanted]})
  assert asked(load('some/csv')) == EXPECTED
  assert said[-1][2:4] == ('refs/convert/parquet', [wanted])


def test_without_the_hub_its_cache_is_used(monkeypatch, tmp_path, caplog):
  def unreachable(*_, **__):
    raise OSError('no route to host')

  write_parquet(tmp_path / 'data/train-00000-of-00001.parquet')
  hub(monkeypatch, tmp_path, {})
  monkeypatch.setattr(huggingface_hub, 'HfApi', lambda: SimpleNamespace(list_repo_files=unreachable))
  assert asked(load('some/name')) == EXPECTED
  assert 'some/name: read from the cache, because the hub gives an error (OSError: no route to host)' in caplog.text
  assert 'no route to host' in refused('some/name', 'test')  # the cache has a split that was used, `train`
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', unreachable)
  assert "config.task.path = 'some/name': no such file or folder, and the Hugging Face hub" in (said := refused('some/name'))
  assert 'no route to host' in said


def test_a_split_in_the_hubs_cache_is_used_though_other_files_of_the_data_set_are_not_there(monkeypatch, tmp_path):
  """The real client: it keeps a list of all files of the repository, and refuses the folder, in which some are missing."""
  _tree_cache = pytest.importorskip('huggingface_hub._tree_cache', reason='huggingface_hub before 2 keeps no such list')
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path))
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(huggingface_hub, 'HfApi', Mock(side_effect=OSError('no route to host')))
  revision, repository = 'a' * 40, tmp_path / 'datasets--some--name'
  (repository / 'refs').mkdir(parents=True)
  (repository / 'refs' / 'main').write_text(revision)
  write_jsonl(repository / 'snapshots' / revision / 'data' / 'train.jsonl')
  entry = _tree_cache.TreeCacheEntry(size=1, blob_id='b' * 40, lfs_sha256=None, lfs_size=None, xet_hash=None)
  _tree_cache.write_tree_cache(
    str(repository), revision, dict.fromkeys(('README.md', 'data/train.jsonl', 'data/test.jsonl'), entry)
  )
  with pytest.raises(huggingface_hub.errors.LocalEntryNotFoundError, match='incomplete'):
    huggingface_hub.snapshot_download('some/name', repo_type='dataset', local_files_only=True)
  assert asked(load('some/name')) == EXPECTED


def test_a_split_with_missing_parts_is_refused(tmp_path):
  for part in (0, 2):
    write_jsonl(tmp_path / f'train-{part:05}-of-00003.jsonl', ROWS[:1])
  assert 'the split train has 2 of the 3 files train-...-of-00003: expected all' in refused(tmp_path)
  write_jsonl(tmp_path / 'train-00001-of-00003.jsonl', ROWS[1:])
  assert len(load(tmp_path)) == len(ROWS) + 1


def test_a_pattern_takes_the_last_match_and_its_first_group(tmp_path):
  """The steps of a solution may contain the mark of the answer too."""
  steps = 'First #### 3 apples.\nThen #### 4 apples.\n#### 7 pears \nCheck.'
  write_jsonl(tmp_path / 'train.jsonl', [{'q': '3 + 4?', 'steps': steps}])
  expected = {r'####\s*(\d+)': '7', r'####\s*(\d+) (\w+)': '7', r'\d+ apples': '4 apples', '#### (.+)': '7 pears'}
  for pattern, answer in expected.items():
    (found,) = load(tmp_path, columns={'prompt': 'q', 'answer': f'steps ~ {pattern}'})
    assert found.answer == answer
