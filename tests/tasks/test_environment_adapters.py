"""Environments of other packages and of a user's file.

Each test of a package runs against a fake of it, written from its interface (tests/tasks/fakes), and against the package itself
where it is installed.
"""

import importlib.util
import logging
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sprl.config import SettingsError
from sprl.tasks.environments import from_verifiers, registry
from sprl.tasks.environments.from_gem import Gem
from sprl.tasks.environments.play import random_episode
from sprl.tasks.environments.protocol import EnvironmentFault, checked_reset, checked_step, turn_messages

FAKES = Path(__file__).parent / 'fakes'


def package(name, install):
  """A fixture under which the package is the fake, then the real one."""

  @pytest.fixture(params=['fake', 'real'])
  def which(request, monkeypatch):
    ours = lambda: [m for m in sys.modules if m.partition('.')[0] == name]  # noqa: E731
    if request.param == 'real':
      if importlib.util.find_spec(name) is None:
        pytest.skip(f'the package is not installed: {install}')
      yield 'real'
      return
    kept = {module: sys.modules.pop(module) for module in ours()}
    monkeypatch.syspath_prepend(str(FAKES))
    yield 'fake'
    for module in ours():
      del sys.modules[module]
    sys.modules.update(kept)

  return which


gem = package('gem', 'gem-llm, whose metadata refuses Python above 3.12.0')
verifiers = package('verifiers', 'make install EXTRAS=verifiers')
skyrl_gym = package('skyrl_gym', 'pip install skyrl-gym')


@pytest.fixture
def missing(monkeypatch):
  """Packages that cannot be imported."""
  for name in ('gem', 'verifiers', 'skyrl_gym'):
    monkeypatch.setitem(sys.modules, name, None)
  from_verifiers._load.cache_clear()


# --- gem-llm --------------------------------------------------------------------------------------------------------------

MOVES = [f'\\boxed{{{move}}}' for move in ('up', 'left', 'down', 'right')] * 4


def play(env, seed, moves=MOVES):
  seen = [checked_reset(env, seed)]
  for move in moves:
    seen.append(checked_step(env, move))
    if seen[-1].done:
      break
  return seen


def test_a_gem_game_has_its_form_and_its_suffix(gem):
  env = registry.make('gem', {'id': 'game:Game2048-v0-easy'})
  observation, info = checked_reset(env, 3)
  assert '2048' in observation
  assert turn_messages(observation, info)[0]['content'].endswith(info['suffix'])
  outcome = checked_step(env, MOVES[0])
  assert not outcome.truncated
  assert random_episode(env, 5, np.random.default_rng(0), 200).finish in ('terminated', 'truncated')


def test_gem_episodes_do_not_draw_from_one_anothers_chance(gem):
  env, other = (registry.make('gem', {'id': 'game:Game2048-v0-easy'}) for _ in range(2))
  alone = {seed: play(env, seed) for seed in (1, 2)}
  assert alone[1] != alone[2]
  assert play(env, 1) == alone[1]

  first, second = [checked_reset(env, 1)], [checked_reset(other, 2)]
  for move in MOVES:
    random.seed(7)  # what else draws in this process does no harm either
    first.append(checked_step(env, move))
    second.append(checked_step(other, move))
  assert (first, second) == (alone[1], alone[2])


def test_gem_leaves_the_global_generators_and_the_logging_as_they_were(gem, monkeypatch):
  monkeypatch.setattr(logging.root, 'handlers', [])
  before = np.random.get_state()[1].tolist(), logging.root.level
  random.seed(123)
  env = registry.make('gem', {'id': 'game:Game2048-v0-easy'})
  play(env, 1)
  env.sample_random_action()
  assert (np.random.get_state()[1].tolist(), logging.root.level) == before
  assert logging.root.handlers == []
  stream = random.Random(123)  # on which the run-time checker of types draws, too
  assert random.getrandbits(32) in [stream.getrandbits(32) for _ in range(10_000)]


def test_gem_in_threads_gives_what_it_gives_alone(gem):
  seeds = range(12)
  alone = [play(registry.make('gem', {'id': 'game:Game2048-v0-easy'}), seed) for seed in seeds]
  with ThreadPoolExecutor(6) as pool:
    envs = [registry.make('gem', {'id': 'game:Game2048-v0-easy'}) for _ in seeds]
    assert list(pool.map(play, envs, seeds)) == alone


