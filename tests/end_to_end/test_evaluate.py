"""`python -m sprl.evaluate`: a model without a run, several sets, and mistakes."""

import json
from pathlib import Path
from types import MappingProxyType

import pytest
import tiny

from sprl import other_data
from sprl.config import default_config
from sprl.io.metrics import read_metrics
from sprl.io.metrics_reference import undocumented

SMALL = ('--config.task.chat=False', '--config.sampling.max_prompt=32', '--config.sampling.max_tokens=6')


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder, num_hidden_layers=1)
  return folder


def evaluated(*arguments):
  status, out, err = tiny.run('evaluate', *arguments)
  assert status == 0, err
  return out, json.loads(out.splitlines()[-1])


def test_a_model_is_evaluated_without_a_run_on_several_sets(inputs):
  """A set of the same problems has the same scores; the cache is sparse and in FP8."""
  grader = f'{inputs}/grader.py:grade'
  sets = {
    'same': {'path': str(inputs / 'test.jsonl'), 'split': 'train', 'grader': grader},
    'lines': {'kind': 'jsonl', 'path': str(inputs), 'problems': 2, 'grader': 'exact'},
  }
  out, found = evaluated(
    f'--model={inputs}/model', f'--data={inputs}/test.jsonl', *SMALL, f'--config.task.grader={grader}',
    f'--config.eval.sets={sets}', '--config.eval.memory=sampler', '--config.cache.budget=12', '--config.cache.interval=3',
    '--config.quant.sampler=kv8',
  )  # fmt: skip
  assert (found['model'], found['rewards']) == (f'{inputs}/model', [grader])
  own = {key.removeprefix('eval/'): value for key, value in found.items() if key.startswith('eval/') and key.count('/') == 1}
  same = {key.removeprefix('eval/same/'): value for key, value in found.items() if key.startswith('eval/same/')}
  assert own == same
  assert own['problems'] == 5
  assert own['avg@k'] > 0
  assert (found['eval/lines/problems'], found['eval/lines/avg@k']) == (2, 0)
  assert 'same: 5 problems of ' in out
  assert found['intervals/same'] == found['intervals']


def test_other_problems_do_not_have_the_filters_and_splits_of_a_config(inputs):
  """The config's own problems have columns that the others lack. A flag about the problems counts."""
  config = inputs / 'filtered.py'
  changes = "  config.task.filters, config.task.splits = ('level>=3',), ('train', 'hard')\n  return config"
  config.write_text((inputs / 'config.py').read_text().replace('  return config', changes))
  buckets = '--config.sampling.prompt_buckets=()'
  common = f'--model={inputs}/model', f'--config={config}', f'--data={inputs}/test.jsonl', *SMALL, buckets
  _, found = evaluated(*common, '--config.task.grader=exact')
  assert found['eval/problems'] == 3  # eval.problems of the config
  status, _, err = tiny.run('evaluate', *common, "--config.task.filters=('level>=3',)")
  assert (status, 'level' in err) == (2, True)


@pytest.fixture
def with_data():
  """Returns the task of a config after --data, and the warnings."""

  def changed(task, *given, data='other.jsonl', split=None, sets=MappingProxyType({})):
    config = default_config()
    with config.task.ignore_type():
      config.task.update(task)
    return config.task, other_data.with_data(config.task, data, split, given, sets)

  return changed


def test_a_file_has_the_split_of_a_flag_or_all_its_rows(with_data, tmp_path):
  (tmp_path / 'rows.jsonl').write_text('')
  data = str(tmp_path / 'rows.jsonl')
  half = {'splits': ('train[:50%]', 'train[50%:]')}
  assert with_data({'kind': 'jsonl', 'path': 'folder'}, data=data)[0].splits == ('train', 'train')
  assert with_data({'kind': 'jsonl', 'path': 'folder', **half}, 'task.splits', data=data)[0].splits == half['splits']
  assert with_data({'kind': 'jsonl', 'path': 'folder'}, data=data, split='train[50%:]')[0].splits == ('train', 'train[50%:]')


def test_other_data_is_graded_by_the_rewards_of_the_run(with_data):
  for own in ({'grader': 'mine.py:f'}, {'rewards': ('math', 'judge=0.5'), 'judge': {'url': 'u', 'model': 'm'}}):
    task, said = with_data({'kind': 'jsonl', 'path': 'folder', **own})
    assert ({name: task.to_dict()[name] for name in own}, said) == (own, [])
    assert (task.kind, task.path) == ('dataset', 'other.jsonl')
    assert other_data.graded_by(task.to_dict()) == list(own.get('rewards', ('mine.py:f',)))
  task, said = with_data({'kind': 'jsonl', 'path': 'folder', 'rewards': ('math', 'mine.py:f'), 'grader': 'exact'}, 'task.grader')
  assert (task.grader, task.rewards, said) == ('exact', (), [])


def test_the_settings_of_the_judge_stay_where_a_reward_or_a_held_out_set_uses_it(with_data):
  judge = {'url': 'u', 'model': 'm'}
  own = {'kind': 'jsonl', 'path': 'folder', 'rewards': ('math', 'judge=0.5'), 'judge': judge}
  assert with_data({**own, 'rewards': ('judge',)}, 'task.rewards')[0].judge.to_dict() == judge  # a flag set the rewards
  assert with_data({**own, 'rewards': ('math',)}, 'task.rewards')[0].judge.to_dict() == {}
  assert with_data({**own, 'rewards': ()}, sets={'hard': {'grader': 'judge'}})[0].judge.to_dict() == judge
  assert with_data({**own, 'rewards': ()}, sets={'hard': {'grader': 'math'}})[0].judge.to_dict() == {}


