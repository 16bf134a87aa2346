"""Task settings that cannot be honoured are refused by name."""

import pytest

from sprl.settings import Run, SettingsError, Task, check_task, grader_file

FINE = [
  Task(),
  Task(kind='reasoning_gym', name='chain_sum', args={'max_terms': 2}),
  Task(kind='jsonl', path='a.jsonl', eval_path='b.jsonl', grader='../mine.py:grade'),
  Task(chat=False),
  Task(system='Be brief.', grader='exact'),
]


@pytest.mark.parametrize('task', FINE)
def test_sound_settings_pass(task):
  check_task(Run(task=task))


@pytest.mark.parametrize(
  ('key', 'task'),
  [
    ('name', Task(kind='reasoning_gym')),
    ('args', Task(kind='reasoning_gym', name='chain_sum', args={'seed': 1})),
    ('args', Task(kind='reasoning_gym', name='chain_sum', args={'size': 1})),
    ('path', Task(kind='jsonl', eval_path='b.jsonl')),
    ('eval_path', Task(kind='jsonl', path='a.jsonl')),
    ('system', Task(chat=False, system='Be brief.')),
    ('size', Task(size=0)),
    ('held_out', Task(held_out=0)),
    ('seed', Task(seed=-1)),
    ('grader_workers', Task(grader_workers=0)),
    ('grader_timeout', Task(grader_timeout=0.0)),
    ('grader_timeout', Task(grader_timeout=float('nan'))),
    ('grader_timeout', Task(grader_timeout=float('inf'))),
    ('grader_memory_gb', Task(grader_memory_gb=-1.0)),
    ('grader', Task(grader='maths')),
    ('grader', Task(grader='mine.py')),
    ('grader', Task(grader='mine.py:not a name')),
    ('grader', Task(grader='mine.txt:grade')),
  ],
)
def test_what_cannot_be_honoured_is_named_with_its_value(key, task):
  with pytest.raises(SettingsError) as error:
    check_task(Run(task=task))
  assert str(error.value).startswith(f'config.task.{key} = {getattr(task, key)!r}: expected ')


def test_grader_file_splits_at_the_last_colon():
  assert grader_file('a:b/mine.py:grade') == ('a:b/mine.py', 'grade')
  assert grader_file('math') is None
