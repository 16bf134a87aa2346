"""config.json is compared with the settings at every resume."""

import json

import pytest

from sprl.config import SettingsError
from sprl.io.config_file import config_differences, read_config, read_located, write_config
from sprl.io.starts import add_start


def test_equal_settings_are_accepted_again(tmp_path):
  config = {'seed': 0, 'sampling': {'stop': ('\n',), 'top_p': 1.0}, 'task': {'args': {}}}
  assert write_config(tmp_path / 'run', config) == []
  assert write_config(tmp_path / 'run', config) == []
  assert read_config(tmp_path / 'run') == {'seed': 0, 'sampling': {'stop': ['\n'], 'top_p': 1.0}, 'task': {'args': {}}}


def test_other_settings_are_refused_with_every_difference(tmp_path):
  write_config(tmp_path, {'seed': 0, 'steps': 10, 'log': {'samples': 4}, 'task': {'name': 'gcd'}})
  with pytest.raises(SettingsError, match=r"(?s)seed: 0 -> 1.*task.name: 'gcd' -> 'lcm'") as error:
    write_config(tmp_path, {'seed': 1, 'steps': 20, 'log': {'samples': 5}, 'task': {'name': 'lcm'}}, ('steps', 'log'))
  assert 'steps' not in str(error.value)
  assert read_config(tmp_path)['seed'] == 0


def test_settings_that_may_change_are_replaced_and_reported(tmp_path):
  write_config(tmp_path, {'steps': 10, 'log': {'samples': 4}})
  differences = write_config(tmp_path, {'steps': 20, 'log': {'samples': 5}}, ('steps', 'log'))
  assert differences == ['log.samples: 4 -> 5', 'steps: 10 -> 20']
  assert read_config(tmp_path) == {'steps': 20, 'log': {'samples': 5}}


def test_all_settings_may_change_before_a_run_has_anything_to_lose(tmp_path):
  write_config(tmp_path, {'seed': 0, 'task': {'name': 'gcd'}})
  assert write_config(tmp_path, {'seed': 1, 'task': {'name': 'lcm'}}, None) == ['seed: 0 -> 1', "task.name: 'gcd' -> 'lcm'"]
  assert read_config(tmp_path)['seed'] == 1


def test_differences_distinguish_types_and_absence():
  old = {'a': 1, 'b': {'c': True, 'gone': None}, 'same': [1, 2]}
  new = {'a': '1', 'b': {'c': 1, 'new': 2}, 'same': (1, 2)}
  assert config_differences(old, new, {}) == [
    "a: 1 -> '1'",
    'b.c: True -> 1',
    'b.gone: None -> (not set)',
    'b.new: (not set) -> 2',
  ]


def test_a_newer_setting_is_compared_with_its_default():
  defaults = {'young': {'switch': False, 'bound': 2.0}, 'task': {'args': {}}}
  old = {'task': {'args': {'digits': 1}}}
  assert config_differences(old, {**old, 'young': {'switch': False, 'bound': 2.0}}, defaults) == []
  assert config_differences(old, {**old, 'young': {'switch': True, 'bound': 2.0}}, defaults) == ['young.switch: False -> True']
  assert config_differences(old, {'task': {'args': {}}}, defaults) == ['task.args.digits: 1 -> (not set)']


@pytest.mark.parametrize(('text', 'said'), [('{"steps":', 'not JSON'), ('[' * 100_000, 'not JSON'), ('[]', 'not a JSON object')])
def test_a_damaged_file_is_named(tmp_path, text, said):
  (tmp_path / 'config.json').write_text(text)
  for use in (read_config, lambda folder: write_config(folder, {'steps': 1})):
    with pytest.raises(SettingsError, match=rf'config\.json: {said}'):
      use(tmp_path)


@pytest.mark.parametrize('model', [{'model_type': 'llama', 'seed': 1}, {'hidden_size': 64}])
def test_the_config_of_a_model_is_not_replaced(tmp_path, model):
  (tmp_path / 'config.json').write_text(json.dumps(model))
  with pytest.raises(SettingsError, match=r'its config\.json is not that of a run'):
    write_config(tmp_path, {'seed': 1}, may_change=None)
  assert json.loads((tmp_path / 'config.json').read_text()) == model


def test_a_folder_without_config_json_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r'config\.json'):
    read_config(tmp_path)


@pytest.mark.parametrize(('written', 'trackers'), [(True, ['tensorboard']), (False, [])])
def test_settings_of_an_older_version_are_read_under_their_present_names(tmp_path, written, trackers):
  (tmp_path / 'config.json').write_text(json.dumps({'steps': 3, 'log': {'samples_every': 10, 'tensorboard': written}}))
  assert read_config(tmp_path) == {'steps': 3, 'log': {'samples_every': 10, 'trackers': trackers}}
  given = {'steps': 3, 'log': {'samples_every': 10, 'trackers': trackers, 'project': None}}
  assert write_config(tmp_path, given, defaults={'log': {'project': None}}) == []


def test_a_path_is_the_same_setting_relative_and_absolute_and_from_another_folder(tmp_path, monkeypatch):
  here, there, run = tmp_path / 'here', tmp_path / 'there', tmp_path / 'run'
  here.mkdir()
  there.mkdir()
  (here / 'r.py').write_text('')
  (here / 'data').mkdir()

  def config(before):
    own = {'path': f'{before}data', 'grader': f'{before}r.py:f', 'rewards': ['math', f'{before}r.py:f=0.5'], 'name': 'data'}
    return {'model': {'path': 'owner/name'}, 'task': {**own, 'args': {'path': 'data'}}}

  relative, absolute = config(''), config(f'{here}/')
  monkeypatch.chdir(here)
  write_config(run, relative)
  assert read_config(run) == relative
  assert write_config(run, absolute) == write_config(run, relative) == []
  add_start(run, None, '', {'folder': str(here)})
  monkeypatch.chdir(there)
  assert read_located(run) == absolute
  assert write_config(run, absolute) == []
  with pytest.raises(SettingsError, match=r'task\.grader'):
    write_config(run, config(f'{there}/'))


def test_the_folder_of_a_random_model_is_located_and_a_named_model_is_not(tmp_path, monkeypatch):
  start, run = tmp_path / 'start', tmp_path / 'run'
  for name in ('base', 'tiny'):  # `random:tiny` is the model of that name, also beside a folder `tiny`
    (start / name).mkdir(parents=True)
  for name, expected in (('base', f'random:{start}/base'), ('tiny', 'random:tiny'), ('other', 'random:other')):
    write_config(run / name, {'model': {'path': f'random:{name}'}})
    add_start(run / name, None, '', {'folder': str(start)})
    assert read_located(run / name)['model']['path'] == expected
