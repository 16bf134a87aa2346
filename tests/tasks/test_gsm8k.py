"""GSM8K from a folder and from the hub, and the scores of its gold solutions."""

import json
import re
from pathlib import Path

import huggingface_hub
import pytest

from sprl.config import SettingsError, Task
from sprl.tasks import graders, problems

DATA = Path(__file__).parents[3] / 'shared/data/gsm8k'
needs_data = pytest.mark.skipif(not (DATA / 'test.jsonl').is_file(), reason='needs the GSM8K files beside the repository')

LINES = [
  {'question': 'How many?', 'answer': '1 + 1 = <<1+1=2>>2\n#### 2'},
  {'question': 'How much?', 'answer': 'Lots.\n#### 1,000'},
]


def folder(path, train=LINES, test=LINES[1:]):
  path.mkdir(exist_ok=True)
  for name, lines in ('train', train), ('test', test):
    (path / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return path


def test_a_local_folder_gives_questions_and_final_answers(tmp_path):
  task = Task(path=str(folder(tmp_path)))
  train, test = problems.load(task, 'train'), problems.load(task, 'test')
  assert [(p.id, p.prompt, p.answer) for p in train] == [
    ('gsm8k/train/0', 'How many?', '2'),
    ('gsm8k/train/1', 'How much?', '1,000'),
  ]
  assert train[0].extra['solution'] == LINES[0]['answer']
  assert [p.prompt for p in test] == ['How much?']


@pytest.mark.parametrize(
  ('line', 'complaint'),
  [
    ({'question': 'x'}, 'got the keys question'),
    ({'question': 'x', 'answer': 'no mark'}, 'expected a last line `#### N`'),
    ({'question': 'x', 'answer': '#### '}, 'expected a last line `#### N`'),
  ],
)
def test_a_malformed_line_is_named(tmp_path, line, complaint):
  path = folder(tmp_path, train=[LINES[0], line])
  with pytest.raises(SettingsError) as error:
    problems.load(Task(path=str(path)), 'train')
  assert f'{path}/train.jsonl:2: ' in str(error.value)
  assert complaint in str(error.value)


def test_a_folder_without_the_split_or_with_an_empty_one_is_named(tmp_path):
  path = folder(tmp_path, test=[])
  with pytest.raises(SettingsError, match=r'config\.task\.path = .*its test split is empty'):
    problems.load(Task(path=str(path)), 'test')
  (path / 'test.jsonl').unlink()
  with pytest.raises(SettingsError, match=r'config\.task\.path = .*has neither test\.jsonl nor main/test-\*\.parquet'):
    problems.load(Task(path=str(path)), 'test')


def test_a_name_that_is_neither_folder_nor_hub_name_is_refused_without_the_hub(monkeypatch):
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', lambda *_, **__: pytest.fail('asked the hub'))
  with pytest.raises(SettingsError, match=r"config\.task\.path = '/no/such/folder': no such folder; expected a local folder"):
    problems.load(Task(path='/no/such/folder'), 'train')


def test_the_error_of_an_unreachable_hub_names_the_local_folder(monkeypatch):
  def unreachable(*_, **__):
    raise OSError('no route to host')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', unreachable)
  with pytest.raises(SettingsError) as error:
    problems.load(Task(), 'train')
  for part in ("config.task.path = 'openai/gsm8k'", 'no route to host', 'a local folder that holds train.jsonl and test.jsonl'):
    assert part in str(error.value)


def test_the_hub_gives_the_problems_of_a_folder(monkeypatch, tmp_path):
  asked = {}

  def download(name, **how):
    asked.update(name=name, **how)
    return str(folder(tmp_path))

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  assert [p.answer for p in problems.load(Task(), 'train')] == ['2', '1,000']
  assert (asked['name'], asked['repo_type']) == ('openai/gsm8k', 'dataset')


def test_the_hubs_parquet_files_are_read(tmp_path):
  arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
  (tmp_path / 'main').mkdir()
  parquet.write_table(arrow.Table.from_pylist(LINES), tmp_path / 'main/train-00000-of-00001.parquet')
  assert [p.answer for p in problems.load(Task(path=str(tmp_path)), 'train')] == ['2', '1,000']


@needs_data
def test_the_published_splits_are_complete():
  task = Task(path=str(DATA))
  assert [len(problems.load(task, split)) for split in ('train', 'test')] == [7473, 1319]


@needs_data
def test_the_column_map_of_a_data_set_gives_the_same_problems():
  columns = {'prompt': 'question', 'answer': r'answer ~ ####\s*(.+)', 'solution': 'answer'}
  for split in ('train', 'test'):
    own, mapped = (
      problems.load(Task(kind=kind, path=str(DATA), columns=c), split) for kind, c in (('gsm8k', {}), ('dataset', columns))
    )
    assert [(p.prompt, p.answer, p.extra, p.row) for p in mapped] == [(p.prompt, p.answer, p.extra, p.row) for p in own]


@needs_data
def test_gold_solutions_score_1_and_changed_final_numbers_score_0():
  test = problems.load(Task(path=str(DATA)), 'test')
  right = [graders.gsm8k(p.prompt, p.extra['solution'], p.answer) for p in test]
  wrong = [graders.gsm8k(p.prompt, with_wrong_number(p.extra['solution']), p.answer) for p in test]
  assert right == [1.0] * 1319
  assert wrong == [0.0] * 1319


@needs_data
def test_gold_answers_score_1_in_boxes_and_in_sentences():
  for p in problems.load(Task(path=str(DATA)), 'test')[::10]:
    for completion in (rf'so \boxed{{{p.answer}}}.', f'The answer is ${p.answer}.00.', f'= {p.answer.replace(",", "")}'):
      assert graders.gsm8k(p.prompt, completion, p.answer) == 1.0, completion


def with_wrong_number(solution):
  """Return the solution with 1 added to the number after `####`."""
  return re.sub(r'#### (-?[\d,]+)', lambda found: f'#### {int(found[1].replace(",", "")) + 1}', solution)
