"""Problems from rows in memory."""

import numpy as np
import pytest

from sprl.config import SettingsError, Task
from sprl.tasks import in_memory


def test_rows_become_problems_with_all_their_columns():
  given = [
    {'prompt': '2 + 3?', 'answer': 5, 'level': 1},
    {'prompt': [{'role': 'user', 'content': 'Hi'}]},
    {'messages': [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}], 'answer': 'Hello'},
  ]
  first, second, third = in_memory.load(Task(kind='rows', suffix=' Say it.'), given)
  assert (first.prompt, first.answer, first.row) == ('2 + 3? Say it.', '5', given[0])
  assert (second.messages, second.answer) == (({'role': 'user', 'content': 'Hi Say it.'},), '')
  assert (third.messages[0]['content'], third.row) == ('Be brief.', given[2])


@pytest.mark.parametrize(('answer', 'text'), [(np.int64(3), '3'), (np.float32(0.1), '0.1'), (np.str_('three'), 'three')])
def test_answers_of_numpy_are_numbers_and_text(answer, text):
  assert in_memory.load(Task(kind='rows'), [{'prompt': 'a', 'answer': answer}])[0].answer == text


@pytest.mark.parametrize(
  ('rows', 'said'),
  [
    ([], r'rows = \[\]: expected at least one row'),
    ([{'prompt': 'a'}, 'b'], r"rows\[1\] = 'b': expected a dictionary"),
    ([{'question': 'a'}], r'rows\[0\]: expected either `prompt` or `messages`, got the keys question$'),
    ([{'prompt': 'a', 'answer': [1]}], r'rows\[0\]: answer = \[1\]'),
    ([{'messages': [{'role': 'user'}]}], r'rows\[0\]: messages\[0\]'),
    ([{'prompt': 'a', 'answer': '\ud800'}], r'rows\[0\]: no text in UTF-8'),
  ],
)
def test_a_malformed_row_is_named(rows, said):
  with pytest.raises(SettingsError, match=said):
    in_memory.load(Task(kind='rows'), rows)


@pytest.mark.parametrize(('count', 'most', 'held_out'), [(2, 128, 1), (9, 128, 1), (40, 128, 4), (40, 3, 3), (5000, 128, 128)])
def test_the_last_tenth_is_held_out(count, most, held_out):
  rows = [{'prompt': str(i)} for i in range(count)]
  train, test = in_memory.split(rows, most)
  assert [*train, *test] == rows
  assert len(test) == held_out
  with pytest.raises(SettingsError, match='at least 2'):
    in_memory.split(rows[:1], most)


def test_a_digest_depends_on_rows_and_their_order_not_on_keys():
  def digest(rows):
    return in_memory.load(Task(kind='rows'), rows).digest

  rows = [{'prompt': 'a', 'n': 1}, {'prompt': 'b', 'x': {1, 2}}]
  same = [{'n': 1, 'prompt': 'a'}, {'prompt': 'b', 'x': {1, 2}}]
  assert digest(rows) == digest(same)
  assert digest(rows) != digest(rows[::-1])


def test_numbers_of_numpy_reach_rewards_as_numbers():
  row = {'hard': np.bool_(False), 'level': np.int64(3), 'grid': np.eye(2, dtype=np.float32), 'names': {'b', 'a'}, 'none': None}
  (problem,) = in_memory.load(Task(kind='rows'), [{'prompt': 'a', **row}])
  found = {name: problem.row[name] for name in row}
  assert found == {'hard': False, 'level': 3, 'grid': [[1.0, 0.0], [0.0, 1.0]], 'names': ['a', 'b'], 'none': None}
  assert found['hard'] is False
  times = {'share': np.float64(0.5), 'day': np.datetime64('2020-01-01', 'ns'), 'days': np.array(['2020-01-01'], 'M8[ns]')}
  (problem,) = in_memory.load(Task(kind='rows'), [{'prompt': 'a', **times}])
  assert type(problem.row['share']) is float
  assert problem.row['day'].startswith('2020-01-01T00')
  assert problem.row['days'][0].startswith('2020-01-01T00')


def test_a_digest_depends_on_the_content_of_arrays_and_not_on_the_address_of_objects():
  class Thing:
    pass

  def digest(**columns):
    return in_memory.load(Task(kind='rows'), [{'prompt': 'a', **columns}]).digest

  long, other = np.zeros(5000), np.zeros(5000)
  other[2500] = 1.0
  assert digest(x=long) == digest(x=long.copy())
  assert digest(x=long) != digest(x=other)
  kept = Thing()
  assert digest(x=kept) == digest(x=Thing())
