"""Splits and filters: which rows they keep, against conditions in plain Python, and the texts that are refused."""

import json

import pytest

from sprl.config import SettingsError, Task
from sprl.tasks import problems
from sprl.tasks.selection import parse_filter, parse_split

ROWS = [
  {'level': 3, 'type': 'algebra', 'score': 0.5, 'hard': True, 'text': '7', 'of': {'page': 1}},
  {'level': 5, 'type': 'Number Theory', 'score': 2.0, 'hard': False, 'text': '30', 'of': {'page': 2}},
  {'level': None, 'type': 'algebra', 'score': -1, 'hard': None, 'text': '', 'of': {'page': 3}},
]


@pytest.mark.parametrize(
  ('text', 'condition'),
  [
    ('level>=3', lambda r: r['level'] is not None and r['level'] >= 3),
    ('level > 3', lambda r: r['level'] is not None and r['level'] > 3),
    ('level<4.5', lambda r: r['level'] is not None and r['level'] < 4.5),
    ('score<=0.5', lambda r: r['score'] <= 0.5),
    ('score>-1', lambda r: r['score'] > -1),
    ('level==3', lambda r: r['level'] == 3),
    ('score==2', lambda r: r['score'] == 2),
    ('level!=3', lambda r: r['level'] != 3),
    ('level==null', lambda r: r['level'] is None),
    ('level!=null', lambda r: r['level'] is not None),
    ('type==algebra', lambda r: r['type'] == 'algebra'),
    ('type == Number Theory', lambda r: r['type'] == 'Number Theory'),
    ("type=='algebra'", lambda r: r['type'] == 'algebra'),
    ('type~^[A-Z]', lambda r: r['type'][0].isupper()),
    ('hard==true', lambda r: r['hard'] is True),
    ('hard!=true', lambda r: r['hard'] is not True),
    ('of.page>=2', lambda r: r['of']['page'] >= 2),
    ('text==7', lambda r: r['text'] == '7'),
    ("text==''", lambda r: r['text'] == ''),
  ],
)
def test_a_filter_keeps_the_rows_that_meet_its_condition(text, condition):
  found = parse_filter(text)
  assert [found.keeps('here', row) for row in ROWS] == [condition(row) for row in ROWS]


def test_numbers_in_text_are_compared_as_numbers():
  assert [parse_filter('text>=8').keeps('here', row) for row in ROWS[:2]] == [False, True]


@pytest.mark.parametrize('text', ['level', '>=3', 'level>=', 'level>=high', 'a b==3', 'type~(', 'level=3', ''])
def test_a_filter_that_cannot_be_read_is_refused(text):
  with pytest.raises(SettingsError) as error:
    parse_filter(text)
  assert str(error.value).startswith(f'config.task.filters has {text!r}: expected ')


def test_a_value_that_is_no_number_is_named_by_its_row():
  with pytest.raises(
    SettingsError, match=r"config\.task\.filters has 'type>=3': here has type = 'algebra', which is not a number"
  ):
    parse_filter('type>=3').keeps('here', ROWS[0])
  with pytest.raises(SettingsError, match=r'here has level = 10+, which is not a number'):
    parse_filter('level>=3').keeps('here', {'level': 10**400})
  with pytest.raises(SettingsError, match='here has a dict; expected a column of text'):
    parse_filter('of~x').keeps('here', ROWS[0])


@pytest.mark.parametrize('text', ['train[95%]', 'train[:101%]', 'train[a:b]', '', 'train[:5', 'a b', f'train[:{"9" * 5000}]'])
def test_a_split_that_cannot_be_read_is_refused(text):
  with pytest.raises(SettingsError) as error:
    parse_split(text)
  assert str(error.value).startswith(f'config.task.splits has {text!r}: expected a split such as train')


def folder(path, rows):
  lines = [json.dumps({'prompt': f'{i}?', 'answer': str(i), **row}) for i, row in enumerate(rows)]
  (path / 'train.jsonl').write_text('\n'.join(lines))
  return path


def test_parts_and_filters_apply_to_jsonl_and_keep_unknown_keys_in_the_row(tmp_path):
  folder(tmp_path, ROWS)
  task = Task(kind='jsonl', path=str(tmp_path), splits=('train[:2]', 'train[2:]'), filters=('type==algebra',))
  train, test = (problems.load(task, split) for split in ('train', 'test'))
  assert [(p.answer, p.row) for p in train] == [('0', {'prompt': '0?', 'answer': '0', **ROWS[0]})]
  assert [p.answer for p in test] == ['2']


def test_no_row_that_is_left_and_no_such_column_are_errors(tmp_path):
  folder(tmp_path, ROWS)
  task = Task(kind='jsonl', path=str(tmp_path), filters=('level>=3', 'type==geometry'))
  with pytest.raises(
    SettingsError, match=r'config\.task\.filters = .*expected at least one problem; none of the 3 rows of train'
  ):
    problems.load(task, 'train')
  task = Task(kind='jsonl', path=str(tmp_path), filters=('lvl>=3',))
  there = 'prompt, answer, level, type, score, hard, text, of'
  with pytest.raises(
    SettingsError, match=rf"config\.task\.filters = \('lvl>=3',\): no row has the column lvl; there are {there}"
  ):
    problems.load(task, 'train')
