"""Environments of gem-llm, by a fake with the interface of the package, and by the package if it is installed."""

import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from foreign_packages import fake_and_real

from sprl.config import SettingsError
from sprl.tasks.environments import registry
from sprl.tasks.environments.from_gem import Gem
from sprl.tasks.environments.play import random_episode
from sprl.tasks.environments.protocol import checked_reset, checked_step, turn_messages

MOVES = [f'\\boxed{{{move}}}' for move in ('up', 'left', 'down', 'right')] * 4

gem = fake_and_real('gem', 'gem-llm, whose metadata refuses Python above 3.12.0')


def play(env, seed, moves=MOVES):
  seen = [checked_reset(env, seed)]
  for move in moves:
    seen.append(checked_step(env, move))
    if seen[-1].done:
      break
  return seen


def test_a_gem_game_has_the_interface_and_a_suffix(gem):
  env = registry.make('gem', {'id': 'game:Game2048-v0-easy'})
  observation, info = checked_reset(env, 3)
  assert '2048' in observation
  assert turn_messages(observation, info)[0]['content'].endswith(info['suffix'])
  outcome = checked_step(env, MOVES[0])
  assert not outcome.truncated
  assert random_episode(env, 5, np.random.default_rng(0), 200).finish in ('terminated', 'truncated')


def test_gem_episodes_have_independent_random_numbers(gem):
  env, other = (registry.make('gem', {'id': 'game:Game2048-v0-easy'}) for _ in range(2))
  alone = {seed: play(env, seed) for seed in (1, 2)}
  assert alone[1] != alone[2]
  assert play(env, 1) == alone[1]

  first, second = [checked_reset(env, 1)], [checked_reset(other, 2)]
  for move in MOVES:
    random.seed(7)  # other draws of this process have no effect
    np.random.seed(7)
    first.append(checked_step(env, move))
    second.append(checked_step(other, move))
  assert (first, second) == (alone[1], alone[2])


def test_gem_leaves_global_generators_and_logging_unchanged(gem, monkeypatch):
  monkeypatch.setattr(logging.root, 'handlers', [])
  before = np.random.get_state()[1].tolist(), logging.root.level
  random.seed(123)
  env = registry.make('gem', {'id': 'game:Game2048-v0-easy'})
  play(env, 1)
  env.sample_random_action()
  assert (np.random.get_state()[1].tolist(), logging.root.level) == before
  assert logging.root.handlers == []
  stream = random.Random(123)  # beartype draws from this stream too
  assert random.getrandbits(32) in [stream.getrandbits(32) for _ in range(10_000)]


def test_gem_gives_equal_episodes_in_threads_and_alone(gem):
  seeds = range(12)
  alone = [play(registry.make('gem', {'id': 'game:Game2048-v0-easy'}), seed) for seed in seeds]
  with ThreadPoolExecutor(6) as pool:
    envs = [registry.make('gem', {'id': 'game:Game2048-v0-easy'}) for _ in seeds]
    assert list(pool.map(play, envs, seeds)) == alone


def test_slow_gem_calls_have_independent_random_numbers():
  class Slow:
    def reset(self, seed):
      np.random.seed(seed)  # not `random`, from which beartype draws in any thread
      return '', {}

    def step(self, action):
      drawn = []
      for _ in range(5):
        drawn.append(float(np.random.random()))
        time.sleep(0.002)  # other calls run meanwhile
      return str(drawn), 0.0, True, True, {}

  alone = [play(Gem('slow', Slow()), seed, MOVES[:1]) for seed in range(4)]
  with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(lambda seed: play(Gem('slow', Slow()), seed, MOVES[:1]), range(4))) == alone


def test_gem_takes_the_games_arguments_and_any_seed(gem):
  env = registry.make('gem', {'id': 'game:Game2048-v0-easy', 'args': {'max_turns': 1}})
  assert play(env, 2**40 + 3)[1].done
  assert play(env, 2**40 + 3) == play(env, 3)


def test_a_gem_step_without_random_numbers_does_not_wait_for_others():
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
def test_a_gem_game_that_cannot_be_made_is_named(gem, args, complaint):
  with pytest.raises(SettingsError, match=complaint):
    registry.make('gem', args)