def test_gem_calls_that_are_slow_still_have_their_own_chance():
  class Slow:
    def reset(self, seed):
      random.seed(seed)
      return '', {}

    def step(self, action):
      drawn = []
      for _ in range(5):
        drawn.append(random.random())
        time.sleep(0.002)  # and others run
      return str(drawn), 0.0, True, True, {}

  alone = [play(Gem('slow', Slow()), seed, MOVES[:1]) for seed in range(4)]
  with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(lambda seed: play(Gem('slow', Slow()), seed, MOVES[:1]), range(4))) == alone


def test_gem_takes_the_games_arguments_and_any_seed(gem):
  env = registry.make('gem', {'id': 'game:Game2048-v0-easy', 'args': {'max_turns': 1}})
  assert play(env, 2**40 + 3)[1].done
  assert play(env, 2**40 + 3) == play(env, 3)


def test_a_gem_step_that_draws_nothing_need_not_wait_for_others():
  started, go = threading.Event(), threading.Event()

  class Slow:
    def step(self, action):
      started.set()
      assert go.wait(10)
      return 'seen', 0.0, True, True, {}

  class Quick(Slow):
    def step(self, action):
      go.set()
      return 'seen', 0.0, True, True, {}

  with ThreadPoolExecutor(1) as pool:
    slow = pool.submit(checked_step, Gem('slow', Slow(), exclusive=False), 'a')
    assert started.wait(10)
    checked_step(Gem('quick', Quick()), 'a')
    assert slow.result(10).done


@pytest.mark.parametrize(
  ('args', 'complaint'),
  [
    (
      {'id': 'game:Game2047-v0-easy'},
      r"args\.id = 'game:Game2047-v0-easy': gem has no such environment; .*game:Game2048-v0-easy",
    ),
    ({'id': 'game:Game2048-v0-easy', 'args': {'max_turns': 'many', 'self': 1}}, r'refused by game:Game2048-v0-easy \(TypeError'),
    ({}, r"lacks 'id'"),
  ],
)
def test_what_gem_cannot_make_is_named(gem, args, complaint):
  with pytest.raises(SettingsError, match=complaint):
    registry.make('gem', args)


# --- verifiers ------------------------------------------------------------------------------------------------------------

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
def test_a_malformed_call_is_text_like_any_other(small_env, text):
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
def test_what_fails_in_verifiers_is_a_fault_and_the_next_episode_is_whole(small_env, action, complaint):
  env = small_env('multi')
  checked_reset(env, 1)
  with pytest.raises(EnvironmentFault, match=f'environment verifiers small-env: step raised {complaint}'):
    checked_step(env, action)
  checked_reset(env, 2)
  assert checked_step(env, '3').reward == 1.0


def test_an_episode_of_verifiers_may_be_left(small_env):
  env, other = small_env('multi'), small_env('multi')
  checked_reset(env, 0)
  checked_step(env, 'x')
  checked_reset(other, 2)
  checked_reset(env, 1)
  assert checked_step(env, '2').reward == 1.0
  assert checked_step(other, '3').reward == 1.0
  checked_reset(env, 1)
  env.close()


def test_episodes_of_verifiers_run_side_by_side(small_env):
  def episode(env, seed):
    checked_reset(env, seed)
    return checked_step(env, 'x').observation, checked_step(env, str(seed % 3 + 1)).reward

  with ThreadPoolExecutor(8) as pool:
    envs = [small_env('multi') for _ in range(16)]
    assert list(pool.map(episode, envs, range(16), timeout=60)) == [('No.\n\nAgain.', 1.0)] * 16


def test_the_handlers_of_signals_stay(small_env):
  numbers = (signal.SIGINT, signal.SIGTERM)
  own = lambda *_: None  # noqa: E731
  before = [signal.signal(number, own) for number in numbers]
  try:
    small_env('single')
    assert [signal.getsignal(number) for number in numbers] == [own, own]
  finally:
    for number, handler in zip(numbers, before, strict=True):
      signal.signal(number, handler)


def test_what_verifiers_cannot_load_is_named(small_env):
  with pytest.raises(SettingsError, match=r"args\.id = 'no-such-env'.*verifiers cannot load it .*Could not import"):
    registry.make('verifiers', {'id': 'no-such-env'})
  with pytest.raises(SettingsError, match=r"args = \{\"kid\": 1\}: verifiers cannot load it .*'kid'"):
    registry.make('verifiers', {'id': 'small-env', 'args': {'kid': 1}})
  with pytest.raises(SettingsError, match='scores a group of rollouts at once'):
    small_env('group')


def test_verifiers_is_to_be_loaded_in_the_main_thread(small_env):
  with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match='in the main thread'):
    pool.submit(small_env, 'single').result()


