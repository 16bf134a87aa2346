"""Environments of verifiers, by a fake with the interface of the package, and by the package if it is installed."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from foreign_packages import fake_and_real

from sprl.config import SettingsError
from sprl.tasks.environments import from_verifiers, registry
from sprl.tasks.environments.protocol import EnvironmentFault, checked_reset, checked_step, turn_messages

verifiers = fake_and_real('verifiers', 'make install EXTRAS=verifiers')

SMALL_ENV = """
import verifiers as vf
try:
  from datasets import Dataset
  table = Dataset.from_list
except ImportError:
  table = list

ROWS = [{'prompt': [{'role': 'user', 'content': f'What is {i} + 1?'}], 'answer': str(i + 1)} for i in range(3)]

def load_environment(kind='single'):
  rows = table(ROWS)
  async def right(completion, answer):
    return 1.0 if answer in completion[-1]['content'] else 0.0
  rubric = vf.Rubric(funcs=[right])
  if kind == 'single':
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric, system_prompt='Be brief.')
  if kind == 'tool':
    def add(a: int, b: int) -> int:
      '''Adds two numbers.'''
      return a + b
    return vf.ToolEnv(dataset=rows, tools=[add], max_turns=4, rubric=rubric)
  if kind == 'group':
    async def best(completions):
      return [0.0 for _ in completions]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[best]))

  class Guessing(vf.MultiTurnEnv):
    @vf.stop
    async def solved(self, state):
      return any(state['answer'] in step['completion'][-1]['content'] for step in state['trajectory'])

    async def env_response(self, messages, state, **kwargs):
      said = messages[-1]['content']
      if said == 'crash':
        raise KeyError('boom')
      if said == 'fail':
        raise vf.Error('told')
      if said == 'rewrite':
        messages[0] = {'role': 'user', 'content': 'Something else.'}
      if said == 'silence':
        return []
      return [{'role': 'user', 'content': 'No.'}, {'role': 'user', 'content': 'Again.'}]

  return Guessing(dataset=rows, max_turns=3, rubric=rubric)
