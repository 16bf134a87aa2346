"""Properties of every environment: checks of its results, names, delays, faults, and episodes of a random agent."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.config import SettingsError
from sprl.tasks.environments import registry
from sprl.tasks.environments.latency import InjectedFault, delay, delayed, faulty
from sprl.tasks.environments.play import random_episode
from sprl.tasks.environments.protocol import (
  Environment,
  EnvironmentFault,
  Outcome,
  checked_reset,
  checked_step,
  episode_metrics,
  turn_messages,
)

GOOD = ('seen', 0.5, False, False, {})


class Returning:
  """An environment that returns the given results, or raises them if they are exceptions."""

  def __init__(self, step=GOOD, reset=('first', {})):
    self._step, self._reset = step, reset

  def reset(self, seed):
    return self._give(self._reset)

  def step(self, action):
    return self._give(self._step)

  @staticmethod
  def _give(value):
    if isinstance(value, BaseException):
      raise value
    return value


@pytest.fixture
def gsm8k_folder(tmp_path):
  for split, sum_ in (('train', 5), ('test', 7)):
    lines = [f'{{"question": "What is {i} + {sum_}?", "answer": "Add.\\n#### {i + sum_}"}}' for i in range(4)]
    (tmp_path / f'{split}.jsonl').write_text('\n'.join(lines))
  return str(tmp_path)


@pytest.fixture(params=['frozen_lake', 'slippery lake', 'sokoban', 'guess_number', 'calculator', 'reasoning_gym'])
def make(request, gsm8k_folder):
  name, args = {
    'slippery lake': ('frozen_lake', {'slippery': True, 'size': 6}),
    'calculator': ('calculator', {'path': gsm8k_folder}),
    'reasoning_gym': ('reasoning_gym', {'dataset': 'leg_counting', 'size': 50, 'held_out': 5}),
  }.get(request.param, (request.param, {}))
  return lambda: registry.make(name, args)


# --- checked calls -------------------------------------------------------------------------------------------------------


def test_a_good_environment_passes_through():
  info = {'suffix': 's', 'metrics': {'a': 1, 'b': np.float32(0.5), 'c': True}, 'metrics_agg_mode': {'a': 'last'}, 'own': object()}
  env = Returning(('seen', 1, np.True_, False, info), ('first', info))
  assert checked_reset(env, 3) == ('first', info)
  outcome = checked_step(env, 'act')
  assert outcome == Outcome('seen', 1.0, True, False, info)
  assert type(outcome.reward) is float
  assert type(outcome.terminated) is bool
  assert outcome.done


@pytest.mark.parametrize('reward', [0.25, 2, np.float32(0.25), np.float64(-1), np.int64(3)])
def test_numbers_are_rewards(reward):
  assert checked_step(Returning(('', reward, False, False, {})), '').reward == float(reward)


@pytest.mark.parametrize(
  ('step', 'complaint'),
  [
    (None, 'returned a NoneType: expected a tuple of 5'),
    ([*GOOD], 'returned a list: expected a tuple of 5'),
    (GOOD[:4], 'returned a tuple of 4: expected a tuple of 5: observation, reward, terminated, truncated, info'),
    ((7, 0.0, False, False, {}), 'observation is a int, 7: expected text'),
    ((None, 0.0, False, False, {}), 'observation is a NoneType'),
    (
      ('bad \udc80 byte', 0.0, False, False, {}),
      r"observation is a str, 'bad \\udc80 byte': expected text that UTF-8 can encode",
    ),
    (('', 0.0, False, False, {'suffix': '\ud800'}), r"info\['suffix'\] is .*UTF-8"),
    (('', 0.0, False, False, {'env_instruction': '\ud800'}), r"info\['env_instruction'\] is .*UTF-8"),
    (('', 0.0, False, False, {'messages': [{'role': 'user', 'content': '\ud800'}]}), r"info\['messages'\] is .*UTF-8"),
    (('', 0.0, False, False, {'metrics': {'\ud800': 1.0}}), r"info\['metrics'\] is "),
    (('', math.nan, False, False, {}), 'reward is nan: expected a finite number'),
    (('', -1e39, False, False, {}), r'reward is -1e\+39: expected a finite number of float32'),
    (('', -math.inf, False, False, {}), 'reward is -inf'),
    (('', '1', False, False, {}), "reward is a str, '1': expected a number"),
    (('', True, False, False, {}), 'reward is a bool'),
    (('', None, False, False, {}), 'reward is a NoneType'),
    (('', np.zeros(1), False, False, {}), 'reward is a ndarray'),
    (('', 0.0, 1, False, {}), 'terminated is a int'),
    (('', 0.0, False, None, {}), 'truncated is a NoneType'),
    (('', 0.0, False, False, None), 'info is a NoneType'),
    (('', 0.0, False, False, {'suffix': 1}), r"info\['suffix'\] is 1: expected text"),
    (('', 0.0, False, False, {'metrics': {'a': math.nan}}), r"info\['metrics'\] is .*: expected a dict of finite numbers"),
    (('', 0.0, False, False, {'metrics': {'a': 'b'}}), r"info\['metrics'\]"),
    (('', 0.0, False, False, {'metrics_agg_mode': {'a': 'sum'}}), r"info\['metrics_agg_mode'\] .*'mean' or 'last'"),
    (('', 0.0, False, False, {'messages': [{'role': 'user'}]}), r"info\['messages'\] .*a list of messages"),
    (ValueError('broken'), 'raised ValueError: broken'),
    (SystemExit(3), 'raised SystemExit: 3'),
    (GeneratorExit(), 'raised GeneratorExit'),
  ],
)
def test_a_bad_step_is_a_fault_that_names_the_environment(step, complaint):
  with pytest.raises(EnvironmentFault, match=f'^environment Returning: step:? {complaint}') as caught:
    checked_step(Returning(step), 'act')
  assert caught.value.__cause__ is (step if isinstance(step, BaseException) else None)
  assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # a fault goes from process to process


@pytest.mark.parametrize(
  ('reset', 'complaint'),
  [
    ('first', 'returned a str: expected a tuple of 2: observation, info'),
    (('first', {}, 1), 'returned a tuple of 3'),
    ((b'first', {}), 'observation is a bytes'),
    (('\udc80', {}), r"observation is a str, '\\udc80': expected text that UTF-8 can encode"),
    (('first', []), 'info is a list'),
    (OSError('no disk'), 'raised OSError: no disk'),
  ],
)
def test_a_bad_reset_is_a_fault_that_names_the_environment_and_the_seed(reset, complaint):
  with pytest.raises(EnvironmentFault, match=rf'^environment Returning: reset\(11\):? {complaint}'):
    checked_reset(Returning(reset=reset), 11)


def test_an_error_that_cannot_be_printed_is_a_fault():
  class Unprintable(Exception):
    def __str__(self):
      raise RuntimeError

  with pytest.raises(EnvironmentFault, match=r'raised Unprintable$'):
    checked_step(Returning(Unprintable()), '')


def test_a_keyboard_interrupt_is_no_fault():
  with pytest.raises(KeyboardInterrupt):
    checked_step(Returning(KeyboardInterrupt()), '')


# --- messages to the model -----------------------------------------------------------------------------------------------


def test_a_turn_is_one_user_message():
  assert turn_messages('seen', {}) == [{'role': 'user', 'content': 'seen'}]
  info = {'env_instruction': 'Rules.', 'suffix': 'Answer.'}
  assert turn_messages('seen', info) == [{'role': 'user', 'content': 'Rules.\n\nseen\n\nAnswer.'}]


def test_a_turn_of_several_messages_ends_with_the_suffix():
  given_ = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'seen'}]
  found = turn_messages('seen', {'messages': given_, 'suffix': 'Answer.'})
  assert found == [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'seen\n\nAnswer.'}]
  assert given_[1]['content'] == 'seen'  # unchanged


def test_metrics_of_an_episode_follow_their_aggregation():
  infos = [
    {'metrics': {'success': 0, 'valid': 1}, 'metrics_agg_mode': {'success': 'last'}},
    {},
    {'metrics': {'success': 1, 'valid': 0, 'late': 3}, 'metrics_agg_mode': {'success': 'last', 'valid': 'mean'}},
  ]
  assert episode_metrics(infos) == {'success': 1.0, 'valid': 0.5, 'late': 3.0}
  assert episode_metrics([]) == {}


# --- every shipped environment ---------------------------------------------------------------------------------------------


def test_equal_seeds_and_actions_give_equal_trajectories(make):
  env, other = make(), make()
  for seed in range(5):
    first = random_episode(env, seed, np.random.default_rng(seed), 30)
    random_episode(other, seed + 50, np.random.default_rng(9), 3)  # earlier episodes have no effect
    again = random_episode(other, seed, np.random.default_rng(seed), 30)
    assert first == again
    assert first.finish in ('terminated', 'truncated'), first.fault
    assert len(first.actions) == len(first.outcomes) >= 1


def test_seeds_pose_different_tasks(make):
  env = make()
  if type(env).__name__ == 'GuessNumber':  # its rules are the same; its numbers are not
    first = {random_episode(env, seed, np.random.default_rng(0), 30).observations for seed in range(20)}
  else:
    first = {checked_reset(env, seed)[0] for seed in range(4)}
  assert len(first) > 2


def test_an_environment_has_the_interface(make):
  env = make()
  assert isinstance(env, Environment)
  assert episode_metrics([checked_reset(env, 0)[1]]) == {}
  outcome = checked_step(env, 'nothing of use')
  assert 'success' in outcome.info['metrics']
  assert outcome.info['metrics_agg_mode'].keys() <= outcome.info['metrics'].keys()


def test_steps_outside_an_episode_are_faults(make):
  env = make()
  with pytest.raises(EnvironmentFault, match='no episode is in progress'):
    checked_step(env, 'a')
  random_episode(env, 0, np.random.default_rng(0), 50)
  with pytest.raises(EnvironmentFault, match='no episode is in progress'):
    checked_step(env, 'a')
  checked_reset(env, 1)
  checked_step(env, 'a')


PIECES = st.sampled_from(
  [
    '<answer>',
    '</answer>',
    '<calc>',
    '</calc>',
    'left',
    'UP',
    '####',
    '7',
    '9' * 50,
    '1e9',
    '(',
    ')',
    '**',
    '/0',
    '\n',
    '\x00',
    '٣',
  ]
)


@settings(max_examples=60)
@given(actions=st.lists(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=12).map(''.join)), min_size=1, max_size=4))
@pytest.mark.parametrize('name', ['frozen_lake', 'sokoban', 'guess_number', 'calculator'])
def test_no_action_raises(name, actions, tmp_path_factory):
  args = {}
  if name == 'calculator':
    folder = tmp_path_factory.getbasetemp() / 'fuzzed'
    folder.mkdir(exist_ok=True)
    (folder / 'train.jsonl').write_text('{"question": "2 + 5?", "answer": "#### 7"}')
    args = {'path': str(folder)}
  env = registry.make(name, args)
  checked_reset(env, 0)
  for action in actions:
    if checked_step(env, action).done:
      break


# --- by name -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'args', 'complaint'),
  [
    (
      'frozen_lakes',
      {},
      r"task\.name = 'frozen_lakes': expected one of frozen_lake, sokoban, .*chat, or `file\.py:Class`",
    ),
    ('frozen_lake', {'width': 4}, r"task\.args has 'width': frozen_lake takes size, max_actions, holes, slippery"),
    ('frozen_lake', {'size': 1}, r"task\.args = \{'size': 1\}: refused by frozen_lake \(size = 1: expected 2 to 20"),
    ('frozen_lake', {'size': 'four'}, r"task\.args\.size = 'four': expected int, got str"),
    ('frozen_lake', {'holes': 0.9}, r'holes = 0.9: expected a part in \[0, 0.5\]'),
    ('frozen_lake', {'max_actions': 0}, r'max_actions = 0: expected 1 or more'),
    ('sokoban', {'boxes': 9}, r'boxes = 9: expected 1 to 4'),
    ('sokoban', {'size': 3}, r'size = 3: expected 5 to 20'),
    ('guess_number', {'low': 5, 'high': 5}, r'low = 5, high = 5: expected low below high'),
    ('calculator', {'path': '/no/such/folder'}, r"config\.task\.args\.path = '/no/such/folder'"),
    ('calculator', {'split': 'dev'}, r"task\.args\.split = 'dev': expected one of 'train', 'test'"),
    ('reasoning_gym', {}, r"task\.args lacks 'dataset': reasoning_gym takes dataset, args"),
    (
      'reasoning_gym',
      {'dataset': 'leg_count'},
      r"config\.task\.args\.dataset = 'leg_count': .* no such data set; .*leg_counting",
    ),
    ('reasoning_gym', {'dataset': 'leg_counting', 'args': {'legs': 1}}, r"config\.task\.args\.args has 'legs'"),
    ('reasoning_gym', {'dataset': 'leg_counting', 'size': 0}, r'config\.task\.args\.size = 0: expected a number of at least 1'),
    ('reasoning_gym', {'dataset': 'leg_counting', 'split': 'dev'}, r"split = 'dev'"),
  ],
)
def test_an_environment_that_cannot_be_made_is_named(name, args, complaint):
  with pytest.raises(SettingsError, match=complaint):
    registry.make(name, args)


def test_environments_with_questions_take_a_split():
  assert {name for name in registry.NAMES if registry.takes(name, 'split')} == {'calculator', 'chat', 'reasoning_gym'}
  assert not registry.takes('no_such', 'split')


def test_reasoning_gym_rewards_with_its_score_and_holds_out_test_questions():
  args = {'dataset': 'chain_sum', 'args': {'min_terms': 2, 'max_terms': 2, 'max_digits': 1}, 'size': 300}
  train, test = registry.make('reasoning_gym', args), registry.make('reasoning_gym', {**args, 'split': 'test'})
  asked = {checked_reset(train, seed)[0] for seed in range(300)}
  held_out = {checked_reset(test, seed)[0] for seed in range(300)}
  assert asked.isdisjoint(held_out)

  question = checked_reset(train, 5)[0]
  a, sign, b = question.rstrip(' =').split()[-3:]
  right = int(a) + int(b) if sign == '+' else int(a) - int(b)
  assert checked_step(train, f'It is <answer>{right}</answer>').reward == 1
  checked_reset(train, 5)
  wrong = checked_step(train, f'It is <answer>{right + 1}</answer>')
  assert (wrong.reward, wrong.terminated, wrong.truncated, wrong.info['metrics']) == (0, True, False, {'success': 0.0})


# --- delays and faults ----------------------------------------------------------------------------------------------------


def test_delays_follow_a_clipped_normal_and_depend_on_seed_and_turn_only():
  drawn = np.array([delay(10.0, 5.0, 0, seed, turn) for seed in range(60) for turn in range(20)])
  kept = np.clip(np.random.default_rng(0).normal(10, 5, 10**6), 0, None)  # the expected distribution
  assert drawn.min() >= 0
  assert abs(drawn.mean() - kept.mean()) < 4 * kept.std() / len(drawn) ** 0.5
  assert abs(drawn.std() - kept.std()) < 0.5
  assert (np.array([delay(1.0, 3.0, 0, seed, 1) for seed in range(200)]) == 0).any()
  above = drawn[drawn > 0]
  assert len(set(above)) == len(above)  # no delay occurs twice
  assert delay(10.0, 5.0, 0, 3, 4) == drawn[3 * 20 + 4]
  assert delay(10.0, 5.0, 1, 3, 4) != drawn[3 * 20 + 4]


def test_a_delayed_environment_sleeps_and_plays_the_same():
  slept = []
  plain = random_episode(registry.make('guess_number', {}), 3, np.random.default_rng(0), 5)
  env = delayed(registry.make('guess_number', {}), 10.0, 5.0, salt=2, sleep=slept.append)
  assert random_episode(env, 3, np.random.default_rng(0), 5) == plain
  assert slept == [delay(10.0, 5.0, 2, 3, turn) for turn in range(len(plain.actions) + 1)]
  with pytest.raises(EnvironmentFault, match='environment guess_number: step'):
    checked_step(delayed(registry.make('guess_number', {}), 0.0), 'a')


def test_wrappers_have_the_optional_methods_of_the_wrapped_environment():
  assert not hasattr(delayed(Returning(), 0.0), 'close')
  assert faulty(registry.make('guess_number', {})).sample_random_action().startswith('<answer>')


def test_injected_faults_have_their_rates_and_repeat_at_the_same_turns():
  def outcomes(salt):
    found = []
    for seed in range(40):
      slept = []
      env = faulty(Returning(), raising=0.2, hanging=0.1, hang_seconds=99.0, salt=salt, sleep=slept.append)
      for turn in range(20):
        try:
          env.step('') if turn else env.reset(seed)
          found.append('hang' if slept else 'fine')
        except InjectedFault:
          found.append('raise')
        assert slept in ([], [99.0])
        slept.clear()
    return found

  first = outcomes(0)
  assert outcomes(0) == first
  assert outcomes(1) != first
  assert 0.15 < first.count('raise') / 800 < 0.25
  assert 0.06 < first.count('hang') / 800 < 0.14


def test_a_random_run_with_injected_faults_and_hangs_ends_and_reports(make):
  slept, finishes = [], []
  for seed in range(20):
    env = faulty(make(), raising=0.15, hanging=0.15, sleep=slept.append)
    episode = random_episode(env, seed, np.random.default_rng(seed), 30)
    finishes.append(episode.finish)
    assert (episode.finish == 'fault') == ('InjectedFault: injected in turn' in episode.fault)
  assert 'fault' in finishes
  assert {'terminated', 'truncated'} & set(finishes)
  assert slept


@pytest.mark.parametrize(
  ('wrap', 'complaint'),
  [
    (lambda env: delayed(env, -1.0), 'mean = -1.0'),
    (lambda env: delayed(env, math.nan), 'mean = nan'),
    (lambda env: faulty(env, raising=0.6, hanging=0.6), 'together at most 1'),
  ],
)
def test_impossible_delays_and_faults_are_refused(wrap, complaint):
  with pytest.raises(ValueError, match=complaint):
    wrap(Returning())


@pytest.mark.parametrize(
  ('ends', 'finish'), [((True, False), 'terminated'), ((False, True), 'truncated'), ((True, True), 'terminated')]
)
def test_an_episode_records_its_finish(ends, finish):
  episode = random_episode(Returning(('seen', 0.5, *ends, {})), 0, np.random.default_rng(0), 9)
  assert (episode.finish, episode.reward, episode.observations) == (finish, 0.5, ('first', 'seen'))


def test_an_agent_writes_random_text_without_actions_of_the_environment():
  env = Returning(('seen', 1.0, False, False, {}))
  episode = random_episode(env, 0, np.random.default_rng(0), 25)
  assert (episode.finish, episode.reward, len(episode.observations)) == ('max_turns', 25.0, 26)
  assert len(set(episode.actions)) > 5
