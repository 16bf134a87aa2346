"""Environments of the chat form: those of skyrl_gym, by a fake or by the package if it is installed, and a user's class."""

import json

import pytest
from foreign_packages import fake_and_real, write_prompts

from sprl.config import SettingsError, Task
from sprl.rollout.prompts import seeds
from sprl.tasks.environment_pool import make_environment, takes_split
from sprl.tasks.environments import registry
from sprl.tasks.environments.protocol import EnvironmentFault, checked_reset, checked_step

skyrl_gym = fake_and_real('skyrl_gym', 'pip install skyrl-gym')

CHAT_CLASS = """
class Own:
  closed = 0

  def __init__(self, env_config, extras):
    self.config, self.extras = env_config, extras

  def init(self, prompt):
    return [*prompt, {'role': 'user', 'content': self.config['say']}], {'metrics': {'a': 1}}

  def step(self, action):
    if action == 'bad':
      return ['no dict']
    if action == 'nan':
      return {'observations': [], 'reward': float('nan'), 'done': True, 'metadata': None}
    return {'observations': [{'role': 'user', 'content': 'a'}, {'role': 'tool', 'content': 'b'}], 'reward': 0, 'done': False,
            'metadata': {'suffix': 'Go on.'}}

  def close(self):
    Own.closed += 1
"""


@pytest.fixture
def prompts(tmp_path):
  return write_prompts(tmp_path)


def test_an_environment_of_skyrl_gym_is_played_by_its_id(skyrl_gym, prompts):
  env = registry.make('chat', {'environment': 'gsm8k_multi_turn', 'prompts': prompts})
  observation, info = checked_reset(env, 2)
  assert observation == '2 + 3?'
  assert info['messages'] == [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 3?'}]
  outcome = checked_step(env, 'Hm.')
  assert (outcome.reward, outcome.done) == (0.0, False)
  assert 'step' in outcome.observation
  assert outcome.info['messages'] == [{'role': 'user', 'content': outcome.observation}]
  outcome = checked_step(env, '#### 5')
  assert (outcome.reward, outcome.terminated, outcome.truncated, outcome.observation) == (1.0, True, False, '')
  assert checked_reset(env, 3)[0] == '3 + 3?'
  with pytest.raises(SettingsError, match=r"args\.environment = 'no_such': skyrl_gym has .*gsm8k_multi_turn"):
    registry.make('chat', {'environment': 'no_such', 'prompts': prompts})


def test_a_users_class_of_the_chat_form(tmp_path, prompts):
  file = tmp_path / 'own_chat.py'
  file.write_text(CHAT_CLASS)
  args = {'environment': f'{file}:Own', 'prompts': prompts, 'config': {'say': 'Now!'}, 'max_actions': 2}
  env = registry.make('chat', args)
  observation, info = checked_reset(env, 1)
  assert (observation, info['metrics']) == ('Now!', {'a': 1})
  assert info['messages'] == [{'role': 'user', 'content': '3 + 3?'}, {'role': 'user', 'content': 'Now!'}]
  outcome = checked_step(env, 'x')
  assert (outcome.observation, outcome.info['suffix'], outcome.done) == ('a\n\nb', 'Go on.', False)
  assert checked_step(env, 'x').truncated  # max_actions
  for action, complaint in (('bad', r"step returned \['no dict'\]: expected a dict"), ('nan', 'reward is nan')):
    checked_reset(env, 0)
    with pytest.raises(EnvironmentFault, match=complaint):
      checked_step(env, action)
  env.close()
  assert type(env._build({})).closed == 3  # one environment for each episode


@pytest.mark.parametrize(
  ('line', 'complaint'),
  [
    ('{"question": "2?"}', r'train\.jsonl:1: prompt = None: expected text or a list of messages'),
    ('{"prompt": []}', r'train\.jsonl:1: prompt = \[\]'),
    ('{"prompt"', r'train\.jsonl:1: not JSON'),
    ('', r'train\.jsonl has no rows'),
  ],
)
def test_bad_rows_of_the_chat_form_are_named(tmp_path, line, complaint):
  (tmp_path / 'train.jsonl').write_text(line)
  (tmp_path / 'own_chat.py').write_text(CHAT_CLASS)
  args = {'environment': f'{tmp_path / "own_chat.py"}:Own', 'prompts': str(tmp_path)}
  with pytest.raises(SettingsError, match=complaint):
    registry.make('chat', args)


@pytest.mark.parametrize('split', ['train', 'test'])
def test_the_chat_form_without_its_file_is_named(tmp_path, split):
  with pytest.raises(SettingsError, match=rf'expected a folder of train\.jsonl and test\.jsonl; .*/{split}\.jsonl: no such file'):
    registry.make('chat', {'environment': 'gsm8k', 'prompts': str(tmp_path), 'split': split})


def test_environments_share_rows_that_are_read_once_and_that_no_episode_changes(tmp_path, prompts):
  (tmp_path / 'own_chat.py').write_text(
    CHAT_CLASS.replace('return [*prompt, ', "prompt[0]['content'] += '!'\n    return [*prompt, ")
  )
  args = {'environment': f'{tmp_path / "own_chat.py"}:Own', 'prompts': prompts, 'config': {'say': 'Now!'}}
  first = checked_reset(registry.make('chat', args), 0)
  (tmp_path / 'train.jsonl').unlink()
  assert checked_reset(registry.make('chat', args), 0) == first
  assert first[1]['messages'][0]['content'] == 'Be brief.!'


def test_training_asks_all_rows_of_the_chat_form_and_evaluation_those_that_are_held_out(tmp_path):
  (tmp_path / 'own_chat.py').write_text(CHAT_CLASS.replace("self.config['say']", "prompt[0]['content']"))
  asked = {'train': [f'train {i}?' for i in range(4)], 'test': [f'test {i}?' for i in range(3)]}
  for split, texts in asked.items():
    (tmp_path / f'{split}.jsonl').write_text('\n'.join(json.dumps({'prompt': text}) for text in texts))
  task = Task(kind='environment', name='chat', args={'environment': f'{tmp_path / "own_chat.py"}:Own', 'prompts': str(tmp_path)})
  for split, texts in asked.items():
    env = make_environment(task, split == 'test')
    numbers = [seeds(number, split == 'test', takes_split(task)) for number in range(len(env))]
    assert [checked_reset(env, number)[0] for number in numbers] == texts