"""


@pytest.fixture
def small_env(verifiers, tmp_path, monkeypatch):
  (tmp_path / 'small_env.py').write_text(SMALL_ENV)
  monkeypatch.syspath_prepend(str(tmp_path))
  from_verifiers._load.cache_clear()
  yield lambda kind, **args: registry.make('verifiers', {'id': 'small-env', 'args': {'kind': kind}, **args})
  sys.modules.pop('small_env', None)
  from_verifiers._load.cache_clear()


def test_a_single_turn_of_verifiers_is_asked_and_scored(small_env):
  env = small_env('single')
  for seed, answer, reward in ((1, 'It is 2.', 1.0), (1, 'It is 3.', 0.0), (5, '3', 1.0)):
    observation, info = checked_reset(env, seed)
    assert observation == f'What is {seed % 3} + 1?'
    assert info['messages'] == [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': observation}]
    outcome = checked_step(env, answer)
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (reward, True, False)
    assert outcome.info['metrics']['right'] == reward


def test_a_multi_turn_environment_of_verifiers_is_stepped(small_env):
  env = small_env('multi')
  assert checked_reset(env, 1) == ('What is 1 + 1?', {'messages': [{'role': 'user', 'content': 'What is 1 + 1?'}]})
  outcome = checked_step(env, '7')
  assert (outcome.observation, outcome.reward, outcome.done) == ('No.\n\nAgain.', 0.0, False)
  assert outcome.info['messages'] == [{'role': 'user', 'content': 'No.'}, {'role': 'user', 'content': 'Again.'}]
  outcome = checked_step(env, '2')
  assert (outcome.reward, outcome.terminated, outcome.info['stop_condition']) == (1.0, True, 'solved')
  with pytest.raises(EnvironmentFault, match='no episode is in progress'):
    checked_step(env, '2')


def test_the_turn_limit_of_verifiers_truncates(small_env):
  env = small_env('multi')
  checked_reset(env, 1)
  outcomes = [checked_step(env, 'x') for _ in range(3)]
  assert [(o.terminated, o.truncated, o.reward) for o in outcomes] == [(False, False, 0.0)] * 2 + [(False, True, 0.0)]


def test_tools_of_verifiers_are_described_called_and_answered(small_env):
  env = small_env('tool')
  observation, info = checked_reset(env, 1)
  assert '"name": "add"' in info['env_instruction']
  assert 'Adds two numbers.' in turn_messages(observation, info)[-1]['content']
  outcome = checked_step(env, 'Hm. <tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>')
  assert outcome.info['messages'] == [{'role': 'tool', 'content': '42'}]
  outcome = checked_step(env, '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>')
  assert 'subtract' in outcome.observation  # its own error text
  outcome = checked_step(env, 'So it is 2.')
  assert (outcome.reward, outcome.terminated) == (1.0, True)


@pytest.mark.parametrize(
  'text', ['<tool_call>{"name": 1}</tool_call>', '<tool_call>add</tool_call>', '<tool_call>[]</tool_call>']
)
def test_a_malformed_tool_call_is_plain_text(small_env, text):
  env = small_env('tool')
  checked_reset(env, 1)
  outcome = checked_step(env, text)
  assert (outcome.terminated, outcome.reward) == (True, 0.0)


@pytest.mark.parametrize(
  ('action', 'complaint'),
  [
    ('crash', 'KeyError'),
    ('fail', 'RuntimeError: the rollout failed: .*told'),
    ('rewrite', 'RuntimeError: the rollout rewrote the conversation'),
    ('silence', 'RuntimeError: the rollout asked again without a new message'),
  ],
)
def test_a_failure_in_verifiers_is_a_fault_and_the_next_episode_is_complete(small_env, action, complaint):
  env = small_env('multi')
  checked_reset(env, 1)
  with pytest.raises(EnvironmentFault, match=f'environment verifiers small-env: step raised {complaint}'):
    checked_step(env, action)
  checked_reset(env, 2)
  assert checked_step(env, '3').reward == 1.0


def test_an_episode_of_verifiers_may_be_abandoned(small_env):
  env, other = small_env('multi'), small_env('multi')
  checked_reset(env, 0)
  checked_step(env, 'x')
  checked_reset(other, 2)
  checked_reset(env, 1)
  assert checked_step(env, '2').reward == 1.0
  assert checked_step(other, '3').reward == 1.0
  checked_reset(env, 1)
  env.close()


def test_episodes_of_verifiers_run_in_parallel(small_env):
  def episode(env, seed):
    checked_reset(env, seed)
    return checked_step(env, 'x').observation, checked_step(env, str(seed % 3 + 1)).reward

  with ThreadPoolExecutor(8) as pool:
    envs = [small_env('multi') for _ in range(16)]
    assert list(pool.map(episode, envs, range(16), timeout=60)) == [('No.\n\nAgain.', 1.0)] * 16


def test_verifiers_leaves_signal_handlers_unchanged(small_env):
  numbers = (signal.SIGINT, signal.SIGTERM)
  own = lambda *_: None  # noqa: E731
  before = [signal.signal(number, own) for number in numbers]
  try:
    small_env('single')
    assert [signal.getsignal(number) for number in numbers] == [own, own]
  finally:
    for number, handler in zip(numbers, before, strict=True):
      signal.signal(number, handler)


def test_a_verifiers_environment_that_cannot_be_loaded_is_named(small_env):
  with pytest.raises(SettingsError, match=r"args\.id = 'no-such-env'.*verifiers cannot load it .*Could not import"):
    registry.make('verifiers', {'id': 'no-such-env'})
  with pytest.raises(SettingsError, match=r"args = \{\"kid\": 1\}: verifiers cannot load it .*'kid'"):
    registry.make('verifiers', {'id': 'small-env', 'args': {'kid': 1}})
  with pytest.raises(SettingsError, match='scores a group of rollouts at once'):
    small_env('group')


def test_verifiers_must_be_loaded_in_the_main_thread(small_env):
  with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match='in the main thread'):
    pool.submit(small_env, 'single').result()


def test_a_verifiers_without_load_environment_is_named(monkeypatch):
  module = type(sys)('verifiers')
  module.__version__ = '0.4.0'
  monkeypatch.setitem(sys.modules, 'verifiers', module)
  from_verifiers._load.cache_clear()
  with pytest.raises(SettingsError, match=r'verifiers 0\.4\.0 has no load_environment: make install'):
    registry.make('verifiers', {'id': 'small-env'})