@pytest.mark.parametrize(
  ('task', 'data', 'said'),
  [
    ({'kind': 'rows', 'grader': 'python:f'}, 'other.jsonl', 'graded by math, not by python:f'),
    ({'kind': 'gsm8k'}, 'other.jsonl', 'graded by math, not by gsm8k'),
    ({'kind': 'jsonl'}, 'gsm8k', 'graded by gsm8k, not by math'),
    ({'kind': 'environment', 'name': 'frozen_lake'}, 'gsm8k', 'graded by gsm8k, not by environment frozen_lake'),
    ({'kind': 'mixture'}, 'gsm8k', 'graded by gsm8k, not by the graders of its sources'),
    ({'kind': 'dataset', 'columns': {'prompt': 'q'}}, 'a', "config.task.columns = {'prompt': 'q'} does not apply to --data"),
    ({'kind': 'dataset', 'filters': ('a>1',)}, 'a', "config.task.filters = ('a>1',) does not apply to --data"),
    ({'kind': 'dataset', 'splits': ('a', 'b')}, 'a', "config.task.splits = ('a', 'b') does not apply to --data"),
  ],
)
def test_settings_that_other_data_does_not_use_are_named(with_data, task, data, said):
  (warning,) = with_data(task, data=data)[1]
  assert warning.startswith(said)


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    ((), 'expected either --workdir=RUN or --model=FOLDER, got neither'),
    (('--model=x', '--workdir=y'), 'expected either --workdir=RUN or --model=FOLDER, got both'),
    (('--model=x', '--step=3'), '--step = 3: expected none with --model'),
    (('--model=x', '--split=test'), "--split = 'test': expected --data=DATA with it"),
    (('--model=x', '--data=y', '--config.task.path=z'), 'config.task.path: expected not to be set with --data=y'),
    (('--model=x', '--data=y', '--config.task.kind=jsonl'), 'config.task.kind: expected not to be set with --data=y'),
    (
      ('--model=x', '--data=y', '--split=test', "--config.task.splits=('a','b')"),
      'config.task.splits: expected not to be set with --split=test',
    ),
    (
      ('--model=x', '--config.eval.sets={"a": {"pathh": 1}}'),
      'config.eval.sets.a.pathh: no such setting; config.eval.sets.a has',
    ),
  ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, said):
  status, out, err = tiny.run('evaluate', *arguments)
  assert (status, out) == (2, '')
  assert err.startswith(f'error: {said}')
  assert err.count('\n') == 1


@pytest.mark.slow  # two runs, the second interrupted at the boundary of a stage
def test_a_run_of_a_mixture_resumes_exactly_and_is_evaluated_on_other_data(inputs):
  config = inputs / 'mixed.py'
  config.write_text(
    (inputs / 'config.py').read_text().replace(
      '  return config',
      f"""
  config.task.kind, config.task.path, config.task.grader = 'mixture', None, 'auto'
  grader = {str(inputs)!r} + '/grader.py:grade'
  config.task.mixture = {{
    'files': {{'path': {str(inputs)!r}, 'grader': grader, 'weight': {{0: 1.0, 2: 0.25}}}},
    'lines': {{'kind': 'jsonl', 'path': {str(inputs)!r}, 'grader': grader, 'weight': {{0: 0.0, 2: 0.75}}, 'suffix': '?'}},
  }}
  config.eval.sets = {{'dev': {{'path': {str(inputs)!r}, 'problems': 2, 'grader': grader}}}}
  config.steps, config.eval.every, config.ledger.every, config.sampling.max_prompt = 4, 2, None, 17
  config.sampling.prompt_buckets = (17,)
  return config""",
    )
  )  # fmt: skip
  whole, parts = inputs / 'whole', inputs / 'parts'

  def train(workdir, *changes):
    status, out, err = tiny.run('main', f'--config={config}', f'--workdir={workdir}', *changes)
    assert status == 0, err
    return out, [{key: value for key, value in line.items() if key != 'time'} for line in read_metrics(workdir)]

  out, expected = train(whole)
  assert 'dev (2 problems): reward ' in out
  assert undocumented(expected) == []
  assert [line['data/lines/share'] for line in expected if line['kind'] == 'train'] == [0, 0, 0.75, 0.75]
  train(parts, '--config.steps=2')
  _, found = train(parts)
  assert found == expected

  status, _, err = tiny.run('main', f'--config={config}', f'--workdir={parts}', '--config.steps=5', '--config.task.suffix=!')
  assert (status, 'task.suffix' in err) == (2, True)
  _, scored = evaluated(f'--workdir={parts}', f'--data={inputs}', '--split=train', '--config.task.grader=exact')
  assert (scored['step'], scored['eval/problems'], scored['eval/dev/problems']) == (4, 3, 2)
  status, _, err = tiny.run('evaluate', f'--workdir={parts}', f'--data={inputs}', '--config.seed=3')
  assert (status, 'it may not change\n  config.seed: 0 -> 3' in err) == (2, True)
