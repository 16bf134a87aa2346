"""Problems: the messages that settings and rows give, and the shares of processes."""

import gc
import json
import weakref

import pytest

from sprl.config import MixtureSource, Task
from sprl.tasks import problems
from sprl.tasks.problems import Problems, Share, holder, pose

ROW = {'id': 'a', 'prompt': '2 + 3?', 'answer': '5'}


def user(text):
  return {'role': 'user', 'content': text}


def test_suffix_and_system_surround_the_question():
  posed = pose(Task(system='Be brief.', suffix=' Only the number.'), ROW)
  assert posed.messages == ({'role': 'system', 'content': 'Be brief.'}, user('2 + 3? Only the number.'))
  assert posed.prompt == '2 + 3? Only the number.'
  assert (posed.id, posed.answer, posed.extra) == ('a', '5', {})


def test_without_a_system_setting_there_is_no_system_message():
  assert pose(Task(), ROW).messages == (user('2 + 3?'),)


def test_a_conversation_keeps_its_system_message_and_ends_with_the_suffix():
  own = [{'role': 'system', 'content': 'Mine.'}, user('1?'), {'role': 'assistant', 'content': '1'}, user('2?')]
  posed = pose(Task(system='Theirs.', suffix='!'), {'id': 'a', 'messages': own, 'answer': '2'})
  assert posed.messages == (*own[:3], user('2?!'))
  assert own[3] == user('2?')  # the row is unchanged


def test_plain_text_has_no_messages():
  posed = pose(Task(chat=False, suffix='\nA:'), ROW)
  assert (posed.prompt, posed.messages) == ('2 + 3?\nA:', ())


def test_problems_are_a_sequence():
  found = Problems(Task(), [{**ROW, 'id': str(i)} for i in range(5)])
  assert len(found) == 5
  assert [p.id for p in found] == ['0', '1', '2', '3', '4']
  assert [p.id for p in found[1:4:2]] == ['1', '3']
  assert found[-1].id == '4'
  with pytest.raises(IndexError):
    found[5]


def test_a_process_holds_only_its_share_of_the_rows():
  class Row(dict):
    """A row with weak references, which show when it is freed."""

  made = []

  def rows():
    for i in range(20):
      row = Row(ROW, id=str(i))
      made.append(weakref.ref(row))
      yield row

  share = Share(rows(), 1, 3)
  gc.collect()
  held = [row['id'] for row in (ref() for ref in made) if row is not None]
  assert held == ['1', '4', '7', '10', '13', '16', '19']
  assert len(share) == 20
  found = Problems(Task(), share)
  assert [found[i].id for i in range(1, 20, 3)] == held
  assert found[-1].id == '19'
  with pytest.raises(KeyError):
    found[2]
  with pytest.raises(IndexError):
    found[22]


def test_the_shares_of_all_processes_are_all_rows():
  shares = [Share(({'id': str(i), 'prompt': '', 'answer': ''} for i in range(11)), process, 4) for process in range(4)]
  assert [shares[holder(i, 4)][i]['id'] for i in range(11)] == [str(i) for i in range(11)]


def test_held_out_questions_that_are_also_trained_on_are_counted(tmp_path):
  lines = [json.dumps({'prompt': f'{i} + 1 = ', 'answer': str(i + 1)}) for i in range(4)]
  lines.append(json.dumps({'messages': [{'role': 'user', 'content': '0 + 1 = '}], 'answer': 'another'}))
  (tmp_path / 'train.jsonl').write_text('\n'.join(lines))

  def loaded(*splits):
    task = Task(kind='jsonl', path=str(tmp_path), splits=splits)
    held_out = problems.load(task, 'test')
    return problems.load(task, 'train'), held_out, range(len(held_out))

  assert problems.shared(*loaded('train[:2]', 'train[2:4]')) == 0
  assert problems.shared(*loaded('train[:3]', 'train[2:]')) == 2
  assert problems.shared(*loaded('train', 'train')) == 5
  posed = [
    Task(kind='dataset', path=str(tmp_path), splits=('train[:2]',) * 2, columns={'prompt': text})
    for text in ('prompt', '{prompt}?')
  ]
  assert problems.shared(problems.load(posed[0], 'train'), problems.load(posed[1], 'test'), [0, 1]) == 2  # equal rows
  source = MixtureSource(kind='jsonl', path=str(tmp_path), splits=('train', 'train'))
  mixed = Task(kind='mixture', mixture={'a': source})
  assert problems.shared(problems.load(mixed, 'train'), problems.load(mixed, 'test'), [4, 1, 0]) == 3