def test_a_verifiers_without_load_environment_is_named(monkeypatch):
  module = type(sys)('verifiers')
  module.__version__ = '0.4.0'
  monkeypatch.setitem(sys.modules, 'verifiers', module)
  from_verifiers._load.cache_clear()
  with pytest.raises(SettingsError, match=r'verifiers 0\.4\.0 has no load_environment: make install'):
    registry.make('verifiers', {'id': 'small-env'})


# --- the chat form --------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path):
  path = tmp_path / 'prompts.jsonl'
  lines = [
    '{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}],'
    ' "reward_spec": {"ground_truth": "5"}, "max_turns": 3}',
    '{"prompt": "3 + 3?", "reward_spec": {"ground_truth": "6"}, "max_turns": 2}',
  ]
  path.write_text('\n'.join(lines))
  return str(path)


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
  assert type(env._build({})).closed == 3  # each episode's own


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


# --- a user's own class -----------------------------------------------------------------------------------------------------

OWN = """
import dataclasses
import neighbour

@dataclasses.dataclass
class Own:
  bonus: float = neighbour.BONUS

  def reset(self, seed):
    return f'seed {seed}', {}

  def step(self, action):
    return 'seen', self.bonus, True, False, {}

class Failing(Own):
  def __init__(self, when):
    raise OSError(f'no database, {when}')

class Half:
  def reset(self, seed):
    return '', {}

class Mute(Half):
  step = 3

function = Own
number = 3
"""


@pytest.fixture
def own(tmp_path):
  (tmp_path / 'neighbour.py').write_text('BONUS = 0.25')
  (tmp_path / 'own.py').write_text(OWN)
  (tmp_path / 'broken.py').write_text('import no_such_module_at_all')
  (tmp_path / 'leaving.py').write_text('import sys; sys.exit(2)')
  yield str(tmp_path)
  sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
  sys.modules.pop('neighbour', None)


def test_a_users_class_is_made_with_its_arguments(own):
  env = registry.make(f'{own}/own.py:Own', {'bonus': 2})
  assert checked_reset(env, 7) == ('seed 7', {})
  assert checked_step(env, 'a').reward == 2.0
  assert checked_step(registry.make(f'{own}/own.py:Own', {}), 'a').reward == 0.25
  assert type(registry.make(f'{own}/own.py:Own', {})) is type(env)  # the file was run once
  assert registry.takes(f'{own}/own.py:Own', 'bonus')
  assert not registry.takes(f'{own}/own.py:Own', 'split')


@pytest.mark.parametrize(
  ('name', 'args', 'complaint'),
  [
    ('none.py:Own', {}, r'task\.name = .*none\.py: no such file'),
    ('own.py:Other', {}, r'own\.py has no class Other; it has Failing, Half, Mute, Own'),
    ('own.py:number', {}, r'own\.py has no class number'),
    ('own.py:Half', {}, r'Half has no method step; expected reset, step'),
    ('own.py:Mute', {}, r'Mute has no method step'),
    ('broken.py:Own', {}, r'broken\.py fails to import \(ModuleNotFoundError: .*no_such_module_at_all'),
    ('leaving.py:Own', {}, r'leaving\.py fails to import \(SystemExit'),
    ('own.py:Own', {'malus': 1}, r"task\.args = \{'malus': 1\}: Own takes \(bonus: .*unexpected keyword argument 'malus'"),
    ('own.py:Failing', {}, r"Failing takes \(when\).*missing a required argument: 'when'"),
    ('own.py:Failing', {'when': 'today'}, r'Failing failed \(OSError: no database, today\)'),
  ],
)
def test_what_is_wrong_with_a_users_class_is_named(own, name, args, complaint):
  with pytest.raises(SettingsError, match=complaint):
    registry.make(f'{own}/{name}', args)


# --- packages that are missing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'args', 'complaint'),
  [
    ('gem', {'id': 'game:Game2048-v0-easy'}, r'gem-llm .*pip install --no-deps --ignore-requires-python gem-llm'),
    ('verifiers', {'id': 'some-env'}, r'verifiers is not installed .*EXTRAS=verifiers'),
    ('chat', {'environment': 'gsm8k'}, r'skyrl-gym, which is not installed \(pip install skyrl-gym\)'),
  ],
)
def test_a_missing_package_is_named_with_how_to_install_it(missing, prompts, name, args, complaint):
  with pytest.raises(SettingsError, match=complaint):
    registry.make(name, {**args, 'prompts': prompts} if name == 'chat' else args)
