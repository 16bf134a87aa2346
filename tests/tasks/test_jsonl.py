"""Problems from a user's JSONL: the fields of a line, and errors that name the line."""

import json

import pytest

from sprl.config import SettingsError, Task
from sprl.tasks import problems


def write(path, *lines):
  path.write_text(''.join((line if isinstance(line, str) else json.dumps(line)) + '\n' for line in lines), encoding='utf-8')
  return path


def test_prompts_and_messages_become_problems_and_answers_text(tmp_path):
  chat = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1 + 1?'}]
  path = write(tmp_path / 'train.jsonl', {'prompt': '2 + 3?', 'answer': '5'}, '', {'messages': chat, 'answer': 2})
  found = problems.load(Task(kind='jsonl', path=str(tmp_path)), 'train')

  assert [p.answer for p in found] == ['5', '2']
  assert [p.id for p in found] == [f'{path}:1', f'{path}:3']  # the blank line counts
  assert found[0].messages == ({'role': 'user', 'content': '2 + 3?'},)
  assert found[1].messages == tuple(chat)
  assert found[1].prompt == '1 + 1?'


def test_a_worked_solution_is_kept(tmp_path):
  write(tmp_path / 'train.jsonl', {'prompt': '2 + 3?', 'answer': 5, 'solution': '2 + 3 = 5'}, {'prompt': 'p', 'answer': 1})
  found = problems.load(Task(kind='jsonl', path=str(tmp_path)), 'train')
  assert [p.extra for p in found] == [{'solution': '2 + 3 = 5'}, {}]


def test_a_solution_may_be_null_or_a_number(tmp_path):
  write(tmp_path / 'train.jsonl', *({'prompt': 'x', 'answer': '1', 'solution': solution} for solution in (None, 5)))
  assert [p.extra for p in problems.load(Task(kind='jsonl', path=str(tmp_path)), 'train')] == [{}, {'solution': '5'}]


def test_the_test_split_is_a_separate_file(tmp_path):
  write(tmp_path / 'train.jsonl', {'prompt': 'p', 'answer': '1'})
  write(tmp_path / 'test.jsonl', {'prompt': 'q', 'answer': '2'})
  task = Task(kind='jsonl', path=str(tmp_path))
  assert [p.prompt for p in problems.load(task, 'train')] == ['p']
  assert [p.prompt for p in problems.load(task, 'test')] == ['q']


@pytest.mark.parametrize(
  ('line', 'complaint'),
  [
    ('{"prompt": "x"', 'not JSON'),
    ('[1]', 'expected a JSON object, got list'),
    ({'answer': '1'}, 'got the keys answer'),
    ({'prompt': 'x', 'messages': [], 'answer': '1'}, 'either `prompt` or `messages`'),
    ({'prompt': 'x'}, 'no answer: expected text or a number; "answer": "" if the reward needs none'),
    ({'prompt': 'x', 'answer': True}, 'answer = True'),
    ({'prompt': ['x'], 'answer': '1'}, "prompt = ['x']"),
    ({'prompt': 'x', 'answer': float('nan')}, 'answer = nan: expected text or a number'),
    ({'prompt': 'x', 'answer': '1', 'solution': ['y']}, "solution = ['y']: expected text or a number"),
    ({'question': 'x', 'answer': '1'}, "a file with other columns needs config.task.kind = 'dataset' and config.task.columns"),
    ({'messages': [], 'answer': '1'}, 'messages = []'),
    ({'messages': [{'role': 'human', 'content': 'x'}], 'answer': '1'}, 'messages[0]'),
    ({'messages': [{'role': 'user', 'content': ['x']}], 'answer': '1'}, 'messages[0]'),
    ({'messages': [{'role': 'assistant', 'content': 'x'}], 'answer': '1'}, "end with the role 'assistant'"),
  ],
)
def test_a_malformed_line_is_named_by_file_and_line(tmp_path, line, complaint):
  path = write(tmp_path / 'train.jsonl', {'prompt': 'fine', 'answer': '1'}, line)
  with pytest.raises(SettingsError) as error:
    problems.load(Task(kind='jsonl', path=str(tmp_path)), 'train')
  assert f'{path}:2: ' in str(error.value)
  assert complaint in str(error.value)


@pytest.mark.parametrize('line', [r'{"prompt": "a\ud800b", "answer": "1"}', '[' * 100_000])
def test_a_line_with_a_lone_surrogate_or_deep_nesting_is_named(tmp_path, line):
  path = tmp_path / 'train.jsonl'
  path.write_text(r'{"prompt": "\ud83d\ude00", "answer": "1"}' + f'\n{line}\n')  # the first line has a pair: an emoji
  with pytest.raises(SettingsError, match=r'train\.jsonl:2: not JSON in UTF-8'):
    problems.load(Task(kind='jsonl', path=str(tmp_path)), 'train')


def test_a_line_that_is_not_utf8_is_named(tmp_path):
  path = tmp_path / 'train.jsonl'
  path.write_bytes(b'{"prompt": "caf\xe9", "answer": "1"}\n')
  with pytest.raises(SettingsError, match=r'train\.jsonl:1: not JSON in UTF-8'):
    problems.load(Task(kind='jsonl', path=str(tmp_path)), 'train')


def test_messages_are_refused_without_chat(tmp_path):
  write(tmp_path / 'train.jsonl', {'messages': [{'role': 'user', 'content': 'x'}], 'answer': '1'})
  with pytest.raises(SettingsError, match=r'train\.jsonl:1: .*config\.task\.chat = False'):
    problems.load(Task(kind='jsonl', path=str(tmp_path), chat=False), 'train')


@pytest.mark.parametrize('split', ['train', 'test'])
def test_a_missing_or_empty_file_is_named_by_its_setting(tmp_path, split):
  task = Task(kind='jsonl', path=str(tmp_path))
  with pytest.raises(SettingsError, match=rf'config\.task\.path = .*{split}\.jsonl: no such file'):
    problems.load(task, split)
  write(tmp_path / f'{split}.jsonl')
  with pytest.raises(SettingsError, match=r'config\.task\.path = .*at least one problem'):
    problems.load(task, split)
