"""Environments of the chat form: those of skyrl_gym, by a fake or by the package if it is installed, and a user's class."""

import pytest
from foreign_packages import fake_and_real, write_prompts

from sprl.config import SettingsError
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
    ('{"question": "2?"}', r'prompts\.jsonl:1: prompt = None: expected text or a list of messages'),
    ('{"prompt": []}', r'prompts\.jsonl:1: prompt = \[\]'),
    ('{"prompt"', r'prompts\.jsonl:1: not JSON'),
    ('', r'expected at least one row'),
  ],
)
def test_bad_rows_of_the_chat_form_are_named(tmp_path, line, complaint):
  (tmp_path / 'prompts.jsonl').write_text(line)
  (tmp_path / 'own_chat.py').write_text(CHAT_CLASS)
  args = {'environment': f'{tmp_path / "own_chat.py"}:Own', 'prompts': str(tmp_path / 'prompts.jsonl')}
  with pytest.raises(SettingsError, match=complaint):
    registry.make('chat', args)


def test_the_chat_form_without_its_file_is_named():
  with pytest.raises(SettingsError, match=r"args\.prompts = '/no/such\.jsonl': no such file"):
    registry.make('chat', {'environment': 'gsm8k', 'prompts': '/no/such.jsonl'})
